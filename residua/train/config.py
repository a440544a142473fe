"""What a pretraining run is: its settings, and how the ones left at "auto" are chosen."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from residua.data import Source
from residua.nn import MAE, create_model
from residua.nn.mae import DECODERS
from residua.nn.shortcut import Branches, Control, Decay, Per, Schedule
from residua.nn.vit import SIZES
from residua.train.checkpoint import write_text

Auto = Literal["auto"]
Size = Literal["nano", "tiny", "small", "base", "large"]
AUTO_ALPHA_MIN = 0.9


@dataclass(frozen=True)
class DataConfig:
    """Images: where they come from and how they are seen."""

    data: str = "shapes"
    """shapes, digits, cifar10, cifar100, stl10, fashion-mnist, folder:PATH, parquet:PATH, hf:NAME, imagenet:PATH."""
    img_size: int | Auto = "auto"
    """Side of the square that images are cropped to; auto: from the typical size of the images."""
    scale: tuple[float, float] = (0.2, 1.0)
    """Random resized crop: least and greatest share of the image's area."""
    flip: bool = True
    """Mirror half of the images."""


@dataclass(frozen=True)
class ModelConfig:
    """Network: a masked autoencoder."""

    size: Size | Auto = "auto"
    """Width, depth and heads of encoder and decoder; auto: nano on a CPU, else small."""
    patch_size: int | Auto = "auto"
    """Side of a patch; auto: the largest of 2, 4, 8, 16 that leaves 7 x 7 patches or more."""
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
    """Start every branch at zero; auto: with the U-shaped decoder only."""


@dataclass(frozen=True)
class ShortcutConfig:
    """Shortcuts: x <- alpha * x + f(x), alpha falling with depth."""

    alpha_min: float | Auto = "auto"
    """Strength of the last shortcut, in [0, 1]; 1 = ordinary residuals; auto: 0.9, or 1 with a plain decoder."""
    alpha_eff: float | None = None
    """Product of all alphas, instead of alpha_min: what transfers between depths."""
    schedule: Schedule = "linear"
    """How alpha falls from 1 to alpha_min over the depth."""
    per: Per = "sublayer"
    """One alpha for each sublayer (attention, MLP) or for each block."""
    branches: Branches = "both"
    """Which shortcuts fade."""
    until: float | None = None
    """Fade only the first steps: a share of the depth (up to 1.0) or a step index; ordinary shortcuts after that."""
    control: Control = "none"
    """Ablations: scale by sqrt(0.5) the branch alone, or branch and shortcut both."""
    anneal: float = 0.0
    """Share of the training steps over which alpha_min moves from 1 to its target; 0 = in force from the start."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimisation: AdamW, linear warm-up, cosine to zero."""

    epochs: float | Auto = "auto"
    """Passes over the images; auto: from their number and the device."""
    steps: int | None = None
    """Optimiser steps, instead of epochs."""
    batch_size: int | Auto = "auto"
    """Images in a step, over all processes; auto: 256 on a GPU, 64 on a CPU."""
    base_lr: float | None = None
    """Peak learning rate for 256 images, scaled linearly with the batch size (the paper: 1.5e-4)."""
    lr: float | Auto = "auto"
    """Peak learning rate as it is; auto: 3e-4 * 384 / width * sqrt(batch / 256)."""
    weight_decay: float = 0.05
    """On matrices; biases, norms, tokens and learned alphas have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    warmup: float = 0.05
    """Share of the steps with a rising learning rate."""
    clip: float | None = None
    """Largest norm of the gradient."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999."""
    seed: int = 0
    """Decides initial weights, order, crops, flips and masks."""
    init: str | None = None
    """Start from these weights: a run, a checkpoint, or a published MAE file."""


