"""From images to features: what is read, of which view, and how it comes back from the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.adapt import Foreign
from residua.adapt.example import evaluating
from residua.data import Batch, Crops, Feed, Preprocessing, Source, train_view
from residua.data.augment import Several, normalize
from residua.data.feed import OnBadImage, Progress
from residua.nn import ViT
from residua.nn.classifier import pool

from .distributed import gather_rows, world
from .featureset import Readout
from .graph import record

Layers = Literal["last", "all"] | Sequence[int]
Reader: TypeAlias = Callable[..., dict[Any, Tensor]]
"""Normalised images (B, C, h, w) -> features (B, D), or (B, ..., D), under any keys. A reader whose attribute
`numbered` is true is called with the images' numbers (B,) too."""
Column: TypeAlias = tuple[str, int]
"""Read-out and layer: the key of one (N, D) matrix of features."""
Packed: TypeAlias = list[tuple[list[Any], Tensor]]
"""Keys whose features have the same shape, with those features, (keys, 1 + views, b, ...)."""

_AHEAD = 2  # batches on their way to the host while the next is computed
FEW = 512  # images that are decoded about as soon as workers would have started
_MIN_TO_RECORD = 16  # batches that repay recording the work on one


def prefix_of(encoder: ViT | Foreign, layer: int) -> int:
    """Tokens of a layer before those of its patches."""
    last = encoder.num_prefix_tokens
    return last if layer == encoder.depth - 1 else getattr(encoder, "inner_prefix_tokens", last)


def read_layers(
    encoder: ViT | Foreign, images: Tensor, layers: Sequence[int], take: Callable[[int, Tensor], None]
) -> None:
    """Run an encoder and hand over the tokens (B, T, D) of some layers, the last one after the final norm."""
    last = encoder.depth - 1
    inner = {f"blocks.{i}.mlp": i for i in layers if i != last}

    def tap(name: str, stream: Tensor) -> None:
        if name in inner:
            if len(stream) != len(images):
                raise ValueError(
                    f"layer {inner[name]} gives {len(stream)} pieces of {len(images)} images (windows or the like) "
                    "and cannot be read image by image: choose other layers"
                )
            take(inner[name], stream)

    tokens = encoder.forward_features(images, tap=tap)
    if last in layers:
        take(last, tokens)


@dataclass(frozen=True)
class EncoderReader:
    """Pooled tokens of some layers of an encoder: keyed by layer, or by `Column` where read-outs come in a tuple."""

    encoder: ViT | Foreign
    layers: Sequence[int]
    readout: Readout | tuple[Readout, ...]

    def __post_init__(self) -> None:
        if "cls" not in dict(self.columns):
            return
        if not self.encoder.num_prefix_tokens:
            raise ValueError("the model has no class token: read tokens or patches instead")
        if not all(prefix_of(self.encoder, layer) for layer in self.layers):
            raise ValueError(
                "the model's class token joins after its blocks: read cls of the last layer alone, or tokens or patches"
            )

    @property
    def columns(self) -> list[Column]:
        readouts = (self.readout,) if isinstance(self.readout, str) else self.readout
        return [(readout, i) for readout in readouts for i in self.layers]

    def __call__(self, images: Tensor) -> dict[Any, Tensor]:
        out: dict[Any, Tensor] = {}
        read_layers(self.encoder, images, self.layers, partial(self._pool, out))
        return out

    def _pool(self, out: dict[Any, Tensor], layer: int, tokens: Tensor) -> None:
        if isinstance(self.readout, str):
            out[layer] = pool(tokens, self.readout, prefix_of(self.encoder, layer))
            return
        for readout in self.readout:
            out[readout, layer] = pool(tokens, readout, prefix_of(self.encoder, layer))


@dataclass(frozen=True)
class PixelReader:
    """The images themselves, no side longer than `size`, flattened; keyed by -1."""

    size: int

    def __call__(self, images: Tensor) -> dict[Any, Tensor]:
        side = max(images.shape[2:])
        if side > self.size:
            shape = [max(1, round(n * self.size / side)) for n in images.shape[2:]]
            images = F.interpolate(images, size=shape, mode="bilinear", antialias=True)
        return {-1: images.flatten(1)}


