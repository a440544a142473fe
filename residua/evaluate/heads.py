"""Fitting many linear classifiers at once.

All heads share one parameter tensor of shape (L, D + 1, R, C): L layers with their own features, R settings
(learning rate, weight decay) per layer, C classes; row D holds the biases. One batched product per step
serves them all, and features are read once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .adamw import few_threads, fit_adamw

__all__ = ["fit_adamw", "fit_lbfgs", "gradient", "logits"]


def logits(params: Tensor, x: Tensor) -> Tensor:
    """(L, D + 1, R, C) heads on (L, n, D) features -> (L, n, R, C)."""
    flat = params.flatten(2)
    return torch.baddbmm(flat[:, -1:], x, flat[:, :-1]).unflatten(2, params.shape[2:])


def gradient(probs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of the summed cross-entropy from class probabilities (L, n, R, C), which it overwrites."""
    index = y[None, :, None, None].expand(*probs.shape[:3], 1)
    g = probs.scatter_add_(3, index, probs.new_full((1, 1, 1, 1), -1.0).expand_as(index)).flatten(2)
    return torch.cat([torch.bmm(x.mT, g), g.sum(1, keepdim=True)], 1).unflatten(2, probs.shape[2:])


def fit_lbfgs(
    x: Tensor,
    y: Tensor,
    classes: int,
    weight_decay: Tensor,
    *,
    iterations: int = 300,
    tolerance: float = 1e-5,
) -> Tensor:
    """Multinomial logistic regression, full batch, to its optimum; returns the parameters (L, D + 1, R, C).

    Minimises `mean cross-entropy + (weight_decay / 2) |W|^2` (biases free) for (L, N, D) centred features and
    (L, R) penalties. L-BFGS in coordinates where the Hessian at zero is the identity: on the features'
    principal axes it is diagonal, `e_j / C + weight_decay`, so rotate and rescale. The first step is then
    Newton's. Per layer, heads go from the strongest penalty to the weakest, each from the last.
    """
    params = x.new_zeros(x.shape[0], x.shape[2] + 1, weight_decay.shape[1], classes)
    for i, features in enumerate(x):
        energy, axes = torch.linalg.eigh((features.T @ features / len(features)).double())
        z, axes = (features @ axes.to(x)), axes.to(x)
        w = params.new_zeros(*params.shape[1:2], classes)
        for r in weight_decay[i].argsort(descending=True).tolist():
            penalty = float(weight_decay[i, r])
            curvature = (energy / classes + penalty).clamp_min(1e-6 / classes).to(x)
            scale = torch.cat([curvature, curvature.new_full((1,), 1 / classes)]).rsqrt()[:, None]
            objective = partial(_objective, z=z, y=y, scale=scale, penalty=penalty)
            with few_threads(len(z) * w.numel(), x.device):
                w = scale * _minimise(objective, w / scale, iterations, tolerance)
            params[i, :-1, r], params[i, -1, r] = axes @ w[:-1], w[-1]
    return params


def _objective(p: Tensor, z: Tensor, y: Tensor, scale: Tensor, penalty: float) -> tuple[float, Tensor]:
    """Loss and gradient in scaled parameters (D + 1, C); samples come in chunks that stay in cache."""
    w, n = scale * p, len(z)
    loss = w.new_zeros((), dtype=torch.float64)
    grad = torch.zeros_like(w)
    chunk = max(256, 2**20 // w.shape[1]) if z.device.type == "cpu" else 65536
    for start in range(0, n, chunk):
        batch, truth = z[start : start + chunk], y[start : start + chunk, None]
        logp = torch.addmm(w[-1:], batch, w[:-1]).log_softmax(1)
        loss -= logp.gather(1, truth).sum().double() / n
        g = logp.exp_().scatter_add_(1, truth, logp.new_full((1, 1), -1.0).expand_as(truth))
        grad[:-1].addmm_(batch.T, g)
        grad[-1] += g.sum(0)
    grad /= n
    grad[:-1] += penalty * w[:-1]
    return float(loss + penalty / 2 * w[:-1].square().sum()), scale * grad


def _minimise(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    p: Tensor,
    iterations: int,
    tolerance: float,
    memory: int = 10,
) -> Tensor:
    """L-BFGS with backtracking, until |gradient|^2, twice a unit step's gain, is small beside the loss."""
    loss, g = objective(p)
    pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=memory)
    for _ in range(iterations):
        if _dot(g, g) < tolerance * loss:
            break
        direction = _two_loop(g, pairs)
        slope, t = -_dot(direction, g), 1.0
        new = p - direction
        new_loss, new_g = objective(new)
        while new_loss > loss + 1e-4 * t * slope and t > 1e-4:
            t /= 2
            new = p - t * direction
            new_loss, new_g = objective(new)
        if new_loss >= loss:  # rounding: there is nothing left to gain
            break
        s, d = new - p, new_g - g
        if (curvature := _dot(s, d)) > 0:
            pairs.append((s, d, curvature))
        p, loss, g = new, new_loss, new_g
    return p


def _two_loop(g: Tensor, pairs: deque[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Inverse Hessian times gradient (Nocedal and Wright, algorithm 7.4)."""
    q, coefficients = g.clone(), []
    for s, d, curvature in reversed(pairs):
        coefficients.append(_dot(s, q) / curvature)
        q.sub_(d, alpha=coefficients[-1])
    if pairs:
        _, d, curvature = pairs[-1]
        q *= curvature / _dot(d, d)
    for (s, d, curvature), a in zip(pairs, reversed(coefficients)):
        q.add_(s, alpha=a - _dot(d, q) / curvature)
    return q


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten(), b.flatten()))
