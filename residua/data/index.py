"""What is kept of a set between commands, so that none has to look again: the names of a folder's images, hashes of
their bytes, and what was found in samples of them.

Everything lies in the cache and may be deleted at any time. What is damaged, or of images that have changed since, is
recomputed. Where the cache cannot be written, a process keeps things to itself.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import mmap
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from residua import disk
from residua.data.decode import SUFFIXES
from residua.data.errors import DataError, tell
from residua.disk import replacing, set_aside
from residua.progress import counted

T = TypeVar("T")

UNSURE = -1
"""In the place of a time of change: what is known of the image now may be of no use later."""
_SETTLED = 2.0  # seconds in which a second change may leave the time of change as it was (FAT; others take less)
_WORD = (1 << 63) - 1  # what file systems tell, as far as it fits: some inodes do not, nor do times after 2262
_RECORD = 24  # bytes of a hash and its seal
_told: set[Path] = set()  # caches that cannot be written, each told once
_FORMAT = 1  # of a listing; a higher one where the same folder gives another than before
_SCANNERS = 8  # folders looked into at once


def cache_dir() -> Path:
    """Where downloads are kept: $RESIDUA_DATA, else ~/.cache/residua."""
    return Path(os.environ.get("RESIDUA_DATA") or "~/.cache/residua").expanduser()


def fingerprint_of(*parts: object) -> str:
    """Hash of strings, numbers and arrays."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
        state.update(b"\0")
    return state.hexdigest()


def hash_of(data: bytes) -> bytes:
    """What is kept of an image's bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def file_stamps(paths: Sequence[bytes]) -> np.ndarray:
    """(bytes, time of the last change to the contents, and to anything), int64 (n, 3), of files.

    The last one, ctime, cannot be set by a program: whoever restores the other two is found out.
    """
    found: list[int] = []
    for path in paths:
        status = _status(path)
        if status is None:
            found += (0, UNSURE, 0)
        else:
            found += (status.st_size, status.st_mtime_ns & _WORD, status.st_ctime_ns & _WORD)
    return np.array(found, np.int64).reshape(-1, 3)


def settled(stamps: np.ndarray, asked: float) -> np.ndarray:
    """Stamps of files asked for at a time; `UNSURE` where a change since then may have left them as they are."""
    fresh = _fresh(stamps[:, 1], stamps[:, 2], asked)
    return np.stack([stamps[:, 0], np.where(fresh, UNSURE, stamps[:, 1]), stamps[:, 2]], 1)


def _fresh(modified: Any, changed: Any, asked: float) -> Any:
    """Whether times of change lie so near to the present that another change may not move them."""
    return (changed / 1e9 > asked - _SETTLED) | (abs(modified / 1e9 - asked) < _SETTLED)


def _status(path: bytes) -> os.stat_result | None:
    """Of a file; of a link that leads nowhere, its own; None where there is nothing."""
    for ask in (os.stat, os.lstat):
        with suppress(OSError):
            return ask(path)
    return None


class Hashes:
    """Hashes of the images of a set, in a file that processes share: 24 bytes an image, mapped when first used.

    Beside a hash lies its seal, made of it and of the image's stamp. Only where it fits the stamp of today is the hash
    believed.
    """

    def __init__(self, key: str, count: int, rows: np.ndarray | None = None) -> None:
        self.key, self.count, self.rows = key, count, rows
        self._records: np.ndarray | None = None

    @property
    def path(self) -> Path:
        return cache_dir() / "hashes" / self.key

    def take(self, rows: np.ndarray) -> Hashes:
        """Those of some of the images."""
        return Hashes(self.key, self.count, rows if self.rows is None else self.rows[rows])

    def has(self, i: int) -> bool:
        """Whether there is one of image `i`, be it up to date or not."""
        return bool(self.records[self._at(i), 2])

    def of(self, numbers: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Hashes (n, 2), uint64, of images with these stamps; zeros where none is known."""
        found = self.records[self._at(numbers)]
        known = (found[:, 2] == _seal(stamps, found[:, :2])) & (stamps[:, 1] != UNSURE)
        return np.where(known[:, None], found[:, :2], np.uint64(0))

    def keep(self, numbers: np.ndarray, stamps: np.ndarray, hashes: np.ndarray) -> None:
        """Take hashes (n, 2) of images that had these stamps before they were read; zeros are of unreadable ones."""
        sure = (stamps[:, 1] != UNSURE) & hashes.any(1)
        records = np.concatenate([hashes, _seal(stamps, hashes)[:, None]], 1)
        self.records[self._at(numbers)[sure]] = records[sure]

    def _at(self, numbers: Any) -> Any:
        return numbers if self.rows is None else self.rows[numbers]

    @property
    def records(self) -> np.ndarray:
        if self._records is None:
            try:
                self._records = self._mapped()
            except (OSError, ValueError) as error:  # the latter of a file that is too short
                _tell_unwritable(cache_dir(), error)
                self._records = np.zeros((self.count, 3), np.uint64)
        return self._records

    def _mapped(self) -> np.ndarray:
        size = self.count * _RECORD
        if self.path.is_file() and not os.access(self.path, os.W_OK):  # of somebody who lets others read it
            with self.path.open("rb") as file:
                own = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                return np.frombuffer(own, np.uint64).reshape(-1, 3)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size not in (0, size):
            self.path.unlink()
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            set_aside(file.fileno(), size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint64).reshape(-1, 3)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": None}