@dataclass(frozen=True)
class View:
    """How a batch becomes the images that are read."""

    preprocessing: Preprocessing
    batch_size: int = 256
    views: int = 0
    seed: int = 0
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 image, got {self.batch_size}")

    def crops(self) -> Several:
        """The centre view and the random ones, made where images are decoded."""
        p = self.preprocessing
        center = Crops(
            p.img_size, flip=False, interpolation=p.interpolation, central=True, crop_pct=p.crop_pct,
            crop_mode=p.crop_mode,
        )  # fmt: skip
        random = Crops(p.img_size, self.seed, interpolation=p.interpolation)
        return Several(((center, 0), *((random, number) for number in range(self.views))))

    def images(self, batch: Batch, full: bool = False) -> list[Tensor]:
        """What the model sees of a batch, normalised: (B, C, h, w) of the centre view, and of each random one."""
        if not batch.cut:
            return [self.center(batch, full)] + [self.random(batch, number) for number in range(self.views)]
        p = self.preprocessing
        views = batch.pixels.float() / 255 if batch.pixels.dtype == torch.uint8 else batch.pixels
        return [normalize(views[:, k], p.mean, p.std) for k in range(views.shape[1])]

    def center(self, batch: Batch, full: bool = False) -> Tensor:
        """What the model sees; `full`: every image fills its canvas, which may be all there is to do."""
        p = self.preprocessing
        if full and p.crop_pct == 1.0 and batch.pixels.shape[2:] == p.img_size:
            pixels = batch.pixels.float()
            return normalize(pixels / 255 if batch.pixels.dtype == torch.uint8 else pixels, p.mean, p.std)
        return p.view(batch)

    def random(self, batch: Batch, number: int, scale: tuple[float, float] = (0.2, 1.0)) -> Tensor:
        p = self.preprocessing
        return train_view(
            batch, p.img_size, p.mean, p.std, seed=self.seed, epoch=number, scale=scale, interpolation=p.interpolation
        )


def open_feed(
    source: Source,
    device: torch.device,
    view: View,
    on_bad_image: OnBadImage = "error",
    progress: Progress | None = None,
    again: bool = False,
    whole: bool = False,
) -> Feed:
    """The feed that serves a view. Images pass by, their views made by the workers that decode them while others are
    computed; those in memory, or that are read `again`, are kept on the device where they fit. `whole` images are for
    views that are made anew each time."""
    p = view.preprocessing
    once = not (again or source.in_memory)
    return Feed(
        source, device, img_size=p.img_size, resident=False if once else None, on_bad_image=on_bad_image,
        workers=0 if len(source) < FEW else None, progress=progress, squash=p.crop_mode == "squash",
        crops=None if whole else view.crops(),
    )  # fmt: skip


def read(
    feed: Feed, reader: Reader, view: View, batches: Sequence[Tensor]
) -> Iterator[tuple[Tensor, dict[Any, Tensor]]]:
    """Per batch: image numbers (b,) and features (1 + views, b, D) on the CPU, centre view first.

    An unreadable image that the feed replaced by another is left out. On CUDA two batches are on their way to the
    host while the next is computed; what the caller does with one costs the device nothing until it falls that far
    behind. Batches of one shape, of a resident feed or of one that cuts, are computed as replays of a CUDA graph.
    """
    cuda = feed.device.type == "cuda"
    alike = feed.resident or feed.cuts
    compute = _Replayed(reader, view, feed.full) if cuda and alike and len(batches) >= _MIN_TO_RECORD else None
    stream = torch.cuda.Stream(feed.device) if cuda else None
    waiting: deque[_Fetch] = deque()
    done, total = 0, sum(map(len, batches))
    for wanted, batch in zip(batches, feed.iterate(batches)):
        packed = _read_batch(batch, reader, view, feed.full) if compute is None else compute(batch)
        waiting.append(_Fetch(wanted, batch.index, packed, stream))
        done += len(wanted)
        if feed.progress is not None:
            feed.progress("reading images", done, total)
        if len(waiting) > (_AHEAD if cuda else 0):
            yield waiting.popleft().arrived()
    while waiting:
        yield waiting.popleft().arrived()


