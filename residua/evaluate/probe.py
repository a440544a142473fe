"""Linear classification of frozen features.

- "simple": centre views; AdamW, cosine to zero, 200 epochs, batch 1024.
- "cached": one of centre and random views, drawn per image and epoch; the same with 10 % warm-up, batch 5120.
- "lbfgs": centre views; logistic regression with an L2 penalty, stopped close above its
  optimum, at weak penalties a little further. Much cheaper (tens of passes over the features instead of hundreds) and
  the one to choose on a CPU.
- "mae": that of He et al. (2022), on images rather than features: `residua.evaluate.mae_probe`.

The paper's learning rate is 1e-2; 1e-3 stands beside it because 200 epochs at 1e-2 overfit where images are
few for the number of classes. Pass `learning_rates=(1e-2,)` for the paper's setting alone. Batches shrink on
small sets (N / 50, at least 32), so that 200 epochs are always some 10,000 steps and the heads converge.

The first three standardise each feature with its mean and deviation over the training images (centre view):
an encoder without a final norm hands out features of arbitrary scale, which would act as a hidden learning
rate. An affine map in front of a linear classifier does not change what it can express.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from residua.data.feed import Progress
from residua.room import free_memory

from .adamw import fit_rows, row_width
from .featureset import FeatureSet, Labelled, as_featureset, check_compatible, class_numbers, full_precision
from .heads import fit_lbfgs, logits
from .kernels import HALF_MAX
from .protocols import (
    PROTOCOLS,
    Head,
    Outcome,
    Precision,
    ProbeResult,
    Protocol,
    Recipe,
    Tested,
    check_holdout,
    choose,
    conclude,
    resolve_recipe,
    split,
    summarise,
)
from .rank import CollapsedError
from .reading import Column

__all__ = ["PROTOCOLS", "Head", "Precision", "ProbeResult", "Protocol", "Tested", "choose", "linear_probe", "split"]

_HALF_FROM = 1e14  # floating point operations from which a GPU trains in half precision: seconds in float32
_CHUNK = 2**16  # rows standardised at once
_SHARE = 0.5  # of the free memory that standardised features may take


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
    precision: Precision = "auto",
    progress: Progress | None = None,
) -> ProbeResult:
    """Train linear classifiers on `train`, report accuracy on `test`.

    Candidates are layers x read-outs x learning rates x weight decays; all train in one pass over 1 - `holdout` of the
    training images and are compared on the rest (stratified). The best of each layer and read-out is then trained
    again, on all training images, and scored on `test`; `.accuracy` is that of the one that did best on the held-out
    images. The test set chooses nothing. A single candidate skips the first pass. `.interval` is Wilson's 95 % interval
    over the test images; `.grid` holds every candidate. Layers whose features do not fit into memory together
    come one after the other. `progress` is told of epochs, as by `extract`.

    `protocol="cached"` needs features extracted with `views=3`. For "lbfgs" the weight decay is the L2
    penalty on the mean loss (scikit-learn's `C` is `1 / (N * weight_decay)`) and learning rates do not apply.

    `precision`: "half" keeps the features in float16 and multiplies on tensor cores (see `residua.evaluate.adamw`);
    "auto" does so on a GPU where float32 would take more than seconds. Scores are always computed in float32.
    """
    train, test = as_featureset(train, "train"), as_featureset(test, "test")
    if not (train.others or test.others):
        test = replace(test, readout=train.readout)  # plain tensors do not know theirs
    _check(train, test, protocol, holdout)
    recipe = resolve_recipe(protocol, len(train), learning_rates, weight_decays, epochs, batch_size)
    device = torch.device(device) if device is not None else train.last.device
    device = torch.device("cpu") if device.type == "mps" else device  # which lacks float64
    (y, y_test), classes = class_numbers(train.targets.to(device), test.targets.to(device))
    columns = [(readout, layer) for readout in train.readouts for layer in train.of(readout).layers]
    settings = [(lr, wd) for lr in recipe.learning_rates for wd in recipe.weight_decays]

    dtype = _dtype(precision, protocol, train, recipe, classes, len(columns) * len(settings), device)
    views, choosing = protocol == "cached", len(columns) * len(settings) > 1
    scales = {column: _moments_of(train, column, device) for column in columns}
    parts = [rows.to(device) for rows in split(y.cpu(), holdout, seed)] if choosing else []
    everyone, tested = (torch.arange(len(labels), device=device) for labels in (y, y_test))
    held_parts, test_parts = [], []
    groups = _groups(columns, 1 if protocol == "lbfgs" else _room(train, test, views, device, dtype))
    passed = _told(progress, len(groups) * (1 + choosing) * max(1, recipe.epochs))
    for some in groups:
        x, x_test = _prepare(train, test, {column: scales[column] for column in some}, views, device, dtype)
        if choosing:
            kept, held = parts
            pairs = torch.tensor([settings] * len(some), dtype=torch.float64)
            params = _fit(protocol, recipe, x, y, kept, classes, pairs, seed, passed)
            held_parts.append(_score(params, x[:, : len(y), : x_test.shape[2]], y, held))
        _, best, _ = conclude(_named(train, some), settings, held_parts[-1] if choosing else None)
        pairs = torch.tensor([[(h.learning_rate, h.weight_decay)] for h in best], dtype=torch.float64)
        params = _fit(protocol, recipe, x, y, everyone, classes, pairs, seed, passed)
        test_parts.append(_score(params, x_test, y_test, tested))
        del x, x_test  # before the next ones are made
    held_scores = Outcome.joined(held_parts) if choosing else None
    grid, best, chosen = conclude(_named(train, columns), settings, held_scores)
    return summarise(
        best,
        chosen,
        grid,
        held_scores,
        Outcome.joined(test_parts),
        protocol=protocol,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        holdout=holdout if grid else 0.0,
        seed=seed,
        n_train=len(train),
        precision="half" if dtype == torch.float16 else "float32",
    )


def _fit(
    protocol: str,
    recipe: Recipe,
    x: Tensor,
    y: Tensor,
    images: Tensor,
    classes: int,
    settings: Tensor,
    seed: int,
    passed: Callable[[], None],
) -> Tensor:
    """Train (columns, settings) heads on some images; `settings` is (L, R, 2): learning rate, weight decay.

    `x` is (L, V N, D'), the centre views first, with a column of ones. `passed` is called after every epoch, or after
    what has none.
    """
    lr, wd = settings.unbind(-1)
    if protocol == "lbfgs":
        params = fit_lbfgs(x[:, images, :-1], y[images], classes, wd)
        passed()
        return params
    options = {"epochs": recipe.epochs, "batch_size": recipe.batch_size, "warmup": recipe.warmup, "seed": seed}
    return fit_rows(x, y, images, classes, lr, wd, passed=passed, **options)  # type: ignore[arg-type]


def _told(progress: Progress | None, total: int) -> Callable[[], None]:
    """To be called `total` times."""
    done = count(1)
    return lambda: progress("probing", next(done), total) if progress is not None else None


def _score(params: Tensor, x: Tensor, y: Tensor, rows: Tensor, chunk: int = 4096) -> Outcome:
    """Top-1, top-5 and cross-entropy of every head on some rows of (L, N, D) features."""
    params = params[:, : x.shape[2] + 1]
    sums = torch.zeros(3, params.shape[0], params.shape[2], dtype=torch.float64, device=x.device)
    for part in rows.split(chunk):
        truth = y[part][None, :, None, None]
        scores = logits(params, x[:, part].float()).log_softmax(-1)
        hit = scores.topk(min(5, scores.shape[-1]), dim=-1).indices == truth
        loss = -scores.gather(3, truth.expand(*scores.shape[:3], 1)).squeeze(3)
        sums += torch.stack([a.double().sum(1) for a in (hit[..., 0], hit.any(-1), loss)])
    return Outcome.of(sums, len(rows), params.shape[3])


def _dtype(
    precision: str, protocol: str, train: FeatureSet, recipe: Recipe, classes: int, heads: int, device: torch.device
) -> torch.dtype:
    if precision not in ("auto", "float32", "half"):
        raise ValueError(f'precision must be "auto", "float32" or "half", got {precision!r}')
    if protocol == "lbfgs":
        if precision == "half":
            raise ValueError("protocol lbfgs solves to the optimum: half precision would hide it")
        return torch.float32
    work = 6 * train.last.numel() * heads * classes * recipe.epochs
    half = precision == "half" or (precision == "auto" and device.type == "cuda" and work > _HALF_FROM)
    return torch.float16 if half else torch.float32


def _named(train: FeatureSet, columns: Sequence[Column]) -> list[tuple[str | None, int]]:
    """Plain tensors do not know their read-out."""
    return [(readout if train.ids else None, layer) for readout, layer in columns]


def _groups(columns: Sequence[Column], size: int) -> list[Sequence[Column]]:
    return [columns[i : i + size] for i in range(0, len(columns), size)]


def _room(train: FeatureSet, test: FeatureSet, views: bool, device: torch.device, dtype: torch.dtype) -> int:
    """For how many columns there is memory, at least one; what remains is for the heads and their logits."""
    parts = [train.of(readout) for readout in train.readouts]
    width = max(x.shape[1] for part in parts for x in part.features.values())
    seen = 1 + (max(len(x) for part in parts for x in part.views.values()) if views else 0)
    one = len(train) * seen * row_width(width, dtype) * dtype.itemsize + 4 * len(test) * width
    free = free_memory(device)
    if device.type == "cuda":  # what PyTorch has taken and does not use
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, int(_SHARE * free / one))


def _prepare(
    train: FeatureSet,
    test: FeatureSet,
    scales: Mapping[Column, tuple[Tensor, Tensor]],
    views: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Standardised features for training, (L, V N, D') with a column of ones, and for testing, (L, n, D) in float32.

    `scales` has mean and deviation of every column. Narrower ones are padded with zeros, which no gradient reaches.
    """
    columns = list(scales)
    center = [train.of(readout).layer(i) for readout, i in columns]
    other = [train.of(readout).views[i] if views else x[None][:0] for (readout, i), x in zip(columns, center)]
    width, n = max(x.shape[1] for x in center), len(train)
    x = torch.zeros(len(columns), n * (1 + len(other[0])), row_width(width, dtype), device=device, dtype=dtype)
    x[..., width] = 1
    x_test = torch.zeros(len(columns), len(test), width, device=device)
    for c, (readout, i) in enumerate(columns):
        dim = center[c].shape[1]
        mean, std = scales[readout, i]
        for v, whole in enumerate([center[c], *other[c]]):
            for start, part in _chunks(whole, device):
                part = (part - mean) / std
                if dtype == torch.float16:
                    part.clamp_(-HALF_MAX, HALF_MAX)
                x[c, v * n + start : v * n + start + len(part), :dim] = part
        for start, part in _chunks(test.of(readout).layer(i), device):
            x_test[c, start : start + len(part), :dim] = (part - mean) / std
    if views and not all(bool(torch.isfinite(part).all()) for part in x.split(_CHUNK, 1)):
        raise ValueError("train: some random views have features that are NaN or infinite; did training diverge?")
    return x, x_test


def _chunks(x: Tensor, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(x), _CHUNK):
        yield start, x[start : start + _CHUNK].to(device, torch.float32)


def _moments_of(train: FeatureSet, column: Column, device: torch.device) -> tuple[Tensor, Tensor]:
    readout, i = column
    what = f"layer {i}, read-out {readout}" if train.ids else "the training set"
    return moments(train.of(readout).layer(i), device, what)


def moments(x: Tensor, device: torch.device, what: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature; infinite deviation where it is constant and says nothing."""
    mean = torch.zeros(x.shape[1], dtype=torch.float64, device=device)
    squares = torch.zeros_like(mean)
    for _, part in _chunks(x, device):
        mean += part.sum(0, dtype=torch.float64) / len(x)
    for _, part in _chunks(x, device):
        squares += (part - mean).square().sum(0)
    mean, std = mean.float(), (squares / len(x)).sqrt().float()
    varies = std > 1e-6 * (mean.abs() + std.max())
    if not bool(varies.any()):
        raise CollapsedError(f"{what}: all {len(x)} feature vectors are the same; there is nothing to classify by")
    return mean, torch.where(varies, std, torch.inf)


def _check(train: FeatureSet, test: FeatureSet, protocol: str, holdout: float) -> None:
    if protocol == "mae":
        raise ValueError(
            'protocol "mae" sees new random views of the images in every epoch, so features are not enough: '
            'use mae_probe(model, data), or evaluate(model, data, probe="mae")'
        )
    if train.readouts != test.readouts:
        raise ValueError(f"train has read-outs {train.readouts}, test has {test.readouts}; extract both alike")
    for readout in train.readouts:
        check_compatible(*(part.of(readout) for part in (train, test)))
    check_holdout(holdout, train.targets)
    if protocol == "cached" and any(set(s.views) != set(s.features) for s in map(train.of, train.readouts)):
        raise ValueError('protocol "cached" needs random views of the training images: extract(..., views=3)')
