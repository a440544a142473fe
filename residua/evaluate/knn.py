"""Weighted nearest-neighbour classification of frozen features (Wu et al. 2018, as in DINO)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from .featureset import FeatureSet, Labelled, as_featureset, check_compatible, class_numbers, full_precision
from .rank import CollapsedError

NEIGHBOURS = (1, 5, 10, 20, 100, 200)
"""The k that papers report; 20 is the usual one."""

_CPU_TILE = (256, 65_536)  # queries x bank rows whose similarities are held at once
_CUDA_TILE = (4096, 262_144)  # 4 GiB: large products, and few selections
_SHARE = 0.25  # of a GPU's free memory that the similarities may take


@dataclass(frozen=True)
class KnnResult:
    """Top-1 accuracy in percent, with the settings it depends on."""

    accuracy: float
    k: int
    temperature: float
    n_train: int
    n_test: int
    layer: int = -1
    readout: str | None = None

    def __float__(self) -> float:
        return self.accuracy

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FewShotResult:
    """Accuracy in percent with `shots` labelled images a class, over several draws of those images."""

    accuracies: tuple[float, ...]
    """One per draw."""
    shots: int
    k: int
    temperature: float
    n_test: int
    seed: int
    layer: int = -1
    readout: str | None = None

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def std(self) -> float:
        """Standard deviation over draws; NaN for a single one."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else math.nan

    @property
    def ci95(self) -> float:
        """Half width of the 95 % interval of the mean over draws (Student's t); the test images are fixed."""
        n = len(self.accuracies)
        return float(stats.t.ppf(0.975, n - 1)) * self.std / math.sqrt(n) if n > 1 else math.nan

    def __float__(self) -> float:
        return self.mean

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mean": self.mean, "std": self.std, "ci95": self.ci95}


@overload
def knn(
    train: Labelled,
    test: Labelled,
    *,
    k: int = 20,
    temperature: float = 0.07,
    device: str | torch.device | None = None,
    chunk: int | None = None,
) -> KnnResult: ...
@overload
def knn(
    train: Labelled,
    test: Labelled,
    *,
    k: Sequence[int],
    temperature: float = 0.07,
    device: str | torch.device | None = None,
    chunk: int | None = None,
) -> dict[int, KnnResult]: ...
def knn(
    train: Labelled,
    test: Labelled,
    *,
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    device: str | torch.device | None = None,
    chunk: int | None = None,
) -> KnnResult | dict[int, KnnResult]:
    """Classify every test feature by its `k` most similar training features.

    Neighbour i votes for its class with weight `exp(cos_i / temperature)`. Exact search in float32. `train` and
    `test` are FeatureSets (the last layer counts; `.only(i)` picks another) or (features, labels) pairs. Several
    `k` come at the price of the largest and return a dict. `chunk` test rows are searched at once; unless told,
    as many as suit the device.
    """
    ks = [k] if isinstance(k, int) else list(k)
    train, test = as_featureset(train, "train"), as_featureset(test, "test")
    _check(train, test, ks, temperature)
    hits = _search(train, test, ks, temperature, device, chunk)
    results = {n: _result(train, test, n, temperature, hits[n]) for n in ks}
    return results[k] if isinstance(k, int) else results


def knn_by_layer(
    train: Labelled, test: Labelled, *, k: Sequence[int] = (20,), **options: Any
) -> dict[int, dict[int, KnnResult]]:
    """`knn` of every layer: layer -> k -> result. Options are those of `knn`."""
    train, test = as_featureset(train, "train"), as_featureset(test, "test")
    check_compatible(train, test)
    return {i: knn(train.only(i), test.only(i), k=list(k), **options) for i in train.layers}


