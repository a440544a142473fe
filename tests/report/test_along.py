"""What a comparison says about training: groups by alpha_min, correlations, and words where they are undefined."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from residua.evaluate.dynamics import KNN, PROBE, RANK, Dynamics, Point
from residua.report import Page, compare
from residua.report.along import along_training, groups
from residua.report.runs import read_runs

Make = Callable[..., Path]
Read = Callable[[Path], Any]


def points(names: list[str]) -> list[Point]:
    shape = [(RANK, lambda i, s: i + s), (PROBE, lambda i, s: 40 - i * s), (KNN, lambda i, s: 7.0)]
    return [Point(n, s, s / 2, m, 3, float(f(i, s))) for i, n in enumerate(names) for s in (1, 2) for m, f in shape]


def test_runs_are_grouped_by_alpha_where_nothing_else_but_the_seed_differs(make_run: Make) -> None:
    runs = [make_run(f"r{i}", alpha_min=a, seed=i) for i, a in enumerate((1.0, 0.8, 0.8))]
    assert groups(read_runs(runs)) == {"alpha_min 0.8 (2 runs)": ["r1", "r2"], "alpha_min 1 (1 run)": ["r0"]}
    assert list(groups(read_runs(runs[:2]))) == ["alpha_min 0.8", "alpha_min 1"]
    runs.append(make_run("deep", alpha_min=0.8, depth=9))
    assert list(groups(read_runs(runs))) == ["r0", "r1", "r2", "deep"]


def test_correlation_over_three_runs_is_shown(make_run: Make, tmp_path: Path, read_page: Read) -> None:
    runs = [make_run(name, alpha_min=a) for name, a in (("a", 0.7), ("b", 0.8), ("c", 1.0))]
    page = Page("x")
    along_training(page, read_runs(runs), Dynamics(points(["a", "b", "c"]), ["a, step 3 could not be measured"]))
    text = read_page(page.save(tmp_path / "x.html")).text
    assert "Pearson's correlation between entropy rank and linear probe" in text
    assert "one of the two is the same in all runs" in text, "kNN is constant"
    assert "could not be measured" in text
    assert "undefined" not in text


@pytest.mark.parametrize("count", [1, 2])
def test_correlation_below_three_runs_is_said_to_be_undefined(
    make_run: Make, tmp_path: Path, read_page: Read, count: int
) -> None:
    runs = [make_run(name, alpha_min=a) for name, a in (("a", 0.7), ("b", 0.8))]
    page = Page("x")
    along_training(page, read_runs(runs), Dynamics(points(["a", "b"][:count])))
    text = read_page(page.save(tmp_path / "x.html")).text
    assert "The correlation over runs is undefined here" in text
    assert f"at most {count} run" in text
    assert "Pearson" not in text


def test_one_run_along_training(quick_demo: Any, tmp_path: Path, read_page: Read) -> None:
    run = quick_demo[0].parent / "plain"
    found = read_page(compare([run], tmp_path / "c.html", along=True, limit=64))
    assert "Along the training of plain" in found.text
    assert "No setting differs" not in found.text


def test_real_runs_along_training(quick_demo: Any, tmp_path: Path, read_page: Read) -> None:
    runs = [quick_demo[0].parent / name for name in ("fading", "plain")]
    told: list[str] = []
    found = read_page(compare(runs, tmp_path / "c.html", along=True, limit=60, on_message=told.append))
    assert told == ["fading: step 8", "plain: step 8"], "the demo keeps one checkpoint"
    assert "linear probe of the last block by epoch" in found.text
    assert "Too few checkpoints for a curve: fading (1), plain (1)" in found.text
    assert "undefined here: at most 2 runs" in found.text
    compare(runs, tmp_path / "c.html", along=True, limit=60, on_message=told.append)
    assert len(told) == 2, "measured once"
