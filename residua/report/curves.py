"""Figures of what happens along training, after the first paper's figure 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from residua.evaluate.dynamics import Correlation
from residua.report.figures import REFERENCE, finish, label, new_axes, run_styles, styled

Curve = Mapping[float, float]


@styled
def epoch_curves(metric: str, groups: Mapping[str, Sequence[Curve]], unit: str = "%") -> Figure:
    """A metric against the epoch, a line per group: the mean of its runs, and a band from least to greatest."""
    figure, axes = new_axes("epoch", f"{metric} ({unit})" if unit else metric)
    for name, style in run_styles(groups).items():
        curves = [curve for curve in groups[name] if curve]
        if not curves:
            continue
        shared = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = np.array([[curve[epoch] for epoch in shared] for curve in curves])
        axes.plot(shared, values.mean(0), label=label(name, 30), **style)
        if len(curves) > 1:
            axes.fill_between(shared, values.min(0), values.max(0), color=style["color"], alpha=0.18, linewidth=0)
    return finish(figure, axes)


@styled
def step_curves(
    metric: str,
    panels: Mapping[str, Mapping[str, Curve]],
    ends: Mapping[str, Mapping[str, tuple[float, float]]],
    unit: str = "points",
) -> Figure:
    """A gain against the training step: settings side by side, a line per run, the end of the run in a hollow marker.

    `panels` are title -> label -> step -> gain; `ends` are title -> label -> step and gain, where they are known.
    """
    figure = Figure((3.1 * len(panels) + 0.6, 3.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    styles = run_styles(dict.fromkeys(name for lines in panels.values() for name in lines))
    hollow: dict[str, Any] = {"linestyle": "", "markerfacecolor": "none", "markersize": 7}
    for (title, lines), axes in zip(panels.items(), grid):
        axes.axhline(0, color=REFERENCE, linestyle=":")
        for name, curve in lines.items():
            last = [ends[title][name]] if name in ends.get(title, {}) else []
            axes.plot(*zip(*sorted(curve.items()), *last), markevery=range(len(curve)), **styles[name])
            for step, gain in last:
                axes.plot(step, gain, **styles[name] | hollow)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("training steps")
        axes.set_xlim(0, 1.05 * axes.dataLim.xmax)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    grid[0].set_ylabel(f"{metric} ({unit})")
    handles = [Line2D([], [], label=label(name, 30), **style) for name, style in styles.items()]
    if any(ends.values()):
        handles.append(Line2D([], [], color=REFERENCE, marker="o", label="end of the run", **hollow))
    figure.legend(handles=handles, loc="outside upper left", ncols=5)
    return figure


@styled
def size_curves(
    metric: str, groups: Mapping[str, Sequence[tuple[float, float]]], unit: str = "%", size: str = "residual blocks"
) -> Figure:
    """A metric against the size of something, a line per group: the mean at each size, and where there are several
    runs of one, a dot each."""
    figure, axes = new_axes(size, f"{metric} ({unit})" if unit else metric)
    for name, style in run_styles(groups).items():
        sizes = sorted({x for x, _ in groups[name]})
        at = {size: [y for x, y in groups[name] if x == size] for size in sizes}
        axes.plot(sizes, [np.mean(at[size]) for size in sizes], label=label(name, 30), **style)
        several = [(x, y) for x, y in groups[name] if len(at[x]) > 1]
        if several:
            axes.plot(*zip(*several), ".", color=style["color"], alpha=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    return finish(figure, axes)


@styled
def correlation_curve(found: Sequence[Correlation], rank: str, accuracy: str) -> Figure:
    """Pearson's r between two metrics over the runs, by epoch; filled where p < 0.05."""
    figure, axes = new_axes("epoch", f"r of {rank} and {accuracy}")
    defined = [c for c in found if np.isfinite(c.r)]
    axes.axhline(0, color=REFERENCE, linestyle=":")
    axes.plot([c.epoch for c in defined], [c.r for c in defined], color="#0072b2")
    for c in defined:
        sure = c.p < 0.05
        axes.plot(c.epoch, c.r, "o", color="#0072b2", markerfacecolor="#0072b2" if sure else "none")
    axes.set_ylim(-1.08, 1.08)
    return figure


@styled
def norm_curves(runs: Mapping[str, Mapping[int, Curve]]) -> Figure:
    """Norm of the stream after each block against the epoch: runs side by side, a line per block."""
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    size = (4.6, 3.0) if columns == 1 else (3.1 * columns + 0.6, 2.7 * rows)
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    deepest = max(layer for blocks in runs.values() for layer in blocks)
    # the bright end would vanish on white, the dark one on black
    shades = mpl.colors.LinearSegmentedColormap.from_list("", mpl.colormaps["viridis"](np.linspace(0.2, 0.85, 64)))
    scale = mpl.colors.Normalize(0, max(deepest, 1))
    values = [v for blocks in runs.values() for curve in blocks.values() for v in curve.values() if v > 0]
    for axes in grid.flat[len(runs) :]:
        axes.axis("off")
    for (name, blocks), axes in zip(runs.items(), grid.flat):
        for layer, curve in blocks.items():
            axes.plot(list(curve), list(curve.values()), color=shades(scale(layer)), marker="o", markersize=2.5)
        axes.set_title(label(name), fontsize=10)
        axes.set_xlabel("epoch")
        if values and max(values) > 20 * min(values):
            axes.set_yscale("log")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean norm of a token")
    bar = figure.colorbar(mpl.cm.ScalarMappable(scale, shades), ax=grid, label="block", pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


@styled
def noise_heatmap(values: Mapping[int, Mapping[str, float]], best: tuple[int, str], what: str) -> Figure:
    """A score of a diffusion model's features, layer -> noise level -> value; the one to quote in a frame."""
    levels = list(dict.fromkeys(name for row in values.values() for name in row))
    table = np.array([[row.get(name, np.nan) for name in levels] for row in values.values()])
    figure = Figure((1.9 + 0.75 * len(levels), 1.4 + 0.3 * len(values)), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(table, cmap="viridis", aspect="auto")
    low, high = np.nanmin(table), np.nanmax(table)
    for (row, column), value in np.ndenumerate(table):
        dark = value < (low + high) / 2
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color="white" if dark else "black")
    place = (levels.index(best[1]) - 0.5, list(values).index(best[0]) - 0.5)
    axes.add_patch(mpl.patches.Rectangle(place, 1, 1, fill=False, edgecolor="#d55e00", linewidth=2))
    axes.set_xticks(range(len(levels)), [name.removeprefix("t=") for name in levels])
    axes.set_yticks(range(len(values)), [str(layer) for layer in values])
    axes.set_xlabel("noise level t")
    axes.set_ylabel("layer")
    axes.grid(False)
    figure.colorbar(picture, label=what).outline.set_visible(False)  # type: ignore[operator]
    return figure
