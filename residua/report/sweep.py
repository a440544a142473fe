"""The page of a sweep: scores by setting with intervals over seeds, and curves with bands."""

from __future__ import annotations

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
    page.paragraph(f"{count} finished runs in {len(runs)} settings. Intervals are 95 % over seeds (Student's t).")
    if failed:
        page.heading("Failed")
        page.bullets(f"{name}: {error}" for name, error in failed)
    if summaries:
        _scores(page, summaries)
        _differences(page, summaries, baseline or {})
    _curves(page, runs)
    return page.save(folder / "sweep.html")


# ---------------------------------------------------------------- tables, for the page and the terminal


def score_rows(summaries: Sequence[Any]) -> tuple[list[str], list[list[str | Cell]], int]:
    """Header, one row a setting, and how many columns are settings."""
    by_group = _by_group(summaries)
    names, scores = _names(summaries), _scores_of(summaries)
    ranked = _ranked_by(summaries)
    rows: list[list[str | Cell]] = []
    for group, own in by_group.items():
        first, place = next(iter(own.values())), own.get(ranked)
        images = Cell("–" if first.images is None else f"{first.images:,}", first.images)
        rank = Cell("–", None) if place is None else Cell(str(place.rank), place.rank)
        cells = [Cell(str(own[name]), own[name].mean) if name in own else Cell("–", None) for name in scores]
        settings = [dict(group).get(name, "") for name in names]
        rows.append([*settings, str(max(s.seeds for s in own.values())), images, rank, *cells])
    return [*names, "seeds", "images seen", "rank", *scores.values()], rows, len(names)


def difference_rows(summaries: Sequence[Any]) -> tuple[list[str], list[list[str | Cell]], int]:
    """The same of differences to the baseline; no rows where there are none."""
    found = [s for s in summaries if s.difference is not None]
    names, scores = _names(summaries), _scores_of(found)
    rows: list[list[str | Cell]] = []
    for group, own in _by_group(found).items():
        cells = [
            Cell(own[n].difference_text(), own[n].difference.mean) if n in own else Cell("–", None) for n in scores
        ]
        rows.append([*(dict(group).get(name, "") for name in names), *cells])
    return [*names, *scores.values()], rows, len(names)


def _ranked_by(summaries: Sequence[Any]) -> str:
    """The score whose ranks are shown: the probe's, a classifier's accuracy, or the first that has any."""
    names = [s.score for s in summaries if s.rank is not None]
    return next((name for name in names if name.startswith(("linear probe", "accuracy"))), "".join(names[:1]))


def ranking_note(summaries: Sequence[Any]) -> str:
    """What the ranks are of."""
    score, budgets = _ranked_by(summaries), {s.images for s in summaries}
    if not score:
        return ""
    return f"rank: by {score}" + ", among settings that saw as many images" * (len(budgets) > 1)


def difference_note(baseline: Mapping[str, str]) -> str:
    name = ", ".join(f"{key} {value}" for key, value in baseline.items())
    return f"difference to {name} at the same other settings and images seen, paired by seed: mean ± 95 % interval"


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
    page.table(header, rows, caption=ranking_note(summaries), numbers=first)
    _figures(page, summaries, "score", "mean and 95 % interval over seeds.")


def _differences(page: Page, summaries: Sequence[Any], baseline: Mapping[str, str]) -> None:
    header, rows, first = difference_rows(summaries)
    if not rows:
        return
    page.heading("Against the baseline")
    page.table(header, rows, caption=f"{difference_note(baseline)}; n: seeds that both have", numbers=first)
    _figures(page, summaries, "difference", "difference to the baseline, mean and 95 % interval over seeds.")


def _figures(page: Page, summaries: Sequence[Any], of: Of, caption: str) -> None:
    x = numeric_setting(summaries)
    drawn = {score: x and setting_curves(summaries, score, x, of) for score in _scores_of(summaries)}
    if found := [(figure, f"{score}: {caption}") for score, figure in drawn.items() if figure]:
        page.figures(*found)


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
        at = sorted(lines[line])
        spread = [lines[line][v][1] if lines[line][v][1] == lines[line][v][1] else 0.0 for v in at]
        axes.errorbar(at, [lines[line][v][0] for v in at], yerr=spread, capsize=3, label=label(line, 40), **style)
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
        text = "mean over seeds, band from least to greatest."
        page.figures(*((curves.epoch_curves(m, g, _UNITS.get(m, "")), f"{m}: {text}") for m, g in found.items()))
