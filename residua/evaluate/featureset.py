"""Features with what belongs to them, and the checks every score makes before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Readout = Literal["tokens", "cls", "patches"]

_ROWS = 2**14  # of features looked at once


@dataclass
class FeatureSet:
    """Features of N images: one (N, D) matrix per layer, with labels and identities.

    Unpacks as a pair, `x, y = feature_set`, giving the last layer's features and the labels.
    """

    features: dict[int, Tensor]
    """Block index -> (N, D), centre view; -1 stands for "no block" (pixels, plain tensors)."""
    labels: Tensor | None = None
    ids: list[str] = field(default_factory=list)
    readout: str = "tokens"
    views: dict[int, Tensor] = field(default_factory=dict)
    """Block index -> (V, N, D), V random augmentations of every image."""
    index: Tensor | None = None
    """Positions of the images in their source."""
    others: dict[str, FeatureSet] = field(default_factory=dict)
    """The same images under further read-outs, where several were extracted."""

    @property
    def readouts(self) -> list[str]:
        return [self.readout, *self.others]

    def of(self, readout: str) -> FeatureSet:
        """The same images under one read-out."""
        if readout not in self.readouts:
            raise KeyError(f"read-out {readout!r} was not extracted; there are {', '.join(self.readouts)}")
        return self.others.get(readout, replace(self, others={}))

    @property
    def targets(self) -> Tensor:
        """The labels, where they are known to exist."""
        if self.labels is None:
            raise ValueError("these images have no labels")
        return self.labels

    @property
    def layers(self) -> list[int]:
        return sorted(self.features)

    @property
    def last(self) -> Tensor:
        """Features of the deepest layer, (N, D)."""
        return self.features[self.layers[-1]]

    def layer(self, i: int) -> Tensor:
        """Features of block `i`, (N, D)."""
        if i not in self.features:
            raise KeyError(f"layer {i} was not extracted; there are {self.layers}")
        return self.features[i]

    def only(self, i: int) -> FeatureSet:
        """The same images with one layer."""
        views = {i: self.views[i]} if i in self.views else {}
        others = {name: other.only(i) for name, other in self.others.items()}
        return replace(self, features={i: self.layer(i)}, views=views, others=others)

    def subset(self, rows: Tensor) -> FeatureSet:
        """The same layers for some of the images."""
        return FeatureSet(
            features={i: x[rows] for i, x in self.features.items()},
            labels=None if self.labels is None else self.labels[rows],
            ids=[self.ids[r] for r in rows.tolist()] if self.ids else [],
            readout=self.readout,
            views={i: x[:, rows] for i, x in self.views.items()},
            index=None if self.index is None else self.index[rows],
            others={name: other.subset(rows) for name, other in self.others.items()},
        )

    def __len__(self) -> int:
        return len(self.last)

    def __iter__(self) -> Iterator[Tensor | None]:
        yield self.last
        yield self.labels


@dataclass
class Features:
    """Features of a data set's splits."""

    splits: dict[str, FeatureSet]

    @property
    def train(self) -> FeatureSet:
        if "train" not in self.splits:
            raise ValueError("the training images were not extracted")
        return self.splits["train"]

    @property
    def test(self) -> FeatureSet | None:
        """None where the data has no test split."""
        return self.splits.get("test")


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 matrices in float32, whatever training allowed (TF32 would reorder neighbours)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


Labelled: TypeAlias = FeatureSet | tuple[Any, Any]
"""What the scores accept: a FeatureSet, or a plain (features, labels) pair."""


def as_featureset(data: Labelled, what: str = "data") -> FeatureSet:
    """A FeatureSet with labels, from one or from a (features, labels) pair; checked."""
    if not isinstance(data, FeatureSet):
        if not (isinstance(data, Sequence) and len(data) == 2):
            raise TypeError(f"{what}: expected a FeatureSet or a (features, labels) pair, got {type(data).__name__}")
        x, y = data
        data = FeatureSet({-1: as_matrix(x, what)}, None if y is None else torch.as_tensor(y))
    for name in data.readouts:
        own = data.of(name)
        for layer, x in own.features.items():
            as_matrix(x, what if layer < 0 else f"{what}, layer {layer}, read-out {name}")
    if data.labels is None:
        raise ValueError(f"{what}: this score needs labels and there are none; rank and neighbours work without")
    if data.labels.shape != (len(data),):
        shape = "x".join(map(str, data.labels.shape))
        raise ValueError(f"{what}: {len(data)} rows of features but {shape} labels; expected one for each row")
    labels = data.labels.long()
    if data.labels.is_floating_point() and not torch.equal(labels.to(data.labels), data.labels):
        raise ValueError(f"{what}: labels must be whole numbers, got {data.labels.dtype} with fractions or NaN")
    return replace(data, labels=labels)


def class_numbers(*labels: Tensor) -> tuple[list[Tensor], int]:
    """Labels as numbers 0 to C - 1 without gaps, in the same order, and C: a label may be any whole number."""
    classes, numbers = torch.cat(labels).unique(return_inverse=True)
    return list(numbers.split([len(part) for part in labels])), len(classes)


def as_matrix(features: Any, what: str = "features") -> Tensor:
    """A finite, non-empty (N, D) floating point tensor, or an error that says what is wrong."""
    if isinstance(features, FeatureSet):
        features = features.last
    x = torch.as_tensor(features)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{what}: expected a non-empty (samples, dimensions) matrix, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        x = x.float()
    bad = sum(int((~torch.isfinite(part)).any(1).sum()) for part in x.split(_ROWS))
    if bad:
        raise ValueError(f"{what}: {bad} of {len(x)} rows hold NaN or infinity; did training diverge?")
    return x


def check_compatible(train: FeatureSet, test: FeatureSet) -> None:
    """Same layers and widths on both sides, and no negative labels.

    Test images of a class that training never showed count: as wrong.
    """
    if train.layers != test.layers:
        raise ValueError(f"train has layers {train.layers}, test has {test.layers}; extract both alike")
    for i in train.layers:
        if train.layer(i).shape[1] != test.layer(i).shape[1]:
            raise ValueError(
                f"train features have {train.layer(i).shape[1]} dimensions, "
                f"test features {test.layer(i).shape[1]}; were they made by the same model?"
            )
    if min(train.targets.min(), test.targets.min()) < 0:
        raise ValueError("labels must be class indices >= 0; drop unlabelled images first")
