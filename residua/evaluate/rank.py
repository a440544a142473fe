"""How many directions features use. Several numbers, never to be confused:

| | of which spectrum | number |
|---|---|---|
| `entropy_rank` | covariance of samples, `s^2` | entropy, in nats |
| `rankme` | embedding matrix itself, uncentred, `s` | exponential of an entropy |
| `participation_ratio` | covariance, `s^2` | `(sum s^2)^2 / sum s^4` |
| `stable_rank` | covariance, `s^2` | `sum s^2 / s_1^2` |
| `alpha_req` | covariance, `s^2` | exponent of its power law |
| `lidar` | covariance of images over that of their views | exponential of an entropy |

`ranks` gives the first five for the price of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .featureset import FeatureSet, as_matrix

Center = Literal["samples", "dims"]
FIT = (11, 50)  # eigenvalues, counted from 1, through which `alpha_req` draws its line
_EPS = 1e-7  # added to probabilities by RankMe and LiDAR
_ROWS = 2**10  # of features at once in float64
_TALL = 8  # rows a column from which they are factorised


class CollapsedError(ValueError):
    """Features without spread: all the same, so there is no spectrum to speak of."""


def spectrum(features: Any, center: Center | None = "samples") -> Tensor:
    """Singular values of the centred (n, d) features, descending: float64 of shape (min(n, d),).

    Their squares over n are the eigenvalues of the covariance. `center` as in `entropy_rank`.
    """
    return _singular_values(_triangular(_centred(as_matrix(features), center)))


def entropy_rank(features: Any, center: Center | None = "samples") -> float:
    """Shannon entropy, in nats, of the normalised singular values of the n x n covariance of samples.

    With `s` the singular values of the centred (n, d) features, `p = s^2 / sum s^2` and the result is
    `-sum p log p`, between 0 (one direction) and log min(n, d).

    `center`: "samples" subtracts the mean sample (invariant to rotations of the features); "dims" subtracts
    each sample's mean over its own dimensions; None subtracts nothing.

    >>> entropy_rank(torch.cat([torch.eye(8), -torch.eye(8)]))  # log 8
    2.0794...
    """
    return _entropy(_energies(_centred(as_matrix(features), center)))


def rankme(features: Any, eps: float = _EPS) -> float:
    """RankMe (Garrido et al. 2023), after Roy and Vetterli: `exp(-sum p log p)`, `p = s / sum s + eps`.

    `s` are the singular values of the uncentred (n, d) embedding matrix; between 1 and min(n, d).
    """
    return _exp_entropy(_not_zero(_singular_values(_triangular(_Rows(as_matrix(features))))), eps)


def participation_ratio(features: Any, center: Center | None = "samples") -> float:
    """`(sum l)^2 / sum l^2` over the eigenvalues `l` of the covariance; between 1 and min(n, d).

    The number of equal directions that would spread the variance as evenly (Gao et al. 2017).
    """
    return _participation_ratio(_energies(_centred(as_matrix(features), center)))


def stable_rank(features: Any, center: Center | None = "samples") -> float:
    """`||X||_F^2 / ||X||_2^2` of the centred (n, d) features X; between 1 and their rank.

    Total variance over that of the largest direction (Rudelson and Vershynin 2007).
    """
    return _stable_rank(_energies(_centred(as_matrix(features), center)))


def alpha_req(features: Any, fit: tuple[int, int] = FIT) -> float:
    """alpha-ReQ (Agrawal et al. 2022): the exponent of `l_j ~ j^-alpha`, eigenvalues of the covariance.

    Minus the slope of the least-squares line through `(log j, log l_j)`, j from `fit[0]` to `fit[1]` (counted
    from 1, both included) as far as there are positive eigenvalues; three points are needed. The head is left
    out because it follows no power law, the tail because it is noise. Near 1 is said to generalise best.
    """
    return _alpha_req(spectrum(features).square(), fit)


def lidar(features: Any, delta: float = 1e-4, eps: float = _EPS) -> float:
    """LiDAR (Thilak et al. 2023), the rank of what tells images apart whatever the view; between 1 and D.

    `features` (N, V, D): V augmented views of each of N images; or a FeatureSet with views, whose centre view
    counts as one more. With `m_i` the mean of image i's views and `m` that of all,

        S_w = mean_iv (x_iv - m_i)(x_iv - m_i)^T + delta I        S_b = mean_i (m_i - m)(m_i - m)^T
        LiDAR = exp(-sum p log p),   p = l / sum l + eps,   l = eigenvalues of S_w^-1/2 S_b S_w^-1/2

    The paper takes 1,000 images with 10 views or more; fewer images than dimensions bound it by N - 1. `delta`
    is absolute, so features of another scale have another LiDAR.
    """
    x = _views(features)
    n, _, d = x.shape
    mean = x.mean(1)
    within = (x - mean[:, None]).flatten(0, 1)
    between = mean - mean.mean(0)
    if between.norm() <= 1e-10 * mean.norm():
        raise CollapsedError(f"the {n} images have the same features: the features collapsed")
    s_w = within.T @ within / len(within) + delta * torch.eye(d, dtype=x.dtype, device=x.device)
    # S_w = L L^T makes L^-1 S_b L^-T, whose eigenvalues are those of S_w^-1/2 S_b S_w^-1/2
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(s_w), between.T, upper=False)
    values = x.new_zeros(d)
    found = _singular_values(whitened).square()
    values[: len(found)] = found
    return _exp_entropy(values, eps)


def ranks(features: Any) -> dict[str, float]:
    """Entropy rank, RankMe, participation ratio, stable rank and alpha-ReQ by one factorisation.

    The centred features are factorised once, `X - 1 m^T = Q R`; RankMe wants them uncentred, and those have the
    singular values of R with the row `sqrt(n) m` below it. Where there are too few eigenvalues for alpha-ReQ it
    is NaN.
    """
    x = as_matrix(features)
    body = _triangular(_centred(x, "samples"))
    values = _singular_values(body)
    uncentred = _singular_values(torch.cat([body, math.sqrt(len(x)) * _mean(x)[None]]))
    energies = values.square()
    first, last = FIT
    return {
        "entropy rank": _entropy(energies),
        "RankMe": _exp_entropy(uncentred[: min(x.shape)], _EPS),
        "participation ratio": _participation_ratio(energies),
        "stable rank": _stable_rank(energies),
        "alpha-ReQ": _alpha_req(energies, FIT) if _usable(energies, last) - first >= 2 else math.nan,
    }


@dataclass(frozen=True)
class _Rows:
    """Features (n, d) in float64, some rows at a time, less what centring takes away: there may be millions of rows."""

    x: Tensor
    mean: Tensor | None = None
    each: bool = False
    """Whether every row loses its own mean."""

    def __iter__(self) -> Iterator[Tensor]:
        for part in self.x.split(_ROWS):
            part = part.double()
            part = part if self.mean is None else part - self.mean
            yield part - part.mean(1, keepdim=True) if self.each else part

    def norm(self) -> float:
        return math.sqrt(sum(float(part.square().sum()) for part in self))


def _mean(x: Tensor) -> Tensor:
    return torch.stack([part.sum(0) for part in _Rows(x)]).sum(0) / len(x)


def _centred(x: Tensor, center: Center | None) -> _Rows:
    if center == "samples":
        centred = _Rows(x, _mean(x))
    elif center == "dims":
        centred = _Rows(x, each=True)
    elif center is None:
        centred = _Rows(x)
    else:
        raise ValueError(f'center must be "samples", "dims" or None, got {center!r}')
    if center == "samples" and len(x) < 2:
        raise CollapsedError("one feature vector has no spread; ranks need at least two images")
    if centred.norm() <= 1e-10 * _Rows(x).norm():
        raise CollapsedError(f"all {len(x)} feature vectors are the same after centering: the features collapsed")
    return centred


def _views(features: Any) -> Tensor:
    """(N, V, D) in float64, checked."""
    if isinstance(features, FeatureSet):
        last = features.layers[-1]
        if last not in features.views:
            raise ValueError("LiDAR needs several views of each image: extract(..., views=9) reads them")
        features = torch.cat([features.last[None], features.views[last]]).transpose(0, 1)
    x = torch.as_tensor(features)
    if x.ndim != 3:
        raise ValueError(f"LiDAR: expected (images, views, dimensions), got shape {tuple(x.shape)}")
    n, v, _ = x.shape
    if n < 2 or v < 2:
        raise ValueError(f"LiDAR needs at least 2 images with 2 views each, got {n} with {v}; usual are 1,000 with 10")
    as_matrix(x.flatten(0, 1))
    return x.double()


def _triangular(rows: Iterable[Tensor]) -> Tensor:
    """A matrix of at most d rows with the singular values of all rows (n, d) and the same row space."""
    waiting: list[Tensor] = []
    for part in rows:
        waiting.append(part)
        if sum(map(len, waiting)) > _TALL * part.shape[1]:
            waiting = [torch.linalg.qr(torch.cat(waiting), mode="r").R]
    whole = torch.cat(waiting)
    return torch.linalg.qr(whole, mode="r").R if whole.shape[0] > whole.shape[1] else whole


def _singular_values(x: Tensor) -> Tensor:
    """Descending singular values; through the triangular factor, so the long side costs one QR."""
    return torch.linalg.svdvals(_triangular([x.T if x.shape[0] < x.shape[1] else x]))


def _energies(rows: _Rows) -> Tensor:
    """Descending squares of the singular values, as eigenvalues of the smaller Gram matrix.

    Faster than singular values. Exact to rounding *of the largest*, which is all that sums of them need.
    """
    n, d = rows.x.shape
    if n > d:
        gram = torch.zeros(d, d, dtype=torch.float64, device=rows.x.device)
        for part in rows:
            gram.addmm_(part.T, part)
    else:
        whole = torch.cat(list(rows))
        gram = whole @ whole.T
    return torch.linalg.eigvalsh(gram).flip(0).clamp_min(0)


def _entropy(energies: Tensor) -> float:
    return float(torch.special.entr(energies / energies.sum()).sum().clamp_min(0))


def _exp_entropy(values: Tensor, eps: float) -> float:
    return float(torch.special.entr(values / values.sum() + eps).sum().exp())


def _participation_ratio(energies: Tensor) -> float:
    return float(energies.sum().square() / energies.square().sum())


def _stable_rank(energies: Tensor) -> float:
    return float(energies.sum() / energies[0])


def _alpha_req(energies: Tensor, fit: tuple[int, int]) -> float:
    first, last = fit
    if not 1 <= first < last:
        raise ValueError(f"fit must be (first, last) with 1 <= first < last, got {fit}")
    usable = _usable(energies, last)
    if usable - first < 2:
        raise ValueError(
            f"alpha-ReQ fits eigenvalues {first} to {last}, but only {int((energies > 0).sum())} are positive; "
            "use more images or wider features, or give another fit=(first, last)"
        )
    j = torch.arange(first, usable + 1, dtype=energies.dtype, device=energies.device).log()
    y = energies[first - 1 : usable].log()
    j, y = j - j.mean(), y - y.mean()
    return float(-(j @ y) / (j @ j))


def _usable(energies: Tensor, last: int) -> int:
    """How many of the first `last` eigenvalues are positive beyond rounding."""
    floor = energies[0] * (len(energies) * torch.finfo(energies.dtype).eps) ** 2
    return min(last, int((energies > floor).sum()))


def _not_zero(values: Tensor) -> Tensor:
    if values[0] == 0:
        raise CollapsedError("all features are zero: the features collapsed")
    return values
