"""Tasks of a few images, decoded by worker processes, and the shared memory through which the pixels come back."""

from __future__ import annotations

import math
import mmap
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from residua.data import decode
from residua.data.augment import Crops, Several
from residua.data.errors import BadImage, DataError
from residua.data.preprocess import canvas_for, fit, most_pixels
from residua.data.source import Source

_FORK = "fork" if sys.platform == "linux" else None  # how workers begin, which inherit memory then
WAY_OUT = "--on-bad-image skip, in Python on_bad_image='skip', leaves such images out"
AT_ONCE = 32  # images that make a task
_AHEAD = 2  # batches that are ready or being decoded, at least

Wanted = tuple[int, int]
"""Number of an image, and the epoch in which it is seen."""


class Task(NamedTuple):
    """What one worker does at a time."""

    slot: int  # where the pixels go
    wanted: list[Wanted]


class Done(NamedTuple):
    """A task that was done; its pixels lie in the slot."""

    slot: int
    numbers: list[int]  # of the images that were used
    sizes: list[tuple[int, int]]
    bad: list[int]  # numbers of images that cannot be read


class Slots:
    """Memory that workers write to and this process reads, a slot for each task under way, used over and over.

    On the way to a GPU it is locked in main memory, and a slot is used again once its copy has left.
    """

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype, shared: bool, pinned: bool) -> None:
        self.memory = _memory((count, AT_ONCE, *shape), dtype, shared)
        self.pinned = pinned and _lock(self.memory)
        self._free: deque[int] = deque()
        self._leaving: deque[tuple[torch.cuda.Event, int]] = deque()
        self.reset()

    def reset(self) -> None:
        """No task is under way."""
        for event, _ in self._leaving:
            event.synchronize()
        self._leaving.clear()
        self._free = deque(range(len(self.memory)))

    def take(self) -> int:
        if not self._free:
            event, slot = self._leaving.popleft()
            event.synchronize()
            return slot
        return self._free.popleft()

    def give(self, slot: int, left: torch.cuda.Event | None) -> None:
        """Have a slot back whose pixels were read, or will be when an event says so."""
        if left is None:
            self._free.append(slot)
        else:
            self._leaving.append((left, slot))

    def close(self) -> None:
        self.reset()
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self.pinned = False


def _memory(shape: tuple[int, ...], dtype: torch.dtype, shared: bool) -> Tensor:
    """Room for tensors, which child processes share. What they inherit counts as memory that is used, not as space of
    /dev/shm, of which containers have little."""
    if not shared:
        return torch.empty(shape, dtype=dtype)
    if _FORK is None:
        return torch.empty(shape, dtype=dtype).share_memory_()
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def _lock(memory: Tensor) -> bool:
    """Keep memory where it is, so that a GPU can fetch from it by itself; False where that is not allowed."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    return int(code) == 0


@dataclass(frozen=True)
class Whole:
    """Whole images on a canvas, each in the top left corner."""

    canvas: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.canvas


@dataclass(frozen=True)
class Packed:
    """Whole images one after another, without space between them, as they are kept for views of `target` pixels."""

    target: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (most_pixels(self.target),)


Makes = Crops | Several | Whole | Packed


class Decoder(Dataset[Any]):
    """Decodes the images of a task and puts what is made of them into its slot: views, or the images themselves.

    Of an unreadable image: "error" raises, "skip" puts the next readable one in its place, "drop" leaves it out.
    """

    def __init__(
        self,
        source: Source,
        target: int,
        makes: Makes,
        on_bad: Literal["error", "skip", "drop"],
        squash: bool = False,
        side: int | None = None,
    ) -> None:
        self.source, self.target, self.on_bad, self.squash = source, target, on_bad, squash
        self.makes, self.side = makes, side
        self.shape = (*makes.shape, source.channels)
        self.dtype = torch.uint8 if source.dtype == np.uint8 else torch.float32
        self.memory = torch.empty(0)  # of the slots
        self._unreadable: set[int] = set()  # so that a long row of them is not tried anew for each

    def __getitems__(self, task: Task) -> Done | DataError:
        try:
            images, epochs, done = self.decode(task)
            self.make(images, epochs, done)
            return done
        except DataError as error:  # handed over as a value: raised in a worker it would lose its type
            return error

    def decode(self, task: Task) -> tuple[list[Tensor], list[int], Done]:
        """Images (C, H, W) as they are kept, and in which epoch each is seen."""
        images: list[Tensor] = []
        epochs: list[int] = []
        done = Done(task.slot, [], [], [])
        with ThreadPoolExecutor(1) as reader:  # bytes are read while images before them are decoded
            encoded = reader.map(self.source.fetch, (i for i, _ in task.wanted))
            for (i, epoch), data in zip(task.wanted, encoded):
                image, j = None, i
                try:
                    image = self._kept(i, data)
                except BadImage as error:
                    if self.on_bad == "error":
                        raise BadImage(error.where, f"{error.why} ({WAY_OUT})") from error
                    done.bad.append(i)
                    if self.on_bad == "skip":
                        image, j = self._next_readable(i, done.bad)
                if image is not None:
                    images.append(decode.as_tensor(image).permute(2, 0, 1))
                    epochs.append(epoch)
                    done.numbers.append(j)
                    done.sizes.append((image.shape[0], image.shape[1]))
        return images, epochs, done

    def make(self, images: list[Tensor], epochs: list[int], done: Done) -> None:
        """Put what is made of images into their slot."""
        out = self.memory[done.slot, : len(images)]
        match self.makes:
            case Packed():
                flat, at = self.memory[done.slot].view(-1, self.source.channels), 0
                for image, (height, width) in zip(images, done.sizes):
                    rows = flat[at : at + height * width].view(height, width, -1)
                    rows.copy_(image.permute(1, 2, 0))
                    at += height * width
            case Whole(canvas):
                for row, image, (height, width) in zip(out, images, done.sizes):
                    if (height, width) != canvas:
                        row.zero_()
                    row[:height, :width] = image.permute(1, 2, 0)
            case crops if images:
                index, sizes = torch.tensor(done.numbers), torch.tensor(done.sizes)
                crops.cut(images, index, torch.tensor(epochs), sizes, out)

    def _kept(self, i: int, data: bytes | None = None) -> np.ndarray:
        """An image as it is kept for views of the target's size, whatever others are like."""
        image = self.source.read(i, self.target) if data is None else self.source.read(i, self.target, data)
        if self.side is not None:
            image = decode.resize(image, *decode.side_size(image.shape[0], image.shape[1], self.side))
        image = fit(image, *canvas_for([image.shape[:2]], self.target), self.squash)
        if isinstance(self.makes, Whole) and not (np.array(image.shape[:2]) <= self.makes.canvas).all():
            (height, width), (most_h, most_w) = image.shape[:2], self.makes.canvas
            raise BadImage(
                self.source.identify(i), f"it is {height} x {width}, larger than the {most_h} x {most_w} of others"
            )
        return image if image.dtype == np.uint8 else decode.to_unit(image)

    def _next_readable(self, i: int, bad: list[int]) -> tuple[np.ndarray, int]:
        count = len(self.source)
        for j in (k % count for k in range(i + 1, i + count)):
            if j in self._unreadable:
                continue
            try:
                return self._kept(j), j
            except BadImage:
                bad.append(j)
                self._unreadable.add(j)
        raise DataError(f"{self.source.name}: none of its {count} images can be read")


