"""Neural Collapse (Papyan, Han, Donoho 2020), measured on the features of one layer.

With `m_c` the mean feature of class c, `m` the mean of those, `S_W` the covariance within classes and `S_B` that of the
class means:

| | statement | number, 0 (or 100 %) when collapsed |
|---|---|---|
| NC1 | variability within classes vanishes | `Tr(S_W S_B^+)` |
| NC2 | class means are equally long and equally far apart | variation of `abs(m_c - m)`; `abs(cos + 1 / (C - 1))` |
| NC3 | the classifier's rows are the class means | `norm(W / norm(W) - M / norm(M))` |
| NC4 | the network decides for the nearest class mean | share of samples where the two agree |
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Collapse:
    """NC1 to NC4 of one layer."""

    nc1: float
    nc2_norms: float
    """Standard deviation of the lengths of the centred class means over their mean."""
    nc2_angles: float
    """Mean over pairs of classes of `abs(cos + 1 / (C - 1))`."""
    nc3: float | None
    """Only where a classifier of this layer's width is given."""
    nc4: float | None
    """Per cent of samples; only where the network's decisions are given."""
    classes: int
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def neural_collapse(
    features: Tensor, labels: Tensor, weight: Tensor | None = None, decisions: Tensor | None = None
) -> Collapse:
    """NC1 to NC4 of features (N, D) with labels (N,), in float64.

    `weight` (C, D) is the last layer's matrix, for NC3; its rows are centred, as the means are. `decisions` (N,) are
    the classes that the network predicts, for NC4.
    """
    x = features.detach().flatten(1).double()
    classes, member = labels.unique(return_inverse=True)
    count = len(classes)
    if count < 2:
        raise ValueError(f"all {len(x)} samples are of one class; collapse compares classes")
    if not x.isfinite().all():
        raise ValueError("the features hold NaN or infinity")
    sizes = member.bincount().double()
    if (sizes < 2).all():
        raise ValueError("every class has one sample: there is no variability within classes")
    means = x.new_zeros(count, x.shape[1]).index_add_(0, member, x) / sizes[:, None]
    centred = means - means.mean(0)
    scale = centred.norm()
    if scale <= 1e-12 * x.norm():
        raise ValueError("all class means are the same: the features collapsed to one point")
    within = x - means[member]
    nc3 = nc4 = None
    if weight is not None:
        nc3 = _duality(weight, centred, classes)
    if decisions is not None:
        nearest = torch.cdist(x, means).argmin(1)
        nc4 = 100 * float((classes[nearest] == decisions.to(classes)).double().mean())
    cosines = F.normalize(centred, dim=1) @ F.normalize(centred, dim=1).T
    pairs = cosines[~torch.eye(count, dtype=torch.bool, device=x.device)]
    lengths = centred.norm(dim=1)
    return Collapse(
        nc1=_within_over_between(within, centred),
        nc2_norms=float(lengths.std(correction=0) / lengths.mean()),
        nc2_angles=float((pairs + 1 / (count - 1)).abs().mean()),
        nc3=nc3,
        nc4=nc4,
        classes=count,
        samples=len(x),
    )


def _within_over_between(within: Tensor, centred: Tensor) -> float:
    """`Tr(S_W S_B^+)` without forming D x D matrices: S_B^+ lives in the span of the C class means."""
    _, s, vh = torch.linalg.svd(centred / len(centred) ** 0.5, full_matrices=False)
    real = s > 1e-9 * s[0]
    along = within @ vh[real].T  # (N, C - 1)
    return float((along.square().mean(0) / s[real].square()).sum())


def _duality(weight: Tensor, centred: Tensor, classes: Tensor) -> float:
    w = weight.detach().double().to(centred.device)
    if w.ndim != 2 or w.shape[1] != centred.shape[1] or len(w) <= int(classes.max()):
        raise ValueError(
            f"a classifier of shape {tuple(w.shape)} does not fit {centred.shape[1]} features of classes up to "
            f"{int(classes.max())}"
        )
    w = w[classes]
    w = w - w.mean(0)
    return float((w / w.norm() - centred / centred.norm()).norm())
