"""What the probes' protocols fix, and what comes of a probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .interval import wilson

Protocol = Literal["simple", "cached", "lbfgs", "mae"]
Precision = Literal["auto", "float32", "half"]


@dataclass(frozen=True)
class Recipe:
    """What a protocol fixes, and its default grid."""

    epochs: int
    batch_size: int
    warmup: float
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]


PROTOCOLS: dict[str, Recipe] = {
    "simple": Recipe(200, 1024, 0.0, (1e-3, 1e-2), (0.0,)),
    "cached": Recipe(200, 5120, 0.1, (1e-3, 1e-2), (0.0,)),
    "lbfgs": Recipe(0, 0, 0.0, (0.0,), (1e-5, 1e-4, 1e-3, 1e-2)),
    "mae": Recipe(90, 16384, 1 / 9, (0.1, 1.0, 10.0, 100.0), (0.0,)),
}


@dataclass(frozen=True)
class Head:
    """One candidate, with accuracy (percent) and loss on the held-out part of the training images."""

    layer: int
    learning_rate: float
    weight_decay: float
    held_out: float = math.nan
    held_out_loss: float = math.nan
    readout: str | None = None
    held_out_top5: float = math.nan


@dataclass(frozen=True)
class Tested:
    """The best head of one layer and read-out, trained on all training images, in percent of the test images."""

    layer: int
    readout: str | None
    learning_rate: float
    weight_decay: float
    accuracy: float
    top5: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class ProbeResult:
    """Test accuracy in percent, with everything it depends on."""

    accuracy: float
    top5: float
    """NaN where there are no more than five classes."""
    best: Head
    grid: list[Head]
    """Every candidate with its held-out accuracy; empty where there was nothing to choose."""
    by_layer: dict[int, float]
    """Test accuracy of each layer's best head."""
    protocol: str
    epochs: int
    batch_size: int
    holdout: float
    seed: int
    n_train: int
    n_test: int
    readout: str | None = None
    interval: tuple[float, float] = (math.nan, math.nan)
    """95 % interval of `accuracy` over test images (Wilson)."""
    tested: list[Tested] = field(default_factory=list)
    """Test accuracy of each layer's and read-out's best head."""
    precision: str = "float32"
    """Of the matrix products in training: "float32", or "half" (float16 with float32 sums)."""

    def __float__(self) -> float:
        return self.accuracy

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """Scores of (columns, settings) heads on some images: top-1, top-5 in percent, mean cross-entropy."""

    top1: list[list[float]]
    top5: list[list[float]]
    loss: list[list[float]]
    n: int

    @classmethod
    def of(cls, sums: Tensor, n: int, classes: int) -> Outcome:
        """From (3, columns, settings) sums over n images of hits, hits among five, and losses."""
        top1, top5, loss = (sums.double().cpu() / n).tolist()
        percent = [[100 * a for a in row] for row in top1]
        five = [[100 * a if classes > 5 else math.nan for a in row] for row in top5]
        return cls(percent, five, loss, n)

    @classmethod
    def joined(cls, parts: Sequence[Outcome]) -> Outcome:
        """The columns of all parts, which are of the same images."""
        top1, top5, loss = ([row for part in parts for row in getattr(part, name)] for name in ("top1", "top5", "loss"))
        return cls(top1, top5, loss, parts[0].n)


def conclude(
    columns: Sequence[tuple[str | None, int]],
    settings: Sequence[tuple[float, float]],
    held: Outcome | None,
) -> tuple[list[Head], list[Head], int]:
    """All candidates, the best of each column, and which of these is best, by the held-out images alone."""
    if held is None:
        best = [Head(layer, *settings[0], readout=readout) for readout, layer in columns]
        return [], best, 0
    rows = [
        [
            Head(layer, *setting, held.top1[i][j], held.loss[i][j], readout, held.top5[i][j])
            for j, setting in enumerate(settings)
        ]
        for i, (readout, layer) in enumerate(columns)
    ]
    best = [choose(row, held.n) for row in rows]
    return [head for row in rows for head in row], best, best.index(choose(best, held.n))