@dataclass(frozen=True)
class MachineConfig:
    """Orchestration: nothing here changes what is learned, beyond rounding."""

    out: str | None = None
    """Run folder; default runs/DATE-DATA."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, exactly."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 where the GPU has it."""
    compile: bool | Auto = "auto"
    """Compile the network; auto: on CUDA for 1,000 steps or more."""
    micro_batch: int | None = None
    """Images on a device at once; the rest of the batch is accumulated. Halved by itself when memory runs out."""
    grad_checkpointing: bool = False
    """Recompute encoder activations in the backward pass: less memory, more time."""
    resident: bool | Auto = "auto"
    """Keep all images in device memory; auto: if they fit."""
    workers: int | None = None
    """Decoding processes where images are streamed; default: one per core, at most 16."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do about an unreadable image."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default: a twentieth of the run."""
    keep: int = 2
    """Checkpoints kept; 0 keeps all."""
    log_every: int | None = None
    """Steps between lines of metrics.jsonl; default: a two-hundredth of the run."""
    eval_every: float | None = None
    """Epochs between evaluations (kNN, probe, rank) while training."""
    evaluate: bool = True
    """Evaluate the encoder and write report.html at the end."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, or anything accelerate knows."""
    cpu: bool = False
    """Use the CPU even where there is a GPU."""
    dry_run: bool = False
    """Print what would be trained, its memory and its time, and stop."""


