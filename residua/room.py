"""Cores and memory: what this process may take of them.

Containers and batch jobs are held in control groups, which may allow less than the machine has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def processes() -> int:
    """How many processes share this machine with the same work, this one included (`LOCAL_WORLD_SIZE`)."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdigit() else 1


def cores() -> int:
    """This process's share of the cores that it may use, at least one."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *_quotas()]) // processes())


def memory(device: torch.device | None = None) -> int:
    """Bytes of a GPU in all, or this process's share of the memory."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())]) // processes()


def free_memory(device: torch.device) -> int:
    """Free bytes on the device; on the CPU, this process's share of the memory that the system can still give."""
    if device.type in ("cuda", "mps"):
        import torch

        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0]
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free = min([psutil.virtual_memory().available, *(left for _, left in _limits())])
    return max(0, free) // processes()


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups around this process, of both versions; none where there are no such groups.

    A container may see its own group as the root, so all folders up to there are asked.
    """
    try:
        lines = _MEMBERSHIP.read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _GROUPS / controllers  # the second version has one tree for all
            own = root / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _limits() -> Iterator[tuple[int, int]]:
    """Bytes that the groups around this process may take, and bytes left of them."""
    for group in _groups("memory"):
        for most, taken in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _numbers(group / most), _numbers(group / taken)
            if limit and used:
                yield limit[0], limit[0] - used[0] + _reclaimable(group / "memory.stat")


def _reclaimable(stat: Path) -> int:
    """Bytes that count as taken but hold copies of files, which give way when memory is wanted."""
    rows = dict(line.split() for line in stat.read_text("utf-8").splitlines()) if stat.exists() else {}
    whole = "total_" if "total_active_file" in rows else ""  # the first version has its groups inside apart
    return sum(int(rows.get(f"{whole}{kind}_file", 0)) for kind in ("active", "inactive"))


def _quotas() -> Iterator[int]:
    """Cores' worth of time that the groups around this process may take, rounded up."""
    for group in _groups("cpu"):
        second = _numbers(group / "cpu.max")
        first = _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        yield from (math.ceil(pair[0] / pair[1]) for pair in (second, first) if len(pair) == 2)


def _numbers(file: Path) -> list[int]:
    """Those of a line; none where there is no such file, or no limit ("max", -1)."""
    try:
        words = file.read_text("utf-8").split()
    except OSError:
        return []
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []
