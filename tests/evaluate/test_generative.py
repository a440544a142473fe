"""Scores of sets of images from end to end, with a small network in place of Inception."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from residua import cli
from residua.data import DataError
from residua.data.arrays import ArraySource
from residua.evaluate import (
    CacheError,
    FeatureCache,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
    statistics,
)
from residua.evaluate.extractor import Extractor
from residua.evaluate.generative import score
from residua.nn import ViT
from residua.train.checkpoint import write_checkpoint


@pytest.fixture
def seen(small: Extractor) -> Callable[[], int]:
    """How many images passed the extractor since the last call."""
    count = [0]
    small.module.register_forward_hook(lambda module, given, out: count.append(len(given[0])))

    def since() -> int:
        total = sum(count)
        count.clear()
        return total

    return since


def images(n: int, seed: int, channels: int = 3, size: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 200, (n, 1, 1, channels))
    return (colours + rng.integers(0, 56, (n, size, size, channels))).astype(np.uint8)


def source(n: int, seed: int, **options: int) -> ArraySource:
    return ArraySource(f"set{seed}", "train", images(n, seed, **options), None, None)


def features(net: Extractor, pixels: np.ndarray) -> Tensor:
    with torch.inference_mode():
        return net.module(torch.from_numpy(pixels).permute(0, 3, 1, 2))


def test_scores_are_those_of_the_features(small: Extractor) -> None:
    fake, real = source(60, 1), source(80, 2)
    found = score(
        fake, real, metrics=("fid", "kid", "prc"), extractor=small, subsets=5, subset_size=30, seed=3, k=2,
        batch_size=7, about={"sampler": "Euler", "steps": 10, "guidance": 1.5},
    )  # fmt: skip
    x, y = features(small, fake.images), features(small, real.images)
    assert found.value("Frechet distance") == pytest.approx(frechet_distance(statistics(x), statistics(y)), rel=1e-5)
    kid = kernel_distance(x, y, subsets=5, subset_size=30, seed=3)
    assert found.value("kernel distance") == pytest.approx(kid.mean, rel=1e-4)
    assert found.scores[1].std == pytest.approx(kid.std, rel=1e-4)
    shares = precision_recall(x, y, k=2)
    assert (found.value("precision"), found.value("recall")) == shares
    assert found.samples["made_by"] == {"sampler": "Euler", "steps": 10, "guidance": 1.5}
    assert not found.notes
    with pytest.raises(KeyError, match="no 'FID'; there are Frechet distance, kernel distance, precision, recall"):
        found.value("FID")


def test_only_inceptions_distances_are_called_fid_and_kid(small: Extractor) -> None:
    known = Extractor("Inception 2015-12-05", small.module, "FID")
    found = score(source(20, 1), source(20, 2), metrics=("fid", "kid"), extractor=known, subset_size=10, subsets=2)
    assert [s.name for s in found.scores] == ["FID", "KID"]


def test_the_inception_score_is_of_the_samples_alone(small: Extractor, seen, capsys) -> None:
    fake, real = source(60, 1), source(40, 2)
    net = replace(small, frechet="FID")
    with pytest.raises(ValueError, match="needs Inception's classifier, which this file of weights does not hold"):
        score(fake, metrics="isc", extractor=net)
    width = features(small, fake.images[:1]).shape[1]
    small.module.classifier = torch.randn(9, width, generator=torch.Generator().manual_seed(0)) * 20
    seen()
    found = score(fake, metrics="isc", extractor=net, seed=4)
    assert seen() == 60
    expected = inception_score(features(small, fake.images) @ small.module.classifier.T, seed=4)
    assert (found.scores[0].name, found.scores[0].settings) == ("Inception score", {"parts": 10, "seed": 4})
    assert (found.value("Inception score"), found.scores[0].std) == pytest.approx(expected, rel=1e-5)
    assert expected.mean > 1.05
    assert found.reference == {}
    assert found.notes == ["parts of 6 samples can show few of Inception's classes: the Inception score comes out too "
                           "small; 50,000 samples are usual"]  # fmt: skip
    assert "reference" not in found.table().title
    both = score(fake, real, metrics=("fid", "isc"), extractor=net, seed=4)
    assert both.value("Inception score") == found.value("Inception score")
    assert both.value("FID") == score(fake, real, extractor=net).value("FID")
    for wrong, options in {
        "is of Inception's classes; small": {"extractor": small},
        "mean over 10 parts of the samples, got 9": {"extractor": net, "limit": 9},
        "fid: give a reference, the real images": {"extractor": net, "metrics": ("isc", "fid")},
    }.items():
        seen()
        with pytest.raises(ValueError, match=wrong):
            score(fake, **{"metrics": "isc"} | options)
        assert seen() <= 1


def test_batches_as_they_are_made_give_the_same(small: Extractor) -> None:
    fake, real = source(30, 1), source(40, 2)
    batches = torch.from_numpy(fake.images).permute(0, 3, 1, 2).split(8)
    options = {"metrics": ("fid", "kid", "prc"), "extractor": small, "subsets": 3, "subset_size": 20}
    whole, streamed = score(fake, real, **options), score(iter(batches), real, **options)
    for a, b in zip(whole.scores, streamed.scores):
        assert a.value == pytest.approx(b.value, rel=1e-5)
    assert streamed.samples["images"] == 30
    for wrong, says in {
        "float32": [batches[0].float()],
        r"shape \(8, 1, 12, 12\)": [batches[0][:, :1]],
        "differ in size": [batches[0], batches[1][..., :6]],
        "at least 2 images, got 0": [],
    }.items():
        with pytest.raises(ValueError, match=wrong):
            score(says, real, extractor=small)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_sample_returns_is_scored_as_it_is(small: Extractor, channels: int) -> None:
    fake, real = source(30, 1, channels=channels), source(40, 2)
    tensor = torch.from_numpy(fake.images).permute(0, 3, 1, 2)
    options = {"extractor": small, "limit": 20, "img_size": 10}
    whole, given = score(fake, real, **options), score(tensor, real, **options)
    assert given.scores == whole.scores
    assert given.samples | {"name": "set1", "split": "train"} == whole.samples
    for wrong in (tensor.float(), tensor[0], tensor[:, :0], tensor.repeat(1, 5, 1, 1)[:, :5]):
        with pytest.raises(DataError, match=r"expected uint8 \(n, 3, H, W\)"):
            score(wrong, real, extractor=small)


def test_a_limit_holds_for_batches_and_asks_for_no_more(small: Extractor) -> None:
    fake, real, asked = source(30, 1), source(40, 2), []

    def batches():
        for images in torch.from_numpy(fake.images).permute(0, 3, 1, 2).split(8):
            asked.append(len(images))
            yield images

    few = score(batches(), real, extractor=small, limit=11)
    assert few.samples["images"] == 11
    assert asked == [8, 8]
    first = score(ArraySource("first", "train", fake.images[:11], None, None), real, extractor=small)
    assert few.scores[0].value == pytest.approx(first.scores[0].value, rel=1e-5)
    with pytest.raises(ValueError, match="limit must be at least 1 image, got 0"):
        score(batches(), real, extractor=small, limit=0)


def test_one_metric_by_its_name_and_paths(small: Extractor, tmp_path: Path) -> None:
    fake, real = tmp_path / "fake.npz", tmp_path / "real.npy"
    np.savez(fake, images(20, 1))
    np.save(real, images(30, 2))
    found = score(fake, real, metrics="prc", extractor=small)
    assert [s.name for s in found.scores] == ["precision", "recall"]
    assert found.scores == score(str(fake), str(real), metrics=("prc",), extractor=small).scores
    own = statistics(features(small, images(30, 2)))
    np.savez(tmp_path / "stats.npz", mu=own.mean.numpy(), sigma=own.cov.numpy())
    known = Extractor("Inception 2015-12-05", small.module, "FID")
    assert score(fake, tmp_path / "stats.npz", extractor=known).reference["name"] == "stats.npz"


def test_a_set_against_itself(small: Extractor) -> None:
    found = score(source(40, 1), source(40, 1), metrics=("fid", "prc"), extractor=small)
    assert found.value("Frechet distance") == pytest.approx(0, abs=1e-10)
    assert found.value("precision") == found.value("recall") == 1


def test_the_reference_is_computed_once(small: Extractor, seen, tmp_path: Path) -> None:
    fake, real, cache = source(10, 1), source(50, 2), tmp_path / "cache"
    first = score(fake, real, extractor=small, cache=cache)
    assert seen() == 60
    assert score(fake, real, extractor=small, cache=cache, batch_size=7).scores == pytest.approx(first.scores)
    assert seen() == 10
    assert not list(cache.rglob("features.*"))
    every = {"metrics": ("fid", "prc"), "extractor": small, "cache": cache}
    with_features = score(fake, real, **every)
    assert seen() == 60
    assert score(fake, real, **every).scores == with_features.scores
    assert seen() == 10
    assert with_features.scores[0] == first.scores[0]


def test_other_images_sizes_and_weights_are_computed_anew(small: Extractor, tmp_path: Path) -> None:
    fake, real = source(5, 1), source(20, 2)

    def computes(net: Extractor = small, **options) -> bool:
        cache = FeatureCache(tmp_path / "cache")
        score(fake, real, extractor=net, cache=cache, **options)
        return cache.computed > 0

    assert computes()
    assert not computes()
    assert computes(img_size=6)
    assert computes(reference_limit=10)
    assert not computes(limit=3)
    assert computes(bf16=True)
    real.images[0, 0, 0, 0] ^= 1
    assert computes()
    assert computes(Extractor("small", type(small.module)()))


def test_damaged_statistics_are_told_and_repaired(small: Extractor, tmp_path: Path) -> None:
    fake, real, notes = source(5, 1), source(20, 2), []
    options = {"extractor": small, "cache": FeatureCache(tmp_path / "cache", notes.append)}
    first = score(fake, real, **options)
    (file,) = (tmp_path / "cache").rglob("statistics.npz")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    for damage in (bytes(content), content[:100], b""):
        file.write_bytes(damage)
        assert score(fake, real, **options).scores == first.scores
        assert "damaged" in notes.pop()
        assert score(fake, real, **options).scores == first.scores
        assert not notes
    assert [p.name for p in file.parent.iterdir()] == ["statistics.npz"]


def test_a_cache_that_cannot_be_written_is_said(small: Extractor, seen, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot write statistics .*--no-cache"):
        score(source(5, 1), source(5, 2), extractor=small, cache=tmp_path / "file")
    assert seen() == 0

    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="could not be kept in .*No space left"):
        assert score(source(5, 1), source(5, 2), extractor=small, cache=tmp_path / "full").scores


def test_what_makes_scores_hard_to_compare_is_noted(small: Extractor) -> None:
    found = score(source(6, 1, size=8), source(50, 2, channels=1), metrics=("fid", "kid"), extractor=small, subsets=2)
    text = "\n".join(found.notes)
    assert "6 samples are fewer than the 7 that a covariance of 6 dimensions needs" in text
    assert "samples are 8 x 8 px, the reference 12 x 12 px" in text
    assert "subsets of 6 images instead of 1,000" in text
    assert "set2 is grey: its channel was repeated to three" in text
    assert len(found.notes) == 4


def test_what_cannot_be_scored_is_said_before_the_work(small: Extractor, seen, tmp_path: Path) -> None:
    fake, real = source(5, 1), source(20, 2)
    for says, options in {
        "unknown metrics is; there are fid, kid, prc": {"metrics": ("is",)},
        "5 neighbours need more than 5 images on either side, got 5 samples": {"metrics": ("prc",), "k": 5},
        "subsets of at least 2 images": {"subset_size": 1},
        "limit must be at least 1": {"limit": 0},
        "batch_size must be at least 1 image, got 0": {"batch_size": 0},
        "samples: a covariance needs at least 2 images, got 1": {"limit": 1},
        "images of the reference: a covariance needs at least 2 images, got 1": {"reference_limit": 1},
        "there is no extractor": {"extractor": "nothing"},
    }.items():
        with pytest.raises(ValueError, match=says):
            score(fake, real, **{"extractor": small} | options)
    assert seen() == 0


def test_features_that_are_not_numbers_are_said(small: Extractor) -> None:
    small.module.conv.bias.data[0] = torch.nan
    for metric in ("fid", "kid", "prc"):
        with pytest.raises(ValueError, match="NaN"):
            score(source(9, 1), source(9, 2), metrics=(metric,), extractor=small, subset_size=5)


def test_published_statistics_serve_fid_alone(small: Extractor, tmp_path: Path) -> None:
    fake, real = source(30, 1), source(40, 2)
    known = Extractor("Inception 2015-12-05", small.module, "FID")
    own = statistics(features(small, real.images))
    np.savez(tmp_path / "stats.npz", mu=own.mean.numpy(), sigma=own.cov.numpy())
    found = score(fake, str(tmp_path / "stats.npz"), extractor=known)
    assert found.value("FID") == pytest.approx(score(fake, real, extractor=known).value("FID"), rel=1e-6)
    assert found.reference == {"name": "stats.npz", "split": "", "images": None, "size": None}
    for options in ({"extractor": known, "metrics": ("kid",)}, {"extractor": small}):
        with pytest.raises(DataError, match="good for FID, nothing else"):
            score(fake, str(tmp_path / "stats.npz"), **options)
    usual = replace(known, about={"features": 2048})
    with pytest.raises(DataError, match=r"stats\.npz holds statistics of 6 dimensions; Inception's features have 2048"):
        score(fake, str(tmp_path / "stats.npz"), extractor=usual)
    np.savez(tmp_path / "stats.npz", mu=own.cov.numpy(), sigma=own.cov.numpy())
    with pytest.raises(DataError, match="are no mean and covariance"):
        score(fake, str(tmp_path / "stats.npz"), extractor=known)


def test_unreadable_images(small: Extractor, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for i, image in enumerate(images(8, 1)):
        Image.fromarray(image).save(folder / f"{i}.png")
    (folder / "3.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"3\.png"):
        score(str(folder), source(9, 2), extractor=small)
    found = score(str(folder), source(9, 2), extractor=small, on_bad_image="skip")
    assert found.samples["images"] == 7


# ---------------------------------------------------------------- the command


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    folder = tmp_path / "samples"
    folder.mkdir()
    for i, image in enumerate(images(30, 1)):
        Image.fromarray(image).save(folder / f"{i:03d}.png")
    (folder / "samples.json").write_text(json.dumps({"sampler": "DPM-Solver", "steps": 50, "guidance": 1.5}))
    return folder


def test_the_command(samples: Path, network: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "home"))
    args = ["score", f"folder:{samples}", "--reference", "shapes?n=40&size=12&test=4", "--extractor", str(network)]
    args += ["--device", "cpu", "--fid", "--kid", "--prc", "--subset-size", "20", "--subsets", "4"]
    assert cli.main(args) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "samples, 30 images of 12 x 12 px (sampler DPM-Solver, steps 50, guidance 1.5)",
        "shapes train, 40 images of 12 x 12 px",
        "network (layer 0, tokens, 8 px), 8 dimensions, float32",
        "subsets 4, subset_size 20, seed 0",
        f"reference: kept in {tmp_path / 'home' / 'references'}",
    ):
        assert text in out
    stored = json.loads((samples / "score.json").read_text())
    assert set(stored["scores"]) == {"Frechet distance", "kernel distance", "precision", "recall"}
    assert stored["scores"]["precision"]["k"] == 3
    assert stored["samples"]["made_by"]["steps"] == 50
    assert cli.main(args) == 0
    assert "reference: read from" in capsys.readouterr().out
    assert json.loads((samples / "score.json").read_text()) == stored


def test_the_command_with_arrays_and_a_run(samples: Path, vit: ViT, tmp_path: Path, capsys) -> None:
    from residua.data import Preprocessing

    vit.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.25,) * 3)
    write_checkpoint(tmp_path / "run", 1, vit, {})
    np.savez(tmp_path / "x.npz", images(30, 3))
    args = ["score", str(tmp_path / "x.npz"), "--reference", str(samples), "--extractor", str(tmp_path / "run")]
    assert cli.main([*args, "--no-cache", "--readout", "cls", "--device", "cpu", "--img-size", "10"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "run (layer 2, cls, 16 px), 32 dimensions" in out
    assert "of 10 x 10 px" in out
    assert (tmp_path / "x.score.json").is_file()


def test_samples_that_are_missing_are_noted(samples: Path, network: Path, tmp_path: Path, capsys) -> None:
    def notes(*options: str) -> list[str]:
        assert cli.main(["score", str(samples), *good, *options]) == 0
        capsys.readouterr()
        return [text for text in json.loads((samples / "score.json").read_text())["notes"] if "was made for" in text]

    good = ["--reference", str(samples), "--extractor", str(network), "--no-cache", "--device", "cpu"]
    (samples / "samples.json").write_text(json.dumps({"sampler": "DPM-Solver", "n": 30}))
    assert notes() == []
    (samples / "003.png").unlink()
    assert notes() == ["samples was made for 30 images; 29 are there"]
    assert notes("--limit", "5") == ["samples was made for 30 images; 29 are there"]
    (samples / "samples.json").write_text(json.dumps({"sampler": "DPM-Solver"}))
    assert notes() == []


def test_a_damaged_description_is_named_before_the_work(samples: Path, small: Extractor, seen) -> None:
    for damage in ("{", "[1, 2]"):
        (samples / "samples.json").write_text(damage)
        with pytest.raises(DataError, match=rf"^{samples}/samples.json is damaged: remove it"):
            score(samples, source(9, 2), extractor=small)
    assert seen() == 0
    (samples / "samples.json").unlink()
    assert score(samples, source(9, 2), extractor=small).samples["made_by"] == {}


def test_mistakes_at_the_command(samples: Path, network: Path, tmp_path: Path, capsys) -> None:
    def fails(*args: str) -> str:
        assert cli.main(["score", *args, "--no-cache", "--device", "cpu"]) == 2
        return " ".join(capsys.readouterr().err.split())

    good = ["--reference", str(samples), "--extractor", str(network)]
    assert "unknown data 'nothing'" in fails("nothing", *good)
    assert "there is no file" in fails(str(tmp_path / "none.npz"), *good)
    assert "no Inception weights at" in fails(str(samples), "--reference", str(samples), "--weights", "none.pth")
    assert "need more than 40 images" in fails(str(samples), *good, "--prc", "--k", "40")
    assert "the Inception score is of Inception's classes" in fails(str(samples), *good[2:], "--isc")
    assert "so give --reference" in fails(str(samples), *good[2:], "--isc", "--fid")
    assert not (samples / "score.json").exists()
