"""What a model's folder says beside its weights: how images are prepared, and which norms an export of ours has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from residua.data import Preprocessing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALVES = (0.5, 0.5, 0.5)  # pixels to [-1, 1]

EACH = "layer_norm_eps_of_each"
"""In the `config.json` of our exports: the eps of every norm, where one for all is not right."""
FINAL_NORM = "final_norm"
"""There too, false: transformers' last norm is one that the model was not trained with."""
CROP = "central_crop"
"""In their `preprocessor_config.json`: `crop_pct`, which transformers' own keys round or leave out."""


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
    if "architecture" in config:  # timm's; its older folders have no inner part
        return from_timm(config.get("pretrained_cfg", config), img_size, channels)
    return from_processor(processor, img_size, channels) if processor else None


def from_timm(config: Mapping[str, Any], img_size: Any, channels: int) -> Preprocessing:
    """From timm's `pretrained_cfg`."""
    kind = config.get("interpolation", "bicubic")
    mean, std = config.get("mean", IMAGENET_MEAN), config.get("std", IMAGENET_STD)
    return Preprocessing(
        img_size, spread(mean, channels), spread(std, channels), channels, crop_pct=config.get("crop_pct", 0.875),
        interpolation=kind if kind in ("bilinear", "bicubic") else "bicubic",
    )  # fmt: skip


def from_processor(found: Mapping[str, Any], img_size: tuple[int, int], channels: int) -> Preprocessing:
    """From what transformers' image processors keep; of an empty one, values in [-1, 1]."""
    mean, std = (found.get(key) or HALVES for key in ("image_mean", "image_std"))
    edge = found["size"].get("shortest_edge", 0) if isinstance(found.get("size"), dict) else 0
    crop = img_size[0] / edge if edge and edge >= img_size[0] else 1.0
    kind = "bicubic" if found.get("resample", 2) == 3 else "bilinear"
    return Preprocessing(
        img_size, spread(mean, channels), spread(std, channels), channels, crop_pct=found.get(CROP, crop),
        interpolation=kind,
    )  # fmt: skip


def spread(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """As many values as channels: the published ones, or their mean for each."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


def set_norms(model: Any, config: Mapping[str, Any]) -> None:
    """Give a model of timm or transformers the norms that an export of ours needs, as its loading snippet does."""
    each, timm = config.get(EACH) or (), type(model).__module__.startswith("timm.")
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    if timm and each:
        last = model.fc_norm if isinstance(model.fc_norm, nn.LayerNorm) else model.norm
        norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [last]
    elif timm and "layer_norm_eps" in config:
        each = [config["layer_norm_eps"]] * len(norms)
    for norm, eps in zip(norms, each):
        norm.eps = eps
    if not timm and config.get(FINAL_NORM) is False:
        model.layernorm = nn.Identity()


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no settings, expected {{...}}")
    return found
