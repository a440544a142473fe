"""Blocks of diffusers. Keys are the classes whose forward is rewritten here; diffusers itself is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .block import Kind, Part

Modulate = Callable[[Tensor], Tensor]


def _transformer(
    block: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    timestep: Any = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: Any = None,
    added_cond_kwargs: dict[str, Tensor] | None = None,
) -> list[Part]:
    """Self-attention, attention to an encoder where there is one, MLP; each behind a norm that may be conditioned."""
    options = dict(cross_attention_kwargs or {})
    if hasattr(block, "fuser") or "gligen" in options:
        raise ValueError("a BasicTransformerBlock cannot fade: its fuser adds to the stream in a way of its own")
    pooled = (added_cond_kwargs or {}).get("pooled_text_emb")
    before, gate, modulate, gate_mlp = _conditioned(block, timestep, class_labels, pooled)
    place = block.pos_embed or (lambda x: x)
    own = encoder_hidden_states if block.only_cross_attention else None

    def attention(x: Tensor) -> Tensor:
        y = place(before(x))
        return gate(block.attn1(y, encoder_hidden_states=own, attention_mask=attention_mask, **options))

    def cross(x: Tensor) -> Tensor:
        if block.norm_type == "ada_norm_single":  # as published: without its norm
            y = x
        else:
            y = place(_norm(block.norm2, block.norm_type, timestep, pooled)(x))
        kept = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
        return block.attn2(y, **kept, **options)

    def mlp(x: Tensor) -> Tensor:
        y = modulate(x)
        size = block._chunk_size
        if size is None:
            return gate_mlp(block.ff(y))
        chunks = y.chunk(y.shape[block._chunk_dim] // size, dim=block._chunk_dim)
        return gate_mlp(torch.cat([block.ff(chunk) for chunk in chunks], dim=block._chunk_dim))

    middle = [] if block.attn2 is None else [Part("attn2", cross)]
    return [Part("attn1", attention), *middle, Part("ff", mlp)]


def _norm(norm: Any, kind: str, timestep: Any, pooled: Any) -> Modulate:
    if kind == "ada_norm":
        return lambda x: norm(x, timestep)
    if kind == "ada_norm_continuous":
        return lambda x: norm(x, pooled)
    return norm


def _conditioned(
    block: Any, timestep: Any, class_labels: Any, pooled: Any
) -> tuple[Modulate, Modulate, Modulate, Modulate]:
    """What comes before and after self-attention, and before and after the MLP. Conditioning is computed here, once."""
    kind = block.norm_type

    def same(x: Tensor) -> Tensor:
        return x

    if kind in ("layer_norm", "ada_norm", "ada_norm_continuous"):
        last = block.norm3 if kind != "ada_norm_continuous" else _norm(block.norm3, kind, timestep, pooled)
        return _norm(block.norm1, kind, timestep, pooled), same, last, same
    if kind not in ("ada_norm_zero", "ada_norm_single"):
        raise ValueError(f"a BasicTransformerBlock with norm_type {kind!r} cannot fade: its MLP has no norm of its own")
    if timestep is None:
        return same, same, same, same  # listed, not called
    if kind == "ada_norm_zero":
        norm1, norm3 = block.norm1.norm, block.norm3
        dtype = block.norm1.linear.weight.dtype
        embedded = block.norm1.emb(timestep, class_labels, hidden_dtype=dtype)
        chunks = [c.unsqueeze(1) for c in block.norm1.linear(block.norm1.silu(embedded)).chunk(6, dim=1)]
    else:
        norm1, norm3 = block.norm1, block.norm2
        chunks = list((block.scale_shift_table[None] + timestep.reshape(len(timestep), 6, -1)).chunk(6, dim=1))
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = chunks
    return (
        lambda x: norm1(x) * (1 + scale) + shift,
        lambda x: gate * x,
        lambda x: norm3(x) * (1 + scale_mlp) + shift_mlp,
        lambda x: gate_mlp * x,
    )


KINDS: dict[str, Kind] = {
    "diffusers.models.attention.BasicTransformerBlock": Kind(_transformer, stream="hidden_states"),
}
