"""Links of the documents lead somewhere; commands are understood."""

import re
import shlex
from pathlib import Path

import pytest
import tyro

from residua import cli

from .records import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


def anchor(heading: str) -> str:
    """What GitHub calls a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_to_headings_that_exist():
    for page in PAGES:
        for name, target in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
            if not name.startswith("http"):
                headings = re.findall(r"^#+ (.*)$", (page.parent / name if name else page).read_text(), re.MULTILINE)
                assert target in map(anchor, headings), f"{page.name} links to {name}#{target}"


def commands(page: Path) -> list[str]:
    """Those that stand on lines of their own, without dots and comments behind them; letters stand for numbers."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    lines = re.findall(r"^ {4}(residua [a-z]+ .*)$", text, re.MULTILINE)
    return [re.sub(r" [A-Z](?= |$)", " 1", re.sub(r"( \.\.\.)?( +#.*)?$", "", line)) for line in lines]


class Understood(BaseException):
    """Raised where a command would begin its work."""


@pytest.mark.parametrize("page", filter(commands, PAGES), ids=lambda page: page.stem)
def test_commands_are_understood(page, monkeypatch, tmp_path, capsys):
    parse = tyro.cli

    def only_parse(*args, **kwargs):
        parse(*args, **kwargs)
        raise Understood

    monkeypatch.setattr(tyro, "cli", only_parse)
    monkeypatch.chdir(tmp_path)
    for line in commands(page):
        try:
            cli.main(shlex.split(line)[1:])
        except Understood:
            continue
        except SystemExit:
            pass
        raise AssertionError(f"{page.name}: {line}\n{capsys.readouterr().err}")
