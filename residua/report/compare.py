"""Several runs side by side: on one page, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from residua.data import Splits
from residua.evaluate import Report, Score
from residua.evaluate.dynamics import Dynamics, dynamics
from residua.evaluate.maps import Basis
from residua.evaluate.report import MODEL, NOTHING
from residua.nn import MAE, stream
from residua.report import curves, figures, parts
from residua.report.along import along_training, scores_while_training
from residua.report.page import Cell, Page
from residua.report.parts import load_data, load_model, setting_cell
from residua.report.runs import (
    NOT_SETTINGS,
    NotARun,
    Run,
    blocks_of,
    differing_settings,
    headline,
    interval_cell,
    name_cell,
    protocol,
    read_runs,
    score_cell,
    score_label,
    show,
)
from residua.train.checkpoint import checkpoints
from residua.train.config import Pretrain

_Key = tuple[object, ...]
_Row = list[str | Cell]
_UNLIKE = "These evaluations differ in data or protocol: their numbers do not compare directly."


def compare(
    runs: Sequence[Path],
    out: Path,
    *,
    along: bool = False,
    basis: Basis = "components",
    limit: int | None = 2000,
    device: str | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one page about two runs or more (one, with `along`): what differs, every number, curves, pictures.

    Beside run folders, `runs` may name what `residua evaluate MODEL --out FILE` wrote of models from elsewhere.

    `out` is the page's file, or a folder that gets comparison.html. `along` also measures every checkpoint with
    up to `limit` images of each split (see `evaluate.dynamics`: kept in the runs, so only new ones cost time).
    `basis` chooses the colours of feature maps.

    >>> compare([Path("runs/a"), Path("runs/b")], Path("comparison.html"))
    """
    found = _read(runs, least=1 if along else 2)
    out = Path(out).expanduser()
    measured = Dynamics()
    if along and (others := [run.name for run in found if not isinstance(run.config, Pretrain)]):
        raise NotARun(
            f"--dynamics measures the checkpoints of autoencoders; {', '.join(others)} is none. What a run measured "
            "while training (--eval-every) is shown without it"
        )
    if along:
        measured = dynamics({run.name: run.path for run in found}, limit=limit, device=device, on_message=on_message)
    title = "Comparison of " if len(found) > 1 else "Along the training of "
    page = Page(title + ", ".join(run.name for run in found))
    page.heading("What differs" if len(found) > 1 else "Settings")
    parts.notes(page, [text for run in found for text in run.notes])
    _differences(page, found)
    _scores(page, found)
    _curves(page, found)
    if along:
        along_training(page, found, measured)
    elif any(len(checkpoints(run.path)) > 2 for run in found):
        page.paragraph("These runs kept checkpoints: compare --dynamics measures each and shows how scores came about.")
    _pictures(page, found, measured, basis)
    _all_numbers(page, found)
    return page.save(out / "comparison.html" if out.is_dir() else out)


def comparison_table(runs: Sequence[Path]) -> Table:
    """Settings that differ, then the scores to quote, a column for each run."""
    found = _read(runs, least=1)
    table = Table(title="runs side by side", title_justify="left")
    table.add_column("")
    for run in found:
        table.add_column(Text(run.name), justify="right")
    for name, values in differing_settings(found).items():
        table.add_row(name, *(Text(setting_cell(value).text) for value in values))
    table.add_section()
    for row in score_rows(found):
        table.add_row(*(Text(cell.text) for cell in row))
    lines = [text for run in found for text in run.notes]
    if any(run.evaluation is None for run in found):
        lines.append(f"{NOTHING}: not evaluated (residua evaluate RUN)")
    if len({protocol(run.evaluation) for run in found if run.evaluation is not None}) > 1:
        lines.append(_UNLIKE)
    table.caption = Text("\n".join(lines)) if lines else None
    return table


