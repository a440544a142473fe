"""One run of a sweep: what distinguishes it, in words and as the name of its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["waiting", "done", "failed", "left"]
"""Left: begun by an earlier call, not finished, and not asked for by this one."""
_NUMBERS = re.compile(r"[\d.,]+")  # a list whose commas may become hyphens
_LONGEST = 120  # characters of a run's name


@dataclass
class Trial:
    """One run of a sweep."""

    settings: dict[str, str]
    """What distinguishes it, as typed: `{"alpha_min": "0.9", "seed": "1"}`; of lists `{"stages": "2,2,6,2"}`."""
    status: Status = "waiting"
    error: str = ""
    """The last line that a failed run printed."""
    name: str = ""
    """Of its folder, once and for all: its settings when it was begun."""

    def __post_init__(self) -> None:
        self.name = self.name or name_of(self.settings)

    @property
    def group(self) -> tuple[tuple[str, str], ...]:
        """Its settings but for the seed: runs of one group are repetitions."""
        return tuple((key, value) for key, value in self.settings.items() if key != "seed")


def name_of(settings: Mapping[str, str]) -> str:
    """The settings, and where those cannot be a name as they are, a hash of them that tells them apart."""
    name = _joined(settings)
    clean = _clean(name)
    if clean == name and all("," not in value or _NUMBERS.fullmatch(value) for value in settings.values()):
        return clean
    return f"{clean}-{_hash(json.dumps(settings))}"


def name_before(settings: Mapping[str, str]) -> str:
    """The same in sweeps that do not say it."""
    name = _joined(settings)
    clean = _clean(name)
    return clean if clean == name else f"{clean}-{_hash(name)}"


def _joined(settings: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value.replace(',', '-')}" for key, value in settings.items()) or "run"


def _clean(name: str) -> str:
    return "".join(c if c.isalnum() or c in "=,._-" else "-" for c in name)[:_LONGEST]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def text_of(value: Any) -> str:
    """A setting as it could be typed."""
    return ",".join(map(text_of, value)) if isinstance(value, tuple | list) else str(value)


def same_value(a: str, b: str) -> bool:
    """Whether two settings as typed mean the same: 1 and 1.0 do."""
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return False


def trained(run: Path) -> bool:
    """False where a run has steps to go, by its records and checkpoints; it may have been evaluated as it was."""
    from residua.train.metrics import read_metrics
    from residua.train.options import read_flat

    config, records = run / "config.yaml", read_metrics(run)
    if not config.exists() or not records:
        return True
    try:
        steps = read_flat(config).get("steps")
    except ValueError:  # told by who reads its scores
        return True
    if not isinstance(steps, int) or records[-1]["step"] >= steps:
        return True
    return (run / "checkpoints" / f"step-{steps:07d}" / "model.json").exists()  # the record of it was lost
