"""What an encoder makes of single images: patch features as colours, norms by block, classes in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.data import Source, Splits
from residua.data.source import evenly
from residua.nn import encoder_of

from .features import extract, frozen, preprocessing_of
from .featureset import Readout, as_matrix
from .rank import CollapsedError

Basis = Literal["components", "spectral"]
BASES = {"components": "principal components", "spectral": "spectral eigenvectors"}


def sample_images(model: nn.Module, splits: Splits, count: int = 8) -> Tensor:
    """Test images (training ones where there are none), as the model takes them: normalised (N, C, h, w)."""
    source = splits.test or splits.train
    preprocessing = preprocessing_of(model, splits.train)
    target = max(preprocessing.img_size)
    return preprocessing([source.read(i, target) for i in evenly(len(source), count)])


# ---------------------------------------------------------------- patches


@torch.no_grad()
def patch_features(model: nn.Module, images: Tensor, block: int = -1) -> Tensor:
    """Patch tokens (N, P, D) after a block; after the last, and its final norm where there is one, by default."""
    encoder = encoder_of(model)
    chosen = block_index(block, encoder.depth)
    taps: dict[str, Tensor] = {}

    def tap(name: str, stream: Tensor) -> None:
        if name == f"blocks.{chosen}.mlp":
            taps[name] = stream

    with frozen(model) as device:
        tokens = encoder.forward_features(images.to(device), tap=tap)
    if chosen != encoder.depth - 1:
        tokens = next(iter(taps.values()))
    return tokens[:, encoder.num_prefix_tokens :].float().cpu()


@torch.no_grad()
def feature_norms(model: nn.Module, images: Tensor) -> dict[int, float]:
    """Block -> mean length of a token of the stream after it, over all tokens and images."""
    encoder = encoder_of(model)
    found: dict[int, float] = {}

    def tap(name: str, stream: Tensor) -> None:
        if name.endswith(".mlp"):
            found[int(name.split(".")[1])] = float(stream.float().norm(dim=-1).mean())

    with frozen(model) as device:
        encoder.forward_features(images.to(device), tap=tap)
    return found


def patch_colors(model: nn.Module, images: Tensor, basis: Basis = "components", block: int = -1) -> np.ndarray:
    """Patch features as colours, (N, rows, cols, 3) in [0, 1], in one basis for all images.

    "components": the first three principal directions, quick. "spectral": the first three eigenvectors of the
    sparse cosine affinity over all patches, that segmentation uses (see `spectral_embedding`).
    """
    if basis not in get_args(Basis):
        raise ValueError(f"unknown basis {basis!r}; there are {', '.join(get_args(Basis))}")
    features = patch_features(model, images, block)
    rows, cols = (n // p for n, p in zip(images.shape[2:], encoder_of(model).patch_size))
    colors = principal_rgb(features) if basis == "components" else spectral_rgb(features)
    return colors.reshape(len(images), rows, cols, 3)


def principal_rgb(features: Tensor) -> np.ndarray:
    """(N, P, D) -> (N, P, 3): the first three principal directions of all N * P features, each in [0, 1].

    One basis for all images; the largest entry of a direction is positive; the outer 1 % are clipped.
    """
    x = features.flatten(0, 1).double()
    x = x - x.mean(0)
    directions = torch.linalg.svd(x, full_matrices=False).Vh[:3]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return _unit(x @ (directions * largest.sign()).T, features.shape[:2])


def spectral_rgb(features: Tensor) -> np.ndarray:
    """(N, P, D) -> (N, P, 3): the first three spectral eigenvectors after the constant one, each in [0, 1]."""
    from .spectral import spectral_embedding

    return _unit(spectral_embedding(features, 3).double().cpu().flatten(0, 1), features.shape[:2])


def _unit(scores: Tensor, shape: Sequence[int]) -> np.ndarray:
    scores = F.pad(scores, (0, 3 - scores.shape[1]))
    low, high = torch.quantile(scores, torch.tensor([0.01, 0.99], dtype=scores.dtype), dim=0)
    unit = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return unit.unflatten(0, list(shape)).numpy()


def block_index(block: int, depth: int) -> int:
    """A block's number from 0, where negative ones count from the end; checked."""
    if not -depth <= block < depth:
        raise ValueError(f"there is no block {block}: the encoder has {depth} blocks, 0 to {depth - 1}")
    return block % depth


# ---------------------------------------------------------------- classes in the plane


@dataclass(frozen=True)
class Projection:
    """Features of some classes in the plane, with the silhouette score of these classes."""

    points: np.ndarray
    """(n, 2), by t-SNE."""
    labels: np.ndarray
    """(n,), positions in `classes`."""
    classes: list[str]
    silhouette: float
    """Of the features themselves: 1 = tight and apart, 0 = overlapping, negative = nearer to other classes."""
    silhouette_plane: float
    """Of the points: how separate the picture looks."""


def project_classes(
    model: nn.Module,
    splits: Splits,
    *,
    n_classes: int = 10,
    limit: int = 500,
    readout: Readout = "tokens",
    seed: int = 0,
) -> Projection | None:
    """t-SNE of the last block's features of up to `limit` test images (else training ones) of some classes.

    Classes and images are drawn by `seed`, alike for every model. None where fewer than two classes or eight
    images are labelled, or none of these classes has two images.
    """
    source = splits.test if splits.test is not None and splits.test.labels is not None else splits.train
    rows = choose_images(source, n_classes, limit, seed)
    if rows is None:
        return None
    chosen = source.subset(rows)
    features = extract(model, Splits(splits.name, splits.train, chosen), readout=readout, splits=("test",)).test
    assert features is not None
    assert features.labels is not None
    names = source.classes
    numbers, labels = np.unique(features.labels.numpy(), return_inverse=True)
    classes = [names[i] if names else str(i) for i in numbers.tolist()]
    return project(features.last, labels, classes, seed=seed)


def choose_images(source: Source, n_classes: int, limit: int, seed: int) -> list[int] | None:
    """Numbers of images of `n_classes` classes drawn by `seed`, about equally many of each, `limit` in all."""
    if source.labels is None:
        return None
    rng = np.random.default_rng(seed)
    present = np.unique(source.labels[source.labels >= 0])
    picked = rng.permutation(present)[:n_classes]
    share = limit // max(len(picked), 1)
    rows = [rng.permutation(np.flatnonzero(source.labels == c))[:share] for c in picked]
    whole = np.sort(np.concatenate(rows)) if rows else np.array([], int)
    alone = len(whole) == len(picked)  # no two images of a class: nothing lies together
    return whole.tolist() if len(picked) > 1 and len(whole) >= 8 and not alone else None


def project(features: Any, labels: Any, classes: Sequence[str], *, seed: int = 0) -> Projection:
    """t-SNE (scikit-learn, started from the principal plane) of features (n, D) with class numbers (n,).

    Features that are all the same, which would crash it, raise CollapsedError.
    """
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    x = as_matrix(features).double().cpu().numpy()
    if np.abs(x - x.mean(0)).max() <= 1e-6 * np.abs(x).max():
        raise CollapsedError("all features are the same: the features collapsed, and there is no plane to show them in")
    y = np.asarray(labels)
    perplexity = min(30.0, (len(x) - 1) / 3)
    points = TSNE(2, init="pca", perplexity=perplexity, max_iter=500, random_state=seed).fit_transform(x)
    found = [float(silhouette_score(z, y)) for z in (x, points)]
    return Projection(points, y, list(classes), *found)
