"""Latents of a data set, encoded once.

FOLDER/KEY/
  latents.npy   (N, 2, P, h, w) float16: image and mirror image; P = channels, twice those where there are deviations
  index.npy     (N,) numbers of the images in their source
  about.json    what they are of, for people

KEY is a hash of images, weights of the autoencoder and size. A folder is renamed into place when it is complete. Means
and deviations are those of `Autoencoder.moments`, neither shifted nor scaled.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residua.data import mixing, rng
from residua.data.augment import Batch, Crops, center_view, pair
from residua.data.autoencoder import Autoencoder
from residua.data.errors import DataError
from residua.data.feed import Feed, OnBadImage, Progress
from residua.data.source import Source, fingerprint_of
from residua.disk import set_aside

_FORMAT = 1
_AT_ONCE = 32  # images encoded at once
_HALF = 0.5
_PATIENCE = 600.0  # seconds without a sign of the process that encodes


class LatentSource(Source):
    """Encoded images as a source: (h, w, 2 P) float32, the image's P channels and then its mirror image's."""

    def __init__(self, images: Source, folder: Path) -> None:
        self.folder, self.images = folder, images
        self.index = np.load(folder / "index.npy")
        self._rows: np.ndarray | None = None
        _, _, planes, self.height, self.width = self.rows.shape
        labels = None if images.labels is None else images.labels[self.index]
        super().__init__(
            images.name, images.split, channels=2 * planes, dtype=np.float32, classes=images.classes, labels=labels
        )

    @property
    def rows(self) -> np.ndarray:
        """Memory-mapped; opened by each process for itself."""
        if self._rows is None:
            self._rows = np.load(self.folder / "latents.npy", mmap_mode="r")
        return self._rows

    def __len__(self) -> int:
        return len(self.index)

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.rows[i].reshape(self.channels, self.height, self.width).transpose(1, 2, 0),
                                    dtype=np.float32)  # fmt: skip

    def size(self, i: int) -> tuple[int, int]:
        return self.height, self.width

    def sizes(self) -> np.ndarray:
        return np.array([[self.height, self.width]], np.int64)

    def identify(self, i: int) -> str:
        return self.images.identify(int(self.index[i]))

    def fingerprint(self) -> str:
        return self.folder.name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


def latents_of(
    source: Source,
    autoencoder: Autoencoder,
    img_size: int,
    folder: Path,
    device: torch.device,
    *,
    writes: bool = True,
    on_bad_image: OnBadImage = "error",
    workers: int | None = None,
    progress: Progress | None = None,
) -> LatentSource:
    """The latents of a source at one image size, from `folder` or encoded into it.

    Of several processes one on each machine `writes`; the others wait for it.
    """
    if source.channels != 3:
        raise DataError(f"{source.name} has {source.channels} channels, the autoencoder takes colour images")
    key = fingerprint_of(source.stamp(), autoencoder.space.weights, img_size, on_bad_image, _FORMAT)
    home = folder / key
    if not writes:
        _wait_for(home)
    if not home.exists():
        unfinished = folder / f".unfinished-{key}-{secrets.token_hex(4)}"
        try:
            unfinished.mkdir(parents=True)
            feed = Feed(
                source, device, img_size=img_size, resident=False, workers=workers, on_bad_image=on_bad_image,
                crops=Crops(pair(img_size), flip=False, central=True),
            )  # fmt: skip
            _encode(feed, source, autoencoder.to(device), img_size, unfinished, progress)
            _put(unfinished, home)
        except OSError as error:
            raise DataError(
                f"latents cannot be written to {folder}: {error}; free some space there, or name another place by "
                "RESIDUA_DATA"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return LatentSource(source, home)


def _wait_for(home: Path) -> None:
    """Until another process has put a folder there, as long as its unfinished one changes now and then."""
    seen, since = [0.0], time.monotonic()
    while not home.exists():
        signs = sorted(_time_of(path) for path in home.parent.glob(f".unfinished-{home.name}-*"))
        if seen[:1] > [0.0] and not signs:  # a draft was there: it is put in its place, or its writer has failed
            time.sleep(0.5)
            if not home.exists():
                raise DataError(f"the process that encoded into {home.parent} has failed")
        if signs != seen:
            seen, since = signs, time.monotonic()
        if time.monotonic() - since > _PATIENCE:
            raise DataError(
                f"nothing has been encoded into {home.parent} for {_PATIENCE / 60:.0f} minutes: the process that this "
                "one waits for has failed, or writes to another disk"
            )
        time.sleep(0.2)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # just now
        return 0.0


def _encode(
    feed: Feed, source: Source, autoencoder: Autoencoder, img_size: int, folder: Path, progress: Progress | None
) -> None:
    rows: np.memmap | None = None
    numbers: list[int] = []
    for wanted, batch in _batches(feed):
        kept = (batch.index.cpu() == wanted).nonzero()[:, 0]  # an unreadable image was replaced by another
        images = center_view(batch, img_size, (_HALF,) * 3, (_HALF,) * 3)
        both = [_planes(autoencoder, x) for x in (images, images.flip(-1))]
        encoded = torch.stack(both, dim=1).to("cpu", torch.float16)[kept].numpy()
        if rows is None:
            shape = (len(source), *encoded.shape[1:])
            rows = new_array(folder / "latents.npy", np.float16, shape)
        rows[len(numbers) : len(numbers) + len(encoded)] = encoded
        numbers += wanted[kept].tolist()
        os.utime(folder)  # those who wait look at it
        if progress is not None:
            progress("encoding images", int(wanted[-1]) + 1, len(source))
    feed.close()
    if rows is None or not numbers:
        raise DataError(f"{source.name}: none of its {len(source)} images can be read")
    rows.flush()
    np.save(folder / "index.npy", np.array(numbers))
    about = {"images": source.name, "split": source.split, "count": len(numbers), "img_size": img_size}
    (folder / "about.json").write_text(json.dumps(about | {"autoencoder": autoencoder.space.to_dict()}, indent=1))


def new_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap:
    """A memory-mapped file of zeros whose space is set aside: on a full disk this is an `OSError`, where writing to the
    map later would end the process."""
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    try:
        with path.open("r+b") as file:
            set_aside(file.fileno(), path.stat().st_size)
    except OSError:
        path.unlink()
        raise
    return rows


def _batches(feed: Feed) -> Iterator[tuple[Tensor, Batch]]:
    batches = torch.arange(len(feed)).split(_AT_ONCE)
    return zip(batches, feed.iterate(batches))


def _planes(autoencoder: Autoencoder, images: Tensor) -> Tensor:
    mean, std = autoencoder.moments(images)
    return mean if std is None else torch.cat([mean, std], dim=1)


def _put(unfinished: Path, home: Path) -> None:
    try:
        os.replace(unfinished, home)
    except OSError:
        if not home.exists():  # else another run has just written the same
            raise


def latent_view(
    batch: Batch, channels: int, shift: float, scale: float, *, seed: int, epoch: Tensor, flip: bool
) -> Tensor:
    """Latents (B, C, h, w) of a batch of `LatentSource`: flipped or not, drawn from their Gaussian, scaled.

    Flip and draw depend on (seed, epoch, image index) alone.
    """
    image, mirror = batch.pixels.chunk(2, dim=1)
    if flip:
        mirrored = rng.uniform(seed, epoch, batch.index, 1, "flip")[:, :, None, None] < _HALF
        image = torch.where(mirrored, mirror, image)
    x = image[:, :channels]
    if image.shape[1] > channels:
        z = mixing.normal(rng.uniform(seed, epoch, batch.index, x[0].numel(), "posterior")).view_as(x)
        x = x + image[:, channels:] * z
    return (x - shift) * scale
