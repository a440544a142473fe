"""The part of a comparison about what happened along training, after the first paper's figure 5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from residua.evaluate.dynamics import KNN, PROBE, RANK, Correlation, Dynamics, Point
from residua.report import curves
from residua.report.page import Cell, Page
from residua.report.parts import METRICS, notes, setting_cell
from residua.report.runs import Run, differing_settings, while_training

_SHOWN = (PROBE, KNN, RANK, "RankMe")
_NUISANCE = {"alpha_min", "seed"}


def groups(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Label -> names of the runs on one curve: those of one alpha_min where runs differ in that (and seed) alone."""
    alphas: dict[str, Any] = {run.name: run.settings.get("alpha_min") for run in runs}
    known = all(isinstance(alpha, float) for alpha in alphas.values())
    if len(set(alphas.values())) == 1 or not known or not differing_settings(runs).keys() <= _NUISANCE:
        return {run.name: [run.name] for run in runs}
    found: dict[str, list[str]] = {}
    for name, alpha in sorted(alphas.items(), key=lambda item: float(item[1])):
        found.setdefault(f"alpha_min {float(alpha):g}", []).append(name)
    several = max(map(len, found.values())) > 1
    return {f"{label} ({_count(own)})" if several else label: own for label, own in found.items()}


def _count(runs: Sequence[str]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def along_training(page: Page, runs: Sequence[Run], found: Dynamics) -> None:
    """Curves over epochs by alpha_min, then the correlation of rank and accuracy over the runs, then every number."""
    page.heading("Along training")
    notes(page, found.notes)
    if not found.points:
        return
    of = groups(runs)
    lines = {m: {name: found.curve(m, name) for name in found.runs} for m in _SHOWN if m in found.metrics}
    if drawn := _curves(lines, of):
        page.figures(*drawn)
    counts = {run: len({p.step for p in found.points if p.run == run}) for run in found.runs}
    if few := [f"{run} ({count})" for run, count in counts.items() if count < 3]:
        page.paragraph(f"Too few checkpoints for a curve: {', '.join(few)}. pretrain --keep 0 keeps all.", note=True)
    if any(len(own) > 1 for own in of.values()):
        page.paragraph("A line is the mean of its runs, the band reaches from the least to the greatest.")
    _correlations(page, found)
    with page.fold("Every number along training"):
        rows: list[list[str | Cell]] = [
            [p.run, setting_cell(p.step), Cell(f"{p.epoch:.4g}", p.epoch), p.metric, setting_cell(p.layer),
             Cell(f"{p.value:.4g}", p.value)]
            for p in found.points
        ]  # fmt: skip
        page.table(["run", "step", "epoch", "metric", "block", "value"], rows, numbers=4)


def scores_while_training(page: Page, runs: Sequence[Run]) -> None:
    """Curves of the scores that runs wrote down while training; of three or more, how rank and accuracy go together."""
    measured = {run.name: while_training(run) for run in runs}
    metrics = dict.fromkeys(metric for own in measured.values() for metric in own)
    lines = {m: {name: own.get(m, {}) for name, own in measured.items()} for m in metrics}
    if drawn := _curves(lines, groups(runs)):
        page.heading("While training")
        page.figures(*drawn)
        if len(runs) > 2:
            _correlations(page, as_dynamics(measured))


def as_dynamics(measured: Mapping[str, Mapping[str, Mapping[float, float]]]) -> Dynamics:
    """Run -> metric -> epoch -> value of the last block, as a table of points."""
    return Dynamics([
        Point(name, -1, epoch, metric, -1, value)
        for name, own in measured.items() for metric, curve in own.items() for epoch, value in curve.items()
    ])  # fmt: skip


def _curves(
    lines: Mapping[str, Mapping[str, Mapping[float, float]]], of: Mapping[str, Sequence[str]]
) -> list[tuple[Figure, str]]:
    drawn = []
    for metric, by_run in lines.items():
        grouped = {label: [by_run[name] for name in own if by_run.get(name)] for label, own in of.items()}
        if any(grouped.values()):
            figure = curves.epoch_curves(metric, grouped, METRICS.get(metric, ""))
            drawn.append((figure, f"{metric} of the last block by epoch."))
    return drawn


def _correlations(page: Page, found: Dynamics) -> None:
    pairs = {accuracy: found.correlation(RANK, accuracy) for accuracy in (PROBE, KNN)}
    pairs = {accuracy: rows for accuracy, rows in pairs.items() if rows}
    if not pairs:
        return
    page.heading("Rank and accuracy")
    defined = {accuracy: [c for c in rows if math.isfinite(c.r)] for accuracy, rows in pairs.items()}
    drawn = [
        (
            curves.correlation_curve(rows, RANK, accuracy),
            f"Pearson's correlation between {RANK} and {accuracy} over the runs, by epoch; filled: p < 0.05.",
        )
        for accuracy, rows in defined.items()
        if rows
    ]
    if drawn:
        page.figures(*drawn)
        page.paragraph(
            "p-values are two-sided, of one epoch at a time, not corrected for their number, and take all runs as "
            "independent, those that differ in the seed alone too."
        )
    most = max(c.n for rows in pairs.values() for c in rows)
    if most < 3:
        page.paragraph(
            f"The correlation over runs is undefined here: at most {most} run{'s' * (most > 1)} measured the same "
            "epoch, and it takes three or more.",
            note=True,
        )
        return
    rows = [[accuracy, *_correlation_cells(c)] for accuracy, found_rows in pairs.items() for c in found_rows]
    page.table([f"{RANK} and", "epoch", "runs", "r", "p", "note"], rows, numbers=1)


def _correlation_cells(c: Correlation) -> list[str | Cell]:
    def number(value: float) -> Cell:
        return Cell(f"{value:.3g}" if math.isfinite(value) else "–", value)

    return [Cell(f"{c.epoch:.4g}", c.epoch), Cell(str(c.n), c.n), number(c.r), number(c.p), c.why]
