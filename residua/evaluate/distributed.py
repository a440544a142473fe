"""Sharing rows of features between processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_main() -> bool:
    """Whether this process is the one that writes."""
    return world()[0] == 0


def agree(flags: list[bool]) -> list[bool]:
    """Which flags are up in every process."""
    if world()[1] == 1 or not flags:
        return flags
    votes = torch.tensor(flags, dtype=torch.int32, device=_device())
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return [bool(vote) for vote in votes.tolist()]


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of every process's `x`, in place."""
    if world()[1] > 1:
        there = x.to(_device()) if dist.get_backend() == "nccl" else x
        dist.all_reduce(there)
        x.copy_(there)
    return x


def wait_for_all() -> None:
    """Go on when every process has come here."""
    if world()[1] > 1:
        agree([True])


def gather_rows(index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers (n,) and rows (V, n, D) of all processes, sorted by number, each number once."""
    if world()[1] > 1:
        rows, index = torch.cat(_all_gather(rows, 1), 1), torch.cat(_all_gather(index, 0))
    number, place = index.unique(return_inverse=True)
    if len(number) == len(index) and bool((number == index).all()):
        return index, rows.clone() if rows.is_inference() else rows
    whole = torch.empty(len(rows), len(number), *rows.shape[2:], dtype=rows.dtype)
    whole[:, place] = rows
    return number, whole


def _all_gather(x: Tensor, dim: int) -> list[Tensor]:
    """`x` of every process, which may differ in length along `dim`."""
    device = _device() if dist.get_backend() == "nccl" else x.device
    length = torch.tensor([x.shape[dim]], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = int(max(lengths))
    shape = list(x.shape)
    shape[dim] = longest - shape[dim]
    padded = torch.cat([x.to(device), x.new_zeros(shape, device=device)], dim)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part.narrow(dim, 0, int(n)).cpu() for part, n in zip(parts, lengths)]


def _device() -> torch.device:
    """Where the processes' backend wants its tensors."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
