"""Figures and page of a network's anatomy: Residual Alignment and Neural Collapse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from residua.anatomy import Alignment, Collapse
from residua.anatomy.mixing import Mixing
from residua.anatomy.study import Anatomy, Moment, Part
from residua.data.source import evenly
from residua.report.figures import INK, REFERENCE, finish, label, new_axes, run_styles, styled
from residua.report.page import Cell, Page

_GRID_BLOCKS = 16  # drawn of a deeper network
_GRID_VALUES = 15
_OTHER_VALUES = 10  # shown of blocks that are not compared
_DRAWN_VALUES = 15

LAWS = {
    "RA1": "representations of an input are equispaced on a line",
    "RA2": "top singular vectors agree, left with right and across depth",
    "RA3": "the rank of a Jacobian is at most the number of classes C",
    "RA4": "top singular values fall inversely with depth",
}
GAUGES = {
    "J": "J, the branch's own Jacobian",
    "J/alpha": "J / alpha, that of the ordinary network it is equivalent to",
}


def shades(count: int) -> list[Any]:
    """Colours from the first block to the last, neither too dark nor too bright for a page."""
    return list(mpl.colormaps["viridis"](np.linspace(0.15, 0.88, max(count, 1))))


def log_scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis with plain numbers, where positive values spread over more than a factor of five."""
    positive = [v for v in values if v > 0]
    if not positive or max(positive) < 5 * min(positive):
        return
    axes.set_yscale("log")
    if max(positive) < 100 * min(positive):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


@styled
def trajectories(paths: Tensor, labels: Tensor | None = None, classes: Sequence[str] | None = None) -> Figure:
    """RA1: paths (L + 1, N, 2) in a plane; a dot at every block, a ring at the start, a colour a class."""
    points = paths.numpy()
    figure = Figure((4.6, 4.3), layout="constrained")
    axes = figure.add_subplot(xlabel="random direction 1", ylabel="random direction 2")
    colours = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
    member = np.zeros(points.shape[1], int) if labels is None else labels.numpy()
    for number, c in enumerate(np.unique(member)):
        name = "" if labels is None else label(classes[c] if classes else str(c))
        colour = colours[number % len(colours)]
        for n in np.flatnonzero(member == c):
            axes.plot(*points[:, n].T, "-", marker=".", markersize=2.5, linewidth=0.7, color=colour, alpha=0.75)
        start = points[0, member == c].T
        axes.plot(*start, "o", markersize=3.5, markerfacecolor="none", markeredgewidth=0.7, color=colour, label=name)
    return finish(figure, axes)


@styled
def alignment_grid(grid: Tensor, names: Sequence[str], title: str) -> Figure:
    """RA2: row i, column j is the matrix of block i in the singular vectors of block j, each row over its largest."""
    blocks = evenly(len(names), _GRID_BLOCKS)
    k = min(_GRID_VALUES, grid.shape[-1])
    cells = grid[blocks][:, blocks][..., :k, :k].cpu().numpy()
    cells = cells / np.maximum(cells.max(axis=(1, 2, 3), keepdims=True), np.finfo(float).tiny)
    count, gap = len(blocks), 1
    side = k + gap
    sheet = np.full((count * side - gap, count * side - gap), np.nan)
    for i in range(count):
        for j in range(count):
            sheet[i * side : i * side + k, j * side : j * side + k] = cells[i, j]
    size = min(7.5, 1.6 + 0.33 * count)
    figure = Figure((size + 0.7, size), layout="constrained")
    axes = figure.add_subplot(xlabel="block j, whose singular vectors are used", ylabel="block i, whose Jacobian it is")
    shown = axes.imshow(sheet, cmap="magma", vmin=0, vmax=1, interpolation="none")
    places = [side * i + (k - 1) / 2 for i in range(count)]
    numbers = [str(b) for b in blocks]
    axes.set_xticks(places, numbers, fontsize=8)
    axes.set_yticks(places, numbers, fontsize=8)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=10, loc="left")
    figure.colorbar(shown, ax=axes, shrink=0.8, label="over the largest of its row")
    return figure


