"""Memory and disk: what this process may take of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch


def processes() -> int:
    """How many processes share this machine with the same work, this one included (`LOCAL_WORLD_SIZE`)."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdigit() else 1


def cores() -> int:
    """This process's share of the cores, at least one."""
    return max(1, (os.cpu_count() or 1) // processes())


def memory(device: torch.device | None = None) -> int:
    """Bytes of a GPU in all, or this process's share of the machine's memory."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes()


def free_memory(device: torch.device) -> int:
    """Free bytes on the device; on the CPU, this process's share of the memory that the system can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // processes()
    return memory() // 2


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
