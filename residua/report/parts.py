"""Parts that several pages share: scores, curves by depth, pictures of models at work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from residua import data
from residua.data import DataError, Splits
from residua.data.source import evenly
from residua.evaluate import Report
from residua.evaluate.dynamics import NORM, Dynamics, norm_history
from residua.evaluate.maps import BASES, Basis, feature_norms, project_classes, sample_images
from residua.evaluate.report import MODEL, PIXELS, RANDOM
from residua.nn import MAE
from residua.report import curves, figures, gallery, pictures
from residua.report.page import Cell, Page
from residua.report.runs import SUBJECTS, Run, by_depth, headline, interval_cell, name_cell, protocol, score_cell
from residua.train.checkpoint import CheckpointError, checkpoints, load
from residua.train.options import check_place

METRICS = {
    "kNN": "%", "few-shot kNN": "%", "linear probe": "%", "entropy rank": "nats", "RankMe": "", "accuracy": "%",
    **dict.fromkeys(("participation ratio", "stable rank", "alpha-ReQ", "LiDAR"), ""),
    **dict.fromkeys(("class separation", "variance ratio", "silhouette"), ""),
}  # fmt: skip
_PLANE_IMAGES = 400  # a second of t-SNE on one core
_HISTORY = 3  # checkpoints that make a history


def scores(page: Page, evaluation: Report) -> None:
    """The scores to quote, beside both baselines."""
    rows: list[list[str | Cell]] = []
    for name, own in headline(evaluation).items():
        first = own.get(MODEL)
        layer = Cell("", None) if first is None or first.layer < 0 else Cell(str(first.layer), first.layer)
        unit = next(iter(own.values())).unit
        rows.append([name_cell(name, unit), layer, *(score_cell(own.get(subject)) for subject in SUBJECTS)])
        spans = [interval_cell(own.get(subject)) for subject in SUBJECTS]
        if any(span.value is not None for span in spans):
            rows.append([name_cell(f"{name}, 95 % interval", "%"), layer, *spans])
    page.table(["score", "block", *SUBJECTS], rows, caption=protocol(evaluation), numbers=1)
    page.paragraph(
        f"{RANDOM}: the same encoder before any training. {PIXELS}: the images themselves. A score "
        "above both is what training brought; kNN and probe are accuracies on labels that training never "
        "saw. Entropy rank and RankMe count the directions that features use: they need no labels and are "
        "no accuracy."
    )


def depth_figures(page: Page, evaluations: Mapping[str, Report]) -> None:
    """Scores by block, where several blocks were evaluated. Baselines are those of the first run."""
    several = {name: e for name, e in evaluations.items() if len(e.layers) > 1}
    if not several:
        return
    first = next(iter(several.values()))
    drawn = []
    for metric, unit in METRICS.items():
        lines = {name: curve for name, e in several.items() if (curve := by_depth(e, metric))}
        if lines:
            drawn.append((figures.depth_curves(metric, lines, _baselines(first, metric), unit), f"{metric} by block."))
    spectra = _spectra(several)
    if spectra:
        caption = "Singular values of the centred features over the largest, largest first: how fast directions fade."
        drawn.append((figures.spectrum_curves(spectra), caption))
    if drawn:
        page.figures(*drawn)


def _spectra(evaluations: Mapping[str, Report]) -> dict[str, list[float]]:
    """The last block of several runs, or some blocks of one."""
    first = {name: [r for r in e.spectra if r["readout"] == e.spectra[0]["readout"]] for name, e in evaluations.items()}
    if len(evaluations) > 1:
        return {name: rows[-1]["values"] for name, rows in first.items() if rows}
    (rows,) = first.values()
    return {f"block {rows[i]['layer']}": rows[i]["values"] for i in evenly(len(rows), 5)}


def _baselines(evaluation: Report, metric: str) -> dict[str, dict[int, float] | float]:
    found: dict[str, dict[int, float] | float] = {}
    if fresh := by_depth(evaluation, metric, RANDOM):
        found[RANDOM] = fresh
    if pixels := by_depth(evaluation, metric, PIXELS):
        found[PIXELS] = next(iter(pixels.values()))
    return found


# ---------------------------------------------------------------- pictures


@contextmanager
def attempt(page: Page) -> Iterator[None]:
    """A picture that cannot be drawn costs a note, not the page: a diverged model has no principal components."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        page.paragraph(f"Not drawn: {error}", note=True)


