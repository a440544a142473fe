"""A vision transformer of timm as the encoder of a masked autoencoder: it sees visible patches only, and fades."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from residua.data import Preprocessing
from residua.nn import MAE, Classifier, Network, ViT
from residua.nn import create_model as create_own
from residua.nn.shortcut import Decay, Shortcuts
from residua.nn.stream import Step, scaled
from residua.nn.vit import stream_dtype

from .model import blocks_of
from .names import open_model

_CLASSES = (
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.deit.VisionTransformerDistilled",
)

_TOKENS = ("cls_token", "dist_token", "reg_token")


class TimmViT(ViT):
    """A timm VisionTransformer under the interface of ours; parameters keep timm's names.

    `source` are the keywords that open it again: `{"encoder": "timm:vit_tiny_patch16_224", "img_size": 64, ...}`.
    """

    pos_embed: Tensor

    def __init__(
        self, vit: Any, source: dict[str, Any], *, final_norm: bool, zero_init: bool, decay: Decay | None = None
    ) -> None:
        nn.Module.__init__(self)
        check(vit, source["encoder"])
        embed = vit.patch_embed
        self.source = source
        self.img_size, self.patch_size, self.grid = embed.img_size, embed.patch_size, embed.grid_size
        self.in_chans, self.embed_dim, self.depth = embed.proj.in_channels, vit.embed_dim, len(vit.blocks)
        self.num_heads, self.num_prefix_tokens = vit.blocks[0].attn.num_heads, vit.num_prefix_tokens
        self.final_norm, self.zero_init, self.grad_checkpointing = final_norm, zero_init, False
        self.no_embed_class: bool = vit.no_embed_class
        self.preprocessing: Any = None

        self.shortcut = Shortcuts(decay or Decay(), self.depth)
        self.patch_embed, self.blocks = embed, vit.blocks
        self.tokens = [name for name in _TOKENS if getattr(vit, name, None) is not None]
        for name in (*self.tokens, "pos_embed"):
            self.register_parameter(name, getattr(vit, name))
        self.norm_pre = vit.norm_pre
        self.norm = vit.norm if final_norm else nn.Identity()
        self.norm_eps = float(getattr(vit.blocks[0].norm1, "eps", 1e-6))
        self.mlp_ratio = getattr(getattr(vit.blocks[0].mlp, "fc1", None), "out_features", 0) / vit.embed_dim
        self.located = blocks_of(vit)
        if zero_init:
            for at in self.located:
                for branch in ("attn", "mlp"):
                    nn.init.zeros_(last_linear(getattr(at.block, branch)).weight)

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        own = {"name": "timm_vit", "final_norm": self.final_norm, "zero_init": self.zero_init}
        return {**self.source, **own, **asdict(self.shortcut.decay)}

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """(1, prefix + N, D) for a grid of patches, interpolated where it is not the one trained on."""
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        table = self.pos_embed
        if tuple(grid) != tuple(self.grid):
            table = resample_abs_pos_embed(table, list(grid), list(self.grid), num_prefix_tokens=prefix)
        return F.pad(table, (0, 0, self.num_prefix_tokens, 0)) if self.no_embed_class else table

    def embed_patches(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Patches (B, N, P) and their positions -> stream (B, prefix + N, D)."""
        embed: Any = self.patch_embed
        proj = embed.proj
        x = F.linear(patches, proj.weight.permute(0, 2, 3, 1).flatten(1), proj.bias)
        x = embed.norm(x) + positions
        if self.tokens:
            prefix = torch.cat([getattr(self, name) for name in self.tokens], dim=1)
            if not self.no_embed_class:
                prefix = prefix + self.pos_embed[:, : self.num_prefix_tokens]
            x = torch.cat([prefix.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm_pre(x)
        return x.to(stream_dtype(x))

    def steps(self) -> list[Step]:
        """Two steps a block, as timm's blocks have them: attention, then MLP."""
        alphas = iter(self.shortcut.alpha.unbind(0))
        steps = [
            Step(f"blocks.{i}.{name}", part.branch, next(alphas))
            for i, at in enumerate(self.located)
            for name, part in zip(("attn", "mlp"), at.kind.parts(at.block), strict=True)
        ]
        return scaled(steps, self.shortcut.decay.branch_scale)


def check(vit: Any, name: str) -> None:
    """Refuse a model that a masked autoencoder cannot be built around, and say why."""
    cls = f"{type(vit).__module__}.{type(vit).__qualname__}"
    reason = None
    if getattr(vit, "rope", None) is not None:
        reason = "its blocks turn by positions of their own, which visible patches would not bring along"
    elif cls not in _CLASSES:
        reason = f"a {type(vit).__name__} is no plain sequence of transformer blocks over patches that can be hidden"
    elif vit.pos_embed is None:
        reason = "it adds no positions to its patches: visible ones would not know where they are"
    elif hasattr(vit.patch_embed, "backbone") or not isinstance(getattr(vit.patch_embed, "proj", None), nn.Conv2d):
        reason = "its patches overlap or pass a network of their own before they are tokens"
    elif not all(hasattr(at.block, "attn") and len(at.kind.parts(at.block)) == 2 for at in blocks_of(vit)):
        reason = "its blocks are not attention, then MLP"
    elif any(part.after is not None for at in blocks_of(vit) for part in at.kind.parts(at.block)):
        reason = "its blocks norm their sums"
    if reason:
        raise ValueError(f"{name} cannot be the encoder of a masked autoencoder: {reason}")


def last_linear(branch: nn.Module) -> nn.Linear:
    """Of attention or an MLP: the layer that writes into the stream."""
    return [module for module in branch.modules() if isinstance(module, nn.Linear)][-1]


def open_encoder(
    encoder: str,
    *,
    img_size: Any = None,
    patch_size: Any = None,
    in_chans: int | None = None,
    weights: str = "random",
    final_norm: bool = True,
    zero_init: bool = False,
    **decay: Any,
) -> TimmViT:
    """A timm ViT, `timm:NAME`, as our encoder. `weights`: random, published, or a file."""
    if not encoder.startswith("timm:"):
        raise ValueError(f"{encoder!r} cannot be the encoder of a masked autoencoder: give timm:NAME")
    options = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans}
    given = {key: value for key, value in options.items() if value is not None}
    shape_of(encoder)  # which refuses what can be no encoder, before there are weights
    try:
        vit = open_model(encoder, None if weights == "published" else weights, num_classes=0, **given)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"{encoder} cannot be built with {given}: {error}") from error
    found = TimmViT(
        vit, {"encoder": encoder, **given}, final_norm=final_norm, zero_init=zero_init, decay=Decay(**decay)
    )
    if weights != "random":
        found.preprocessing = vit.preprocessing
    return found


