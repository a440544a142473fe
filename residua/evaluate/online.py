"""The linear probe of He et al. (2022): new random views of the images in every epoch, through the frozen encoder.

BatchNorm without affine, then a linear classifier; LARS with momentum 0.9, no weight decay, base learning rate 0.1 per
256 images, batch 16384, 90 epochs of which 10 warm-up, cosine to zero; random resized crops of 8 to 100 % of the area
and flips. The encoder does nearly all the work, so every head trains beside every other: layers x read-outs x learning
rates x weight decays, on all training images, and once more on those that are not held out, to choose by.

LARS moves a weight by a share of its norm that is proportional to the learning rate, so how far a head can get goes
with rate x images x epochs, whatever the batch: below some 50,000 images 0.1 leaves it close to where it started. So 1,
10 and 100 stand beside it; `learning_rates=(0.1,)` is the paper's setting alone. Batches shrink on small sets (N / 50,
at least 32), and the rate with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from residua.adapt import encoder_of
from residua.data import Feed, Splits, load
from residua.data.feed import OnBadImage, Progress

from .adamw import cosine
from .distributed import sum_over_processes, world
from .features import ImgSize, Subject, encoder_subject, pick_split, preprocessing_of
from .featureset import Readout, class_numbers, full_precision
from .protocols import Outcome, ProbeResult, Recipe, check_holdout, conclude, resolve_recipe, split, summarise
from .rank import CollapsedError
from .reading import Layers, Reader, View, check_readouts, frozen, open_feed, read, resolve_layers, undisturbed

Key: TypeAlias = tuple[str, tuple[str, int]]
"""Subject, and its (read-out, layer)."""

CROP_SCALE = (0.08, 1.0)  # that of torchvision's RandomResizedCrop, as He et al. have it
BN_EPS, BN_MOMENTUM, MOMENTUM, TRUST, LARS_EPS = 1e-6, 0.1, 0.9, 1e-3, 1e-8


def mae_probe(
    model: nn.Module,
    data: str | Splits,
    *,
    layers: Layers = "last",
    readout: Readout | Sequence[Readout] = "tokens",
    learning_rates: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    img_size: ImgSize | None = None,
    encoder_batch: int = 256,
    device: str | torch.device | None = None,
    limit: int | None = None,
    bf16: bool = False,
    on_bad_image: OnBadImage = "error",
    accelerator: Any = None,
    progress: Progress | None = None,
) -> ProbeResult:
    """The linear probe of He et al. (2022) of a frozen encoder; needs a labelled training and test split.

    `learning_rates` are per 256 images. Candidates are chosen among, and reported, as by `linear_probe`.
    `encoder_batch` images pass the encoder at once; it does not change the result. `progress` is told of epochs, as by
    `extract`. Several processes share the images.

    >>> mae_probe(model, "imagenet:PATH", readout=("tokens", "cls"), learning_rates=(0.1,)).accuracy
    """
    model = accelerator.unwrap_model(model) if accelerator is not None else model
    device = accelerator.device if device is None and accelerator is not None else device
    encoder = encoder_of(model)
    subject = encoder_subject(encoder, resolve_layers(layers, encoder.depth), check_readouts(readout))
    data = load(data) if isinstance(data, str) else data
    train, test = (pick_split(data, name, limit, seed) for name in ("train", "test"))
    if train is None or test is None or train.labels is None or test.labels is None:
        raise ValueError(f"{data.name}: this probe needs labelled training and test images; evaluate() can split them")
    view = View(preprocessing_of(model, data.train, img_size), encoder_batch, seed=seed, bf16=bf16)
    recipe = resolve_recipe("mae", len(train), learning_rates, weight_decays, epochs, batch_size)
    with frozen(model, device) as where:
        open_with = partial(open_feed, device=where, view=view, on_bad_image=on_bad_image, again=True, whole=True)
        feeds = [open_with(train), open_with(test)]
        rows = [torch.arange(len(feed)) for feed in feeds]
        try:
            return probe_online({"": subject}, feeds, rows, view, recipe, holdout, progress)[""]
        finally:
            for feed in feeds:
                feed.close()


@full_precision()
def probe_online(
    subjects: Mapping[str, Subject],
    feeds: Sequence[Feed],
    rows: Sequence[Tensor],
    view: View,
    recipe: Recipe,
    holdout: float = 0.1,
    progress: Progress | None = None,
) -> dict[str, ProbeResult]:
    """Every subject's probe, by the same passes over the images.

    Trained on images `rows[0]` of `feeds[0]`, tested on `rows[1]` of `feeds[1]`; the feeds may be one and the same.
    """
    keys: list[Key] = [(name, column) for name, subject in subjects.items() for column in subject.columns]
    readers = {name: subject.reader(subject.columns) for name, subject in subjects.items()}

    def reader(images: Tensor) -> dict[Any, Tensor]:
        return {(name, column): x for name, read in readers.items() for column, x in read(images).items()}

    labels, classes = class_numbers(*(torch.from_numpy(feed.source.labels) for feed in feeds))
    learnt = labels[0][rows[0]]
    check_holdout(holdout, learnt)
    settings = [(lr, wd) for lr in recipe.learning_rates for wd in recipe.weight_decays]
    choosing = len(keys) * len(settings) > 1
    kept, held = split(learnt, holdout, view.seed) if choosing else (rows[0], rows[0][:0])
    used = torch.zeros(len(labels[0]), dtype=torch.bool)
    used[rows[0][kept] if choosing else rows[0]] = True

    make = partial(LarsHeads, settings=settings, classes=classes, recipe=recipe, seed=view.seed)
    everyone, some = make(), make() if choosing else None
    with undisturbed():
        for x, index, factor in _batches(feeds[0], reader, keys, rows[0], view, recipe, progress):
            y, keep = labels[0].to(index.device)[index], used.to(index.device)[index]
            everyone.step(x, y, factor)
            if some is not None:
                some.step([part[keep] for part in x], y[keep], factor)
        held_scores = None if some is None else _score(some, feeds[0], labels[0], reader, keys, rows[0][held], view)
        test_scores = _score(everyone, feeds[1], labels[1], reader, keys, rows[1], view)
    shared = {"protocol": "mae", "epochs": recipe.epochs, "batch_size": recipe.batch_size, "seed": view.seed}
    shared |= {"holdout": holdout if choosing else 0.0, "n_train": len(rows[0])}
    return {name: _conclude(name, keys, settings, held_scores, test_scores, shared) for name in subjects}


def _batches(
    feed: Feed, reader: Reader, keys: Sequence[Key], rows: Tensor, view: View, recipe: Recipe, progress: Progress | None
) -> Iterator[tuple[list[Tensor], Tensor, float]]:
    """Per step: features (n, D) of every column from a random view, image numbers (n,), learning rate factor.

    Every image once per epoch; batches of equal size to within one image. Processes share the images of a batch.
    """
    rank, size = world()
    generator = torch.Generator().manual_seed(view.seed)
    per_epoch = math.ceil(len(rows) / recipe.batch_size)
    for epoch in range(recipe.epochs):
        order = rows[torch.randperm(len(rows), generator=generator)]
        steps = [batch.split(view.batch_size) for batch in order.tensor_split(per_epoch)]
        mine = [parts[rank::size] for parts in steps]
        flow = feed.iterate([part for parts in mine for part in parts])
        for i, parts in enumerate(steps):
            read = [_features(next(flow), reader, view, epoch) for _ in mine[i]]
            x, index = _together(read, keys, parts, rank, size, feed.device)
            yield x, index, cosine(epoch * per_epoch + i, recipe.epochs * per_epoch, recipe.warmup)
        if progress is not None:
            progress("probing", epoch + 1, recipe.epochs)


@torch.inference_mode()
def _features(batch: Any, reader: Reader, view: View, epoch: int) -> tuple[dict[Any, Tensor], Tensor]:
    images = view.random(batch, epoch, CROP_SCALE)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=view.bf16):
        return {key: x.float() for key, x in reader(images).items()}, batch.index


def _together(
    read: Sequence[tuple[dict[Any, Tensor], Tensor]],
    keys: Sequence[Key],
    parts: Sequence[Tensor],
    rank: int,
    size: int,
    device: torch.device,
) -> tuple[list[Tensor], Tensor]:
    """Features and numbers of a whole batch, of which this process read parts rank, rank + size, ..."""
    if size == 1:
        return [torch.cat([x[key] for x, _ in read]) for key in keys], torch.cat([index for _, index in read])
    sizes = torch.tensor([len(part) for part in parts])
    starts = (sizes.cumsum(0) - sizes).tolist()[rank::size]
    widths = _widths(read, keys, device)
    whole = [torch.zeros(int(sizes.sum()), width, device=device) for width in widths]
    index = torch.zeros(int(sizes.sum()), dtype=torch.int64, device=device)
    for start, (x, numbers) in zip(starts, read):
        index[start : start + len(numbers)] = numbers
        for key, part in zip(keys, whole):
            part[start : start + len(numbers)] = x[key]
    return [sum_over_processes(part) for part in whole], sum_over_processes(index)


def _widths(read: Sequence[tuple[dict[Any, Tensor], Tensor]], keys: Sequence[Key], device: torch.device) -> list[int]:
    """Of every column; a process without a part of a small batch learns them from the first, which always has one."""
    own = [read[0][0][key].shape[1] for key in keys] if read and world()[0] == 0 else [0] * len(keys)
    return [int(width) for width in sum_over_processes(torch.tensor(own, device=device)).tolist()]


def _score(
    heads: LarsHeads, feed: Feed, labels: Tensor, reader: Reader, keys: Sequence[Key], rows: Tensor, view: View
) -> Outcome:
    """Every head on the centre views of some images."""
    sums = torch.zeros(3, len(keys), len(heads.settings), dtype=torch.float64)
    count = 0
    for index, features in read(feed, reader, view, rows.split(view.batch_size)):
        y = labels[index].to(feed.device)
        count += len(y)
        for c, key in enumerate(keys):
            scores = heads.logits(c, features[key][0].to(feed.device)).log_softmax(-1)
            hit = scores.topk(min(5, scores.shape[-1]), dim=-1).indices == y[:, None, None]
            loss = -scores.gather(2, y[:, None, None].expand(*scores.shape[:2], 1))[..., 0]
            sums[:, c] += torch.stack([a.double().sum(0) for a in (hit[..., 0], hit.any(-1), loss)]).cpu()
    return Outcome.of(sums, count, heads.classes)


def _conclude(
    name: str,
    keys: Sequence[Key],
    settings: Sequence[tuple[float, float]],
    held: Outcome | None,
    test: Outcome,
    shared: dict[str, Any],
) -> ProbeResult:
    """One subject's result, from the scores of all."""
    own = [i for i, (owner, _) in enumerate(keys) if owner == name]
    mine = None if held is None else _some(held, own)
    grid, best, chosen = conclude([keys[i][1] for i in own], settings, mine)
    at = [settings.index((head.learning_rate, head.weight_decay)) for head in best]
    top1, top5, loss = ([[part[i][j]] for i, j in zip(own, at)] for part in (test.top1, test.top5, test.loss))
    return summarise(best, chosen, grid, mine, Outcome(top1, top5, loss, test.n), **shared)


