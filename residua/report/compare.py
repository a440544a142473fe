"""Several runs side by side: on one page, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from residua.evaluate import Report, Score
from residua.evaluate.report import MODEL, NOTHING
from residua.nn import MAE, stream
from residua.report import figures
from residua.report.page import Page
from residua.report.run import depth_figures, load_data, load_model, look, settings_text
from residua.report.runs import NotARun, Run, headline, protocol, read_runs, show

_Key = tuple[object, ...]
_NOT_SETTINGS = {"out", "resume", "dry_run"}  # where a run went and how it was called, not what it is


def compare(runs: Sequence[Path], out: Path) -> Path:
    """Write one page about two runs or more: what differs, every number, curves, reconstructions.

    `out` is the page's file, or a folder that gets comparison.html.

    >>> compare([Path("runs/a"), Path("runs/b")], Path("comparison.html"))
    """
    found = _read(runs)
    out = Path(out).expanduser()
    page = Page("Comparison of " + ", ".join(run.name for run in found))
    page.heading("What differs")
    _differences(page, found)
    _scores(page, found)
    _curves(page, found)
    _pictures(page, found)
    _all_numbers(page, found)
    return page.save(out / "comparison.html" if out.is_dir() else out)


def comparison_table(runs: Sequence[Path]) -> Table:
    """Settings that differ, then the scores to quote, a column for each run."""
    found = _read(runs)
    table = Table(title="runs side by side", title_justify="left")
    table.add_column("")
    for run in found:
        table.add_column(Text(run.name), justify="right")
    for name, values in differing_settings(found).items():
        table.add_row(name, *map(Text, values))
    table.add_section()
    for row in score_rows(found):
        table.add_row(*map(Text, row))
    if any(run.evaluation is None for run in found):
        table.caption = f"{NOTHING}: not evaluated (residua evaluate RUN)"
    return table


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Setting -> its value in each run, for those settings alone that are not the same in all."""
    settings = [run.config.settings() for run in runs]
    rows = {name: [own[name] for own in settings] for name in settings[0] if name not in _NOT_SETTINGS}
    return {
        name: [settings_text(v) for v in values] for name, values in rows.items() if any(v != values[0] for v in values)
    }


def score_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Rows `score, of run 1, of run 2, ...`: the scores to quote of the models and of both baselines."""
    quoted = [headline(run.evaluation) if run.evaluation else {} for run in runs]
    keys = dict.fromkeys((name, subject) for own in quoted for name, scores in own.items() for subject in scores)
    rows = []
    for name, subject in sorted(keys, key=lambda key: list(dict.fromkeys(k[0] for k in keys)).index(key[0])):
        label = name if subject == MODEL else f"{name}, {subject}"
        rows.append([label, *(_show_at(own.get(name, {}).get(subject), run) for own, run in zip(quoted, runs))])
    return rows


def _show_at(score: Score | None, run: Run) -> str:
    """The score, with its block where a probe chose one."""
    chosen = score is not None and score.settings.get("selected") and score.layer >= 0
    several = run.evaluation is not None and len(run.evaluation.layers) > 1
    return f"{show(score)} (block {score.layer})" if chosen and several and score else show(score)


def _read(runs: Sequence[Path]) -> list[Run]:
    if len(runs) < 2:
        raise NotARun(f"{len(runs)} run given: a comparison needs two or more")
    return read_runs(runs)


# ---------------------------------------------------------------- parts of the page


def _differences(page: Page, runs: Sequence[Run]) -> None:
    rows = [[name, *values] for name, values in differing_settings(runs).items()]
    if rows:
        page.table(["setting", *(run.name for run in runs)], rows)
    else:
        page.paragraph("No setting differs between these runs.")
    if len({run.config.optim.seed for run in runs}) == 1:
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
        page.table(["score", *(run.name for run in runs)], rows)
    texts: dict[str, list[str]] = {}
    for run in runs:
        if run.evaluation is not None:
            texts.setdefault(protocol(run.evaluation), []).append(run.name)
    for text, names in texts.items():
        page.paragraph(text if len(texts) == 1 else f"{', '.join(names)}: {text}")
    if len(texts) > 1:
        page.paragraph(
            "These evaluations differ in data or protocol: their numbers do not compare directly.", note=True
        )


def _curves(page: Page, runs: Sequence[Run]) -> None:
    trained = {run.name: run.metrics for run in runs if run.metrics}
    evaluated: dict[str, Report] = {run.name: run.evaluation for run in runs if run.evaluation}
    if trained:
        page.heading("Training")
        caption = "Training loss. It compares only between runs with the same data, patches, mask ratio and target."
        page.figures((figures.loss_curves(trained), caption))
    if any(len(e.layers) > 1 for e in evaluated.values()):
        page.heading("By depth")
        depth_figures(page, evaluated)
        page.paragraph(f"Grey: baselines, those of {next(iter(evaluated))}.")


def _pictures(page: Page, runs: Sequence[Run]) -> None:
    """Runs on the same images, patches and mask ratio share their figures."""
    missing: list[str] = []
    alike: dict[_Key, dict[str, MAE]] = {}
    first_of: dict[_Key, Run] = {}
    alphas: dict[str, list[float]] = {}
    for run in runs:
        model = load_model(run, missing)
        if model is not None:
            key: _Key = (run.config.data.data, model.encoder.img_size, model.patch_size, model.mask_ratio)
            alike.setdefault(key, {})[run.name] = model
            first_of.setdefault(key, run)
            alphas[run.name] = stream(model).alphas.detach().tolist()
    if alphas:
        page.heading("Shortcuts")
        page.figures((figures.alpha_schedule(alphas), "x <- alpha x + f(x): alpha of each residual step."))
    for key, models in alike.items():
        splits = load_data(first_of[key], missing)
        if splits is not None:
            if len(alike) > 1:
                page.paragraph(f"Pictures of {', '.join(models)}:")
            look(page, models, splits)
    for text in missing:
        page.paragraph(text, note=True)


def _all_numbers(page: Page, runs: Sequence[Run]) -> None:
    """Every score of every run, by block and subject."""
    table: dict[tuple[str, int, str], dict[str, Score]] = {}
    for run in runs:
        for score in run.evaluation.scores if run.evaluation else []:
            table.setdefault((score.name, score.layer, score.subject), {})[run.name] = score
    if not table:
        return
    page.heading("Every number")
    order = list(dict.fromkeys(name for name, _, _ in table))
    subjects = list(dict.fromkeys(subject for _, _, subject in table))
    rows = [
        [name, NOTHING if layer < 0 else str(layer), subject, *(show(own.get(run.name)) for run in runs)]
        for (name, layer, subject), own in sorted(
            table.items(), key=lambda item: (order.index(item[0][0]), subjects.index(item[0][2]), item[0][1])
        )
    ]
    page.table(["score", "block", "of", *(run.name for run in runs)], rows, numbers=3)
