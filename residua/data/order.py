"""Which images make up a step: a pure function of seed and step, so that a run can stop and go on anywhere."""

from collections.abc import Iterator

import torch
from torch import Tensor


class Order:
    """The endless sequence of images, epoch after epoch, each a fresh permutation, cut into batches.

    Batches run across the border between epochs: the last partial batch of an epoch is filled with the first
    images of the next. So every image is seen exactly once an epoch and every batch has the same size. Of
    several processes, each takes its own stretch of every batch.
    """

    def __init__(self, images: int, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if batch_size % world:
            raise ValueError(
                f"batch size {batch_size} cannot be shared by {world} processes: use a multiple of {world}"
            )
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.share = batch_size // world
        self.offset = rank * self.share
        self._epochs: dict[int, Tensor] = {}

    def epoch_of(self, step: int) -> Tensor:
        """(B / world,) epoch of each image in this process's part of a step."""
        return self._positions(step) // self.images

    def indices(self, step: int) -> Tensor:
        """(B / world,) image numbers of this process's part of a step."""
        positions = self._positions(step)
        epochs = positions // self.images
        first, last = int(epochs[0]), int(epochs[-1])
        chosen = torch.empty_like(positions)
        for epoch in range(first, last + 1):
            here = epochs == epoch
            chosen[here] = self._permutation(epoch)[positions[here] % self.images]
        return chosen

    def batches(self, start: int, stop: int) -> Iterator[Tensor]:
        return (self.indices(step) for step in range(start, stop))

    def _positions(self, step: int) -> Tensor:
        start = step * self.batch_size + self.offset
        return torch.arange(start, start + self.share)

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epochs = {e: p for e, p in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = torch.randperm(self.images, generator=generator)
        return self._epochs[epoch]
