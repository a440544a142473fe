"""What scores of generated images need to know of a set of images; of a reference it is kept on disk.

The cache is that of features (`residua.evaluate.cache`), keyed by the extractor's weights, the images and their size.
`statistics.npz` beside the passes of an entry holds count, mean and covariance; the features themselves are only kept
where a score needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residua.data import Batch, DataError, Feed, Preprocessing, Source
from residua.data.arrays import read_npz
from residua.data.augment import ImgSize
from residua.data.feed import OnBadImage, Progress
from residua.disk import replacing

from .cache import CacheError, Entry, FeatureCache, checksum
from .extractor import Extractor
from .features import Subject, read_features
from .fid import Moments, Statistics, exact_float32, statistics
from .pictures import MixedSizes, Pictures, first_line
from .reading import Column, Reader, View, frozen, pass_over, undisturbed

_COLUMN: Column = ("features", 0)
_FEW = 2048  # images decoded sooner than workers would have started


@dataclass(frozen=True)
class Summary:
    """A set of images under an extractor."""

    name: str
    split: str
    size: tuple[int, int] | None
    """Height and width; None where only statistics are known."""
    statistics: Statistics
    features: Tensor | None = None
    """(N, D), where they were asked for."""

    @property
    def count(self) -> int:
        return self.statistics.count


@dataclass(frozen=True)
class Settings:
    """How images pass an extractor."""

    device: torch.device
    batch_size: int = 128
    bf16: bool = False
    on_bad_image: OnBadImage = "error"
    progress: Progress = lambda what, done, total: None


@dataclass(frozen=True)
class Untouched(View):
    """The pixels as they are stored."""

    def center(self, batch: Batch, full: bool = False) -> Tensor:
        return batch.pixels


@contextmanager
def exactly(extractor: Extractor, device: str | torch.device | None) -> Iterator[torch.device]:
    """The extractor on its device, for numbers that others get too; all is left as it was."""
    with frozen(extractor.module, device) as where, exact_float32(), undisturbed():
        yield where


def summarize(
    pictures: Pictures, extractor: Extractor, settings: Settings, *, features: bool, cache: FeatureCache | None = None
) -> Summary:
    """Statistics of a source's images, and their features where `features` says so.

    Images that have the size already that they are brought to are kept as the images that they are, not once more.
    """
    plain = Preprocessing(pictures.shape, (0.0,) * 3, (1.0,) * 3)
    view = Untouched(plain, settings.batch_size, bf16=settings.bf16)
    reader = _reader(extractor, f"reading {pictures.name}", len(pictures), settings.progress)
    entry = stored = kept = None
    if cache is not None:
        entry = cache.entry(extractor.identity, pictures.stamp(), pictures, view, settings.on_bad_image)
        stored = load_statistics(entry)
        if stored is None and (same := pictures.untouched()) is not None:
            with suppress(MixedSizes):  # of one that was not looked at
                return summarize(same, extractor, settings, features=features, cache=cache)
        if stored is None:
            check_writable(entry)
    if features:
        subject = Subject(lambda columns: reader, [_COLUMN], lambda: extractor.identity)
        opened = partial(_open, settings=settings)
        kept = read_features({"": subject}, pictures, opened, view, cache, settings.on_bad_image)[""].last
    elif cache is not None:
        cache.read, cache.computed = cache.read + (stored is not None), cache.computed + (stored is None)
    if stored is None or (kept is not None and len(kept) != stored.count):
        if kept is None:
            stored = _pass(pictures, reader, view, settings)
        else:
            stored = statistics(kept, settings.device, pictures.name)
        if entry is not None:
            store_statistics(entry, stored)
    return Summary(pictures.name, pictures.split, pictures.shape, stored, kept)


def keep_reference(
    source: Source,
    extractor: Extractor,
    *,
    img_size: ImgSize,
    device: str | torch.device,
    cache: FeatureCache,
    on_bad_image: OnBadImage = "error",
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Have the statistics of a reference in the cache before there is anything to score against it."""
    pictures = Pictures(source, img_size)
    with exactly(extractor, device) as where:
        settings = Settings(where, on_bad_image=on_bad_image, progress=progress)
        summarize(pictures, extractor, settings, features=False, cache=cache)


def _pass(pictures: Pictures, reader: Reader, view: View, settings: Settings) -> Statistics:
    """Statistics by one pass that keeps no features."""
    feed, sums = _open(pictures, view, settings), _Sums(settings.device)
    try:
        pass_over(feed, reader, view, sums)
    finally:
        feed.close()
    return sums.moments.statistics(pictures.name)


