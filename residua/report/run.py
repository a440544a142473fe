"""The page of one pretraining run: what was trained, how it went, what its features are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from residua import data
from residua.data import DataError, Splits
from residua.evaluate import Report
from residua.evaluate.report import MODEL, PIXELS, RANDOM
from residua.nn import MAE, stream
from residua.report import figures, pictures
from residua.report.page import Page
from residua.report.runs import SUBJECTS, Run, by_depth, headline, protocol, read_run, show
from residua.train.checkpoint import CheckpointError, load

_METRICS = {"kNN": "%", "linear probe": "%", "entropy rank": "nats", "RankMe": ""}
_UNTRAINED = f"{RANDOM} (same encoder, untrained)"


def run_report(
    run: Path, model: MAE | None = None, splits: Splits | None = None, evaluation: Report | None = None
) -> Path:
    """Write RUN/report.html. What is not handed in is read from the run; what is not there is left out.

    >>> run_report(Path("runs/2026-11-15-shapes"))
    """
    found = read_run(run)
    evaluation = evaluation or found.evaluation
    missing: list[str] = []
    model = model if model is not None else load_model(found, missing)
    splits = splits if splits is not None else load_data(found, missing)

    page = Page(f"Run {found.name}")
    page.paragraph(_summary(found, evaluation))
    for text in missing:
        page.paragraph(text, note=True)
    _training(page, found, model)
    page.heading("What the features are worth")
    if evaluation is None:
        page.paragraph("This run has not been evaluated: residua evaluate RUN measures it.", note=True)
    else:
        scores(page, evaluation)
        depth_figures(page, {MODEL: evaluation})
    if model is not None and splits is not None:
        look(page, {MODEL: model}, splits)
    if evaluation is not None and splits is not None:
        neighbors(page, evaluation, splits)
    _settings(page, found)
    return page.save(found.path / "report.html")


# ---------------------------------------------------------------- parts that other pages share


def scores(page: Page, evaluation: Report) -> None:
    """The scores to quote, beside both baselines."""
    rows = []
    for name, own in headline(evaluation).items():
        first = own.get(MODEL)
        layer = "" if first is None or first.layer < 0 else str(first.layer)
        rows.append([name, layer, *(show(own.get(subject)) for subject in SUBJECTS)])
    page.table(["score", "block", *SUBJECTS], rows, caption=protocol(evaluation), numbers=1)
    page.paragraph(
        f"{RANDOM}: the same encoder before any training. {PIXELS}: the images themselves. A score "
        "above both is what training brought; kNN and probe are accuracies on labels that training never "
        "saw. Entropy rank and RankMe count the directions that features use: they need no labels and are "
        "no accuracy."
    )


def depth_figures(page: Page, evaluations: dict[str, Report]) -> None:
    """Scores by block, where several blocks were evaluated. Baselines are those of the first run."""
    several = {name: e for name, e in evaluations.items() if len(e.layers) > 1}
    if not several:
        return
    first = next(iter(several.values()))
    drawn = []
    for metric, unit in _METRICS.items():
        curves = {name: curve for name, e in several.items() if (curve := by_depth(e, metric))}
        if curves:
            drawn.append((figures.depth_curves(metric, curves, _baselines(first, metric), unit), f"{metric} by block."))
    if drawn:
        page.figures(*drawn)


def _baselines(evaluation: Report, metric: str) -> dict[str, dict[int, float] | float]:
    found: dict[str, dict[int, float] | float] = {}
    if fresh := by_depth(evaluation, metric, RANDOM):
        found[RANDOM] = fresh
    if pixels := by_depth(evaluation, metric, PIXELS):
        found[PIXELS] = next(iter(pixels.values()))
    return found


def look(page: Page, models: dict[str, MAE], splits: Splits, count: int = 8) -> None:
    """Reconstructions and patch features of models that take the same images."""
    first = next(iter(models.values()))
    images = pictures.sample(first, splits, count)
    source = splits.test or splits.train
    note = pictures.channels_note(images.shape[1])
    rows = pictures.reconstruct(models, images, source)
    page.heading("Reconstructions")
    how = f"{100 * first.mask_ratio:.0f} % of the patches are hidden (grey); the visible ones are kept."
    if first.norm_pix:
        how += " Patches are predicted up to their mean and contrast, which are borrowed from the truth here."
    page.figures((figures.reconstructions(rows), how + note))
    page.heading("Feature maps")
    maps = {name: pictures.patch_colors(model, images) for name, model in models.items()}
    shown = pictures.displayable(*_display(first, images, splits))
    page.figures((figures.feature_maps(shown, maps), _MAPS + note))


_MAPS = (
    "Patch features of the last block, their first three principal components as red, green and blue. "
    "One basis is shared by all images of a row, so equal colours mean similar features there; colours "
    "of different rows cannot be compared."
)


def _display(model: MAE, images: Any, splits: Splits) -> tuple[Any, Any]:
    plain = model.preprocessing.denormalize(images)
    return plain, pictures.display_range(plain, splits.train)


def neighbors(page: Page, evaluation: Report, splits: Splits) -> None:
    found = pictures.neighbor_pictures(evaluation, splits)
    if found is None:
        return
    page.heading("Nearest neighbours")
    caption = (
        "Images drawn at random, and those with the most similar features (cosine, last block, read-out "
        f"{evaluation.readout})." + pictures.channels_note(splits.train.channels)
    )
    page.figures((figures.neighbor_grid(found), caption))


def load_model(run: Run, missing: list[str]) -> MAE | None:
    """The run's autoencoder, or a sentence about why there is none."""
    try:
        model = load(run.path)
    except (CheckpointError, ValueError, OSError) as error:
        missing.append(f"No pictures of {run.name}: {error}")
        return None
    return model if isinstance(model, MAE) else None


