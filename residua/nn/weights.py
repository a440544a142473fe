"""Weights of other projects, read into ours: the original masked autoencoder's, transformers', timm's and DINO's ViTs,
U-ViT's and SiT's."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]

_HEADS = ("pooler.", "classifier.", "head.", "fc_norm.")  # what a classifier has on top of its encoder

# transformers' names, as they are on disk and as they are in memory since version 5, to timm's
_TRANSFORMERS = [
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"^layernorm\.", "norm."),
    (r"^decoder\.decoder_(?:layers|encoder\.layer)\.(\d+)\.", r"decoder_blocks.\1."),
    (r"^decoder\.", ""),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(?:attention\.)?(?:query|q_proj)\.", ".attn.q."),
    (r"\.attention\.(?:attention\.)?(?:key|k_proj)\.", ".attn.k."),
    (r"\.attention\.(?:attention\.)?(?:value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
]
# the original implementation's decoder to ours
_DECODER = [
    (r"^mask_token$", "decoder.token"),
    (r"^decoder_pos_embed$", "decoder.pos_embed"),
    (r"^decoder_(embed|blocks|norm|pred)\.", r"decoder.\1."),
]

# where files keep the weights; of DINO's two the teacher's
_WRAPPED = ("model", "state_dict", "model_state_dict", "teacher", "student")
_COMPILED = "_orig_mod."  # of torch.compile, around a model or a part of it

_DIFFUSION = ("mid_block.attn.qkv.weight", "x_embedder.proj.weight")  # U-ViT and SiT, under whose names ours go


def unwrap(content: Any) -> Any:
    """What a training file holds, optimiser and all -> its weights; anything else as it is."""
    for name in _WRAPPED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            return unwrap(content[name])
    return content


def unprefixed(state: State) -> dict[str, Tensor]:
    """Weights without what distributed training and torch.compile put before their names."""
    return {str(key).replace(_COMPILED, "").removeprefix("module."): value for key, value in state.items()}


@contextmanager
def _named() -> Iterator[None]:
    """What is missing among weights is named in a ValueError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"these weights are incomplete: {error.args[0]} is missing") from None


@_named()
def translate(state: State) -> dict[str, Tensor]:
    """Any known naming -> ours: `encoder.*`, and `decoder.*` where the file has a decoder."""
    state = unprefixed(state)
    if any(key.startswith("backbone.") for key in state):
        state = {key.removeprefix("backbone."): value for key, value in state.items()}
    if any(key.startswith("encoder.blocks.") for key in state):
        return dict(state)
    if any(key in state for key in _DIFFUSION):
        return {f"encoder.{key}": value for key, value in _without_variance(state).items()}
    if any("embeddings.patch_embeddings" in key for key in state):
        state = _fuse_qkv({_rename(key, _TRANSFORMERS): value for key, value in state.items()})
    out = {}
    for key, value in state.items():
        renamed = _rename(key, _DECODER)
        if not renamed.startswith(_HEADS):
            out[renamed if renamed.startswith("decoder.") else f"encoder.{renamed}"] = value
    if "encoder.patch_embed.proj.weight" not in out:
        some = ", ".join(list(state)[:3])
        raise ValueError(f"these are no weights of a vision transformer or masked autoencoder (found: {some}, ...)")
    return out


