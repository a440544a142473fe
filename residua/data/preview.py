"""A page of images as they are, or as training sees them, for `residua data preview`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from residua.data.augment import Batch, ImgSize, center_view, train_view
from residua.data.decode import shrunk_size
from residua.data.errors import DataError
from residua.data.feed import OnBadImage
from residua.data.preprocess import to_canvas
from residua.data.source import Source, Splits, evenly
from residua.disk import replacing

_GAP = 2  # pixels between images


def preview(
    splits: Splits,
    path: str | Path,
    *,
    n: int = 64,
    img_size: ImgSize | None = None,
    augmented: bool = False,
    seed: int = 0,
    on_bad_image: OnBadImage = "error",
) -> Path:
    """Write a PNG grid of `n` training images, spread over the set; `augmented` shows random crops.

    `on_bad_image="skip"` leaves out those that cannot be read.
    """
    source = splits.train
    if img_size is None:
        height, width = shrunk_size(*source.typical_size(), 64)
        img_size = min(height, 192), min(width, 192)
    index = evenly(len(source), n)
    if on_bad_image == "skip":
        index, bad = source.tried(index)
        source.tell_skipped(bad)
    if not index:
        raise DataError(f"{source.name}: none of the {n} images to show can be read")
    target = img_size if isinstance(img_size, int) else max(img_size)
    pixels, sizes = to_canvas([source.read(i, target) for i in index], target)
    batch = Batch(pixels, sizes, torch.tensor(index))
    mean, std = [0.0] * source.channels, [1.0] * source.channels
    if augmented:
        views = train_view(batch, img_size, mean, std, seed=seed, epoch=0)
    else:
        views = center_view(batch, img_size, mean, std)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(grid(_displayable(views, source)), path)
    return path


def save_picture(image: Image.Image, path: Path) -> None:
    """As the name's ending says, else a PNG; the file is whole or not there."""
    with replacing(path) as part:
        image.save(part, format=Image.registered_extensions().get(path.suffix.lower(), "PNG"))


def grid(images: Tensor) -> Image.Image:
    """(N, 3, h, w) in [0, 1] as one picture, as square as can be."""
    count, _, height, width = images.shape
    columns = math.ceil(math.sqrt(count * height / width))
    rows = math.ceil(count / columns)
    page = np.full((rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP, 3), 255, np.uint8)
    tiles = (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for k, tile in enumerate(tiles):
        top, left = (k // columns) * (height + _GAP) + _GAP, (k % columns) * (width + _GAP) + _GAP
        page[top : top + height, left : left + width] = tile
    return Image.fromarray(page)


def _displayable(views: Tensor, source: Source) -> Tensor:
    """Three channels (the first three of many); floats stretched to their range."""
    if source.dtype != np.uint8:
        low, high = views.amin(dim=(0, 2, 3), keepdim=True), views.amax(dim=(0, 2, 3), keepdim=True)
        views = (views - low) / (high - low).clamp(min=1e-12)
    return views[:, :3] if source.channels >= 3 else views[:, :1].expand(-1, 3, -1, -1)
