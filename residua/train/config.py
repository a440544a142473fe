"""What a pretraining run is: its settings, and how the ones left at "auto" are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from residua.adapt.encoder import create_model, shape_of
from residua.data import Source
from residua.nn import MAE
from residua.nn.mae import DECODERS
from residua.nn.vit import SIZES
from residua.train.options import (
    Auto,
    Config,
    DataConfig,
    MachineConfig,
    OptimConfig,
    Rule,
    ShortcutConfig,
    auto_alpha,
    auto_patch,
    auto_size,
    auto_steps,
    check,
    check_images,
    common_rules,
    machine_choices,
    positive,
)

Size = Literal["nano", "tiny", "small", "base", "large"]


@dataclass(frozen=True)
class ModelConfig:
    """Network: a masked autoencoder."""

    size: Size | Auto = "auto"
    """Width, depth and heads of encoder and decoder; auto: nano on a CPU, else small; with --encoder only of the
    decoder, and auto the one nearest in width."""
    encoder: str | None = None
    """A vision transformer of timm as the encoder instead of ours: timm:vit_tiny_patch16_224."""
    encoder_weights: str = "random"
    """What --encoder starts from: random, published, or a file."""
    patch_size: int | Auto = "auto"
    """Side of a patch; auto: the largest of 2, 4, 8, 16 that leaves 7 x 7 patches or more, of --encoder its own."""
    embed_dim: int | None = None
    """Encoder width instead of the size's."""
    depth: int | None = None
    """Encoder blocks instead of the size's."""
    num_heads: int | None = None
    """Encoder heads instead of the size's."""
    decoder: Literal["ushape", "plain"] = "ushape"
    """ushape: skips from every other encoder block; plain: the decoder of He et al."""
    decoder_embed_dim: int | None = None
    """Decoder width instead of the size's."""
    decoder_depth: int | None = None
    """Decoder blocks instead of the size's."""
    decoder_num_heads: int | None = None
    """Decoder heads instead of the size's."""
    mask_ratio: float = 0.75
    """Share of patches hidden from the encoder."""
    norm_pix: bool = True
    """Normalise each target patch to mean 0 and variance 1."""
    zero_init: bool | Auto = "auto"
    """Start every branch at zero, as the paper does; auto: False, which gave better features here
    (docs/choosing-alpha.md). The branches of a trained --encoder stay."""


@dataclass(frozen=True)
class PretrainOptim(OptimConfig):
    """Optimisation: AdamW, linear warm-up, cosine to zero. Learning rate by itself: 3e-4 * 384 / width *
    sqrt(batch / 256); the paper: base_lr 1.5e-4. Batch by itself: 256 on a GPU, 64 on a CPU. Length by itself: 3,000
    steps or more on a GPU, 1,500 on a CPU, however few the images."""

    weight_decay: float = 0.05
    """On matrices; biases, norms, tokens and learned alphas have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    init: str | None = None
    """Start from these weights: a run, a checkpoint, or a published MAE file. Sizes, patch size, decoder and shortcuts
    are then those of its model, of a published file alpha 1; with other shortcuts features change at once."""


@dataclass(frozen=True)
class PretrainMachine(MachineConfig):
    """Orchestration: nothing here changes what is learned, beyond rounding."""

    evaluate: bool = True
    """Evaluate the encoder and write report.html at the end."""


@dataclass(frozen=True)
class Pretrain(Config):
    """Pretrain a masked autoencoder whose identity shortcuts fade with depth."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    shortcut: ShortcutConfig = field(default_factory=ShortcutConfig)
    optim: PretrainOptim = field(default_factory=PretrainOptim)
    machine: PretrainMachine = field(default_factory=PretrainMachine)


