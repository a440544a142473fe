"""Residual Alignment (Li and Papyan 2023): four laws of trained residual networks, as numbers.

| law | statement | numbers |
|---|---|---|
| RA1 | representations of an input are equispaced on a line | line-shape score, variation of step lengths |
| RA2 | top singular vectors agree, left with right and across depth | diagonal share, coupling, subspace overlap |
| RA3 | the rank of a Jacobian is at most the number of classes | energy beyond C, `s_{C+1} / s_1`, entropy rank |
| RA4 | top singular values fall inversely with depth | slope and R^2 of `1 / s_1` over the block index |

All of it is measured per sample, from a path `h_0..h_L` and residual branches, `h_i = alpha_i h_{i-1} + f_i(h_{i-1})`.
Spectra of decayed networks depend on the gauge: dividing the stream by what survives of it makes an ordinary network
whose Jacobians are `J / alpha`. `gauge` says which are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from rich.table import Table
from torch import Tensor

from .jacobian import (
    JacobianSVD,
    Method,
    Operator,
    Products,
    exact,
    formed_for,
    jacobian_svd,
    says_what_to_do,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Gauge = Literal["J", "J/alpha"]
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """One residual step at a batch: the branch, where it is applied, and how much of the stream stays."""

    name: str
    branch: Map
    x: Tensor
    """(B, ...): the step's input."""
    alpha: float = 1.0


@dataclass(frozen=True)
class Path:
    """RA1 of every sample: how straight its path is and how even its steps are."""

    line_shape: Tensor
    """(B,): number of steps / |sum of unit steps|; 1 is a straight line."""
    variation: Tensor
    """(B,): standard deviation of the step lengths over their mean; 0 is equispaced."""


