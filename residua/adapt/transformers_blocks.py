"""Blocks of transformers. Keys are the classes whose forward is rewritten here; transformers itself is not imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .block import Kind, Part


def _vit(block: Any, attention_mask: Any = None, **kwargs: Any) -> list[Part]:
    """`x + dropout(attention(norm x))`, then the same with the MLP."""
    return [
        Part(
            "attention",
            lambda x: block.dropout(block.attention(block.layernorm_before(x), attention_mask, **kwargs)[0]),
        ),
        Part("mlp", lambda x: block.dropout(block.mlp(block.layernorm_after(x)))),
    ]


def _dino(block: Any, attention_mask: Any = None, position_embeddings: Any = None, **kwargs: Any) -> list[Part]:
    """DINOv2 and v3: layer scale and drop path; v3 rotates by positions. In older versions v2 takes no mask and returns
    its output alone."""
    given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
    kwargs |= {name: value for name, value in given.items() if value is not None}

    def attention(x: Tensor) -> Tensor:
        y = block.attention(block.norm1(x), **kwargs)
        return block.drop_path(block.layer_scale1(y[0] if isinstance(y, tuple) else y))

    return [
        Part("attention", attention),
        Part("mlp", lambda x: block.drop_path(block.layer_scale2(block.mlp(block.norm2(x))))),
    ]


def _beit(
    block: Any,
    attention_mask: Any = None,
    interpolate_pos_encoding: bool = False,
    resolution: Any = None,
    **kwargs: Any,
) -> list[Part]:
    """As ViT's, with layer scale, drop path, and relative positions where the layer has its own."""

    def attention(x: Tensor) -> Tensor:
        mask = attention_mask
        if block.relative_position_bias is not None:
            window = tuple(side // block.patch_size for side in resolution)
            bias = block.relative_position_bias(window, interpolate_pos_encoding, dim_size=x.shape[1])
            mask = bias if mask is None else bias + mask
        y = block.attention(block.layernorm_before(x), attention_mask=mask, **kwargs)[0]
        return block.drop_path(block.lambda_1 * block.dropout(y))

    return [
        Part("attention", attention),
        Part("mlp", lambda x: block.drop_path(block.lambda_2 * block.dropout(block.mlp(block.layernorm_after(x))))),
    ]


def _clip(block: Any, attention_mask: Any = None, **kwargs: Any) -> list[Part]:
    """CLIP and SigLIP, either tower."""
    mask = attention_mask

    def attention(x: Tensor) -> Tensor:
        return block.self_attn(hidden_states=block.layer_norm1(x), attention_mask=mask, **kwargs)[0]

    return [Part("self_attn", attention), Part("mlp", lambda x: block.mlp(block.layer_norm2(x)))]


def _gpt2(
    block: Any,
    past_key_values: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    use_cache: Any = False,
    **kwargs: Any,
) -> list[Part]:
    """Attention, attention to an encoder where the block was built for it, MLP."""
    seen = {"past_key_values": past_key_values, "attention_mask": attention_mask}

    def cross(x: Tensor) -> Tensor:
        given = _given(encoder_hidden_states)
        encoder = {"encoder_hidden_states": given, "encoder_attention_mask": encoder_attention_mask}
        return block.crossattention(block.ln_cross_attn(x), **seen, **encoder)[0]

    parts = [Part("attn", lambda x: block.attn(block.ln_1(x), **seen, use_cache=use_cache, **kwargs)[0])]
    if hasattr(block, "crossattention"):
        parts.append(Part("crossattention", cross))
    return [*parts, Part("mlp", lambda x: block.mlp(block.ln_2(x)))]


def _llama(
    block: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> list[Part]:
    """Pre-norm decoder layer with rotated positions and a cache."""
    named = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
    named |= {"use_cache": use_cache, "position_embeddings": position_embeddings, **kwargs}
    return [
        Part("self_attn", lambda x: block.self_attn(hidden_states=block.input_layernorm(x), **named)[0]),
        Part("mlp", lambda x: block.mlp(block.post_attention_layernorm(x))),
    ]


def _gemma2(
    block: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> list[Part]:
    """Norms on both sides of each branch: `x + norm(attention(norm x))`."""
    named = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
    named |= {"position_embeddings": position_embeddings, **kwargs}

    def attention(x: Tensor) -> Tensor:
        y = block.self_attn(hidden_states=block.input_layernorm(x), **named)[0]
        return block.post_attention_layernorm(y)

    def mlp(x: Tensor) -> Tensor:
        return block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x)))

    return [Part("self_attn", attention), Part("mlp", mlp)]