@styled
def singular_values(values: Tensor, classes: int | None = None) -> Figure:
    """RA3: the top singular values (L, K) of every block, a line each; a dotted line after the first C."""
    figure, axes = new_axes("number of the singular value", "singular value")
    shown = values[:, :_DRAWN_VALUES].cpu().numpy()
    floor = 1e-6 * max(float(shown.max()), np.finfo(float).tiny)
    for row, colour in zip(shown, shades(len(shown))):
        axes.plot(range(1, len(row) + 1), np.maximum(row, floor), color=colour, linewidth=1.2, marker=".")
    log_scale(axes, np.maximum(shown, floor).ravel().tolist())
    if classes is not None and classes < shown.shape[1]:
        axes.axvline(classes + 0.5, color=REFERENCE, linestyle=":")
        axes.text(classes + 0.7, float(shown.max()), f"C = {classes}", fontsize=9, va="top")
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, max(len(shown) - 1, 1)), _block_map())
    bar = figure.colorbar(scale, ax=axes, label="block", pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar.outline.set_visible(False)  # type: ignore[operator]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _block_map() -> Any:
    return mpl.colors.LinearSegmentedColormap.from_list("", shades(64))


@styled
def inverse_values(groups: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """RA4: 1 / s_1 by block, mean and spread, with the line fitted to the means; several networks in one drawing."""
    figure, axes = new_axes("block", "1 / largest singular value")
    for name, style in run_styles(groups).items():
        means, spread = (np.asarray(v, float) for v in groups[name])
        at = np.arange(len(means))
        alive = means < 1e12  # a dead block has no largest value
        if alive.sum() < 2:
            continue
        at, means, spread = at[alive], means[alive], spread[alive]
        slope, start = np.polyfit(at, means, 1)
        text = f"{label(name)}: slope {slope:.2g}"
        axes.errorbar(at, means, yerr=spread, capsize=2, label=text, **style | {"linestyle": ""})
        axes.plot(at, start + slope * at, color=style["color"], linewidth=1.0, linestyle="--")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, axes)


@styled
def collapse_curves(parts: Mapping[str, Mapping[str, Collapse]]) -> Figure:
    """NC1 to NC4 by layer, a line a split; NC3 and NC4 at the layers where a classifier's rows and decisions are."""
    panels = {
        "nc1": "NC1: within / between", "nc2_norms": "NC2: variation of norms",
        "nc2_angles": "NC2: deviation of angles", "nc3": "NC3: distance of rows and means",
        "nc4": "NC4: nearest mean agrees (%)",
    }  # fmt: skip
    everything = [c for part in parts.values() for c in part.values()]
    shown = [field for field in panels if any(getattr(c, field) is not None for c in everything)]
    figure = Figure((10.5 if len(shown) > 4 else 7.4, 4.8), layout="constrained")
    grid = figure.subplots(2, 3 if len(shown) > 4 else 2).flat
    for axes in grid[len(shown) :]:
        axes.remove()
    for axes, field in zip(grid, shown):
        text = panels[field]
        drawn: list[float] = []
        for name, style in run_styles(parts).items():
            found = {i: v for i, c in enumerate(parts[name].values()) if (v := getattr(c, field)) is not None}
            axes.plot(list(found), list(found.values()), label=label(name), **style)
            drawn += found.values()
        log_scale(axes, drawn if field == "nc1" else [])
        axes.set_xlabel("layer (0: before the first block)")
        axes.set_title(text, fontsize=10, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, figure.axes[0])


@styled
def along_training(moments: Sequence[Moment], score: str) -> Figure:
    """Block coupling and diagonal share against the score, one point a checkpoint, joined in the order of training."""
    figure = Figure((7.4, 3.1), layout="constrained")
    panels = zip(figure.subplots(1, 2), ("RA2 coupling", "RA2 diagonal share"))
    for axes, name in panels:
        values = np.array([m.laws.scalars()[name] for m in moments])
        scored = all(m.score is not None for m in moments)
        at = [m.score if scored else m.step for m in moments]
        axes.plot(at, values[:, 0], color=REFERENCE, linewidth=0.8)
        axes.errorbar(at, values[:, 0], yerr=values[:, 1], fmt="none", color=REFERENCE, linewidth=0.8)
        shown = axes.scatter(at, values[:, 0], c=[m.step for m in moments], cmap=_block_map(), zorder=3, s=22)
        axes.set_xlabel(score if scored else "step")
        axes.set_title(name, fontsize=10, loc="left")
    figure.colorbar(shown, ax=figure.axes, label="step", pad=0.02).outline.set_visible(False)  # type: ignore[operator]
    return figure


# ---------------------------------------------------------------- the page


def anatomy_page(found: Anatomy, name: str, path: Path, moments: Sequence[Moment] = (), score: str = "") -> Path:
    """One page: the laws with their verdicts, the pictures of each, collapse by layer, checkpoints where there are."""
    page = Page(f"Anatomy of {name}")
    first = found.parts[0].laws
    samples = ", ".join(f"{len(part.laws.S)} {part.split}" for part in found.parts)
    page.paragraph(
        f"Residual Jacobians of {len(first.names)} blocks at {samples} images, the top {first.S.shape[-1]} singular "
        f"triplets of each in {found.look.precision}; gauge: {GAUGES[first.gauge]}."
        + (f" Only token {found.look.token}, the others fixed." if found.look.token is not None else "")
    )
    if found.left_out:
        page.paragraph(
            f"Of another shape than the {len(first.names)} blocks compared, so only their singular values are given: "
            f"{', '.join(found.left_out)}.",
            note=True,
        )
    for part in found.parts:
        if part.laws.converged < 1:
            text = f"{100 * (1 - part.laws.converged):.1f} % of the triplets on {part.split} images did not converge."
            page.paragraph(text, note=True)
    law_tables(page, {part.split: part.laws for part in found.parts})
    for part in found.parts:
        page.heading(f"On {part.split} images")
        _part(page, part, found.classes)
    _collapse(page, found.parts)
    if moments:
        page.heading("Along training")
        text = "Every checkpoint: mean over pairs of different blocks, bars: spread over samples."
        page.figures((along_training(moments, score), text))
    return page.save(path)


def law_tables(page: Page, laws: Mapping[str, Alignment]) -> None:
    """Verdicts by their thresholds, then every number, mean ± spread over samples; a column a split."""
    page.heading("The four laws")
    verdicts = {name: found.verdicts() for name, found in laws.items()}
    rows: list[list[str | Cell]] = []
    for law, statement in LAWS.items():
        told = [v[law] for v in verdicts.values() if law in v]
        if told:
            holds = ["yes" if v[law][0] else "no" for v in verdicts.values() if law in v]
            rows.append([law, statement, told[0][1], *holds])
    page.table(["law", "statement", "holds if, on the mean over samples", *laws], rows, numbers=3)
    unjudged = {f"{law}: {why}" for found in laws.values() for law, why in found.unjudged().items()}
    if unjudged:
        page.paragraph("Not judged: " + "; ".join(sorted(unjudged)) + ".", note=True)
    scalars = {name: found.scalars() for name, found in laws.items()}
    rows = []
    for name in next(iter(scalars.values())):
        cells = [Cell(f"{s[name][0]:.3f} ± {s[name][1]:.3f}", s[name][0]) for s in scalars.values()]
        rows.append([name, *cells])
    page.table(["number", *laws], rows, caption="Mean ± standard deviation over samples.")


def _part(page: Page, part: Part, classes: Sequence[str] | None) -> None:
    laws = part.laws
    values = laws.to_dict()
    page.figures(
        (trajectories(part.paths, part.labels, classes),
         "RA1: the stream of some images through the blocks in one random plane; rings: before the first block."),
        (singular_values(laws.S.mean(0), laws.classes), "RA3: top singular values of every block, mean over samples."),
        (inverse_values({part.split: (values["inverse_s1"], values["inverse_s1_spread"])}),
         "RA4: 1 / s_1 by block, mean and spread over samples, with the fitted line."),
    )  # fmt: skip
    grids(page, laws)
    if part.others:
        rows: list[list[str | Cell]] = [
            [name, *(Cell(f"{float(s):.3g}", float(s)) for s in values[:_OTHER_VALUES])]
            for name, values in part.others.items()
        ]
        width = max(len(row) for row in rows)
        padded = [[*row, *[""] * (width - len(row))] for row in rows]
        header = ["block", *(f"s_{i}" for i in range(1, width))]
        page.table(header, padded, caption="Top singular values of blocks of other shapes, mean over samples.")


def grids(page: Page, laws: Alignment) -> None:
    """Both pictures of RA2."""
    shown = f"first {min(_GRID_VALUES, laws.S.shape[-1])} vectors, mean over samples"
    page.figures(
        (alignment_grid(laws.grid, laws.names, "|U_j' J_i V_j|"),
         f"RA2: diagonal everywhere if all blocks share their singular vectors ({shown})."),
        (alignment_grid(laws.swapped, laws.names, "|V_j' J_i U_j|"),
         "RA2: the same with left and right vectors exchanged; equal to the first if they agree."),
    )  # fmt: skip


def _collapse(page: Page, parts: Sequence[Part]) -> None:
    found = {part.split: part.collapse for part in parts if part.collapse}
    if not found:
        return
    page.heading("Neural collapse")
    rows: list[list[str | Cell]] = []
    for part in parts:
        if part.collapse:
            last = list(part.collapse.values())[-1]
            numbers = [last.nc1, last.nc2_norms, last.nc2_angles, last.nc3, last.nc4, part.accuracy]
            cells = [Cell("–", None) if v is None else Cell(f"{v:.3g}", v) for v in numbers]
            rows.append([part.split, str(last.samples), *cells])
    header = ["images of", "number", "NC1", "NC2 norms", "NC2 angles", "NC3", "NC4 (%)", "accuracy (%)"]
    page.table(header, rows, caption="Of the last layer. NC1 to NC3 are 0, NC4 is 100 when collapsed.")
    page.figures((collapse_curves(found), "By layer; class means are those of the same images."))


# ---------------------------------------------------------------- the unconstrained model


def ujm_page(model: Any, laws: Alignment, path: Path) -> Path:
    """The same pictures of a solved unconstrained Jacobians model."""
    page = Page(f"Unconstrained Jacobians Model, {model.depth} blocks, {model.penalty} penalty")
    page.paragraph(
        f"{len(model.x)} samples in {model.x.shape[1]} dimensions; loss {model.loss:.6g}, norm of its gradient "
        f"{model.gradient:.1e}, {model.accuracy():.1f} % of the samples classified right."
    )
    law_tables(page, {"samples": laws})
    values = laws.to_dict()
    flat = model.path()[..., :2]
    lines = (values["inverse_s1"], values["inverse_s1_spread"])
    page.figures(
        (trajectories(flat, model.y - int(model.y.min())), "RA1: paths of all samples in the first two coordinates."),
        (singular_values(laws.S.mean(0), laws.classes), "RA3: singular values of every J."),
        (inverse_values({model.penalty: lines}), "RA4: 1 / s_1 by block; slope |<u, v>| where steps are equal."),
    )
    grids(page, laws)
    return page.save(path)


# ---------------------------------------------------------------- what layers are made of


@styled
def share_bars(mixes: Mapping[str, Mixing], spread: Mapping[str, tuple[float, float]] | None = None) -> Figure:
    """What the last layer of each network is made of: a stacked bar from the embedding to the last sublayer.

    A bracket marks the echo: the embedding and the first third of the sublayers. Shares below zero, of branches that
    erase, stand left of it. `spread` is the deviation of the embedding's share and of the echo over runs.
    """
    figure = Figure((5.0, 0.6 + 0.8 * len(mixes)), layout="constrained")  # a phone shows it whole
    axes = figure.add_subplot(xlabel="share of the last layer, %")
    for row, (name, mix) in enumerate(mixes.items()):
        shares = [100 * share for share in mix.shares[-1].tolist()]
        right = left = 0.0
        for i, (share, colour) in enumerate(zip(shares, [REFERENCE, *shades(len(shares) - 1)])):
            start = right if share >= 0 else left
            axes.barh(row, share, 0.5, left=start, color=colour, edgecolor="white", linewidth=0.6)
            words = mix.names[i] if i == 0 and share > 17 else _sublayer(mix.names[i]) if share > 9 and i else ""
            ink = "white" if sum(mpl.colors.to_rgb(colour)) < 1.6 else "#1b1c1e"
            axes.text(start + share / 2, row, words, ha="center", va="center", fontsize=7.5, color=ink)
            right, left = (right + share, left) if share >= 0 else (right, left + share)
        found = zip(("embedding", "echo"), (mix.embedding, mix.echo), (spread or {}).get(name, (0.0, 0.0)))
        text = ", ".join(f"{word} {_percent(share, s)} %" for word, share, s in found)
        echo = 100 * mix.echo
        axes.plot([0, 0, echo, echo], [row - y for y in (0.29, 0.36, 0.36, 0.29)], color=INK, linewidth=1.0)
        axes.text(0, row - 0.4, text, fontsize=9, va="bottom")
    axes.set_yticks(range(len(mixes)), [label(name) for name in mixes])
    axes.set_ylim(len(mixes) - 0.65, -0.75)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    return figure


def _percent(share: float, spread: float) -> str:
    if spread:
        return f"{100 * share:.0f} ± {100 * spread:.0f}"
    return f"{100 * share:.{0 if abs(share) >= 0.095 else 1}f}"


def _sublayer(name: str) -> str:
    """`blocks.3.attn` -> `attn 3`."""
    parts = name.split(".")
    return f"{parts[-1]} {parts[1]}" if len(parts) == 3 and parts[0] == "blocks" else name