class Pool:
    """Workers that do the tasks of a decoder, in order; they persist between passes. Without any, this process does."""

    def __init__(self, decoder: Decoder, workers: int, first: int, pinned: bool) -> None:
        """`first`: tasks of the first batch, which says how many are done ahead."""
        ahead = max(2, -(-first * _AHEAD // workers)) if workers else 0  # a worker
        self.slots = Slots(ahead * workers + 2, decoder.shape, decoder.dtype, workers > 0, pinned)
        decoder.memory = self.slots.memory
        self._sampler = _Sampler()
        self._loader: DataLoader[Any] = DataLoader(
            decoder,
            batch_sampler=self._sampler,  # type: ignore[arg-type]
            collate_fn=_as_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # else each pass would draw from the global one
            prefetch_factor=ahead if workers else None,
            worker_init_fn=_one_thread if workers else None,
            multiprocessing_context=_FORK if workers else None,
        )

    def do(self, tasks: Iterable[list[Wanted]]) -> Iterator[Done]:
        """Each task in turn; its slot is to be given back."""
        self.slots.reset()  # those of a pass that was abandoned, whose workers the loader waits for
        self._sampler.tasks = (Task(self.slots.take(), wanted) for wanted in tasks)
        for done in self._loader:
            if isinstance(done, DataError):
                raise done
            yield done

    def close(self) -> None:
        self._loader = None  # type: ignore[assignment]  # ends the workers
        self.slots.close()


class _Sampler:
    """A batch sampler whose tasks are set before each pass, so that workers persist between passes."""

    def __init__(self) -> None:
        self.tasks: Iterable[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)


class Tasks:
    """Batches as tasks of 32 images, drawn as they are needed; `counts` tells how many images make up each batch
    drawn."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor | int]]) -> None:
        self.batches = iter(batches)
        self.counts: deque[int] = deque()

    def count_first(self) -> int:
        """Tasks of the first batch."""
        first = next(self.batches, None)
        if first is None:
            return 1
        self.batches = chain([first], self.batches)
        return -(-len(first[0]) // AT_ONCE)

    def __iter__(self) -> Iterator[list[Wanted]]:
        for index, epoch in self.batches:
            epochs = epoch.tolist() if isinstance(epoch, Tensor) else [epoch] * len(index)
            pairs = list(zip(index.tolist(), epochs))
            self.counts.append(len(pairs))
            yield from (pairs[k : k + AT_ONCE] for k in range(0, max(1, len(pairs)), AT_ONCE))


def _as_is(batch: Any) -> Any:
    return batch


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
