"""Pictures of models at work, each function a matplotlib Figure (`figures.save` writes it as PNG, SVG or PDF).

    from residua.report import figures, gallery

    runs = {"ours": "runs/faded", "baseline": "runs/plain"}
    figures.save(gallery.reconstructions(runs, "cifar100"), "reconstructions.png")

Models are networks, or the runs or checkpoints to load them from; several come under the names to show. Data is what
`residua.data.load` takes, or its result. Pictures are test images, training ones where there is no test split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from residua.data import Splits
from residua.data import load as load_data
from residua.evaluate import extract, neighbor_images
from residua.evaluate.attention_maps import attention_weights, class_attention
from residua.evaluate.dynamics import NORM, Runs, norm_history
from residua.evaluate.features import frozen, preprocessing_of
from residua.evaluate.featureset import Readout
from residua.evaluate.maps import BASES, Basis, block_index, patch_colors, project_classes, sample_images
from residua.evaluate.neighbors import Neighbors, neighbors_of
from residua.nn import MAE, encoder_of
from residua.nn.classifier import pool
from residua.report import curves, figures, pictures
from residua.train.checkpoint import load

Model: TypeAlias = nn.Module | str | Path
Models: TypeAlias = Model | Mapping[str, Model]


def reconstructions(models: Models, data: str | Splits, *, count: int = 8, seed: int = 0) -> Figure:
    """Rows: the truth, what the encoder sees, then what each autoencoder fills in behind the same mask.

    Pixels are un-normalised. Where patches were normalised for training, a patch's mean and contrast, which the
    model does not predict, are taken from the truth.
    """
    loaded, splits = _models(models), _splits(data)
    wrong = [name for name, model in loaded.items() if not isinstance(model, MAE)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}: only a masked autoencoder reconstructs, this is an encoder alone")
    autoencoders: dict[str, Any] = loaded
    images = sample_images(next(iter(loaded.values())), splits, count)
    return figures.reconstructions(pictures.reconstruct(autoencoders, images, splits.test or splits.train, seed))


def patch_maps(
    models: Models, data: str | Splits, *, count: int = 8, basis: Basis = "components", block: int = -1
) -> Figure:
    """Patch features as red, green and blue, in one basis for all images of a model."""
    loaded, splits = _models(models), _splits(data)
    found = {
        name: patch_colors(model, sample_images(model, splits, count), basis, block) for name, model in loaded.items()
    }
    return figures.feature_maps(_shown(loaded, splits, count), found, f"{BASES[basis]}, {_block(loaded, block)}")


def attention(
    models: Models, data: str | Splits, *, count: int = 8, block: int = -1, heads: Literal["mean", "each"] = "mean"
) -> Figure:
    """How much the class token attends to each patch in a block: the mean over heads, or each head in a row."""
    loaded, splits = _models(models), _splits(data)
    found: dict[str, np.ndarray] = {}
    for name, model in loaded.items():
        images = sample_images(model, splits, count)
        if heads == "mean":
            found[name] = class_attention(model, images, block).numpy()
            continue
        for head, weights in enumerate(_heads(model, images, block)):
            found[f"{name}, head {head}" if len(loaded) > 1 else f"head {head}"] = weights
    title = f"attention of the class token, {_block(loaded, block)}" + (", mean over heads" if heads == "mean" else "")
    return figures.attention_maps(_shown(loaded, splits, count), found, title)


def tsne(
    models: Models,
    data: str | Splits,
    *,
    n_classes: int = 10,
    limit: int = 500,
    readout: Readout = "tokens",
    seed: int = 0,
) -> Figure:
    """t-SNE of test features of some classes, the same images for every model, with the silhouette scores."""
    splits = _splits(data)
    options: dict[str, Any] = {"n_classes": n_classes, "limit": limit, "readout": readout, "seed": seed}
    found = {name: project_classes(model, splits, **options) for name, model in _models(models).items()}
    if None in found.values():
        raise ValueError(f"{splits.name} has no labels of two classes or more: there is nothing to colour")
    return figures.class_plane(found)


def neighbors(
    model: Model,
    data: str | Splits,
    queries: Sequence[int | str | Path],
    *,
    k: int = 8,
    readout: Readout = "tokens",
    limit: int | None = None,
) -> Figure:
    """The images most similar to each query (cosine, last block): image files, or numbers of images in the data.

    A number is found among its own neighbours only if it occurs twice.
    """
    (found,), splits = _models(model).values(), _splits(data)
    split = "train" if splits.test is None else "test"
    source = splits.test or splits.train
    bank = extract(found, splits, readout=readout, limit=limit, splits=(split,)).splits[split]
    preprocessing = preprocessing_of(found, splits.train)
    target = max(preprocessing.img_size)
    own = torch.stack([preprocessing(source.read(q, target) if isinstance(q, int) else q) for q in queries])
    nearest = neighbors_of(_pooled(found, own, readout), bank.last, min(k + 1, len(bank)))
    assert bank.index is not None
    numbers = bank.index[nearest.indices]
    keep = [_without(row, q if isinstance(q, int) else -1)[:k] for row, q in zip(numbers, queries)]
    # the place of the query is filled below: it may be a file that is not in the data
    rows = Neighbors(torch.zeros(len(keep), dtype=torch.long), torch.stack(keep), torch.zeros(0))
    side = min(96, target)
    grid = pictures.displayable_grid(neighbor_images(source, rows, img_size=side), source)
    shown = nn.functional.interpolate(preprocessing.denormalize(own), size=grid.shape[2:4], mode="area")
    grid[:, 0] = pictures.displayable(shown, pictures.display_range(shown, source))
    return figures.neighbor_grid(grid)


def norms(runs: Runs, data: str | Splits, *, images: int = 32, most: int = 12) -> Figure:
    """Mean norm of a token after each block along training, from the runs' checkpoints (at most `most` of each)."""
    found = norm_history(runs, _splits(data), images=images, most=most)
    if not found.points:
        raise ValueError("; ".join(found.notes) or "these runs have no checkpoints")
    return curves.norm_curves({run: found.by_layer(NORM, run) for run in found.runs})


