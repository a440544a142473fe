"""A training step recorded once as a CUDA graph and replayed.

A small network keeps a GPU busy for microseconds per kernel, and launching a kernel takes the host as long. A replayed
step is launched as one: batch, forward, backward, clipping and optimiser.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[..., tuple[Tensor, Tensor]]

WARM_UP = 3  # ordinary calls before recording: compilation, optimiser state, libraries' workspaces


class Recorded:
    """Calls `step(*inputs)`, from the fourth call on by replaying it.

    Every call must get inputs of the same shapes and launch the same kernels; what it reads beside its inputs (weights,
    learning rates) it must read from the same memory. The outputs are copies. A step that cannot be recorded is called
    as it is, and `on_failure` told why.
    """

    def __init__(self, step: Step, on_failure: Callable[[str], None] = lambda text: None) -> None:
        self.step, self.calls, self.on_failure = step, 0, on_failure
        self.failed = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls <= WARM_UP or self.failed:
            return self._ordinary(inputs)
        if self.graph is None:
            try:
                self._record(inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.failed, self.inputs = True, ()
                reason = str(error).splitlines()[0]
                self.on_failure(f"this step cannot be recorded as a CUDA graph, which costs some speed: {reason}")
                return self._ordinary(inputs)
        assert self.graph is not None
        assert self.outputs is not None
        for static, given in zip(self.inputs, inputs):
            static.copy_(given, non_blocking=True)
        self.graph.replay()
        first, second = self.outputs
        return first.clone(), second.clone()

    def _ordinary(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """A step on a stream of its own, as recording needs it."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable")  # the recording is still to come
            outputs = self.step(*inputs)
        here.wait_stream(aside)
        return outputs

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(given.clone() for given in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = self.step(*self.inputs)
        self.graph = graph