def score_rows(runs: Sequence[Run]) -> list[list[Cell]]:
    """Rows `score, of run 1, of run 2, ...`: the scores to quote of the models and of both baselines."""
    quoted = [headline(run.evaluation) if run.evaluation else {} for run in runs]
    units = {(name, s.subject): s.unit for own in quoted for name, scores in own.items() for s in scores.values()}
    order = list(dict.fromkeys(name for name, _ in units))
    rows = []
    for name, subject in sorted(units, key=lambda key: order.index(key[0])):
        label = name if subject == MODEL else f"{name}, {subject}"
        cells = [_cell_at(own.get(name, {}).get(subject), run) for own, run in zip(quoted, runs)]
        rows.append([name_cell(label, units[name, subject]), *cells])
        spans = [interval_cell(own.get(name, {}).get(MODEL)) for own in quoted]
        if subject == MODEL and any(span.value is not None for span in spans):
            rows.append([name_cell(f"{name}, 95 % interval", "%"), *spans])
    return rows


def _cell_at(score: Score | None, run: Run) -> Cell:
    """The score, with its block where a probe chose one."""
    chosen = score is not None and score.settings.get("selected") and score.layer >= 0
    several = run.evaluation is not None and len(run.evaluation.layers) > 1
    if chosen and several and score:
        return Cell(f"{show(score)} (block {score.layer})", score.value)
    return score_cell(score)


def _read(runs: Sequence[Path], least: int) -> list[Run]:
    if len(runs) < least:
        few = "no run" if not runs else f"{len(runs)} run"
        raise NotARun(f"{few} given: a comparison needs two or more (one is enough to follow it with --dynamics)")
    return read_runs(runs)


# ---------------------------------------------------------------- parts of the page


def _differences(page: Page, runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    if len(runs) > 1:
        _what_differs(page, runs, differing_settings(runs))
    with page.fold("All settings"):
        settings = [run.settings for run in runs]
        every = dict.fromkeys(name for own in settings for name in own if name not in NOT_SETTINGS)
        rows: list[_Row] = [[name, *(setting_cell(own.get(name)) for own in settings)] for name in every]
        page.table(["setting", *names], rows)


def _what_differs(page: Page, runs: Sequence[Run], differing: dict[str, list[Any]]) -> None:
    names = [run.name for run in runs]
    if differing:
        page.table(["setting", *names], [[name, *map(setting_cell, values)] for name, values in differing.items()])
    elif all(run.config for run in runs):
        page.paragraph("No setting differs between these runs.")
    if "data" in differing:
        page.paragraph(
            "These runs were trained on different data: their losses do not compare, and their scores only where "
            "they were evaluated on the same images.",
            note=True,
        )
    if len({run.settings.get("seed") for run in runs}) == 1:
        page.paragraph(
            "All runs have the same seed. How far scores move from seed to seed is not shown here: "
            "read small differences as noise until several seeds agree."
        )


def _scores(page: Page, runs: Sequence[Run]) -> None:
    page.heading("Scores")
    for run in runs:
        if run.evaluation is None:
            page.paragraph(f"{run.name} has not been evaluated: residua evaluate {run.path} measures it.", note=True)
    if rows := score_rows(runs):
        if len(runs) > 2:
            _one_row_a_run(page, runs)
        page.table(["score", *(run.name for run in runs)], rows)
    texts: dict[str, list[str]] = {}
    for run in runs:
        if run.evaluation is not None:
            texts.setdefault(protocol(run.evaluation), []).append(run.name)
    for text, names in texts.items():
        page.paragraph(text if len(texts) == 1 else f"{', '.join(names)}: {text}")
    if len(texts) > 1:
        page.paragraph(_UNLIKE, note=True)


def _one_row_a_run(page: Page, runs: Sequence[Run]) -> None:
    """Runs as rows, to be sorted by any score; with the settings that differ and are numbers."""
    numeric = {
        name: values
        for name, values in differing_settings(runs).items()
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    }
    quoted = [headline(run.evaluation) if run.evaluation else {} for run in runs]
    names = list(dict.fromkeys(name for own in quoted for name in own))
    rows: list[_Row] = []
    for i, run in enumerate(runs):
        settings = [setting_cell(values[i]) for values in numeric.values()]
        rows.append([run.name, *settings, *(_cell_at(quoted[i].get(name, {}).get(MODEL), run) for name in names)])
    page.table(["run", *numeric, *names], rows)


def _curves(page: Page, runs: Sequence[Run]) -> None:
    trained = {run.name: run.metrics for run in runs if run.metrics}
    evaluated: dict[str, Report] = {run.name: run.evaluation for run in runs if run.evaluation}
    if trained:
        page.heading("Training")
        caption = "Training loss. It compares only between runs with the same data, patches, mask ratio and target."
        page.figures((figures.loss_curves(trained), caption))
    scores_while_training(page, runs)
    _by_size(page, runs)
    if any(len(e.layers) > 1 for e in evaluated.values()):
        page.heading("By depth")
        parts.depth_figures(page, evaluated)
        page.paragraph(f"Grey: baselines, those of {next(iter(evaluated))}.")


def _by_size(page: Page, runs: Sequence[Run]) -> None:
    """Scores of classifiers against their number of blocks, by alpha_min, where they differ in it."""
    sizes = {run.name: count for run in runs if (count := blocks_of(run)) is not None and run.evaluation}
    if len(set(sizes.values())) < 2:
        return
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in runs:
        for score in run.evaluation.scores if run.evaluation and run.name in sizes else ():
            of = f"alpha_min {setting_cell(run.settings['alpha_min']).text}"
            found.setdefault(score.metric, {}).setdefault(of, []).append((sizes[run.name], score.value))
    page.heading("By number of blocks")
    units = {"entropy rank": "nats"}
    page.figures(*((curves.size_curves(m, g, units.get(m, "%")), f"{m} on test images.") for m, g in found.items()))


@dataclass
class _Alike:
    """Models that take the same images, patches and mask ratio: they share their figures."""

    splits: Splits
    models: dict[str, MAE] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)


