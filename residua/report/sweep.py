"""The page of a sweep: scores by setting with intervals over seeds, and curves with bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from residua.report import curves
from residua.report.figures import finish, label, new_axes, run_styles, styled
from residua.report.page import Cell, Page
from residua.report.parts import METRICS
from residua.report.runs import read_run, while_training

Group = tuple[tuple[str, str], ...]


def group_name(group: Group) -> str:
    return ", ".join(f"{key} {value}" for key, value in group) or "all runs"


def sweep_page(
    folder: Path, summaries: Sequence[Any], runs: Mapping[Group, Sequence[Path]], failed: Sequence[tuple[str, str]]
) -> Path:
    """`sweep.html`: one row a setting, one column a score; curves over training with bands over seeds."""
    page = Page(f"Sweep {folder.resolve().name}")
    count = sum(len(paths) for paths in runs.values())
    page.paragraph(f"{count} finished runs in {len(runs)} settings. Intervals are 95 % over seeds (Student's t).")
    if failed:
        page.heading("Failed")
        page.bullets(f"{name}: {error}" for name, error in failed)
    _scores(page, summaries)
    _curves(page, runs)
    return page.save(folder / "sweep.html")


def _scores(page: Page, summaries: Sequence[Any]) -> None:
    scores = list(dict.fromkeys(s.score for s in summaries))
    by_group: dict[Group, dict[str, Any]] = {}
    for s in summaries:
        by_group.setdefault(tuple(s.settings.items()), {})[s.score] = s
    if not by_group:
        return
    page.heading("Scores")
    names = list(dict.fromkeys(key for group in by_group for key, _ in group))
    rows: list[list[str | Cell]] = []
    for group, own in by_group.items():
        settings = dict(group)
        seeds = max(s.seeds for s in own.values())
        cells = [Cell(str(own[name]), own[name].mean) if name in own else Cell("–", None) for name in scores]
        rows.append([*(settings.get(name, "") for name in names), str(seeds), *cells])
    units = {s.score: s.unit for s in summaries}
    headings = [f"{name} ({units[name]})" if units[name] else name for name in scores]
    page.table([*names, "seeds", *headings], rows, numbers=len(names))
    drawn = [(figure, f"{score}, mean and interval.") for score in scores if (figure := _bars(score, by_group, units))]
    page.figures(*drawn)


def _bars(score: str, by_group: Mapping[Group, Mapping[str, Any]], units: Mapping[str, str]) -> Figure | None:
    """A score against the one setting that was swept, where there is one and it is a number."""
    names = {key for group in by_group for key, _ in group}
    if len(names) != 1:
        return None
    try:
        points = {float(dict(group)[next(iter(names))]): own[score] for group, own in by_group.items() if score in own}
    except ValueError:
        return None
    return _points(score, units[score], next(iter(names)), points)


@styled
def _points(score: str, unit: str, setting: str, points: Mapping[float, Any]) -> Figure:
    figure, axes = new_axes(setting, f"{score} ({unit})" if unit else score)
    (style,) = run_styles([score]).values()
    at = sorted(points)
    means = [points[x].mean for x in at]
    spread = [points[x].ci95 if points[x].ci95 == points[x].ci95 else 0.0 for x in at]
    axes.errorbar(at, means, yerr=spread, capsize=3, label=label(score, 40), **style)
    return finish(figure, axes)


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
        page.figures(*((curves.epoch_curves(m, g, METRICS.get(m, "")), f"{m}: {text}") for m, g in found.items()))
