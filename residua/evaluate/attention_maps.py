"""Where a block looks: attention weights, which the forward pass itself never holds, computed again from q and k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from residua.nn import encoder_of, stream

from .features import frozen
from .maps import block_index


@torch.no_grad()
def attention_weights(model: nn.Module, images: Tensor, block: int = -1) -> Tensor:
    """`softmax(q k^T / sqrt(d))` of a block, (N, heads, T, T), for normalised images; rows sum to 1.

    The block's input is that of its residual step; its own norm and projection make q and k from it.
    """
    encoder = encoder_of(model)
    name = f"blocks.{block_index(block, encoder.depth)}.attn"
    with frozen(model) as device:
        x = next(step.input for step in stream(encoder, images.to(device)) if step.name == name)
        assert x is not None
        owner: Any = encoder.get_submodule(name.removesuffix(".attn"))
        b, n, d = x.shape
        heads = owner.attn.num_heads
        qkv = owner.attn.qkv(owner.norm1(x)).float().reshape(b, n, 3, heads, d // heads)
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return (q @ k.transpose(-1, -2) / (d // heads) ** 0.5).softmax(-1).cpu()


def class_attention(model: nn.Module, images: Tensor, block: int = -1, head: int | None = None) -> Tensor:
    """How much the class token attends to each patch, (N, rows, cols): one head's, or the mean over heads.

    A picture sums to 1 minus what the class token keeps for itself.
    """
    encoder = encoder_of(model)
    weights = attention_weights(model, images, block)
    if head is not None and not 0 <= head < weights.shape[1]:
        raise ValueError(f"there is no head {head}: the block has {weights.shape[1]}, 0 to {weights.shape[1] - 1}")
    chosen = weights.mean(1) if head is None else weights[:, head]
    rows, cols = (n // p for n, p in zip(images.shape[2:], encoder.patch_size))
    return chosen[:, 0, encoder.num_prefix_tokens :].unflatten(1, (rows, cols))
