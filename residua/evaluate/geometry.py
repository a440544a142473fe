"""How classes lie in feature space, and everything that is measured of one layer's features at once."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.data import Splits

from .features import extract
from .featureset import FeatureSet, Labelled, Readout, as_featureset, as_matrix
from .rank import CollapsedError, lidar, ranks
from .reading import Layers

UNITS = {
    "entropy rank": "nats",
    "RankMe": "",
    "participation ratio": "",
    "stable rank": "",
    "alpha-ReQ": "",
    "LiDAR": "",
    "class separation": "",
    "variance ratio": "",
    "silhouette": "",
}
"""What `layer_geometry` may return, with units; the silhouette there is that of cosine distances."""


def class_separation(data: Labelled) -> float:
    """Share of the mean cosine distance that lies between classes (Kornblith et al. 2021, their R^2).

        R^2 = 1 - d_within / d_total
        d_within = mean over classes k of the mean of 1 - cos(x, x') over all x, x' of class k
        d_total  = mean over pairs of classes j, k (j = k too) of the mean of 1 - cos(x, x'), x of j, x' of k

    0: classes are laid over each other; 1: every class is one direction. A mean of cosines is a product of
    mean unit vectors `u_k`, so `d_within = 1 - mean_k |u_k|^2` and `d_total = 1 - |mean_k u_k|^2`. Features are
    taken as they are, without centring. An image is a pair with itself, so features that know nothing of the classes
    have 1 / n with n images a class, not 0: compare sets of one size.
    """
    x, _, member = _labelled(data)
    means = _class_sums(F.normalize(x, dim=1), member) / member.bincount()[:, None]
    within = 1 - means.square().sum(1).mean()
    total = 1 - means.mean(0).square().sum()
    return float(1 - within / _positive(total, "all features point the same way"))


def variance_ratio(data: Labelled) -> float:
    """Variance between classes over variance within them, `Tr S_B / Tr S_W`; 0 and up.

        S_B = sum_k (n_k / n) (m_k - m)(m_k - m)^T        S_W = (1 / n) sum_i (x_i - m_y(i))(x_i - m_y(i))^T

    The F statistic of a one-way analysis of variance, without its degrees of freedom: features that know nothing of
    C classes have (C - 1) / (n - C), not 0. Infinite where every class is one point.
    """
    x, _, member = _labelled(data)
    means = _class_sums(x, member) / member.bincount()[:, None]
    _positive((x - x.mean(0)).norm() - 1e-10 * x.norm(), "all features are the same")
    within = (x - means[member]).square().sum()
    between = (means[member] - x.mean(0)).square().sum()
    return float(between / within) if within.sqrt() > 1e-10 * x.norm() else math.inf  # else rounding


def silhouette(data: Labelled, metric: Literal["euclidean", "cosine"] = "euclidean", chunk: int = 1024) -> float:
    """Mean over images of `(b - a) / max(a, b)` (Rousseeuw 1987), between -1 and 1; scikit-learn's number.

    `a` is the mean distance to the other images of the same class, `b` that to the nearest other class; an
    image alone in its class counts 0. Exact; memory holds `chunk` rows of distances. Cosine distances need no
    pairs at all, since their means are products with class means.
    """
    x, n, member = _labelled(data)
    sizes = member.bincount().to(x)
    if len(sizes) == n:
        raise ValueError(f"silhouette: {n} images of {n} classes; at least one class needs two images")
    if metric == "cosine":
        sums = _cosine_sums(x, member, sizes)
    elif metric == "euclidean":
        sums = _euclidean_sums(x - x.mean(0), member, chunk)
    else:
        raise ValueError(f'metric must be "euclidean" or "cosine", got {metric!r}')
    own = member[:, None]
    others = (sizes[member] - 1).clamp_min(1)
    a = sums.gather(1, own)[:, 0] / others
    b = (sums / sizes).scatter(1, own, torch.inf).amin(1)
    score = (b - a) / torch.maximum(a, b)
    return float(score.nan_to_num(0).where(sizes[member] > 1, 0).mean())


def layer_geometry(data: FeatureSet | tuple[Any, Any], layer: int | None = None) -> dict[str, float]:
    """All ranks and class measures of one layer (the last unless told), by name; `UNITS` names them all.

    One factorisation serves the ranks. LiDAR is there where the set has views, class separation, variance
    ratio and silhouette (cosine) where it has labels of two classes or more. What a set is too small for is
    NaN. Features without spread raise CollapsedError.

    >>> feats = extract(model, "cifar100", layers="all")
    >>> {i: layer_geometry(feats.test, i)["class separation"] for i in feats.test.layers}
    """
    if not isinstance(data, FeatureSet):
        x, y = data
        data = FeatureSet({-1: as_matrix(x)}, None if y is None else torch.as_tensor(y))
    data = data.only(data.layers[-1] if layer is None else layer)
    found = ranks(data)
    if data.views:
        found["LiDAR"] = lidar(data)
    if data.labels is not None and len(data.labels.unique()) > 1:
        found["class separation"] = class_separation(data)
        found["variance ratio"] = variance_ratio(data)
        alone = len(data.labels.unique()) == len(data)
        found["silhouette"] = math.nan if alone else silhouette(data, "cosine")
    return found


def model_lidar(
    model: nn.Module,
    data: str | Splits,
    *,
    images: int = 1000,
    views: int = 10,
    layers: Layers = "last",
    readout: Readout = "tokens",
    seed: int = 0,
    delta: float = 1e-4,
    **options: Any,
) -> dict[int, float]:
    """LiDAR of each layer: of `images` training images chosen by `seed`, the centre view and `views - 1` others.

    `options` are those of `extract`: img_size, batch_size, device, ...
    """
    if views < 2:
        raise ValueError(f"LiDAR needs at least 2 views of each image, got {views}")
    options = {"layers": layers, "readout": readout, "seed": seed, "splits": ("train",)} | options
    found = extract(model, data, limit=images, views=views - 1, **options).train
    return {i: lidar(found.only(i), delta) for i in found.layers}


def _labelled(data: Labelled) -> tuple[Tensor, int, Tensor]:
    """Features in float64, their number, and class numbers 0..C-1 without gaps."""
    whole = as_featureset(data)
    if whole.targets.min() < 0:
        raise ValueError("labels must be class indices >= 0; drop unlabelled images first")
    classes, member = whole.targets.unique(return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"all {len(whole)} images are of one class; this measure compares classes")
    x = whole.last.double()
    return x, len(x), member.to(x.device)


def _class_sums(x: Tensor, member: Tensor) -> Tensor:
    """(C, D) sums of the rows of each class."""
    return x.new_zeros(int(member.max()) + 1, x.shape[1]).index_add_(0, member, x)


def _cosine_sums(x: Tensor, member: Tensor, sizes: Tensor) -> Tensor:
    """(N, C) sums of cosine distances to the images of each class, oneself at distance 0."""
    unit = F.normalize(x, dim=1)
    sums = sizes - unit @ _class_sums(unit, member).T
    oneself = 1 - unit.square().sum(1, keepdim=True)  # rounding, or 1 for a feature that is all zero
    sums = sums.scatter_add(1, member[:, None], -oneself)
    return sums.where(sums > 1e-14 * sizes, 0)  # less is rounding


def _euclidean_sums(x: Tensor, member: Tensor, chunk: int) -> Tensor:
    """(N, C) sums of Euclidean distances to the images of each class."""
    classes = int(member.max()) + 1
    parts = [x.new_zeros(len(p), classes).index_add_(1, member, torch.cdist(p, x)) for p in x.split(chunk)]
    return torch.cat(parts)


def _positive(value: Tensor, problem: str) -> Tensor:
    if value <= 1e-12:
        raise CollapsedError(f"{problem}: the features collapsed")
    return value
