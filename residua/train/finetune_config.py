"""What a fine-tuning run is: its settings, and how the ones left at "auto" are chosen."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from residua.adapt import is_name
from residua.adapt.encoder import open_encoder
from residua.data import Source
from residua.nn import ResNet, UniformNet, ViT, model_names
from residua.nn.classifier import Readout
from residua.nn.vit import SIZES
from residua.train import checkpoint as ckpt
from residua.train.optim import Optimizer
from residua.train.options import (
    Auto,
    Config,
    DataConfig,
    MachineConfig,
    OptimConfig,
    Rule,
    ShortcutConfig,
    auto_patch,
    auto_size,
    auto_steps,
    check,
    check_images,
    common_rules,
    machine_choices,
    positive,
)

Start: TypeAlias = nn.Module | str
"""What training starts from: a network with weights, or the name of one without."""


@dataclass(frozen=True)
class NetworkConfig:
    """Network: a pretrained encoder with a new head, or one trained from scratch."""

    model: str | None = None
    """A run, a checkpoint, published MAE weights, a vision transformer of timm (timm:NAME); or a name such as
    vit_small, resnet18 or resmlp, to train from scratch."""
    weights: str = "published"
    """Of timm:NAME: published, random, or a file."""
    readout: Readout = "patches"
    """What a ViT's head sees. patches: mean of patches, as in MAE; tokens: mean of all tokens; cls: the class token."""
    patch_size: int | Auto = "auto"
    """Side of a patch of a ViT from scratch; auto: the largest of 2, 4, 8, 16 that leaves 7 x 7 patches or more."""
    stages: tuple[int, int, int, int] | None = None
    """Blocks in the four stages of a ResNet from scratch, such as 2 2 6 2."""
    depth: int | None = None
    """Blocks of a resmlp, resconv or resconv_down, instead of 16."""
    width: int | None = None
    """Channels of the first stage of a ResNet from scratch, instead of 64; of a resmlp or resconv, instead of 128."""
    norm: bool = False
    """Batch norm in a resmlp or resconv."""


@dataclass(frozen=True)
class FinetuneOptim(OptimConfig):
    """Optimisation: linear warm-up, cosine to zero. Left alone it is MAE's recipe, with smaller batches for fewer
    images; the learning rate is 2e-3 * 768 / width * sqrt(batch / 1024), half of it for a ViT from scratch, and for a
    ResNet 2e-3 * sqrt(batch / 1024); for SGD 0.1."""

    optimizer: Optimizer = "adamw"
    """adamw, or sgd with Nesterov's momentum."""
    weight_decay: float | Auto = "auto"
    """On matrices and convolutions; auto: 0.05, for SGD 5e-4."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    momentum: float = 0.9
    """SGD's."""
    layer_decay: float | Auto = "auto"
    """Learning rate of a layer relative to the next; auto: 0.65 for a pretrained ViT, else 1."""


@dataclass(frozen=True)
class RegularConfig:
    """Regularisation, each 0 = off. Left alone: MAE's for a ViT, but without mixing and erasing where a run sees fewer
    than a million images, too few to learn from mixtures; none for a ResNet."""

    mixup: float | Auto = "auto"
    """Blend two images, by Beta(mixup, mixup); auto: 0.8."""
    cutmix: float | Auto = "auto"
    """Paste a box of another image, its area by Beta(cutmix, cutmix); auto: 1.0. With mixup: half of the images."""
    erasing: float | Auto = "auto"
    """Probability of replacing a rectangle by noise; auto: 0.25."""
    drop_path: float | Auto = "auto"
    """Probability of dropping a branch of the last block, rising from 0 at the first; auto: 0.1."""
    smoothing: float | Auto = "auto"
    """Share of the label spread over all classes; auto: 0.1."""


@dataclass(frozen=True)
class Finetune(Config):
    """Train a classifier end to end."""

    data: DataConfig = field(default_factory=lambda: DataConfig(data="auto", scale="auto"))
    network: NetworkConfig = field(default_factory=NetworkConfig)
    shortcut: ShortcutConfig = field(default_factory=ShortcutConfig)
    optim: FinetuneOptim = field(default_factory=FinetuneOptim)
    regular: RegularConfig = field(default_factory=RegularConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)


