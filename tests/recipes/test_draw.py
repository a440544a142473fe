"""docs/draw.py: every figure of numbers comes from a record."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from residua.evaluate import Report, Score
from residua.recipes.summary import summarise, write_summary
from residua.recipes.sweep import plan, run

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def draw():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_of_the_results_is_drawn_here(draw, tmp_path: Path) -> None:
    drawn = {path.name for path in draw.numbers(tmp_path)}
    assert "choosing-alpha-gain.png" in drawn
    drawn |= {f"{prefix}-{name}.png" for prefix, names in draw.SHOWN.items() for name in names}
    pages = [page for name in ("results.md", "choosing-alpha.md") if (page := DOCS / name).exists()]
    shown = {name for page in pages for name in re.findall(r"\(images/([^)]+)\)", page.read_text())}
    assert shown <= drawn
    assert (tmp_path / "tiny-imagenet-linear-probe.png").stat().st_size > 5_000


def test_gains_by_step_are_over_the_first_run_and_end_where_both_do(draw, tmp_path: Path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(draw, "step_curves", lambda *args: drawn.append(args))
    monkeypatch.setattr(draw, "save", lambda figure, path: path)
    monkeypatch.setattr(draw, "RECORDS", tmp_path)
    monkeypatch.setattr(draw, "CHOOSING", {"mine": "title"})
    monkeypatch.setattr(draw, "RUNS", {"mine": {"1.0": "plain", "0.9": "ended", "0.8": "open"}})
    assert draw.choosing_alpha(tmp_path) == []
    for name, probe, last in (("plain", 20.0, 30.0), ("ended", 22.0, 35.0), ("open", 19.0, None)):
        (tmp_path / name).mkdir()
        rows = [{"step": 10, "eval/linear_probe": probe}, {"step": 15, "loss": 1.0}, {"step": 20, "loss": 0.5}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if last is not None:
            report = Report("shapes", "tokens", [0, 1], (16, 16), 10, 10, "test split", 0)
            for layer, value in ((1, last), (0, 99.0)):
                report.scores.append(Score("linear probe", "model", layer, value, "%", {"readout": "tokens"}))
            report.save(tmp_path / name / "evaluation.json")
    assert draw.choosing_alpha(tmp_path) == [tmp_path / "choosing-alpha-gain.png"]
    assert drawn[0][1:] == ({"title": {"0.9": {10: 2.0}, "0.8": {10: -1.0}}}, {"title": {"0.9": (20, 5.0)}})


def test_a_recorded_sweep_is_drawn_with_its_gains(draw, tmp_path: Path, pretend) -> None:
    found = plan(tmp_path / "budget", [], {"alpha_min": ["1.0", "0.5"], "steps": ["4", "8"], "seed": ["0", "1"]})
    run(found, jobs=2)
    write_summary(found.folder, summarise(found))
    names = {path.name for path in draw.sweep(found.folder / "summary.json", tmp_path)}
    assert {"budget-knn.png", "budget-gain-knn.png"} <= names
