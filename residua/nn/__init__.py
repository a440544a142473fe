"""What is computed: residual steps, their shortcuts, and the networks made of them."""

import difflib
from dataclasses import fields
from typing import Any, TypeAlias

from torch import nn

from residua.nn.classifier import Classifier
from residua.nn.mae import DECODERS, MAE, Encoded
from residua.nn.resmlp import KINDS, UniformNet
from residua.nn.resnet import RESNETS, ResNet
from residua.nn.shortcut import Decay, Shortcuts, alphas
from residua.nn.sit import SITS, SiT
from residua.nn.stream import Skip, Step, Stream, fade, stream, unfade
from residua.nn.uvit import UVITS, UViT
from residua.nn.vit import SIZES, ViT

__all__ = [
    "MAE", "Classifier", "Decay", "Encoded", "Network", "ResNet", "Shortcuts", "SiT", "Skip", "Step", "Stream", "UViT",
    "UniformNet", "ViT", "alphas", "create_model", "encoder_of", "fade", "model_names", "stream", "unfade",
]  # fmt: skip

Network: TypeAlias = MAE | ViT | Classifier | ResNet | UniformNet | UViT | SiT

_NAMED: dict[str, dict[str, Any]] = {
    **{f"mae_vit_{size}": SIZES[size] | DECODERS[size] for size in SIZES},
    **{f"vit_{size}": options for size, options in SIZES.items()},
    **RESNETS,
    **{kind: {"kind": kind} for kind in KINDS},
    **{f"uvit_{size}": options for size, options in UVITS.items()},
    **{f"sit_{size}": options for size, options in SITS.items()},
}


def model_names() -> list[str]:
    return list(_NAMED)


def create_model(name: str, **kwargs: Any) -> Network:
    """A network by name: `mae_vit_small`, `vit_base`, `resmlp`, `uvit_mid`, ... Keywords override what it implies.

    `mae_vit`, `vit`, `resnet`, `uvit` and `sit` alone take every size from keywords. Keywords of the shortcuts
    (`alpha_min`, `alpha_eff`, `schedule`, `per`, `branches`, `until`, `control`) are those of `residua.nn.Decay`. A
    ViT with `num_classes` is a `Classifier`; `readout` says what its head sees. A diffusion model (`uvit`, `sit`) with
    `num_classes` takes labels.

    >>> model = create_model("mae_vit_small", img_size=64, patch_size=8, alpha_min=0.6)
    >>> model = create_model("resnet18", img_size=32, num_classes=10, stages=(2, 2, 6, 2), alpha_min=0.7)
    >>> model = create_model("uvit_small", img_size=32, alpha_min=0.7)
    """
    known = [*model_names(), "mae_vit", "vit", "resnet", "uvit", "sit"]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or model_names()
        raise ValueError(f"no model named {name!r}; did you mean {', '.join(near)}?")
    options = _NAMED.get(name, {}) | kwargs
    shortcut = {f.name: options.pop(f.name) for f in fields(Decay) if f.name in options}
    try:
        return _build(name, options, Decay(**shortcut))
    except TypeError as error:
        raise TypeError(f"{name}: {error}".replace("__init__() ", "")) from None


def _build(name: str, options: dict[str, Any], decay: Decay) -> Network:
    if name in KINDS:
        return UniformNet(**options, decay=decay)
    if name.startswith("resnet"):
        return ResNet(**options, decay=decay)
    if name.startswith("uvit"):
        return UViT(**options, decay=decay)
    if name.startswith("sit"):
        return SiT(**options, decay=decay)
    if name.startswith("mae"):
        return MAE(**options, decay=decay)
    if "num_classes" not in options:
        return ViT(**options, decay=decay)
    head = {key: options.pop(key) for key in ("num_classes", "readout") if key in options}
    return Classifier(ViT(**options, final_norm=False, decay=decay), **head)


def encoder_of(model: nn.Module) -> ViT:
    """The encoder of an autoencoder or classifier, or the model itself where it is one."""
    if isinstance(model, UViT | SiT):
        raise TypeError(
            f"a {type(model).__name__} is a diffusion model, whose features depend on the noise: use residua.evaluate"
        )
    encoder = getattr(model, "encoder", model)
    if not isinstance(encoder, ViT):
        raise TypeError(f"{type(model).__name__} has no ViT encoder")
    return encoder