def _seal(stamps: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """A number (n,) that differs where stamp or hash does, by accident at least; never 0."""
    state = np.full(len(hashes), 0x9E3779B97F4A7C15, np.uint64)
    for word in (*stamps.astype(np.int64).view(np.uint64).T, *hashes.T):
        state = (state ^ word) * np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(29)
    return state | np.uint64(1)


def found_before(what: str, key: tuple[object, ...], look: Callable[[], T], sure: bool = True) -> T:
    """What `look` returns (fit for JSON): from the last time if it was kept under the same key, and kept if `sure`."""
    place = cache_dir() / "samples" / f"{what}-{fingerprint_of(*key)}"
    if sure:
        with suppress(OSError, ValueError):
            checksum, text = place.read_text("utf-8").split("\n")
            if checksum == fingerprint_of(text):
                return json.loads(text)
    found = look()
    if sure:
        with suppress(OSError):  # it is looked at again next time
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as part:
                text = json.dumps(found)
                part.write_text(f"{fingerprint_of(text)}\n{text}", "utf-8")
    return found


class Listing(Sequence[str]):
    """Names of the images below a folder, in order; held as one block of bytes, mapped from the cache if it lies there.

    `groups` are the names of what lies at the top, and `tops` (N,) tells in which of these an image is.
    """

    def __init__(
        self,
        fields: Mapping[str, np.ndarray],
        key: str,
        file: Path | None = None,
        rows: np.ndarray | None = None,
        prefix: str = "",
    ) -> None:
        self.key, self._fields, self._file, self._rows, self._prefix = key, fields, file, rows, prefix

    @classmethod
    def of(cls, base: str | Path, names: Iterable[str]) -> Listing:
        """These names, whatever else lies in the folder."""
        block, ends = bytearray(), array("q")
        for name in names:
            block += os.fsencode(name)
            ends.append(len(block))
        fields: dict[str, np.ndarray] = {
            "names": np.frombuffer(block, np.uint8),
            "ends": np.frombuffer(ends, np.int64),
        }
        return cls(fields, fingerprint_of(os.path.realpath(base), *fields.values()))

    def take(self, rows: np.ndarray) -> Listing:
        """Those of some of the images."""
        rows = rows if self._rows is None else self._rows[rows]
        return Listing(self._fields, self.key, self._file, rows, self._prefix)

    def below(self, prefix: str) -> Listing:
        """The same, named from a folder further up."""
        return Listing(self._fields, self.key, self._file, self._rows, prefix + self._prefix)

    def __len__(self) -> int:
        return len(self._fields["ends"] if self._rows is None else self._rows)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self._prefix + self._name(i % len(self) if self._rows is None else int(self._rows[i]))

    def _name(self, row: int) -> str:
        ends = self._fields["ends"]
        return os.fsdecode(self._fields["names"][ends[row - 1] if row else 0 : ends[row]].tobytes())

    def codes(self, numbers: np.ndarray) -> list[bytes]:
        """Names of these images as the file system has them, which takes half as long."""
        rows = numbers if self._rows is None else self._rows[numbers]
        ends, block, prefix = self._fields["ends"], self._fields["names"].data, os.fsencode(self._prefix)
        starts = np.where(rows > 0, ends[rows - 1], 0)
        return [prefix + bytes(block[a:b]) for a, b in zip(starts.tolist(), ends[rows].tolist())]

    @property
    def groups(self) -> list[str]:
        tops = self._fields["tops"]
        first = np.flatnonzero(np.diff(tops, prepend=np.int32(-1)))
        return [self._name(int(row)).partition("/")[0] for row in first]

    @property
    def sizes(self) -> np.ndarray | None:
        """Lengths of the images, where they were looked up."""
        return self.field("sizes") if "sizes" in self._fields else None

    def field(self, name: str) -> np.ndarray:
        """Of every image the number of its group (`tops`), how many folders it lies in (`depths`), or the beginning of
        the hash of its name (`draws`)."""
        return self._fields[name] if self._rows is None else self._fields[name][self._rows]

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the images in the whole listing."""
        return np.arange(len(self)) if self._rows is None else self._rows

    def whole(self) -> Listing:
        """All images of the folder, named from there."""
        return Listing(self._fields, self.key, self._file)

    @property
    def hashes(self) -> Hashes:
        return Hashes(self.key, len(self._fields["ends"]), self._rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fields": None} if self._file else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file is not None:
            now = _opened(self._file)
            if now is None or now.key != self.key:
                raise DataError(f"images were added or removed since they were listed in {self._file}: start again")
            self._fields = now._fields


def list_images(root: Path) -> Listing:
    """Relative paths (with `/`) of all images below `root`, sorted, without hidden ones, and their lengths.

    Links to folders are followed, but no folder is entered twice. What was found is kept in the cache and believed
    while no folder has changed; of several processes one looks. Lengths are those of that day.
    """
    place = os.path.realpath(root)
    file = cache_dir() / "index" / fingerprint_of(_FORMAT, sorted(SUFFIXES), place)
    found = _current(file, place)
    if found is not None:
        return found
    with _turn(file):
        found = _current(file, place)  # by another process meanwhile
        if found is not None:
            return found
        return _kept(file, place, _listed(place))


def list_elsewhere(place: str, scan: Callable[[str], Folder]) -> Listing:
    """The same of a folder of which `scan` tells what it holds: listed every time, as nothing else tells whether it
    has changed, and kept for the processes that share it."""
    file = cache_dir() / "index" / fingerprint_of(_FORMAT, place)
    fields = _fields_of(_folders(scan))
    with _turn(file):
        return _kept(file, place, fields)


def _kept(file: Path, place: str, fields: Mapping[str, np.ndarray]) -> Listing:
    """A listing in the cache, mapped, with the hashes of images that were known before."""
    key = fingerprint_of(place, fields["names"], fields["ends"])
    before = _opened(file)
    try:
        _write(file, key, fields)
    except OSError as error:
        _tell_unwritable(cache_dir(), error)
        return Listing(fields, key)
    found = _opened(file)
    if found is None:
        return Listing(fields, key)
    if before is not None and before.key != key and before.hashes.path.exists():
        _carry(before, found)
    return found


def is_image(name: str) -> bool:
    """Whether a file so called is one."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


@contextmanager
def _turn(file: Path) -> Iterator[None]:
    """Wait until no other process makes this file; where nothing can be locked, all do."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.with_suffix(".lock").open("ab")
    except OSError:
        yield
        return
    with handle:
        while not disk.hold(handle):
            time.sleep(0.05)
        yield


def _current(file: Path, root: str) -> Listing | None:
    """What is kept of a folder, if neither it nor any folder in it has changed."""
    found = _opened(file)
    if found is None:
        return None
    fields = found._fields
    ends = fields["folder_ends"].tolist()
    block = fields["folders"].tobytes()
    for start, end, stamp in zip([0, *ends], ends, fields["stamps"]):
        if _folder_stamp(os.path.join(root, os.fsdecode(block[start:end]))) != tuple(stamp.tolist()):
            return None
    return found


def _folder_stamp(path: str) -> tuple[int, ...]:
    """What changes when an image is added to a folder or taken from it; zeros where there is no such folder."""
    try:
        s = os.stat(path)
    except OSError:
        return 0, 0, 0, 0
    return s.st_dev & _WORD, s.st_ino & _WORD, s.st_mtime_ns & _WORD, s.st_ctime_ns & _WORD


@dataclass
class Folder:
    """What lies in one."""

    stamp: tuple[int, ...]
    names: str = ""
    """Of images, in order, with a zero byte between them."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    versions: array[int] = field(default_factory=lambda: array("q"))
    """Numbers that change when the images do, where the lister is told such."""
    inside: list[str] = field(default_factory=list)
    """Folders."""
    links: list[str] = field(default_factory=list)
    """To folders."""
    lost: list[str] = field(default_factory=list)
    """Links that lead nowhere, today."""

    def take(self, images: list[tuple[str, int]] | list[tuple[str, int, int]]) -> None:
        """Images by name, length and, where it is known, version."""
        images.sort()
        self.names = "\0".join(image[0] for image in images)
        self.sizes.extend(image[1] for image in images)
        self.versions.extend(image[2] if len(image) > 2 else 0 for image in images)


def _scan(path: str) -> Folder:
    folder = Folder(_folder_stamp(path))  # before what is in it: what comes later changes it
    images: list[tuple[str, int]] = []
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                (folder.links if entry.is_symlink() else folder.inside).append(entry.name)
            elif is_image(entry.name):
                images.append((entry.name, _status_of(entry).st_size))
            elif entry.is_symlink():
                folder.lost.append(entry.name)
    folder.take(images)
    return folder


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _status_of(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def _folders(scan: Callable[[str], Folder]) -> dict[str, Folder]:
    """All folders below the root by their relative path, the root itself under ""."""
    tree: dict[str, Folder] = {}
    seen: set[tuple[int, ...]] = set()
    count = 0
    waiting = deque([""])  # the root, then links, which so never stand in for a folder's own path
    with ThreadPoolExecutor(_SCANNERS) as pool:
        while waiting:
            level = [waiting.popleft()]
            while level:
                below: list[str] = []
                for path, folder in zip(level, pool.map(scan, level)):
                    if folder.stamp[:2] in seen:
                        continue
                    seen.add(folder.stamp[:2])
                    tree[path] = folder
                    start = path and path + "/"
                    below += [start + name for name in sorted(folder.inside)]
                    waiting += [start + name for name in sorted(folder.links)]
                    count += len(folder.sizes)
                    counted("listing images", count, 0)
                level = below
    counted("listing images", count, count)
    return tree


def _listed(root: str) -> dict[str, np.ndarray]:
    """The fields of a listing, from the folders."""
    asked = time.time()
    tree = _folders(lambda path: _scan(os.path.join(root, path)))
    stamps = {path: _dated(folder.stamp, asked) for path, folder in tree.items()}
    stamps |= {f"{path and path + '/'}{name}": (0, 0, 0, 0) for path, folder in tree.items() for name in folder.lost}
    folders = [os.fsencode(path) for path in stamps]
    return _fields_of(tree) | {
        "folders": np.frombuffer(b"".join(folders), np.uint8),
        "folder_ends": np.cumsum([len(path) for path in folders], dtype=np.int64),
        "stamps": np.array(list(stamps.values()), np.int64).reshape(-1, 4),
    }


def _fields_of(tree: Mapping[str, Folder]) -> dict[str, np.ndarray]:
    """Those of the images."""
    names, ends, sizes, versions = bytearray(), array("q"), array("q"), array("q")
    tops, depths, draws = array("i"), array("B"), array("Q")
    top, group = -1, ""
    for name, size, version in _in_order(tree):
        code = os.fsencode(name)
        names += code
        ends.append(len(names))
        sizes.append(size)
        versions.append(version)
        depths.append(min(255, name.count("/")))
        draws.append(int.from_bytes(hashlib.blake2b(code).digest()[:8], "big"))
        if name.partition("/")[0] != group:
            top, group = top + 1, name.partition("/")[0]
        tops.append(top)
    told = {"versions": np.frombuffer(versions, np.int64)} if any(versions) else {}
    return told | {
        "names": np.frombuffer(names, np.uint8),
        "ends": np.frombuffer(ends, np.int64),
        "sizes": np.frombuffer(sizes, np.int64),
        "tops": np.frombuffer(tops, np.int32),
        "depths": np.frombuffer(depths, np.uint8),
        "draws": np.frombuffer(draws, np.uint64),
    }


def _dated(stamp: tuple[int, ...], asked: float) -> tuple[int, ...]:
    """A folder's stamp, or one that no folder has where it may change again and look the same."""
    return (UNSURE,) * 4 if _fresh(stamp[2], stamp[3], asked) else stamp


def _in_order(tree: Mapping[str, Folder]) -> Iterator[tuple[str, int, int]]:
    """Names of all images, sorted, with lengths and versions.

    In a folder, `b/` comes where its images do among others: after `b.png`, before `b0.png`.
    """

    def inside(path: str) -> Iterator[tuple[str, int, int]]:
        folder, start = tree[path], path and path + "/"
        images = zip((start + name for name in folder.names.split("\0")), folder.sizes, folder.versions)
        names = (start + name for name in (*folder.inside, *folder.links))
        return heapq.merge(images, sorted((name + "/", 0, 0) for name in names if name in tree))

    stack = [inside("")]
    while stack:
        for image in stack[-1]:
            if image[0].endswith("/"):
                stack.append(inside(image[0][:-1]))
                break
            yield image
        else:
            stack.pop()


def _write(file: Path, key: str, fields: Mapping[str, np.ndarray]) -> None:
    """Checksum, length of the head, head (JSON), fields; each field begins at a multiple of 64."""
    about: dict[str, tuple[str, tuple[int, ...], int]] = {}
    at = 0
    for name, values in fields.items():
        about[name] = (values.dtype.str, values.shape, at)
        at += -(-values.nbytes // 64) * 64
    head = json.dumps({"key": key, "fields": about}).encode()
    head += b" " * (-(len(head) + 24) % 64)
    parts: list[Any] = [len(head).to_bytes(8, "little"), head]
    for values in fields.values():
        parts += [values.data, bytes(-values.nbytes % 64)]
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    with replacing(file) as place, place.open("wb") as handle:
        handle.writelines([state.digest(), *parts])


def _opened(file: Path) -> Listing | None:
    """What is kept there, mapped; None where nothing is, or it is damaged."""
    try:
        with file.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        with memoryview(data) as view:
            if hashlib.blake2b(view[16:], digest_size=16).digest() != view[:16]:
                return None
        length = int.from_bytes(data[16:24], "little")
        head = json.loads(data[24 : 24 + length])
        fields = {
            name: np.frombuffer(data, kind, math.prod(shape), 24 + length + at).reshape(shape)
            for name, (kind, shape, at) in head["fields"].items()
        }
        return Listing(fields, head["key"], file)
    except (OSError, ValueError):
        return None


def _carry(before: Listing, after: Listing) -> None:
    """Hashes of images that were there before the folder changed; their seals tell whether they are the same."""
    _, there, here = np.intersect1d(before.field("draws"), after.field("draws"), return_indices=True)
    after.hashes.records[here] = before.hashes.records[there]
    with suppress(OSError):
        before.hashes.path.unlink()


def _tell_unwritable(place: Path, why: Exception) -> None:
    if place not in _told:
        _told.add(place)
        tell(
            f"{place} cannot be written ({why}): what is learnt of the images is not kept, and looked for by every "
            "command; set RESIDUA_DATA to a folder of yours"
        )
