"""How many directions features use. Two different numbers, never to be confused:

`entropy_rank` is an entropy in nats, of the spectrum of the samples' *covariance* (squared singular values);
`rankme` is an exponential, of the entropy of the singular values of the embedding matrix *itself*.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .featureset import as_matrix

Center = Literal["samples", "dims"]


class CollapsedError(ValueError):
    """All features are the same: there is no spectrum to speak of."""


def entropy_rank(features: Any, center: Center | None = "samples") -> float:
    """Shannon entropy, in nats, of the normalised singular values of the n x n covariance of samples.

    With `s` the singular values of the centred (n, d) features, `p = s^2 / sum s^2` and the result is
    `-sum p log p`, between 0 (one direction) and log min(n, d).

    `center`: "samples" subtracts the mean sample (invariant to rotations of the features); "dims" subtracts
    each sample's mean over its own dimensions; None subtracts nothing.

    >>> entropy_rank(torch.cat([torch.eye(8), -torch.eye(8)]))  # log 8
    2.0794...
    """
    x = as_matrix(features).double()
    if center == "samples":
        centred = x - x.mean(0)
    elif center == "dims":
        centred = x - x.mean(1, keepdim=True)
    elif center is None:
        centred = x
    else:
        raise ValueError(f'center must be "samples", "dims" or None, got {center!r}')
    if centred.norm() <= 1e-10 * x.norm():
        raise CollapsedError(f"all {len(x)} feature vectors are the same after centering: the features collapsed")
    energy = _singular_values(centred).square()
    return _entropy(energy / energy.sum())


def rankme(features: Any, eps: float = 1e-7) -> float:
    """RankMe (Garrido et al. 2023), after Roy and Vetterli: `exp(-sum p log p)`, `p = s / sum s + eps`.

    `s` are the singular values of the uncentred (n, d) embedding matrix; between 1 and min(n, d).
    """
    s = _singular_values(as_matrix(features).double())
    if s[0] == 0:
        raise CollapsedError("all features are zero: the features collapsed")
    p = s / s.sum() + eps
    return float((-(p * p.log()).sum()).exp())


def _singular_values(x: Tensor) -> Tensor:
    """Descending singular values; through the triangular factor, so the long side costs one QR."""
    if x.shape[0] < x.shape[1]:
        x = x.T
    if x.shape[0] > x.shape[1]:
        x = torch.linalg.qr(x, mode="r").R
    return torch.linalg.svdvals(x)


def _entropy(p: Tensor) -> float:
    return float(torch.special.entr(p).sum().clamp_min(0))