def apply(reader: Reader, images: Tensor, index: Tensor) -> dict[Any, Tensor]:
    """What a reader, numbered or not, says of images."""
    return reader(images, index) if getattr(reader, "numbered", False) else reader(images)


@torch.inference_mode()
def _read_batch(batch: Batch, reader: Reader, view: View, full: bool) -> Packed:
    images = view.images(batch, full)
    # a recorded pass may not keep the half precision copies of the weights, so none does
    with torch.autocast(batch.pixels.device.type, torch.bfloat16, enabled=view.bf16, cache_enabled=False):
        parts = [apply(reader, x, batch.index) for x in images]
    alike: dict[torch.Size, list[Any]] = {}
    for key, x in parts[0].items():
        alike.setdefault(x.shape, []).append(key)
    packed = [(keys, torch.stack([p[key].float() for key in keys for p in parts])) for keys in alike.values()]
    return [(keys, x.unflatten(0, (len(keys), len(parts)))) for keys, x in packed]


class _Replayed:
    """`_read_batch` as replays of a CUDA graph for batches of the first one's shape; others are read as they are."""

    def __init__(self, reader: Reader, view: View, full: bool) -> None:
        self.reader, self.view, self.full = reader, view, full
        self.input: Batch | None = None
        self.replay: Callable[[], None] = lambda: None
        self.output: Packed = []

    def __call__(self, batch: Batch) -> Packed:
        if self.input is None:
            self.input = Batch(batch.pixels.clone(), batch.sizes.clone(), batch.index.clone(), batch.cut)
            self.replay, self.output = record(self._read, batch.pixels.device)
        if batch.pixels.shape != self.input.pixels.shape:
            return _read_batch(batch, self.reader, self.view, self.full)
        for name in ("pixels", "sizes", "index"):
            getattr(self.input, name).copy_(getattr(batch, name))
        self.replay()
        return [(keys, x.clone()) for keys, x in self.output]

    def _read(self) -> Packed:
        assert self.input is not None
        return _read_batch(self.input, self.reader, self.view, self.full)


class _Fetch:
    """Features of a batch on their way to the host; on CUDA over a stream of their own into pinned memory."""

    def __init__(self, wanted: Tensor, index: Tensor, packed: Packed, stream: torch.cuda.Stream | None) -> None:
        self.wanted, self.done = wanted, None
        self.keys = [keys for keys, _ in packed]
        tensors = [index, *(x for _, x in packed)]
        if stream is None:
            self.tensors = [x.cpu() for x in tensors]
            return
        stream.wait_stream(torch.cuda.current_stream(index.device))
        with torch.cuda.stream(stream):
            pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            self.tensors = [host.copy_(x, non_blocking=True) for host, x in zip(pinned, tensors)]
        for x in tensors:
            x.record_stream(stream)
        self.done = stream.record_event()

    def arrived(self) -> tuple[Tensor, dict[Any, Tensor]]:
        if self.done is not None:
            self.done.synchronize()
        index, *packed = self.tensors
        features = {key: x for keys, part in zip(self.keys, packed) for key, x in zip(keys, part)}
        keep = index == self.wanted
        if bool(keep.all()):
            return index, features
        return index[keep], {key: x[:, keep] for key, x in features.items()}


class Store(Protocol):
    """Where features go as they are read."""

    def add(self, rows: dict[Any, Tensor]) -> None:
        """Features (1 + views, b, D) of the next b images."""


