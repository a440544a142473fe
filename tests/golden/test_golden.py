"""The numbers of the commands stay what they were, and what version 0.1.0 wrote is read."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import residua
from residua import cli
from residua.evaluate import Report
from residua.report.runs import read_run
from residua.train import read_metrics
from residua.train.config import Pretrain
from residua.train.samplefiles import described

from .make import HELP, HERE, READ, RUNS, committed, differences, flags, help_file, help_text, scores


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the runs of 0.1, in the working folder."""
    for path in RUNS.iterdir():
        shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", READ)
def test_numbers_stay(name: str) -> None:
    assert differences(committed(HERE, name), scores(name), 1e-4) == []


@pytest.mark.parametrize("command", HELP)
def test_options_stay(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    gone = json.loads((HERE / "names.json").read_text())["flags"]
    before = {gone.get(f"{command} {flag}", flag) for flag in flags(help_file(HERE, command).read_text())}
    assert before - {None} <= flags(help_text(command))


def test_numbers_that_changed_or_went_are_named() -> None:
    before = {"kNN | model | 1 | k=20": 31.25, "kNN | model | 2 | k=20": 50.0, "kNN: ci95 | model | 2 | k=20": None}
    assert differences(before, dict(before)) == []
    assert differences(before, before | {"kNN | model | 1 | k=20": 31.2500001}, 1e-4) == []
    assert differences(before, before | {"kNN | model | 1 | k=20": 31.2500001}) == [
        "kNN | model | 1 | k=20: 31.25 before, 31.2500001 now"
    ]
    told = differences(before, {"kNN | model | 1 | k=20": None, "kNN: ci95 | model | 2 | k=20": None})
    assert [text.rpartition(": ")[2] for text in told] == ["31.25 before, None now", "50.0 before, nothing now"]


def test_options_are_found_in_help() -> None:
    text = """
    │ -n INT, --n INT         How many, as --limit does. (default: 64) │
    │ -h, --help  show this message                                    │
    │ --flip, --no-flip       Mirror half; see --scale                 │
      --seeds N           seeds 0 to N - 1
    """
    assert flags(text) == {"--help", "--flip", "--no-flip", "--seeds", "--n"}


def test_a_run_is_read(runs: Path) -> None:
    model = residua.load("mae")
    assert (model.encoder.depth, model.preprocessing.img_size) == (3, (16, 16))
    assert Pretrain.read(runs / "mae/config.yaml").settings()["alpha_min"] == 0.7
    run = read_run("mae")
    assert run.notes == []
    assert [record["step"] for record in run.metrics] == list(range(1, 13))
    assert run.evaluation is not None
    stored = json.loads((runs / "mae/evaluation.json").read_text())
    assert isinstance(run.evaluation, Report)
    assert run.evaluation.value("kNN", layer=1) == next(
        s["value"] for s in stored["scores"] if (s["metric"], s["subject"], s["layer"]) == ("kNN", "model", 1)
    )
    assert run.evaluation.to_dict()["named_neighbors"] == stored["named_neighbors"]


def test_a_run_goes_on_from_its_checkpoint_and_gets_its_page(runs: Path) -> None:
    shutil.rmtree("mae/checkpoints/step-0000012")
    assert cli.main(["pretrain", "--out", "mae", "--resume"]) == 0
    for before, after in zip(read_metrics(RUNS / "mae"), read_metrics(runs / "mae"), strict=True):
        assert {name: after[name] for name in ("step", "epoch")} == {name: before[name] for name in ("step", "epoch")}
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-4)
    before, after = (Report.from_dict(json.loads((at / "mae/evaluation.json").read_text())) for at in (RUNS, runs))
    assert after.value("entropy rank") == pytest.approx(before.value("entropy rank"), abs=1e-3)
    assert "entropy rank" in (runs / "mae/report.html").read_text()


def test_runs_are_compared(runs: Path) -> None:
    shutil.copytree("mae", "again")
    assert cli.main(["compare", "mae", "again", "--out", "page.html"]) == 0
    assert "kNN" in (runs / "page.html").read_text()


def test_samples_are_read_and_added_to(runs: Path) -> None:
    folder = runs / "diffusion/samples/twelve"
    before = {file.name: file.read_bytes() for file in folder.glob("*.png")}
    assert described(folder)["n"] == len(before) == 12
    typed = ["sample", "diffusion", "--steps", "3"]
    assert cli.main([*typed, "-n", "14", "--guidance", "2", "--out", str(folder)]) == 0
    after = {file.name: file.read_bytes() for file in folder.glob("*.png")}
    assert (len(after), described(folder)["n"]) == (14, 14)
    assert after.items() >= before.items()
    array = folder.with_name("four.npz")
    kept, stamp = np.load(array)["arr_0"], array.stat().st_mtime_ns
    assert (kept.shape, kept.dtype, described(array)["n"]) == ((4, 8, 8, 1), np.uint8, 4)
    assert cli.main([*typed, "-n", "4", "--out", str(array)]) == 0  # which is there
    assert array.stat().st_mtime_ns == stamp
    assert described(folder.with_name("four.png"))["weights"] == described(array)["weights"]
    images = residua.sample(residua.load("diffusion"), 4, steps=3)
    assert (images.shape, images.dtype) == ((4, 1, 8, 8), torch.uint8)
