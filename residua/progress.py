"""How far work on many images has come, for whoever listens: commands show it."""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[str, int, int], None] | None = None


def listen(progress: Callable[[str, int, int], None] | None) -> None:
    """Have `counted` call this one; None: nobody."""
    global _listener
    _listener = progress


def counted(what: str, done: int, total: int) -> None:
    """Say what is being done, how much of it is done, and how much there is (0: not known)."""
    if _listener is not None:
        _listener(what, done, total)
