"""A set of images with what is known about it: the object every reader returns."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from residua.data import decode
from residua.data.errors import BadImage, DataError, some, tell
from residua.data.index import UNSURE, Hashes, fingerprint_of, found_before, hash_of
from residua.progress import counted
from residua.room import cores

Stats = tuple[tuple[float, ...], tuple[float, ...]]
T = TypeVar("T")

_PROBED = 1024  # headers looked at to learn sizes and channels
_STAT_IMAGES = 4096  # images that channel statistics are taken from, at most
_STAT_PIXELS = 400e6  # and about so many pixels, but never fewer than 256 images
_COMPARED = 512 << 20  # bytes read to find images of both splits, unless told
_BLOCK = 4096  # bytes that reading a file costs at least
_HASHED = 1024  # images whose hashes are asked for at once
_TASK = 64  # items that a thread is given at once, at most


@dataclass
class Splits:
    """The two halves of a data set; `test` is None where there is nothing to test on."""

    name: str
    train: Source
    test: Source | None = None


class Source(ABC):
    """Images by number, with labels where they exist.

    `dtype` is what `read` returns (uint8, uint16 or float32), `labels` are int64 of shape (N,).
    """

    def __init__(
        self,
        name: str,
        split: str,
        *,
        channels: int,
        dtype: np.dtype | type = np.uint8,
        classes: Sequence[str] | None = None,
        labels: np.ndarray | None = None,
    ) -> None:
        self.name, self.split, self.channels = name, split, channels
        self.dtype = np.dtype(dtype)
        self.classes = None if classes is None else list(classes)
        self.labels = None if labels is None else np.asarray(labels, np.int64)
        self._stats: dict[int, Stats] = {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        """Image `i` as (H, W, C); with `target`, shrunk if it is much larger (see `decode.shrunk_size`). `data` is what
        `fetch` gave of it."""

    def fetch(self, i: int) -> bytes | None:
        """The encoded bytes of image `i`, for `read`; None where it has none, or they cannot be had."""
        return None

    def seen(self, what: str, numbers: Sequence[int], look: Callable[[], T]) -> T:
        """What `look` finds in these images (fit for JSON); of images in files, what it found the last time if they
        have not changed since."""
        return look()

    @abstractmethod
    def size(self, i: int) -> tuple[int, int]:
        """(height, width) of image `i`, without decoding it where that is possible."""

    def fingerprint(self) -> str:
        """What the set is: a hash of the name, the length and the bytes of every image, and of the labels.

        A copy of the set has the same one. Of an image in an array the pixels are its bytes; an image that cannot be
        read has none. Hashes are kept, so that only images that are new or may have changed are read.
        """
        state = hashlib.blake2b(digest_size=16)
        for numbers, contents in _contents(self, np.arange(len(self))):
            state.update(fingerprint_of([self.identify(i) for i in numbers.tolist()], contents).encode())
        return fingerprint_of(decode.VERSION, len(self), state.hexdigest(), self._labels_or_none())

    def stamp(self) -> str:
        """A key that changes when the images or labels do, found without reading them: from lengths and times of
        change where they lie in files, so that a copy may have another one."""
        return fingerprint_of(decode.VERSION, self.state(np.arange(len(self))), self._labels_or_none())

    def state(self, numbers: np.ndarray) -> str:
        """What `stamp` goes by of these images."""
        return fingerprint_of(self.fingerprint(), numbers)

    def _labels_or_none(self) -> object:
        return "none" if self.labels is None else self.labels

    def contents(self, numbers: np.ndarray) -> np.ndarray:
        """Length and hash of the bytes of these images, uint64 (n, 3); a hash of zeros where they cannot be read."""
        hashes = threaded(self._hash, numbers.tolist())
        return np.frombuffer(b"".join(bytes(8) + found for found in hashes), np.uint64).reshape(-1, 3)

    def _hash(self, i: int) -> bytes:
        try:
            return self.digest(i)
        except BadImage:
            return bytes(16)

    def identify(self, i: int) -> str:
        """A name for image `i` that a person can look up."""
        return f"{self.split}/{i:06d}"

    def mask(self, i: int) -> np.ndarray | None:
        """Pixel labels (H, W) of image `i`, 0 = background, k + 1 = class k; None where there are none."""
        return None

    def array(self) -> np.ndarray | None:
        """All images as one (N, H, W, C) array where they are held so, else None."""
        return None

    @property
    def in_memory(self) -> bool:
        """Whether there is nothing to decode."""
        return False

    def weights(self) -> np.ndarray:
        """A cheap number per image that differs only if the images do (encoded length)."""
        return np.zeros(len(self), np.int64)

    def digest(self, i: int) -> bytes:
        """Hash of image `i`'s content."""
        image = np.ascontiguousarray(self.read(i))
        return hashlib.blake2b(image.tobytes() + str(image.shape).encode(), digest_size=16).digest()

    def sizes(self) -> np.ndarray:
        """(height, width) of an even sample of images, int64 of shape (n, 2)."""
        numbers = evenly(len(self), _PROBED)

        def size(i: int) -> tuple[int, int] | None:
            try:
                return self.size(i)
            except BadImage:
                return None

        def look() -> list[tuple[int, int]]:
            found = [size for size in threaded(size, numbers, "looking at images") if size is not None]
            return found or [self.size(0)]  # raises and names the image

        return np.array(self.seen("sizes", numbers, look), np.int64)

    def typical_size(self) -> tuple[int, int]:
        """Median (height, width)."""
        height, width = np.median(self.sizes(), axis=0)
        return int(height), int(width)

    def tried(self, numbers: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Those of these numbers, by default an even sample, whose images can be read, and those whose cannot."""

        def reads(i: int) -> bool:
            try:
                self.read(i, target=256)
            except BadImage:
                return False
            return True

        sample = evenly(len(self), _PROBED) if numbers is None else numbers
        good = dict(zip(sample, threaded(reads, sample, "opening images")))
        return [i for i in sample if good[i]], [i for i in sample if not good[i]]

    def readable(self) -> Source:
        """Those images that can be read, after reading all; a warning names some of the others."""
        good, bad = self.tried(range(len(self)))
        if bad and not good:
            raise DataError(f"{self.name}: none of its {len(self)} images can be read")
        self.tell_skipped(bad)
        return self.subset(good) if bad else self

    def tell_skipped(self, bad: Iterable[int]) -> None:
        """Warn that the images of these numbers cannot be read."""
        numbers = sorted(bad)
        if numbers:
            names = [self.identify(i) for i in numbers[:4]]
            count = f"{len(numbers):,} of {len(self):,} {self.split} images"
            tell(f"{self.name}: {count} cannot be read and are skipped: {some(names)}")

    def subset(self, indices: Iterable[int] | np.ndarray) -> Source:
        """The images with these numbers, in this order."""
        return Subset(self, np.asarray(indices if isinstance(indices, np.ndarray) else list(indices), np.int64))

    def stats(self, seed: int = 0) -> Stats:
        """(mean, std) per channel with pixels scaled to [0, 1], from at most 4096 images chosen by `seed`.

        Images larger than 512 px are shrunk first, as they are for training.
        """
        if seed not in self._stats:
            self._stats[seed] = self._compute_stats(seed)
        return self._stats[seed]

    def _compute_stats(self, seed: int) -> Stats:
        height, width = self.typical_size()
        budget = max(256, int(_STAT_PIXELS / (height * width)))
        n = min(len(self), _STAT_IMAGES, budget)
        chosen = np.sort(np.random.default_rng(seed).permutation(len(self))[:n])

        def moments(i: int) -> np.ndarray | None:
            try:
                image = decode.to_unit(self.read(i, target=256)).reshape(-1, self.channels).astype(np.float64)
            except BadImage:
                return None
            return np.stack([image.sum(0), np.square(image).sum(0), np.full(self.channels, float(len(image)))])

        def look() -> list[list[float]]:
            found = threaded(moments, chosen.tolist(), "statistics of images")
            parts = [part for part in found if part is not None]
            if not parts:
                self.read(int(chosen[0]))  # raises and names the image
            return np.sum(parts, axis=0).tolist()

        return moments_to_stats(np.array(self.seen("moments", chosen.tolist(), look)))


class Subset(Source):
    """Some images of another source, with its labels and classes unless others are given."""

    def __init__(
        self,
        parent: Source,
        indices: np.ndarray,
        labels: np.ndarray | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(parent)):
            raise DataError(f"subset of {parent.name}: indices must lie in 0..{len(parent) - 1}")
        own = None if parent.labels is None else parent.labels[indices]
        super().__init__(
            parent.name,
            parent.split,
            channels=parent.channels,
            dtype=parent.dtype,
            classes=parent.classes if classes is None else classes,
            labels=own if labels is None else labels,
        )
        self.parent, self.indices = parent, indices

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        return self.parent.read(int(self.indices[i]), target, data)

    def fetch(self, i: int) -> bytes | None:
        return self.parent.fetch(int(self.indices[i]))

    def seen(self, what: str, numbers: Sequence[int], look: Callable[[], T]) -> T:
        return self.parent.seen(what, self.indices[numbers].tolist(), look)

    def size(self, i: int) -> tuple[int, int]:
        return self.parent.size(int(self.indices[i]))

    def identify(self, i: int) -> str:
        return self.parent.identify(int(self.indices[i]))

    def mask(self, i: int) -> np.ndarray | None:
        return self.parent.mask(int(self.indices[i]))

    def array(self) -> np.ndarray | None:
        whole = self.parent.array()
        return None if whole is None else whole[self.indices]

    @property
    def in_memory(self) -> bool:
        return self.parent.in_memory

    def weights(self) -> np.ndarray:
        return self.parent.weights()[self.indices]

    def digest(self, i: int) -> bytes:
        return self.parent.digest(int(self.indices[i]))

    def contents(self, numbers: np.ndarray) -> np.ndarray:
        return self.parent.contents(self.indices[numbers])

    def state(self, numbers: np.ndarray) -> str:
        return self.parent.state(self.indices[numbers])


class EncodedSource(Source):
    """Images kept as files or byte strings and decoded when read.

    Channels and dtype are learnt from the headers of an even sample: one colour image makes the set colour,
    one 16-bit image makes it 16-bit, one of floats makes it float; each image keeps its own scale, full range = 1. An
    image of another number of channels than most (grey and colour are alike), or of floats beyond [0, 1] beside
    integers, is a bad one. A test split takes all that from its training split (`like`).
    """

    hashes: Hashes
    _seen_heads: list[tuple[int, decode.Header]] | None = None

    def __init__(
        self,
        name: str,
        split: str,
        count: int,
        *,
        classes: Sequence[str] | None,
        labels: np.ndarray | None,
        like: Source | None = None,
    ) -> None:
        self.name, self.split, self._count = name, split, count  # probing needs them
        self.channels, self.dtype, self.mixed = 0, np.dtype(np.uint8), False
        if like is None:
            channels, dtype, self.mixed = self._probe()
        else:
            channels, dtype, self.mixed = like.channels, like.dtype, getattr(like, "mixed", False)
        super().__init__(name, split, channels=channels, dtype=dtype, classes=classes, labels=labels)

    @abstractmethod
    def encoded(self, i: int) -> bytes | Path:
        """Image `i` as stored."""

    @abstractmethod
    def stamps(self, numbers: np.ndarray) -> np.ndarray:
        """(bytes, and two numbers that change when they do) of these images, without reading them; int64 (n, 3).

        The second is `UNSURE` where they may change and this does not.
        """

    def __len__(self) -> int:
        return self._count

    def seen(self, what: str, numbers: Sequence[int], look: Callable[[], T]) -> T:
        stamps = self.stamps(np.asarray(numbers, np.int64))
        names = [self.identify(i) for i in numbers]
        read_as = self.channels, self.dtype.name, self.mixed
        key = (what, decode.VERSION, self.hashes.key, names, stamps, read_as)
        return found_before(what, key, look, sure=UNSURE not in stamps[:, 1])

    def size(self, i: int) -> tuple[int, int]:
        head = decode.header(self.encoded(i), self.identify(i))
        return head.height, head.width

    def sizes(self) -> np.ndarray:
        return np.array([head[:2] for _, head in self._heads()], np.int64)

    def fetch(self, i: int) -> bytes | None:
        number = np.array([i])
        try:
            stamps = None if self.hashes.has(i) else self.stamps(number)
            data = self.encoded(i)
            if isinstance(data, Path):
                if data.suffix.lower() == ".npy":
                    return None
                data = data.read_bytes()
        except (OSError, BadImage):  # `read` says what is wrong
            return None
        if stamps is not None and stamps[0, 1] != UNSURE:
            self.hashes.keep(number, stamps, np.frombuffer(hash_of(data), np.uint64)[None])
        return data

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        if data is not None:
            try:
                return self._conforming(data, self.identify(i), target)
            except BadImage:  # read once more, it is named by the file that it lies in
                pass
        stored = self.encoded(i)
        return self._conforming(stored, str(stored) if isinstance(stored, Path) else self.identify(i), target)

    def _conforming(self, data: bytes | Path, where: str, target: int | None) -> np.ndarray:
        """An image decoded, with the channels and dtype of the set."""
        image = decode.decode(data, where, target)
        try:
            if image.dtype == np.float32 and (self.mixed or self.dtype != np.float32):
                decode.check_unit(image)
            return decode.conform(image, self.channels, self.dtype)
        except ValueError as error:
            raise BadImage(where, error) from error

    def digest(self, i: int) -> bytes:
        data = self.encoded(i)
        try:
            data = data.read_bytes() if isinstance(data, Path) else data
        except OSError as error:
            raise BadImage(self.identify(i), error) from error
        return hash_of(data)

    def contents(self, numbers: np.ndarray) -> np.ndarray:
        stamps = self.stamps(numbers)  # before what is read
        hashes = self.hashes.of(numbers, stamps)
        unknown = np.flatnonzero(~hashes.any(1))
        if len(unknown):
            read = b"".join(threaded(self._hash, numbers[unknown].tolist()))
            hashes[unknown] = np.frombuffer(read, np.uint64).reshape(-1, 2)
            self.hashes.keep(numbers[unknown], stamps[unknown], hashes[unknown])
        return np.concatenate([stamps[:, :1].astype(np.uint64), hashes], 1)

    def _heads(self) -> list[tuple[int, decode.Header]]:
        """Numbers and headers of those of an even sample of images that can be read."""
        numbers = evenly(self._count, _PROBED)

        def head(i: int) -> tuple[int, decode.Header] | None:
            try:
                return i, decode.header(self.encoded(i), self.identify(i))
            except BadImage:
                return None

        def look() -> list[tuple[int, decode.Header]]:
            found = threaded(head, numbers, "looking at images")
            heads = [one for one in found if one is not None]
            if not numbers:
                raise DataError(f"{self.name}: no images in the {self.split} split")
            return heads or [(0, decode.header(self.encoded(0), self.identify(0)))]  # raises and names the image

        if self._seen_heads is None:
            found = ((int(i), decode.Header(*row)) for i, row in self.seen("headers", numbers, look))
            self._seen_heads = list(found)
        return self._seen_heads

    def _probe(self) -> tuple[int, np.dtype, bool]:
        """Channels, dtype, and whether integers and floats come together."""
        heads = [(head, self.identify(i)) for i, head in self._heads()]
        deep = [(head.channels, where) for head, where in heads if head.channels > decode.MOST_CHANNELS]
        if 2 * len(deep) > len(heads):
            count, where = deep[0]
            raise DataError(f"{where} has {count} channels; arrays must be (H, W, C), channels last")
        heads = _alike(heads)
        channels = max(head.channels for head, _ in heads)
        flat = next((where for head, where in heads if head.height in (1, 3, 4) and head.channels > 4), None)
        if flat is not None:
            tell(f"{flat} is read as an image of {channels} channels: channels first? arrays must be (H, W, C)")
        dtypes = {head.dtype: where for head, where in reversed(heads)}
        dtype = next(name for name in ("float32", "uint16", "uint8") if name in dtypes)
        if dtype != "uint8" and "uint8" in dtypes:
            tell(
                f"{dtypes[dtype]} is {dtype} and {dtypes['uint8']} uint8: all are held with more bits, and take four "
                "times the memory; each keeps its own scale"
            )
        return channels, np.dtype(dtype), "float32" in dtypes and len(dtypes) > 1


def _alike(heads: list[tuple[decode.Header, str]]) -> list[tuple[decode.Header, str]]:
    """Those with the number of channels that more than half have; grey and colour are alike."""
    kinds = [3 if head.channels == 1 else head.channels for head, _ in heads]
    most, count = Counter(kinds).most_common(1)[0]
    alike = [head for head, kind in zip(heads, kinds) if kind == most]
    if count == len(heads):
        return heads
    if 2 * count <= len(heads):
        example = ", ".join(f"{where} has {head.channels}" for head, where in dict(zip(kinds, heads)).values())
        raise DataError(f"images differ in their number of channels: {example}; keep one kind per data set")
    odd, where = next(head for head, kind in zip(heads, kinds) if kind != most)
    tell(
        f"{where} has {odd.channels} channels where most images have {max(head.channels for head, _ in alike)}: "
        f"{len(heads) - count:,} of {len(heads):,} images looked at count as unreadable"
    )
    return alike


def count_shared(train: Source, test: Source, most: int | None = _COMPARED) -> int:
    """How many test images also occur in the training set, by content (encoded bytes, else pixels).

    Only images whose encoded length occurs in both sets are read and hashed: all of them with `most=None`, else those
    of some lengths, as many as `most` bytes allow. A warning says so where test images are left out.
    """
    ours, theirs = train.weights(), test.weights()
    lengths, number = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    in_train, in_test = (np.bincount(part, minlength=len(lengths)) for part in np.split(number, [len(ours)]))
    both = np.random.default_rng(0).permutation(np.flatnonzero(in_train * in_test))
    cost = np.where(lengths == 0, 0, np.maximum(lengths, _BLOCK)) * (in_train + in_test)  # 0: there is nothing encoded
    chosen = both
    if most is not None:
        chosen = chosen[cost[chosen] <= most]
        chosen = chosen[np.cumsum(cost[chosen]) <= most]
    left_out = int(in_test[both].sum() - in_test[chosen].sum())
    if left_out:
        tell(
            f"{test.name}: {len(test) - left_out:,} of its {len(test):,} test images were looked for in the training "
            "part; residua data info looks for all"
        )
    seen = set(_digests(train, np.isin(ours, lengths[chosen])))
    return sum(digest in seen for digest in _digests(test, np.isin(theirs, lengths[chosen])))


def _digests(source: Source, chosen: np.ndarray) -> Iterator[bytes]:
    """Of the images that a mask chooses and that can be read."""
    for _, contents in _contents(source, np.flatnonzero(chosen)):
        yield from (row.tobytes() for row in contents[:, 1:] if row.any())


def _contents(source: Source, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers of images with their `Source.contents`, part by part."""
    for start in range(0, len(numbers), _HASHED):
        part = numbers[start : start + _HASHED]
        yield part, source.contents(part)
        counted("hashing images", start + len(part), len(numbers))


def evenly(count: int, most: int) -> list[int]:
    """Up to `most` numbers spread over `range(count)`."""
    if count <= most:
        return list(range(count))
    return np.linspace(0, count - 1, most).astype(int).tolist()


def threaded(function: Callable[[int], T], items: Sequence[int], what: str | None = None) -> list[T]:
    """`[function(i) for i in items]` on all cores (decoders release the interpreter lock); of `what` that is, it is
    told how far it has come."""
    if len(items) == 1:
        return [function(items[0])]
    threads = min(32, cores())
    size = max(1, min(_TASK, len(items) // (4 * threads)))  # a task for every item would take memory and time itself
    tasks = [items[i : i + size] for i in range(0, len(items), size)]
    with ThreadPoolExecutor(threads) as pool:
        found: list[T] = []
        for part in pool.map(lambda task: [function(i) for i in task], tasks):
            found += part
            if what is not None:
                counted(what, len(found), len(items))
        return found


def moments_to_stats(moments: np.ndarray) -> Stats:
    """(mean, std) from rows sum, sum of squares, count."""
    total, squares, count = moments
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-12))
    return tuple(mean.tolist()), tuple(std.tolist())
