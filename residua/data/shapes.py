"""Procedural images: one textured shape on a textured background. The class is the shape and nothing else.

Position, size, rotation, colours and textures are random, areas are equal, and foreground and background
colours have the same distribution: nearest neighbours in pixel space know little of the class. Image `i` is a
pure function of (seed, split, i).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from residua.data import decode
from residua.data.errors import DataError
from residua.data.rng import uniform
from residua.data.source import Source, Splits, fingerprint_of

CLASSES = ("disc", "triangle", "square", "star", "cross", "ring", "crescent", "bar", "heart", "arrow")
_BLOCK = 256  # images generated at once
_CACHED_BLOCKS = 64
_WAVES = 3  # plane waves per texture
_LANES = 5 + 4 * 3 + 2 * (4 * _WAVES + 1)  # random numbers per image


_Draw = Callable[[float, float], np.ndarray]  # one uniform number per image, (B, 1, 1)


class _Block(NamedTuple):
    images: np.ndarray  # (B, S, S, 3) uint8
    masks: np.ndarray  # (B, S, S) uint8


class ShapesSource(Source):
    """`n` images of `size` pixels with the first `classes` of `CLASSES`."""

    def __init__(self, split: str, n: int, size: int, classes: int, seed: int) -> None:
        self._n, self._size, self._seed = n, size, seed
        stream = uniform(seed, 0, torch.arange(n), 1, f"shapes/{split}/class")
        labels = (stream[:, 0].numpy() * classes).astype(np.int64)
        super().__init__("shapes", split, channels=3, classes=CLASSES[:classes], labels=labels)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        return self._n

    def read(self, i: int, target: int | None = None, data: bytes | None = None) -> np.ndarray:
        return decode.shrink(self._block(i // _BLOCK).images[i % _BLOCK], target)

    def mask(self, i: int) -> np.ndarray | None:
        return self._block(i // _BLOCK).masks[i % _BLOCK]

    def size(self, i: int) -> tuple[int, int]:
        return self._size, self._size

    def sizes(self) -> np.ndarray:
        return np.array([[self._size, self._size]], np.int64)

    @property
    def in_memory(self) -> bool:
        return True

    def array(self) -> np.ndarray | None:
        return np.concatenate([self._block(b).images for b in range(-(-self._n // _BLOCK))])

    def fingerprint(self) -> str:
        assert self.classes is not None
        return fingerprint_of("shapes", self.split, self._n, self._size, len(self.classes), self._seed)

    def _block(self, b: int) -> _Block:
        if b not in self._blocks:
            index = np.arange(b * _BLOCK, min((b + 1) * _BLOCK, self._n))
            assert self.labels is not None
            self._blocks[b] = _render(self.labels[index], index, self._size, self._seed, self.split)
            if len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[b]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_blocks": OrderedDict()}


def load_shapes(*, n: int = 4096, size: int = 32, classes: int = 8, test: int | None = None, seed: int = 0) -> Splits:
    """Train and test splits; the test split has `n // 4` images unless `test` says otherwise."""
    test = max(1, n // 4) if test is None else test
    if n < 1 or test < 1:
        raise DataError(f"shapes: n={n}, test={test}; both must be at least 1")
    if size < 8:
        raise DataError(f"shapes: size={size}; shapes need at least 8 pixels")
    if not 2 <= classes <= len(CLASSES):
        raise DataError(f"shapes: classes={classes}; there are 2 to {len(CLASSES)}: {', '.join(CLASSES)}")
    return Splits(
        "shapes",
        ShapesSource("train", n, size, classes, seed),
        ShapesSource("test", test, size, classes, seed),
    )


def _render(labels: np.ndarray, index: np.ndarray, size: int, seed: int, split: str) -> _Block:
    u = uniform(seed, 0, torch.from_numpy(index), _LANES, f"shapes/{split}/look").numpy()
    take = iter(np.split(u.T, _LANES))

    def draw(low: float, high: float) -> np.ndarray:
        return (low + (high - low) * next(take)[0])[:, None, None]

    axis = (np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1
    x, y = axis[None, None, :], axis[None, :, None]

    radius, angle = draw(0.45, 0.75), draw(-0.6, 0.6)
    room = 1.0 - radius  # how far the centre may move
    cx, cy = draw(-1, 1) * room, draw(-1, 1) * room
    edge = draw(0.0, 0.35)  # lighting across the picture
    cos, sin = np.cos(angle) / radius, np.sin(angle) / radius
    across, along = cos * (x - cx) + sin * (y - cy), -sin * (x - cx) + cos * (y - cy)

    inside = np.empty((len(index), size, size), np.float32)
    for label in np.unique(labels):
        rows = labels == label
        inside[rows] = _distance(CLASSES[label], across[rows], along[rows])
    cover = np.clip(inside * radius * (size / 2) + 0.5, 0, 1)  # antialiased edge, one pixel wide

    ground = np.concatenate([draw(0, 1) for _ in range(3)], axis=2)  # (B, 1, 3)
    shift = np.concatenate([draw(0.3, 0.7) for _ in range(3)], axis=2)
    figure = (ground + shift) % 1.0  # same distribution as the ground, never near it
    swing = [np.concatenate([draw(-0.2, 0.2) for _ in range(3)], axis=2) for _ in range(2)]
    waves = [_texture(draw, x, y) for _ in range(2)]
    layers = [
        colour[:, :, None, :] + wave[..., None] * s[:, :, None, :]
        for colour, wave, s in zip((ground, figure), waves, swing)
    ]
    picture = layers[0] + cover[..., None] * (layers[1] - layers[0])
    picture *= 1 + (edge * (x + y) / 2)[..., None]
    images = np.clip(picture * 255 + 0.5, 0, 255).astype(np.uint8)
    masks = np.where(cover > 0.5, labels[:, None, None] + 1, 0).astype(np.uint8)
    return _Block(images, masks)


def _texture(draw: _Draw, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sum of plane waves, from smooth clouds to hard stripes and checks: (B, S, S) in [-1, 1]."""
    total: np.ndarray | float = 0.0
    for _ in range(_WAVES):
        frequency, angle, phase, weight = draw(3, 14), draw(0, np.pi), draw(0, 2 * np.pi), draw(0.2, 1)
        phase_x = frequency * np.cos(angle) * x + phase
        total = total + weight * np.sin(phase_x + frequency * np.sin(angle) * y)
    return np.clip(total * draw(0.4, 3), -1, 1)


