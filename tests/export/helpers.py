"""What the tests of exports share."""

from typing import Any

import numpy as np
import torch
from PIL import Image

import residua
from residua.export.clean import relative


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return relative(a.detach(), b.detach())


def photo() -> Image.Image:
    """Twice as wide as high, so that cropping shows."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 128, 3), np.uint8)).resize((48, 24))


def small_vit(img_size: tuple[int, int] = (16, 16)) -> Any:
    return residua.create_model(
        "vit", img_size=img_size, patch_size=8, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2, alpha_min=0.5
    ).eval()