@dataclass(frozen=True)
class Pretrain:
    """Pretrain a masked autoencoder whose identity shortcuts fade with depth."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    shortcut: ShortcutConfig = field(default_factory=ShortcutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def override(self, **values: Any) -> Pretrain:
        """A copy with some settings changed, by their plain names: `config.override(alpha_min=0.8, seed=3)`."""
        parts = {}
        for part in fields(self):
            group = getattr(self, part.name)
            own = {f.name: values.pop(f.name) for f in fields(group) if f.name in values}
            parts[part.name] = replace(group, **{k: tuple(v) if isinstance(v, list) else v for k, v in own.items()})
        if values:
            raise ValueError(f"no setting named {', '.join(values)}")
        return Pretrain(**parts)

    def settings(self) -> dict[str, Any]:
        """Every setting by its plain name."""
        return {name: value for group in asdict(self).values() for name, value in group.items()}

    def save(self, path: Path) -> None:
        groups = {k: {n: list(v) if isinstance(v, tuple) else v for n, v in g.items()} for k, g in asdict(self).items()}
        write_text(path, yaml.safe_dump(groups, sort_keys=False))

    @classmethod
    def read(cls, path: Path) -> Pretrain:
        """From YAML, grouped as written by `save` or flat."""
        content = yaml.safe_load(path.read_text()) or {}
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no settings: expected lines such as 'alpha_min: 0.8'")
        groups = {f.name for f in fields(cls)}
        flat: dict[str, Any] = {}
        for name, value in content.items():
            flat |= value if name in groups and isinstance(value, dict) else {name: value}
        try:
            return cls().override(**{name: _number(value) for name, value in flat.items()})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def resolve(config: Pretrain, source: Source, device: str) -> Pretrain:
    """Choose every setting left at "auto", from the images and the device."""
    _check(config)
    n, gpu = len(source), device != "cpu"
    o = config.optim
    batch = (256 if gpu else 64) if o.batch_size == "auto" else o.batch_size
    batch = min(batch, n)
    epochs = o.epochs
    if epochs == "auto":
        budget, least, most = (5_000_000, 100, 800) if gpu else (150_000, 5, 60)
        epochs = float(min(most, max(least, round(budget / n))))
    steps = o.steps or math.ceil(epochs * n / batch)
    size: Any = ("small" if gpu else "nano") if config.model.size == "auto" else config.model.size
    lr = o.lr
    if lr == "auto":
        width = config.model.embed_dim or SIZES[size]["embed_dim"]
        lr = 3e-4 * 384 / width * math.sqrt(batch / 256) if o.base_lr is None else o.base_lr * batch / 256
    side = _auto_size(source.typical_size()) if config.data.img_size == "auto" else config.data.img_size
    patch = _auto_patch(side) if config.model.patch_size == "auto" else config.model.patch_size
    if config.data.img_size == "auto":
        side = side // patch * patch or side
    s = config.shortcut
    alpha = s.alpha_min
    if alpha == "auto":
        free = config.model.decoder == "ushape" and s.control == "none" and s.schedule != "learned"
        alpha = AUTO_ALPHA_MIN if free and s.alpha_eff is None else 1.0
    zero = config.model.decoder == "ushape" if config.model.zero_init == "auto" else config.model.zero_init
    m = config.machine
    return config.override(
        batch_size=batch, epochs=steps * batch / n, steps=steps, lr=lr, size=size, img_size=side, patch_size=patch,
        alpha_min=alpha, zero_init=zero,
        precision=("bf16" if gpu and _has_bf16() else "fp32") if m.precision == "auto" else m.precision,
        compile=(device == "cuda" and steps >= 1000) if m.compile == "auto" else m.compile,
        checkpoint_every=m.checkpoint_every or max(1, steps // 20), log_every=m.log_every or max(1, steps // 200),
    )  # fmt: skip


def _check(config: Pretrain) -> None:
    """Refuse what cannot be trained, before anything is loaded for it."""
    o, s, m = config.optim, config.shortcut, config.machine
    low, high = config.data.scale
    fixed = s.schedule == "learned" or s.control != "none"
    rules: list[tuple[str, Any, bool, str]] = [
        ("scale", config.data.scale, 0 < low <= high <= 1, "two shares of the area, 0 < least <= greatest <= 1"),
        ("epochs", o.epochs, o.epochs == "auto" or o.epochs > 0, "a positive number"),
        ("steps", o.steps, o.steps is None or o.steps > 0, "a positive number"),
        ("batch_size", o.batch_size, o.batch_size == "auto" or o.batch_size > 0, "a positive number"),
        ("lr", o.lr, o.lr == "auto" or o.lr > 0, "a positive number"),
        ("base_lr", o.base_lr, o.base_lr is None or o.base_lr > 0, "a positive number"),
        ("weight_decay", o.weight_decay, o.weight_decay >= 0, "0 or more"),
        ("warmup", o.warmup, 0 <= o.warmup <= 1, "a share of the steps, in [0, 1]"),
        ("clip", o.clip, o.clip is None or o.clip > 0, "a positive norm"),
        ("ema", o.ema, o.ema is None or 0 < o.ema < 1, "a decay between 0 and 1, such as 0.999"),
        ("anneal", s.anneal, 0 <= s.anneal <= 1, "a share of the steps, in [0, 1]"),
        ("anneal", s.anneal, not (s.anneal and fixed), "0 with learned shortcuts or a control: there is no alpha_min"),
        ("micro_batch", m.micro_batch, m.micro_batch is None or m.micro_batch > 0, "a positive number"),
        ("checkpoint_every", m.checkpoint_every, (m.checkpoint_every or 1) > 0, "a positive number of steps"),
        ("log_every", m.log_every, (m.log_every or 1) > 0, "a positive number of steps"),
        ("keep", m.keep, m.keep >= 0, "a number of checkpoints, or 0 for all"),
    ]  # fmt: skip
    for name, value, holds, expected in rules:
        if not holds:
            raise ValueError(f"{name} is {value}; expected {expected}")


def build_model(config: Pretrain, in_chans: int) -> MAE:
    """The network of a resolved configuration, on the CPU."""
    m, shape = config.model, {}
    if m.size == "auto":
        raise ValueError("the model's size is still 'auto': resolve the configuration first")
    for name, value in {**SIZES[m.size], **DECODERS[m.size]}.items():
        own = getattr(m, name)
        shape[name] = value if own is None else own
    decay = {f.name: getattr(config.shortcut, f.name) for f in fields(Decay)}
    model = create_model(
        "mae_vit", img_size=config.data.img_size, patch_size=m.patch_size, in_chans=in_chans, decoder=m.decoder,
        mask_ratio=m.mask_ratio, norm_pix=m.norm_pix, zero_init=m.zero_init, **shape, **decay,
    )  # fmt: skip
    assert isinstance(model, MAE)
    return model


def _number(value: Any) -> Any:
    """`1e-4` is text to YAML 1.1, which asks for `1.0e-4`; nobody else does."""
    numeric = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if numeric else value


def _auto_size(typical: tuple[int, int]) -> int:
    """Images up to 64 px as they are; larger ones at the next common size below."""
    short = min(typical)
    return short if short <= 64 else max(s for s in (64, 96, 128, 224) if s <= short)


def _auto_patch(side: int) -> int:
    return max((p for p in (2, 4, 8, 16) if side // p >= 7), default=2 if side >= 4 else 1)


def _has_bf16() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
