"""What a layer is made of: equation 4 of Zhang et al. (2024), measured.

A stream `x_k = alpha_k x_{k-1} + s_k` that starts as `s_0`, the embedding, is the sum of what was written into it:

    x_k = sum_{i<=k} W[k, i] s_i        W[k, i] = alpha_{i+1} ... alpha_k,  W[k, k] = 1

`W` is known without data. The share of writer i in layer k is `c[k, i] = sum <W[k, i] s_i, x_k> / sum |x_k|^2`, with
sums over images and patch tokens; over i the shares sum to 1. A branch that erases what is there has a negative share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from residua.nn.stream import residual_part, stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMBEDDING = "embedding"
_BATCH = 64
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Mixing:
    """The mixing matrix of a stream of K steps, and what each layer is made of."""

    names: list[str]
    """Of the K + 1 writers: the embedding, then every sublayer."""
    W: Tensor
    """(K + 1, K + 1), lower triangular: how much of writer i's output is in the stream after step k."""
    shares: Tensor
    """(K + 1, K + 1): the share of writer i in the stream after step k; each row sums to 1."""
    centred: bool
    """Whether the mean over images was subtracted at every position first."""

    @property
    def embedding(self) -> float:
        """The embedding's share in the last layer."""
        return float(self.shares[-1, 0])

    @property
    def echo(self) -> float:
        """Share of the embedding and the first third of the sublayers in the last layer."""
        return float(self.shares[-1, : (len(self.names) - 1) // 3 + 1].sum())

    @property
    def depth(self) -> float:
        """Mean depth of what the last layer is made of: 0 is the embedding alone, 1 the last sublayer alone."""
        last = self.shares[-1]
        return float(last @ torch.arange(len(last), dtype=last.dtype)) / (len(last) - 1)

    def figure(self) -> Figure:
        """The last layer as a bar of shares."""
        from residua.report.anatomy import share_bars  # slow to import

        return share_bars({"last layer": self})


@torch.no_grad()
def mixing(model: nn.Module, images: Tensor, *context: Any, centred: bool = True) -> Mixing:
    """What every layer of one of our transformers is made of, on images (B, C, H, W).

    Class tokens are left out. `centred` subtracts from every summand its mean over images at each position, so that
    what is the same for all images does not count; this needs several images. A diffusion model takes time and label
    as `context`, each (B,).

    >>> mix = residua.mixing(model, images)
    >>> mix.echo, mix.shares[-1]
    """
    part, training = residual_part(model), model.training
    if centred and len(images) < 2:
        raise ValueError("centred shares are about differences between images: give two images or more")
    model.eval()
    try:
        sums = _Sums(getattr(part, "num_prefix_tokens", 0))
        for start in range(0, len(images), _BATCH):
            own = slice(start, start + _BATCH)
            sums.add(model, images[own], *(c[own] if isinstance(c, Tensor) else c for c in context))
    finally:
        model.train(training)
    steps = part.steps(*context)
    W = _mixing_matrix(torch.stack([step.alpha for step in steps]).detach().double().cpu())
    written, energy = sums.products(centred)
    shares = W * written / energy[:, None]
    total = shares.sum(1)
    if not bool(((total - 1).abs() < _TOLERANCE).all()):
        raise ValueError(
            f"shares sum to {float(total[(total - 1).abs().argmax()]):.4g} instead of 1: the stream is not the sum of "
            "what its steps say they write, or its values are not finite"
        )
    return Mixing([EMBEDDING, *(step.name for step in steps)], W, shares, centred)


def _mixing_matrix(alphas: Tensor) -> Tensor:
    """(K,) -> (K + 1, K + 1) products of alphas."""
    W = torch.eye(len(alphas) + 1, dtype=alphas.dtype)
    for k, alpha in enumerate(alphas):
        W[k + 1, : k + 1] = alpha * W[k, : k + 1]
    return W


class _Sums:
    """Inner products of every written s_i with every stream x_k, summed over images and positions in float64."""

    def __init__(self, prefix: int) -> None:
        self._prefix = prefix
        self._count = 0
        self._products: Any = 0.0  # (K + 1, K + 1): k, i
        self._energy: Any = 0.0  # (K + 1,)
        self._written: Any = 0.0  # (K + 1, N * D): sums over images
        self._streams: Any = 0.0

    def add(self, model: nn.Module, images: Tensor, *context: Any) -> None:
        bound = stream(model, images, *context)
        for step in bound:
            if step.skip is not None or step.shortcut is not None or step.after is not None:
                raise ValueError(
                    f"step {step.name} is not x <- alpha x + f(x) alone: it has a long skip, a projection or an "
                    "activation after the addition. Shares are known for transformers without long skips"
                )
        inputs = [step.input for step in bound if step.input is not None]  # of all: the stream is bound
        streams = [*inputs, bound[-1](inputs[-1])]
        written = [inputs[0], *(step.branch(x) for step, x in zip(bound, inputs, strict=True))]
        x, s = (torch.stack([t[:, self._prefix :].double().flatten(1) for t in own]) for own in (streams, written))
        self._count += len(images)
        self._products = self._products + x.flatten(1) @ s.flatten(1).T
        self._energy = self._energy + x.square().sum((1, 2))
        self._streams, self._written = self._streams + x.sum(1), self._written + s.sum(1)

    def products(self, centred: bool) -> tuple[Tensor, Tensor]:
        """`sum <s_i, x_k>` (k, i) and `sum |x_k|^2`, of deviations from the mean over images where centred."""
        written, energy = self._products, self._energy
        if centred:
            written = written - self._streams @ self._written.T / self._count
            energy = energy - self._streams.square().sum(1) / self._count
        return written.cpu(), energy.cpu()
