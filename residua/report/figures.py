"""Figures: pure functions from numbers and pictures to a matplotlib Figure. No state, no window, no file.

Ink (text, axes, ticks) has one colour of its own, `INK`, over a transparent ground: a page may turn it into
the reader's text colour, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import cycle
from pathlib import Path
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


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(STYLE):  # type: ignore[arg-type]
            return draw(*args, **kwargs)

    return wrapper


def save(figure: Figure, path: str | Path, dpi: int = 200) -> Path:
    """Write a figure on white, as PNG or whatever the name's ending says."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, facecolor="white")
    return path


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


@styled
def loss_curves(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Training loss against the step; `records` are the lines of each run's metrics.jsonl."""
    figure, axes = new_axes("step", "loss (mean squared error)")
    for name, style in run_styles(records).items():
        points = [(r["step"], r["loss"]) for r in records[name] if r.get("loss") is not None]
        if points:
            axes.plot(*zip(*points), label=label(name), **style | {"marker": "" if len(points) > 1 else "o"})
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    return finish(figure, axes)


@styled
def depth_curves(
    metric: str,
    runs: Mapping[str, Curve],
    baselines: Mapping[str, Curve | float] | None = None,
    unit: str = "%",
) -> Figure:
    """A score by block. Baselines are grey: a curve by layer, or a level line where they have no layers."""
    figure, axes = new_axes("block", f"{metric} ({unit})" if unit else metric)
    for name, style in run_styles(runs).items():
        _draw_curve(axes, runs[name], label=label(name), **style)
    for (name, value), dashes in zip((baselines or {}).items(), cycle((":", "--", "-."))):
        if isinstance(value, Mapping):
            style = {"marker": ".", "markersize": 5} if len(value) == 1 else {}
            _draw_curve(axes, value, label=label(name), color=REFERENCE, linestyle=dashes, **style)
        else:
            axes.axhline(value, color=REFERENCE, linestyle=dashes, label=label(name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, axes)


@styled
def spectrum_curves(lines: Mapping[str, Sequence[float]]) -> Figure:
    """Singular values over the largest, by number, on logarithmic axes."""
    figure, axes = new_axes("number of the singular value", "singular value / largest")
    for name, style in run_styles(lines).items():
        values = [v / lines[name][0] for v in lines[name] if v > 1e-8 * lines[name][0]]
        axes.loglog(range(1, len(values) + 1), values, label=label(name), **(style | {"marker": ""}))
    return finish(figure, axes)


@styled
def alpha_schedule(alphas: Mapping[str, Sequence[float]]) -> Figure:
    """alpha of every residual step, in order."""
    figure, axes = new_axes("residual step (attention and MLP of each block)", "alpha (share of the stream kept)")
    for name, style in run_styles(alphas).items():
        values = [float(a) for a in alphas[name]]
        axes.plot(range(len(values)), values, label=label(name), **style)
    axes.set_ylim(min(0.45, axes.get_ylim()[0]), 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, axes)


@styled
def reconstructions(rows: Mapping[str, np.ndarray]) -> Figure:
    """Labelled rows of pictures, each (N, h, w, 3) in [0, 1]: truth, masked, then one row per model."""
    return _picture_rows(list(rows.items()))


@styled
def feature_maps(images: np.ndarray, maps: Mapping[str, np.ndarray], title: str = "") -> Figure:
    """Under each picture (N, h, w, 3), its patches of every model as colours (N, rows, cols, 3)."""
    size = images.shape[1:3]
    return _picture_rows([("image", images), *((name, _enlarge(m, size)) for name, m in maps.items())], title)


@styled
def attention_maps(images: np.ndarray, maps: Mapping[str, np.ndarray], title: str = "") -> Figure:
    """Under each picture (N, h, w, 3), how much attention its patches get (N, rows, cols), dark to bright.

    Each picture is scaled by its own least and greatest weight.
    """
    shade = mpl.colormaps["inferno"]
    size = images.shape[1:3]
    rows = [("image", images)]
    for name, weights in maps.items():
        if not np.isfinite(weights).all():
            raise ValueError(f"the attention of {name} is not finite; did training diverge?")
        low, high = (f(weights, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
        unit = (weights - low) / np.maximum(high - low, 1e-12)
        rows.append((name, _enlarge(shade(unit)[..., :3], size)))
    return _picture_rows(rows, title)


@styled
def class_plane(planes: Mapping[str, Any]) -> Figure:
    """t-SNE of several models side by side (`Projection`s of the same images), the silhouette score above each."""
    columns = min(3, len(planes))
    rows = -(-len(planes) // columns)
    classes = next(iter(planes.values())).classes
    height = 3.3 * rows + 0.22 * -(-len(classes) // (2 * columns)) + 0.2
    figure = Figure((4.6 if columns == 1 else 3.0 * columns, height + 0.9 * (columns == 1)), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    colours = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for axes in grid:
        axes.axis("off")
    for (name, plane), axes in zip(planes.items(), grid):
        for i, text in enumerate(classes):
            x, y = plane.points[plane.labels == i].T
            marker = _MARKERS[i // len(colours) % len(_MARKERS)]
            axes.plot(x, y, marker, color=colours[i % len(colours)], label=label(text), markersize=3.2, alpha=0.85)
        scores = f"silhouette {plane.silhouette:.3f}\nin the plane {plane.silhouette_plane:.3f}"
        axes.set_title(f"{_short(name)}\n{scores}", fontsize=10)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if columns == 1 else 2 * columns)
    return figure


@styled
def neighbor_rows(pictures: Mapping[str, np.ndarray], queries: int = 4) -> Figure:
    """(Q, 1 + k, h, w, 3) of several models with the same queries: for each query a row per model."""
    first = next(iter(pictures.values()))
    rows = [(name, found[q]) for q in range(min(queries, len(first))) for name, found in pictures.items()]
    return _picture_rows(rows, "query, then nearest first", apart=first.shape[3] // 3, every=len(pictures))


@styled
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


def _picture_rows(rows: Sequence[tuple[str, np.ndarray]], title: str = "", apart: int = 0, every: int = 0) -> Figure:
    """Rows of equally many pictures of one size, the label at the left of each.

    `apart` pixels set the first picture of a row off; a wider gap follows `every` so many rows.
    """
    count, height, width = rows[0][1].shape[:3]
    gap = _gap(height)
    strips: list[np.ndarray] = []
    places: list[float] = []
    top = 0
    for i, (_, row) in enumerate(rows):
        if i:
            wide = gap * (3 if every and i % every == 0 else 1)
            strips.append(np.zeros((wide, strips[0].shape[1], 4)))
            top += wide
        strip = _tile(_opaque(row), gap)
        strips.append(np.insert(strip, [width] * apart, 0.0, axis=1))
        places.append(top + height / 2)
        top += height
    figure, axes = _sheet(np.concatenate(strips), columns=count)
    axes.axis("on")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks(places, [_short(name) for name, _ in rows])
    axes.set_xticks([])
    axes.tick_params(length=0)
    if title:
        axes.set_title(title, fontsize=10, loc="left")
        figure.set_figheight(figure.get_figheight() + 0.3)
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


def new_axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _draw_curve(axes: Axes, curve: Curve, **style: Any) -> None:
    layers = sorted(curve)
    axes.plot(layers, [curve[i] for i in layers], **style)


def finish(figure: Figure, axes: Axes) -> Figure:
    """The legend above the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside upper left", ncols=2 if len(labels) < 7 else 3)
    return figure


def label(name: str, most: int = 24) -> str:
    """matplotlib leaves names that begin with an underscore out of legends."""
    return f"\u200b{_short(name, most)}" if name.startswith("_") else _short(name, most)


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 9]}…{name[-8:]}"
