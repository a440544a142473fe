"""The page of one pretraining run: what was trained, how it went, what its features are worth."""

from __future__ import annotations

from pathlib import Path

from residua.data import Splits
from residua.evaluate import Report
from residua.evaluate.dynamics import Dynamics
from residua.evaluate.report import MODEL, PIXELS, RANDOM
from residua.nn import MAE, stream
from residua.report import curves, figures, parts
from residua.report.page import Cell, Page
from residua.report.parts import METRICS, setting_cell, settings_text
from residua.report.runs import NotARun, Run, headline, read_run, show, while_training
from residua.train.config import Pretrain


def run_report(
    run: Path, model: MAE | None = None, splits: Splits | None = None, evaluation: Report | None = None
) -> Path:
    """Write RUN/report.html. What is not handed in is read from the run; what is not there is left out.

    >>> run_report(Path("runs/2026-11-15-shapes"))
    """
    found = read_run(run)
    if not isinstance(found.config, Pretrain):
        raise NotARun(
            f"{run} is no masked autoencoder, which this page is about; residua compare takes every kind of run"
        )
    evaluation = evaluation or found.evaluation
    missing: list[str] = []
    model = model if model is not None else parts.load_model(found, missing)
    splits = splits if splits is not None else parts.load_data(found, missing)

    page = Page(f"Run {found.name}")
    page.paragraph(_summary(found, evaluation))
    parts.notes(page, found.notes + missing)
    _training(page, found, model)
    page.heading("What the features are worth")
    if evaluation is None:
        page.paragraph("This run has not been evaluated: residua evaluate RUN measures it.", note=True)
    else:
        parts.scores(page, evaluation)
        parts.depth_figures(page, {MODEL: evaluation})
    if model is not None and splits is not None:
        drawn = parts.drawable(found, splits)
        with parts.attempt(page):
            parts.norms(page, {MODEL: found.path}, {MODEL: model}, drawn, Dynamics())
        parts.look(page, {MODEL: model}, drawn)
        with parts.attempt(page):
            parts.plane(page, {MODEL: model}, drawn)
    if evaluation is not None and splits is not None:
        with parts.attempt(page):
            parts.neighbors(page, {MODEL: evaluation}, splits)
    _settings(page, found)
    return page.save(found.path / "report.html")


# ---------------------------------------------------------------- this page alone


def _summary(run: Run, evaluation: Report | None) -> str:
    c = run.settings
    text = (
        f"A masked autoencoder pretrained on {c['data']}: {settings_text(c['steps'])} steps of "
        f"{settings_text(c['batch_size'])} images at {c['img_size']} px, "
        f"alpha_min {settings_text(c['alpha_min'])}."
    )
    losses = [record["loss"] for record in run.metrics if isinstance(record.get("loss"), float)]
    if losses:
        text += f" The loss ended at {losses[-1]:.4f}."
    if evaluation is None:
        return text
    for own in headline(evaluation).values():
        if MODEL in own and {MODEL, RANDOM, PIXELS} <= own.keys() and own[MODEL].metric in ("kNN", "linear probe"):
            best = max(own[RANDOM].value, own[PIXELS].value)
            verdict = "above" if own[MODEL].value > best else "not above"
            text += (
                f" {own[MODEL].metric} {show(own[MODEL])}, {verdict} {RANDOM} ({show(own[RANDOM])}) and "
                f"{PIXELS} ({show(own[PIXELS])})."
            )
    return text


def _training(page: Page, run: Run, model: MAE | None) -> None:
    page.heading("Training")
    drawn = []
    if run.metrics:
        drawn.append(
            (
                figures.loss_curves({run.name: run.metrics}),
                "Training loss, mean over the steps between records.",
            )
        )
    if model is not None:
        steps = stream(model)
        caption = f"x <- alpha x + f(x): alpha of each residual step; their product is {steps.alpha_eff:.2g}."
        drawn.append((figures.alpha_schedule({run.name: steps.alphas.detach().tolist()}), caption))
    for metric, curve in while_training(run).items():
        figure = curves.epoch_curves(metric, {run.name: [curve]}, METRICS.get(metric, ""))
        drawn.append((figure, f"{metric} while training, last block."))
    if drawn:
        page.figures(*drawn)
    if rates := sorted(r["images_per_s"] for r in run.metrics if r.get("images_per_s")):
        e = run.environment
        where = ", ".join(e.get("gpus") or []) or f"CPU ({e.get('cpus', '?')} cores)"
        if run.settings["cpu"]:
            where = f"CPU ({e.get('cpus', '?')} cores)"
        torch = f", torch {e['torch']}" if "torch" in e else ""
        precision = run.settings["precision"]
        page.paragraph(f"{rates[len(rates) // 2]:,.0f} images/s (median) on {where}, {precision}{torch}.")


def _settings(page: Page, run: Run) -> None:
    page.heading("Settings")
    rows: list[list[str | Cell]] = [[k, setting_cell(v)] for k, v in run.settings.items() if k != "out"]
    page.table(["setting", "value"], rows, numbers=2)
    page.code(f'model = residua.load("{run.path}")')
