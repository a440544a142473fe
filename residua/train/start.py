"""A pretraining run that starts from weights (`--init`): what it takes over from the model they are of."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

import torch

from residua.nn import MAE, Decay
from residua.nn.vit import SIZES
from residua.train.config import Pretrain

DECODER = ("decoder_embed_dim", "decoder_depth", "decoder_num_heads")


def as_in(config: Pretrain, there: dict[str, Any], given: Collection[str] = ()) -> Pretrain:
    """The configuration with the architecture and the shortcuts of the model `there` (keywords of `create_model`).

    Taken is what is left open: it has its default value and is not named in `given`. `check_shape` refuses the rest.
    Where shortcuts of that model and given ones exclude each other, those given stand alone.
    """
    if not _fitting(there):
        return config
    fresh, asked = Pretrain().settings(), config.settings()
    left_open = {name for name in asked if asked[name] == "auto" or (asked[name] == fresh[name] and name not in given)}
    whole: dict[str, Any] = {name: _plain(there[name]) for name in ("patch_size", "decoder") if name in there}
    if left_open.issuperset(("size", "encoder")):
        whole |= _encoder(there) | {name: there[name] for name in DECODER if name in there}
    taken = {name: value for name, value in whole.items() if name in left_open}
    return config.override(**taken, **_shortcuts(there, asked, left_open))


def check_shape(model: MAE, init: str, there: dict[str, Any]) -> None:
    """Refuse weights of another architecture, and say what differs."""
    if not _fitting(there):
        raise ValueError(f"{init} holds a different architecture: {there['name']}, which is no encoder to start from")
    names = ["encoder", "embed_dim", "depth", "patch_size", "in_chans", "decoder", *DECODER[:2]]
    names += ["img_size"] * ("encoder" in there)  # ours have fixed positions, which fit every size
    pairs = {name: (_plain(there.get(name)), _plain(model.config.get(name))) for name in names}
    unlike = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name in ("encoder", *there)}
    if unlike:
        told = "; ".join(f"{name} {before} there, {here} here" for name, (before, here) in unlike.items())
        images = "; take images of as many channels" if "in_chans" in unlike else ""
        raise ValueError(
            f"{init} holds a different architecture: {told}. Leave such settings out, which are then its own{images}"
        )


def tell_shortcuts(model: MAE, config: Pretrain, there: dict[str, Any]) -> None:
    """A note where shortcuts are others than those that the weights were trained with; learned ones go on from them."""
    before, now, depth = Decay(**_decay(there)), model.encoder.shortcut.decay, model.encoder.depth
    alphas = [decay.alphas(depth) for decay in (before, now)]
    moves = bool(config.shortcut.anneal) and now != Decay()
    alike = torch.equal(*alphas) and before.branch_scale == now.branch_scale and before.schedule != "learned"
    if now.schedule == "learned" or (alike and not moves):
        return
    first, then = (f"{float(alpha.min()):.3g}" for alpha in alphas)
    first = "learned" if before.schedule == "learned" else first
    warnings.warn(
        f"the shortcuts of {config.optim.init} are others (alpha_min {first} there, {then}{', from 1 on' * moves} here)"
        ", and its features change with them; leave the options of shortcuts out to keep them",
        stacklevel=2,
    )


def _fitting(there: dict[str, Any]) -> bool:
    """Whether it is a vision transformer that could be an autoencoder's encoder."""
    return "encoder" in there or ("patch_size" in there and there["name"] not in ("uvit", "sit"))


def _encoder(there: dict[str, Any]) -> dict[str, Any]:
    """Settings that make an encoder of this shape."""
    if "encoder" in there:
        return {"encoder": there["encoder"]}
    shape = {name: there[name] for name in ("embed_dim", "depth", "num_heads")}
    return next(({"size": name} for name, known in SIZES.items() if known == shape), shape)


def _shortcuts(there: dict[str, Any], asked: dict[str, Any], left_open: set[str]) -> dict[str, Any]:
    """The schedule of `there` in all that is left open; of alpha_min and alpha_eff, one is not without the other."""
    own = _decay(there)
    if not left_open.issuperset(("alpha_min", "alpha_eff")):
        left_open = left_open - {"alpha_min", "alpha_eff"}
    mixed = {name: value if name in left_open else asked[name] for name, value in own.items()}
    try:
        Decay(**mixed | ({"alpha_min": 1.0} if mixed["alpha_min"] == "auto" else {}))
    except ValueError:
        return {name: asked[name] for name in own}
    return mixed


def _decay(there: dict[str, Any]) -> dict[str, Any]:
    """Of a model that does not say, ordinary shortcuts."""
    return {f.name: there.get(f.name, asdict(Decay())[f.name]) for f in fields(Decay)}


def _plain(value: Any) -> Any:
    """Of two sides that are the same, one."""
    return value[0] if isinstance(value, tuple | list) and len(set(value)) == 1 else value
