"""What turns a user's image into a model's input; it travels with the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from residua.data import decode
from residua.data.augment import Batch, CropMode, center_view, pair, per_channel
from residua.data.errors import BadImage, DataError

_LONGEST = 3  # sides of a view that a side of an image may have
ImageLike = Image.Image | str | Path | np.ndarray


@dataclass(frozen=True)
class Preprocessing:
    """Resize, central crop and normalisation, with the numbers of `augment.center_view`.

        pre = Preprocessing((64, 64), mean=(0.5,) * 3, std=(0.25,) * 3)
        x = pre("cat.jpg")                 # (3, 64, 64)
        x = pre(["cat.jpg", "dog.png"])    # (2, 3, 64, 64)

    Arrays are (H, W) or (H, W, C): uint8, uint16, or floats in [0, 1]. `crop_mode="squash"` stretches images to
    `img_size`, of which it then shows `crop_pct` of both sides.
    """

    img_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    in_chans: int = 3
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    crop_mode: CropMode = "center"

    def __post_init__(self) -> None:
        object.__setattr__(self, "img_size", pair(self.img_size))
        for field in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, field))
            if len(values) != self.in_chans:
                raise DataError(f"{field} has {len(values)} values for {self.in_chans} channels")
            if not all(math.isfinite(value) and (value > 0 or field == "mean") for value in values):
                raise DataError(f"{field} {values}, expected {'positive' if field == 'std' else 'finite'} numbers")
            object.__setattr__(self, field, values)
        if self.crop_mode not in get_args(CropMode):
            raise DataError(f"crop_mode {self.crop_mode!r}, expected one of {', '.join(get_args(CropMode))}")
        if not 0 < self.crop_pct <= 1:
            raise DataError(f"crop_pct {self.crop_pct}, expected a part of the image: above 0, at most 1")

    def __call__(self, image: ImageLike | Sequence[ImageLike]) -> Tensor:
        if isinstance(image, Image.Image | str | Path | np.ndarray):
            return self._batch([image])[0]
        return self._batch(list(image))

    def view(self, batch: Batch) -> Tensor:
        """What the model sees of images on a device, normalised (B, C, h, w)."""
        return center_view(batch, self.img_size, self.mean, self.std, self.crop_pct, self.interpolation, self.crop_mode)

    def denormalize(self, x: Tensor) -> Tensor:
        """Normalised (..., C, h, w) back to [0, 1], clipped, for display."""
        return (x * per_channel(self.std, x) + per_channel(self.mean, x)).clamp(0, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """The reverse of `to_dict`; what is missing has its default."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**known)

    def _batch(self, images: list[ImageLike]) -> Tensor:
        if not images:
            raise DataError("no images given")
        arrays = [self._read(image) for image in images]
        pixels, sizes = to_canvas(arrays, max(self.img_size), squash=self.crop_mode == "squash")
        batch = Batch(pixels, sizes, torch.arange(len(arrays)))
        return self.view(batch)

    def _read(self, image: ImageLike) -> np.ndarray:
        target = max(self.img_size)
        where = str(image) if isinstance(image, str | Path) else type(image).__name__
        try:
            if isinstance(image, Image.Image):
                array = decode.from_pil(image, target)
            elif isinstance(image, np.ndarray):
                array = decode.from_array(image, target)
            else:
                array = decode.decode(Path(image).expanduser(), where, target)
            return decode.conform(array, self.in_chans, array.dtype)
        except BadImage:
            raise
        except (ValueError, OSError) as error:
            raise BadImage(where, error) from error


def canvas_for(sizes: Any, target: int) -> tuple[int, int]:
    """(height, width) that holds images of these sizes, as they are kept for views of `target` pixels: no side is
    longer than three of them."""
    height, width = (int(side) for side in np.max(np.asarray(sizes), axis=0))
    return min(height, _LONGEST * target), min(width, _LONGEST * target)


def most_pixels(target: int) -> int:
    """Of an image as it is kept: its shorter side is no longer than twice the view's, its longer than three times."""
    return 2 * target * _LONGEST * target


def to_canvas(
    images: Sequence[np.ndarray], canvas: tuple[int, int] | int, squash: bool = False
) -> tuple[Tensor, Tensor]:
    """(H, W, C) arrays as one (B, C, H, W) tensor with their sizes (B, 2).

    uint8 stays so if all are; otherwise float32 in [0, 1]. The canvas may be given by the side of the views to come: it
    is then `canvas_for` that. An image larger than the canvas is shrunk until its central square fits, and what still
    sticks out is cut off; with `squash` each side is shrunk to fit instead.
    """
    if isinstance(canvas, int):
        canvas = canvas_for([image.shape[:2] for image in images], canvas)
    images = [fit(image, *canvas, squash) for image in images]
    plain = all(image.dtype == np.uint8 for image in images)
    if plain and all(image.shape[:2] == canvas for image in images):
        stacked = np.stack(images)
    else:
        dtype = np.uint8 if plain else np.float32
        stacked = np.zeros((len(images), *canvas, images[0].shape[2]), dtype)
        for row, image in zip(stacked, images):
            row[: image.shape[0], : image.shape[1]] = image if plain else decode.to_unit(image)
    sizes = torch.tensor([image.shape[:2] for image in images], dtype=torch.int64)
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), sizes


def fit(image: np.ndarray, height: int, width: int, squash: bool = False) -> np.ndarray:
    """An image that is no larger than a canvas, as `to_canvas` lays it there."""
    h, w = image.shape[:2]
    if h <= height and w <= width:
        return image
    if squash:
        return decode.resize(image, min(h, height), min(w, width))
    factor = min(1.0, min(height, width) / min(h, w))
    h, w = max(1, round(h * factor)), max(1, round(w * factor))
    top, left = max(0, h - height) // 2, max(0, w - width) // 2
    return decode.resize(image, h, w)[top : top + height, left : left + width]