class Memory:
    """Rows side by side in memory, which is taken once."""

    def __init__(self, count: int) -> None:
        self.count, self.filled = count, 0
        self.features: dict[Any, Tensor] = {}

    def add(self, rows: dict[Any, Tensor]) -> None:
        end = self.filled
        for key, x in rows.items():
            if key not in self.features:
                self.features[key] = torch.empty(x.shape[0], self.count, *x.shape[2:])
            end = self.filled + x.shape[1]
            self.features[key][:, self.filled : end] = x
        self.filled = end

    def all(self) -> dict[Any, Tensor]:
        return {key: x[:, : self.filled] for key, x in self.features.items()}


def pass_over(feed: Feed, reader: Reader, view: View, store: Store) -> Tensor:
    """Read this process's share of the images into a store; their numbers (n,).

    Process r takes batches r, r + world, ...: the batches are those of a single process, so are the numbers.
    """
    rank, size = world()
    batches = torch.arange(len(feed)).split(view.batch_size)
    numbers: list[Tensor] = []
    with undisturbed():
        for index, features in read(feed, reader, view, batches[rank::size] or batches[:1]):
            store.add(features)
            numbers.append(index)
    return torch.cat(numbers)


def in_rounds(feed: Feed, reader: Reader, view: View) -> Iterator[tuple[Tensor, dict[Any, Tensor]]]:
    """Image numbers (n,) in order and features (1 + views, n, D) of a batch of each process, as all of them have it.

    Nothing is kept: what is read may be larger than memory.
    """
    rank, size = world()
    batches = torch.arange(len(feed)).split(view.batch_size)
    if size == 1:
        yield from read(feed, reader, view, batches)
        return
    rounds = [batches[k : k + size] for k in range(0, len(batches), size)]
    own = [part[min(rank, len(part) - 1)] for part in rounds]  # where there is none left, the last one's again
    for index, features in read(feed, reader, view, own):
        number, whole = index, {}
        for key, mine in features.items():
            number, whole[key] = gather_rows(index, mine)
        yield number, whole


def collect_all(feed: Feed, reader: Reader, view: View) -> tuple[Tensor, dict[Any, Tensor]]:
    """Image numbers (N,) in order and features (1 + views, N, D), read by all processes together."""
    store = Memory(len(feed))
    index = pass_over(feed, reader, view, store)
    whole: dict[Any, Tensor] = {}
    number = index
    for key, mine in store.all().items():
        number, whole[key] = gather_rows(index, mine)
    return number, whole


@contextmanager
def frozen(model: nn.Module, device: str | torch.device | None = None) -> Iterator[torch.device]:
    """The model in evaluation mode on `device` (its own by default), put back as it was afterwards."""
    home = next((x.device for x in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    where = home if device is None else torch.device(device)
    with evaluating(model):
        try:
            model.to(where)
            yield where
        finally:
            model.to(home)


@contextmanager
def undisturbed(seed: int | None = None) -> Iterator[None]:
    """Leaves the global random state as it was; `seed` sets that of the CPU inside."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed devices, later
        yield


def resolve_layers(layers: Layers, depth: int) -> list[int]:
    """Block indices in order, from "last", "all" or numbers."""
    if layers == "last":
        return [depth - 1]
    if layers == "all":
        return list(range(depth))
    if isinstance(layers, str) or not layers:
        raise ValueError(f'layers must be "last", "all" or block indices, got {layers!r}')
    wrong = [i for i in layers if not -depth <= i < depth]
    if wrong:
        raise ValueError(f"layers {wrong} do not exist: the encoder has {depth} blocks, 0 to {depth - 1}")
    return sorted({i % depth for i in layers})


def check_readout(readout: str) -> Any:
    if readout not in get_args(Readout):
        raise ValueError(f"unknown readout {readout!r}; there are {', '.join(get_args(Readout))}")
    return readout


def check_readouts(readout: str | Sequence[str]) -> tuple[Any, ...]:
    """One or several read-outs as a tuple, each once, in the order given."""
    given = (readout,) if isinstance(readout, str) else tuple(dict.fromkeys(readout))
    if not given:
        raise ValueError(f"give at least one readout of {', '.join(get_args(Readout))}")
    return tuple(check_readout(name) for name in given)
