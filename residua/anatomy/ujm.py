"""The Unconstrained Jacobians Model: what alignment is when nothing but the Jacobians is left of a network.

Free matrices `J_1..J_L` and a classifier `w`; `h_0 = x`, `h_i = (I + J_i) h_{i-1}`. Minimise

    mean_n log(1 + exp(-y_n w^T h_{L,n})) + (lam_w / 2) |w|^2 + P
    P = (lam / 2) sum_i |J_i|_F^2                                "weights"
    P = (lam L / 2) mean_n sum_i |J_i h_{i-1,n}|^2               "kinetic"

With more than two classes `w` is a matrix and the first term cross-entropy. Both penalties are needed: with lam_w = 0
the problem is degenerate. (Li and Papyan 2023, section on the unconstrained model.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

Penalty = Literal["weights", "kinetic"]


@dataclass(frozen=True)
class UJM:
    """A solution: Jacobians (L, d, d), classifier (d,) or (C, d), and the data it was found for. All float64."""

    J: Tensor
    w: Tensor
    x: Tensor
    y: Tensor
    penalty: Penalty
    loss: float
    gradient: float
    """Norm of the gradient at the solution: how well it is solved."""

    @property
    def depth(self) -> int:
        return len(self.J)

    def maps(self) -> list[Callable[[Tensor], Tensor]]:
        """The residual branches, `h -> J_i h` for a batch (N, d)."""
        return [partial(_apply, j) for j in self.J]

    def path(self) -> Tensor:
        """Representations (L + 1, N, d) of every sample."""
        return path(self.J, self.x)

    def accuracy(self) -> float:
        """Share of samples classified right, in percent."""
        scores = F.linear(self.path()[-1], self.w)
        guess = (scores > 0).long() * 2 - 1 if self.w.ndim == 1 else scores.argmax(1)
        return 100 * float((guess == self.y).double().mean())


def blobs(dim: int = 6, count: int = 40, classes: int = 2, noise: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian clouds: at +-e_1 for two classes (labels -1 and 1), at e_1..e_C for more (labels 0..C-1)."""
    if count < dim:
        raise ValueError(f"{count} samples cannot span {dim} dimensions: give at least {dim}")
    if classes < 2:
        raise ValueError(f"classes is {classes}: there is nothing to tell apart, give at least 2")
    if classes > dim:
        raise ValueError(f"{classes} classes need at least as many dimensions, got {dim}")
    generator = torch.Generator().manual_seed(seed)
    member = torch.arange(count) % classes
    centres = torch.eye(dim, dtype=torch.float64)[:classes]
    if classes == 2:
        centres = torch.stack([-centres[0], centres[0]])
    x = centres[member] + noise * torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return x, member * 2 - 1 if classes == 2 else member


def path(jacobians: Tensor, x: Tensor) -> Tensor:
    """`h_0..h_L` (L + 1, N, d) from J (L, d, d) and x (N, d)."""
    points = [x]
    for j in jacobians:
        points.append(points[-1] + _apply(j, points[-1]))
    return torch.stack(points)


def objective(jacobians: Tensor, w: Tensor, x: Tensor, y: Tensor, penalty: Penalty, lam: float, lam_w: float) -> Tensor:
    """The loss above."""
    points = path(jacobians, x)
    scores = F.linear(points[-1], w)
    fit = F.softplus(-y * scores).mean() if w.ndim == 1 else F.cross_entropy(scores, y)
    if penalty == "weights":
        cost = lam / 2 * jacobians.square().sum()
    else:
        cost = lam * len(jacobians) / 2 * points.diff(dim=0).square().sum() / len(x)
    return fit + lam_w / 2 * w.square().sum() + cost


def solve(
    x: Tensor,
    y: Tensor,
    depth: int,
    *,
    penalty: Penalty = "weights",
    lam: float = 0.01,
    lam_w: float = 0.01,
    seed: int = 0,
    start: float = 0.1,
    iterations: int = 20_000,
) -> UJM:
    """Minimise by L-BFGS in float64, from random Jacobians of Frobenius norm about `start`.

    `x` is (N, d); `y` (N,) holds -1 and 1, or class numbers from 0.

    >>> x, y = blobs(dim=6, count=40)
    >>> model = solve(x, y, depth=16, penalty="kinetic")
    """
    if penalty not in ("weights", "kinetic"):
        raise ValueError(f"penalty is {penalty!r}; choose 'weights' or 'kinetic'")
    if depth < 1 or lam <= 0 or lam_w <= 0:
        raise ValueError(f"depth {depth}, lam {lam} and lam_w {lam_w} must be positive, or there is no minimum")
    x = x.double()
    n, d = x.shape
    if n < d:
        raise ValueError(f"{n} samples do not span {d} dimensions: give at least {d}")
    binary = set(y.unique().tolist()) <= {-1, 1}
    heads = 1 if binary else int(y.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    jacobians = start / d * torch.randn(depth, d, d, generator=generator, dtype=torch.float64)
    w = start / math.sqrt(d) * torch.randn(heads, d, generator=generator, dtype=torch.float64)

    def unpack(flat: Tensor) -> tuple[Tensor, Tensor]:
        j, w = flat[: depth * d * d].view(depth, d, d), flat[depth * d * d :].view(heads, d)
        return j, w[0] if binary else w

    def loss_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
        flat = torch.from_numpy(values).requires_grad_()
        loss = objective(*unpack(flat), x, y, penalty, lam, lam_w)
        (gradient,) = torch.autograd.grad(loss, flat)
        return float(loss.detach()), gradient.numpy()

    begin = torch.cat([jacobians.flatten(), w.flatten()]).numpy()
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 0.0, "gtol": 1e-10, "maxcor": 30}
    found = minimize(loss_and_gradient, begin, jac=True, method="L-BFGS-B", options=options)
    jacobians, w = unpack(torch.from_numpy(found.x))
    return UJM(jacobians, w, x, y, penalty, float(found.fun), float(np.linalg.norm(found.jac)))


def _apply(j: Tensor, h: Tensor) -> Tensor:
    return h @ j.T
