"""docs/draw.py: every figure of numbers comes from a record."""

import importlib.util
import re
from pathlib import Path

import pytest

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
    drawn |= {f"{prefix}-{name}.png" for prefix, names in draw.SHOWN.items() for name in names}
    drawn |= {f"demo-{draw.slug(metric)}.png" for metric in draw.METRICS["demo"]}  # from the runs of `make demo`
    pages = [page for name in ("results.md", "choosing-alpha.md") if (page := DOCS / name).exists()]
    shown = {name for page in pages for name in re.findall(r"\(images/([^)]+)\)", page.read_text())}
    assert shown <= drawn
    assert (tmp_path / "tiny-imagenet-linear-probe.png").stat().st_size > 5_000


def test_a_recorded_sweep_is_drawn_with_its_gains(draw, tmp_path: Path, pretend) -> None:
    found = plan(tmp_path / "budget", [], {"alpha_min": ["1.0", "0.5"], "steps": ["4", "8"], "seed": ["0", "1"]})
    run(found, jobs=2)
    write_summary(found.folder, summarise(found))
    names = {path.name for path in draw.sweep(found.folder / "summary.json", tmp_path)}
    assert {"budget-knn.png", "budget-gain-knn.png"} <= names
