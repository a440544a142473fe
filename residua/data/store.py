"""Images decoded once: pixels on disk, which are mapped and read at the speed of memory.

PLACE/KEY/
  pixels       the images, uint8 (H, W, C), one after another without padding
  index        of each image where it ends in `pixels`, height, width and checksum; height 0: it cannot be read
  store.json   what they are of and, once they are all there, the checksum of `index`

KEY is a hash of the images (`Source.fingerprint`), of the side that they are shrunk to and of what shrinks them. Until
it is whole a store may be called by their stamp instead: so their bytes are read once, to be decoded and hashed. The
images are written in their order, and a store that was cut short goes on where its checksums end. Nothing in it is
believed without a checksum: those of `index` and all sizes when it is opened, that of an image when a process first
reads it.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import shutil
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from residua import disk
from residua.data import decode
from residua.data.arrays import cache_dir
from residua.data.augment import uncropped
from residua.data.errors import BadImage, DataError, tell
from residua.data.feed import OnBadImage, Progress
from residua.data.source import Source, Splits, Stats, Subset, evenly, fingerprint_of
from residua.data.workers import WAY_OUT
from residua.disk import FULL, named, sync, write_text
from residua.room import cores

SIDE = 256
"""Of a stored image's shorter side, for views of up to 224 px."""
_FORMAT = 1
_ROW = np.dtype([("end", "<u8"), ("height", "<u4"), ("width", "<u4"), ("check", "<u4")])
_UNREADABLE = 0xBAD  # the checksum of an image that is none; zeros are what a disk shows of what it never got
_KEY = re.compile(r"[0-9a-f]{32}-\d+px")
_KEPT = 64  # images after which what was decoded is handed to the system
_TASK, _AHEAD = 16, 4  # images that a thread decodes at a time; tasks of each that are done or waiting
_SPARE = 3  # times the space of a store that has to be free, where nobody named the place
_PROBED = 1024  # sizes that a set is judged by
_NO_ROOM = (*FULL, errno.EFBIG)  # the last is what disks say that hold no files of 4 GiB


class NoStore(DataError):
    """A store that there is no room for."""


