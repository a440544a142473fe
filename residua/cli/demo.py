"""`residua demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from .console import console, say, show


@dataclass(frozen=True)
class DemoOptions:
    """Pretrain with and without fading shortcuts on embedded images, evaluate both, write one page."""

    out: str = "demo"
    """Folder for the two runs and report.html."""
    quick: bool = False
    """Seconds instead of minutes: shows the way, not the numbers."""
    open: bool = False
    """Open the page in the browser."""


def demo(args: list[str]) -> None:
    """Two small runs, one page."""
    from residua.report.demo import demo

    o = tyro.cli(DemoOptions, args=args, prog="residua demo")
    page, table = demo(Path(o.out).expanduser(), quick=o.quick, on_message=say, on_record=_fifths())
    console.print(table)
    show(page, o.open)


def _fifths() -> Callable[[dict[str, Any]], None]:
    """Prints a line for each fifth of a demo's run."""
    told: dict[str, int] = {}

    def record(r: dict[str, Any]) -> None:
        fifth = 5 * r["step"] // r["steps"]
        if fifth > told.get(r["run"], 0):
            told[r["run"]] = fifth
            rate = f"{r['images_per_s']:,.0f} img/s"
            say(f"  {r['run']:8} step {r['step']:,}/{r['steps']:,}  loss {r['loss']:.4f}  {rate}")

    return record