def resolve(config: Pretrain, source: Source, device: str) -> Pretrain:
    """Choose every setting left at "auto", from the images and the device."""
    check(rules(config))
    n, gpu = len(source), device != "cpu"
    check_images(config, n, "start a new run (--init takes its weights along)")
    o = config.optim
    batch = min((256 if gpu else 64) if o.batch_size == "auto" else o.batch_size, n)
    steps = auto_steps(o, n, batch, *((5_000_000, 100, 800, 3000) if gpu else (150_000, 5, 60, 1500)))
    outside = _outside(config.model)
    size: Any = ("small" if gpu else "nano") if config.model.size == "auto" else config.model.size
    if outside and config.model.size == "auto":
        size = min(SIZES, key=lambda name: abs(SIZES[name]["embed_dim"] - outside[0]))
    lr = o.lr
    if lr == "auto":
        width = outside[0] if outside else config.model.embed_dim or SIZES[size]["embed_dim"]
        lr = 3e-4 * 384 / width * math.sqrt(batch / 256) if o.base_lr is None else o.base_lr * batch / 256
    side = auto_size(source.typical_size()) if config.data.img_size == "auto" else config.data.img_size
    own = outside[1] if outside else auto_patch(side, exact=config.data.img_size != "auto")
    patch = own if config.model.patch_size == "auto" else config.model.patch_size
    if config.data.img_size == "auto":
        side = side // patch * patch or side
    s = config.shortcut
    alpha, zero = s.alpha_min, config.model.zero_init is True
    if alpha == "auto":
        free = config.model.decoder == "ushape" and s.control == "none" and s.schedule != "learned"
        depth = outside[2] if outside else config.model.depth or SIZES[size]["depth"]
        counted = steps * math.sqrt(batch / 256)
        alpha = auto_alpha(counted, depth, zero, s.schedule) if free and s.alpha_eff is None else 1.0
    return config.override(
        scale=(0.2, 1.0) if config.data.scale == "auto" else config.data.scale,
        batch_size=batch, epochs=steps * batch / n, steps=steps, lr=lr, size=size, img_size=side, patch_size=patch,
        alpha_min=alpha, zero_init=zero, **machine_choices(config.machine, device, steps),
    )  # fmt: skip


def rules(config: Pretrain) -> list[Rule]:
    """What has to hold."""
    m, o = config.model, config.optim
    return [
        *common_rules(config.data, o, config.shortcut, config.machine),
        ("weight_decay", o.weight_decay, o.weight_decay >= 0, "0 or more"),
        ("mask_ratio", m.mask_ratio, 0 < m.mask_ratio < 1, "a share of the patches between 0 and 1"),
        *positive(m, "patch_size", "embed_dim", "depth", "num_heads"),
        *positive(m, "decoder_embed_dim", "decoder_depth", "decoder_num_heads"),
    ]


def _outside(m: ModelConfig) -> tuple[int, int, int] | None:
    """Width, patch size and depth of an encoder of another library; settings that it has itself are refused."""
    if m.encoder is None:
        if m.encoder_weights != "random":
            raise ValueError(
                f"encoder_weights is {m.encoder_weights}, but there is no encoder: add --encoder timm:NAME"
            )
        return None
    for name in ("embed_dim", "depth", "num_heads"):
        if getattr(m, name) is not None:
            raise ValueError(f"{name} is {getattr(m, name)}, but {m.encoder} brings its own: leave one of the two out")
    width, patch, depth = shape_of(m.encoder, None if m.patch_size == "auto" else m.patch_size)
    return width, patch[0], depth


def build_model(config: Pretrain, in_chans: int, begun: bool = False) -> MAE:
    """The network of a resolved configuration, on the CPU; one that has `begun` gets its weights from elsewhere."""
    m, shape = config.model, {}
    if m.size == "auto":
        raise ValueError("the model's size is still 'auto': resolve the configuration first")
    sizes = DECODERS[m.size] if m.encoder else {**SIZES[m.size], **DECODERS[m.size]}
    for name, value in sizes.items():
        own = getattr(m, name)
        shape[name] = value if own is None else own
    named = {"encoder": m.encoder, "weights": "random" if begun else m.encoder_weights} if m.encoder else {}
    model = create_model(
        "mae_timm_vit" if m.encoder else "mae_vit", **named, img_size=config.data.img_size, patch_size=m.patch_size,
        in_chans=in_chans, decoder=m.decoder, mask_ratio=m.mask_ratio, norm_pix=m.norm_pix, zero_init=m.zero_init,
        **shape, **config.shortcut.decay(),
    )  # fmt: skip
    assert isinstance(model, MAE)
    return model