def _pictures(page: Page, runs: Sequence[Run], measured: Dynamics, basis: Basis) -> None:
    missing: list[str] = []
    loaded: dict[str, Splits | None] = {}
    alike: dict[_Key, _Alike] = {}
    alphas: dict[str, list[float]] = {}
    for run in runs:
        if run.config is None:
            continue
        spec = run.config.data.data
        model = load_model(run, missing)
        if spec not in loaded:
            loaded[spec] = load_data(run, missing)
        splits = loaded[spec]
        if model is None:
            continue
        alphas[run.name] = stream(model).alphas.detach().tolist()
        if splits is not None:
            splits = parts.drawable(run, splits)
            key: _Key = (spec, model.encoder.img_size, model.patch_size, model.mask_ratio)
            group = alike.setdefault(key, _Alike(splits))
            group.models[run.name] = model
            group.runs.append(run)
    if alphas:
        page.heading("Shortcuts")
        page.figures((figures.alpha_schedule(alphas), "x <- alpha x + f(x): alpha of each residual step."))
    for group in alike.values():
        if len(alike) > 1:
            page.heading(f"Pictures of {', '.join(group.models)}")
        _look(page, group, measured, basis)
    parts.notes(page, missing)


def _look(page: Page, group: _Alike, measured: Dynamics, basis: Basis) -> None:
    with parts.attempt(page):
        parts.norms(page, {run.name: run.path for run in group.runs}, group.models, group.splits, measured)
    parts.look(page, group.models, group.splits, basis=basis)
    with parts.attempt(page):
        parts.plane(page, group.models, group.splits)
    with parts.attempt(page):
        parts.neighbors(page, {run.name: run.evaluation for run in group.runs if run.evaluation}, group.splits)


def _all_numbers(page: Page, runs: Sequence[Run]) -> None:
    """Every score of every run, by block and subject."""
    table: dict[tuple[str, int, str], dict[str, Score]] = {}
    for run in runs:
        if run.evaluation is None:
            continue
        for score in run.evaluation.scores:
            table.setdefault((score_label(run.evaluation, score), score.layer, score.subject), {})[run.name] = score
    if not table:
        return
    page.heading("Every number")
    order = list(dict.fromkeys(name for name, _, _ in table))
    subjects = list(dict.fromkeys(subject for _, _, subject in table))
    rows: list[_Row] = []
    for (name, layer, subject), own in sorted(
        table.items(), key=lambda item: (order.index(item[0][0]), subjects.index(item[0][2]), item[0][1])
    ):
        block = Cell(NOTHING, None) if layer < 0 else Cell(str(layer), layer)
        label = name_cell(name, next(iter(own.values())).unit)
        rows.append([label, block, subject, *(score_cell(own.get(run.name)) for run in runs)])
    page.table(["score", "block", "of", *(run.name for run in runs)], rows, numbers=3)
