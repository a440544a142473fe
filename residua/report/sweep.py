"""The page of a sweep: scores by setting with intervals over seeds, and curves with bands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from residua.report import curves
from residua.report.figures import REFERENCE, finish, label, new_axes, run_styles, styled
from residua.report.page import Cell, Page
from residua.report.parts import METRICS
from residua.report.runs import read_run, while_training

Group = tuple[tuple[str, str], ...]
Of = Literal["score", "difference"]
Rows = tuple[list[str], list[list[str | Cell]], int]
"""Header, rows, and how many columns are settings."""
_BUDGETS = ("steps", "epochs", "depth")  # what goes along the axis where several settings are numbers
_UNITS = METRICS | {"top5": "%", "cross entropy": "nats"}


def group_name(group: Group) -> str:
    return ", ".join(f"{key} {value}" for key, value in group) or "all runs"


def sweep_page(
    folder: Path,
    summaries: Sequence[Any],
    runs: Mapping[Group, Sequence[Path]],
    failed: Sequence[tuple[str, str]],
    baseline: Mapping[str, str] | None = None,
) -> Path:
    """`sweep.html`: one row a setting, one column a score; curves over training with bands over seeds."""
    page = Page(f"Sweep {folder.resolve().name}")
    count = sum(len(paths) for paths in runs.values())
    alone = bool(runs) and all(len(paths) == 1 for paths in runs.values())
    spread = "One seed each, so no intervals." if alone else "Intervals are 95 % over seeds (Student's t)."
    page.paragraph(f"{count} finished runs in {len(runs)} settings. {spread}")
    if failed:
        page.heading("Failed")
        page.bullets(f"{name}: {error}" for name, error in failed)
    if summaries:
        _scores(page, summaries)
        _differences(page, summaries, baseline or {})
    _curves(page, runs)
    return page.save(folder / "sweep.html")


# ---------------------------------------------------------------- tables


def score_rows(summaries: Sequence[Any]) -> Rows:
    """One row a setting, one column a score; no ranks where nothing ranks."""
    names, scores = _names(summaries), _scores_of(summaries)
    ranked = _ranked_by(summaries)
    rows: list[list[str | Cell]] = []
    for group, own in _by_group(summaries).items():
        first, place = next(iter(own.values())), own.get(ranked)
        images = Cell("–" if first.images is None else f"{first.images:,}", first.images)
        rank = Cell("–", None) if place is None else Cell(str(place.rank), place.rank)
        cells = [Cell(str(own[name]), own[name].mean) if name in own else Cell("–", None) for name in scores]
        settings = [dict(group).get(name, "") for name in names]
        seeds = str(max(s.seeds for s in own.values()))
        rows.append([*settings, seeds, images, *([rank] if ranked else []), *cells])
    return [*names, "seeds", "images seen", *(["rank"] if ranked else []), *scores.values()], rows, len(names)


def difference_rows(summaries: Sequence[Any]) -> Rows:
    """The same of differences to the baseline, with the number n of their seeds; no rows where there are none."""
    found = [s for s in summaries if s.difference is not None]
    names, scores = _names(summaries), _scores_of(found)
    rows: list[list[str | Cell]] = []
    for group, own in _by_group(found).items():
        seeds = [s.difference.n for s in own.values()]
        n = Cell(" to ".join(map(str, sorted({min(seeds), max(seeds)}))), min(seeds))
        cells = [
            Cell(own[s].difference_text(), own[s].difference.mean) if s in own else Cell("–", None) for s in scores
        ]
        rows.append([*(dict(group).get(name, "") for name in names), n, *cells])
    return [*names, "n", *scores.values()], rows, len(names)


def _ranked_by(summaries: Sequence[Any]) -> str:
    """The score whose ranks are shown: the probe's, a classifier's accuracy, or the first that has any."""
    names = [s.score for s in summaries if s.rank is not None]
    return next((name for name in names if name.startswith(("linear probe", "accuracy"))), "".join(names[:1]))


def ranking_note(summaries: Sequence[Any], score: str = "each score") -> str:
    """What the ranks are by, or why there are none."""
    if _ranked_by(summaries):
        data, budgets = ({s.settings.get("data") for s in summaries}, {s.images for s in summaries})
        among = " of the same data" * (len(data) > 1) + " that saw as many images" * (len(budgets) > 1)
        return f"rank: by {score}" + (f", among settings{among}" if among else "")
    if any(s.unit == "%" for s in summaries):
        return ""
    return "no rank: without labels there is only the loss, which does not rank features"


def spread(summaries: Sequence[Any], of: Of = "score") -> str:
    """What the numbers of a table are."""
    alone = _alone(summaries, of)
    if all(alone):
        return "one seed each"
    return "mean ± 95 % interval over seeds" + "; one seed where there is no ±" * any(alone)


def difference_note(baseline: Mapping[str, str], summaries: Sequence[Any]) -> str:
    name = group_name(tuple(baseline.items()))
    own = spread(summaries, "difference")
    return f"difference to {name} at the same other settings and images seen, paired by seed: {own}"


def _alone(summaries: Sequence[Any], of: Of) -> list[bool]:
    """Of each number that there is: is it of one seed?"""
    points = [s if of == "score" else s.difference for s in summaries]
    return [math.isnan(p.ci95) for p in points if p is not None and not math.isnan(p.mean)]


def _names(summaries: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(key for s in summaries for key in s.settings))


def _scores_of(summaries: Sequence[Any]) -> dict[str, str]:
    """Score -> its heading."""
    return {s.score: f"{s.score} ({s.unit})" if s.unit else s.score for s in summaries}


def _by_group(summaries: Sequence[Any]) -> dict[Group, dict[str, Any]]:
    found: dict[Group, dict[str, Any]] = {}
    for s in summaries:
        found.setdefault(tuple(s.settings.items()), {})[s.score] = s
    return found


# ---------------------------------------------------------------- parts of the page


def _scores(page: Page, summaries: Sequence[Any]) -> None:
    page.heading("Scores")
    header, rows, first = score_rows(summaries)
    page.table(header, rows, caption=ranking_note(summaries, _ranked_by(summaries)), numbers=first)
    _figures(page, summaries, "score")


def _differences(page: Page, summaries: Sequence[Any], baseline: Mapping[str, str]) -> None:
    header, rows, first = difference_rows(summaries)
    if not rows:
        return
    page.heading("Against the baseline")
    page.table(header, rows, caption=f"{difference_note(baseline, summaries)}; n: seeds that both have", numbers=first)
    _figures(page, summaries, "difference")


def _figures(page: Page, summaries: Sequence[Any], of: Of) -> None:
    x = numeric_setting(summaries)
    drawn = {score: x and setting_curves(summaries, score, x, of) for score in _scores_of(summaries)}
    what = "" if of == "score" else "difference to the baseline, "
    if found := [(f, f"{score}: {what}{_drawn(summaries, score, of)}.") for score, f in drawn.items() if f]:
        page.figures(*found)


def _drawn(summaries: Sequence[Any], score: str, of: Of) -> str:
    """What the points and bars of a figure are."""
    alone = _alone([s for s in summaries if s.score == score], of)
    if all(alone):
        return "one seed"
    return "mean and 95 % interval over seeds" + "; one seed where there is no bar" * any(alone)


def numeric_setting(summaries: Sequence[Any]) -> str | None:
    """The setting to draw scores against: a budget or a depth, else the number that takes the most values."""
    values: dict[str, set[str]] = {}
    for s in summaries:
        for name, value in s.settings.items():
            values.setdefault(name, set()).add(value)
    numbers = [name for name, own in values.items() if len(own) > 1 and all(map(_is_number, own))]
    return max(numbers, key=lambda name: (name in _BUDGETS, len(values[name])), default=None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@styled
def _setting_curves(name: str, x: str, lines: Mapping[str, Mapping[float, tuple[float, float]]], zero: bool) -> Figure:
    figure, axes = new_axes(x, name)
    if zero:
        axes.axhline(0, color=REFERENCE, linestyle=":")
    for line, style in run_styles(lines).items():
        own = dict(sorted(lines[line].items()))
        axes.plot(list(own), [mean for mean, _ in own.values()], label=label(line, 40), **style)
        if bars := [(at, *point) for at, point in own.items() if not math.isnan(point[1])]:
            at, means, spread = zip(*bars)
            axes.errorbar(at, means, yerr=spread, fmt="none", ecolor=style["color"], capsize=3)
    ends = [v for own in lines.values() for v in own]
    if x in ("steps", "epochs", "lr", "base_lr") and min(ends) > 0 and max(ends) > 10 * min(ends):
        axes.set_xscale("log")
        axes.set_xticks(sorted(set(ends)), [f"{v:,.0f}" if v >= 1 else f"{v:g}" for v in sorted(set(ends))])
        axes.minorticks_off()
    return finish(figure, axes)


def setting_curves(summaries: Sequence[Any], score: str, x: str, of: Of = "score") -> Figure | None:
    """A score, or its difference to the baseline, against one setting; a line for each of the others' combinations."""
    lines: dict[str, dict[float, tuple[float, float]]] = {}
    unit = ""
    for s in summaries:
        found = s if of == "score" else s.difference
        if s.score != score or found is None or x not in s.settings:
            continue
        rest = tuple((key, value) for key, value in s.settings.items() if key != x)
        lines.setdefault(group_name(rest) if rest else score, {})[float(s.settings[x])] = (found.mean, found.ci95)
        unit = f" ({s.unit})" if s.unit else ""
    if not lines:
        return None
    name = f"{score}{unit}" if of == "score" else f"Δ {score}{unit}"
    return _setting_curves(name, x, lines, of == "difference")


def _curves(page: Page, runs: Mapping[Group, Sequence[Path]]) -> None:
    found: dict[str, dict[str, list[dict[float, float]]]] = {}
    for group, paths in runs.items():
        for path in paths:
            run = read_run(path)
            losses = {r["epoch"]: r["loss"] for r in run.metrics if "epoch" in r and "loss" in r}
            for metric, curve in {"loss": losses, **while_training(run)}.items():
                found.setdefault(metric, {}).setdefault(group_name(group), []).append(curve)
    if found:
        page.heading("Along training")
        page.figures(*((curves.epoch_curves(m, g, _UNITS.get(m, "")), f"{m}: {_band(g)}.") for m, g in found.items()))


def _band(groups: Mapping[str, Sequence[Any]]) -> str:
    """What the lines and bands of a figure along training are."""
    alone = [len(own) == 1 for own in groups.values()]
    if all(alone):
        return "one seed"
    return "mean over seeds, band from least to greatest" + "; one seed where there is no band" * any(alone)
