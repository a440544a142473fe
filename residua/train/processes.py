"""Several processes of one run: they wait for one another, and fail together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""That processes have for one that downloads images or looks at the model."""


class TrainingStopped(RuntimeError):
    """The run ended before its last step; its message says why and what is kept."""


class Interrupted(TrainingStopped):
    """Somebody asked for the end, by Ctrl-C or a signal; all is saved."""


def program() -> list[str]:
    """`residua`, as this interpreter runs it; `-P` keeps the working directory, which may be somebody's folder of
    images, off Python's path."""
    return [sys.executable, "-P", "-m", "residua.cli"]


@contextmanager
def agreed() -> Iterator[None]:
    """Go on when every process came through this part; where one failed, all end with its error.

    Inside, no process may wait for another.
    """
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # others may be gone: what failed here counts
            gather_object([f"{error} ({type(error).__name__})"])
        raise
    for process, failed in enumerate(gather_object([""])):
        if failed:
            raise TrainingStopped(f"process {process} failed: {failed}")


def in_turn(load: Callable[[], T]) -> T:
    """What `load` returns: the first process of each machine, which downloads what is not there, goes first."""
    first, found = PartialState().is_local_main_process, []
    for turn in (True, False):
        with agreed():
            if first is turn:
                found.append(load())
    return found[0]