@dataclass(frozen=True)
class Alignment:
    """What was measured, per sample: B samples, L blocks, K triplets of each."""

    names: list[str]
    alphas: list[float]
    gauge: Gauge
    classes: int | None
    path: Path
    S: Tensor
    """(B, L, K) top singular values."""
    diagonal: Tensor
    """(B, L, L): share of the energy of `U_j^T J_i V_j` that lies on its diagonal; 1 where block i acts along j's."""
    coupling: Tensor
    """(B, L, L): `|U_j^T J_i V_j - S_i|_F / |S_i|_F`; 0 is perfect alignment."""
    overlap: Tensor
    """(B, L, L): `|V_i^T V_j|_F^2 / K`, of right singular subspaces; 1 is the same subspace."""
    overlap_left: Tensor
    """(B, L, L): `|U_i^T U_j|_F^2 / K`, the same of left ones."""
    overlap_classes: Tensor | None
    """(B, L, L): `overlap` of the first C vectors, which RA3 says are all there is."""
    grid: Tensor
    """(L, L, K, K): `|U_j^T J_i V_j|`, mean over samples; the picture of RA2."""
    swapped: Tensor
    """(L, L, K, K): `|V_j^T J_i U_j|`, mean over samples; as `grid` where left and right vectors agree."""
    left_right: Tensor
    """(B, L): |<u, v>| of each block's leading pair."""
    beyond: Tensor | None
    """(B, L): share of the energy of the K values beyond the first C."""
    ratio: Tensor | None
    """(B, L): s_{C+1} / s_1."""
    rank: Tensor
    """(B, L): entropy of the normalised squares of the K values, in nats."""
    slope: Tensor
    """(B,): of the least-squares line through (i, 1 / s_1)."""
    r2: Tensor
    """(B,): of that line."""
    converged: float
    """Share of the triplets that converged."""

    def scalars(self) -> dict[str, tuple[float, float]]:
        """Name -> mean and standard deviation over samples (over pairs of blocks too, without those with oneself)."""
        n = len(self.names)
        others = ~torch.eye(n, dtype=torch.bool) if n > 1 else torch.ones(1, 1, dtype=torch.bool)
        found = {
            "RA1 line shape": self.path.line_shape,
            "RA1 variation of steps": self.path.variation,
            "RA2 diagonal share": self.diagonal[:, others].mean(1),
            "RA2 coupling": self.coupling[:, others].mean(1),
            "RA2 subspace overlap": self.overlap[:, others].mean(1),
            "RA2 subspace overlap, left": self.overlap_left[:, others].mean(1),
            "RA2 left and right": self.left_right.mean(1),
            "RA3 entropy rank": self.rank.mean(1),
            "RA4 slope": self.slope,
            "RA4 R^2": self.r2,
        }
        if self.beyond is not None and self.ratio is not None and self.overlap_classes is not None:
            found |= {"RA3 energy beyond C": self.beyond.mean(1), "RA3 s_{C+1} / s_1": self.ratio.mean(1)}
            found["RA2 overlap of first C"] = self.overlap_classes[:, others].mean(1)
        return {name: (float(v.mean()), float(_spread(v))) for name, v in sorted(found.items())}

    def verdicts(self) -> dict[str, tuple[bool, str]]:
        """Law -> whether it holds here, and by which threshold on the mean over samples.

        A law that cannot be judged is left out, see `unjudged`.
        """
        mean = {name: value for name, (value, _) in self.scalars().items()}
        ra1 = mean["RA1 line shape"] <= 1.1 and mean["RA1 variation of steps"] <= 0.3
        found = {
            "RA1": (ra1, "line shape <= 1.1 and variation of steps <= 0.3"),
            "RA2": (mean["RA2 diagonal share"] >= 0.8, "diagonal share >= 0.8 between different blocks"),
        }
        if "RA3 energy beyond C" in mean:
            by = f"at most 5 % of the top {self.S.shape[-1]} values' energy beyond C"
            found["RA3"] = (mean["RA3 energy beyond C"] <= 0.05, by)
        if len(self.names) > 2:
            largest = self.S[..., 0][self.S[..., 0] > 0]
            rises = mean["RA4 slope"] * (len(self.names) - 1) > 0.01 * float((1 / largest).mean())
            by = "1 / s_1 rises linearly, R^2 >= 0.8, by more than 1 % in all"
            found["RA4"] = (mean["RA4 R^2"] >= 0.8 and rises, by)
        return dict(sorted(found.items()))

    def unjudged(self) -> dict[str, str]:
        """Law -> why there is no verdict on it."""
        found = {}
        k = self.S.shape[-1]
        if self.classes is None:
            found["RA3"] = "the number of classes is not known"
        elif self.beyond is None:
            found["RA3"] = f"needs more than C = {self.classes} triplets, has {k}"
        if len(self.names) < 3:
            found["RA4"] = "a line through two blocks always fits"
        return found

    def table(self, title: str = "") -> Table:
        """For the terminal: every number with its spread over samples, every law with its verdict."""
        table = Table(title=title or f"{len(self.S)} samples, {len(self.names)} blocks", title_justify="left")
        for heading, justify in (("", "left"), ("mean", "right"), ("spread", "right"), ("holds", "left")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        said = {law: f"{'yes' if holds else 'no'}: {by}" for law, (holds, by) in self.verdicts().items()}
        said |= {law: f"not judged: {why}" for law, why in self.unjudged().items()}
        told: set[str] = set()
        for name, (mean, spread) in self.scalars().items():
            law = name[:3]
            verdict = "" if law in told else said.get(law, "")
            told.add(law)
            table.add_row(name, f"{mean:.3f}", f"± {spread:.3f}", verdict)
        return table

    def figure(self) -> Figure:
        """RA2 to RA4 as pictures, mean over samples; `.savefig("laws.png")` keeps it. `residua anatomy` draws more."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure((10.5, 3.2), layout="constrained")
        pairs, values, inverse = figure.subplots(1, 3)
        pairs.set(title="RA2: diagonal share", xlabel="block j, its vectors", ylabel="block i, its Jacobian")
        figure.colorbar(pairs.imshow(self.diagonal.mean(0).cpu(), vmin=0, vmax=1), ax=pairs)
        values.set(title=f"RA3: singular values of {self.gauge}", xlabel="number", yscale="log")
        for i, own in enumerate(self.S.mean(0).cpu()):
            values.plot(range(1, len(own) + 1), own, color=str(0.8 * i / len(self.names)))
        inverse.set(title="RA4: 1 / largest", xlabel="block")
        told = self.to_dict()
        heights = [math.nan if v is None else v for v in told["inverse_s1"]]
        spreads = [math.nan if v is None else v for v in told["inverse_s1_spread"]]
        inverse.errorbar(range(len(heights)), heights, spreads, fmt="o")
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain values: scalars and verdicts, and means and spreads over samples by block.

        A block that is dead for a sample has no `1 / s_1`, which is None.
        """
        inverse = 1 / self.S[..., 0]
        return {
            "blocks": self.names,
            "alphas": self.alphas,
            "gauge": self.gauge,
            "classes": self.classes,
            "samples": len(self.S),
            "k": self.S.shape[-1],
            "converged": self.converged,
            "scalars": {name: {"mean": mean, "spread": spread} for name, (mean, spread) in self.scalars().items()},
            "verdicts": {law: {"holds": holds, "by": by} for law, (holds, by) in self.verdicts().items()},
            "unjudged": self.unjudged(),
            "singular_values": self.S.mean(0).tolist(),
            "inverse_s1": [v if math.isfinite(v) else None for v in inverse.mean(0).tolist()],
            "inverse_s1_spread": [v if math.isfinite(v) else None for v in _spread(inverse).tolist()],
            "left_right": self.left_right.mean(0).tolist(),
            "coupling": self.coupling.mean(0).tolist(),
            "diagonal": self.diagonal.mean(0).tolist(),
        }


def _spread(values: Tensor) -> Tensor:
    """Standard deviation over samples, 0 for one."""
    return values.std(0, correction=1) if len(values) > 1 else torch.zeros_like(values[0])


def straightness(points: Tensor) -> Path:
    """RA1 of paths (L + 1, B, ...): `h_0..h_L`. Steps of length zero have no direction and count as bends."""
    steps = points.flatten(2).diff(dim=0)  # (L, B, n)
    lengths = steps.norm(dim=-1)
    unit = steps / lengths.clamp_min(torch.finfo(steps.dtype).tiny)[..., None]
    total = unit.sum(0).norm(dim=-1)
    return Path(len(steps) / total.clamp_min(1e-12), lengths.std(0, correction=0) / lengths.mean(0).clamp_min(1e-12))


def measure(
    blocks: Sequence[Block],
    end: Tensor,
    k: int = 30,
    *,
    classes: int | None = None,
    gauge: Gauge = "J",
    method: Method = "auto",
    budget: float = 2.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Alignment:
    """The four laws over blocks whose inputs and outputs have one shape; `end` (B, ...) is the stream after the last.

    `k` triplets of every block; `classes` is the C of RA3. Memory: U and V of all blocks, and beside them what `budget`
    (GiB) allows for products. The path of RA1 is that of the measured gauge: streams
    divided by what survives of the first, for "J/alpha".
    """
    if gauge not in get_args(Gauge):
        raise ValueError(f"gauge is {gauge!r}; choose J or J/alpha")
    if gauge == "J/alpha" and not all(block.alpha for block in blocks):
        raise ValueError("gauge J/alpha divides by alpha, and a shortcut of this network has alpha 0: use gauge J")
    if classes is not None and classes < 1:
        raise ValueError(f"classes is {classes}; give the number of classes that the network was trained on")
    if len(blocks) < 2:
        raise ValueError(f"{len(blocks)} residual blocks of one shape: alignment compares at least two")
    scales = [1.0 / b.alpha if gauge == "J/alpha" else 1.0 for b in blocks]
    found: list[JacobianSVD] = []
    for i, block in enumerate(blocks):
        try:
            found.append(jacobian_svd(block.branch, block.x, k, method=method, budget=budget, seed=seed))
        except ValueError as error:
            raise type(error)(f"block {block.name}: {error}") from error
        if progress is not None:
            progress(i + 1, 2 * len(blocks))
    if not any(f.S.any() for f in found):
        raise ValueError(
            "every Jacobian is zero at these images: branches that start at zero have nothing to align before training"
        )
    u, v = ([getattr(f, name).flatten(2) for f in found] for name in ("U", "V"))  # L times (B, K, n)
    s = torch.stack([f.S * scale for f, scale in zip(found, scales)], 1)
    at_once = max(1, int(budget * 2**30 / (4 * v[0].numel() * v[0].element_size())))
    grids: list[Tensor] = []
    swapped: list[Tensor] = []
    for i, (block, scale) in enumerate(zip(blocks, scales)):
        with says_what_to_do(budget, len(end)), exact():
            products = formed_for(Products(block.branch, block.x, budget), 2 * len(blocks) * k)
            grids.append(_acted(products, u, v, at_once) * scale)
            swapped.append(_acted(products, v, u, at_once).abs().mean(0) * scale)
        if progress is not None:
            progress(len(blocks) + i + 1, 2 * len(blocks))
    grid = torch.stack(grids, 1)  # (B, i, j, K, K)
    return _summary(blocks, end, grid, torch.stack(swapped), u, v, s, found, classes, gauge)


def _acted(products: Operator, left: list[Tensor], right: list[Tensor], at_once: int) -> Tensor:
    """(B, j, K, K) `left_j^T J right_j`, with the vectors of so many blocks j at once."""
    found = []
    k = right[0].shape[1]
    for start in range(0, len(right), at_once):
        own = slice(start, start + at_once)
        pushed = products.push(torch.cat(right[own], 1)).split(k, 1)
        found += [u @ w.mT for u, w in zip(left[own], pushed)]
    return torch.stack(found, 1)


def _summary(
    blocks: Sequence[Block],
    end: Tensor,
    grid: Tensor,
    swapped: Tensor,
    u: list[Tensor],
    v: list[Tensor],
    s: Tensor,
    found: Sequence[JacobianSVD],
    classes: int | None,
    gauge: Gauge,
) -> Alignment:
    energy = grid.square()
    on_diagonal = energy.diagonal(dim1=-2, dim2=-1).sum(-1)
    target = torch.diag_embed(s)[:, :, None]  # S_i against every j
    difference = (grid - target).flatten(-2).norm(dim=-1)
    tiny = torch.finfo(s.dtype).tiny
    slope, r2 = _line(1 / s[..., 0].clamp_min(tiny), s[..., 0] > 0)
    p = s.square() / s.square().sum(-1, keepdim=True).clamp_min(tiny)  # a dead block has no energy anywhere
    beyond = ratio = overlap_classes = None
    if classes is not None and classes < s.shape[-1]:
        beyond = p[..., classes:].sum(-1)
        ratio = s[..., classes] / s[..., 0].clamp_min(tiny)
        overlap_classes = _overlap([own[:, :classes] for own in v])
    return Alignment(
        names=[block.name for block in blocks],
        alphas=[block.alpha for block in blocks],
        gauge=gauge,
        classes=classes,
        path=straightness(stream_points(blocks, end, gauge)),
        S=s,
        diagonal=on_diagonal / energy.sum((-2, -1)).clamp_min(tiny),
        coupling=difference / s.norm(dim=-1)[:, :, None].clamp_min(tiny),
        overlap=_overlap(v),
        overlap_left=_overlap(u),
        overlap_classes=overlap_classes,
        grid=grid.abs().mean(0),
        swapped=swapped,
        left_right=torch.stack([(a[:, 0] * b[:, 0]).sum(-1).abs() for a, b in zip(u, v)], 1),
        beyond=beyond,
        ratio=ratio,
        rank=torch.special.entr(p).sum(-1),
        slope=slope,
        r2=r2,
        converged=float(torch.stack([f.converged for f in found]).double().mean()),
    )


def stream_points(blocks: Sequence[Block], end: Tensor, gauge: Gauge) -> Tensor:
    """(L + 1, B, ...) streams, in the gauge: divided by the product of alphas so far."""
    points = [*(block.x for block in blocks), end]
    if gauge == "J/alpha":
        left = 1.0
        scaled = [points[0]]
        for block, point in zip(blocks, points[1:]):
            left *= block.alpha
            scaled.append(point / left)
        points = scaled
    return torch.stack(points)


def _overlap(v: list[Tensor]) -> Tensor:
    """(B, L, L) `|V_i^T V_j|_F^2 / K` of L times (B, K, n) orthonormal rows."""
    rows = [torch.stack([(a @ b.mT).square().sum((1, 2)) for b in v], 1) for a in v]
    return torch.stack(rows, 1) / v[0].shape[1]


def _line(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and R^2 of the line through (i, values (B, L)), for every row, over the blocks that are counted (B, L)."""
    i = torch.arange(values.shape[1], dtype=values.dtype, device=values.device).expand_as(values)
    tiny, weight = torch.finfo(values.dtype).tiny, counted.to(values.dtype)
    share = weight / weight.sum(1, keepdim=True).clamp_min(1)
    values = torch.where(counted, values, 0.0)
    i, y = (weight * (z - (share * z).sum(1, keepdim=True)) for z in (i, values))
    slope = (y * i).sum(1) / i.square().sum(1).clamp_min(tiny)
    rest = (y - slope[:, None] * i).square().sum(1)
    total = y.square().sum(1)
    return slope, torch.where(total > 0, 1 - rest / total.clamp_min(tiny), 1.0)


def ujm_blocks(model: Any) -> tuple[list[Block], Tensor]:
    """The blocks of an unconstrained Jacobians model at its data, and the stream after the last."""
    points = model.path()
    return [Block(f"J_{i + 1}", f, points[i]) for i, f in enumerate(model.maps())], points[-1]
