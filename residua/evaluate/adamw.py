"""AdamW for many linear classifiers in one pass over the features.

All heads share one (L, D, R, C) tensor: L columns of features, R settings per column, C classes; a feature that is
always one carries the bias. A step is a gather, two batched matrix products and two elementwise kernels, recorded as a
CUDA graph on a GPU: nothing in the loop waits for the host or is waited for.

**Half precision.** With float16 features the products run on tensor cores: features, weights as the products see
them, logits and their gradients are float16; sums, parameters and AdamW's moments stay float32. Standardised
features, `softmax - onehot` in [-1, 1] and logits all fit float16's range, so it is closer to float32 than bfloat16
would be: 11 bits of mantissa instead of 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .graph import record
from .kernels import BETA1, BETA2, Now, adamw, softmax_gradient

_MIN_TO_RECORD = 64  # steps that repay the recording


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
    layers, views, n, dim = x.shape
    rows = x.new_zeros(layers, views * n, row_width(dim, x.dtype))
    rows[..., :dim], rows[..., dim] = x.flatten(1, 2), 1.0
    images = torch.arange(n, device=x.device)
    options = {"epochs": epochs, "batch_size": batch_size, "warmup": warmup, "seed": seed}
    return fit_rows(rows, y, images, classes, lr, weight_decay, **options)[:, : dim + 1]  # type: ignore[arg-type]


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Columns of a row of features with its one; in half precision a multiple of 8, as tensor cores want it."""
    return dim + 1 if dtype == torch.float32 else -(-(dim + 1) // 8) * 8


def fit_rows(
    rows: Tensor,
    y: Tensor,
    images: Tensor,
    classes: int,
    lr: Tensor,
    weight_decay: Tensor,
    *,
    epochs: int,
    batch_size: int,
    warmup: float = 0.0,
    seed: int = 0,
    passed: Callable[[], None] = lambda: None,
) -> Tensor:
    """`fit_adamw` on features laid out for it, for some of the images; parameters (L, D', R, C) in float32.

    `rows` is (L, V N, D'), view after view, float32 or float16: features, a one, zeros up to `row_width`. `y` is (N,),
    `images` the numbers of those to train on.
    """
    views, n = rows.shape[1] // len(y), len(images)
    per_epoch = math.ceil(n / batch_size)
    schedule = _schedule(n, per_epoch, epochs, warmup)
    step = _Step(rows, classes, lr, weight_decay)
    generator = torch.Generator(rows.device).manual_seed(seed)
    with few_threads(step.params.numel() * batch_size, rows.device), _exact_sums():
        worth_it = rows.is_cuda and len(schedule) >= _MIN_TO_RECORD
        recorded = _Recorded(step, schedule, n, per_epoch) if worth_it else None
        for epoch in range(epochs):
            order = images[torch.randperm(n, generator=generator, device=rows.device)]
            pick = order + len(y) * torch.randint(views, (n,), generator=generator, device=rows.device)
            if recorded is not None:
                recorded.epoch(pick, y[order])
                passed()
                continue
            now = schedule[epoch * per_epoch :]
            for i, (image, row) in enumerate(zip(order.tensor_split(per_epoch), pick.tensor_split(per_epoch))):
                step(row, y[image], now[i].tolist() if not rows.is_cuda else now[i].to(rows.device, torch.float32))
            passed()
    return step.params


class _Step:
    """The heads with their optimiser; a call is one step."""

    def __init__(self, rows: Tensor, classes: int, lr: Tensor, weight_decay: Tensor) -> None:
        self.rows = rows
        shape = rows.shape[0], rows.shape[2], lr.shape[1], classes
        self.params = torch.zeros(shape, device=rows.device)
        self.m, self.v = torch.zeros_like(self.params), torch.zeros_like(self.params)
        self.low = self.params if rows.dtype == torch.float32 else self.params.to(rows.dtype)
        self.rate = lr.to(rows.device, torch.float32).contiguous()
        self.shrink = (lr * weight_decay).to(rows.device, torch.float32).contiguous()

    def __call__(self, row: Tensor, label: Tensor, now: Now) -> None:
        x = self.rows.index_select(1, row)
        scores = torch.bmm(x, self.low.flatten(2)).unflatten(2, self.low.shape[2:])
        grad = _product(x.mT, softmax_gradient(scores, label).flatten(2))
        adamw(self.params, self.m, self.v, grad, self.low, self.rate, self.shrink, now)


class _Recorded:
    """Steps as replays of a CUDA graph. Where they are in the epoch is counted on the device.

    A graph's shapes are fixed: the batches that are one image short are filled up with an image labelled -1, which
    has no gradient.
    """

    def __init__(self, step: _Step, schedule: Tensor, n: int, per_epoch: int) -> None:
        device = step.rows.device
        place, self.real = (a.to(device) for a in _batches(n, per_epoch))
        self.place, self.per_epoch = place.clamp(max=n - 1), per_epoch
        self.row, self.label = torch.zeros_like(place), torch.full_like(place, -1)
        self.schedule = schedule.to(device, torch.float32)
        self.step, self.count = step, torch.zeros(1, dtype=torch.int64, device=device)
        self.replay, _ = record(self._step, device)  # its trial steps see no labels: the heads stay at zero
        self.count.zero_()

    def epoch(self, rows: Tensor, labels: Tensor) -> None:
        self.row.copy_(rows[self.place])
        self.label.copy_(labels[self.place].where(self.real, -1))
        for _ in range(self.per_epoch):
            self.replay()

    def _step(self) -> None:
        batch = self.count % self.per_epoch
        row, label = self.row.index_select(0, batch)[0], self.label.index_select(0, batch)[0]
        self.step(row, label, self.schedule.index_select(0, self.count)[0])
        self.count += 1


def _batches(n: int, count: int) -> tuple[Tensor, Tensor]:
    """Positions (count, most) of `tensor_split`'s batches among n images, and which of them are real."""
    sizes = torch.tensor([n // count + (i < n % count) for i in range(count)])
    column = torch.arange(int(sizes.max()))
    return (sizes.cumsum(0) - sizes)[:, None] + column, column < sizes[:, None]


def _schedule(n: int, per_epoch: int, epochs: int, warmup: float) -> Tensor:
    """`Now` of every step, (steps, 4) in float64."""
    total = epochs * per_epoch
    factor = torch.tensor([cosine(step, total, warmup) for step in range(total)], dtype=torch.float64)
    t = torch.arange(1, total + 1, dtype=torch.float64)
    sizes = _batches(n, per_epoch)[1].sum(1).repeat(epochs)
    return torch.stack([factor, 1 / (1 - BETA1**t), 1 / (1 - BETA2**t), 1 / sizes], 1)


def cosine(step: int, total: int, warmup: float) -> float:
    """Learning rate factor of a step: a linear rise over the first `warmup` share, then a cosine to zero."""
    ramp = warmup * total
    if step < ramp:
        return min(1.0, (step + 1) / ramp)
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(total - ramp, 1)))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product with a float32 result."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


@contextmanager
def _exact_sums() -> Iterator[None]:
    """Products of float16 matrices are summed in float32 throughout."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_fp16_reduced_precision_reduction = before


@contextmanager
def few_threads(work: int, device: torch.device) -> Iterator[None]:
    """One thread for steps so small that waiting for a second costs more than it saves."""
    before = torch.get_num_threads()
    if device.type == "cpu" and work < 2**23:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