def _some(scores: Outcome, columns: Sequence[int]) -> Outcome:
    top1, top5, loss = ([part[i] for i in columns] for part in (scores.top1, scores.top5, scores.loss))
    return Outcome(top1, top5, loss, scores.n)


@dataclass
class _Column:
    """BatchNorm's running moments, (D,), and R heads: weights (D, R, C), biases (R, C), their momenta."""

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor
    weight_momentum: Tensor
    bias_momentum: Tensor


class LarsHeads:
    """BatchNorm and R linear classifiers per column of features, trained by LARS (You et al. 2017).

    timm's `Lars` adapts each parameter *tensor*; here the R heads of a column are one tensor, so that they are one
    matrix product, and each has a trust ratio of its own. The update is timm's with `always_adapt` for weights and
    without for biases.
    """

    def __init__(self, settings: Sequence[tuple[float, float]], classes: int, recipe: Recipe, seed: int = 0) -> None:
        self.settings, self.classes, self.seed = settings, classes, seed
        self.scale = recipe.batch_size / 256
        self.columns: list[_Column] = []

    def step(self, features: Sequence[Tensor], y: Tensor, factor: float) -> None:
        """One update on features (n, D) per column; `factor` is where the learning rate stands in its schedule."""
        if not self.columns:
            self.columns = [self._column(x) for x in features]
        lr, wd = (y.new_tensor(values, dtype=torch.float32) for values in zip(*self.settings))
        rate = self.scale * factor * lr[:, None]
        for column, x in zip(self.columns, features):
            z = self._normalise(column, x)
            scores = torch.addmm(column.bias.flatten(), z, column.weight.flatten(1))
            probs = scores.unflatten(1, column.bias.shape).softmax(-1)
            probs.scatter_add_(
                2, y[:, None, None].expand(*probs.shape[:2], 1), probs.new_full(probs.shape[:2], -1.0)[..., None]
            )
            probs /= len(y)
            gradient = (z.T @ probs.flatten(1)).unflatten(1, column.bias.shape)
            w_norm, g_norm = (a.norm(dim=(0, 2)) for a in (column.weight, gradient))
            ratio = TRUST * w_norm / (g_norm + wd * w_norm + LARS_EPS)
            ratio = torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
            gradient = (gradient + wd[:, None] * column.weight) * ratio[:, None]
            column.weight -= rate * column.weight_momentum.mul_(MOMENTUM).add_(gradient)
            column.bias -= rate * column.bias_momentum.mul_(MOMENTUM).add_(probs.sum(0))

    def logits(self, number: int, x: Tensor) -> Tensor:
        """Of column `number` on (n, D) features, with the running moments: (n, R, C)."""
        column = self.columns[number]
        z = (x - column.mean) * (column.var + BN_EPS).rsqrt()
        return torch.addmm(column.bias.flatten(), z, column.weight.flatten(1)).unflatten(1, column.bias.shape)

    def _normalise(self, column: _Column, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, 0, correction=0)
        column.mean.lerp_(mean, BN_MOMENTUM)
        column.var.lerp_(var * (len(x) / max(1, len(x) - 1)), BN_MOMENTUM)
        return (x - mean) * (var + BN_EPS).rsqrt()

    def _column(self, x: Tensor) -> _Column:
        spread = x.var(0, correction=0)
        if not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{int((~torch.isfinite(x)).any(1).sum())} of {len(x)} rows of features hold NaN or infinity"
            )
        if len(x) > 1 and bool((spread <= 1e-12 * x.square().mean(0)).all()):
            raise CollapsedError(f"all {len(x)} feature vectors are the same; there is nothing to classify by")
        generator = torch.Generator().manual_seed(self.seed)
        start = torch.empty(x.shape[1], self.classes)
        nn.init.trunc_normal_(start, std=0.01, generator=generator)
        weight = start[:, None].repeat(1, len(self.settings), 1).to(x.device)
        bias = weight.new_zeros(weight.shape[1:])
        zeros, ones = weight.new_zeros(x.shape[1]), weight.new_ones(x.shape[1])
        return _Column(zeros, ones, weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))
