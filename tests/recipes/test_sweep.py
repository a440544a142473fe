"""Sweeps: the grid, what is run again, what a failure costs, and what the numbers come to."""

import json
import math
import sys
from pathlib import Path

import pytest
from scipy import stats

from residua import cli
from residua.evaluate import Report, Score
from residua.recipes import sweep
from residua.recipes.sweep import Sweep, Trial, mean_and_interval, plan, run, summarise, write_summary

TINY = """
--data shapes?n=48&size=16&test=16 --size nano --depth 2 --embed-dim 32 --num-heads 2 --decoder-embed-dim 32
--decoder-depth 1 --patch-size 4 --batch-size 16 --steps 4 --cpu
""".split()  # noqa: SIM905


def evaluation(value: float) -> str:
    report = Report("shapes", "tokens", [1], (16, 16), 10, 10, "test split", 0)
    report.scores.append(Score("kNN", "model", 1, value, "%", {"k": 20, "T": 0.07}))
    report.scores.append(Score("entropy rank", "model", 1, value / 10, "nats", {"n": 10, "of": "test"}))
    return report.to_json()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that only write a score: 10 x alpha_min + seed; alpha 0 fails. Returns the names of those begun."""
    begun: list[str] = []

    def command(plan: Sweep, trial: Trial) -> list[str]:
        begun.append(trial.name)
        alpha, seed = float(trial.settings["alpha_min"]), int(trial.settings.get("seed", 0))
        folder = plan.run_folder(trial)
        fail = "sys.exit('error: no shortcut left')" if alpha == 0 else ""
        write = (
            f"import sys, pathlib; print('working'); {fail};"
            f"d = pathlib.Path({str(folder)!r}); d.mkdir(parents=True);"
            f"(d / 'evaluation.json').write_text({evaluation(10 * alpha + seed)!r})"
        ).replace("; ;", ";")
        return [sys.executable, "-c", write]

    monkeypatch.setattr(sweep, "command", command)
    return begun


def test_the_grid_is_every_combination_with_names_to_find_them_by(tmp_path: Path) -> None:
    found = plan(tmp_path, ["recipe"], {"alpha_min": ["1.0", "0.9"], "seed": ["0", "1", "2"]})
    assert len(found.trials) == 6
    assert found.trials[4].name == "alpha_min=0.9,seed=1"
    assert found.trials[4].group == (("alpha_min", "0.9"),)
    flags = sweep.command(found, found.trials[4])
    assert flags[3:] == [
        "pretrain", "recipe", "--alpha-min", "0.9", "--seed", "1", "--out", str(tmp_path / "runs/alpha_min=0.9,seed=1"),
    ]  # fmt: skip
    assert Trial({"data": "folder:/a b/c"}).name == "data=folder--a-b-c"


def test_a_failure_is_listed_and_costs_the_others_nothing(tmp_path: Path, pretend: list[str]) -> None:
    ended: list[str] = []
    found = plan(tmp_path, [], {"alpha_min": ["1.0", "0", "0.8"]})
    run(found, jobs=2, on_end=lambda trial: ended.append(trial.name))
    assert sorted(ended) == ["alpha_min=0", "alpha_min=0.8", "alpha_min=1.0"]
    assert {t.settings["alpha_min"]: t.status for t in found.trials} == {"1.0": "done", "0": "failed", "0.8": "done"}
    assert found.trials[1].error == "error: no shortcut left"
    assert json.loads((tmp_path / "sweep.json").read_text())["trials"][1]["status"] == "failed"
    assert {s.settings["alpha_min"] for s in summarise(found)} == {"1.0", "0.8"}


def test_what_is_done_is_not_done_again_and_a_sweep_can_grow(tmp_path: Path, pretend: list[str]) -> None:
    run(plan(tmp_path, ["r"], {"alpha_min": ["1.0"], "seed": ["0"]}))
    run(plan(tmp_path, ["r"], {"alpha_min": ["1.0"], "seed": ["0"]}))
    assert pretend == ["alpha_min=1.0,seed=0"]
    grown = plan(tmp_path, ["r"], {"alpha_min": ["0.9"], "seed": ["0", "1"]})
    run(grown)
    assert pretend[1:] == ["alpha_min=0.9,seed=0", "alpha_min=0.9,seed=1"]
    assert len(summarise(grown)) == 4  # two scores of two settings: the earlier run still counts
    with pytest.raises(ValueError, match="holds another sweep"):
        plan(tmp_path, ["other"], {"alpha_min": ["1.0"]})


def test_a_run_that_was_begun_is_continued(tmp_path: Path) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0"]})
    folder = found.run_folder(found.trials[0])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    assert sweep.command(found, found.trials[0])[-1] == "--resume"


def test_mean_and_interval_over_seeds(tmp_path: Path, pretend: list[str]) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0", "0.5"], "seed": ["0", "1", "2"]})
    run(found, jobs=3)
    summaries = {(s.settings["alpha_min"], s.score): s for s in summarise(found)}
    knn = summaries["0.5", "kNN (k 20, T 0.07)"]
    assert knn.values == (5.0, 6.0, 7.0)
    assert knn.mean == 6.0
    low, high = stats.t.interval(0.95, 2, loc=6.0, scale=stats.sem(knn.values))
    assert (knn.mean - knn.ci95, knn.mean + knn.ci95) == pytest.approx((low, high))
    assert str(knn) == "6.0 ± 2.5"
    assert math.isnan(mean_and_interval([3.0])[1])
    write_summary(found, list(summaries.values()))
    header, *rows = (tmp_path / "summary.csv").read_text().splitlines()
    assert header == "alpha_min,score,unit,mean,ci95,seeds"
    assert len(rows) == 4
    assert json.loads((tmp_path / "summary.json").read_text())[0]["values"] == [10.0, 11.0, 12.0]


def test_the_command_from_grid_to_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    args = ["sweep", *TINY, "--alpha-min", "1.0", "0.8", "--jobs", "2", "--out", str(out), "--eval-every", "1"]
    assert cli.main(args) == 0
    printed = capsys.readouterr().out
    assert "2 runs" in printed
    assert "linear probe" in printed
    page = (out / "sweep.html").read_text()
    assert "Along training" in page
    assert "alpha_min 0.8" in page
    assert (out / "runs" / "alpha_min=0.8" / "report.html").exists()
    assert cli.main(args) == 0
    assert "2 of them finished before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--alpha-min", "1.0"], "nothing is swept"),
        (["--alpha-mim", "1.0", "0.9"], "did you mean alpha_min"),
        (["--seeds", "0", "--alpha-min", "1.0", "0.9"], "one whole number"),
        (["--seeds", "2", "--seed", "1", "2"], "not both"),
        (["mae-shapes", "oops", "--seeds", "2"], "belongs to no setting"),
        (["--seeds", "2", "--resume"], "not for sweeps"),
        (["mae-shape", "--seeds", "2"], "did you mean mae-shapes"),
        (["nowhere.yaml", "--seeds", "2"], "no settings file"),
    ],
)
def test_wrong_inputs(args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["sweep", *args, "--out", str(tmp_path / "x")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_settings_that_are_pairs_are_shared(tmp_path: Path) -> None:
    from residua.cli.sweep import _split

    fixed, grid = _split({"scale": ["0.2", "1.0"], "alpha_min": ["1.0", "0.9"], "no_flip": [], "lr": ["1e-3"]})
    assert fixed == ["--scale", "0.2", "1.0", "--no-flip", "--lr", "1e-3"]
    assert grid == {"alpha_min": ["1.0", "0.9"]}
