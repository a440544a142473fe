"""Images to be scored, or to score against: uint8, three channels, one size, from wherever they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from residua.data import DataError, Source, load
from residua.data.arrays import ArraySource, read_npz
from residua.data.augment import ImgSize, pair
from residua.data.decode import conform, resize
from residua.data.folder import FolderSource, list_images
from residua.data.source import fingerprint_of
from residua.data.store import store_of
from residua.train.samplefiles import Folder, described

Split = Literal["train", "test"]


class MixedSizes(DataError):
    """Images that are not of one size."""


class Pictures(Source):
    """A source as colour images of 8 bits and one size.

    As they are by default, which wants all of one size; with `img_size` the largest central part of that shape,
    resized (bicubic, antialiased). Grey is repeated to three channels. Nothing else is done to them: an image that
    is larger than a network's input reaches it as large as it is.
    """

    def __init__(self, source: Source, img_size: ImgSize | None = None) -> None:
        if source.channels not in (1, 3):
            raise DataError(f"{source.name} has {source.channels} channels; images to score have one or three")
        if (store := store_of(source)) is not None:
            raise DataError(
                f"{source.name} comes from a store at {store.side} px: resizing moves the distances that are scored, "
                "so give the images themselves"
            )
        super().__init__(source.name, source.split, channels=3)
        self.source, self.fitted = source, img_size is not None
        self.shape = _common_size(source) if img_size is None else pair(img_size)
        if min(self.shape) < 1:
            raise DataError(f"--img-size must be at least 1 pixel, got {self.shape[0]} x {self.shape[1]}")

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        image = self.source.read(i)
        if self.fitted:
            image = resize(_central(image, *self.shape), *self.shape)
        elif image.shape[:2] != self.shape:
            raise MixedSizes(_mixed(self.source, {self.shape, image.shape[:2]}, self.source.identify(i)))
        return conform(image, 3, np.dtype(np.uint8))

    def size(self, i: int) -> tuple[int, int]:
        return self.shape

    def sizes(self) -> np.ndarray:
        return np.array([self.shape], np.int64)

    def identify(self, i: int) -> str:
        return self.source.identify(i)

    @property
    def in_memory(self) -> bool:
        return self.source.in_memory

    def untouched(self) -> Pictures | None:
        """The same images as they are, where all that were looked at have the size that they are brought to."""
        same = self.fitted and bool((self.source.sizes() == np.array(self.shape)).all())
        return Pictures(self.source) if same else None

    def fingerprint(self) -> str:
        return fingerprint_of(self.source.fingerprint(), self.shape, self.fitted)

    def state(self, numbers: np.ndarray) -> str:
        return fingerprint_of(self.source.state(numbers), self.shape, self.fitted)


def _common_size(source: Source) -> tuple[int, int]:
    sizes = {(int(h), int(w)) for h, w in source.sizes()}
    if len(sizes) > 1:
        raise MixedSizes(_mixed(source, sizes))
    return sizes.pop()


def _mixed(source: Source, sizes: set[tuple[int, int]], where: str | None = None) -> str:
    some = ", ".join(f"{h} x {w}" for h, w in sorted(sizes)[:3]) + " ..." * (len(sizes) > 3)
    return (
        f"images of {source.name} differ in size ({some}{f'; {where}' if where else ''}): "
        "--img-size SIDE cuts out the centre of each and resizes it"
    )


def _central(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """The largest central part with the shape of height x width."""
    unit = min(image.shape[0] / height, image.shape[1] / width)
    h, w = max(1, round(unit * height)), max(1, round(unit * width))
    top, left = (image.shape[0] - h) // 2, (image.shape[1] - w) // 2
    return image[top : top + h, left : left + w]


def open_images(spec: str, split: Split | None = None) -> Source:
    """Images by name: any data source, a folder, or an array in a `.npz` or `.npy` file.

    A folder is taken whole, unless it has a `train` folder or a split is asked for; other sources give their training
    images unless told otherwise. Arrays are uint8 (N, H, W, 3), in a `.npz` under `arr_0` or as its only one.
    """
    path = Path(spec.removeprefix("folder:")).expanduser()
    if is_array(spec):
        return _open_array(path)
    if (path / "checkpoints").is_dir():
        raise DataError(f"{spec} is a run, not images: give a folder, a .npz or .npy file, or a source of images")
    if path.is_dir():
        if split is None and not (path / "train").is_dir():
            return _open_folder(path)
        spec = f"folder:{path}"
    data = load(spec)
    source = data.test if split == "test" else data.train
    if source is None:
        raise DataError(f"{spec} has no test images")
    return source


def is_array(spec: str) -> bool:
    """Whether images are named by the path of an array; a colon names another source."""
    return Path(spec).suffix.lower() in (".npz", ".npy") and ":" not in spec


def open_samples(folder: Path, n: int) -> Source:
    """Images 0 to n - 1 of a folder of `residua sample`, however many it holds."""
    files = [Folder(folder, n).file(i).name for i in range(n)]
    return FolderSource(folder.resolve().name, "all", folder, files, classes=None, labels=None)


def made_by(spec: str) -> dict[str, Any]:
    """What is known of how samples came about (sampler, steps, guidance, ...): `samples.json` in their folder, `about`
    in a `.npz` file of `residua sample`, or else a `.json` file of the array's name."""
    path = Path(spec.removeprefix("folder:")).expanduser()
    array, file = path.suffix.lower() in (".npz", ".npy") and not path.is_dir(), path.with_suffix(".json")
    known = described(path) if path.is_dir() or array else {}
    if known or not array or not file.is_file():
        return known
    try:
        found = json.loads(file.read_text("utf-8", errors="replace"))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _open_folder(path: Path) -> FolderSource:
    files = list_images(path)
    if not files:
        raise DataError(f"there are no images in {path}")
    return FolderSource(path.resolve().name, "all", path, files, classes=None, labels=None)


def _open_array(path: Path) -> ArraySource:
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        images = np.load(path, mmap_mode="c", allow_pickle=False)
        if isinstance(images, np.lib.npyio.NpzFile):
            names = images.files
            images.close()
            images = read_npz(path, "arr_0" if len(names) != 1 else names[0])
            if images is None:
                raise DataError(f"{path} holds {', '.join(names)}; expected images under arr_0")
    except DataError:
        raise
    except Exception as error:  # whatever a damaged archive makes of itself
        raise DataError(f"{path} cannot be read as an array, it may be damaged: {first_line(error)}") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise DataError(
            f"{path} holds {images.dtype} of shape {images.shape}; "
            "expected uint8 of shape (images, height, width, 3), from 0 to 255"
        )
    return ArraySource(path.name, "all", images, None, None)
