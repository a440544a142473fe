"""Blocks of diffusers. Keys are the classes whose forward is rewritten here; diffusers itself is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .block import Kind, Part, refused, whole

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


# ---------------------------------------------------------------- U-Nets


def _resnet(block: Any, temb: Any = None, *_: Any, **__: Any) -> list[Part]:
    """Two convolutions, time between them, or in both norms; a shortcut that may change resolution and width."""
    in_norms = block.time_embedding_norm in ("ada_group", "spatial")
    resize = block.upsample or block.downsample
    context = (temb,) if in_norms else ()

    def resized(x: Tensor) -> Tensor:
        many = block.upsample is not None and len(x) >= 64  # as published
        return x if resize is None else resize(x.contiguous() if many else x)

    def branch(x: Tensor) -> Tensor:
        y = block.conv1(resized(block.nonlinearity(block.norm1(x, *context))))
        y = block.norm2(y, temb) if in_norms else _timed(block, y, temb)
        return block.conv2(block.dropout(block.nonlinearity(y)))

    def shortcut(x: Tensor) -> Tensor:
        x = resized(x)
        if block.conv_shortcut is None:
            return x
        return block.conv_shortcut(x.contiguous() if block.training and not in_norms else x)

    bare = resize is None and block.conv_shortcut is None
    return [Part("", branch, shortcut=None if bare else shortcut)]


def _timed(block: Any, y: Tensor, temb: Any) -> Tensor:
    """The second norm of a resnet, and what time adds before it, or scales and shifts after it."""
    if block.time_emb_proj is not None:
        temb = block.time_emb_proj(temb if block.skip_time_act else block.nonlinearity(temb))[:, :, None, None]
    if block.time_embedding_norm == "default" and temb is not None:
        y = y + temb
    y = block.norm2(y)
    if block.time_embedding_norm != "scale_shift":
        return y
    scale, shift = temb.chunk(2, dim=1)
    return y * (1 + scale) + shift


def _kandinsky(block: Any, time_embed: Any = None) -> list[Part]:
    changes = (block.shortcut_up_sample, block.shortcut_projection, block.shortcut_down_sample)
    bare = all(isinstance(change, nn.Identity) for change in changes)

    def branch(x: Tensor) -> Tensor:
        for layer in block.resnet_blocks:
            x = layer(x, time_embed)
        return x

    def shortcut(x: Tensor) -> Tensor:
        for change in changes:
            x = change(x)
        return x

    return [Part("", branch, shortcut=None if bare else shortcut)]


_ADDING = ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor")


def _adds(attention: Any) -> bool:
    """Does attention add its input itself, and by a processor that is known to do it?"""
    return attention.residual_connection and type(attention.processor).__name__ in _ADDING


def _continuous(transformer: Any) -> bool:
    """Is the transformer one of feature maps, which adds its input? One of patches or tokens does not."""
    return transformer.is_input_continuous


_RESNET = Kind(_resnet, stream="input_tensor", divisor="output_scale_factor")
_AROUND = whole("hidden_states")
"""A transformer as the branch of one step of a U-Net: streams of its own, and its input is added to what comes out."""
_BLENDS = "it blends its stream with what its temporal half makes of it, by a learned share"

UNET = ("down_blocks", "mid_block", "up_blocks", "resnets", "attentions", "temp_attentions", "motion_modules")
"""Lists in a U-Net, or in a part of it, whose blocks are one stream: its order is not that of the modules."""
KINDS: dict[str, Kind] = {
    f"diffusers.models.{name}": kind
    for name, kind in {
        "attention.BasicTransformerBlock": Kind(_transformer, stream="hidden_states"),
        "attention_processor.Attention": whole("hidden_states", divisor="rescale_output_factor", where=_adds),
        "controlnets.controlnet_xs.ControlNetXSCrossAttnDownBlock2D": refused("it carries two streams at once"),
        "resnet.ResnetBlock2D": _RESNET,
        "resnet.ResnetBlockCondNorm2D": _RESNET,
        "resnet.SpatioTemporalResBlock": refused(_BLENDS),
        "transformers.dual_transformer_2d.DualTransformer2DModel": _AROUND,
        "transformers.transformer_2d.Transformer2DModel": whole("hidden_states", where=_continuous),
        "transformers.transformer_temporal.TransformerTemporalModel": _AROUND,
        "unets.unet_kandinsky3.Kandinsky3ResNetBlock": Kind(_kandinsky),
        "unets.unet_motion_model.AnimateDiffTransformer3D": _AROUND,
    }.items()
}
