from typing import ClassVar

import numpy as np
import pytest
from sklearn.datasets import load_digits as sklearn_digits

from residua.data import DataError, arrays, load
from residua.data.arrays import ArraySource


def test_digits_are_scikit_learns():
    splits = load("digits")
    assert len(splits.train) + len(splits.test) == 1797
    assert splits.train.channels == 1
    assert splits.train.typical_size() == (8, 8)
    both = np.concatenate([splits.train.images, splits.test.images])[..., 0]
    ours = np.sort(both.reshape(1797, -1).astype(int).sum(1))
    theirs = np.sort(np.rint(sklearn_digits().images * 255 / 16).reshape(1797, -1).astype(int).sum(1))
    assert np.array_equal(ours, theirs)


def test_digits_split_is_stratified_and_fixed():
    splits, again = load("digits"), load("digits", seed=5)
    share = np.bincount(splits.test.labels) / np.bincount(sklearn_digits().target)
    assert (np.abs(share - 0.2) < 0.01).all()
    assert splits.test.fingerprint() == again.test.fingerprint()


def test_fingerprint_follows_pixels_shape_and_labels():
    images, labels = np.arange(48, dtype=np.uint8).reshape(4, 2, 6, 1), np.array([0, 1, 0, 1])
    sources = [
        (images, labels),
        (images, labels[::-1].copy()),
        (images, None),
        (images.reshape(4, 6, 2, 1), labels),
        (images.reshape(4, 2, 2, 3), labels),
        (images[::-1].copy(), labels),
    ]
    found = [ArraySource("a", "train", x, y, ["no", "yes"]).fingerprint() for x, y in sources]
    assert len(set(found)) == len(found)
    assert ArraySource("b", "train", images.copy(), labels.copy(), ["no", "yes"]).fingerprint() == found[0]


def test_statistics_are_of_all_images():
    """Also of those after the last whole thousand, which here are much brighter."""
    images = np.random.default_rng(0).integers(0, 100, (1030, 2, 3, 2), dtype=np.uint8)
    images[1024:] += 150
    mean, std = ArraySource("a", "train", images, None, None).stats()
    np.testing.assert_allclose(mean, (images / 255).mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, (images / 255).std((0, 1, 2)), rtol=1e-6)


class Fake:
    """torchvision's data sets as far as they are used."""

    shape = (6, 8, 8, 3)
    classes = ("cat", "dog")
    calls: ClassVar[list] = []

    def __init__(self, root, **options):
        self.calls.append((root, options))
        self.data = np.arange(np.prod(self.shape)).reshape(self.shape).astype(np.uint8)
        self.targets = [0, 1] * 3


class FakeSTL10(Fake):
    shape = (6, 3, 8, 8)

    def __init__(self, root, **options):
        super().__init__(root, **options)
        del self.targets
        self.labels = np.full(6, -1) if options["split"] == "unlabeled" else np.array([0, 1] * 3)


def test_torchvision_sets(monkeypatch, tmp_path):
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", Fake)
    splits = load("cifar10")
    assert Fake.calls == [(str(tmp_path), {"train": k, "download": True}) for k in (True, False)]
    assert splits.train.classes == ["cat", "dog"]
    assert splits.test.labels.tolist() == [0, 1] * 3
    assert splits.train.read(1).shape == (8, 8, 3)


def test_channels_first_and_unlabelled(monkeypatch):
    monkeypatch.setattr("torchvision.datasets.STL10", FakeSTL10)
    splits = load("stl10")
    expected = np.arange(6 * 3 * 64).reshape(6, 3, 8, 8).astype(np.uint8)[2].transpose(1, 2, 0)
    assert np.array_equal(splits.train.read(2), expected)
    assert splits.train.labels is not None
    assert load("stl10?unlabeled=1").train.labels is None


def test_failed_download_says_what_to_do(monkeypatch):
    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", offline)
    with pytest.raises(DataError, match="RESIDUA_DATA"):
        arrays.load_torchvision("fashion-mnist")
