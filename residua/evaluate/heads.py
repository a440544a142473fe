"""Fitting many linear classifiers at once.

All heads share one parameter tensor of shape (L, D + 1, R, C): L layers with their own features, R settings
(learning rate, weight decay) per layer, C classes; row D holds the biases. One batched product per step
serves them all, and features are read once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


def logits(params: Tensor, x: Tensor) -> Tensor:
    """(L, D + 1, R, C) heads on (L, n, D) features -> (L, n, R, C)."""
    flat = params.flatten(2)
    return torch.baddbmm(flat[:, -1:], x, flat[:, :-1]).unflatten(2, params.shape[2:])


def gradient(probs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of the summed cross-entropy from class probabilities (L, n, R, C), which it overwrites."""
    index = y[None, :, None, None].expand(*probs.shape[:3], 1)
    g = probs.scatter_add_(3, index, probs.new_full((1, 1, 1, 1), -1.0).expand_as(index)).flatten(2)
    return torch.cat([torch.bmm(x.mT, g), g.sum(1, keepdim=True)], 1).unflatten(2, probs.shape[2:])


def fit_adamw(
    x: Tensor,
    y: Tensor,
    classes: int,
    lr: Tensor,
    weight_decay: Tensor,
    *,
    epochs: int,
    batch_size: int,
    warmup: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """AdamW on cross-entropy, every head in one pass; returns the parameters (L, D + 1, R, C).

    `x` is (L, V, N, D): where V > 1 one of the V views is drawn per image and epoch. `lr` and `weight_decay`
    are (L, R). The rate rises over the first `warmup` share of the steps, then follows a cosine to zero.
    Every image is seen once per epoch; batches have equal size to within one image. Heads start at zero.
    """
    (layers, views, n, dim), settings = x.shape, lr.shape[1]
    rows = x.flatten(1, 2)
    params = x.new_zeros(layers, dim + 1, settings, classes)
    m, v = torch.zeros_like(params), torch.zeros_like(params)
    rate = lr.to(x)[:, None, :, None]
    shrink = rate * weight_decay.to(x)[:, None, :, None]
    generator = torch.Generator().manual_seed(seed)
    per_epoch = math.ceil(n / batch_size)

    def update(g: Tensor, step: int) -> None:
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        now = _cosine(step - 1, epochs * per_epoch, warmup)
        denominator = (v / (1 - 0.999**step)).sqrt_().add_(1e-8)
        params.mul_(1 - now * shrink).sub_((m * (now / (1 - 0.9**step) * rate)).div_(denominator))

    with _few_threads(params.numel() * batch_size, x.device):
        for epoch in range(epochs):
            order = torch.randperm(n, generator=generator)
            pick = order + n * torch.randint(views, (n,), generator=generator)
            order, pick = order.to(x.device), pick.to(x.device)
            for i, (image, row) in enumerate(zip(order.tensor_split(per_epoch), pick.tensor_split(per_epoch))):
                batch = rows[:, row]
                g = gradient(logits(params, batch).softmax(-1), batch, y[image]).div_(len(row))
                update(g, epoch * per_epoch + i + 1)
    return params


@contextmanager
def _few_threads(work: int, device: torch.device) -> Iterator[None]:
    """One thread for steps so small that waiting for a second costs more than it saves."""
    before = torch.get_num_threads()
    if device.type == "cpu" and work < 2**23:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cosine(step: int, total: int, warmup: float) -> float:
    ramp = warmup * total
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(total - ramp, 1)))


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
            with _few_threads(len(z) * w.numel(), x.device):
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
