"""Encoded images (JPEG, PNG, WebP, TIFF, BMP, GIF, `.npy`) to arrays of shape (H, W, C).

Arrays are uint8, uint16 or float32. EXIF orientation is applied, palettes are resolved, transparency is laid
over white. Frames of a multi-page grey TIFF become channels (among photos it is thus a bad image); of other animations
the first frame is taken. Floats are taken as they are, never rescaled.

PIL opens every image: it judges what it is, how large and how turned. The pixels of grey and colour JPEGs come from
torchvision's decoder, which makes the same ones faster; what it refuses, PIL decodes or names as broken.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from residua.data.errors import BadImage

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".npy"})
_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF")
MOST_CHANNELS = 64
VERSION = 5
"""Part of the fingerprint of what is decoded here: a higher one where the same file gives other pixels than before."""
_GREY = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N", "F"})
_SCALE = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0}
_SIDEWAYS = {5, 6, 7, 8}  # EXIF orientations that swap height and width
_EXIF_ORIENTATION = 0x0112
_TIFF_WIDTH, _TIFF_HEIGHT = 0x0100, 0x0101


class Header(NamedTuple):
    """What is known of an image before its pixels are decoded."""

    height: int
    width: int
    channels: int
    dtype: str


def shrunk_size(height: int, width: int, target: int | None) -> tuple[int, int]:
    """Size an image is kept at for views of `target` pixels: shorter side at most 2x, longer at most 3x, but the
    shorter never below `target` where the image has that."""
    if target is None:
        return height, width
    short, long = min(height, width), max(height, width)
    factor = min(1.0, max(target / short, min(2 * target / short, 3 * target / long)))
    return max(1, round(height * factor)), max(1, round(width * factor))


def side_size(height: int, width: int, side: int) -> tuple[int, int]:
    """Size of an image whose shorter side is shrunk to `side`; a smaller image keeps its own."""
    factor = min(1.0, side / min(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Antialiased bicubic resize of an (H, W, C) array, dtype kept."""
    if image.shape[:2] == (height, width):
        return image
    if image.dtype == np.uint8 and image.shape[2] in (1, 3):
        pixels = as_tensor(image).permute(2, 0, 1)[None]
        small = F.interpolate(pixels, (height, width), mode="bicubic", antialias=True)  # PIL's numbers, in less time
        return small[0].permute(1, 2, 0).numpy()
    out = np.stack([_resized_plane(image[:, :, c], height, width) for c in range(image.shape[2])], axis=2)
    if image.dtype == np.float32:
        return out
    return np.clip(np.rint(out), 0, np.iinfo(image.dtype).max).astype(image.dtype)


def _resized_plane(plane: np.ndarray, height: int, width: int) -> np.ndarray:
    whole = Image.fromarray(plane.astype(np.float32))
    return np.asarray(whole.resize((width, height), Image.Resampling.BICUBIC))


def as_tensor(image: np.ndarray) -> torch.Tensor:
    """Over the same memory, but for arrays that are read-only, as PIL's are."""
    return torch.from_numpy(image if image.flags.writeable else image.copy())


def shrink(image: np.ndarray, target: int | None) -> np.ndarray:
    """The image at its `shrunk_size`."""
    return resize(image, *shrunk_size(image.shape[0], image.shape[1], target))


def header(data: bytes | Path, where: str) -> Header:
    """Size, channels and dtype, from the first bytes only."""
    try:
        if isinstance(data, Path) and data.suffix.lower() == ".npy":
            array = np.load(data, mmap_mode="r", allow_pickle=False)
            _check_shape(array.shape)
            height, width, channels = (*array.shape, 1)[:3]
            return Header(height, width, channels, str(_array_dtype(array.dtype)))
        with open_image(data) as image:
            return _pil_header(image)
    except Exception as error:
        raise BadImage(where, error) from error


def decode(data: bytes | Path, where: str, target: int | None = None) -> np.ndarray:
    """The image as (H, W, C) with its own channels, shrunk as `shrunk_size` says when `target` is given."""
    try:
        if isinstance(data, Path) and data.suffix.lower() == ".npy":
            return from_array(np.load(data, allow_pickle=False), target)
        data = data.read_bytes() if isinstance(data, Path) else data
        with open_image(data) as image:
            return from_pil(image, target, data)
    except Exception as error:
        raise BadImage(where, error) from error


def from_pil(image: Image.Image, target: int | None = None, data: bytes | None = None) -> np.ndarray:
    """A PIL image as (H, W, C); a JPEG not yet loaded is decoded at reduced size where that suffices. `data` are the
    bytes that it was opened from."""
    full = image.size
    if target is not None:
        height, width = shrunk_size(image.height, image.width, target)
        if image.format in ("JPEG", "MPO") and (height, width) != (image.height, image.width):
            # Size after DCT scaling is rounded up, so aim a pixel low to keep the next power of two in reach.
            image.draft(None, (max(1, width - 1), max(1, height - 1)))
    if _stacked_frames(image) > 1:
        frames = []
        for k in range(_stacked_frames(image)):
            image.seek(k)
            frames.append(_pixels(image))
        array = np.concatenate(frames, axis=2)
    else:
        plain = data is not None and image.format in ("JPEG", "MPO") and image.size == full
        fast = _jpeg(data, image) if plain and data is not None else None
        array = _pixels(image) if fast is None else fast
    return shrink(array, target)


