"""How far an accuracy may be from the one on endlessly many test images."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(accuracy: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of an accuracy in percent over `n` independent test images, in percent.

    With p the share of hits and z the normal quantile (1.96 for 95 %):
    `(p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)`. Unlike `p +- z sqrt(p (1 - p) / n)` it stays
    within 0 and 100 and has a width where nothing or everything was hit. It knows the chance in drawing test images,
    not that in training.
    """
    if n < 1 or not 0 <= accuracy <= 100:
        raise ValueError(f"an accuracy in percent over at least one image is wanted, got {accuracy} over {n}")
    p, z = accuracy / 100, NormalDist().inv_cdf((1 + level) / 2)
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return 100 * max(0.0, low), 100 * min(1.0, high)