@torch.inference_mode()
def summarize_batches(
    batches: Iterable[Tensor], extractor: Extractor, settings: Settings, *, features: bool, name: str = "samples"
) -> Summary:
    """The same of images that come as they are made: uint8 (B, 3, H, W), all of one size."""
    moments, kept, size = Moments(settings.device), [], None
    for images in batches:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise DataError(
                f"{name}: a batch of {images.dtype} of shape {tuple(images.shape)}; expected uint8 (B, 3, H, W)"
            )
        size = size or (images.shape[2], images.shape[3])
        if images.shape[2:] != size:
            raise DataError(f"{name}: batches differ in size, {size[0]} x {size[1]} and {tuple(images.shape[2:])}")
        with torch.autocast(settings.device.type, torch.bfloat16, enabled=settings.bf16):
            found = extractor.module(images.to(settings.device)).float()
        moments.add(found)
        if features:
            kept.append(found.cpu())
        settings.progress(f"reading {name}", moments.count, 0)
    return Summary(name, "all", size, moments.statistics(name), torch.cat(kept).clone() if features else None)


class _Sums:
    """A store that keeps sums only."""

    def __init__(self, device: torch.device) -> None:
        self.moments = Moments(device)

    def add(self, rows: dict[Any, Tensor]) -> None:
        self.moments.add(rows[_COLUMN][0])


def _reader(extractor: Extractor, what: str, total: int, progress: Progress) -> Reader:
    done = 0

    def read(images: Tensor) -> dict[Any, Tensor]:
        nonlocal done
        done += len(images)
        features = extractor.module(images)
        progress(what, done, total)
        return {_COLUMN: features}

    return read


def _open(source: Source, view: View, settings: Settings) -> Feed:
    """Decoded in workers beside the computing; arrays and small sets need none."""
    assert isinstance(source, Pictures)
    few = len(source) < _FEW or source.in_memory
    return Feed(
        source, settings.device, img_size=max(source.shape), resident=False, workers=0 if few else None,
        on_bad_image=settings.on_bad_image,
    )  # fmt: skip


# ---------------------------------------------------------------- on disk


def load_statistics(entry: Entry) -> Statistics | None:
    """Those of a cache entry, where they are there and whole."""
    file = entry.folder / "statistics.npz"
    if not file.exists():
        return None
    try:
        count, mean, cov, written = (read_npz(file, name) for name in ("count", "mean", "cov", "checksum"))
        if mean is not None and cov is not None and checksum(np.vstack([mean, cov])) == str(written):
            return None  # of an older version, which left the count out
        if count is None or mean is None or cov is None or _checksum(int(count), mean, cov) != str(written):
            raise ValueError("it is not what was written")
    except Exception as error:  # whatever a damaged archive makes of itself
        entry.cache.note(f"cached statistics in {file} are damaged ({error}); computing them again")
        return None
    return Statistics(int(count), torch.from_numpy(mean), torch.from_numpy(cov))


def check_writable(entry: Entry) -> None:
    """Said before the work instead of after it."""
    where = entry.cache.folder
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(entry.folder, os.W_OK):
            raise PermissionError(f"{entry.folder} is read-only")
    except OSError as error:
        raise CacheError(
            f"cannot write statistics to {where}: {error.strerror or error}. Choose another folder "
            "(RESIDUA_DATA); residua score also takes --cache-dir and --no-cache"
        ) from error


def store_statistics(entry: Entry, stats: Statistics) -> None:
    """Whole or not at all. A disk that has filled up meanwhile is told; the score goes on."""
    mean, cov = stats.mean.numpy(), stats.cov.numpy()
    try:
        with replacing(entry.folder / "statistics.npz") as part, part.open("wb") as file:
            np.savez(file, count=stats.count, mean=mean, cov=cov, checksum=_checksum(stats.count, mean, cov))
    except OSError as error:
        entry.cache.note(f"statistics could not be kept in {entry.cache.folder}: {error.strerror or error}")


def _checksum(count: int, mean: np.ndarray, cov: np.ndarray) -> str:
    return f"{count} images, {checksum(np.vstack([mean, cov]))}"


def published_statistics(spec: object) -> Statistics | None:
    """Mean and covariance that others computed: a `.npz` file of `mu` and `sigma`; None where it is anything else."""
    if not isinstance(spec, str) or Path(spec).suffix != ".npz" or not Path(spec).expanduser().is_file():
        return None
    try:
        mean, cov = (read_npz(Path(spec).expanduser(), name) for name in ("mu", "sigma"))
        if mean is None or cov is None:
            return None
        mean, cov = np.asarray(mean, np.float64), np.asarray(cov, np.float64)
    except Exception as error:  # whatever a damaged archive makes of itself
        raise DataError(f"{spec} cannot be read, it may be damaged: {first_line(error)}") from error
    if mean.ndim != 1 or cov.shape != (len(mean), len(mean)):
        raise DataError(f"{spec}: mu of shape {mean.shape} and sigma of {cov.shape} are no mean and covariance")
    return Statistics(0, torch.from_numpy(mean), torch.from_numpy(cov))
