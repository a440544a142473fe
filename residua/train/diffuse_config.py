"""What a diffusion run is: its settings, and how the ones left at "auto" are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from residua.data import DataError, Source
from residua.data.autoencoder import LatentSpace
from residua.nn import create_model
from residua.nn.sit import SITS
from residua.nn.uvit import UVITS
from residua.train.optim import LrSchedule
from residua.train.options import (
    Auto,
    Config,
    DataConfig,
    MachineConfig,
    OptimConfig,
    Rule,
    ShortcutConfig,
    auto_alpha,
    auto_size,
    auto_steps,
    check,
    check_images,
    common_rules,
    machine_choices,
    positive,
)

Size = Literal["nano", "tiny", "small", "mid", "base", "large", "huge", "xlarge"]
SIZES = {"uvit": UVITS, "sit": SITS}
_LOOKS_BACK = 0.05  # share of a run that its moving average spans at most


@dataclass(frozen=True)
class BackboneConfig:
    """Network: a transformer that predicts noise or velocity."""

    network: Literal["uvit", "sit"] = "uvit"
    """uvit: time and label as tokens, long skips (Bao et al.); sit: time and label in norms and gates (Ma et al.)."""
    size: Size | Auto = "auto"
    """Width, depth and heads; auto: nano on a CPU, else small. U-ViT has nano, tiny, small, mid, large, huge; SiT nano,
    tiny, small, base, large, xlarge."""
    patch_size: int | Auto = "auto"
    """Side of a patch; auto: the smallest of 2, 4, 8, 16 that leaves no more than 16 x 16 patches."""
    embed_dim: int | None = None
    """Width instead of the size's."""
    depth: int | None = None
    """Blocks instead of the size's; a U-ViT has its middle block on top."""
    num_heads: int | None = None
    """Heads instead of the size's."""
    skips: bool = True
    """Long skips between the halves of a SiT; a U-ViT always has them."""
    zero_init: bool | Auto = "auto"
    """Start every branch at zero; auto: True, as in the paper, which finds small alpha_min unstable otherwise."""
    process: Literal["vp", "flow"] | Auto = "auto"
    """vp: variance preserving, predicting noise; flow: the straight path, predicting velocity. auto: vp for U-ViT, flow
    for SiT."""
    conditional: bool = False
    """Learn each class's images: labels are told to the network, and samples can be of chosen classes."""
    label_dropout: float = 0.1
    """Share of images without their label, where it is conditional: what guidance needs."""
    latents: str | None = None
    """Learn the latents of an autoencoder instead of pixels: AutoencoderKL or AutoencoderTiny of the diffusers library,
    by name or folder."""


@dataclass(frozen=True)
class DiffuseOptim(OptimConfig):
    """Optimisation: AdamW, linear warm-up, then a constant rate. Learning rate by itself: for U-ViT 2e-4, for SiT 1e-4,
    more where it is narrower than 512 or 384. Batch by itself: 128 on a GPU, 64 on a CPU. Length by itself: 3,000 steps
    or more on a GPU, 1,500 on a CPU, however few the images."""

    weight_decay: float = 0.03
    """On matrices; biases, norms, positions and learned alphas have none."""
    betas: tuple[float, float] = (0.99, 0.999)
    """AdamW's."""
    lr_schedule: LrSchedule = "constant"
    """After the warm-up: constant, or cosine to zero."""
    warmup: float = 0.1
    """Share of the steps with a rising learning rate, where those are fewer than warmup_steps."""
    warmup_steps: int = 2500
    """Steps with a rising learning rate, at most."""
    ema: float | Auto | None = "auto"
    """Decay of the moving average of the weights, which is what samples are made with; auto: 0.9999, in runs under
    200,000 steps so much less that it looks back a twentieth of the run."""


@dataclass(frozen=True)
class DiffuseMachine(MachineConfig):
    """Orchestration: nothing here changes what is learned, beyond rounding."""

    sample_every: float | None = None
    """Epochs between pictures of samples while training, in RUN/samples; default: a tenth of the run. 0: none."""
    samples: int = 64
    """Images on such a picture."""
    fid_every: float | None = None
    """Epochs between FIDs while training, rounded to pictures of samples; default: none. For one process."""
    fid_samples: int = 10_000
    """Images that such a FID is of."""
    fid_extractor: str = "inception"
    """Network whose features it is measured in: inception, or what else residua score --extractor takes."""
    fid_weights: str | None = None
    """File of its weights; default: downloaded."""


@dataclass(frozen=True)
class Diffuse(Config):
    """Train a diffusion model whose identity shortcuts fade with depth."""

    data: DataConfig = field(default_factory=lambda: DataConfig(scale="auto"))
    model: BackboneConfig = field(default_factory=BackboneConfig)
    shortcut: ShortcutConfig = field(default_factory=ShortcutConfig)
    optim: DiffuseOptim = field(default_factory=DiffuseOptim)
    machine: DiffuseMachine = field(default_factory=DiffuseMachine)


