"""Linear classification of frozen features.

- "simple": centre views; AdamW, cosine to zero, 200 epochs, batch 1024.
- "cached": one of centre and random views, drawn per image and epoch; the same with 10 % warm-up, batch 5120.
- "lbfgs": centre views; the exact optimum of logistic regression with an L2 penalty. Much cheaper (tens of
  passes over the features instead of hundreds) and the one to choose on a CPU.

The paper's learning rate is 1e-2; 1e-3 stands beside it because 200 epochs at 1e-2 overfit where images are
few for the number of classes. Pass `learning_rates=(1e-2,)` for the paper's setting alone. Batches shrink on
small sets (N / 50, at least 32), so that 200 epochs are always some 10,000 steps and the heads converge.

All three first standardise each feature with its mean and deviation over the training images (centre view):
an encoder without a final norm hands out features of arbitrary scale, which would act as a hidden learning
rate. An affine map in front of a linear classifier does not change what it can express.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .featureset import FeatureSet, Labelled, as_featureset, check_compatible, full_precision
from .heads import fit_adamw, fit_lbfgs, logits

Protocol = Literal["simple", "cached", "lbfgs"]


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
}


@dataclass(frozen=True)
class Head:
    """One candidate, with accuracy (percent) and loss on the held-out part of the training images."""

    layer: int
    learning_rate: float
    weight_decay: float
    held_out: float = math.nan
    held_out_loss: float = math.nan


@dataclass(frozen=True)
class ProbeResult:
    """Test accuracy in percent, with everything it depends on."""

    accuracy: float
    top5: float
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

    def __float__(self) -> float:
        return self.accuracy

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@full_precision()
def linear_probe(
    train: Labelled,
    test: Labelled,
    *,
    protocol: Protocol = "simple",
    learning_rates: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> ProbeResult:
    """Train linear classifiers on `train`, report accuracy on `test`.

    Candidates are layers x learning rates x weight decays; all train in one pass over 1 - `holdout` of the
    training images and are compared on the rest (stratified). Each layer's best is then trained again, on all
    training images, and scored on `test`; `.accuracy` is that of the layer that did best on the held-out
    images. The test set chooses nothing. A single candidate skips the first pass.

    `protocol="cached"` needs features extracted with `views=3`. For "lbfgs" the weight decay is the L2
    penalty on the mean loss (scikit-learn's `C` is `1 / (N * weight_decay)`) and learning rates do not apply.
    """
    train, test = as_featureset(train, "train"), as_featureset(test, "test")
    recipe = _recipe(protocol, learning_rates, weight_decays, epochs, batch_size, len(train))
    _check(train, test, protocol, holdout)
    device = torch.device(device) if device is not None else train.last.device
    device = torch.device("cpu") if device.type == "mps" else device  # which lacks float64
    x, x_test = _prepare(train, test, protocol == "cached", device)
    y, y_test = train.targets.to(device), test.targets.to(device)
    classes = int(max(y.max(), y_test.max())) + 1

    settings = [(lr, wd) for lr in recipe.learning_rates for wd in recipe.weight_decays]
    layers = train.layers
    grid: list[Head] = []
    chosen = 0
    best = [Head(layer, *settings[0]) for layer in layers]
    if len(layers) * len(settings) > 1:
        kept, held = (rows.to(device) for rows in split(y.cpu(), holdout, seed))
        pairs = torch.tensor([settings] * len(layers), dtype=torch.float64)
        params = _fit(protocol, recipe, x[:, :, kept], y[kept], classes, pairs, seed)
        top1, _, loss = (a.tolist() for a in _score(params, x[:, 0, held], y[held]))
        rows = [
            [Head(layer, *setting, *found) for setting, *found in zip(settings, top1[i], loss[i])]
            for i, layer in enumerate(layers)
        ]
        grid = [head for row in rows for head in row]
        best = [choose(row, len(held)) for row in rows]
        chosen = best.index(choose(best, len(held)))

    pairs = torch.tensor([[(h.learning_rate, h.weight_decay)] for h in best], dtype=torch.float64)
    params = _fit(protocol, recipe, x, y, classes, pairs, seed)
    top1, top5, _ = (a[:, 0].tolist() for a in _score(params, x_test, y_test))
    return ProbeResult(
        accuracy=top1[chosen],
        top5=top5[chosen],
        best=best[chosen],
        grid=grid,
        by_layer=dict(zip(layers, top1)),
        protocol=protocol,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        holdout=holdout if grid else 0.0,
        seed=seed,
        n_train=len(train),
        n_test=len(test),
        readout=train.readout if train.ids else None,
    )


def split(labels: Tensor, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows kept and rows held out, both sorted: a random `share` of every class, at least one row."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    offset = torch.rand((), dtype=torch.float64, generator=generator).clamp(min=1 - len(labels) * share)
    ticks = (torch.arange(len(labels) + 1, dtype=torch.float64) * share + offset).floor()
    held = ticks.diff() > 0
    return order[~held].sort().values, order[held].sort().values


def _fit(protocol: str, recipe: Recipe, x: Tensor, y: Tensor, classes: int, settings: Tensor, seed: int) -> Tensor:
    """Train (layers, settings) heads; `settings` is (L, R, 2): learning rate, weight decay."""
    lr, wd = settings.unbind(-1)
    if protocol == "lbfgs":
        return fit_lbfgs(x[:, 0], y, classes, wd)
    return fit_adamw(
        x,
        y,
        classes,
        lr,
        wd,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        warmup=recipe.warmup,
        seed=seed,
    )


def choose(heads: Sequence[Head], n: int) -> Head:
    """The best of several heads by `n` held-out images.

    Accuracies within one standard error of the highest are told apart by the loss, which is less noisy.
    """
    top = max(head.held_out for head in heads)
    error = math.sqrt(top * (100 - top) / n)
    return min((h for h in heads if h.held_out >= top - error), key=lambda h: h.held_out_loss)


def _score(params: Tensor, x: Tensor, y: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor, Tensor]:
    """Top-1 and top-5 accuracy in percent and mean cross-entropy of every head, (L, R) each."""
    sums = torch.zeros(3, params.shape[0], params.shape[2], dtype=torch.float64)
    for start in range(0, len(y), chunk):
        truth = y[None, start : start + chunk, None, None]
        scores = logits(params, x[:, start : start + chunk]).log_softmax(-1)
        hit = scores.topk(min(5, scores.shape[-1]), dim=-1).indices == truth
        loss = -scores.gather(3, truth.expand(*scores.shape[:3], 1)).squeeze(3)
        sums += torch.stack([a.double().sum(1).cpu() for a in (hit[..., 0], hit.any(-1), loss)])
    top1, top5, loss = sums / len(y)
    return 100 * top1, 100 * top5, loss


def _prepare(train: FeatureSet, test: FeatureSet, views: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Standardised float32 features, (L, V, N, D) and (L, n, D); narrower layers are padded with zeros."""
    width = max(x.shape[1] for x in train.features.values())
    xs, tests = [], []
    for i in train.layers:
        center = train.layer(i).to(device).float()
        mean, std = center.mean(0), center.std(0, correction=0)
        std = torch.where(std > 1e-6 * (mean.abs() + std.max()), std, torch.inf)  # constant features say nothing
        stack = torch.cat([center[None], train.views[i].to(device).float()]) if views else center[None]
        pad = (0, width - center.shape[1])
        xs.append(F.pad((stack - mean) / std, pad))
        tests.append(F.pad((test.layer(i).to(device).float() - mean) / std, pad))
    return torch.stack(xs), torch.stack(tests)


def _recipe(
    protocol: str,
    learning_rates: Sequence[float] | None,
    weight_decays: Sequence[float] | None,
    epochs: int | None,
    batch_size: int | None,
    n: int,
) -> Recipe:
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown probe protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    if protocol == "lbfgs" and not (learning_rates is None and epochs is None and batch_size is None):
        raise ValueError("protocol lbfgs solves to the optimum: learning rates, epochs and batch size do not apply")
    base = PROTOCOLS[protocol]
    recipe = Recipe(
        base.epochs if epochs is None else epochs,
        min(base.batch_size, max(32, n // 50)) if batch_size is None else batch_size,
        base.warmup,
        base.learning_rates if learning_rates is None else tuple(learning_rates),
        base.weight_decays if weight_decays is None else tuple(weight_decays),
    )
    if not recipe.learning_rates or not recipe.weight_decays:
        raise ValueError("give at least one learning rate and one weight decay")
    if protocol != "lbfgs" and (recipe.epochs < 1 or recipe.batch_size < 1 or min(recipe.learning_rates) <= 0):
        raise ValueError("epochs, batch size and learning rates must be positive")
    if min(recipe.weight_decays) < 0:
        raise ValueError(f"weight decay must not be negative, got {min(recipe.weight_decays)}")
    return recipe


def _check(train: FeatureSet, test: FeatureSet, protocol: str, holdout: float) -> None:
    check_compatible(train, test)
    if train.targets.unique().numel() < 2:
        raise ValueError("a probe needs at least two classes among the training labels")
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must be a share between 0 and 1, got {holdout}")
    if protocol == "cached" and set(train.views) != set(train.features):
        raise ValueError('protocol "cached" needs random views of the training images: extract(..., views=3)')
