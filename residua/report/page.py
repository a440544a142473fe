"""A page of text, tables and figures as one HTML file that needs nothing from anywhere else."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from html import escape
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from residua import __version__
from residua.disk import write_text
from residua.report.figures import INK

_ASSETS = Path(__file__).parent
_COLUMN = 5.0  # inches: a wider figure is a sheet, which a phone pans over instead of shrinking


class Cell(NamedTuple):
    """What a table shows, and the value behind it: that is what sorts and what a CSV file gets. None: missing."""

    text: str
    value: float | str | None


class Page:
    """Built top to bottom; every text is escaped, so any name of a run, class or file may stand in it.

    In a browser tables sort by a click on a heading and download as CSV, figures as PNG and SVG (page.js).

    >>> page = Page("Two runs")
    >>> page.heading("Scores"); page.table(["run", "kNN"], [["a", "41.0 %"]]); page.save(Path("page.html"))
    """

    def __init__(self, title: str, *, command: str | None = None) -> None:
        self.title = title
        self.command = command_line() if command is None else command
        self._parts: list[str] = []
        self._figures = 0
        self._section = title
        self._names: Counter[str] = Counter()

    def heading(self, text: str) -> None:
        self._section = text
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str, *, note: bool = False) -> None:
        """Plain text; `note` sets it apart."""
        self._parts.append(f"<p{_class('note' if note else '')}>{escape(text)}</p>")

    def bullets(self, items: Iterable[str]) -> None:
        self._parts.append("<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>")

    def code(self, text: str) -> None:
        self._parts.append(f"<p><code>{escape(text)}</code></p>")

    @contextmanager
    def fold(self, title: str) -> Iterator[None]:
        """What is added inside shows when its title is clicked, and in print."""
        self._parts.append(f"<details><summary>{escape(title)}</summary>")
        yield
        self._parts.append("</details>")

    def table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str | Cell]],
        *,
        caption: str = "",
        numbers: int | None = None,
    ) -> None:
        """Columns from `numbers` on (default: all but the first) are set flush right.

        Plain text sorts as the number it spells, or as words; a `Cell` by its value.
        """
        first = 1 if numbers is None else numbers

        def line(cells: Sequence[str | Cell], tag: str) -> str:
            kinds = ["n" if i >= first else "long" if tag == "td" else "" for i in range(len(cells))]
            return "<tr>" + "".join(_cell(tag, kind, cell) for kind, cell in zip(kinds, cells)) + "</tr>"

        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        head = f"<thead>{line(header, 'th')}</thead>" if any(header) else ""
        body = "".join(line(row, "td") for row in rows)
        table = f'<table data-name="{self._name()}">{title}{head}<tbody>{body}</tbody></table>'
        self._parts.append(f'<div class="wide">{table}</div>')

    def figures(self, *figures: tuple[Figure, str]) -> None:
        """Figures with their captions, side by side where there is room."""
        drawn = []
        for figure, caption in figures:
            self._figures += 1
            svg = inline_svg(figure, f"f{self._figures}", caption)
            sheet = _class("sheet" if figure.get_figwidth() > _COLUMN else "")
            drawing = f'<div class="drawing">{svg}</div><figcaption>{escape(caption)}</figcaption>'
            drawn.append(f'<figure{sheet} data-name="{self._name()}">{drawing}</figure>')
        single = " single" if len(figures) == 1 else ""
        self._parts.append(f'<div class="figures{single}">{"".join(drawn)}</div>')

    def _name(self) -> str:
        """What a downloaded table or figure is called: after its section, numbered from the second on."""
        name = re.sub(r"[^a-z0-9]+", "-", self._section.lower()).strip("-")[:60] or "page"
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}-{self._names[name]}"

    def html(self) -> str:
        made = f"residua {__version__}, {date.today()}"
        command = f" · <code>{escape(self.command)}</code>" if self.command else ""
        title, body = escape(self.title), "\n".join(self._parts)
        css, script = ((_ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
            f"<footer>{made}{command}</footer>\n<script>\n{script}</script>\n</body>\n</html>\n"
        )

    def save(self, path: Path) -> Path:
        """Write the page; the file is whole or not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.html())
        return path


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as SVG to stand inside HTML: own ids, ink in the colour of the text, pictures as PNG."""
    buffer = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix, "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = (
        re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg[: svg.index(">")])
        + svg[svg.index(">") :]
    )
    svg = svg.replace("xlink:href=", "href=").replace(INK, "currentColor")
    svg = re.sub(r'(\sid="|\shref="#|url\(#)', lambda m: f"{m[1]}{prefix}-", svg)
    small = ' style="image-rendering: pixelated"' if _has_small_picture(figure) else ""
    return svg.replace("<svg", f'<svg{small} role="img" aria-label="{escape(label)}"', 1)


def _has_small_picture(figure: Figure) -> bool:
    """Whether a picture is drawn larger than it is: then its pixels should stay sharp."""
    pictures = [image for axes in figure.axes for image in axes.images]
    return any(image.get_size()[1] < 1.5 * 96 * figure.get_figwidth() for image in pictures)


def command_line() -> str:
    """What was typed, where it was `residua`; empty in a notebook or another program."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    if program.name == "residua":
        return shlex.join(["residua", *sys.argv[1:]])
    if program.name == "__main__.py" and program.parts[-3:-1] == ("residua", "cli"):
        return shlex.join(["python", "-m", "residua.cli", *sys.argv[1:]])
    return ""


def _cell(tag: str, kind: str, cell: str | Cell) -> str:
    if isinstance(cell, str):
        text, value = cell, ""
    else:
        missing = cell.value is None or (isinstance(cell.value, float) and math.isnan(cell.value))
        text, value = cell.text, f' data-value="{"" if missing else escape(str(cell.value))}"'
        kind += " words" if kind == "n" and isinstance(cell.value, str) else ""
    scope = ' scope="col"' if tag == "th" else ""
    return f"<{tag}{scope}{_class(kind)}{value}>{escape(text)}</{tag}>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
