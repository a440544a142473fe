"""Distances between two sets of features, as generated images are scored by them. All in float64.

Which features makes the name: in those of Inception (`residua.evaluate.inception`) the Frechet distance is FID and the
kernel distance KID. The Inception score is of one set alone, by its classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .featureset import as_matrix, full_precision

_ROWS = 4096  # of features at once in float64
_DISTANCES = 2**25  # held at once


@dataclass(frozen=True)
class Statistics:
    """Mean (D,) and covariance (D, D) of the features of `count` images, float64; 0 where the count is not known."""

    count: int
    mean: Tensor
    cov: Tensor

    @property
    def rank_deficient(self) -> bool:
        """Whether there are too few images for a covariance of full rank."""
        return 0 < self.count < len(self.mean) + 1


class Moments:
    """Sums over features as they come; `statistics` of all of them at the end.

    Squares of float32 numbers are exact in float64, so that plain sums lose nothing that the features had.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = float64_device(device)
        self.count = 0
        self.sum: Tensor | None = None
        self.products: Tensor | None = None

    def add(self, features: Tensor) -> None:
        """Features (b, D) of the next b images."""
        x = features.to(self.device).double()
        if self.sum is None or self.products is None:
            self.sum, self.products = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1], x.shape[1])
        self.count += len(x)
        self.sum += x.sum(0)
        self.products.addmm_(x.T, x)

    def statistics(self, what: str = "features") -> Statistics:
        if self.count < 2 or self.sum is None or self.products is None:
            raise ValueError(f"{what}: a covariance needs at least 2 images, got {self.count}")
        if not bool(torch.isfinite(self.products).all()):
            raise ValueError(f"{what}: some features are NaN or infinite; are the weights and images sound?")
        mean = self.sum / self.count
        cov = (self.products - self.count * torch.outer(mean, mean)) / (self.count - 1)
        return Statistics(self.count, mean.cpu(), cov.cpu())