class StoredSource(Source):
    """A set's images from their store: same numbers, labels and names, shrunk to `side` on their shorter side.

    What is damaged in the store is read from the set itself, with a warning; the pixels are the same.
    """

    def __init__(self, images: Source, folder: Path, side: int) -> None:
        self.images, self.folder, self.side = images, folder, side
        super().__init__(
            images.name, images.split, channels=images.channels, classes=images.classes, labels=images.labels
        )
        self._told = False
        self._open()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        end, height, width, check = self._rows[i].item()
        if height == 0:
            return decode.shrink(_read(self.images, i, self.side), target)  # raises, and names the image
        pixels = self._pixels[end - height * width * self.channels : end]
        if not self._checked[i]:
            if _check(pixels) != check:
                self._tell_damaged(i)
                return decode.shrink(_read(self.images, i, self.side), target)
            self._checked[i] = True
        return decode.shrink(pixels.reshape(height, width, self.channels), target)

    def fetch(self, i: int) -> None:
        """Has the system read an image that is not in memory, for when it is wanted; returns nothing."""
        end, height, width, _ = self._rows[i].item()
        start = (end - height * width * self.channels) // mmap.PAGESIZE * mmap.PAGESIZE
        if height:
            self._mapped.madvise(mmap.MADV_WILLNEED, start, end - start)

    def size(self, i: int) -> tuple[int, int]:
        _, height, width, _ = self._rows[i].item()
        return (height, width) if height else decode.side_size(*self.images.size(i), self.side)

    def sizes(self) -> np.ndarray:
        rows = self._rows[evenly(len(self), _PROBED)]
        rows = rows[rows["height"] > 0]
        return np.stack([rows["height"], rows["width"]], 1).astype(np.int64) if len(rows) else super().sizes()

    def stats(self, seed: int = 0) -> Stats:
        """Those of the set itself."""
        return self.images.stats(seed)

    def identify(self, i: int) -> str:
        return self.images.identify(i)

    def mask(self, i: int) -> np.ndarray | None:
        return self.images.mask(i)

    def weights(self) -> np.ndarray:
        return self.images.weights()

    def digest(self, i: int) -> bytes:
        return bytes.fromhex(fingerprint_of(self.side, self.images.digest(i)))

    def fingerprint(self) -> str:
        return self.folder.name

    def _open(self) -> None:
        self._mapped = _mapped(self.folder / "pixels")
        self._pixels, self._rows = np.frombuffer(self._mapped, np.uint8), _read_index(self.folder)
        self._checked = np.zeros(len(self._rows), bool)

    def _tell_damaged(self, i: int) -> None:
        if not self._told:
            self._told = True
            tell(
                f"{self.identify(i)} is damaged in the store {self.folder}: it is read from {self.name} itself, and so "
                f"is any other. residua data stores {self.folder.parent} --remove {self.folder.name} makes way for a "
                "new store"
            )

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_mapped", "_pixels", "_rows", "_checked")
        return {key: value for key, value in self.__dict__.items() if key not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def side_for(view: int, crop_pct: float = 1.0) -> int:
    """The side that images are stored at for views of this size: 256, or more where that is less than 8/7 of it, or
    less than what a central view is cut out of (`crop_pct`)."""
    return max(SIDE, 32 * math.ceil(uncropped(view, min(crop_pct, 7 / 8)) / 32))


def estimate(source: Source, side: int = SIDE) -> int:
    """About how many bytes a store takes, from the sizes of a sample of the images."""
    areas = [math.prod(decode.side_size(height, width, side)) for height, width in source.sizes().tolist()]
    return round(len(source) * source.channels * float(np.mean(areas)))


def place_of(where: str) -> Path:
    """The folder of stores that a setting names: a path, or `auto` for the one in the cache directory."""
    return cache_dir() / "stores" if where == "auto" else Path(where).expanduser().absolute()


def free_in(where: str) -> int:
    """Bytes that are free where stores are to be."""
    place = place_of(where)
    return shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free


def is_store(where: str) -> bool:
    """Whether a setting names one store, as that of a run that was begun with it does."""
    return _KEY.fullmatch(Path(where).name) is not None


def moved(kept: str, where: str) -> str:
    """A store that is kept as PLACE/KEY, looked for in another place."""
    place = place_of(where)
    return str(place if is_store(where) else place / Path(kept).name)


def store_of(source: Source) -> StoredSource | None:
    """The store that a source, or what it is a part of, comes from."""
    while isinstance(source, Subset):
        source = source.parent
    return source if isinstance(source, StoredSource) else None


def stored(
    source: Source,
    where: str = "auto",
    side: int = SIDE,
    *,
    on_bad_image: OnBadImage = "error",
    progress: Progress | None = None,
) -> Source:
    """The images from their store in a place, made if need be; those that lie decoded in memory as they are.

    `where` is a folder of stores, `auto`, or one store as PLACE/KEY, which then has to be the one of these images.
    One process makes a store, the others wait for it. `NoStore` where there is no room; of `auto` also where three
    times its bytes are not free.
    """
    if len(source) == 0:
        return source
    if source.in_memory:
        tell(f"{source.name}: its images lie decoded in memory, and need no store")
        return source
    if source.dtype != np.uint8:
        raise DataError(
            f"{source.name}: its images are {source.dtype.name}, a store holds uint8 and would lose what they have "
            "more: leave out --cache-images"
        )
    wanted, place = _Wanted(source, side), place_of(where)
    if is_store(where):
        if place.name != wanted.key():
            raise DataError(
                f"{place} is not the store of these images: theirs is called {wanted.key()}. Put back the images as "
                "they were, or say --cache-images auto in a new run"
            )
        place = place.parent
    waits = False
    while True:
        folder, about = wanted.folder(place)
        if _state(folder, about) is None:
            with suppress(OSError):
                os.utime(folder / "store.json")  # used now
            return StoredSource(source, folder, side)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mine = disk.claim(folder / ".lock")
        except FileNotFoundError:  # another process has just removed what it could not finish
            continue
        except OSError as error:
            raise _refused(folder, error, where == "auto") from error
        if mine:
            try:
                if wanted.folder(place)[0] == folder:  # else another process has just finished
                    _make(source, folder, about, where == "auto", on_bad_image, progress)
                else:
                    shutil.rmtree(folder)
            finally:
                disk.release(folder / ".lock")
            continue
        if progress is not None and not waits:
            progress("waiting for the process that decodes images", 0, 0)
        waits = True
        time.sleep(0.2)


def stored_splits(splits: Splits, where: str, side: int, **options: Any) -> Splits:
    """Both halves of a set from stores, and a name that says so; `options` are those of `stored`."""
    train = stored(splits.train, where, side, **options)
    test = None if splits.test is None else stored(splits.test, where, side, **options)
    stores = [store for part in (train, test) if part is not None and (store := store_of(part)) is not None]
    keys = ", ".join(store.folder.name[:8] for store in stores)
    return Splits(f"{splits.name}, stored at {side} px ({keys})" if stores else splits.name, train, test)


# ---------------------------------------------------------------- making a store


class _Wanted:
    """The store that a set's images are to come from."""

    def __init__(self, source: Source, side: int) -> None:
        self.source, self.side, self.fingerprint = source, side, ""
        self.about: dict[str, Any] = {
            "format": _FORMAT, "side": side, "decoder": decode.VERSION, "channels": source.channels,
            "images": len(source),
        }  # fmt: skip

    def key(self) -> str:
        """What it is called when it is whole."""
        self.fingerprint = self.fingerprint or self.source.fingerprint()
        return f"{fingerprint_of(*self.about.values(), self.fingerprint)}-{self.side}px"

    def folder(self, place: Path) -> tuple[Path, dict[str, Any]]:
        """Where it lies or is made, and what stands in it. Where there is no store yet that may be it, it is called by
        the images' stamp: their fingerprint is known when they are decoded."""
        found = map(_about, place.glob(f"*-{self.side}px"))
        if self.fingerprint or any(self.about.items() <= other.items() and other["fingerprint"] for other in found):
            name, stamp = self.key(), ""
        else:
            stamp = self.source.stamp()
            name = f"{fingerprint_of(*self.about.values(), 'unfinished', stamp)}-{self.side}px"
        of = {"fingerprint": self.fingerprint, "name": self.source.name, "split": self.source.split, "stamp": stamp}
        return place / name, self.about | of


def _make(
    source: Source,
    folder: Path,
    about: dict[str, Any],
    careful: bool,
    on_bad_image: OnBadImage,
    progress: Progress | None,
) -> None:
    """Build a store whose lock is held, unless another process has done so meanwhile."""
    problem = _state(folder, about)
    if problem is None:
        return
    if problem:
        tell(f"the store {folder} is damaged ({problem}): what its checksums do not confirm is decoded again")
    need, there = estimate(source, about["side"]), _bytes_in(folder)
    free = shutil.disk_usage(folder).free + there
    if free < need * (_SPARE if careful else 1):
        _drop(folder, there)
        least = "; without naming a place three times that has to be free" if careful else ""
        raise NoStore(
            f"{source.name}: a store of its images takes about {_size(need)}, {_size(free)} are free in "
            f"{folder.parent}{least}"
        )
    try:
        with named(folder / "pixels"):
            _build(source, folder, about, on_bad_image, progress)
            _finish(source, folder, about)
    except OSError as error:
        if error.errno in _NO_ROOM:
            shutil.rmtree(folder, ignore_errors=True)  # whoever writes next needs the space
        raise _refused(folder, error, careful) from error


def _build(
    source: Source, folder: Path, about: dict[str, Any], on_bad_image: OnBadImage, progress: Progress | None
) -> None:
    write_text(folder / "store.json", json.dumps(about))
    done, end = _confirmed(folder, about, progress)
    with _opened(folder / "pixels") as pixels, _opened(folder / "index") as index:
        pixels.seek(end)
        index.seek(done * _ROW.itemsize)
        for i, image in enumerate(_decoded(source, range(done, len(source)), about["side"]), done):
            height, width, check = 0, 0, _UNREADABLE
            if isinstance(image, np.ndarray):
                height, width, check = *image.shape[:2], _check(image)
                pixels.write(image.data)
                end += image.nbytes
            elif on_bad_image == "error":
                raise BadImage(image.where, f"{image.why} ({WAY_OUT})") from image
            index.write(np.array((end, height, width, check), _ROW).tobytes())
            if i % _KEPT == 0:  # what is written so far outlives this process
                pixels.flush()
                index.flush()
            if progress is not None:
                progress("decoding images into their store", i + 1, len(source))
        for file, size in ((pixels, end), (index, len(source) * _ROW.itemsize)):
            file.flush()
            file.truncate(size)
            os.fsync(file.fileno())
    if end == 0:
        raise DataError(f"{source.name}: none of its {len(source)} images can be read")


def _finish(source: Source, folder: Path, about: dict[str, Any]) -> None:
    """Say that a store is whole, under the name that is its own, unless the images are others by now."""
    wanted = _Wanted(source, about["side"])
    whole = folder.with_name(wanted.key())
    others = about["stamp"] != source.stamp() if about["stamp"] else about["fingerprint"] != wanted.fingerprint
    if others:
        shutil.rmtree(folder)
        raise DataError(f"{source.name}: its images changed while they were decoded into {folder}: start again")
    about = about | {"fingerprint": wanted.fingerprint, "stamp": ""}
    if whole != folder:
        problem = _state(whole, about)
        if problem is None:  # made meanwhile, from a copy of the set
            return shutil.rmtree(folder)
        if problem:
            tell(f"the store {whole} is damaged ({problem}): another takes its place")
        shutil.rmtree(whole, ignore_errors=True)
        folder.rename(whole)
    rows, size = (whole / "index").read_bytes(), (whole / "pixels").stat().st_size
    write_text(whole / "store.json", json.dumps(about | {"bytes": size, "index": zlib.crc32(rows)}))
    sync(whole)


def _decoded(source: Source, numbers: Sequence[int], side: int) -> Iterator[np.ndarray | BadImage]:
    """Images as they are stored, in order, decoded ahead on all cores: decoders release the interpreter lock."""

    def work(task: Sequence[int]) -> list[np.ndarray | BadImage]:
        found: list[np.ndarray | BadImage] = []
        for i in task:
            try:
                found.append(np.ascontiguousarray(_read(source, i, side)))
            except BadImage as error:
                found.append(error)
        return found

    threads = cores()
    waiting: deque[Future[list[np.ndarray | BadImage]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for start in range(0, len(numbers), _TASK):
            waiting.append(pool.submit(work, numbers[start : start + _TASK]))
            if len(waiting) > _AHEAD * threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read(source: Source, i: int, side: int) -> np.ndarray:
    """An image as it is stored; one of many megapixels is shrunk on reading first, as it is for training."""
    data = source.fetch(i)
    image = source.read(i, side) if data is None else source.read(i, side, data)
    height, width = image.shape[:2]
    return decode.resize(image, *decode.side_size(height, width, side))


def _confirmed(folder: Path, about: dict[str, Any], progress: Progress | None) -> tuple[int, int]:
    """How many images of an unfinished or damaged store are there as their checksums say, from the first on, and where
    the last of them ends."""
    end = done = 0
    try:
        rows = np.frombuffer((folder / "index").read_bytes()[: about["images"] * _ROW.itemsize], np.uint8)
        rows = rows[: len(rows) // _ROW.itemsize * _ROW.itemsize].view(_ROW)
        with (folder / "pixels").open("rb") as pixels:
            for there, height, width, check in rows.tolist():
                size = height * width * about["channels"]
                if there != end + size or there > os.fstat(pixels.fileno()).st_size:
                    break
                if check != (zlib.crc32(pixels.read(size)) if size else _UNREADABLE):
                    break
                end, done = there, done + 1
                if progress is not None:
                    progress("checking images decoded before", done, len(rows))
    except FileNotFoundError:
        pass
    return done, end


def _opened(path: Path) -> Any:
    """To be written anywhere in, with what is there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", 1 << 20)


def _refused(folder: Path, error: OSError, careful: bool) -> DataError:
    """What the disk of a store refuses."""
    full = error.errno in _NO_ROOM
    why = f"{os.strerror(error.errno or 0)}; what was written of it is removed" if full else str(error)
    kind = NoStore if full or careful else DataError
    return kind(f"the store {folder} cannot be written: {why}; name another place by --cache-images PATH")


def _drop(folder: Path, there: int) -> None:
    """Remove the folder of a store that was not begun."""
    if not there:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()


# ---------------------------------------------------------------- what is there


@dataclass(frozen=True)
class Store:
    """A store as it lies on disk."""

    folder: Path
    about: dict[str, Any]
    """What it is of; nothing where that cannot be read."""
    bytes: int
    state: str
    """whole, unfinished, being made, or damaged."""
    used: float
    """When, in seconds since 1970."""

    def __str__(self) -> str:
        known = self.about
        of = f"{known['name']}/{known['split']}, {known['images']:,} images at {known['side']} px, " if known else ""
        when = time.strftime("%Y-%m-%d", time.localtime(self.used))
        return f"{self.folder.name}: {of}{_size(self.bytes)}, {self.state}, last used {when}"


def stores_in(place: Path) -> list[Store]:
    """The stores in a folder, those used last first."""
    found = []
    for folder in place.glob("*") if place.is_dir() else ():
        if not _KEY.fullmatch(folder.name) or not folder.is_dir():
            continue
        about = _about(folder)
        problem = _state(folder, about) if about else "its store.json cannot be read"
        state = "whole" if problem is None else "damaged" if problem else "unfinished"
        if state != "whole" and _taken(folder):
            state = "being made"
        with suppress(FileNotFoundError):  # removed meanwhile
            file = folder / "store.json"
            used = (file if file.exists() else folder).stat().st_mtime
            found.append(Store(folder, about, _bytes_in(folder), state, used))
    return sorted(found, key=lambda store: -store.used)


def remove(store: Store) -> None:
    """Take a store from the disk; processes that read it keep what they have mapped."""
    if _taken(store.folder):
        raise DataError(f"{store.folder} is being made by another process: end that first")
    (store.folder / "store.json").unlink(missing_ok=True)  # from here on it is no store
    shutil.rmtree(store.folder)


def verify(store: Store, progress: Progress | None = None) -> int:
    """Read a whole store, and count the images whose checksum differs."""
    rows, pixels = _read_index(store.folder), np.frombuffer(_mapped(store.folder / "pixels"), np.uint8)
    damaged = start = 0
    for i, (end, height, _, check) in enumerate(rows.tolist()):
        damaged += check != (_check(pixels[start:end]) if height else _UNREADABLE)
        start = end
        if progress is not None:
            progress("checking images", i + 1, len(rows))
    return damaged


def _state(folder: Path, about: dict[str, Any]) -> str | None:
    """None of a whole store of what `about` says; else what is wrong with it, nothing of one that is not finished."""
    found = _about(folder)
    if not found:
        return "its store.json cannot be read" if (folder / "store.json").exists() else ""
    of = ("format", "side", "decoder", "channels", "images", "fingerprint", "stamp")
    if any(found[name] != about[name] for name in of):
        return "it is of other images"
    if "index" not in found:
        return ""
    try:
        rows = _read_index(folder)
        size = (folder / "pixels").stat().st_size
    except (OSError, ValueError) as error:
        return str(error)
    if _check(rows.view(np.uint8)) != found["index"]:
        return "the checksum of its index differs"
    areas = rows["height"].astype(np.float64) * rows["width"] * found["channels"]
    flat = (rows["height"] > 0) != (rows["width"] > 0)
    if len(rows) != found["images"] or flat.any() or rows["end"][-1] != size or (np.cumsum(areas) != rows["end"]).any():
        return "its files do not fit together"
    return None


def _about(folder: Path) -> dict[str, Any]:
    """What store.json says, if it is of its kind; else nothing."""
    kinds = {
        "format": int, "side": int, "decoder": int, "channels": int, "images": int, "fingerprint": str, "stamp": str,
        "name": str, "split": str,
    }  # fmt: skip
    try:
        with (folder / "store.json").open("rb") as file:
            found = json.loads(file.read(1 << 16))
        return found if all(type(found[name]) is kind for name, kind in kinds.items()) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _taken(folder: Path) -> bool:
    """Whether another process makes it."""
    file = folder / ".lock"
    if not file.exists() or disk.held(file):
        return False
    if free := disk.claim(file):
        disk.release(file)
    return not free


def _check(values: np.ndarray) -> int:
    return zlib.crc32(values.data)


def _bytes_in(folder: Path) -> int:
    files = (folder / name for name in ("pixels", "index"))
    return sum(file.stat().st_size for file in files if file.exists())


def _mapped(path: Path) -> mmap.mmap:
    """A file, mapped: read-only, as what may be written counts as memory taken."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_index(folder: Path) -> np.ndarray:
    """The index, mapped; a ValueError where it is no whole number of rows."""
    return np.frombuffer(_mapped(folder / "index"), _ROW)


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
