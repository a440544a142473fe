"""How a batch reaches the device: from a resident copy of the data, or streamed from decoding workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, repeat
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from residua.data import decode
from residua.data.augment import Batch, Crops, ImgSize, normalize, pair
from residua.data.catalog import load
from residua.data.errors import BadImage, DataError
from residua.data.order import Order
from residua.data.preprocess import canvas_for, fit, to_canvas
from residua.data.source import Source
from residua.room import cores, free_memory

OnBadImage = Literal["error", "skip"]
Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is (0: not known)."""
_Decoded = tuple[Tensor, Tensor, Tensor, list[int]]  # pixels, sizes, index, numbers of unreadable images

RESIDENT_SHARE = 0.4  # of the device's free memory that images may take
_WAY_OUT = "--on-bad-image skip, in Python on_bad_image='skip', leaves such images out"
_AT_ONCE = 32  # images that a worker decodes at a time
_BLOCK = 256  # the same, when filling a resident feed
_AHEAD = 2  # batches that are ready or being decoded, at least
_MIN_FOR_WORKERS = 4096  # fewer images are decoded in this process


class Feed:
    """Batches of `source` on `device`.

    Images live in device memory when they fit into 40 % of what is free there (`resident=None`; True and
    False force it), as uint8, or float32 in [0, 1] where the source has 16 bits or floats. Otherwise
    `workers` persistent processes decode them; by default as many as there are cores for this process, at most 16.
    With `crops` they make the training views as well and hand over those alone (`Batch.cut`), without them whole
    images. Two tasks of 32 images a worker wait in memory, or two batches where that is more.

    Either way an image much larger than `img_size` is shrunk when decoded: to at most twice `img_size` on its shorter
    and three times on its longer side. Where that would make the shorter one smaller than `img_size`, the ends of the
    longer are cut off instead; `squash` is for views that stretch images, and narrows the longer side alone.

    `on_bad_image="skip"` puts the next readable image, with its own number, in the place of an unreadable one.
    `skipped` counts these, and a warning names some: of a resident feed once it is filled, else when it is closed.
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
        workers: int | None = None,
        on_bad_image: OnBadImage = "error",
        progress: Progress | None = None,
        squash: bool = False,
        crops: Crops | None = None,
    ) -> None:
        if on_bad_image not in ("error", "skip"):
            raise DataError(f"on_bad_image {on_bad_image!r}, expected 'error' or 'skip'")
        if len(source) == 0:
            raise DataError(f"{source.name}: no images to feed")
        self.source, self.device = source, torch.device(device)
        self.workers = min(16, cores()) if workers is None else workers
        self.on_bad_image, self.squash, self.crops, self.progress = on_bad_image, squash, crops, progress
        self.wait_seconds = 0.0
        self._bad: set[int] = set()
        self._target = max(pair(img_size))
        self.canvas = canvas_of(source, self._target)
        self._decoder = _Decoder(source, self._target, self.canvas, on_bad_image, squash, crops)
        self._loader: DataLoader[Any] | None = None
        self._pixels: Tensor | None = None
        self._sizes: Tensor | None = None
        self._stored: tuple[Tensor, Tensor] | None = None
        """Where some images are unreadable: for every number the row of the image used, for every row its number."""
        self.full = False
        """Whether every image fills the canvas; known of a resident feed."""
        self.resident = self._fits(resident)
        if self.resident:
            self._fill()
            assert self._sizes is not None
            self.full = bool((self._sizes == self._sizes.new_tensor(self.canvas)).all())

    def __len__(self) -> int:
        return len(self.source)

    @property
    def skipped(self) -> int:
        """Unreadable images met so far."""
        return len(self._bad)

    @property
    def cuts(self) -> bool:
        """Whether batches come as training views: of a resident feed they are images, which the device crops."""
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
        return Batch(self._pixels[row], self._sizes[row], index)

    def decoding_seconds(self, index: Tensor) -> float:
        """About how long decoding these images (B,) takes the workers, from 32 of them; 0 of a resident feed."""
        if self.resident:
            return 0.0
        some = index[:32].tolist()
        start = time.perf_counter()
        self._decoder._decode([(i, 0) for i in some])
        return (time.perf_counter() - start) * len(index) / len(some) / max(1, self.workers)

    def close(self) -> None:
        """End the workers and let go of the images."""
        if not self.resident:
            self.source.tell_skipped(self._bad)
        self._loader = self._pixels = self._sizes = self._stored = None

    def _iterate_resident(self, index_batches: Iterable[Tensor]) -> Iterator[Batch]:
        for index in index_batches:
            yield self.gather(index.to(self.device, non_blocking=True))

    def _iterate_stream(self, index_batches: Iterable[Tensor], epochs: Iterable[Tensor | int]) -> Iterator[Batch]:
        tasks = _Tasks(zip(index_batches, epochs))
        if self._loader is None:
            ahead = tasks.count_first() * _AHEAD
            self._loader = _loader(self._decoder, self.workers, ahead, pin=self.device.type == "cuda")
        sampler = self._loader.batch_sampler
        assert isinstance(sampler, _Sampler)
        sampler.tasks = tasks
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        waiting: _Copy | None = None
        parts: list[_Decoded] = []
        for part in self._timed(_decoded(self._loader)):
            self._bad.update(part[3])
            parts.append(part)
            if len(parts) == tasks.counts[0]:
                tasks.counts.popleft()
                copy, waiting, parts = waiting, _Copy(parts, self.device, stream, self.cuts), []
                if copy is not None:
                    yield copy.arrived()
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

    def _fits(self, resident: bool | None) -> bool:
        height, width = self.canvas
        item = 1 if self.source.dtype == np.uint8 else 4
        need = len(self.source) * self.source.channels * height * width * item
        free = free_memory(self.device)
        if resident and need > free:
            raise DataError(
                f"{self.source.name}: {need / 2**30:.1f} GiB of images do not fit into the "
                f"{free / 2**30:.1f} GiB free on {self.device}; stream them (resident=False)"
            )
        return need <= RESIDENT_SHARE * free if resident is None else resident

    def _fill(self) -> None:
        whole = self.source.array()
        if whole is not None and whole.shape[1:3] == self.canvas:
            whole = whole if whole.dtype == np.uint8 else decode.to_unit(whole)
            self._pixels = torch.from_numpy(whole).permute(0, 3, 1, 2).contiguous().to(self.device)
            self._sizes = torch.tensor([self.canvas], device=self.device).repeat(len(whole), 1)
            return
        count = len(self.source)
        dtype = torch.uint8 if self.source.dtype == np.uint8 else torch.float32
        pixels = torch.zeros(count, self.source.channels, *self.canvas, dtype=dtype, device=self.device)
        sizes = torch.zeros(count, 2, dtype=torch.int64, device=self.device)
        blocks = torch.arange(count).split(_BLOCK)
        workers = self.workers if count >= _MIN_FOR_WORKERS else 0
        filled = 0
        on_bad = "drop" if self.on_bad_image == "skip" else "error"
        decoder = _Decoder(self.source, self._target, self.canvas, on_bad, self.squash)
        loader = _loader(decoder, workers, tasks=([(i, 0) for i in block.tolist()] for block in blocks))
        for block_pixels, block_sizes, _, bad in _decoded(loader):
            self._bad.update(bad)
            pixels[filled : filled + len(block_sizes)] = block_pixels.to(self.device)
            sizes[filled : filled + len(block_sizes)] = block_sizes.to(self.device)
            filled += len(block_sizes)
            if self.progress is not None:
                self.progress("decoding images", filled + len(self._bad), count)
        if filled == 0:
            raise DataError(f"{self.source.name}: none of its {count} images can be read")
        if self._bad:
            numbers = torch.tensor([i for i in range(count) if i not in self._bad])
            rows = torch.searchsorted(numbers, torch.arange(count)) % filled  # after the last comes the first
            self._stored = rows.to(self.device), numbers.to(self.device)
            self.source.tell_skipped(self._bad)
        self._pixels, self._sizes = pixels[:filled], sizes[:filled]


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


_Task = list[tuple[int, int]]
"""Numbers of images, and the epoch in which each is seen."""


class _Tasks:
    """Batches as tasks of 32 images, drawn as they are needed; `counts` tells how many make up each batch drawn."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor | int]]) -> None:
        self.batches = iter(batches)
        self.counts: deque[int] = deque()

    def count_first(self) -> int:
        """Tasks of the first batch."""
        first = next(self.batches, None)
        if first is None:
            return 1
        self.batches = chain([first], self.batches)
        return -(-len(first[0]) // _AT_ONCE)

    def __iter__(self) -> Iterator[_Task]:
        for index, epoch in self.batches:
            epochs = epoch.tolist() if isinstance(epoch, Tensor) else [epoch] * len(index)
            pairs = list(zip(index.tolist(), epochs))
            parts = [pairs[k : k + _AT_ONCE] for k in range(0, len(pairs), _AT_ONCE)] or [[]]
            self.counts.append(len(parts))
            yield from parts


class _Sampler:
    """A batch sampler whose tasks are set before each pass, so that workers persist between passes."""

    def __init__(self, tasks: Iterable[_Task] = ()) -> None:
        self.tasks = tasks

    def __iter__(self) -> Iterator[_Task]:
        return iter(self.tasks)


class _Decoder(Dataset[Any]):
    """Decodes the images of a task, in the workers, and makes views of them where there are `crops`."""

    def __init__(
        self,
        source: Source,
        target: int,
        canvas: tuple[int, int],
        on_bad: str,
        squash: bool,
        crops: Crops | None = None,
    ) -> None:
        self.source, self.target, self.canvas, self.on_bad, self.squash = source, target, canvas, on_bad, squash
        self.crops = crops
        self._unreadable: set[int] = set()  # so that a long row of them is not tried anew for each

    def __getitems__(self, task: _Task) -> _Decoded | DataError:
        try:
            return self._decode(task)
        except DataError as error:  # handed over as a value: raised in a worker it would lose its type
            return error

    def _decode(self, task: _Task) -> _Decoded:
        images, used, epochs, bad = [], [], [], []
        with ThreadPoolExecutor(1) as reader:  # bytes are read while images before them are decoded
            encoded = reader.map(self.source.fetch, (i for i, _ in task))
            for (i, epoch), data in zip(task, encoded):
                image, j = None, i
                try:
                    image = self.source.read(i, self.target) if data is None else self.source.read(i, self.target, data)
                except BadImage as error:
                    if self.on_bad == "error":
                        raise BadImage(error.where, f"{error.why} ({_WAY_OUT})") from error
                    bad.append(i)
                    if self.on_bad == "skip":
                        image, j = self._next_readable(i, bad)
                if image is not None:
                    images.append(image)
                    used.append(j)
                    epochs.append(epoch)
        if not images:
            shape = (0, self.source.channels, *self.canvas)
            return torch.zeros(shape, dtype=torch.uint8), torch.zeros(0, 2).long(), torch.zeros(0).long(), bad
        index = torch.tensor(used, dtype=torch.int64)
        if self.crops is None:
            pixels, sizes = to_canvas(images, self.canvas, self.squash)
            return pixels, sizes, index, bad
        pixels = self._views(self.crops, images, index, torch.tensor(epochs, dtype=torch.int64))
        return pixels, torch.tensor([pixels.shape[1:3]]).repeat(len(index), 1), index, bad

    def _views(self, crops: Crops, images: list[np.ndarray], index: Tensor, epochs: Tensor) -> Tensor:
        """Training views, channels last (B, h, w, C), of images as a resident feed has them."""
        images = [fit(image, *self.canvas, self.squash) for image in images]
        images = [image if image.dtype == np.uint8 else decode.to_unit(image) for image in images]
        sizes = torch.tensor([image.shape[:2] for image in images])
        pixels = (decode.as_tensor(image).permute(2, 0, 1) for image in images)
        return crops.cut(pixels, index, epochs, sizes).permute(0, 2, 3, 1)

    def _next_readable(self, i: int, bad: list[int]) -> tuple[np.ndarray, int]:
        count = len(self.source)
        for j in (k % count for k in range(i + 1, i + count)):
            if j in self._unreadable:
                continue
            try:
                return self.source.read(j, self.target), j
            except BadImage:
                bad.append(j)
                self._unreadable.add(j)
        raise DataError(f"{self.source.name}: none of its {count} images can be read")


def canvas_of(source: Source, target: int) -> tuple[int, int]:
    """(height, width) that holds the probed images after shrinking, within bounds."""
    return canvas_for([decode.shrunk_size(int(h), int(w), target) for h, w in source.sizes()], target)


def _loader(
    decoder: _Decoder, workers: int, ahead: int = 0, *, pin: bool = False, tasks: Iterable[_Task] = ()
) -> DataLoader[Any]:
    """Workers that decode tasks, at least `ahead` of them before they are asked for."""
    return DataLoader(
        decoder,
        batch_sampler=_Sampler(tasks),  # type: ignore[arg-type]
        collate_fn=_as_is,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin,
        generator=torch.Generator(),  # else each pass would draw from the global one
        prefetch_factor=max(2, -(-ahead // workers)) if workers else None,
        worker_init_fn=_one_thread if workers else None,
    )


def _decoded(loader: Iterable[_Decoded | DataError]) -> Iterator[_Decoded]:
    for item in loader:
        if isinstance(item, DataError):
            raise item
        yield item


def _as_is(batch: Any) -> Any:
    return batch


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


class _Copy:
    """A batch on its way to the device; on CUDA over a stream of its own, beside the computing."""

    def __init__(
        self, parts: list[_Decoded], device: torch.device, stream: torch.cuda.Stream | None, cut: bool
    ) -> None:
        with torch.cuda.stream(stream):  # does nothing where the stream is None
            there = [[x.to(device, non_blocking=stream is not None) for x in part[:3]] for part in parts]
            pixels, sizes, index = there[0] if len(there) == 1 else (torch.cat(alike) for alike in zip(*there))
            self.batch = Batch(pixels.permute(0, 3, 1, 2) if cut else pixels, sizes, index, cut)
        self.done = None if stream is None else stream.record_event()

    def arrived(self) -> Batch:
        """The batch; what is computed next on the current stream waits for it."""
        if self.done is not None:
            current = torch.cuda.current_stream(self.batch.pixels.device)
            current.wait_event(self.done)
            for tensor in (self.batch.pixels, self.batch.sizes, self.batch.index):
                tensor.record_stream(current)
        return self.batch
