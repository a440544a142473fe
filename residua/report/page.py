"""A page of text, tables and figures as one HTML file that needs nothing from anywhere else."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from html import escape
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from residua import __version__
from residua.report.figures import INK

_CSS = """
:root { color-scheme: light dark;
  --ink: #1b1c1d; --paper: #fff; --rule: #d5d8dc; --soft: #5b626b; --tint: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7e9; --paper: #15171a; --rule: #3a3f46; --soft: #a3a9b2; --tint: #1e2126; }
}
@media print { :root { --ink: #000; --paper: #fff; --rule: #bbb; --soft: #444; --tint: #f4f4f4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; padding-top: .6rem; border-top: 1px solid var(--rule); }
p, li { max-width: 44rem; overflow-wrap: anywhere; } p { margin: .5rem 0; }
.note { border-left: 3px solid #d55e00; background: var(--tint); padding: .5rem .9rem; margin: 1rem 0; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .88rem; padding-bottom: .3rem; }
th, td { padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 8rem; }
.figures { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.figures.single { grid-template-columns: minmax(0, 1fr); }
figure { margin: .4rem 0; break-inside: avoid; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; } .single figure svg { max-width: 46rem; }
svg.pixels image { image-rendering: pixelated; }
figcaption { color: var(--soft); font-size: .88rem; max-width: 44rem; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; padding-top: .6rem; border-top: 1px solid var(--rule);
  color: var(--soft); font-size: .85rem; }
"""


class Page:
    """Built top to bottom; every text is escaped, so any name of a run, class or file may stand in it.

    >>> page = Page("Two runs")
    >>> page.heading("Scores"); page.table(["run", "kNN"], [["a", "41.0 %"]]); page.save(Path("page.html"))
    """

    def __init__(self, title: str, *, command: str | None = None) -> None:
        self.title = title
        self.command = command_line() if command is None else command
        self._parts: list[str] = []
        self._figures = 0

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str, *, note: bool = False) -> None:
        """Plain text; `note` sets it apart."""
        self._parts.append(f"<p{_class('note' if note else '')}>{escape(text)}</p>")

    def bullets(self, items: Iterable[str]) -> None:
        self._parts.append("<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>")

    def code(self, text: str) -> None:
        self._parts.append(f"<p><code>{escape(text)}</code></p>")

    def table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        caption: str = "",
        numbers: int | None = None,
    ) -> None:
        """Columns from `numbers` on (default: all but the first) are set flush right."""
        first = 1 if numbers is None else numbers

        def line(cells: Sequence[str], tag: str) -> str:
            kinds = ["n" if i >= first else "long" if tag == "td" else "" for i in range(len(cells))]
            return "<tr>" + "".join(f"<{tag}{_class(k)}>{escape(c)}</{tag}>" for k, c in zip(kinds, cells)) + "</tr>"

        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        head = f"<thead>{line(header, 'th')}</thead>" if any(header) else ""
        body = "".join(line(row, "td") for row in rows)
        self._parts.append(f'<div class="wide"><table>{title}{head}<tbody>{body}</tbody></table></div>')

    def figures(self, *figures: tuple[Figure, str]) -> None:
        """Figures with their captions, side by side where there is room."""
        drawn = []
        for figure, caption in figures:
            self._figures += 1
            svg = inline_svg(figure, f"f{self._figures}", caption)
            drawn.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")
        single = " single" if len(figures) == 1 else ""
        self._parts.append(f'<div class="figures{single}">{"".join(drawn)}</div>')

    def html(self) -> str:
        made = f"residua {__version__}, {date.today()}"
        command = f" · <code>{escape(self.command)}</code>" if self.command else ""
        title, body = escape(self.title), "\n".join(self._parts)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
            f"<footer>{made}{command}</footer>\n</body>\n</html>\n"
        )

    def save(self, path: Path) -> Path:
        """Write the page; the file is whole or not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(self.html(), encoding="utf-8")
        part.replace(path)
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
    small = ' class="pixels"' if _has_small_picture(figure) else ""
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
    if program.name == "__main__.py" and program.parent.name == "residua":
        return shlex.join(["python", "-m", "residua", *sys.argv[1:]])
    return ""


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