@_named()
def infer_config(state: State, num_heads: int | None = None, img_size: tuple[int, int] | None = None) -> dict[str, Any]:
    """Keyword arguments of `create_model` for translated weights, read off their shapes.

    The number of heads leaves no trace in a shape: 64 channels each unless told, 80 for the published ViT-H, 72 for
    U-ViT-H and SiT-XL. Nor does the aspect of images: square, unless `img_size` has as many positions.
    """
    if "encoder.patch_embed.proj.weight" not in state or "encoder.in_blocks.0.norm1.weight" in state:
        return _diffusion_config(state, num_heads)
    width, channels, *patch = _convolution(state, "encoder.patch_embed.proj.weight")
    tokens = [name for name in ("cls_token", "dist_token", "reg_token") if f"encoder.{name}" in state]
    if tokens != ["cls_token"]:
        raise ValueError(
            f"beside patches these weights have {', '.join(tokens) or 'no token'}, where this model has a class token: "
            "name timm's model, timm:NAME, and give this file as its weights"
        )
    rows, columns = _grid(state["encoder.pos_embed"].shape[1] - 1, patch, img_size)
    config: dict[str, Any] = {
        "name": "vit",
        "img_size": (rows * patch[0], columns * patch[1]),
        "patch_size": tuple(patch),
        "in_chans": channels,
        "embed_dim": width,
        "depth": _count(state, "encoder.blocks."),
        "num_heads": num_heads or (16 if width == 1280 else max(1, width // 64)),
        "mlp_ratio": state["encoder.blocks.0.mlp.fc1.weight"].shape[0] / width,
        "norm_eps": 1e-6,
    }
    if "decoder.pred.weight" not in state:
        return {**config, "final_norm": "encoder.norm.weight" in state}
    dim = state["decoder.pred.weight"].shape[1]
    depth = _count(state, "decoder.blocks.")
    return {**config, "name": "mae_vit", "decoder": "plain", "decoder_embed_dim": dim, "decoder_depth": depth,
            "decoder_num_heads": 16 if dim % 512 == 0 else max(1, dim // 32)}  # fmt: skip


def _grid(cells: int, patch: Sequence[int], img_size: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of positions: those of the images told of, where they are as many, or of square ones."""
    if img_size is not None:
        rows, columns = (n // p for n, p in zip(img_size, patch))
        if rows * columns == cells:
            return rows, columns
    return _side(cells), _side(cells)


def _side(cells: int) -> int:
    side = round(cells**0.5)
    if side * side != cells:
        raise ValueError(f"{cells} positions make no square image, and nothing says which size it has")
    return side


def _diffusion_config(state: State, num_heads: int | None) -> dict[str, Any]:
    """For U-ViT and SiT. The last row of a label table is taken for "no label"."""
    state = {key.removeprefix("encoder."): value for key, value in state.items()}
    uvit = "patch_embed.proj.weight" in state
    width, channels, *patch = _convolution(state, "patch_embed.proj.weight" if uvit else "x_embedder.proj.weight")
    table = state.get("label_emb.weight" if uvit else "y_embedder.embedding_table.weight")
    prefix = (1 if table is None else 2) if uvit else 0
    side = _side(state["pos_embed"].shape[1] - prefix)
    first = "in_blocks" if uvit else "blocks"
    config = {
        "name": "uvit" if uvit else "sit",
        "img_size": (side * patch[0], side * patch[1]),
        "patch_size": tuple(patch),
        "in_chans": channels,
        "embed_dim": width,
        "depth": _count(state, f"{first}.") * (2 if uvit else 1),
        "num_heads": num_heads or (16 if width == 1152 else max(1, width // 64)),
        "mlp_ratio": state[f"{first}.0.mlp.fc1.weight"].shape[0] / width,
        "num_classes": None if table is None else len(table) - 1,
    }
    if uvit:
        return config | {"mlp_time_embed": "time_embed.0.weight" in state, "final_conv": "final_layer.weight" in state}
    return config | {"skips": any(".skip." in key for key in state)}


def _without_variance(state: State) -> dict[str, Tensor]:
    """The published SiT predicts a variance beside the velocity and ignores it; what comes first is the velocity."""
    out = dict(state)
    if "x_embedder.proj.weight" in state:
        _, channels, *patch = state["x_embedder.proj.weight"].shape
        for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
            rows = out[key].reshape(patch[0] * patch[1], -1, *out[key].shape[1:])
            out[key] = rows[:, :channels].flatten(0, 1)
    return out


def load_weights(model: nn.Module, state: State, *, what: str, encoder_only: bool = False) -> list[str]:
    """Load translated weights into an autoencoder or a lone encoder; returns what kept its initial value.

    `encoder_only` asks for nothing but the encoder (further pretraining with another decoder). Positions of
    another grid, where they are fixed, and the alphas of this model stay as the model has them.
    """
    own = model.state_dict()
    learned = {name for name, _ in model.named_parameters() if name.endswith("pos_embed")}
    lone = not any(key.startswith("encoder.") for key in own)
    given = {key.removeprefix("encoder."): v for key, v in state.items() if not key.startswith("decoder.")} if lone \
        else dict(state)  # fmt: skip
    optional = ("pos_embed", "shortcut.alpha", *(("decoder.",) if encoder_only else ()))
    wrong = []
    for key, value in own.items():
        skippable = any(part in key for part in optional) and key not in learned
        if key not in given:
            wrong += [] if skippable else [f"{key} is missing"]
        elif given[key].shape != value.shape:
            if not skippable:
                wrong.append(f"{key} is {tuple(given[key].shape)}, expected {tuple(value.shape)}")
            del given[key]
    extra = [
        key for key in given if key not in own and not (encoder_only and key.startswith(("decoder.", "encoder.norm")))
    ]
    wrong += [f"{key} has no place in this model" for key in extra]
    if wrong:
        shown = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise ValueError(f"{what} holds a different architecture: {shown}")
    model.load_state_dict({key: value for key, value in given.items() if key in own}, strict=False)
    return [key for key in own if key not in given]


def _rename(key: str, rules: list[tuple[str, str]]) -> str:
    for pattern, new in rules:
        key = re.sub(pattern, new, key)
    return key


def _fuse_qkv(state: State) -> dict[str, Tensor]:
    """Separate query, key and value layers -> one."""
    out = {}
    for key, value in state.items():
        if ".attn.q." in key:
            parts = [value, *(state[key.replace(".attn.q.", f".attn.{n}.")] for n in "kv")]
            out[key.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
        elif ".attn.k." not in key and ".attn.v." not in key:
            out[key] = value
    return out


def _convolution(state: State, name: str) -> tuple[int, ...]:
    shape = tuple(state[name].shape)
    if len(shape) != 4:
        raise ValueError(f"{name} is {shape}, expected four dimensions: those of a convolution")
    return shape


def _count(state: State, prefix: str) -> int:
    numbers = [int(key.removeprefix(prefix).split(".")[0]) for key in state if key.startswith(prefix)]
    if not numbers:
        raise KeyError(f"{prefix}0")
    return 1 + max(numbers)
