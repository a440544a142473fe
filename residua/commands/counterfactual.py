"""Small networks that differ in one thing."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from tyro.conf import Positional

from residua.commands.calling import measured, options_of
from residua.commands.console import console, device_of, say, show

if TYPE_CHECKING:
    from residua.anatomy.counterfactual import Outcome, Point

SETTINGS = {
    "shortcut": "depth", "depth": "depth", "classes": "classes", "stochastic-depth": "drop path", "decay": "alpha_min",
}  # fmt: skip
"""Kind -> what is varied, as axes name it."""


@dataclass(frozen=True)
class Options:
    """Small networks that differ in one thing, trained and measured alike: when does Residual Alignment appear?

    The same command continues a study that was stopped: finished networks are not trained again.
    """

    kind: Positional[Literal["shortcut", "classes", "stochastic-depth", "depth", "decay"]]
    """What differs."""
    network: Literal["resmlp", "resconv", "resconv_down"] = "resmlp"
    """Fully connected, convolutional, or convolutional with one down-sampling."""
    data: str = "digits"
    """Source of labelled images."""
    depth: tuple[int, ...] = ()
    """Blocks; several for shortcut and depth. Default 16, for depth 4 8 16 32."""
    width: int = 128
    """Of every block."""
    alpha_min: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
    """For decay."""
    classes: tuple[int, ...] = (2, 4, 7, 10)
    """For classes: so many of the first classes of the data."""
    drop_path: tuple[float, ...] = (0.0, 0.25, 0.5)
    """For stochastic-depth: probability of dropping the last branch, rising from 0 at the first."""
    norm: bool = False
    """Batch norm in the networks."""
    seeds: int = 1
    """Networks of every setting."""
    seed: int = 0
    """The first of these seeds."""
    jobs: int = 1
    """Networks trained at a time, each by a process of its own."""
    epochs: float = 150.0
    """Of training."""
    lr: float = 0.1
    """Peak learning rate of SGD."""
    weight_decay: float = 0.01
    """On matrices; with less of it alignment takes longer."""
    batch_size: int = 64
    """Images in a step."""
    gauge: tuple[Literal["J", "J/alpha"], ...] = ()
    """Default: J, for decay both."""
    top: int = 30
    """Singular triplets of every block."""
    images: int = 8
    """Images whose Jacobians are taken."""
    split: Literal["train", "test"] = "train"
    """Where they come from."""
    out: str | None = None
    """Folder of the study; default counterfactuals/KIND."""
    device: str | None = None
    """cuda or cpu; default: cuda where there is one."""
    open: bool = False
    """Open the page in the browser."""


def counterfactual(kind: str, *, progress: bool = False, **options: Any) -> list[Outcome]:
    """Train and measure small networks that differ in one thing, as `residua counterfactual` does.

    `kind` is "shortcut", "classes", "stochastic-depth", "depth" or "decay"; `options` are those of
    `residua counterfactual --help` by their plain names. Networks, numbers and page are kept where `out` names a
    folder, and there a study that was stopped goes on.

    >>> outcomes = residua.counterfactual("shortcut", depth=8, epochs=10.0)
    >>> [(outcome.case.name, outcome.accuracy) for outcome in outcomes]
    """
    given = options_of(Options, {"kind": kind} | options)
    if given.out is not None:
        return measured(progress, work, given)
    with tempfile.TemporaryDirectory(prefix="residua-") as folder:
        return measured(progress, work, replace(given, out=folder))


def work(o: Options) -> list[Outcome]:
    """What the command does."""
    from residua.anatomy import counterfactual as engine
    from residua.anatomy.study import Look
    from residua.disk import write_text
    from residua.report.counterfactual import counterfactual_page, four_laws
    from residua.report.figures import save

    cases = engine.plan(
        o.kind, network=o.network, data=o.data, width=o.width, alphas=o.alpha_min, classes=o.classes, rates=o.drop_path,
        depths=o.depth or ((4, 8, 16, 32) if o.kind == "depth" else (16,)), seeds=o.seeds, seed=o.seed, epochs=o.epochs,
        lr=o.lr, weight_decay=o.weight_decay, batch_size=o.batch_size, norm=o.norm,
    )  # fmt: skip
    folder = Path(o.out or f"counterfactuals/{o.kind}").expanduser()
    say(f"{len(cases)} networks in {folder}: {o.network}, {o.data}, {o.epochs:g} epochs each")
    outcomes = engine.run(
        cases, folder, Look(k=o.top, images=o.images), split=o.split, jobs=o.jobs, each=_told,
        gauges=o.gauge or (("J", "J/alpha") if o.kind == "decay" else ("J",)),
        device=device_of(o.device),
    )  # fmt: skip
    setting = SETTINGS[o.kind]
    console.print(_table(outcomes, setting))
    write_text(folder / "counterfactual.json", json.dumps([outcome.to_dict() for outcome in outcomes], indent=1))
    say(f"written: {folder / 'counterfactual.json'}")
    say(f"picture: {save(four_laws(outcomes, setting), folder / 'counterfactual.png')}")
    show(counterfactual_page(o.kind, setting, outcomes, o.split, folder / "counterfactual.html"), o.open)
    return outcomes


def _told(outcome: Outcome) -> None:
    before = " (was there)" if outcome.reused else ""
    say(f"{outcome.case.name}{before}: accuracy {outcome.accuracy:.1f} %")


def _table(outcomes: list[Any], setting: str) -> Table:
    """A row a setting, in as few columns as a terminal has: networks of several seeds are one row."""
    from residua.anatomy.counterfactual import accuracies, points
    from residua.report.counterfactual import PANELS, laws_that_hold, series_of

    several = len({outcome.case.seed for outcome in outcomes}) > 1
    over = "mean ± deviation over seeds" if several else "means over samples"
    pairs: dict[str, list[str]] = {}
    for name in PANELS:
        pairs.setdefault(name[:3], []).append(name)
    legend = "; ".join(f"{law}: {', '.join(name[4:] for name in names)}" for law, names in pairs.items())
    drawn = Table(title=f"{over}, two numbers a law", title_justify="left", caption=legend, caption_justify="left")
    gauges = len(outcomes[0].laws) > 1
    for heading in ("", *(["gauge"] if gauges else []), setting, "test %", *pairs, "holds"):
        drawn.add_column(heading, justify="left" if heading in ("", "gauge", "holds") else "right")
    for series, gauge in series_of(outcomes):
        found = {name: {p.x: p for p in points(outcomes, series, name, gauge)} for name in PANELS}
        for right in accuracies(outcomes, series):
            cells = ["\n".join(_cell(found[n].get(right.x), several) for n in names) for names in pairs.values()]
            holds = laws_that_hold([o.laws[gauge] for o in outcomes if (o.case.series, o.case.x) == (series, right.x)])
            drawn.add_row(series, *([gauge] if gauges else []), f"{right.x:g}", _cell(right, several, 1), *cells, holds)
    return drawn


def _cell(point: Point | None, several: bool, digits: int = 2) -> str:
    if point is None:
        return "–"
    spread = f" ± {point.spread:.{digits}f}" if several else ""
    return f"{point.mean:.{digits}f}{spread}"
