"""What a model's folder says beside its weights: how images are prepared, and which norms an export of ours has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from residua.data import Preprocessing
from residua.data.augment import CropMode
from residua.data.errors import tell

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALVES = (0.5, 0.5, 0.5)  # pixels to [-1, 1]

EACH = "layer_norm_eps_of_each"
"""In the `config.json` of our exports: the eps of every norm, where one for all is not right."""
FINAL_NORM = "final_norm"
"""There too, false: transformers' last norm is one that the model was not trained with."""
CROP, CROP_MODE = "central_crop", "central_crop_mode"
"""In their `preprocessor_config.json`: `crop_pct`, which transformers' own keys round or leave out, and `crop_mode`."""
_KEEP_ASPECT = ("CLIP", "ChineseCLIP", "Bit", "ConvNext", "Levit", "MobileNet", "MobileViT", "PoolFormer")
"""Processors whose size, where it is a bare number, is that of the shorter side; others stretch to a square."""


def config_of(folder: Path) -> dict[str, Any]:
    """`config.json`; empty where there is none."""
    return _json(folder / "config.json")


def img_size_in(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of images, as transformers' or timm's `config.json` has them; None where it does not."""
    shape = config.get("pretrained_cfg", config).get("input_size")  # of timm, channels first
    size = config.get("image_size", shape and shape[1:])
    return (size, size) if isinstance(size, int) else size and tuple(size)


def preprocessing_in(folder: Path, img_size: tuple[int, int], channels: int) -> Preprocessing | None:
    """As timm's `config.json` or transformers' `preprocessor_config.json` has it; None where neither says."""
    config, processor = config_of(folder), _json(folder / "preprocessor_config.json")
    timm = "architecture" in config
    try:
        if timm:  # its older folders have no inner part
            return from_timm(config.get("pretrained_cfg", config), img_size, channels)
        return from_processor(processor, img_size, channels) if processor else None
    except Exception as error:  # whatever values of another kind make of themselves
        file = folder / ("config.json" if timm else "preprocessor_config.json")
        raise ValueError(f"{file} does not say how images are prepared in a way that can be read: {error}") from error


def assumed(model: object, img_size: tuple[int, int], channels: int, why: str = "") -> Preprocessing | None:
    """For a model that does not say how images are prepared: ImageNet's, with a note; None if it sees no colour."""
    if channels != 3:
        return None
    tell(
        f"{model} does not say how images are prepared{why and f' ({why})'}: taken are ImageNet's mean and std and a "
        "central crop of 0.875; set model.preprocessing where that is wrong"
    )
    return Preprocessing(img_size, IMAGENET_MEAN, IMAGENET_STD, crop_pct=0.875)


def from_timm(config: Mapping[str, Any], img_size: Any, channels: int) -> Preprocessing:
    """From timm's `pretrained_cfg`; a note where it asks for what is not done here."""
    kind: str = config.get("interpolation", "bicubic")
    mode: Any = config.get("crop_mode") or "center"
    mean, std = config.get("mean", IMAGENET_MEAN), config.get("std", IMAGENET_STD)
    part: float = config.get("crop_pct") or 0.875
    if kind not in ("bilinear", "bicubic"):
        kind = _instead("bicubic", f"{kind} interpolation")
    if mode not in ("center", "squash"):
        mode = _instead("center", f"images that are padded (crop_mode {mode})", "a central crop")
    if part > 1:
        part = 1.0
        _instead("", "images that are padded (crop_pct above 1)", "no padding")
    return Preprocessing(
        img_size, spread(mean, channels), spread(std, channels), channels, crop_pct=part, interpolation=kind,
        crop_mode=mode,
    )  # fmt: skip


def from_processor(found: Mapping[str, Any], img_size: tuple[int, int], channels: int) -> Preprocessing:
    """From what transformers' image processors keep; a note where they ask for what is not done here."""
    mean, std = _norm(found)
    kind = {2: "bilinear", 3: "bicubic"}.get(found.get("resample", 2), "")
    mode, crop = (found.get(CROP_MODE, "center"), found[CROP]) if CROP in found else _crop(found, img_size)
    return Preprocessing(
        img_size, spread(mean, channels), spread(std, channels), channels, crop_pct=crop,
        interpolation=kind or _instead("bicubic", f"Pillow's resampling {found['resample']}"), crop_mode=mode,
    )  # fmt: skip


def _norm(found: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and std of a processor for pixels in [0, 1]; it may leave them in [0, 255], or as they are."""
    mean, std = (found.get(key) or HALVES for key in ("image_mean", "image_std"))
    if not found.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if found.get("do_flip_channel_order"):
        _instead("", "blue before red", "red before blue")
    white = 255 * (found.get("rescale_factor") or 1 / 255) if found.get("do_rescale", True) else 255
    if math.isclose(white, 1, rel_tol=1e-4):  # 1 / 255, with as many digits as were written
        return mean, std
    return [value / white for value in mean], [value / white for value in std]


def _crop(found: Mapping[str, Any], img_size: tuple[int, int]) -> tuple[CropMode, float]:
    """Crop mode and `crop_pct` of a processor: its size is the shorter side's, or what images are stretched to."""
    kind, size, part = (found.get(key) for key in ("image_processor_type", "size", "crop_size"))
    kind = str(kind or found.get("feature_extractor_type", ""))
    if not found.get("do_resize", True):
        _instead("", "images of their own size (do_resize is false)", f"them resized to {img_size[0]} px")
        return "center", 1.0
    if isinstance(size, int):
        size = {"shortest_edge": size} if kind.startswith(_KEEP_ASPECT) else {"height": size}
    size = size if isinstance(size, dict) else {}
    edge, side = size.get("shortest_edge"), size.get("height")
    cut = part.get("height", img_size[0]) if isinstance(part, dict) else part or img_size[0]
    cropped = found.get("do_center_crop", part is not None)
    made = cut if cropped else edge or side or img_size[0]
    if found.get("do_pad"):
        _instead("", "padded images", "no padding")
    if made != img_size[0]:
        _instead("", f"images of {made} px, and is built for {img_size[0]} px", f"{img_size[0]} px")
    if edge and found.get("crop_pct"):  # ConvNext's stretches large images, PoolFormer's none
        return ("squash", 1.0) if edge >= 384 and not cropped else ("center", found["crop_pct"])
    if edge and kind.startswith("Levit"):
        return "center", 224 / 256
    if side and not edge:
        return "squash", min(1.0, cut / side) if cropped else 1.0
    if edge and not cropped:
        _instead("", "images of any shape", "a central crop")
    return "center", min(1.0, cut / edge) if edge and cropped else 1.0


def _instead(value: str, asked: str, taken: str = "") -> Any:
    """A value that stands in for what a model asks for, with a note."""
    tell(f"the model's preprocessing asks for {asked}; taken is {taken or value}, so that features differ from its own")
    return value


def spread(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """As many values as channels: the published ones, or their mean for each."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


def set_norms(model: Any, config: Mapping[str, Any]) -> None:
    """Give a model of timm or transformers the norms that an export of ours needs, as its loading snippet does."""
    each, timm = config.get(EACH) or (), type(model).__module__.startswith("timm.")
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    if timm and each:
        last = model.fc_norm if isinstance(model.fc_norm, nn.LayerNorm) else model.norm
        norms = norms_of(model, last)
    elif timm and "layer_norm_eps" in config:
        each = [config["layer_norm_eps"]] * len(norms)
    for norm, eps in zip(norms, each):
        norm.eps = eps
    if not timm and config.get(FINAL_NORM) is False:
        model.layernorm = nn.Identity()


def norms_of(vit: Any, last: nn.Module) -> list[Any]:
    """The norms that see the stream of a vision transformer, in order, and then its last."""
    return [norm for block in vit.blocks for norm in (block.norm1, block.norm2)] + [last]


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no settings, expected {{...}}")
    return found
