"""The two elementwise halves of a step of many linear classifiers, each one pass over memory on a GPU.

With 8 heads of 1,000 classes a batch of 5,120 has 41 million logits: reading them again for every operation of a
softmax would cost more than the matrix products. Without Triton (CPU) the same is done by PyTorch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

HALF_MAX = 65504.0  # largest float16
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

Now = Tensor | Sequence[float]
"""What changes from step to step: learning rate factor, `1 / (1 - beta1^t)`, `1 / (1 - beta2^t)`, `1 / images`."""


def softmax_gradient(scores: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the summed cross-entropy by the logits, `softmax - onehot`; overwrites `scores`.

    (L, n, R, C) scores of any float type and (n,) labels; images labelled -1 get a gradient of zero. Logits beyond
    float16 count as its largest number, so a head that diverges stays finite.
    """
    if triton is not None and scores.is_cuda:
        return softmax_gradient_triton(scores, labels)
    full = scores.float().clamp_(-HALF_MAX, HALF_MAX) if scores.dtype == torch.float16 else scores
    probs = torch.softmax(full, -1)
    index = labels.clamp(min=0)[None, :, None, None].expand(*probs.shape[:3], 1)
    probs.scatter_add_(3, index, probs.new_full((1, 1, 1, 1), -1.0).expand_as(index))
    if scores.is_cuda or bool((labels < 0).any()):  # a GPU is not asked: it would have to stop and answer
        probs *= (labels >= 0)[None, :, None, None]
    return probs.to(scores.dtype)


def adamw(
    params: Tensor, m: Tensor, v: Tensor, grad: Tensor, low: Tensor, rate: Tensor, shrink: Tensor, now: Now
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019) in place, for (L, D, R, C) parameters.

    `grad` is summed over images and may be overwritten; `rate` and `shrink` (learning rate x weight decay) are
    (L, R); `low` receives a copy of the parameters in its own precision, unless it is `params` itself.
    """
    if triton is not None and params.is_cuda:
        adamw_triton(params, m, v, grad, low, rate, shrink, now)
        return
    factor, unbias1, unbias2, per_image = now
    rate, shrink = rate[:, None, :, None], shrink[:, None, :, None]
    grad = grad.view_as(params).mul_(per_image)
    m.lerp_(grad, 1 - BETA1)
    v.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
    denominator = (v * unbias2).sqrt_().add_(EPS)
    params.mul_(1 - factor * shrink).sub_((m * (factor * unbias1 * rate)).div_(denominator))
    if low is not params:
        low.copy_(params)


def softmax_gradient_triton(scores: Tensor, labels: Tensor) -> Tensor:
    layers, n, settings, classes = scores.shape
    rows = layers * n * settings
    block = triton.next_power_of_2(classes)
    tile = max(1, 1024 // block)
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    _softmax_gradient_kernel[(triton.cdiv(rows, tile),)](
        scores, labels, rows, n, settings, classes, HALF_MAX, ROWS=tile, BLOCK=block, num_warps=warps
    )
    return scores


def adamw_triton(
    params: Tensor, m: Tensor, v: Tensor, grad: Tensor, low: Tensor, rate: Tensor, shrink: Tensor, now: Now
) -> None:
    layers, dim, settings, classes = params.shape
    block = min(1024, triton.next_power_of_2(settings * classes))
    _adamw_kernel[(layers * dim, triton.cdiv(settings * classes, block))](
        params, m, v, grad, low, rate, shrink, now, dim, settings, classes, BETA1, BETA2, EPS, BLOCK=block
    )


if triton is not None:

    @triton.jit
    def _softmax_gradient_kernel(  # type: ignore[no-untyped-def]
        scores, labels, rows, n, settings, classes, limit, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # (layer, image, setting), flattened
        col = tl.arange(0, BLOCK)
        real = (col < classes)[None, :]
        inside = (row < rows)[:, None] & real
        place = scores + row.to(tl.int64)[:, None] * classes + col[None, :]
        s = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        s = tl.where(real, tl.minimum(tl.maximum(s, -limit), limit), float("-inf"))
        e = tl.exp(s - tl.max(s, 1)[:, None])
        label = tl.load(labels + (row // settings) % n, mask=row < rows, other=-1)[:, None]
        g = e / tl.sum(e, 1)[:, None] - tl.where(col[None, :] == label, 1.0, 0.0)
        g = tl.where(label >= 0, g, 0.0)
        tl.store(place, g.to(scores.dtype.element_ty), mask=inside)

    @triton.jit
    def _adamw_kernel(  # type: ignore[no-untyped-def]
        weights, m, v, grad, low, rate, shrink, now, dim, settings, classes, beta1, beta2, eps, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0)  # (layer, dimension), flattened
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = col < settings * classes
        at = row.to(tl.int64) * settings * classes + col
        head = (row // dim) * settings + col // classes
        factor, unbias1, unbias2, per_image = tl.load(now), tl.load(now + 1), tl.load(now + 2), tl.load(now + 3)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * per_image
        new_m = beta1 * tl.load(m + at, mask=inside, other=0.0) + (1 - beta1) * g
        new_v = beta2 * tl.load(v + at, mask=inside, other=0.0) + (1 - beta2) * g * g
        p = tl.load(weights + at, mask=inside, other=0.0)
        p *= 1 - factor * tl.load(shrink + head, mask=inside, other=0.0)
        step = factor * unbias1 * tl.load(rate + head, mask=inside, other=0.0)
        p -= step * new_m / (tl.sqrt(new_v * unbias2) + eps)
        tl.store(m + at, new_m, mask=inside)
        tl.store(v + at, new_v, mask=inside)
        tl.store(weights + at, p, mask=inside)
        tl.store(low + at, p.to(low.dtype.element_ty), mask=inside)
