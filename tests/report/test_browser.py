"""Pages as a reader has them: in a real browser, from a file, with clicks, keys and downloads."""

import csv
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from residua.report import Cell, Page, compare, figures

from .browser import Browser

HEADER = ["run, of all", "kNN", "steps"]
ROWS: list[list[str | Cell]] = [
    ["b2", Cell("9.5 %", 9.5), Cell("1,500", 1500)],
    ['"x" a', Cell("–", None), Cell("20", 20)],
    ["b10", Cell("41.3 %", 41.25), Cell("300", 300)],
    ["<c>", Cell("10.0 %", 10.0), Cell("–", None)],
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = Page("Test", command="residua compare")
    page.heading("Scores, all")
    page.table(HEADER, ROWS)
    page.heading("Figures")
    drawn = figures.alpha_schedule({"a": [1.0, 0.9], "b & <c>": [1.0, 0.8]})
    red = np.zeros((8, 8, 8, 3))
    red[..., 0] = 1
    page.figures((drawn, "alphas"))
    page.figures((figures.reconstructions({"truth": red, "masked": red}), "pictures"))
    with page.fold("More"):
        page.table(["x", "y"], [["1", "2"]])
    return page.save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def shown(browser: Browser, page: Path) -> Browser:
    browser.problems.clear()
    browser.open(page)
    return browser


def column(browser: Browser, number: int) -> list[str]:
    return browser.run(f"[...document.querySelector('tbody').rows].map(r => r.cells[{number}].textContent)")


def head(number: int) -> str:
    return f"document.querySelectorAll('thead')[0].rows[0].cells[{number}]"


def test_a_click_sorts_numbers_with_missing_ones_last(shown: Browser) -> None:
    button = f"{head(1)}.querySelector('button')"
    shown.click(button)
    assert column(shown, 1) == ["9.5 %", "10.0 %", "41.3 %", "–"]
    assert shown.run(f"{head(1)}.getAttribute('aria-sort')") == "ascending"
    shown.click(button)
    assert column(shown, 1) == ["41.3 %", "10.0 %", "9.5 %", "–"]
    shown.click(button)
    assert column(shown, 1) == [row[1].text for row in ROWS]  # type: ignore[union-attr]
    shown.click(f"{head(2)}.querySelector('button')")
    assert column(shown, 2) == ["20", "300", "1,500", "–"]
    assert shown.run(f"{head(1)}.getAttribute('aria-sort')") is None
    shown.click(f"{head(0)}.querySelector('button')")
    assert column(shown, 0) == ['"x" a', "<c>", "b2", "b10"], "words sort as words, numbers in them as numbers"
    assert shown.problems == []


@pytest.mark.parametrize(("key", "code", "text"), [("Enter", 13, "\r"), (" ", 32, " ")])
def test_the_keyboard_sorts_too(shown: Browser, key: str, code: int, text: str) -> None:
    shown.press("Tab", 9)
    shown.press("Tab", 9)
    assert shown.run("document.activeElement.textContent") == "kNN"
    assert shown.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is seen"
    shown.press(key, code, text)
    assert column(shown, 1) == ["9.5 %", "10.0 %", "41.3 %", "–"]


def test_the_csv_file_is_the_table(shown: Browser, tmp_path: Path) -> None:
    shown.click(f"{head(1)}.querySelector('button')")
    file = shown.download("document.querySelector('.tools button')", tmp_path)
    assert file.name == "scores-all.csv"
    read = list(csv.reader(io.StringIO(file.read_text(encoding="utf-8"), newline="")))
    assert read == [
        HEADER,
        ["b2", "9.5", "1500"],
        ["<c>", "10.0", ""],
        ["b10", "41.25", "300"],
        ['"x" a', "", "20"],
    ], "in the order shown, numbers with all their digits"


@pytest.mark.parametrize("dark", [False, True])
def test_figures_download_black_on_white(browser: Browser, page: Path, tmp_path: Path, dark: bool) -> None:
    browser.problems.clear()
    browser.open(page, dark=dark)
    png = browser.download("document.querySelectorAll('figure .tools button')[0]", tmp_path)
    svg = browser.download("document.querySelectorAll('figure .tools button')[1]", tmp_path)
    assert (png.name, svg.name) == ("figures.png", "figures.svg")
    picture = Image.open(png).convert("RGB")
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    width = float(root.attrib["viewBox"].split()[2])
    assert picture.width == round(4 * width)
    pixels = np.asarray(picture)
    assert (pixels[0, 0] == 255).all()
    assert pixels.min() < 60, "ink is dark"
    blue = np.abs(pixels.astype(int) - (0x00, 0x72, 0xB2)).sum(-1) < 12
    assert blue.any(), "the first run's curve is in it"
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["width"] == f"{width:g}pt"
    assert "b & <c>" in {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert "currentColor" not in svg.read_text(encoding="utf-8")
    assert browser.problems == []


def test_pictures_inside_figures_download_too(shown: Browser, tmp_path: Path) -> None:
    png = shown.download("document.querySelectorAll('figure')[1].querySelector('.tools button')", tmp_path)
    pixels = np.asarray(Image.open(png).convert("RGB")).astype(int)
    assert (np.abs(pixels - (255, 0, 0)).sum(-1) < 6).mean() > 0.3


def test_nothing_needs_sideways_scrolling_on_a_phone(browser: Browser, tmp_path: Path, make_run: Any) -> None:
    names = ["a-run-with-a-rather-long-name-" + c * 20 for c in "abcd"]
    runs = [make_run(name, knn=40.0 + i, alpha_min=1 - i / 10) for i, name in enumerate(names)]
    made = compare(runs, tmp_path / "c.html")
    browser.problems.clear()
    for width in (360, 1000):
        browser.open(made, width=width)
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_real_runs_on_a_phone_and_every_download_has_a_name_of_its_own(
    browser: Browser, tmp_path: Path, quick_demo: Any
) -> None:
    browser.problems.clear()
    runs = [quick_demo[0].parent / name for name in ("fading", "plain")]
    browser.open(compare(runs, tmp_path / "c.html"), width=360)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    labels = browser.run("[...document.querySelectorAll('.tools button')].map(b => b.title)")
    tables, drawn = browser.run(
        "[document.querySelectorAll('table').length, document.querySelectorAll('figure').length]"
    )
    assert len(labels) == len(set(labels)) == tables + 2 * drawn
    assert browser.problems == []


def test_paper_is_light_whole_and_without_controls(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page, dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    browser.open(page, dark=True, media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert browser.run("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    assert browser.run("[...document.querySelectorAll('.wide, .drawing')].every(e => e.scrollWidth <= e.clientWidth)")
    browser.run("addEventListener('beforeprint', () => { window.seen = document.querySelector('details').open; })")
    assert browser.pdf(tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert browser.run("[window.seen, document.querySelector('details').open]") == [True, False], "unfolded on paper"


def test_without_scripts_the_page_has_no_dead_controls(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=page.resolve().as_uri())
        text = ""
        while "Scores, all" not in text:
            found = browser.call("DOM.getDocument", depth=-1)["root"]
            text = json.dumps(found)
        assert '"BUTTON"' not in text
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
