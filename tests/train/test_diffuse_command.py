"""`residua diffuse`: samples and FID along training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import small_diffusion
from torch import Tensor, nn

from residua import cli
from residua.commands.diffuse import FidMonitor
from residua.data import DataError
from residua.evaluate import extractor
from residua.evaluate.extractor import Extractor
from residua.train import read_metrics
from residua.train.diffuse import prepare


class Colours(nn.Module):
    """Mean colours as features: their distance is soon small."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.float().mean((2, 3)) * self.weight


@pytest.fixture
def colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extractor:
    """What opening any extractor gives; references are kept in a folder of the test."""
    found = Extractor("colours", Colours(), "FID")
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(extractor, "open_extractor", lambda *_: found)
    return found


MEASURED = ["--sample-every", "0.8", "--fid-every", "1.6", "--samples", "4"]


@pytest.mark.usefixtures("colours")
def test_the_command_trains_shows_samples_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_diffusion(tmp_path / "unused").save(tmp_path / "settings.yaml")
    run = tmp_path / "run"
    args = ["diffuse", str(tmp_path / "settings.yaml"), "--out", str(run), *MEASURED, "--fid-samples", "30"]
    assert cli.main(args) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "U-ViT-nano" in said
    assert f"residua sample {run}" in said
    measured = {r["step"]: r["eval/fid"] for r in read_metrics(run) if "eval/fid" in r}
    assert list(measured) == [4, 8, 12]
    assert all(value > 0 for value in measured.values())
    how = "30 samples (dpm-solver, 50 steps, guidance 1) against 40 training images, extractor colours"
    assert f"fid      every 4 steps: {how}" in said
    assert f"fid {measured[12]:.2f} of {how}" in said
    assert "fewer than" not in said
    assert len(list((run / "samples").glob("*.png"))) == 6
    for step, value in measured.items():
        stored = json.loads((run / "samples" / f"step-{step:07d}-fid.json").read_text())
        assert stored["scores"] == {"FID": {"value": value}}
        made = stored["samples"]["made_by"]
        assert (made["sampler"], made["steps"], made["guidance"]) == ("dpm-solver", 50, 1.0)
        assert (made["training_steps"], stored["samples"]["images"]) == (step, 30)
        assert stored["extractor"]["name"] == "colours"


@pytest.mark.usefixtures("colours")
def test_a_finished_run_has_one_last_fid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed, it is measured again: the same, or by other samples another value in its place."""
    small_diffusion(tmp_path / "unused").save(tmp_path / "settings.yaml")
    run = tmp_path / "run"
    args = ["diffuse", str(tmp_path / "settings.yaml"), "--out", str(run), *MEASURED]
    assert cli.main([*args, "--fid-samples", "30"]) == 0, capsys.readouterr().err
    before = read_metrics(run)
    resumed = ["diffuse", "--out", str(run), "--resume", "--cpu"]
    assert cli.main(resumed) == 0, capsys.readouterr().err
    assert read_metrics(run) == before
    assert cli.main([*resumed, "--fid-samples", "20"]) == 0, capsys.readouterr().err
    *others, last = read_metrics(run)
    assert others == before[:-1]
    assert last.keys() == before[-1].keys()
    assert last["eval/fid"] != before[-1]["eval/fid"]


@pytest.mark.usefixtures("colours")
def test_fewer_samples_than_dimensions_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_diffusion(tmp_path / "unused", conditional=False).save(tmp_path / "settings.yaml")
    args = ["diffuse", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "run"), *MEASURED]
    assert cli.main([*args, "--fid-samples", "3"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert said.count("3 samples are fewer than the 4 that a covariance of 3 dimensions needs") == 1
    assert "50 steps, no guidance)" in said


def test_what_is_wrong_with_the_reference_shows_before_training(
    tmp_path: Path, colours: Extractor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_diffusion(tmp_path / "unused").save(tmp_path / "settings.yaml")
    args = ["diffuse", str(tmp_path / "settings.yaml"), *MEASURED, "--fid-samples", "30"]
    passed: list[int] = []
    colours.module.register_forward_hook(lambda module, given, out: passed.append(len(given[0])))
    session = prepare(small_diffusion(tmp_path / "run", sample_every=0.8, fid_every=1.6))
    FidMonitor(session)
    assert sum(passed) == 40
    assert cli.main([*args, "--out", str(tmp_path / "again")]) == 0
    assert sum(passed) == 40 + 3 * 30  # of the reference nothing again
    monkeypatch.setattr(Colours, "forward", lambda self, x: torch.linalg.inv(x.new_zeros(2, 2).float()))
    nn.init.constant_(colours.module.weight, 2.0)  # type: ignore[arg-type]
    vars(colours).pop("identity")
    assert cli.main([*args, "--out", str(tmp_path / "stopped")]) == 2
    assert "singular" in capsys.readouterr().err
    assert not (tmp_path / "stopped" / "metrics.jsonl").exists()


def test_a_fid_of_images_that_are_no_pictures_is_refused(tmp_path: Path) -> None:
    for i in range(8):
        np.save(tmp_path / f"{i}.npy", np.full((16, 16, 5), i, np.uint8))
    with pytest.raises(DataError, match=r"fid_every is for images of 1 or 3 channels; .* has 5"):
        prepare(small_diffusion(data=f"folder:{tmp_path}", conditional=False, sample_every=1, fid_every=1))
