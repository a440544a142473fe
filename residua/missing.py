"""What to type where a library is missing."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "residua-torch"


def pip_install(*libraries: str) -> str:
    """A command that installs libraries, with the bounds in this package's metadata; a checkout that is merely on the
    path has none.

    >>> pip_install("onnx", "onnxscript")
    "pip install 'onnx>=1.18' 'onnxscript>=0.7'"
    """
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        lines = []
    bounded = [line.partition(";")[0].strip() for line in lines]
    known = {re.split(r"[^\w.-]", each)[0]: each for each in bounded}
    return shlex.join(["pip", "install", *(known.get(library, library) for library in libraries)])
