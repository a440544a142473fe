"""How a batch reaches the device: from a resident copy of the data, or streamed from decoding workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from residua.data import decode
from residua.data.augment import Batch, Crops, ImgSize, Several, normalize, pair
from residua.data.catalog import load
from residua.data.errors import DataError
from residua.data.order import Order
from residua.data.preprocess import canvas_for
from residua.data.source import Source
from residua.data.workers import Decoder, Done, Packed, Pool, Slots, Task, Tasks, Whole
from residua.room import cores, free_memory

OnBadImage = Literal["error", "skip"]
Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is (0: not known)."""

RESIDENT_SHARE = 0.4  # of the device's free memory that images may take
_SPARE = 1.05  # of the room for images of different sizes, which is known from some of them
_MIN_FOR_WORKERS = 4096  # fewer images are decoded in this process
_GATHERED = 32  # images of different sizes that a GPU gathers at a time


class Feed:
    """Batches of `source` on `device`.

    Images live in device memory when they fit into 40 % of what is free there (`resident=None`; True and
    False force it), as uint8, or float32 in [0, 1] where the source has 16 bits or floats; images of different sizes
    one after another, without space between them. Otherwise `workers` persistent processes decode them; by default as
    many as there are cores for this process, at most 16. With `crops` they make the views as well and hand over those
    alone (`Batch.cut`), without them whole images. Two tasks of 32 images a worker wait in memory, or two batches where
    that is more.

    Either way an image much larger than `img_size` is shrunk when decoded: to at most twice `img_size` on its shorter
    and three times on its longer side. Where that would make the shorter one smaller than `img_size`, the ends of the
    longer are cut off instead; `squash` is for views that stretch images, and narrows the longer side alone.
    `resident_side` shrinks the shorter side of resident images to so many pixels, so that more of them fit.

    `on_bad_image="skip"` puts the next readable image, with its own number, in the place of an unreadable one.
    `skipped` counts these, and a warning names some: of a resident feed once it is filled, else when it is closed.
    `to_be` says whether images will be resident, of a feed that streams some of them to try how long that takes.
    `wait_seconds` is the time the consumer spent waiting for data. `progress` is told of images decoded into memory,
    and of those that `residua.evaluate` reads.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device | str,
        *,
        img_size: ImgSize,
        resident: bool | None = None,
        resident_side: int | None = None,
        workers: int | None = None,
        on_bad_image: OnBadImage = "error",
        progress: Progress | None = None,
        squash: bool = False,
        crops: Crops | Several | None = None,
        to_be: bool | None = None,
    ) -> None:
        if on_bad_image not in ("error", "skip"):
            raise DataError(f"on_bad_image {on_bad_image!r}, expected 'error' or 'skip'")
        if len(source) == 0:
            raise DataError(f"{source.name}: no images to feed")
        if workers is not None and workers < 0:
            raise DataError(f"workers {workers}, expected a number of processes, or 0 for none")
        self.source, self.device = source, torch.device(device)
        self.workers = min(16, cores()) if workers is None else workers
        self.on_bad_image, self.squash, self.crops, self.progress = on_bad_image, squash, crops, progress
        self.wait_seconds = 0.0
        self._bad: set[int] = set()
        self._target = max(pair(img_size))
        if resident_side is not None and resident_side < self._target:
            raise DataError(f"resident_side {resident_side} is smaller than the views of {self._target} pixels")
        self.resident = fits(source, self.device, self._target, resident, resident_side)
        self.to_be = self.resident if to_be is None else to_be
        self._side = resident_side if self.resident else None
        self.canvas = canvas_for(kept_sizes(source, self._target, self._side), self._target)
        """(height, width) that holds the images: of a resident feed all, else those that were looked at."""
        self._pool: Pool | None = None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pixels: Tensor | None = None
        """Resident images: (N, H, W, C) where all are of one size, else their pixels in a row, (T, C)."""
        self._sizes: Tensor | None = None
        self._starts: Tensor | None = None
        """Of each image the first of its pixels in the row."""
        self._stored: tuple[Tensor, Tensor] | None = None
        """Where some images are unreadable: for every number the row of the image used, for every row its number."""
        if self.resident:
            self._fill()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def skipped(self) -> int:
        """Unreadable images met so far."""
        return len(self._bad)

    @property
    def full(self) -> bool:
        """Whether every image fills the canvas; known of a resident feed."""
        return self.resident and self._starts is None

    @property
    def cuts(self) -> bool:
        """Whether batches come as views: of a resident feed they are images, which the device crops."""
        return self.crops is not None and not self.resident

    def iterate(self, index_batches: Iterable[Tensor], epochs: Iterable[Tensor | int] | None = None) -> Iterator[Batch]:
        """One batch per tensor of image numbers, in order. Of a feed that `cuts`, `epochs` says of each batch in which
        epoch its images are seen: one number, or one for each image; by default 0."""
        if self.resident:
            return self._iterate_resident(index_batches)
        return self._iterate_stream(index_batches, repeat(0) if epochs is None else epochs)

    def gather(self, index: Tensor) -> Batch:
        """The images of these numbers (B,), from a resident feed."""
        if self._pixels is None or self._sizes is None:
            raise RuntimeError("this feed is closed" if self.resident else "this feed streams: iterate over it")
        row = index
        if self._stored is not None:
            rows, numbers = self._stored
            row = rows[index]
            index = numbers[row]
        sizes = self._sizes[row]
        if self._starts is None:
            return Batch(self._pixels[row].permute(0, 3, 1, 2).contiguous(), sizes, index)
        gather = _gather_on_cpu if self.device.type == "cpu" else _gather
        return Batch(gather(self._pixels, self._starts[row], sizes, self.canvas), sizes, index)

    def seconds(self, index: Tensor) -> dict[str, float]:
        """About how long reading, decoding (making views included) and handing over these images (B,) takes, from 64 of
        them; nothing of a resident feed. Reading and decoding are shared by the workers."""
        if self.resident:
            return {}
        wanted = [(i, 0) for i in index[:64].tolist()]
        decoder = self._decoder()
        slots = Slots(1, decoder.shape, decoder.dtype, shared=False, pinned=False)
        decoder.memory = slots.memory
        times = {"reading": 0.0, "decoding": 0.0, "handing over": 0.0}

        def timed(what: str, work: Callable[..., Any], *of: Any) -> Any:
            start = time.perf_counter()
            found = work(*of)
            times[what] += time.perf_counter() - start
            return found

        for k in range(0, len(wanted), slots.memory.shape[1]):
            task = Task(0, wanted[k : k + slots.memory.shape[1]])
            timed("reading", list, map(self.source.fetch, [i for i, _ in task.wanted]))
            done = timed("decoding", decoder.__getitems__, task)
            if isinstance(done, DataError):
                raise done
            timed("handing over", self._arriving(len(done.numbers)).add, slots, done)
        for what in times:
            at_once = 1 if what == "handing over" else min(max(1, self.workers), cores())
            times[what] *= len(index) / len(wanted) / at_once
        times["decoding"] = max(0.0, times["decoding"] - times["reading"])
        return times

    def close(self) -> None:
        """End the workers and let go of the images."""
        if not self.resident:
            self.source.tell_skipped(self._bad)
        if self._pool is not None:
            self._pool.close()
        self._pool = self._pixels = self._sizes = self._starts = self._stored = None

    def _iterate_resident(self, index_batches: Iterable[Tensor]) -> Iterator[Batch]:
        for index in index_batches:
            yield self.gather(index.to(self.device, non_blocking=True))

    def _iterate_stream(self, index_batches: Iterable[Tensor], epochs: Iterable[Tensor | int]) -> Iterator[Batch]:
        tasks = Tasks(zip(index_batches, epochs))
        if self._pool is None:
            self._pool = Pool(self._decoder(), self.workers, tasks.count_first(), self.device.type == "cuda")
        waiting: _Arriving | None = None
        coming: _Arriving | None = None
        for done in self._timed(self._pool.do(tasks)):
            self._bad.update(done.bad)
            if coming is None:
                coming = self._arriving(tasks.counts.popleft())
            if coming.add(self._pool.slots, done):
                if waiting is not None:
                    yield waiting.arrived()
                waiting, coming = coming, None
        if waiting is not None:
            yield waiting.arrived()

    def _timed(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            start = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.wait_seconds += time.perf_counter() - start
            yield item

    def _decoder(self) -> Decoder:
        makes = self.crops or Whole(self.canvas)
        return Decoder(self.source, self._target, makes, self.on_bad_image, self.squash)

    def _arriving(self, total: int) -> _Arriving:
        return _Arriving(total, self.device, self._stream, self.cuts)

    def _fill(self) -> None:
        whole = self.source.array()
        if whole is not None and whole.shape[1:3] == self.canvas:
            whole = whole if whole.dtype == np.uint8 else decode.to_unit(whole)
            self._pixels = decode.as_tensor(whole).to(self.device)
            self._sizes = torch.tensor([self.canvas], device=self.device).repeat(len(whole), 1)
            return
        total, channels = len(self.source), self.source.channels
        on_bad: Literal["drop", "error"] = "drop" if self.on_bad_image == "skip" else "error"
        decoder = Decoder(self.source, self._target, Packed(self._target), on_bad, self.squash, self._side)
        pool = Pool(decoder, self.workers if total >= _MIN_FOR_WORKERS else 0, 1, pinned=False)
        kept = kept_sizes(self.source, self._target, self._side)
        spare = 1.0 if (kept == kept[0]).all() else _SPARE
        pixels = torch.empty(int(spare * _pixels_of(kept, total)), channels, dtype=decoder.dtype, device=self.device)
        found: list[tuple[int, int]] = []
        filled = 0
        for done in pool.do(Tasks([(torch.arange(total), 0)])):
            self._bad.update(done.bad)
            found += done.sizes
            count = sum(height * width for height, width in done.sizes)
            if filled + count > len(pixels):  # those not looked at are larger
                pixels = torch.cat([pixels, pixels.new_empty(len(pixels) // 4 + count, channels)])
            pixels[filled : filled + count] = pool.slots.memory[done.slot].view(-1, channels)[:count].to(self.device)
            filled += count
            pool.slots.give(done.slot, None)
            if self.progress is not None:
                self.progress("decoding images", len(found) + len(self._bad), total)
        pool.close()
        if not found:
            raise DataError(f"{self.source.name}: none of its {total} images can be read")
        if self._bad:
            numbers = torch.tensor([i for i in range(total) if i not in self._bad])
            rows = torch.searchsorted(numbers, torch.arange(total)) % len(found)  # after the last comes the first
            self._stored = rows.to(self.device), numbers.to(self.device)
            self.source.tell_skipped(self._bad)
        sizes = torch.tensor(found, dtype=torch.int64)
        self._pixels, self._sizes = pixels[:filled], sizes.to(self.device)
        height, width = sizes.max(0).values.tolist()
        self.canvas = height, width
        if bool((sizes == sizes[0]).all()):
            self._pixels = self._pixels.view(-1, height, width, channels)
        else:
            areas = sizes.prod(1)
            self._starts = (areas.cumsum(0) - areas).to(self.device)


def _gather_on_cpu(pixels: Tensor, starts: Tensor, sizes: Tensor, canvas: tuple[int, int]) -> Tensor:
    """Images (B, C, H, W) of these sizes, from the row of pixels (T, C), each in the corner of a canvas."""
    out = pixels.new_zeros(len(starts), pixels.shape[1], *canvas)
    for image, start, (height, width) in zip(out, starts.tolist(), sizes.tolist()):
        part = pixels[start : start + height * width].view(height, width, -1)
        image[:, :height, :width] = part.permute(2, 0, 1)
    return out


def _gather(pixels: Tensor, starts: Tensor, sizes: Tensor, canvas: tuple[int, int]) -> Tensor:
    """The same without a question to the device, whose work can be recorded."""
    y = torch.arange(canvas[0], device=pixels.device)[:, None]
    x = torch.arange(canvas[1], device=pixels.device)
    out = pixels.new_empty(len(starts), pixels.shape[1], *canvas)
    for k in range(0, len(starts), _GATHERED):
        height, width = (side[:, None, None] for side in sizes[k : k + _GATHERED].unbind(1))
        inside = (y < height) & (x < width)
        place = torch.where(inside, starts[k : k + _GATHERED, None, None] + y * width + x, 0)
        out[k : k + _GATHERED] = (pixels[place] * inside[..., None]).permute(0, 3, 1, 2)
    return out


def kept_sizes(source: Source, target: int, side: int | None = None) -> np.ndarray:
    """(height, width) of an even sample of images as they are kept: for views of `target` pixels, their shorter side
    at most `side`."""
    found = [decode.shrunk_size(int(h), int(w), target) for h, w in source.sizes()]
    return np.array(found if side is None else [decode.side_size(h, w, side) for h, w in found], np.int64)


def fits(
    source: Source, device: torch.device, target: int, resident: bool | None = None, side: int | None = None
) -> bool:
    """Whether images are to be resident: where they fit into 40 % of the free memory, or as `resident` says."""
    need, free = bytes_of(source, target, side), free_memory(device)
    if resident and need > free:
        raise DataError(
            f"{source.name}: {need / 2**30:.1f} GiB of images do not fit into the {free / 2**30:.1f} GiB free on "
            f"{device}; stream them (resident=False)"
        )
    return need <= RESIDENT_SHARE * free if resident is None else resident


def bytes_of(source: Source, target: int, side: int | None = None) -> int:
    """About how many bytes the images take as they are kept for views of `target` pixels."""
    item = 1 if source.dtype == np.uint8 else 4
    return source.channels * item * _pixels_of(kept_sizes(source, target, side), len(source))


def _pixels_of(kept: np.ndarray, total: int) -> int:
    """About how many pixels `total` images have, of which some are kept at these sizes."""
    return int(np.ceil(kept.prod(1).mean() * total))


def views(
    data: str | Source,
    img_size: ImgSize = 224,
    batch_size: int = 256,
    workers: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    resident: bool | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The training views of images exactly as pretraining sees them, without end, for any loop:

        for images, index, epoch in residua.data.views("folder:photos"):
            loss = model(images)

    `images` are float32 (B, C, h, w) on `device` (by default a GPU where there is one), normalised by the mean and
    deviation of the set; `index` (B,) are their numbers in the source, whose labels are `source.labels[index]`, and
    `epoch` (B,) says in which pass over the set each is seen. Batches run across the border between epochs, so each
    has `batch_size` images and each image is seen once an epoch. Order, crops and flips are functions of `seed`.
    `data` is a source or its name, of which the training images are taken; `workers` and `resident` are `Feed`'s.
    """
    source = load(data).train if isinstance(data, str) else data
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if batch_size < 1:
        raise DataError(f"batch_size {batch_size}, expected at least 1 image")
    if min(pair(img_size)) < 1:
        raise DataError(f"img_size {img_size}, expected at least 1 pixel")
    mean, std = (torch.tensor(values, device=where) for values in source.stats())
    crops = Crops(pair(img_size), seed)
    feed = Feed(source, where, img_size=img_size, resident=resident, workers=workers, crops=crops)
    order = Order(len(feed), batch_size, seed)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        try:
            for step, batch in enumerate(feed.iterate(map(order.indices, count()), map(order.epoch_of, count()))):
                epoch = order.epoch_of(step).to(where)
                yield normalize(crops(batch, epoch), mean, std), batch.index, epoch
        finally:
            feed.close()

    return batches()


