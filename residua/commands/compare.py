"""Runs side by side on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from residua.commands.calling import measured, options_of
from residua.commands.console import console, device_of, say, show, writable


@dataclass(frozen=True)
class Options:
    """Runs side by side on one page: what differs between their settings, every score, curves and pictures."""

    runs: Positional[tuple[str, ...]]
    """Two run folders or more (one, with --dynamics); or what residua evaluate MODEL --out FILE wrote of others."""
    out: str = "comparison.html"
    """Page to write."""
    dynamics: bool = False
    """Measure every checkpoint (kNN, probe, rank), kept as dynamics.json in each run; pretrain --keep 0 keeps all."""
    limit: int = 2000
    """Images of each split that --dynamics uses, at most; 0 uses all."""
    colors: Literal["components", "spectral"] = "components"
    """What feature maps show: principal components (quick) or spectral eigenvectors, as in the paper."""
    device: str | None = None
    """Where --dynamics computes: cuda, cpu, ...; default: a GPU where there is one."""
    open: bool = False
    """Open the page in the browser."""


def compare(*runs: str | Path, progress: bool = False, **options: Any) -> Path:
    """Write a page with runs side by side, as `residua compare` does; returns the page.

    `runs` are two run folders or more (one, with `dynamics=True`), or what `residua.evaluate(model, out=FILE)` wrote of
    others; `options` are those of `residua compare --help` by their plain names.

    >>> residua.compare("runs/plain", "runs/faded", out="comparison.html")
    """
    return measured(progress, work, options_of(Options, options, runs=tuple(map(str, runs))))


def work(o: Options) -> Path:
    """What the command does."""
    from residua.report import compare, comparison_table

    runs = [Path(run).expanduser() for run in o.runs]
    if o.limit < 0:
        raise ValueError(f"--limit {o.limit}: give a number of images, or 0 for all")
    device, out = device_of(o.device), Path(o.out).expanduser()
    writable(out / "comparison.html" if out.is_dir() else out)
    page = compare(
        runs, out, along=o.dynamics, basis=o.colors, limit=o.limit or None, device=device,
        on_message=lambda text: say(f"measuring {text}"),
    )  # fmt: skip
    console.print(comparison_table(runs))
    show(page, o.open)
    return page
