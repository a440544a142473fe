"""Options of `score` arrive where they count, and its report says what the numbers depend on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from residua.data.arrays import ArraySource
from residua.evaluate import generative as module
from residua.evaluate.extractor import Extractor
from residua.evaluate.generative import GenerativeScore, score


def source(n: int, seed: int, channels: int = 3) -> ArraySource:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 8, 8, channels), dtype=np.uint8)
    return ArraySource(f"set{seed}", "train", pixels, None, None)


def test_numbers_are_printed_with_the_digits_that_are_usual() -> None:
    """FID with two, KID and its spread with five, shares with three."""
    assert str(GenerativeScore("FID", 12.3456)) == str(GenerativeScore("Frechet distance", 12.3456)) == "12.35"
    assert str(GenerativeScore("KID", 0.0123456, 0.0009876)) == "0.01235 ± 0.00099"
    assert str(GenerativeScore("precision", 0.71828)) == "0.718"


def test_the_file_has_all_that_is_printed(small: Extractor, tmp_path: Path) -> None:
    options = {"metrics": ("fid", "kid"), "subsets": 3, "subset_size": 5, "seed": 4}
    found = score(source(9, 1), source(9, 2), extractor=small, **options)
    stored = json.loads(found.save(tmp_path / "new" / "score.json").read_text())
    kid = found.scores[1]
    assert stored["scores"]["kernel distance"] == {
        "value": kid.value, "std": kid.std, "subsets": 3, "subset_size": 5, "seed": 4
    }  # fmt: skip
    assert stored["scores"]["Frechet distance"] == {"value": found.scores[0].value}
    assert stored["extractor"] == {"name": small.name, "dimensions": 6, "precision": "float32", **small.identity}
    half = score(source(9, 1), source(9, 2), extractor=small, bf16=True)
    assert half.extractor["precision"] == "bf16"


def test_each_side_has_its_own_split(small: Extractor) -> None:
    data = "shapes?n=12&size=8&test=7"
    found = score(data, data, extractor=small, split="test", reference_split="train")
    assert [(side["split"], side["images"]) for side in (found.samples, found.reference)] == [
        ("test", 7),
        ("train", 12),
    ]
    assert "shapes test, 7 images of 8 x 8 px" in str(found.table().title)


def test_the_extractor_is_opened_as_asked(small: Extractor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def opened(*args: Any, **options: Any) -> Extractor:
        asked.append((args, options))
        return small

    monkeypatch.setattr(module, "open_extractor", opened)
    score(source(9, 1), source(9, 2), extractor="mine", weights="file", readout="cls", layer=3)
    assert asked == [(("mine", "file"), {"readout": "cls", "layer": 3})]


def test_what_is_known_of_samples_is_told_and_may_be_overruled(small: Extractor, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    for i, image in enumerate(source(9, 1).images):
        Image.fromarray(image).save(folder / f"{i}.png")
    (folder / "samples.json").write_text(json.dumps({"sampler": "Euler", "steps": 10, "n": 9}))
    found = score(folder, source(9, 2), extractor=small, limit=5, about={"steps": 20})
    assert found.samples["made_by"] == {"sampler": "Euler", "steps": 20, "n": 5}


def test_notes_of_the_extractor_and_of_grey_samples_are_kept(small: Extractor) -> None:
    known = Extractor("mine", small.module, notes=("a word about it",))
    found = score(source(30, 1, channels=1), source(30, 2), extractor=known)
    assert found.notes == ["a word about it", "set1 is grey: its channel was repeated to three"]
    few = score(source(5, 1), source(30, 2), metrics="prc", extractor=small)
    assert few.notes == []  # no covariance was asked for


def test_a_limit_draws_by_the_seed(small: Extractor) -> None:
    values = [score(source(60, 1), source(30, 2), extractor=small, limit=20, seed=s).scores[0].value for s in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": ()}, "unknown metrics none; there are fid, kid, prc"),
        ({"metrics": "kid", "subsets": 0}, "got 0 of 1000"),
    ],
)
def test_nothing_to_compute_is_refused(options: dict[str, Any], said: str, small: Extractor) -> None:
    with pytest.raises(ValueError, match=said):
        score(source(9, 1), source(9, 2), extractor=small, **options)


def test_several_processes_are_refused(small: Extractor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "world", lambda: (0, 2))
    with pytest.raises(RuntimeError, match="score runs in one process"):
        score(source(9, 1), source(9, 2), extractor=small)


def test_scoring_leaves_chance_as_it_was() -> None:
    class Chance(torch.nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images.float().mean((2, 3))) + torch.rand(len(images), 3)

    net = Chance(3, 3)
    torch.manual_seed(0)
    expected = torch.rand(3)
    batches = [torch.from_numpy(source(9, 1).images).permute(0, 3, 1, 2)]
    for samples in (source(9, 1), batches):
        torch.manual_seed(0)
        score(samples, source(9, 2), extractor=Extractor("noisy", net))
        assert torch.equal(torch.rand(3), expected)


def test_an_extractor_without_weights() -> None:
    class Colours(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.float().mean((2, 3))

    means = [source(40, seed).images.astype(np.float64).mean((1, 2)) for seed in (1, 2)]
    (a, b), (p, q) = [x.mean(0) for x in means], [np.cov(x.T) for x in means]
    expected = ((a - b) ** 2).sum() + np.trace(p + q) - 2 * np.sqrt(np.linalg.eigvals(p @ q).real).sum()
    found = score(source(40, 1), source(40, 2), extractor=Extractor("colours", Colours())).scores[0].value
    assert found == pytest.approx(expected, rel=1e-4)