def from_array(array: np.ndarray, target: int | None = None) -> np.ndarray:
    """A bare (H, W) or (H, W, C) array as uint8, uint16 or float32 (H, W, C)."""
    _check_shape(array.shape)
    dtype = _array_dtype(array.dtype)
    array = array.astype(np.uint8) * 255 if array.dtype == bool else np.asarray(array, dtype)
    if dtype == np.float32 and not np.isfinite(array).all():
        raise ValueError("contains NaN or infinity")
    return shrink(_with_channels(array), target)


def conform(image: np.ndarray, channels: int, dtype: np.dtype) -> np.ndarray:
    """The image with the channels and dtype of its set (grey to RGB, RGB to grey, 16 to 8 bit)."""
    found = image.shape[2]
    if found == 1 and channels == 3:
        image = np.repeat(image, 3, axis=2)
    elif found == 3 and channels == 1:
        grey = image.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
        image = (np.rint(grey) if image.dtype != np.float32 else grey).astype(image.dtype)[:, :, None]
    elif found != channels:
        raise ValueError(f"{found} channels where the other images have {channels}")
    if image.dtype == dtype:
        return image
    return from_unit(to_unit(image), dtype)


def check_unit(image: np.ndarray) -> None:
    """A ValueError where a float image leaves [0, 1], the range of integer images."""
    low, high = image.min(), image.max()
    if low < 0 or high > 1:
        raise ValueError(f"floats from {low:g} to {high:g} beside integer images; expected floats in [0, 1]")


def to_unit(image: np.ndarray) -> np.ndarray:
    """uint8 or uint16 to float32 in [0, 1]; floats unchanged."""
    return image.astype(np.float32) / np.float32(_SCALE[image.dtype.name])


def from_unit(image: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The reverse of `to_unit`, rounded and clipped for integer types."""
    if dtype == np.float32:
        return image
    scale = _SCALE[np.dtype(dtype).name]
    return np.clip(np.rint(image * scale), 0, scale).astype(dtype)


def open_image(data: bytes | Path) -> Image.Image:
    """By PIL, if it is of a format that is read here: some others start programs."""
    try:
        return Image.open(data if isinstance(data, Path) else io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        raise ValueError(f"its {size:,} bytes are none of {', '.join(_FORMATS)}" if size else "it is empty") from None


def _pil_header(image: Image.Image) -> Header:
    frames = _stacked_frames(image)
    width, height = image.size
    if isinstance(image, TiffImageFile):  # whose size newer versions of Pillow have turned already
        width, height = image.tag_v2[_TIFF_WIDTH], image.tag_v2[_TIFF_HEIGHT]
    # Asked for EXIF that it lacks, a PNG would decode all its pixels to look behind them.
    if (image.format != "PNG" or "exif" in image.info) and image.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS:
        height, width = width, height
    dtype = "float32" if image.mode == "F" else "uint16" if image.mode.startswith("I") else "uint8"
    return Header(height, width, frames if image.mode in _GREY else 3, dtype)


def _stacked_frames(image: Image.Image) -> int:
    """Frames that count as channels: those of a grey multi-page TIFF, else 1."""
    if image.format != "TIFF" or image.mode not in _GREY:
        return 1
    frames: int = getattr(image, "n_frames", 1)
    if frames > MOST_CHANNELS:
        raise ValueError(f"{frames:,} grey pages, which would be as many channels; expected at most {MOST_CHANNELS}")
    return frames


def _jpeg(data: bytes, image: Image.Image) -> np.ndarray | None:
    """The pixels (H, W, C) of a whole grey or colour JPEG, upright; None where PIL has to decode it."""
    from torchvision.io import decode_jpeg  # which takes a second to import

    if image.mode not in ("L", "RGB"):
        return None
    try:
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)).permute(1, 2, 0).numpy()
    except RuntimeError:  # broken, or no decoder in this build
        return None
    if pixels.shape != (image.height, image.width, len(image.mode)):
        return None
    turn = _TURNS.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x.transpose(1, 0, 2), 2),
    8: lambda x: np.rot90(x),
}
"""What sets an image upright, by EXIF orientation."""


def _pixels(image: Image.Image) -> np.ndarray:
    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode in ("P", "PA"):
        image = image.convert("RGBA" if mode == "PA" or "transparency" in image.info else "RGB")
    elif mode in ("1", "L", "RGB") and "transparency" in image.info:  # of one colour
        image = image.convert("RGBA" if mode == "RGB" else "LA")
    if image.mode in ("RGBA", "LA", "RGBa", "La"):
        image = _over_white(image)
    if mode == "1":
        image = image.convert("L")
    if image.mode in ("L", "RGB"):
        return _with_channels(np.asarray(image))
    if image.mode == "F":
        return from_array(np.asarray(image))
    if image.mode.startswith("I"):
        array = np.asarray(image)
        if array.min() < 0 or array.max() > 65535:
            raise ValueError(f"values from {array.min()} to {array.max()}, expected 0 to 65535 or floats")
        return _with_channels(array.astype(np.uint16))
    return np.asarray(image.convert("RGB"))


def _over_white(image: Image.Image) -> Image.Image:
    grey = image.mode in ("LA", "La")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("L" if grey else "RGB")


def _with_channels(array: np.ndarray) -> np.ndarray:
    return array[:, :, None] if array.ndim == 2 else array


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"array of shape {shape}, expected (H, W) or (H, W, C)")


def _array_dtype(dtype: np.dtype) -> np.dtype:
    if dtype == np.uint8 or dtype == np.bool_:
        return np.dtype(np.uint8)
    if dtype == np.uint16:
        return np.dtype(np.uint16)
    if np.issubdtype(dtype, np.floating):
        return np.dtype(np.float32)
    raise ValueError(f"dtype {dtype}, expected uint8, uint16 or a float")
