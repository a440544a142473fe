"""Mixup, CutMix and random erasing of a whole batch, as functions of uniform numbers.

What timm's `Mixup` (mode "elem") and `RandomErasing` (mode "pixel") do image by image from global random state, done
for a batch at once: no loop, no shapes that depend on data, no synchronisation with the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIX_LANES = 4  # uniforms per image: mixup or CutMix, its strength, centre of the box
_ATTEMPTS = 10  # as timm's RandomErasing
ERASE_LANES = 3 + 2 * _ATTEMPTS
_AREA, _ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of an erased rectangle
_QUANTILES = 1 << 16


def beta_quantiles(alpha: float) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at the middles of 65,536 equal steps: `table[(u * len(table)).long()]` draws."""
    from scipy.special import betaincinv

    middles = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    return torch.from_numpy(betaincinv(alpha, alpha, middles.numpy())).float()


def draw(quantiles: Tensor, u: Tensor) -> Tensor:
    """Uniforms in [0, 1) -> draws from the distribution of the quantiles."""
    return quantiles[(u * len(quantiles)).long()]


def partners(x: Tensor) -> Tensor:
    """Every image's partner: of neighbours in the batch, the other. Where the number is odd, the last is alone."""
    even = len(x) // 2 * 2
    swapped = x[:even].unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return torch.cat([swapped, x[even:]])


def mix_weights(
    u: Tensor, size: tuple[int, int], mixup: Tensor | None, cutmix: Tensor | None, switch: float = 0.5
) -> Tensor:
    """Weight of each image's own pixels (B, 1, h, w); its partner has the rest.

    `mixup` and `cutmix` are `beta_quantiles`, None where that kind is off; with both, CutMix is drawn with probability
    `switch`. Mixup weighs all pixels by `lam`; CutMix takes a box of area `1 - lam`, cut off at the border, from the
    partner. So an image's share of the label is the mean of its weights.
    """
    (b, _), (height, width) = u.shape, size
    if mixup is None and cutmix is None:
        return u.new_ones(b, 1, height, width)
    blend = None if mixup is None else draw(mixup, u[:, 1]).reshape(b, 1, 1, 1).expand(b, 1, height, width)
    if cutmix is None:
        assert blend is not None
        return blend
    ratio = torch.sqrt(1 - draw(cutmix, u[:, 1]))
    inside_y = _near(torch.floor(u[:, 2] * height), torch.floor(height * ratio), height)
    inside_x = _near(torch.floor(u[:, 3] * width), torch.floor(width * ratio), width)
    cut = 1 - (inside_y[:, None, :, None] & inside_x[:, None, None, :]).to(u.dtype)
    return cut if blend is None else torch.where((u[:, 0] < switch).reshape(b, 1, 1, 1), cut, blend)


def mix(x: Tensor, weights: Tensor) -> Tensor:
    """Images (B, C, h, w) with their partners laid over them."""
    return weights * x + (1 - weights) * partners(x)


def soft_targets(labels: Tensor, weights: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Labels (B,) -> probabilities (B, classes), mixed as the pixels were.

    `smoothing` of the probability is spread over all classes evenly, as timm and torch do.
    """
    share = weights.mean((1, 2, 3)).unsqueeze(1)
    own = (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).to(weights.dtype)
    return (1 - smoothing) * (share * own + (1 - share) * partners(own)) + smoothing / classes


def erase_boxes(u: Tensor, size: tuple[int, int], probability: float) -> Tensor:
    """Rectangles (B, 4) = (top, left, height, width) to erase, of height and width 0 where there is none.

    `u` holds `ERASE_LANES` uniforms per image: whether, position, then area and aspect of ten attempts. The first
    attempt that is smaller than the image is taken.
    """
    height, width = size
    area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * u[:, 3 : 3 + _ATTEMPTS])
    low, high = math.log(_ASPECT[0]), math.log(_ASPECT[1])
    aspect = torch.exp(low + (high - low) * u[:, 3 + _ATTEMPTS :])
    h, w = torch.round(torch.sqrt(area * aspect)), torch.round(torch.sqrt(area / aspect))
    fits = (h < height) & (w < width)
    earliness = torch.arange(_ATTEMPTS, 0, -1, device=u.device)
    first = (fits * earliness).argmax(dim=1, keepdim=True)
    erased = (fits.any(dim=1) & (u[:, 0] < probability)).to(u.dtype)
    h, w = (side.gather(1, first)[:, 0] * erased for side in (h, w))
    top, left = torch.floor(u[:, 1] * (height - h + 1)), torch.floor(u[:, 2] * (width - w + 1))
    return torch.stack([top, left, h, w], dim=1)


def erase(x: Tensor, boxes: Tensor, noise: Tensor) -> Tensor:
    """Images (B, C, h, w) with `noise` of their shape inside the boxes."""
    top, left, h, w = boxes.unbind(1)
    rows, columns = _within(top, h, x.shape[2]), _within(left, w, x.shape[3])
    return torch.where(rows[:, None, :, None] & columns[:, None, None, :], noise, x)


def normal(u: Tensor) -> Tensor:
    """Uniforms in [0, 1), whole multiples of 2^-24, -> standard normal numbers, by the inverse of their CDF."""
    return math.sqrt(2) * torch.erfinv((2 * u - 1).clamp(min=-1 + 2.0**-24))


def _near(center: Tensor, length: Tensor, size: int) -> Tensor:
    """(B, size) whether a pixel is in the span of `length` around `center`."""
    return _within(center - torch.floor(length / 2), length, size)


def _within(start: Tensor, length: Tensor, size: int) -> Tensor:
    position = torch.arange(size, device=start.device)
    return (position >= start[:, None]) & (position < (start + length)[:, None])
