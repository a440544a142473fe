"""Scores of a run of a diffusion model: its samples are planned, checked, and made."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

from residua import cli
from residua.data import DataError
from residua.data.arrays import ArraySource
from residua.evaluate.extractor import open_extractor
from residua.evaluate.generative import score
from residua.nn import create_model
from residua.train.checkpoint import write_checkpoint


def diffusion_run(run: Path, channels: int = 3) -> nn.Module:
    """A run of an untrained U-ViT; its model."""
    from residua.data import Preprocessing
    from residua.nn.diffusion import VP

    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": channels}
    model = create_model("uvit", **shape)
    half = (0.5,) * channels
    model.process, model.preprocessing = VP(), Preprocessing((8, 8), half, half, channels)
    write_checkpoint(run, 1, model, {})
    (run / "config.yaml").write_text("data: {data: 'shapes?n=20&size=12&test=4', img_size: 8}\n")
    return model


def test_a_run_is_scored_by_its_first_samples(network: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    diffusion_run(run)

    def scored(n: int) -> dict:
        options = ["--extractor", str(network), "--no-cache", "--device", "cpu", "--out", str(tmp_path / "score.json")]
        assert cli.main(["score", str(run), "-n", str(n), *options]) == 0
        assert f" n {n}," in " ".join(capsys.readouterr().out.split())
        return json.loads((tmp_path / "score.json").read_text())

    few, many, again = scored(4), scored(9), scored(4)
    assert again == few
    assert (few["samples"]["images"], many["samples"]["images"]) == (4, 9)
    (made,) = (run / "samples").iterdir()
    Image.new("RGB", (8, 8)).save(made / "000000-mine.png")
    assert scored(4) == few
    pixels = np.stack([np.array(Image.open(made / f"{i:06d}.png")) for i in range(4)])
    own = score(ArraySource("own", "train", pixels, None, None), "shapes?n=20&size=12&test=4", img_size=8,
                extractor=open_extractor(str(network)))  # fmt: skip
    assert few["scores"]["Frechet distance"]["value"] == pytest.approx(own.scores[0].value, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--extractor", "inception", "--weights", "none.pth"], "no Inception weights at none.pth"),
        (["--extractor", "nothing"], "there is no extractor 'nothing'"),
        (["--reference", "folder:nowhere"], "nowhere does not exist"),
        (["--prc", "--k", "6"], "need more than 6 images on either side, got 6 samples"),
        (["--prc", "--k", "4", "--limit", "4"], "need more than 4 images on either side, got 4 samples"),
        (["--reference-limit", "1"], "images of the reference: a covariance needs at least 2 images, got 1"),
        (["-n", "1"], "samples: a covariance needs at least 2 images, got 1"),
        (["-n", "0"], "n is 0; expected a whole number, at least 1"),
        (["--reference", "stats.npz"], "holds a mean and a covariance of Inception's features"),
        (["--latents", "some/vae"], "this model was trained on pixels: leave --latents out"),
        (["--out", "."], "--out . is a folder"),
    ],
)
def test_a_run_is_refused_before_anything_is_made(
    options: list[str], words: str, network: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    from residua.evaluate import generative

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generative, "summarize", lambda *_, **__: pytest.fail("images were extracted"))
    np.savez("stats.npz", mu=np.zeros(6), sigma=np.eye(6))
    diffusion_run(tmp_path / "run")
    args = ["score", "run", "-n", "6", "--extractor", str(network), "--no-cache", "--device", "cpu", *options]
    assert cli.main(args) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run" / "samples").exists()


def test_a_run_of_many_channels_cannot_be_scored(network: Path, tmp_path: Path, capsys) -> None:
    diffusion_run(tmp_path / "run", channels=5)
    args = ["score", str(tmp_path / "run"), "-n", "6", "--extractor", str(network), "--device", "cpu"]
    assert cli.main([*args, "--reference", "shapes?n=9"]) == 2
    assert "makes images of 5 channels; images to score have 1 or 3" in capsys.readouterr().err
    assert not (tmp_path / "run" / "samples").exists()


def test_a_run_stands_for_its_samples_and_its_images(network: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    model = diffusion_run(run)
    args = ["score", str(run), "-n", "6", "--extractor", str(network), "--no-cache", "--device", "cpu"]
    assert cli.main(args) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "6 images of 8 x 8 px (sampler dpm-solver, steps 50" in out
    assert "shapes train, 20 images of 8 x 8 px" in out
    (made,) = (run / "samples").iterdir()
    assert made.name.startswith("step-0000001-dpm-solver-50-seed0-")
    assert len(list(made.glob("*.png"))) == 6
    before = {file: file.stat().st_mtime_ns for file in made.glob("*.png")}
    assert cli.main(args) == 0  # nothing is made twice
    assert {file: file.stat().st_mtime_ns for file in made.glob("*.png")} == before
    write_checkpoint(run, 2, model, {})  # it has trained on
    assert cli.main(args) == 0
    assert "step-0000002-dpm-solver-50-seed0-" in "".join(capsys.readouterr().out.split())
    (run / "config.yaml").unlink()
    assert cli.main(args) == 2
    assert "give --reference" in capsys.readouterr().err


def test_a_run_is_compared_with_the_images_that_it_saw(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for i in range(20):
        file = tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(file)
    monkeypatch.chdir(tmp_path)
    diffusion_run(tmp_path / "run")
    Path("run/config.yaml").write_text("data: {data: 'folder:pictures', img_size: 8}\n")
    Path("run/environment.json").write_text(json.dumps({"cwd": str(tmp_path)}))
    args = ["score", "run", "-n", "4", "--extractor", str(network), "--no-cache", "--device", "cpu"]
    for options, seen in (([], "train, 18"), (["--reference-split", "test"], "test, 2")):
        assert cli.main([*args, *options]) == 0
        assert f"reference pictures {seen} images" in " ".join(capsys.readouterr().out.split())
    monkeypatch.chdir(tmp_path / "pictures")
    assert cli.main(["score", str(tmp_path / "run"), *args[2:]]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "it is relative to" in said
    assert "give --reference" in said


@pytest.mark.parametrize("data", ["shapes?n=20&size=8&test=4", "folder:flat", "folder:split"])
def test_a_reference_is_kept_once_for_a_run_and_for_its_samples(
    data: str, network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """A run brings the reference to the size of its samples, which it has."""
    monkeypatch.chdir(tmp_path)
    for i in range(20):
        for folder in ("flat", f"split/train/{'ab'[i % 2]}"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (i, i * i % 200, 0)).save(f"{folder}/{i}.png")
    diffusion_run(tmp_path / "run")
    Path("run/config.yaml").write_text(f"data: {{data: '{data}', img_size: 8}}\n")
    options = ["--extractor", str(network), "--cache-dir", "kept", "--device", "cpu"]
    assert cli.main(["score", "run", "-n", "4", *options]) == 0
    assert "reference: kept in kept" in capsys.readouterr().out
    (samples,) = Path("run/samples").iterdir()
    assert cli.main(["score", str(samples), "--reference", data, *options]) == 0
    assert "reference: read from kept" in capsys.readouterr().out
    assert len(list(Path("kept").rglob("statistics.npz"))) == 1


@pytest.mark.parametrize("options", [["-n", "4"], ["--latents", "ae"]])
def test_what_is_for_runs_alone_is_refused_of_others(options: list[str], tmp_path: Path, capsys) -> None:
    assert cli.main(["score", str(tmp_path), "--reference", "shapes", *options]) == 2
    assert "-n and --latents are for those" in capsys.readouterr().err


def test_a_run_whose_autoencoder_has_moved(network: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    from residua.data import Preprocessing, autoencoder
    from residua.nn.diffusion import VP

    space = autoencoder.LatentSpace("gone", 3, 2, 1.0, 0.0, "hash")

    class Doubling:
        def __init__(self, name: str) -> None:
            if name != "moved":
                raise DataError(f"there is no autoencoder at {name}")
            self.space = replace(space, name=name)

        def to(self, device: object) -> "Doubling":
            return self

        def decode(self, x: Tensor) -> Tensor:
            return nn.functional.interpolate(x, scale_factor=2.0)

    monkeypatch.setattr(autoencoder, "_open", Doubling)
    model = create_model("uvit", img_size=4, patch_size=2, embed_dim=16, depth=2, num_heads=2)
    model.process, model.preprocessing, model.autoencoder = VP(), Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3), space
    write_checkpoint(tmp_path / "run", 1, model, {})
    (tmp_path / "run" / "config.yaml").write_text("data: {data: 'shapes?n=20&size=12&test=4', img_size: 8}\n")
    args = ["score", str(tmp_path / "run"), "-n", "6", "--extractor", str(network), "--no-cache", "--device", "cpu"]
    assert cli.main(args) == 2
    assert "no autoencoder at gone" in capsys.readouterr().err
    assert not (tmp_path / "run" / "samples").exists()
    assert cli.main([*args, "--latents", "moved"]) == 0
    assert "6 images of 8 x 8 px" in " ".join(capsys.readouterr().out.split())
