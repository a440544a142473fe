"""Comparisons: exactly the settings that differ, every number, and plain words about what is missing."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from residua.report import NotARun, compare, comparison_table
from residua.report.compare import differing_settings
from residua.report.runs import read_runs

Make = Callable[..., Path]
Read = Callable[[Path], Any]


def printed(table: object) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_only_settings_that_differ_are_shown(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a", alpha_min=0.9, seed=1), make_run("b", knn=39.25, alpha_min=1.0, scale=(0.5, 1.0), seed=1)]
    differing = differing_settings(read_runs(runs))
    assert differing == {"scale": ["0.2, 1", "0.5, 1"], "alpha_min": ["0.9", "1"]}
    text = read_page(compare(runs, tmp_path / "c.html")).text
    assert "alpha_min" in text
    assert "weight_decay" not in text
    for number in ("41.5 %", "39.2 %", "21.5 %", "29.2 %", "39.5 %", "1.23 nats"):  # both runs, baselines, layers
        assert number in text
    assert "same seed" in text


def test_three_runs_one_without_evaluation(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a"), make_run("b", knn=None, seed=3), make_run("c", knn=50.0)]
    text = read_page(compare(runs, tmp_path)).text
    assert (tmp_path / "comparison.html").exists()
    assert "b has not been evaluated" in text
    assert "50.0 %" in text
    table = printed(comparison_table(runs))
    assert "50.0 %" in table
    assert "not evaluated" in table


def test_equal_runs_say_so(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a", knn=None), make_run("b", knn=None)]
    assert "No setting differs" in read_page(compare(runs, tmp_path / "c.html")).text


def test_hostile_and_equal_folder_names(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("x/<b>[red]$_"), make_run("y/<b>[red]$_", seed=4)]
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert "x/<b>[red]$_" in found.text
    assert "b" not in found.tags
    assert "y/<b>[red]$_" in printed(comparison_table(runs))


def test_no_runs(tmp_path: Path, make_run: Make) -> None:
    run, out = make_run("a"), tmp_path / "c.html"
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARun, match="two or more"):
        compare([run], out)
    with pytest.raises(NotARun, match="no such folder"):
        compare([run, tmp_path / "nowhere"], out)
    with pytest.raises(NotARun, match=r"no config\.yaml"):
        compare([run, tmp_path / "empty"], out)
    with pytest.raises(NotARun, match="twice"):
        compare([run, run], out)
    (run / "evaluation.json").write_text("{ broken")
    with pytest.raises(NotARun, match="cannot be read"):
        compare([run, make_run("b")], out)
    assert not out.exists()


def test_real_runs_side_by_side(tmp_path: Path, quick_demo: Any, read_page: Read) -> None:
    runs = [quick_demo[0].parent / name for name in ("fading", "plain")]
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert list(differing_settings(read_runs(runs))) == ["alpha_min"]
    assert "Reconstructions" in found.text
    assert "principal components" in found.text
    assert sum(r.startswith("data:image/png") for r in found.refers) == 2
