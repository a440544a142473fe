"""`residua compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from .console import console, show


@dataclass(frozen=True)
class CompareOptions:
    """Runs side by side: what differs between their settings, their scores, curves and reconstructions."""

    runs: Positional[tuple[str, ...]]
    """Two run folders or more."""
    out: str = "comparison.html"
    """Page to write."""
    open: bool = False
    """Open it in the browser."""


def compare(args: list[str]) -> None:
    """Runs side by side."""
    from residua.report import compare, comparison_table

    o = tyro.cli(CompareOptions, args=args, prog="residua compare")
    runs = [Path(run).expanduser() for run in o.runs]
    page = compare(runs, Path(o.out))
    console.print(comparison_table(runs))
    show(page, o.open)