def statistics(features: Any, device: str | torch.device = "cpu", what: str = "features") -> Statistics:
    """Mean and unbiased covariance of features (N, D)."""
    moments = Moments(device)
    for part in as_matrix(features, what).split(_ROWS):
        moments.add(part)
    return moments.statistics(what)


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Squared Frechet distance of two Gaussians: `|m_a - m_b|^2 + tr A + tr B - 2 tr (A B)^(1/2)`.

    With factors `A = F F^T` and `B = G G^T` the last trace is the sum of the singular values of `F^T G`. Taken so it
    needs no root of a matrix that is not symmetric, cannot become complex, and is sound for covariances of any rank:
    the distance of a set from itself is 0 to rounding. Heusel et al. 2017.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and of {len(b.mean)} dimensions: use one extractor for both")
    root = torch.linalg.svdvals(_factor(a.cov).T @ _factor(b.cov)).sum()
    distance = (a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace() - 2 * root
    if not math.isfinite(distance):
        raise ValueError("the means or covariances hold NaN or infinity")
    return max(0.0, float(distance))


def _factor(cov: Tensor) -> Tensor:
    """F (D, rank) with `F F^T` = covariance; eigenvalues that are 0 to rounding are left out."""
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    kept = values > values[-1].clamp(min=0) * len(values) * torch.finfo(cov.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()


class KernelDistance(NamedTuple):
    """Mean and standard deviation over subsets."""

    mean: float
    std: float


def kernel_distance(
    samples: Any,
    reference: Any,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> KernelDistance:
    """Squared maximum mean discrepancy under `k(x, y) = (x.y / D + 1)^3`, unbiased, over random subsets.

    Each subset draws `subset_size` rows of either set without replacement. Unbiased means that two sets of one
    distribution give values around 0, some of them negative. Binkowski et al. 2018.
    """
    x, y = as_matrix(samples, "samples"), as_matrix(reference, "reference")
    _check_widths(x, y)
    if subsets < 1:
        raise ValueError(f"subsets must be at least 1, got {subsets}")
    if not 2 <= subset_size <= min(len(x), len(y)):
        raise ValueError(f"subsets of {subset_size}: from 2 to {min(len(x), len(y))} rows are there to draw from")
    rng, where = np.random.default_rng(seed), float64_device(device)

    def draw(features: Tensor) -> Tensor:
        rows = np.sort(rng.choice(len(features), subset_size, replace=False))
        return features[torch.from_numpy(rows)].to(where).double()

    values = np.array([_mmd2(draw(x), draw(y)) for _ in range(subsets)])
    return KernelDistance(float(values.mean()), float(values.std()))


def _mmd2(x: Tensor, y: Tensor) -> float:
    n, d = x.shape

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / d + 1) ** 3

    def among(a: Tensor) -> Tensor:
        own = kernel(a, a)
        return (own.sum() - own.trace()) / (n * (n - 1))

    return float(among(x) + among(y) - 2 * kernel(x, y).mean())


class PrecisionRecall(NamedTuple):
    """Shares in [0, 1]."""

    precision: float
    """Of samples that lie among the reference: fidelity."""
    recall: float
    """Of the reference that lies among the samples: variety."""


def precision_recall(
    samples: Any, reference: Any, *, k: int = 3, device: str | torch.device = "cpu"
) -> PrecisionRecall:
    """Share of one set that lies within the other, taken as the union of balls that reach to the k-th neighbour.

    Kynkaanniemi et al. 2019, whose k is 3. Both numbers depend on how many images there are: compare like with like.
    """
    x, y = as_matrix(samples, "samples"), as_matrix(reference, "reference")
    _check_widths(x, y)
    check_neighbors(k, len(x), len(y))
    where = float64_device(device)
    center = y.double().mean(0)
    x, y = ((part.double() - center).to(where) for part in (x, y))
    return PrecisionRecall(_inside(x, y, _radii(y, k)), _inside(y, x, _radii(x, k)))


class InceptionScore(NamedTuple):
    """Mean and standard deviation over parts of the samples."""

    mean: float
    std: float


def inception_score(logits: Any, *, parts: int = 10, seed: int = 0) -> InceptionScore:
    """`exp E_x KL(p(y | x) || p(y))` of a classifier's logits (N, classes), over parts of samples in mixed order.

    From 1, where every sample is classified alike, to the number of classes. Salimans et al. 2016, whose parts are ten.
    """
    x = as_matrix(logits, "logits")
    if not 1 <= parts <= len(x):
        raise ValueError(f"{parts} parts of {len(x):,} samples: every part needs one")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
    values = np.array([_variety(x[rows].double().log_softmax(1)) for rows in order.tensor_split(parts)])
    return InceptionScore(float(values.mean()), float(values.std()))


def _variety(log_p: Tensor) -> float:
    """exp of the mean divergence of rows from their mean."""
    log_q = log_p.logsumexp(0) - math.log(len(log_p))
    return math.exp(float((log_p.exp() * (log_p - log_q)).sum(1).mean()))


def check_neighbors(k: int, samples: int, reference: int) -> None:
    if not 1 <= k < min(samples, reference):
        raise ValueError(
            f"precision and recall with {k} neighbours need more than {k} images on either side, "
            f"got {samples:,} samples and {reference:,} of the reference"
        )


def _radii(x: Tensor, k: int) -> Tensor:
    """Squared distance of every point to its k-th neighbour, itself not counted."""
    found = []
    for start, part in _distances(x, x):
        rows = torch.arange(len(part), device=x.device)
        part[rows, rows + start] = torch.inf
        found.append(part.kthvalue(k, dim=1).values)
    return torch.cat(found)


def _inside(x: Tensor, centers: Tensor, radii: Tensor) -> float:
    """Share of `x` within any ball."""
    return sum(int((part <= radii).any(1).sum()) for _, part in _distances(x, centers)) / len(x)


def _distances(x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Squared distances (b, len(y)) of b rows of `x` at a time, with the first one's number; 0 to rounding is 0."""
    rows, squares = max(1, _DISTANCES // len(y)), y.square().sum(1)
    for start in range(0, len(x), rows):
        part = x[start : start + rows]
        total = part.square().sum(1, keepdim=True) + squares
        distance = torch.addmm(total, part, y.T, alpha=-2)
        yield start, distance.where(distance > 1e-13 * total, 0)


def _check_widths(x: Tensor, y: Tensor) -> None:
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"features of {x.shape[1]} and of {y.shape[1]} dimensions: use one extractor for both")


def float64_device(device: str | torch.device) -> torch.device:
    """The device, or the CPU where it has no float64."""
    where = torch.device(device)
    return torch.device("cpu") if where.type == "mps" else where


@contextmanager
def exact_float32() -> Iterator[None]:
    """Matrix products and convolutions in float32 proper; PyTorch lets the latter use TF32 unless told otherwise."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with full_precision():
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