def choose(heads: Sequence[Head], n: int) -> Head:
    """The best of several heads by `n` held-out images; those that diverged do not count.

    Accuracies within one standard error of the highest are told apart by the loss, which is less noisy.
    """
    sound = [head for head in heads if math.isfinite(head.held_out_loss)]
    if not sound:
        rates = ", ".join(f"{rate:g}" for rate in sorted({head.learning_rate for head in heads}))
        raise ValueError(f"the probe diverged at every learning rate ({rates}): give smaller ones")
    top = max(head.held_out for head in sound)
    error = math.sqrt(top * (100 - top) / n)
    return min((h for h in sound if h.held_out >= top - error), key=lambda h: h.held_out_loss)


def summarise(
    best: Sequence[Head], chosen: int, grid: list[Head], held: Outcome | None, test: Outcome, **rest: Any
) -> ProbeResult:
    """The result from each column's best head and its scores on the test images, (columns, 1)."""
    for head, loss in zip(best, test.loss):
        if not math.isfinite(loss[0]):
            raise ValueError(f"the probe of layer {head.layer} diverged at learning rate {head.learning_rate:g}")
    tested = [
        Tested(h.layer, h.readout, h.learning_rate, h.weight_decay, top1[0], top5[0], wilson(top1[0], test.n))
        for h, top1, top5 in zip(best, test.top1, test.top5)
    ]
    by_layer = {}
    for layer in dict.fromkeys(head.layer for head in best):
        own = [i for i, head in enumerate(best) if head.layer == layer]
        pick = own[0] if held is None else best.index(choose([best[i] for i in own], held.n))
        by_layer[layer] = tested[pick].accuracy
    winner = tested[chosen]
    return ProbeResult(
        accuracy=winner.accuracy,
        top5=winner.top5,
        best=best[chosen],
        grid=grid,
        by_layer=by_layer,
        readout=winner.readout,
        interval=winner.interval,
        tested=tested,
        n_test=test.n,
        **rest,
    )


def resolve_recipe(
    protocol: str,
    n: int,
    learning_rates: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
) -> Recipe:
    """A protocol's recipe for n training images with what the caller wants otherwise; checked."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown probe protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    if protocol == "lbfgs" and not (learning_rates is None and epochs is None and batch_size is None):
        raise ValueError("protocol lbfgs solves to the optimum: learning rates, epochs and batch size do not apply")
    base = PROTOCOLS[protocol]
    recipe = replace(
        base,
        epochs=base.epochs if epochs is None else epochs,
        batch_size=min(base.batch_size, max(32, n // 50)) if batch_size is None else batch_size,
        learning_rates=base.learning_rates if learning_rates is None else tuple(learning_rates),
        weight_decays=base.weight_decays if weight_decays is None else tuple(weight_decays),
    )
    if not recipe.learning_rates or not recipe.weight_decays:
        raise ValueError("give at least one learning rate and one weight decay")
    if protocol != "lbfgs" and (recipe.epochs < 1 or recipe.batch_size < 1 or min(recipe.learning_rates) <= 0):
        raise ValueError("epochs, batch size and learning rates must be positive")
    if min(recipe.weight_decays) < 0:
        raise ValueError(f"weight decay must not be negative, got {min(recipe.weight_decays)}")
    return recipe


def split(labels: Tensor, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows kept and rows held out, both sorted: a random `share` of every class, at least one row in all.

    The only image of a class is kept: held out, it could neither be learnt nor be recognised.
    """
    alone = labels.unique(return_inverse=True, return_counts=True)
    single = (alone[2] == 1)[alone[1]]
    if bool(single.all()):
        raise ValueError(f"every class has a single image ({len(labels)} in all): none can be held out to judge by")
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    shuffled = shuffled[~single[shuffled]]
    order = shuffled[labels[shuffled].argsort(stable=True)]
    offset = torch.rand((), dtype=torch.float64, generator=generator).clamp(min=1 - len(order) * share)
    ticks = (torch.arange(len(order) + 1, dtype=torch.float64) * share + offset).floor()
    held = ticks.diff() > 0
    kept = torch.cat([order[~held], single.nonzero()[:, 0]])
    return kept.sort().values, order[held].sort().values


def check_holdout(holdout: float, labels: Tensor) -> None:
    if labels.unique().numel() < 2:
        raise ValueError("a probe needs at least two classes among the training labels")
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must be a share between 0 and 1, got {holdout}")
