"""Random resized crop, flip and normalisation: which part of an image is seen, and how it is resized.

A crop followed by a resize is linear and separable: `out = Wy @ x @ Wx^T` with one small matrix per image and
axis. So on a GPU a batch of different crops is two batched matrix products: no loop over images, no shapes that depend
on data, no synchronisation with the host (`resample`). On a CPU each image is resized by itself, with the same filter,
by torch's antialiased kernel, which keeps uint8 (`Crops.cut`): whether a decoding worker does that or the training
process, the pixels are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.data.rng import uniform

ImgSize = int | tuple[int, int]
CropMode = Literal["center", "squash"]
PerChannel = Sequence[float] | Tensor

INTERPOLATIONS = ("bicubic", "bilinear")
_ATTEMPTS = 10  # as torchvision's RandomResizedCrop
_FAR = 1e4  # a distance in pixels beyond every kernel
CROP_LANES = 2 * _ATTEMPTS + 2


@dataclass
class Batch:
    """Images on a device, each in the top left corner of a common canvas, or the views that training sees of them."""

    pixels: Tensor  # (B, C, H, W) uint8, or float32 in [0, 1]
    sizes: Tensor  # (B, 2) int64: height and width of the image on its canvas
    index: Tensor  # (B,) int64: number of the image in its source
    cut: bool = False  # whether the pixels are views already: cropped, resized and mirrored


@dataclass(frozen=True)
class Crops:
    """The training views of images: a random resized crop, mirrored or not, of `img_size` = (height, width).

    Box and mirroring are a function of (seed, epoch, image number), and of the size of the image. `central` views show
    the central part instead of a random one, as `center_view` does with this `crop_pct` and `crop_mode`.
    """

    img_size: tuple[int, int]
    seed: int = 0
    scale: tuple[float, float] = (0.2, 1.0)
    flip: bool = True
    interpolation: str = "bicubic"
    central: bool = False
    crop_pct: float = 1.0
    crop_mode: CropMode = "center"

    @property
    def shape(self) -> tuple[int, ...]:
        """(height, width) of a view."""
        return self.img_size

    def boxes(self, index: Tensor, epoch: Tensor | int, sizes: Tensor) -> Tensor:
        """Boxes (B, 4) = (top, left, height, width), in whole pixels."""
        u = uniform(self.seed, epoch, index, CROP_LANES, "crop")
        return random_resized_crop_boxes(u, sizes, self.scale)

    def mirrored(self, index: Tensor, epoch: Tensor | int) -> Tensor | None:
        """(B,) bool: which views are mirrored; None where none are."""
        return uniform(self.seed, epoch, index, 1, "flip")[:, 0] < 0.5 if self.flip else None

    def cut(self, images: Iterable[Tensor], index: Tensor, epoch: Tensor | int, sizes: Tensor, out: Tensor) -> Tensor:
        """Views of images (C, H, W) of these sizes (B, 2) on the CPU, put into `out` (B, h, w, C); uint8 and float32
        stay what they are. Channels come last, as decoders write them. Returns `out`."""
        if self.central:
            views = self._centers(images, sizes)
        else:
            boxes = self.boxes(index, epoch, sizes).long().tolist()
            parts = (image[:, top : top + h, left : left + w] for image, (top, left, h, w) in zip(images, boxes))
            views = (_resize(part, self.img_size, self.interpolation) for part in parts)
        mirrored = self.mirrored(index, epoch)
        mirror = [False] * len(sizes) if mirrored is None else mirrored.tolist()
        for row, view, turned in zip(out, views, mirror):
            last = view.permute(1, 2, 0)
            row.copy_(last.flip(1) if turned else last)
        return out

    def _centers(self, images: Iterable[Tensor], sizes: Tensor) -> Iterator[Tensor]:
        """What `center_boxes` shows: each image is resized as a whole, and cropped then."""
        out_h, out_w = self.img_size
        geometry = torch.stack(_center_geometry(sizes, self.img_size, self.crop_pct, self.crop_mode), 1).long().tolist()
        for image, (height, width, top, left) in zip(images, geometry):
            whole = _resize(image, (height, width), self.interpolation)
            yield whole[:, top : top + out_h, left : left + out_w]

    def __call__(self, batch: Batch, epoch: Tensor | int) -> Tensor:
        """The views of a batch on its device: float32 (B, C, h, w); uint8 pixels become [0, 1]."""
        if batch.cut:
            return _unit(batch.pixels)
        if batch.pixels.device.type == "cpu":
            return self._on_cpu(batch, epoch)
        mirrored = self.mirrored(batch.index, epoch)
        if self.central:
            boxes = center_boxes(batch.sizes, self.img_size, self.crop_pct, self.crop_mode)
            return resample(batch.pixels, boxes, self.img_size, mirrored, self.interpolation, batch.sizes)
        boxes = self.boxes(batch.index, epoch, batch.sizes)
        return resample(batch.pixels, boxes, self.img_size, mirrored, self.interpolation)

    @torch.compiler.disable
    def _on_cpu(self, batch: Batch, epoch: Tensor | int) -> Tensor:
        count, channels = batch.pixels.shape[:2]
        out = torch.empty(count, *self.shape, channels, dtype=batch.pixels.dtype)
        return _unit(self.cut(_images(batch), batch.index, epoch, batch.sizes, out).permute(0, 3, 1, 2))


@dataclass(frozen=True)
class Several:
    """Several views of each image, each by its `Crops` and in its epoch; batches of them are cut where images are
    decoded: (B, views, C, h, w)."""

    views: tuple[tuple[Crops, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(views, height, width)."""
        return len(self.views), *self.views[0][0].img_size

    def cut(self, images: Iterable[Tensor], index: Tensor, epoch: Tensor | int, sizes: Tensor, out: Tensor) -> Tensor:
        """As `Crops.cut`, into `out` (B, views, h, w, C); `epoch` is that of each view."""
        images = list(images)
        for k, (crops, number) in enumerate(self.views):
            crops.cut(images, index, number, sizes, out[:, k])
        return out


