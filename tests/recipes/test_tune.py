"""A setting tuned for the baseline: by which images it is chosen, and what is run for it."""

import json
import math
from pathlib import Path

import pytest

from residua import cli
from residua.recipes import tune
from residua.recipes.sweep import plan, run

SWEEP = ["sweep", "--alpha-min", "1.0", "0.5", "--baseline", "alpha_min=1", "--seeds", "2"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Held-out accuracy by learning rate, the seed added; one that is not in it has none."""
    found = {"1e-3": 30.0, "2e-3": 34.0, "4e-3": 33.0}

    def held_out(run: Path) -> float:
        settings = dict(part.split("=") for part in run.name.split(","))
        return found.get(settings["lr"], math.nan) + int(settings["seed"])

    monkeypatch.setattr(tune, "held_out", held_out)
    return found


def test_the_baseline_is_tuned_first_and_the_others_get_its_value(
    tmp_path: Path, pretend, held: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*SWEEP, "--tune", "lr=1e-3,2e-3,4e-3", "--out", str(tmp_path / "s")]
    assert cli.main(args) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "tuned lr 2e-3: held-out probe 30.50 % at 1e-3, 34.50 % at 2e-3, 33.50 % at 4e-3" in printed
    assert "difference to alpha_min 1.0" in printed
    rates = [f"alpha_min=1.0,lr={rate},seed={seed}" for rate in held for seed in (0, 1)]
    assert pretend.names == [*rates, "alpha_min=0.5,lr=2e-3,seed=0", "alpha_min=0.5,lr=2e-3,seed=1"]
    assert cli.main(args) == 0
    assert len(pretend.names) == 8  # nothing again


def test_a_choice_at_the_end_and_values_that_failed_are_told(
    tmp_path: Path, pretend, held: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SWEEP, "--tune", "lr=2e-3,4e-3,8e-3", "--out", str(tmp_path / "s")]) == 0
    told = " ".join("".join(capsys.readouterr()).split())
    assert "left out of it, as runs failed: 8e-3" in told
    assert "lr 2e-3 is at the end of the values tried" in told


def test_without_labels_nothing_is_tuned(
    tmp_path: Path, pretend, held: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SWEEP, "--tune", "lr=5,6", "--out", str(tmp_path / "s")]) == 2
    assert "it needs labels" in " ".join(capsys.readouterr().err.split())
    assert len(pretend.names) == 4  # of the baseline; the others were not begun


def test_values_are_found_however_they_are_typed(tmp_path: Path, pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "held_out", lambda run: 7.0 if "lr=0.001" in run.name else 5.0)
    found = plan(tmp_path / "s", [], {"alpha_min": ["1.0"], "lr": ["0.001", "0.002"]})
    run(found)
    assert tune.tuned(found, "lr", ["2e-3", "1e-3"]) == {"1e-3": 7.0, "2e-3": 5.0}


def test_runs_of_earlier_calls_with_other_settings_or_seeds_have_no_part_in_it(
    tmp_path: Path, pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out accuracy of 5 at 1e-3 and 6 at 2e-3, but 90 of earlier runs at 1e-3: deeper, or with another seed."""
    out = tmp_path / "s"
    run(plan(out, [], {"alpha_min": ["1.0"], "lr": ["1e-3"], "depth": ["2", "4"], "seed": ["0", "1"]}))
    monkeypatch.setattr(
        tune, "held_out", lambda run: 6.0 if "lr=2e-3" in run.name else 5.0 if "depth=2,seed=0" in run.name else 90.0
    )
    found = plan(out, ["--depth", "2"], {"alpha_min": ["1.0"], "lr": ["1e-3", "2e-3"]})
    run(found)
    assert tune.tuned(found, "lr", ["1e-3", "2e-3"]) == {"2e-3": 6.0, "1e-3": 5.0}


def test_runs_that_are_left_unfinished_have_no_part_in_it(tmp_path: Path, pretend, held: dict[str, float]) -> None:
    rates = {"alpha_min": ["1.0"], "lr": ["1e-3", "2e-3"]}
    begun = plan(tmp_path / "s", [], rates | {"seed": ["0", "1"]})
    for trial in begun.trials:
        if trial.settings["seed"] == "1":
            begun.run_folder(trial).mkdir(parents=True)
            (begun.run_folder(trial) / "config.yaml").write_text("{}")
    found = plan(tmp_path / "s", [], rates | {"seed": ["0"]})
    run(found)
    assert [t.status for t in found.trials] == ["done", "done", "left", "left"]
    assert tune.tuned(found, "lr", ["1e-3", "2e-3"]) == {"2e-3": 34.0, "1e-3": 30.0}


def test_a_value_whose_run_failed_is_left_out(tmp_path: Path, pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "held_out", lambda run: 5.0)  # of an earlier evaluation, say
    found = plan(tmp_path / "s", [], {"alpha_min": ["0", "0.5"]})
    run(found)
    assert [trial.status for trial in found.trials] == ["failed", "done"]
    assert tune.tuned(found, "alpha_min", ["0", "0.5"]) == {"0.5": 5.0}


def test_the_held_out_images_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps({"probes": {"model": {"accuracy": 50.0, "best": {"held_out": 40.0}}}}))
    assert tune.held_out(tmp_path) == 40.0
    file.write_text(json.dumps({"probes": {}}))
    assert math.isnan(tune.held_out(tmp_path))
