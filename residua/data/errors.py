"""What can be wrong with data, said so that the user knows what to do."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence


class DataError(ValueError):
    """A data specification, path or file that cannot be used as given."""


class BadImage(DataError):
    """One image that cannot be decoded; the message names it."""

    def __init__(self, where: str, why: object) -> None:
        super().__init__(f"cannot read image {where}: {why}")
        self.where, self.why = where, why

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str]]:
        return BadImage, (self.where, str(self.why))


class DataWarning(UserWarning):
    """Data that is read otherwise than its owner may expect."""


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names: `a.png, b.png, c.png, ...`."""
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)


def tell(text: str) -> None:
    """Warn of such data, in one line; `residua data info` prints it as a note."""
    warnings.warn(text, DataWarning, stacklevel=3)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"did you mean 'cifar100'?"`, or the list of what is known where nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(repr(name) for name in near) + "?"
    return "known: " + ", ".join(known)
