import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from residua.data import BadImage, DataError, count_shared, load
from residua.data import source as source_module
from residua.data.arrays import ArraySource
from residua.data.errors import DataWarning
from residua.data.source import evenly, fingerprint_of, threaded

RNG = np.random.default_rng(0)


def source(count: int = 12, size: tuple[int, int] = (6, 8), split: str = "train") -> ArraySource:
    images = RNG.integers(0, 256, (count, *size, 3), dtype=np.uint8)
    return ArraySource("noise", split, images, np.arange(count) % 3, ["a", "b", "c"])


def test_subset_keeps_everything_in_step():
    whole = source()
    part = whole.subset([7, 2, 2])
    assert len(part) == 3
    assert part.labels.tolist() == [1, 2, 2]
    assert np.array_equal(part.read(0), whole.read(7))
    assert part.identify(1) == "train/000002"
    assert np.array_equal(part.array(), whole.images[[7, 2, 2]])
    assert np.array_equal(part.subset([1]).read(0), whole.read(2))
    with pytest.raises(DataError, match=r"0\.\.11"):
        whole.subset([12])


def test_a_subset_has_the_masks_and_contents_of_its_own_images():
    whole = load("shapes?n=12&size=16").train
    part = whole.subset([7, 2])
    assert not np.array_equal(whole.mask(7), whole.mask(0))
    assert np.array_equal(part.mask(0), whole.mask(7))
    assert part.digest(1) == whole.digest(2) != whole.digest(1)
    files = Files(source().images, np.arange(12), "train")
    assert files.subset([7, 2]).weights().tolist() == [7, 2]
    assert count_shared(files.subset([7, 2]), files.subset([1, 7, 5])) == 1


def test_parts_of_a_fingerprint_do_not_run_together():
    numbers = np.arange(6)
    assert fingerprint_of(numbers[:2], numbers[2:]) != fingerprint_of(numbers[:3], numbers[3:])


def test_fingerprint_follows_content():
    whole = source()
    same = ArraySource("other name", "train", whole.images.copy(), whole.labels, whole.classes)
    assert whole.fingerprint() == same.fingerprint()
    changed = whole.images.copy()
    changed[3, 0, 0, 0] ^= 1
    assert ArraySource("noise", "train", changed, whole.labels, None).fingerprint() != whole.fingerprint()
    assert whole.subset([0, 1]).fingerprint() != whole.subset([1, 0]).fingerprint()


def test_stats_are_numpys():
    whole = source(50)
    unit = whole.images / 255
    for part in (whole, whole.subset(range(50))):  # exact, and through the generic reader
        mean, std = part.stats()
        np.testing.assert_allclose(mean, unit.mean((0, 1, 2)), atol=1e-6)
        np.testing.assert_allclose(std, unit.std((0, 1, 2)), atol=1e-6)


def test_stats_are_of_images_from_everywhere(monkeypatch):
    """Sets are often sorted: the first images alone would be of the first class."""
    monkeypatch.setattr(source_module, "_STAT_IMAGES", 200)
    images = np.repeat(np.array([0, 255], np.uint8), 1000)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)
    part = ArraySource("sorted", "train", images, None, None).subset(range(2000))
    (mean,), _ = part.stats()
    assert 0.3 < mean < 0.7
    assert part.stats(1) != part.stats(0)


def test_count_shared():
    train, test = source(30), source(10, split="test")
    assert count_shared(train, test) == 0
    test.images[4] = train.images[11]
    test.images[5] = train.images[11]
    assert count_shared(train, test) == 2


class Files(ArraySource):
    """As if every image were a file of some length; counts what is read of them."""

    def __init__(self, images: np.ndarray, lengths: np.ndarray, split: str) -> None:
        super().__init__("files", split, images, None, None)
        self.lengths, self.read_bytes = lengths, 0

    def weights(self) -> np.ndarray:
        return self.lengths

    def digest(self, i: int) -> bytes:
        self.read_bytes += int(self.lengths[i])
        return super().digest(i)


def test_count_shared_reads_no_more_than_it_may_and_says_so():
    rng = np.random.default_rng(1)
    lengths = rng.integers(100_000, 100_100, 2000)
    lengths[:500] = 90_000  # too many of one length
    images = rng.integers(0, 256, (2000, 2, 2, 3), dtype=np.uint8)
    train, test = Files(images, lengths, "train"), Files(images[::4], lengths[::4], "test")
    with pytest.warns(DataWarning, match=r"files: \d+ of its 500 test images were looked for"):
        some = count_shared(train, test, most=20_000_000)
    assert train.read_bytes + test.read_bytes <= 20_000_000
    assert 20 < some < 60  # a length of 15 + 4 images is two million bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_shared(train, test, most=None) == 500
        assert count_shared(train.subset(range(100)), test.subset(range(25))) == 25  # a small set: all by itself
    with pytest.warns(DataWarning, match="files: 0 of its 500"):
        assert count_shared(train, test, most=1000) == 0


def test_evenly():
    assert evenly(3, 10) == [0, 1, 2]
    assert evenly(100, 4) == [0, 33, 66, 99]


def test_bad_image_travels_between_processes():
    error = pickle.loads(pickle.dumps(BadImage("a.jpg", OSError("truncated"))))
    assert isinstance(error, BadImage)
    assert str(error) == "cannot read image a.jpg: truncated"


@pytest.mark.parametrize("count", [0, 1, 63, 64, 10_001])
def test_threads_share_many_items_in_few_tasks(count, monkeypatch):
    submitted = []
    real = ThreadPoolExecutor.submit

    def submit(self, *args, **kwargs):
        submitted.append(args)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    assert threaded(lambda i: i * i, range(count)) == [i * i for i in range(count)]
    assert len(submitted) <= max(200, count / 10)
