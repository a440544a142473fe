"""Figures and page of a counterfactual: the four laws of networks that differ in one thing, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from residua.anatomy.counterfactual import Outcome, Point, mean_s1, points
from residua.report.anatomy import GAUGES, inverse_values, log_scale
from residua.report.figures import REFERENCE, finish, label, new_axes, run_styles, styled
from residua.report.page import Cell, Page

PANELS: dict[str, float | None] = {
    "RA1 line shape": 1.1, "RA1 variation of steps": 0.3, "RA2 diagonal share": 0.8, "RA2 left and right": None,
    "RA3 energy beyond C": 0.05, "RA3 entropy rank": None, "RA4 R^2": 0.8, "RA4 slope": None,
}  # fmt: skip
"""Number -> the threshold of its verdict."""


def series_of(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Every series in every gauge that was measured."""
    names = dict.fromkeys(outcome.case.series for outcome in outcomes)
    return [(name, gauge) for name in names for gauge in outcomes[0].laws]


def series_name(series: str, gauge: str, several: bool) -> str:
    return f"{series}, {gauge}" if several else series


@styled
def four_laws(outcomes: Sequence[Outcome], setting: str) -> Figure:
    """Two numbers a law against what is varied; dotted: the threshold of the verdict."""
    figure = Figure((10.5, 5.2), layout="constrained")
    series, several = series_of(outcomes), len(outcomes[0].laws) > 1
    styles = run_styles([series_name(s, g, several) for s, g in series])
    for axes, (number, threshold) in zip(figure.subplots(2, 4).T.flat, PANELS.items()):
        drawn: list[float] = []
        for (name, gauge), (text, style) in zip(series, styles.items()):
            found = points(outcomes, name, number, gauge)
            if found:
                at, means, spread = zip(*((p.x, p.mean, p.spread) for p in found))
                axes.errorbar(at, means, yerr=spread, capsize=2, label=label(text), **style)
                drawn += means
        if threshold is not None:
            axes.axhline(threshold, color=REFERENCE, linestyle=":")
        if number == "RA1 line shape":
            log_scale(axes, drawn)
        axes.set_title(number, fontsize=10, loc="left")
        axes.set_xlabel(setting)
    return finish(figure, figure.axes[0])


@styled
def depth_law(found: Mapping[str, Sequence[Point]]) -> Figure:
    """Mean s_1 over blocks against the number of blocks, both logarithmic, with the power that fits best."""
    figure, axes = new_axes("blocks", "mean of the largest singular value")
    for name, style in run_styles(found).items():
        at, means, spread = (np.array([getattr(p, f) for p in found[name]]) for f in ("x", "mean", "spread"))
        power = depth_power(found[name])
        text = label(name) if power is None else f"{label(name)}: power {power:.2f}"
        axes.errorbar(at, means, yerr=spread, capsize=2, label=text, **style)
    axes.set_xscale("log", base=2)
    log_scale(axes, [p.mean for own in found.values() for p in own])
    axes.set_xticks(sorted({p.x for own in found.values() for p in own}))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    return finish(figure, axes)


def depth_power(found: Sequence[Point]) -> float | None:
    """The p of `s_1 ~ depth^p`; None from one depth."""
    if len(found) < 2:
        return None
    return float(np.polyfit([math.log(p.x) for p in found], [math.log(p.mean) for p in found], 1)[0])


def counterfactual_page(kind: str, setting: str, outcomes: Sequence[Outcome], split: str, path: Path) -> Path:
    """One page: the table of all networks, the four laws against what is varied, 1 / s_1 by block."""
    page = Page(f"Counterfactual: {kind}")
    first = outcomes[0]
    values = next(iter(first.laws.values()))
    spread = "networks of different seeds" if len({o.case.seed for o in outcomes}) > 1 else "samples"
    varied = "depth and in having shortcuts" if kind == "shortcut" else setting
    page.paragraph(
        f"{len(outcomes)} networks ({first.case.settings['model']}, {first.case.settings['data']}) that differ in "
        f"{varied}, trained alike; top {values['k']} singular triplets of every block of one shape at "
        f"{values['samples']} {split} images. Spreads are standard deviations over {spread}."
    )
    page.paragraph("Gauges: " + "; ".join(GAUGES[gauge] for gauge in first.laws) + ".")
    page.heading("The four laws")
    page.figures((four_laws(outcomes, setting), "Dotted: the threshold of the verdict."))
    page.table(*table(outcomes, setting), caption="Mean ± standard deviation over samples.", numbers=3)
    page.heading("1 / s_1 by block")
    for gauge in first.laws:
        lines = {f"{o.case.series} {o.case.x:g}": (o.laws[gauge]["inverse_s1"], o.laws[gauge]["inverse_s1_spread"])
                 for o in outcomes if o.case.seed == first.case.seed}  # fmt: skip
        page.figures((inverse_values(lines), f"RA4 in gauge {gauge}, seed {first.case.seed}."))
    if setting == "depth" and len({o.case.x for o in outcomes}) > 1:
        page.heading("Against the total depth")
        text = "The other reading of RA4: -1 is inversely with the total depth. Bars: spread over blocks. Gauge "
        for gauge in first.laws:
            found = {name: mean_s1(outcomes, name, gauge) for name in dict.fromkeys(o.case.series for o in outcomes)}
            page.figures((depth_law(found), f"{text}{gauge}."))
    return page.save(path)


def laws_that_hold(found: Sequence[Mapping[str, Any]]) -> str:
    """`RA1 RA3`: the laws that hold in every one of some networks; with `RA4 2/3` those that hold in some of them."""
    kept = []
    for law in found[0]["verdicts"]:
        count = sum(laws["verdicts"][law]["holds"] for laws in found)
        if count:
            kept.append(law if count == len(found) else f"{law} {count}/{len(found)}")
    return ", ".join(kept) or "none"


def table(outcomes: Sequence[Outcome], setting: str) -> tuple[list[str], list[list[str | Cell]]]:
    """Header and rows: a network and gauge each, its accuracy, its numbers, the laws that hold."""
    numbers = [n for n in PANELS if n in next(iter(outcomes[0].laws.values()))["scalars"]]
    rows: list[list[str | Cell]] = []
    for o in outcomes:
        for gauge, laws in o.laws.items():
            cells = []
            for number in numbers:
                value = laws["scalars"].get(number)
                text = "–" if value is None else f"{value['mean']:.2f} ± {value['spread']:.2f}"
                cells.append(Cell(text, None if value is None else value["mean"]))
            holds = laws_that_hold([laws])
            accuracy = Cell(f"{o.accuracy:.1f}", o.accuracy)
            rows.append(
                [o.case.series, gauge, holds, Cell(f"{o.case.x:g}", o.case.x), str(o.case.seed), accuracy, *cells]
            )
    return ["networks", "gauge", "laws that hold", setting, "seed", "accuracy (%)", *numbers], rows
