"""Many small kernels as one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_WARM_UP = 3  # ordinary calls before recording: compilation, libraries' workspaces


def record(function: Callable[[], T], device: torch.device) -> tuple[Callable[[], None], T]:
    """`function` as a CUDA graph: what replays it, and the tensors that every replay fills anew.

    It must read its inputs from the same memory at every call, launch the same kernels and never wait for the device.
    It is called three times before it is recorded, so it must not matter that it is.
    """
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                function()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # other threads (pinning memory for a loader, say) may go on meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = function()
    return graph.replay, outputs
