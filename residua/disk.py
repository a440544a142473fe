"""Files that are there whole or not at all, files that one process holds at a time, and room for them."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_DISKS = (*FULL, errno.EIO, errno.EROFS, errno.EFBIG)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what shall be `path`: a file beside it that takes its place when written, and is gone otherwise.

    Readers see the old file or the new one; of several writers, the last one's stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with named(path):
            yield part
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):  # what went wrong before is told
            part.unlink()
        if isinstance(error, OSError) and error.filename in (part, str(part)):  # which nobody asked for
            error.filename = str(path)
            del error.filename2
        raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an error of the disk that names no file, as that of a full one, this name."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_DISKS and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """A file that is whole even after a power cut."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
        sync(part)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Give a file that is written here the permissions of any other: safetensors makes its own for the owner alone."""
    new = not path.exists()
    path.touch()
    mode = path.stat().st_mode
    try:
        yield
    except BaseException:
        if new:
            path.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some mounts and owners do not let it, and it is written
        path.chmod(mode)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_aside(file: int, size: int) -> None:
    """Give an open file (its descriptor) `size` bytes of disk: an `OSError` on a full one. On a file system that sets
    nothing aside the file is only made that long."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(file, size)


# ---------------------------------------------------------------- held by one process

_HELD: dict[Path, IO[bytes]] = {}


def hold(file: IO[bytes]) -> bool:
    """Lock an open file for as long as it is open here or in a child; False where another process has it.

    On file systems without locks everyone gets it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def claim(path: Path) -> bool:
    """Hold a file, made if need be, until `release` or the end of this process; False where another one has it."""
    path = path.resolve()
    if path in _HELD:
        return True
    file = path.open("ab")
    if not hold(file):
        file.close()
        return False
    _HELD[path] = file
    return True


def held(path: Path) -> bool:
    """Whether this process holds it already: `claim` is true then, too."""
    return path.resolve() in _HELD


def release(path: Path) -> None:
    """Let others have it."""
    file = _HELD.pop(path.resolve(), None)
    if file is not None:
        file.close()