def _distance(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Signed distance (positive inside, near the edge) of a shape of area ~1.6 about the origin."""
    r = np.hypot(x, y)
    match shape:
        case "disc":
            return 0.71 - r
        case "ring":
            return 0.18 - np.abs(r - 0.72)
        case "square":
            return 0.63 - np.maximum(np.abs(x), np.abs(y))
        case "triangle":
            return 0.55 - np.maximum(-y, np.abs(x) * 0.8660254 + y * 0.5)
        case "bar":
            return np.minimum(0.36 - np.abs(x), 1.1 - np.abs(y))
        case "cross":
            wide, tall = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
            return np.minimum(0.95 - wide, 0.25 - tall)
        case "star":
            return _star(x, y)
        case "crescent":
            return np.minimum(0.95 - r, np.hypot(x - 0.55, y) - 0.75)
        case "heart":
            lobes = 0.44 - np.hypot(np.abs(x) - 0.38, y - 0.3)
            point = 0.5 - (np.abs(x) + np.abs(y + 0.08)) * 0.7071068
            return np.maximum(lobes, point)
        case "arrow":
            head = np.minimum(y, (1.0 - y) * 0.7071068 - np.abs(x) * 0.7071068)
            shaft = np.minimum(0.3 - np.abs(x), np.minimum(y + 1.0, 0.1 - y))
            return np.maximum(head, shaft)
    raise AssertionError(shape)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five-pointed star: the sector is folded onto one edge, from a tip to a notch."""
    sector = np.pi / 5
    tip, notch = 1.15, 0.47
    theta = np.abs((np.arctan2(x, y) + sector) % (2 * sector) - sector)
    r = np.hypot(x, y)
    u, v = r * np.cos(theta), r * np.sin(theta)
    edge_u, edge_v = notch * np.cos(sector) - tip, notch * np.sin(sector)
    return -((u - tip) * -edge_v + v * edge_u) / -np.hypot(edge_u, edge_v)