def _bert(
    block: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> list[Part]:
    """Post-norm: `LN(alpha x + attention(x))`, then the MLP; between them an encoder, where there is one."""
    cache = {"past_key_values": past_key_values, **kwargs}

    def end(output: Any, y: Tensor) -> Tensor:
        return output.dropout(output.dense(y))

    def attention(x: Tensor) -> Tensor:
        y = block.attention.self(x, encoder_hidden_states=None, attention_mask=attention_mask, **cache)[0]
        return end(block.attention.output, y)

    def cross(x: Tensor) -> Tensor:
        given = {"encoder_hidden_states": _given(encoder_hidden_states), "attention_mask": encoder_attention_mask}
        return end(block.crossattention.output, block.crossattention.self(x, **given, **cache)[0])

    parts = [Part("attention", attention, after=block.attention.output.LayerNorm)]
    if hasattr(block, "crossattention"):
        parts.append(Part("crossattention", cross, after=block.crossattention.output.LayerNorm))
    mlp = Part("output", lambda x: end(block.output, block.intermediate(x)), after=block.output.LayerNorm)
    return [*parts, mlp]


def _resnet(block: Any) -> list[Part]:
    """ResNet and RegNet: the activation follows the addition."""
    return [Part("", block.layer, shortcut=block.shortcut, after=block.activation, branch_first=True)]


def _given(encoder_hidden_states: Any) -> Any:
    if encoder_hidden_states is None:
        raise ValueError("a faded block with cross-attention needs encoder_hidden_states: its shortcut has an alpha")
    return encoder_hidden_states


ALIKE: dict[str, tuple[str, ...]] = {
    "vit.ViTLayer": (
        "vit_mae.ViTMAELayer", "deit.DeiTLayer", "ijepa.IJepaLayer", "vit_msn.ViTMSNLayer", "vivit.VivitLayer",
        "audio_spectrogram_transformer.ASTLayer",
    ),
    "dinov2.Dinov2Layer": ("dinov2_with_registers.Dinov2WithRegistersLayer",),
    "clip.CLIPEncoderLayer": (
        "siglip.SiglipEncoderLayer", "siglip2.Siglip2EncoderLayer", "metaclip_2.MetaClip2EncoderLayer",
    ),
    "llama.LlamaDecoderLayer": (
        "mistral.MistralDecoderLayer", "ministral.MinistralDecoderLayer", "qwen2.Qwen2DecoderLayer",
        "qwen3.Qwen3DecoderLayer", "gemma.GemmaDecoderLayer", "olmo.OlmoDecoderLayer", "smollm3.SmolLM3DecoderLayer",
        "starcoder2.Starcoder2DecoderLayer", "helium.HeliumDecoderLayer", "glm.GlmDecoderLayer",
        "seed_oss.SeedOssDecoderLayer", "arcee.ArceeDecoderLayer",
    ),
    "gemma2.Gemma2DecoderLayer": ("gemma3.Gemma3DecoderLayer",),
    "bert.BertLayer": (
        "roberta.RobertaLayer", "xlm_roberta.XLMRobertaLayer", "camembert.CamembertLayer", "electra.ElectraLayer",
        "ernie.ErnieLayer",
    ),
    "resnet.ResNetBasicLayer": (
        "resnet.ResNetBottleNeckLayer", "regnet.RegNetXLayer", "regnet.RegNetYLayer",
    ),
}  # fmt: skip
"""Layers whose forward is the same code, under the name of the one that stands for them."""

_PARTS: dict[str, Any] = {
    "vit.ViTLayer": _vit,
    "dinov2.Dinov2Layer": _dino,
    "dinov3_vit.DINOv3ViTLayer": _dino,
    "beit.BeitLayer": _beit,
    "clip.CLIPEncoderLayer": _clip,
    "gpt2.GPT2Block": _gpt2,
    "llama.LlamaDecoderLayer": _llama,
    "gemma2.Gemma2DecoderLayer": _gemma2,
    "bert.BertLayer": _bert,
    "resnet.ResNetBasicLayer": _resnet,
}


def qualified(short: str) -> str:
    """`vit.ViTLayer` -> `transformers.models.vit.modeling_vit.ViTLayer`."""
    package, name = short.split(".")
    return f"transformers.models.{package}.modeling_{package}.{name}"


KINDS: dict[str, Kind] = {
    qualified(name): Kind(parts, stream="hidden_state" if parts is _resnet else "hidden_states")
    for first, parts in _PARTS.items()
    for name in (first, *ALIKE.get(first, ()))
}

ASIDE = {qualified("vit_mae.ViTMAEDecoder")}
"""Modules with blocks that are no part of the model's stream."""