# ---------------------------------------------------------------- what is given, as it is needed


def _models(given: Models) -> dict[str, nn.Module]:
    named = given if isinstance(given, Mapping) else {"model": given}
    if not named:
        raise ValueError("no model was given")
    return {name: model if isinstance(model, nn.Module) else load(model) for name, model in named.items()}


def _splits(given: str | Splits) -> Splits:
    return load_data(given) if isinstance(given, str) else given


def _shown(models: Mapping[str, nn.Module], splits: Splits, count: int) -> np.ndarray:
    """The sampled images as the first model sees them, to be looked at."""
    first = next(iter(models.values()))
    plain = preprocessing_of(first, splits.train).denormalize(sample_images(first, splits, count))
    return pictures.displayable(plain, pictures.display_range(plain, splits.train))


def _block(models: Mapping[str, nn.Module], block: int) -> str:
    numbers = {block_index(block, encoder_of(model).depth) for model in models.values()}
    return f"block {numbers.pop()}" if len(numbers) == 1 else "last block" if block == -1 else f"block {block}"


def _heads(model: nn.Module, images: Tensor, block: int) -> list[np.ndarray]:
    count = attention_weights(model, images[:1], block).shape[1]
    return [class_attention(model, images, block, head).numpy() for head in range(count)]


@torch.no_grad()
def _pooled(model: nn.Module, images: Tensor, readout: Readout) -> Tensor:
    """Last-block features (N, D) of a few images at hand."""
    encoder = encoder_of(model)
    with frozen(model) as device:
        return pool(encoder.forward_features(images.to(device)), readout, encoder.num_prefix_tokens).cpu()


def _without(row: Tensor, number: int) -> Tensor:
    """A row of neighbours without the image itself; where it is not among them, without the last."""
    other = row[row != number]
    return other if len(other) < len(row) else row[:-1]
