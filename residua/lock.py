"""A file that one process holds at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

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