def look(page: Page, models: Mapping[str, MAE], splits: Splits, basis: Basis = "components") -> None:
    """Reconstructions, patch features and attention of models that take the same images."""
    first = next(iter(models.values()))
    note = pictures.channels_note(first.encoder.in_chans)
    page.heading("Reconstructions")
    how = f"{100 * first.mask_ratio:.0f} % of the patches are hidden (grey); the visible ones are kept."
    if any(model.norm_pix for model in models.values()):
        how += " Patches are predicted up to their mean and contrast, which are borrowed from the truth here."
    with attempt(page):
        page.figures((gallery.reconstructions(models, splits), how + note))
    page.heading("Feature maps")
    text = (
        f"Patch features of the last block, their first three {BASES[basis]} as red, green and blue. One basis is "
        "shared by all images of a row, so equal colours mean similar features there; colours of different rows "
        "cannot be compared."
    )
    with attempt(page):
        page.figures((gallery.patch_maps(models, splits, basis=basis), text + note))
    page.heading("Attention")
    text = (
        "How much the class token of the last block attends to each patch, mean over heads, all patches visible; "
        "every picture from its least (dark) to its greatest weight (bright)."
    )
    with attempt(page):
        page.figures((gallery.attention(models, splits), text + note))


def plane(page: Page, models: Mapping[str, MAE], splits: Splits, seed: int = 0) -> None:
    """Classes by t-SNE with their silhouette scores, where there are labels."""
    found = {
        name: projection
        for name, model in models.items()
        if (projection := project_classes(model, splits, limit=_PLANE_IMAGES, seed=seed)) is not None
    }
    if not found:
        return
    first = next(iter(found.values()))
    page.heading("Classes in the plane")
    of = "test" if splits.test is not None and splits.test.labels is not None else "training"
    text = (
        f"t-SNE of the last block's features (read-out tokens) of {len(first.labels):,} {of} images of "
        f"{len(first.classes)} classes, seed {seed}. The silhouette score is that of the features themselves (1: "
        "classes tight and apart; 0: overlapping; below 0: nearer to another class than to their own), in brackets "
        "that of the points as drawn."
    )
    page.figures((figures.class_plane(found), text))


def norms(page: Page, runs: Mapping[str, Path], models: Mapping[str, MAE], splits: Splits, found: Dynamics) -> None:
    """Feature norms by block: along training where checkpoints allow it, else at its end.

    `found` holds norms that were measured already; they are not measured again.
    """
    page.heading("Feature norms")
    known = set(found.runs)
    if not known & runs.keys() and all(len(checkpoints(path)) >= _HISTORY for path in runs.values()):
        found = norm_history(runs, splits)
    history = {run: blocks for run in runs if (blocks := found.by_layer(NORM, run))}
    if any(len(curve) >= _HISTORY for blocks in history.values() for curve in blocks.values()):
        text = "Mean norm of a token of the residual stream after each block, at each checkpoint."
        page.figures((curves.norm_curves(history), text))
        return
    last = {name: feature_norms(model, sample_images(model, splits, 32)) for name, model in models.items()}
    text = (
        "Mean norm of a token of the residual stream after each block, at the end. Three checkpoints or more "
        "(pretrain --keep 0 keeps all) show how it got there."
    )
    page.figures((figures.depth_curves("feature norm", last, unit=""), text))


def neighbors(page: Page, evaluations: Mapping[str, Report], splits: Splits) -> None:
    """Nearest neighbours: of one run a grid, of several with the same queries a row each."""
    found: dict[str, Any] = {}
    common: Any = None
    for name, evaluation in evaluations.items():
        grid = pictures.neighbor_pictures(evaluation, splits)
        asked = [row["query"] for row in evaluation.to_dict()["named_neighbors"]]
        if grid is not None and common in (None, (asked, grid.shape)):
            common, found[name] = (asked, grid.shape), grid
    if not found:
        return
    page.heading("Nearest neighbours")
    readouts = ", ".join(dict.fromkeys(evaluations[name].readout for name in found))
    caption = (
        f"Images drawn at random, and those with the most similar features (cosine, last block, read-out {readouts})."
    )
    alone = len(found) == 1
    figure = figures.neighbor_grid(next(iter(found.values()))) if alone else figures.neighbor_rows(found)
    page.figures((figure, caption + pictures.channels_note(splits.train.channels)))


# ---------------------------------------------------------------- what a run holds


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
    assert run.config is not None
    try:
        check_place(run.path, run.config.data.data, "call this from there")
        return data.load(run.config.data.data)
    except (DataError, OSError, ImportError, ValueError) as error:
        missing.append(f"No pictures: the images of {run.name} cannot be opened ({error})")
        return None


def drawable(run: Run, splits: Splits) -> Splits:
    """The images, or where the run skips unreadable ones those that can be read among an even sample of them."""
    if run.config is None or run.config.machine.on_bad_image != "skip":
        return splits

    train, test = splits.train, splits.test
    return Splits(splits.name, train.subset(train.tried()[0]), None if test is None else test.subset(test.tried()[0]))


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


def setting_cell(value: Any) -> Cell:
    """A setting with its number behind it, where it is one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(settings_text(value), value if number else settings_text(value))


def notes(page: Page, texts: Sequence[str]) -> None:
    for text in dict.fromkeys(texts):
        page.paragraph(text, note=True)
