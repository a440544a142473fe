"""What is computed: residual steps, their shortcuts, and the networks made of them."""

import difflib
from dataclasses import fields
from typing import Any

from torch import nn

from residua.nn.mae import DECODERS, MAE, Encoded
from residua.nn.shortcut import Decay, Shortcuts, alphas
from residua.nn.stream import Step, Stream, fade, stream, unfade
from residua.nn.vit import SIZES, ViT

__all__ = [
    "MAE", "Decay", "Encoded", "Shortcuts", "Step", "Stream", "ViT",
    "alphas", "create_model", "encoder_of", "fade", "model_names", "stream", "unfade",
]  # fmt: skip


def model_names() -> list[str]:
    return [f"{kind}_{size}" for kind in ("mae_vit", "vit") for size in SIZES]


def create_model(name: str, **kwargs: Any) -> MAE | ViT:
    """A network by name: `mae_vit_small`, `vit_base`, ... Keywords override what the name implies.

    `mae_vit` and `vit` alone take every size from keywords. Keywords of the shortcuts (`alpha_min`,
    `alpha_eff`, `schedule`, `per`, `branches`, `until`, `control`) are those of `residua.nn.Decay`.

    >>> model = create_model("mae_vit_small", img_size=64, patch_size=8, alpha_min=0.6)
    """
    known = {**{n: n for n in model_names()}, "mae_vit": "mae_vit", "vit": "vit"}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or model_names()
        raise ValueError(f"no model named {name!r}; did you mean {', '.join(near)}?")
    size = next((s for s in SIZES if name.endswith(f"_{s}")), None)
    options: dict[str, Any] = dict(SIZES[size]) if size else {}
    if name.startswith("mae") and size:
        options |= DECODERS[size]
    options |= kwargs
    shortcut = {f.name: options.pop(f.name) for f in fields(Decay) if f.name in options}
    network = MAE if name.startswith("mae") else ViT
    try:
        return network(**options, decay=Decay(**shortcut))
    except TypeError as error:
        raise TypeError(f"{name}: {error}".replace("__init__() ", "")) from None


def encoder_of(model: nn.Module) -> ViT:
    """The encoder of an autoencoder, or the model itself where it is one."""
    encoder = getattr(model, "encoder", model)
    if not isinstance(encoder, ViT):
        raise TypeError(f"{type(model).__name__} has no ViT encoder")
    return encoder