def load_data(run: Run, missing: list[str]) -> Splits | None:
    """The run's images, or a sentence about why there are none."""
    try:
        return data.load(run.config.data.data)
    except (DataError, OSError, ImportError, ValueError) as error:
        missing.append(f"No pictures: the images of {run.name} cannot be opened ({error})")
        return None


def settings_text(value: Any) -> str:
    """A setting as it stands in a table."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case tuple() | list():
            return ", ".join(map(settings_text, value)) or "none"
    return str(value)


# ---------------------------------------------------------------- this page alone


def _summary(run: Run, evaluation: Report | None) -> str:
    c = run.config
    text = (
        f"A masked autoencoder pretrained on {c.data.data}: {settings_text(c.optim.steps)} steps of "
        f"{settings_text(c.optim.batch_size)} images at {c.data.img_size} px, "
        f"alpha_min {settings_text(c.shortcut.alpha_min)}."
    )
    if run.metrics:
        text += f" The loss ended at {run.metrics[-1]['loss']:.4f}."
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
    if drawn:
        page.figures(*drawn)
    if rates := sorted(r["images_per_s"] for r in run.metrics if r.get("images_per_s")):
        e = run.environment
        where = ", ".join(e.get("gpus") or []) or f"CPU ({e.get('cpus', '?')} cores)"
        if run.config.machine.cpu:
            where = f"CPU ({e.get('cpus', '?')} cores)"
        torch = f", torch {e['torch']}" if "torch" in e else ""
        precision = run.config.machine.precision
        page.paragraph(f"{rates[len(rates) // 2]:,.0f} images/s (median) on {where}, {precision}{torch}.")


def _settings(page: Page, run: Run) -> None:
    page.heading("Settings")
    rows: Sequence[Sequence[str]] = [[k, settings_text(v)] for k, v in run.config.settings().items() if k != "out"]
    page.table(["setting", "value"], rows, numbers=2)
    page.code(f'model = residua.load("{run.path}")')