def pair(img_size: ImgSize) -> tuple[int, int]:
    """(height, width) of an int or a pair."""
    return (img_size, img_size) if isinstance(img_size, int) else (int(img_size[0]), int(img_size[1]))


def random_resized_crop_boxes(
    u: Tensor,
    sizes: Tensor,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Boxes (B, 4) = (top, left, height, width), distributed as torchvision's `RandomResizedCrop`.

    `u` holds `CROP_LANES` uniforms per image: area and aspect of ten attempts, then the position. The first
    attempt that fits is taken; if none does, the largest central box of an allowed aspect. Computed in float64 where
    the device has it, so that no box depends on how a processor rounds.
    """
    exact = torch.float32 if u.device.type == "mps" else torch.float64
    u, height, width = u.to(exact), sizes[:, 0:1].to(exact), sizes[:, 1:2].to(exact)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:, :_ATTEMPTS])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * u[:, _ATTEMPTS : 2 * _ATTEMPTS])
    w, h = torch.round(torch.sqrt(area * aspect)), torch.round(torch.sqrt(area / aspect))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    earliness = torch.arange(_ATTEMPTS, 0, -1, device=u.device)
    first = (fits * earliness).argmax(dim=1, keepdim=True)  # no ties: argmax may break them either way
    found = fits.any(dim=1, keepdim=True)
    h, w = h.gather(1, first), w.gather(1, first)

    whole = width / height
    fallback_w = torch.where(whole > ratio[1], torch.round(height * ratio[1]), width)
    fallback_h = torch.where(whole < ratio[0], torch.round(width / ratio[0]), height)
    room_y, room_x = height - h, width - w
    top = torch.where(found, _below(u[:, -2:-1], room_y + 1), torch.floor((height - fallback_h) / 2))
    left = torch.where(found, _below(u[:, -1:], room_x + 1), torch.floor((width - fallback_w) / 2))
    boxes = torch.cat([top, left, torch.where(found, h, fallback_h), torch.where(found, w, fallback_w)], dim=1)
    return boxes.float()


def uncropped(side: int, crop_pct: float) -> int:
    """The side that images are resized to before `crop_pct` of it is cut out, as timm computes it."""
    return math.floor(side / crop_pct + 1e-6)  # 354 of a crop_pct of 224 / 354


def center_boxes(sizes: Tensor, out_size: ImgSize, crop_pct: float = 1.0, crop_mode: CropMode = "center") -> Tensor:
    """Central boxes (B, 4) that timm's evaluation shows: of the image, resized until the output divided by `crop_pct`
    just fits into it, torchvision's `CenterCrop`.

    Sizes and crop are whole pixels of the resized image, so that boxes may begin and end within pixels of the image
    itself. With `crop_mode="squash"` each side is resized for itself, and images are stretched.
    """
    out_h, out_w = pair(out_size)
    resized_h, resized_w, top, left = _center_geometry(sizes, out_size, crop_pct, crop_mode)
    height, width = sizes[:, 0], sizes[:, 1]
    return torch.stack(
        [top * height / resized_h, left * width / resized_w, out_h * height / resized_h, out_w * width / resized_w], 1
    )


def _center_geometry(
    sizes: Tensor, out_size: ImgSize, crop_pct: float = 1.0, crop_mode: CropMode = "center"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Height and width (B,) that images are resized to, and where in that the output begins: top and left."""
    out_h, out_w = pair(out_size)
    tall, wide = uncropped(out_h, crop_pct), uncropped(out_w, crop_pct)
    height, width = sizes[:, 0], sizes[:, 1]
    if crop_mode == "squash":
        resized_h, resized_w = torch.full_like(height, tall), torch.full_like(width, wide)
    elif tall == wide:  # torchvision's Resize cuts off the fraction of the longer side, timm's own rounds it
        short = torch.minimum(height, width)
        resized_h, resized_w = height * tall // short, width * tall // short
    else:
        unit = torch.minimum(height / tall, width / wide)
        resized_h, resized_w = torch.round(height / unit), torch.round(width / unit)
    return resized_h, resized_w, torch.round((resized_h - out_h) / 2), torch.round((resized_w - out_w) / 2)


def resample(
    pixels: Tensor,
    boxes: Tensor,
    out_size: ImgSize,
    flip: Tensor | None = None,
    interpolation: str = "bicubic",
    within: Tensor | None = None,
) -> Tensor:
    """Cut `boxes` out of `pixels` (B, C, H, W) and resize them with antialiasing: float32 (B, C, h, w).

    Equals torchvision's `resized_crop(..., antialias=True)` image by image: pixels that a box does not touch have no
    part in it. With `within`, the sizes (B, 2) of the images, it equals PIL's resize of the whole image, cropped
    afterwards: what lies beside a box counts at its edges. uint8 becomes [0, 1] in steps of 1/255, rounded and clamped
    after each axis, as PIL and torchvision do; floats keep their range. `flip` (B,) bool mirrors.
    """
    batch, channels, height, width = pixels.shape
    out_h, out_w = pair(out_size)
    top, left, h, w = boxes.to(torch.float32).unbind(1)
    all_h, all_w = (None, None) if within is None else within.to(torch.float32).unbind(1)
    whole = pixels.dtype == torch.uint8  # PIL and torchvision have whole numbers after each axis
    with torch.autocast(pixels.device.type, enabled=False):
        wy = _weights(top, h, height, out_h, interpolation, within=all_h)  # (B, out_h, H)
        wx = _weights(left, w, width, out_w, interpolation, flip, all_w)  # (B, out_w, W)
        x = pixels.to(torch.float32)
        # One product per image and axis, all channels at once; the axes end up swapped and are put back.
        x = torch.bmm(wx, x.reshape(batch, channels * height, width).transpose(1, 2))  # (B, w, C H)
        if whole:
            x = x.clamp_(0, 255).round_()
        x = torch.bmm(x.reshape(batch, out_w * channels, height), wy.transpose(1, 2))  # (B, w C, h)
        x = x.reshape(batch, out_w, channels, out_h).permute(0, 2, 3, 1)
    return x.clamp_(0, 255).round_() / 255 if whole else x


def train_view(
    batch: Batch,
    img_size: ImgSize,
    mean: PerChannel,
    std: PerChannel,
    *,
    seed: int,
    epoch: Tensor | int,
    scale: tuple[float, float] = (0.2, 1.0),
    flip: bool = True,
    interpolation: str = "bicubic",
) -> Tensor:
    """Random resized crop, flip, normalise: float32 (B, C, h, w).

    Crop and flip depend only on (seed, epoch, image index), not on the batch, process or device.
    """
    crops = Crops(pair(img_size), seed, scale, flip, interpolation)
    return normalize(crops(batch, epoch), mean, std)


def center_view(
    batch: Batch,
    img_size: ImgSize,
    mean: PerChannel,
    std: PerChannel,
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
    crop_mode: CropMode = "center",
) -> Tensor:
    """Resize, central crop, normalise: float32 (B, C, h, w), as timm and torchvision do it."""
    crops = Crops(pair(img_size), 0, (1.0, 1.0), False, interpolation, True, crop_pct, crop_mode)
    return normalize(crops(batch, 0), mean, std)


def normalize(x: Tensor, mean: PerChannel, std: PerChannel) -> Tensor:
    """`(x - mean) / std` per channel, contiguous."""
    scale = 1 / per_channel(std, x)
    return torch.addcmul(-per_channel(mean, x) * scale, x, scale).contiguous()


def per_channel(values: PerChannel, like: Tensor) -> Tensor:
    """(C, 1, 1) tensor beside `like`, made without a copy from the host."""
    if not isinstance(values, Tensor):
        values = torch.cat([like.new_full((1,), float(value)) for value in values])
    return values.to(like).reshape(-1, 1, 1)


def _images(batch: Batch) -> Iterable[Tensor]:
    """Each image (C, H, W) of a batch, without the canvas around it."""
    return (image[:, :height, :width] for image, (height, width) in zip(batch.pixels, batch.sizes.tolist()))


def _unit(pixels: Tensor) -> Tensor:
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels


def _resize(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """(C, H, W) on the CPU -> (C, h, w), antialiased as PIL does it, uint8 rounded as PIL does."""
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"interpolation {interpolation!r}, expected 'bicubic' or 'bilinear'")
    return F.interpolate(image[None], size, mode=interpolation, antialias=True)[0]


def _below(u: Tensor, n: Tensor) -> Tensor:
    """Uniform whole number in 0..n-1."""
    return torch.minimum(torch.floor(u * n), n - 1)


def _weights(
    start: Tensor,
    length: Tensor,
    in_size: int,
    out_size: int,
    interpolation: str,
    flip: Tensor | None = None,
    within: Tensor | None = None,
) -> Tensor:
    """Rows of filter weights (B, out, in) that resize the span `start, length` of an axis to `out_size`.

    Output o is centred at `c = (o + 1/2) s` of the span, `s = length / out`; input j has weight
    `k((j + 1/2 - c) / max(s, 1))`, zero outside the span (of the first `within` inputs, where given), each row
    normalised to 1.
    """
    start, length = start[:, None], length[:, None]
    step = length / out_size
    center = (torch.arange(out_size, device=start.device) + 0.5) * step  # (B, out)
    if flip is not None:
        center = torch.where(flip[:, None], length - center, center)
    position = torch.arange(in_size, device=start.device) + 0.5 - start  # (B, in)
    low, high = (-0.5, length + 0.5) if within is None else (-start, within[:, None] - start)
    position = torch.where((position > low) & (position < high), position, _FAR)
    width = step.clamp(min=1)  # the kernel is widened when shrinking
    distance = ((position / width)[:, None, :] - (center / width)[:, :, None]).abs_()
    weights = _kernel(distance, interpolation)
    return weights.div_(weights.sum(dim=2, keepdim=True))


def _kernel(t: Tensor, interpolation: str) -> Tensor:
    """Filter at distance t >= 0: the triangle, or Keys' cubic with a = -1/2.

    The cubic as truncated powers, without branches: `(1 - t)(2 - t)_+^2 / 2 + (2t - 1)(1 - t)_+^2`.
    """
    near = (1 - t).clamp_(min=0)
    if interpolation == "bilinear":
        return near
    if interpolation == "bicubic":
        far = (2 - t).clamp_(min=0).square_().mul_(0.5 - 0.5 * t)
        return far.addcmul_(2 * t - 1, near.square_())
    raise ValueError(f"interpolation {interpolation!r}, expected 'bicubic' or 'bilinear'")