def few_shot_knn(
    train: Labelled,
    test: Labelled,
    *,
    shots: int = 5,
    draws: int = 10,
    k: int | None = None,
    temperature: float = 0.07,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> FewShotResult:
    """`knn` with only `shots` training images of each class, for `draws` random choices of them.

    `k` is `shots` unless given. Draw r depends on (seed, r) alone, and its images with fewer shots are among
    those with more, so that settings differ by as little chance as possible.
    """
    train, test = as_featureset(train, "train"), as_featureset(test, "test")
    if draws < 1 or shots < 1:
        raise ValueError(f"few-shot kNN needs at least one draw and one image a class, got {draws} and {shots}")
    k = shots if k is None else k
    check_compatible(train, test)
    classes, sizes = train.targets.unique(return_counts=True)
    few = [(c, n) for c, n in zip(classes.tolist(), sizes.tolist()) if n < shots]
    if few:
        raise ValueError(
            f"{shots} images a class were asked for, but class {few[0][0]} has only {few[0][1]} "
            f"({len(few)} of {len(classes)} classes are too small); ask for at most {min(n for _, n in few)}"
        )
    train, test = train.only(train.layers[-1]), test.only(test.layers[-1])
    accuracies = []
    for r in range(draws):
        bank = train.subset(draw_shots(train.targets, shots, (seed, r)))
        _check(bank, test, [k], temperature)
        accuracies.append(100 * _search(bank, test, [k], temperature, device, None)[k] / len(test))
    readout = train.readout if train.ids else None
    return FewShotResult(tuple(accuracies), shots, k, temperature, len(test), seed, train.layers[-1], readout)


def draw_shots(labels: Tensor, shots: int, seed: int | Sequence[int]) -> Tensor:
    """Rows of `shots` random images of every class, in order; `seed` decides."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    by_class = order[labels.cpu()[order].argsort(stable=True)]  # shuffled within each class
    sizes = labels.cpu().unique(return_counts=True)[1]
    place = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return by_class[place < shots].sort().values.to(labels.device)


def _search(
    train: FeatureSet,
    test: FeatureSet,
    ks: Sequence[int],
    temperature: float,
    device: str | torch.device | None,
    chunk: int | None,
) -> dict[int, int]:
    """Number of test images classified right, for every k."""
    where = torch.device(device) if device is not None else train.last.device
    bank = F.normalize(train.last.to(where).float(), dim=1)
    _check_spread(bank)
    (labels, truth), classes = class_numbers(train.targets.to(where), test.targets.to(where))
    # of equally similar images some are taken: where those of a class lie together, they would be of one class
    order = torch.randperm(len(bank), generator=torch.Generator().manual_seed(0)).to(where)
    bank, labels = bank[order], labels[order]
    rows, columns = tile(where)
    hits = dict.fromkeys(ks, torch.zeros((), dtype=torch.long, device=where))
    for x, y in zip(test.last.split(chunk or rows), truth.split(chunk or rows)):
        queries = F.normalize(x.to(where).float(), dim=1)
        similarity, index = top_similar(queries, bank, max(ks), columns)
        voters = labels[index]
        for n in ks:
            guess = _vote(similarity[:, :n], voters[:, :n], classes, temperature)
            hits[n] = hits[n] + (guess == y).sum()
    return {n: int(count) for n, count in hits.items()}


def tile(device: torch.device) -> tuple[int, int]:
    """How many queries by how many rows of the bank to compare at once on a device."""
    if device.type != "cuda":
        return _CPU_TILE
    rows, columns = _CUDA_TILE
    free = torch.cuda.mem_get_info(device)[0]
    return max(64, min(rows, int(_SHARE * free / (4 * columns)))), columns


@full_precision()
def top_similar(queries: Tensor, bank: Tensor, k: int, chunk: int = _CPU_TILE[1]) -> tuple[Tensor, Tensor]:
    """The `k` largest inner products of each query with rows of the bank, and those rows: (Q, k) each."""
    best: tuple[Tensor, Tensor] | None = None
    for start in range(0, len(bank), chunk):
        value, index = top(queries @ bank[start : start + chunk].T, k)
        index = index + start
        if best is not None:
            value, index = torch.cat([best[0], value], 1), torch.cat([best[1], index], 1)
            value, pick = value.topk(min(k, value.shape[1]), dim=1)
            index = index.gather(1, pick)
        best = value, index
    assert best is not None
    return best


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`x.topk(k)` along rows, exact, several times faster for long rows.

    The k largest entries lie in the k blocks with the largest maxima, so one cheap pass over the row finds
    those blocks and the sort looks at nothing else. Blocks of b columns leave n / b maxima and then k b entries
    to sort through: least for b = sqrt(n / k).
    """
    rows, n = x.shape
    size = max(32, 2 ** round(math.log2(n / k) / 2))  # maxima of shorter blocks are slow to take
    blocks = n // size
    if blocks < 2 * k:
        value, index = x.topk(min(k, n), dim=1)
        return value, index
    body = x[:, : blocks * size].unflatten(1, (blocks, size))
    block = body.amax(2).topk(k, dim=1).indices
    index = (block[..., None] * size + torch.arange(size, device=x.device)).flatten(1)
    tail = torch.arange(blocks * size, n, device=x.device).expand(rows, -1)
    index = torch.cat([index, tail], 1)
    value, pick = x.gather(1, index).topk(k, dim=1)
    return value, index.gather(1, pick)


def _vote(similarity: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Most voted class per row; the common factor `exp(max / T)` is left out, so small T cannot overflow."""
    weights = ((similarity - similarity[:, :1]) / temperature).exp()
    votes = weights.new_zeros(len(labels), classes).scatter_add_(1, labels, weights)
    return votes.argmax(1)


def _result(train: FeatureSet, test: FeatureSet, k: int, temperature: float, hits: int) -> KnnResult:
    readout = train.readout if train.ids else None
    return KnnResult(
        100 * hits / len(test), k, temperature, len(train), len(test), layer=train.layers[-1], readout=readout
    )


def check_votes(k: int | Sequence[int], temperature: float) -> None:
    """Raise for a number of neighbours or a temperature that no features could have."""
    ks = [k] if isinstance(k, int) else list(k)
    if not ks or min(ks) < 1:
        raise ValueError(f"k must be at least 1, got {ks}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _check(train: FeatureSet, test: FeatureSet, ks: Sequence[int], temperature: float) -> None:
    check_compatible(train, test)
    check_votes(ks, temperature)
    if max(ks) > len(train):
        raise ValueError(f"k = {max(ks)} neighbours were asked for, but there are only {len(train)} training images")


def _check_spread(bank: Tensor) -> None:
    """Neighbours of features that all point the same way would be chosen by rounding."""
    if len(bank) > 1 and all(bool((part - bank[0]).abs().max() <= 1e-6) for part in bank.split(4096)):
        raise CollapsedError(f"all {len(bank)} training features point the same way: there are no nearest ones")