class _Arriving:
    """A batch of so many images on its way to the device, part by part; on CUDA over a stream of its own, beside the
    computing."""

    def __init__(self, total: int, device: torch.device, stream: torch.cuda.Stream | None, cut: bool) -> None:
        self.total, self.device, self.stream, self.cut = total, device, stream, cut
        self.pixels = torch.empty(0)
        self.index: list[int] = []
        self.sizes: list[tuple[int, int]] = []

    def add(self, slots: Slots, done: Done) -> bool:
        """A task's images, whose slot is given back; whether the batch is complete."""
        memory, at = slots.memory[done.slot, : len(done.numbers)], len(self.index)
        with torch.cuda.stream(self.stream):  # does nothing where the stream is None
            if at == 0:
                self.pixels = torch.empty(self.total, *memory.shape[1:], dtype=memory.dtype, device=self.device)
            room = self.pixels[at : at + len(memory)]
            if self.stream is None:
                room.numpy()[:] = memory.numpy()  # by one thread: torch's would take turns with the workers'
            else:
                room.copy_(memory, non_blocking=slots.pinned)
            left = self.stream.record_event() if self.stream is not None and slots.pinned else None
        slots.give(done.slot, left)
        self.index += done.numbers
        self.sizes += done.sizes
        return len(self.index) == self.total

    def arrived(self) -> Batch:
        """The batch; what is computed next on the current stream waits for it."""
        with torch.cuda.stream(self.stream):
            pixels = self.pixels.movedim(-1, -3)
            if self.cut:
                sizes = torch.tensor([pixels.shape[-2:]]).repeat(self.total, 1)
            else:
                pixels, sizes = pixels.contiguous(), torch.tensor(self.sizes, dtype=torch.int64).view(-1, 2)
            sizes, index = sizes.to(self.device), torch.tensor(self.index, dtype=torch.int64).to(self.device)
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for tensor in (pixels, sizes, index):
                tensor.record_stream(current)
        return Batch(pixels, sizes, index, self.cut)
