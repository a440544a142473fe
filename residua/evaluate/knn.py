"""Weighted nearest-neighbour classification of frozen features (Wu et al. 2018, as in DINO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .featureset import FeatureSet, Labelled, as_featureset, check_compatible, full_precision

_BLOCK = 64  # columns whose maximum is looked at first when searching a row of similarities


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


@overload
def knn(
    train: Labelled,
    test: Labelled,
    *,
    k: int = 20,
    temperature: float = 0.07,
    device: str | torch.device | None = None,
    chunk: int = 256,
) -> KnnResult: ...
@overload
def knn(
    train: Labelled,
    test: Labelled,
    *,
    k: Sequence[int],
    temperature: float = 0.07,
    device: str | torch.device | None = None,
    chunk: int = 256,
) -> dict[int, KnnResult]: ...
def knn(
    train: Labelled,
    test: Labelled,
    *,
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    device: str | torch.device | None = None,
    chunk: int = 256,
) -> KnnResult | dict[int, KnnResult]:
    """Classify every test feature by its `k` most similar training features.

    Neighbour i votes for its class with weight `exp(cos_i / temperature)`. Exact search. `train` and `test`
    are FeatureSets (the last layer counts; `.only(i)` picks another) or (features, labels) pairs. Several `k`
    come at the price of the largest and return a dict. Memory: `chunk` test rows by up to 65,536 others.
    """
    ks = [k] if isinstance(k, int) else list(k)
    train, test = as_featureset(train, "train"), as_featureset(test, "test")
    _check(train, test, ks, temperature)
    device = torch.device(device) if device is not None else train.last.device
    bank = F.normalize(train.last.float(), dim=1).to(device)
    labels, truth = train.targets.to(device), test.targets.to(device)
    classes = int(max(labels.max(), truth.max())) + 1
    hits = dict.fromkeys(ks, 0)
    for start in range(0, len(test), chunk):
        rows = slice(start, start + chunk)
        queries = F.normalize(test.last[rows].to(device).float(), dim=1)
        similarity, index = top_similar(queries, bank, max(ks))
        for n in ks:
            guess = _vote(similarity[:, :n], labels[index[:, :n]], classes, temperature)
            hits[n] += int((guess == truth[rows]).sum())
    results = {n: _result(train, test, n, temperature, hits[n]) for n in ks}
    return results[k] if isinstance(k, int) else results


@full_precision()
def top_similar(queries: Tensor, bank: Tensor, k: int, chunk: int = 65536) -> tuple[Tensor, Tensor]:
    """The `k` largest inner products of each query with rows of the bank, and those rows: (Q, k) each."""
    best: tuple[Tensor, Tensor] | None = None
    for start in range(0, len(bank), chunk):
        value, index = _top(queries @ bank[start : start + chunk].T, k)
        index = index + start
        if best is not None:
            value, index = torch.cat([best[0], value], 1), torch.cat([best[1], index], 1)
            value, pick = value.topk(min(k, value.shape[1]), dim=1)
            index = index.gather(1, pick)
        best = value, index
    assert best is not None
    return best


def _top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`x.topk(k)` along rows, exact, several times faster for long rows.

    The k largest entries lie in the k blocks with the largest maxima, so one cheap pass over the row finds
    those blocks and the sort looks at nothing else.
    """
    rows, n = x.shape
    blocks = n // _BLOCK
    if blocks < 4 * k:
        value, index = x.topk(min(k, n), dim=1)
        return value, index
    body = x[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    block = body.amax(2).topk(k, dim=1).indices
    index = (block[..., None] * _BLOCK + torch.arange(_BLOCK, device=x.device)).flatten(1)
    tail = torch.arange(blocks * _BLOCK, n, device=x.device).expand(rows, -1)
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


def _check(train: FeatureSet, test: FeatureSet, ks: Sequence[int], temperature: float) -> None:
    check_compatible(train, test)
    if not ks or min(ks) < 1:
        raise ValueError(f"k must be at least 1, got {list(ks)}")
    if max(ks) > len(train):
        raise ValueError(f"k = {max(ks)} neighbours were asked for, but there are only {len(train)} training images")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