def resolve(config: Diffuse, source: Source, device: str, space: LatentSpace | None = None) -> Diffuse:
    """Choose every setting left at "auto", from the images, the autoencoder and the device."""
    check(rules(config))
    m, o, s, n, gpu = config.model, config.optim, config.shortcut, len(source), device != "cpu"
    check_images(config, n)
    if m.conditional and source.labels is None:
        raise DataError(f"{source.name} has no labels to be told: leave --conditional out")
    batch = min((128 if gpu else 64) if o.batch_size == "auto" else o.batch_size, n)
    steps = auto_steps(o, n, batch, *((12_800_000, 1, 2000, 3000) if gpu else (100_000, 1, 60, 1500)))
    size: Any = ("small" if gpu else "nano") if m.size == "auto" else m.size
    if size not in SIZES[m.network]:
        raise ValueError(f"there is no {m.network} of size {size}; choose one of {', '.join(SIZES[m.network])}")
    width = m.embed_dim or SIZES[m.network][size]["embed_dim"]
    lr = o.lr
    if lr == "auto":
        peak, known = (2e-4, 512) if m.network == "uvit" else (1e-4, 384)
        lr = peak * known / min(width, known) if o.base_lr is None else o.base_lr * batch / 256
    side, patch = _sizes(config, source, space)
    free = s.control == "none" and s.schedule != "learned" and s.alpha_eff is None
    ema = max(0.5, min(0.9999, 1 - 1 / (_LOOKS_BACK * steps))) if o.ema == "auto" else o.ema
    depth = m.depth or SIZES[m.network][size]["depth"]
    zero = m.zero_init in ("auto", True)
    fading = auto_alpha(steps, depth, zero, s.schedule) if free else 1.0
    every = steps * batch / n / 10 if config.machine.sample_every is None else config.machine.sample_every
    return config.override(
        scale=(1.0, 1.0) if config.data.scale == "auto" else config.data.scale,
        batch_size=batch, epochs=steps * batch / n, steps=steps, lr=lr, ema=ema, size=size, img_size=side,
        patch_size=patch, zero_init=zero,
        alpha_min=fading if s.alpha_min == "auto" else s.alpha_min,
        process=("vp" if m.network == "uvit" else "flow") if m.process == "auto" else m.process, sample_every=every,
        **machine_choices(config.machine, device, steps),
    )  # fmt: skip


def _sizes(config: Diffuse, source: Source, space: LatentSpace | None) -> tuple[int, int]:
    """Side of the images and side of a patch; patches are of latents where there are any."""
    factor = space.factor if space else 1
    side: Any = config.data.img_size
    if side == "auto":
        short = min(source.typical_size())
        side = min(256, short) // factor * factor if space else auto_size(source.typical_size())
    if space and (side < factor or side % factor):
        raise ValueError(f"img_size is {side}; the autoencoder {space.name} needs a multiple of {factor}")
    inner: int = side // factor
    patch: Any = config.model.patch_size
    if patch == "auto":
        patch = next((p for p in (2, 4, 8, 16) if inner <= 16 * p), 16)
    if config.data.img_size == "auto":
        side = (inner // patch * patch or inner) * factor
    return side, patch


def build_model(config: Diffuse, in_chans: int, classes: int | None, factor: int = 1) -> Any:
    """The network of a resolved configuration, on the CPU; `factor`: how much smaller latents are than images."""
    m = config.model
    assert isinstance(config.data.img_size, int)
    shape = {name: getattr(m, name) or value for name, value in SIZES[m.network][m.size].items()}
    own = {"skips": m.skips} if m.network == "sit" else {}
    return create_model(
        m.network, img_size=config.data.img_size // factor, patch_size=m.patch_size, in_chans=in_chans,
        num_classes=classes, zero_init=m.zero_init, **shape, **config.shortcut.decay(), **own,
    )  # fmt: skip


def rules(config: Diffuse) -> list[Rule]:
    """What has to hold."""
    d, m, o, k = config.data, config.model, config.optim, config.machine
    settled = replace(o, ema=None) if o.ema == "auto" else o
    return [
        *common_rules(d, settled, config.shortcut, k),
        ("weight_decay", o.weight_decay, o.weight_decay >= 0, "0 or more"),
        ("warmup_steps", o.warmup_steps, o.warmup_steps >= 0, "0 or more steps"),
        ("scale", d.scale, not m.latents or d.scale in ("auto", (1.0, 1.0)), "1 1: latents are of the central square"),
        ("label_dropout", m.label_dropout, 0 <= m.label_dropout < 1, "a share in [0, 1)"),
        ("cache_images", k.cache_images, not (m.latents and k.cache_images), "none: latents are kept on disk as it is"),
        ("skips", m.skips, m.skips or m.network == "sit", "true: a U-ViT is made of them"),
        *positive(m, "patch_size", "embed_dim", "depth", "num_heads"),
        ("sample_every", k.sample_every, 0 <= (k.sample_every or 0) < math.inf, "a number of epochs, or 0 for none"),
        ("samples", k.samples, k.samples > 0, "a positive number"),
        ("fid_every", k.fid_every, k.fid_every is None or 0 < k.fid_every < math.inf, "a positive number of epochs"),
        ("fid_every", k.fid_every, k.fid_every is None or k.sample_every != 0, "none without pictures of samples"),
        ("fid_samples", k.fid_samples, k.fid_samples > 1, "a number of images from 2"),
        ("eval_every", k.eval_every, k.eval_every is None, "nothing: here there are sample_every and fid_every"),
    ]  # fmt: skip
