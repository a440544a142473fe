"""Figures: pure functions from numbers and pictures to a matplotlib Figure. No state, no window, no file.

Ink (text, axes, ticks) has one colour of its own, `INK`, over a transparent ground: a page may turn it into
the reader's text colour, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#1b1c1d"
REFERENCE = "#8a8f98"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#a0522d")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_SIZE = (4.6, 3.0)  # inches: one column of a page, a whole screen of a phone

Curve = Mapping[int, float]
P = ParamSpec("P")

STYLE: dict[str, Any] = {
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "axes.grid": True, "grid.color": REFERENCE, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "font.family": "sans-serif", "font.size": 10, "axes.labelsize": 10, "legend.fontsize": 9,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 4, "text.parse_math": False,
}  # fmt: skip


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(STYLE):  # type: ignore[arg-type]
            return draw(*args, **kwargs)

    return wrapper


def run_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each run, by its place among the names: the same on all figures."""
    n = len(PALETTE)
    return {
        name: {
            "color": PALETTE[i % n],
            "linestyle": _DASHES[i // n % len(_DASHES)],
            "marker": _MARKERS[i % n],
        }
        for i, name in enumerate(names)
    }


@_styled
def loss_curves(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Training loss against the step; `records` are the lines of each run's metrics.jsonl."""
    figure, axes = _axes("step", "loss (mean squared error)")
    for name, style in run_styles(records).items():
        points = [(r["step"], r["loss"]) for r in records[name] if r.get("loss") is not None]
        if points:
            axes.plot(*zip(*points), label=_label(name), **style | {"marker": "" if len(points) > 1 else "o"})
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    return _finish(figure, axes)


@_styled
def depth_curves(
    metric: str,
    runs: Mapping[str, Curve],
    baselines: Mapping[str, Curve | float] | None = None,
    unit: str = "%",
) -> Figure:
    """A score by block. Baselines are grey: a curve by layer, or a level line where they have no layers."""
    figure, axes = _axes("block", f"{metric} ({unit})" if unit else metric)
    for name, style in run_styles(runs).items():
        _draw_curve(axes, runs[name], label=_label(name), **style)
    for (name, value), dashes in zip((baselines or {}).items(), _cycle((":", "--", "-."))):
        if isinstance(value, Mapping):
            style = {"marker": ".", "markersize": 5} if len(value) == 1 else {}
            _draw_curve(axes, value, label=_label(name), color=REFERENCE, linestyle=dashes, **style)
        else:
            axes.axhline(value, color=REFERENCE, linestyle=dashes, label=_label(name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes)


@_styled
def alpha_schedule(alphas: Mapping[str, Sequence[float]]) -> Figure:
    """alpha of every residual step, in order."""
    figure, axes = _axes("residual step (attention and MLP of each block)", "alpha (share of the stream kept)")
    for name, style in run_styles(alphas).items():
        values = [float(a) for a in alphas[name]]
        axes.plot(range(len(values)), values, label=_label(name), **style)
    axes.set_ylim(min(0.45, axes.get_ylim()[0]), 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes)


@_styled
def reconstructions(rows: Mapping[str, np.ndarray]) -> Figure:
    """Labelled rows of pictures, each (N, h, w, 3) in [0, 1]: truth, masked, then one row per model."""
    return _picture_rows(rows)


@_styled
def feature_maps(images: np.ndarray, maps: Mapping[str, np.ndarray]) -> Figure:
    """Under each picture (N, h, w, 3), its patch features of every model as colours (N, rows, cols, 3)."""
    size = images.shape[1:3]
    return _picture_rows({"image": images} | {name: _enlarge(m, size) for name, m in maps.items()})


@_styled
def neighbor_grid(pictures: np.ndarray) -> Figure:
    """(Q, 1 + k, h, w, 3): a query in each row, then its neighbours, nearest first."""
    count, height, width = pictures.shape[1:4]
    gap, apart = _gap(height), max(3, width // 3)
    rows = []
    for row in pictures:
        first = _opaque(row[:1])
        rest = _tile(_opaque(row[1:]), gap)
        rows.append(np.concatenate([first[0], np.zeros((height, apart, 4)), rest], axis=1))
    sheet = _stack(rows, gap)
    figure, axes = _sheet(sheet, columns=count)
    middle = width + apart + (sheet.shape[1] - width - apart) / 2
    for x, text in ((width / 2, "query"), (middle, "nearest first")):
        axes.text(x, -0.2 * height, text, ha="center", va="bottom")
    return figure


def _picture_rows(rows: Mapping[str, np.ndarray]) -> Figure:
    """Rows of equally many pictures of one size, the label at the left of each."""
    first = next(iter(rows.values()))
    count, height = first.shape[0], first.shape[1]
    gap = _gap(height)
    figure, axes = _sheet(_stack([_tile(_opaque(r), gap) for r in rows.values()], gap), columns=count)
    axes.axis("on")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([i * (height + gap) + height / 2 for i in range(len(rows))], [_short(n) for n in rows])
    axes.set_xticks([])
    axes.tick_params(length=0)
    return figure


def _sheet(sheet: np.ndarray, columns: int) -> tuple[Figure, Axes]:
    """A figure that is one picture, as wide as its columns ask for."""
    width = min(9.0, 0.95 * columns + 0.6)
    figure = Figure((width, width * sheet.shape[0] / sheet.shape[1]), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(sheet, interpolation="none")
    axes.axis("off")
    axes.grid(False)
    return figure, axes


def _tile(pictures: np.ndarray, gap: int) -> np.ndarray:
    """(N, h, w, 4) side by side with transparent gaps."""
    space = np.zeros((pictures.shape[1], gap, 4))
    parts = [part for picture in pictures for part in (picture, space)]
    return np.concatenate(parts[:-1], axis=1)


def _stack(rows: Sequence[np.ndarray], gap: int) -> np.ndarray:
    space = np.zeros((gap, *rows[0].shape[1:]))
    parts = [part for row in rows for part in (row, space)]
    return np.concatenate(parts[:-1], axis=0)


def _opaque(pictures: np.ndarray) -> np.ndarray:
    pictures = np.clip(np.asarray(pictures, dtype=np.float64), 0, 1)
    return np.concatenate([pictures, np.ones((*pictures.shape[:-1], 1))], axis=-1)


def _enlarge(maps: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Each cell as the rectangle of pixels that it stands for."""
    y = np.arange(size[0]) * maps.shape[1] // size[0]
    x = np.arange(size[1]) * maps.shape[2] // size[1]
    return maps[:, y][:, :, x]


def _gap(side: int) -> int:
    return max(1, round(side / 12))


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _draw_curve(axes: Axes, curve: Curve, **style: Any) -> None:
    layers = sorted(curve)
    axes.plot(layers, [curve[i] for i in layers], **style)


def _finish(figure: Figure, axes: Axes) -> Figure:
    """The legend above the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper left", ncols=2 if len(labels) < 7 else 3)
    return figure


def _label(name: str) -> str:
    """matplotlib leaves names that begin with an underscore out of legends."""
    return f"\u200b{_short(name)}" if name.startswith("_") else _short(name)


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 9]}…{name[-8:]}"


def _cycle(items: Sequence[str]) -> Iterable[str]:
    while True:
        yield from items
