"""What a diffusion backbone is told beside the noisy image: the time and, where it knows classes, a label."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.nn.vit import expect_images


def time_embedding(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """`[cos(t w), sin(t w)]` with `w_i = max_period^(-i / half)`, half = dim // 2: (B,) -> (B, dim).

    In float32, or float64 where t is; an odd last place is 0.
    """
    t = t if t.dtype == torch.float64 else t.float()
    half = dim // 2
    w = torch.exp(torch.arange(half, dtype=t.dtype, device=t.device) * (-math.log(max_period) / half))
    angles = t[:, None] * w
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, dim % 2))


def check_batch(x: Tensor, t: Tensor, in_chans: int, img_size: tuple[int, int]) -> None:
    """A batch of noisy images and its times, or a clear error."""
    expect_images(x, in_chans, img_size)
    if t.shape != x.shape[:1]:
        raise ValueError(f"times of shape {tuple(t.shape)} given for {len(x)} images; expected one each")


def label_index(y: Tensor | None, num_classes: int | None, t: Tensor) -> Tensor | None:
    """Rows (B,) of the label table, whose last, `num_classes`, is "no label"; None where there is no such table.

    Labels out of range are refused on the CPU. On a GPU looking would make the host wait, and the lookup itself
    fails there.
    """
    if num_classes is None:
        if y is not None:
            raise ValueError("labels given to an unconditional model: build it with num_classes, or leave them out")
        return None
    if y is None:
        return torch.full_like(t, num_classes, dtype=torch.long)
    if y.shape != t.shape or y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(f"labels of shape {tuple(y.shape)}, {y.dtype} given; expected {len(t)} integers, one an image")
    y = y.long()
    if y.device.type == "cpu" and not torch.compiler.is_compiling() and ((y < 0) | (y > num_classes)).any():
        raise ValueError(
            f"labels from {int(y.min())} to {int(y.max())} given; expected 0 to {num_classes - 1}, "
            f'or {num_classes} for "no label"'
        )
    return y


def drop_labels(y: Tensor, draws: Tensor, probability: float, num_classes: int) -> Tensor:
    """Labels (B,) with a share replaced by "no label", as classifier-free guidance trains; draws (B,) in [0, 1)."""
    return torch.where(draws < probability, num_classes, y)
