"""Sets held as one array in memory: scikit-learn's digits and torchvision's classics; arrays of `.npz` files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from residua.data import decode
from residua.data.errors import DataError
from residua.data.index import cache_dir
from residua.data.source import Source, Splits, Stats, moments_to_stats
from residua.room import free_memory

TORCHVISION = ("cifar10", "cifar100", "stl10", "mnist", "fashion-mnist")


class ArraySource(Source):
    """Images of one size as an (N, H, W, C) array."""

    def __init__(
        self,
        name: str,
        split: str,
        images: np.ndarray,
        labels: np.ndarray | None,
        classes: Sequence[str] | None,
    ) -> None:
        super().__init__(name, split, channels=images.shape[3], dtype=images.dtype, classes=classes, labels=labels)
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        return decode.shrink(self.images[i], target)

    def size(self, i: int) -> tuple[int, int]:
        height, width = self.images.shape[1:3]
        return int(height), int(width)

    def sizes(self) -> np.ndarray:
        return np.array([self.images.shape[1:3]], np.int64)

    @property
    def in_memory(self) -> bool:
        return True

    def array(self) -> np.ndarray | None:
        return self.images

    def _compute_stats(self, seed: int) -> Stats:
        """Exact, over all images."""
        moments = np.zeros((3, self.channels))
        for start in range(0, len(self), 1024):
            block = decode.to_unit(self.images[start : start + 1024]).reshape(-1, self.channels)
            ones = np.full(self.channels, float(len(block)))
            moments += np.stack([block.sum(0, dtype=np.float64), np.square(block).sum(0, dtype=np.float64), ones])
        return moments_to_stats(moments)


def read_npz(path: Path, name: str, most: int | None = None) -> np.ndarray | None:
    """One array of a `.npz` file, None where it has none of that name.

    A small file can unpack to any size: more than `most` bytes, by default the free memory, is a ValueError.
    """
    limit = free_memory(torch.device("cpu")) if most is None else most
    with zipfile.ZipFile(path) as archive:
        entry = archive.NameToInfo.get(f"{name}.npy")
        if entry is None:
            return None
        if entry.file_size > limit:
            size, room = (f"{n / 2**20:,.0f} MiB" for n in (entry.file_size, limit))
            raise ValueError(f"its array {name} unpacks to {size}, expected no more than {room}")
        with archive.open(entry) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def load_digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits, 8 px, grey; every fifth of each class is the test split."""
    from sklearn.datasets import load_digits as sklearn_digits

    bunch = sklearn_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    rank = np.zeros(len(labels), np.int64)  # position of each image within its class
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    held_out = rank % 5 == 4
    classes = [str(digit) for digit in range(10)]
    train, test = (
        ArraySource("digits", split, images[part], labels[part], classes)
        for split, part in (("train", ~held_out), ("test", held_out))
    )
    return Splits("digits", train, test)


def load_torchvision(name: str, *, unlabeled: bool = False) -> Splits:
    """One of `TORCHVISION`, downloaded on first use.

    `stl10` trains on its 5,000 labelled images, or with `unlabeled` on its 100,000 others.
    """
    from torchvision import datasets

    root = str(cache_dir())
    make: dict[str, Callable[[str], Any]] = {
        "cifar10": lambda split: datasets.CIFAR10(root, train=split == "train", download=True),
        "cifar100": lambda split: datasets.CIFAR100(root, train=split == "train", download=True),
        "mnist": lambda split: datasets.MNIST(root, train=split == "train", download=True),
        "fashion-mnist": lambda split: datasets.FashionMNIST(root, train=split == "train", download=True),
        "stl10": lambda split: datasets.STL10(
            root, split="unlabeled" if unlabeled and split == "train" else split, download=True
        ),
    }
    try:
        parts = {split: make[name](split) for split in ("train", "test")}
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{name}: could not be downloaded into {root} ({error}); "
            "set RESIDUA_DATA to a folder that holds it in torchvision's layout"
        ) from error
    return Splits(
        name, _from_torchvision(name, "train", parts["train"]), _from_torchvision(name, "test", parts["test"])
    )


def _from_torchvision(name: str, split: str, dataset: Any) -> ArraySource:
    images = np.asarray(dataset.data)
    if images.ndim == 3:
        images = images[..., None]
    elif images.shape[1] == 3:  # STL-10 is channels first
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    labels = np.asarray(dataset.targets if hasattr(dataset, "targets") else dataset.labels, np.int64)
    return ArraySource(name, split, images, None if (labels < 0).any() else labels, dataset.classes)
