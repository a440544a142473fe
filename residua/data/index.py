"""What is kept of a set between commands, so that none has to look again: the names of a folder's images, hashes of
their bytes, and what was found in samples of them.

Everything lies in the cache and may be deleted at any time. What is damaged, or of images that have changed since, is
recomputed. Where the cache cannot be written, a process keeps things to itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from residua.data.errors import tell
from residua.files import replacing
from residua.room import set_aside

T = TypeVar("T")

UNSURE = -1
"""In the place of a time of change: what is known of the image now may be of no use later."""
_SETTLED = 2.0  # seconds in which a second change may leave the time of change as it was (FAT; others take less)
_RECORD = 24  # bytes of a hash and its seal


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


def file_stamps(paths: Sequence[str]) -> np.ndarray:
    """(bytes, time of the last change to the contents, and to anything), int64 (n, 3), of files.

    The last one, ctime, cannot be set by a program: whoever restores the other two is found out.
    """
    return np.array([_stamp(path) for path in paths], np.int64).reshape(-1, 3)


def settled(stamps: np.ndarray, asked: float) -> np.ndarray:
    """Stamps of files asked for at a time; `UNSURE` where a change since then may have left them as they are."""
    modified, changed = stamps[:, 1] / 1e9, stamps[:, 2] / 1e9
    fresh = (changed > asked - _SETTLED) | (abs(modified - asked) < _SETTLED)
    return np.stack([stamps[:, 0], np.where(fresh, UNSURE, stamps[:, 1]), stamps[:, 2]], 1)


def _stamp(path: str) -> tuple[int, int, int]:
    status = status_of(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def status_of(path: str) -> os.stat_result:
    """Of a file; of a link that leads nowhere, its own."""
    try:
        return os.stat(path)
    except OSError:
        return os.lstat(path)


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
            except OSError as error:
                _tell_unwritable(str(error))
                self._records = np.zeros((self.count, 3), np.uint64)
        return self._records

    def _mapped(self) -> np.ndarray:
        size = self.count * _RECORD
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size not in (0, size):
            self.path.unlink()
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b") as file:
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
    place = cache_dir() / "samples" / f"{what}-{fingerprint_of(*key)}.json"
    if sure:
        with suppress(OSError, ValueError):
            return json.loads(place.read_text("utf-8"))
    found = look()
    if sure:
        with suppress(OSError):  # it is looked at again next time
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as part:
                part.write_text(json.dumps(found), "utf-8")
    return found


@functools.cache
def _tell_unwritable(why: str) -> None:
    tell(
        f"{cache_dir()} cannot be written ({why}): what is learnt of the images is not kept, and looked for by every "
        "command; set RESIDUA_DATA to a folder of yours"
    )
