"""Two autoencoders, two fully connected networks, one page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residua.commands.calling import measured, options_of
from residua.commands.console import check_folder, console, say, show


@dataclass(frozen=True)
class Options:
    """Three minutes on a CPU: train a small encoder without labels, and show what its layers are made of."""

    out: str = "demo"
    """Folder for the runs and report.html."""
    quick: bool = False
    """Seconds instead of minutes: shows the way, not the numbers."""
    open: bool = False
    """Open the page in the browser."""


def demo(out: str | Path = "demo", *, progress: bool = False, **options: Any) -> Path:
    """Train small networks and show what their layers are made of, as `residua demo` does; returns the page.

    >>> residua.demo("demo", quick=True)
    """
    return measured(progress, work, options_of(Options, options, out=out))


def work(o: Options) -> Path:
    """What the command does."""
    from residua.report.demo import demo

    out = Path(o.out).expanduser()
    check_folder(out)
    page, table = demo(out, quick=o.quick, on_message=say, on_progress=_left())
    console.print(table)
    show(page, o.open)
    return page


def _left() -> Callable[[float, str], None]:
    """What is being done and the time left, by the time that the share behind it took: a line that is written over on a
    terminal, elsewhere one for each fifth."""
    started, told, known, end = time.monotonic(), 0, 0.0, 0.0

    def progress(share: float, text: str) -> None:
        nonlocal told, known, end
        now = time.monotonic()
        if share > known:
            known, end = share, started + (now - started) / share
        left = max(1.0, end - now)
        line = f"{100 * share:3.0f} %  {text}" + (f", {_time(left)} left" if 0.02 < share < 1 else "")
        if console.is_terminal:
            console.print(f"{line:<70}", end="\n" if share == 1 else "\r", markup=False)
        elif int(5 * share) > told:
            told = int(5 * share)
            say(line)

    return progress


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
