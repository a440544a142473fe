"""What a run writes down while it trains: metrics.jsonl, a record a line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from residua.disk import write_text
from residua.train import checkpoint as ckpt

Record = dict[str, Any]


def append_metrics(run: Path, record: Record) -> None:
    """One more line of a run's metrics.jsonl."""
    ckpt.guard_writes(lambda: _append(run / "metrics.jsonl", _line(record)), run)


def replace_metrics(run: Path, record: Record) -> None:
    """As `append_metrics`, in place of a record of the same step that has the same things measured, or less."""
    own = record.keys() - {"step", "epoch"}

    def replaced(other: Record) -> bool:
        return other["step"] == record["step"] and (own <= other.keys() or other.keys() <= record.keys())

    kept = [other for other in read_metrics(run) if not replaced(other)]
    ckpt.guard_writes(lambda: _write(run / "metrics.jsonl", [*kept, record]), run)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_metrics(run: Path) -> list[Record]:
    """The records of a run, in order; lines that hold none, as one cut short by a crash, are left out."""
    return scan_metrics(run)[0]


def scan_metrics(run: Path) -> tuple[list[Record], int]:
    """The records of a run, in order, and the number of lines that hold none."""
    path = run / "metrics.jsonl"
    records, broken = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            broken += bool(line.strip())
    return records, broken


def truncate_metrics(run: Path, step: int) -> None:
    """Drop records after `step`: they will be written again."""
    path = run / "metrics.jsonl"
    if path.exists():
        _write(path, [record for record in read_metrics(run) if record["step"] <= step])


def _write(path: Path, records: Sequence[Record]) -> None:
    write_text(path, "".join(map(_line, records)))


def _line(record: Record) -> str:
    """A record as JSON, which knows no infinity: what is not finite is left out."""
    known = {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}
    return json.dumps(known) + "\n"
