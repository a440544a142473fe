"""Pages are whole, escaped and need nothing from outside."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from residua import __version__
from residua.report import Cell, Page, figures
from residua.report.page import command_line

NASTY = '<script>alert("1")</script> & \' </title> <img src=x onerror=alert(1)>'


def test_everything_is_escaped(tmp_path: Path, read_page: Callable[[Path], Any]) -> None:
    page = Page(NASTY, command=NASTY)
    page.heading(NASTY)
    page.paragraph(NASTY, note=True)
    page.bullets([NASTY])
    page.code(NASTY)
    page.table([NASTY, "x"], [[NASTY, NASTY]], caption=NASTY)
    page.figures((figures.alpha_schedule({NASTY[:8]: [1.0], "</svg><b>": [0.9]}), NASTY))
    found = read_page(page.save(tmp_path / "page.html"))
    with page.fold(NASTY):
        page.table(["x"], [[Cell(NASTY, NASTY)]])
    found = read_page(page.save(tmp_path / "page.html"))
    assert found.text.count(NASTY) == 14
    assert "</svg><b>" in found.text


def test_two_figures_do_not_share_ids(tmp_path: Path, read_page: Callable[[Path], Any]) -> None:
    page = Page("x")
    drawn = figures.loss_curves({"a": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]})
    page.figures((drawn, "one"), (drawn, "two"))
    assert read_page(page.save(tmp_path / "page.html")).tags.count("svg") == 2


def test_ink_follows_the_page_and_pictures_are_inside(tmp_path: Path, read_page: Callable[[Path], Any]) -> None:
    page = Page("x")
    page.figures((figures.reconstructions({"truth": np.random.rand(2, 8, 8, 3)}), "pictures"))
    found = read_page(page.save(tmp_path / "page.html"))
    assert sum(r.startswith("data:image/png") for r in found.refers) == 1
    assert "currentColor" in page.html()
    assert figures.INK not in page.html().split("</style>")[1]
    assert "http" not in page.html()


def test_values_behind_cells_and_names_of_downloads() -> None:
    page = Page("My page")
    page.table(["a"], [[Cell("41.3 %", 41.25)], [Cell("–", None)], [Cell("–", float("nan"))], ["plain"]])
    page.heading("Scores: all!")
    page.table(["a"], [["x"]])
    page.figures((figures.alpha_schedule({"a": [1.0]}), "one"), (figures.alpha_schedule({"a": [1.0]}), "two"))
    html = page.html()
    assert 'data-value="41.25">41.3 %</td>' in html
    assert html.count('data-value="">–</td>') == 2
    assert re.findall('data-name="(.*?)"', html) == ["my-page", "scores-all", "scores-all-2", "scores-all-3"]


def test_the_same_page_twice_is_the_same_file() -> None:
    def build() -> str:
        page = Page("x")
        page.figures((figures.alpha_schedule({"a": [1.0, 0.9]}), "alphas"))
        return page.html()

    assert build() == build()


def test_the_footer_says_version_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/residua", "compare", "my run", "b"])
    assert command_line() == "residua compare 'my run' b"
    monkeypatch.setattr("sys.argv", ["/lib/residua/cli/__main__.py", "compare", "a", "b"])
    assert command_line() == "python -m residua.cli compare a b"
    assert f"residua {__version__}" in Page("x").html()
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-q"])
    assert command_line() == ""