RESIDUAL = ("resnet", "resmlp", "resconv")
"""How the names of networks begin that bring their own head; the others are ViTs."""
MAE_RECIPE = {"mixup": 0.8, "cutmix": 1.0, "erasing": 0.25, "drop_path": 0.1, "smoothing": 0.1}
SHAPE: dict[str, Any] = {"patch_size": "auto", "stages": None, "depth": None, "width": None, "norm": False}
SHORT_RUN = {"mixup": 0.0, "cutmix": 0.0, "erasing": 0.0}


def open_start(model: str | None, weights: str = "published") -> Start:
    """The network that training starts from, by path or by name."""
    if model is None:
        raise ValueError("say what to train: a run, a checkpoint, or the name of a network such as resnet18")
    path = Path(model).expanduser()
    names = [name for name in model_names() if name.startswith(("vit_", *RESIDUAL))]
    if is_name(model):
        return _of_timm(model, weights)
    if weights != "published":
        raise ValueError(f"weights is {weights}, but {model} is no timm:NAME: leave it out")
    if path.exists():
        return ckpt.load(path)
    if model in names:
        return model
    raise ckpt.CheckpointError(f"there is nothing at {path}, and it is none of the networks {', '.join(names)}")


def _of_timm(model: str, weights: str) -> nn.Module:
    try:
        return open_encoder(model, weights=weights)
    except ValueError as error:
        if "cannot be the encoder" not in str(error):
            raise
        reason = str(error).partition(": ")[2]
        raise ValueError(
            f"{model} cannot be fine-tuned here: {reason}. Of other libraries, plain vision transformers of timm can"
        ) from error