def shape_of(encoder: str, patch_size: int | None = None) -> tuple[int, tuple[int, int], int]:
    """Width, patch size and depth of an encoder, without its weights."""
    given: dict[str, Any] = {} if patch_size is None else {"patch_size": patch_size}
    with torch.device("meta"):
        vit: Any = open_model(encoder, "random", num_classes=0, **given) if encoder.startswith("timm:") else None
    if vit is None or not hasattr(vit, "patch_embed") or not hasattr(vit, "embed_dim"):
        raise ValueError(
            f"{encoder} cannot be the encoder of a masked autoencoder: it is no vision transformer of timm"
        )
    check(vit, encoder)
    return vit.embed_dim, tuple(vit.patch_embed.patch_size), len(vit.blocks)


def model_data(encoder: str, in_chans: int) -> Preprocessing:
    """How images are normalised for the published weights of an encoder."""
    with torch.device("meta"):
        vit: Any = open_model(encoder, "random", num_classes=0, in_chans=in_chans)
    return vit.preprocessing


_ENCODER = ("encoder", "img_size", "patch_size", "in_chans", "weights", "zero_init")


def create_model(name: str, **kwargs: Any) -> Network:
    """As `residua.nn.create_model`; also `timm_vit` and `mae_timm_vit`, which take `encoder="timm:NAME"`.

    >>> model = create_model("mae_timm_vit", encoder="timm:vit_tiny_patch16_224", img_size=64, alpha_min=0.6)
    """
    if name not in ("timm_vit", "mae_timm_vit"):
        return create_own(name, **kwargs)
    decay = {f.name: kwargs.pop(f.name) for f in fields(Decay) if f.name in kwargs}
    if name == "timm_vit":
        head = {key: kwargs.pop(key) for key in ("num_classes", "readout") if key in kwargs}
        if "num_classes" in head:
            return Classifier(open_encoder(**kwargs, final_norm=False, **decay), **head)
        return open_encoder(**kwargs, **decay)
    ushape = kwargs.get("decoder", "ushape") == "ushape"
    kwargs["zero_init"] = ushape if kwargs.get("zero_init") is None else kwargs["zero_init"]
    own = {key: kwargs.pop(key) for key in _ENCODER if key in kwargs}
    zero_init = own["zero_init"]
    own["zero_init"] = zero_init and own.get("weights", "random") == "random"  # trained branches stay as they are
    encoder = open_encoder(**own, final_norm=not ushape, **decay)
    return MAE(encoder=encoder, zero_init=zero_init, **kwargs)