def resolve(config: Finetune, start: Start, source: Source, device: str) -> Finetune:
    """Choose every setting left at "auto", from the network, the images and the device."""
    check(rules(config))
    n, o = len(source), config.optim
    check_images(config, n)
    scratch, resnet = isinstance(start, str), is_resnet(start)
    most = 1024 if device != "cpu" else 64
    batch = min(max(32, 1 << int(math.log2(max(1, n // 50)))), most) if o.batch_size == "auto" else o.batch_size
    batch = min(batch, n)
    steps = auto_steps(o, n, batch, 100_000, 5 if device == "cpu" else 100, 100)
    decay: Any = (5e-4 if o.optimizer == "sgd" else 0.05) if o.weight_decay == "auto" else o.weight_decay
    layers: Any = (1.0 if scratch or resnet else 0.65) if o.layer_decay == "auto" else o.layer_decay
    recipe = dict.fromkeys(MAE_RECIPE, 0.0) if resnet else MAE_RECIPE | (SHORT_RUN if steps * batch < 1e6 else {})
    regular = {name: recipe[name] if value == "auto" else value for name, value in asdict(config.regular).items()}
    epochs = steps * batch / n
    sizes = _sizes_from_scratch(config, resnet, source) if scratch else _sizes_as_trained(config, start)
    scale = (0.5 if sizes["img_size"] <= 64 else 0.08, 1.0) if config.data.scale == "auto" else config.data.scale
    return config.override(
        batch_size=batch, epochs=epochs, steps=steps, lr=_rate(config, start, batch), weight_decay=decay,
        layer_decay=layers, scale=scale, **regular, **sizes,
        **machine_choices(config.machine, device, steps), eval_every=config.machine.eval_every or max(1.0, epochs / 10),
    )  # fmt: skip


def _rate(config: Finetune, start: Start, batch: int) -> float:
    """Peak learning rate; the square root suits AdamW where batches are small."""
    o = config.optim
    if o.lr != "auto":
        return o.lr
    if o.base_lr is not None:
        return o.base_lr * batch / 256
    if o.optimizer == "sgd":
        return 0.1
    rate = 2e-3 * math.sqrt(batch / 1024)
    if is_resnet(start):
        return rate
    if isinstance(start, str):
        return rate / 2 * 768 / SIZES[start.removeprefix("vit_")]["embed_dim"]
    return rate * 768 / body_of(start).embed_dim


def body_of(start: Start) -> Any:
    """What is taken over from a trained network: a ViT encoder, or a residual network as a whole."""
    if isinstance(start, ResNet | UniformNet):
        return start
    encoder = getattr(start, "encoder", start)
    if not isinstance(encoder, ViT):
        raise ValueError(f"a {type(start).__name__} cannot be fine-tuned: give an autoencoder, a ViT or a ResNet")
    return encoder


def is_resnet(start: Start) -> bool:
    return start.startswith(RESIDUAL) if isinstance(start, str) else isinstance(start, ResNet | UniformNet)


def own_shape(start: Start) -> tuple[str, ...]:
    """The settings of `NetworkConfig` that say how large such a network is."""
    if not is_resnet(start):
        return ("patch_size",)
    staged = start.startswith("resnet") if isinstance(start, str) else isinstance(start, ResNet)
    return ("stages", "width") if staged else ("depth", "width", "norm")


def _sizes_from_scratch(config: Finetune, resnet: bool, source: Source) -> dict[str, Any]:
    network, side = config.network, config.data.img_size
    assert network.model is not None
    for name in SHAPE:
        value = getattr(network, name)
        if name not in own_shape(network.model) and value != SHAPE[name]:
            raise ValueError(f"{name} is {value}, but {network.model} has none: leave it out")
    alpha = 1.0 if config.shortcut.alpha_min == "auto" else config.shortcut.alpha_min
    if side == "auto":
        side = auto_size(source.typical_size())
        if not resnet:
            patch = auto_patch(side) if network.patch_size == "auto" else network.patch_size
            side = side // patch * patch or side
    patch_size = auto_patch(side, exact=True) if network.patch_size == "auto" and not resnet else network.patch_size
    return {"img_size": side, "patch_size": patch_size, "alpha_min": alpha}


def _sizes_as_trained(config: Finetune, start: Start) -> dict[str, Any]:
    """The network's own sizes and shortcuts; asking for others is an error."""
    body = body_of(start)
    own = asdict(body.shortcut.decay)
    asked, fresh = asdict(config.shortcut), asdict(ShortcutConfig())
    for name in own if config.machine.resume else [*own, "anneal"]:
        if asked[name] not in (fresh[name], own.get(name, fresh[name])):
            raise ValueError(f"{name} is {asked[name]}, but a trained network keeps its shortcuts: leave it out")
    shape: dict[str, Any] = SHAPE | {name: getattr(body, name) for name in own_shape(body)}
    if not is_resnet(body):
        shape["patch_size"] = body.patch_size[0]
    for name, value in shape.items():
        given = getattr(config.network, name)
        if given not in (SHAPE[name], value):
            raise ValueError(f"{name} is {given}, but the trained network has {value}: leave it out")
    side = config.data.img_size
    if side == "auto":
        if body.img_size[0] != body.img_size[1]:
            raise ValueError(f"the network was trained on {body.img_size[0]} x {body.img_size[1]} px: give --img-size")
        side = body.img_size[0]
    return {"img_size": side, **shape, **own}


def rules(config: Finetune) -> list[Rule]:
    """What has to hold."""
    m, o, r = config.network, config.optim, config.regular
    found = common_rules(config.data, o, config.shortcut, config.machine)
    decays: Any = o.weight_decay, o.layer_decay
    found += [
        ("weight_decay", decays[0], decays[0] == "auto" or decays[0] >= 0, "0 or more"),
        ("layer_decay", decays[1], decays[1] == "auto" or 0 < decays[1] <= 1, "a factor in (0, 1]"),
        ("stages", m.stages, m.stages is None or min(m.stages) > 0, "four positive numbers"),
        *positive(m, "patch_size", "depth", "width"),
        ("momentum", o.momentum, 0 < o.momentum < 1, "a factor between 0 and 1"),
    ]  # fmt: skip
    for name, value in asdict(r).items():
        most = math.inf if name in ("mixup", "cutmix") else 1.0
        holds = value == "auto" or 0 <= value < most
        found.append((name, value, holds, "0 or more" if most > 1 else "a share in [0, 1)"))
    return found
