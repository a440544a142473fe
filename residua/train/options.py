"""What every run has settings for: images, shortcuts, optimisation, the machine. A run's settings are these groups."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from residua.adapt.names import is_name
from residua.disk import write_text
from residua.nn.shortcut import Branches, Control, Decay, Per, Schedule

Auto = Literal["auto"]
Rule = tuple[str, Any, bool, str]
"""Name of a setting, its value, whether that will do, and what was expected."""


@dataclass(frozen=True)
class DataConfig:
    """Images: where they come from and how they are seen."""

    data: str = "shapes"
    """shapes, digits, cifar10, cifar100, stl10, mnist, fashion-mnist, folder:PATH, parquet:PATH, tar:PATH, hf:NAME,
    imagenet:PATH or auto, where a run is given: what it was trained on."""
    img_size: int | Auto = "auto"
    """Side of the square that images are cropped to; auto: from the typical size of the images."""
    scale: tuple[float, float] | Auto = (0.2, 1.0)
    """Random resized crop: least and greatest share of the image's area; auto: 0.2 to 1 for autoencoders; for
    classifiers 0.5 to 1, above 64 px 0.08 to 1; for diffusion models 1 to 1, the central square."""
    flip: bool = True
    """Mirror half of the images."""


@dataclass(frozen=True)
class ShortcutConfig:
    """Shortcuts: x <- alpha * x + f(x), alpha falling with depth."""

    alpha_min: float | Auto = "auto"
    """Strength of the last shortcut, in [0, 1]; 1 = ordinary residuals; auto, for autoencoders with a U-shaped decoder
    and for diffusion models: 1 up to 2,750 steps (7,500 where branches start at zero), then 0.1 less with every
    doubling, down to 0.7; an autoencoder's steps of B images count sqrt(B / 256) (docs/choosing-alpha.md)."""
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

    def decay(self) -> dict[str, Any]:
        """The keywords of `Decay` among these."""
        return {f.name: getattr(self, f.name) for f in fields(Decay)}


@dataclass(frozen=True)
class OptimConfig:
    """Optimisation: linear warm-up, cosine to zero."""

    epochs: float | Auto = "auto"
    """Passes over the images; auto: from their number and the device."""
    steps: int | None = None
    """Optimiser steps, instead of epochs."""
    batch_size: int | Auto = "auto"
    """Images in a step, over all processes; auto: from the device."""
    base_lr: float | None = None
    """Peak learning rate for 256 images, scaled linearly with the batch size."""
    lr: float | Auto = "auto"
    """Peak learning rate as it is."""
    warmup: float = 0.05
    """Share of the steps with a rising learning rate."""
    clip: float | None = None
    """Largest norm of the gradient."""
    ema: float | Auto | None = None
    """Decay of an exponential moving average of the weights, such as 0.999; auto, for diffusion models: 0.9999, less in
    runs under 200,000 steps."""
    seed: int = 0
    """Decides initial weights, order, crops, flips and all else that is random."""


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
    """Images on a device at once; the rest of the batch is accumulated. Halved by itself when memory runs out. Batch
    norm, where a network has it, then sees the parts."""
    grad_checkpointing: bool = False
    """Recompute encoder activations in the backward pass: less memory, more time."""
    resident: bool | Auto = "auto"
    """Keep all images in device memory; auto: if they fit into 40 % of what is free. Otherwise workers make the
    training views. A run that is resumed goes on in the same way."""
    resident_side: int | None = None
    """Shrink the shorter side of images in device memory to so many pixels, so that more of them fit: 256 for views of
    224. Default: full size up to twice the view."""
    cache_images: str | None = None
    """Decode images once, into a store at 256 px on their shorter side (more for views above 224 px), in this folder;
    auto: in the user's cache directory, where three times its size is free. Views then differ a little from those of
    the files, so a run that is resumed goes on with its store."""
    workers: int | None = None
    """Decoding processes where images are streamed; default: one per core, at most 16; the processes of
    a machine share its cores."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do about an unreadable image."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default: a twentieth of the run."""
    keep: int = 2
    """Checkpoints kept; 0 keeps all."""
    log_every: int | None = None
    """Steps between lines of metrics.jsonl; default: a two-hundredth of the run."""
    eval_every: float | None = None
    """Epochs between evaluations while training: kNN, probe and rank of an encoder, accuracy of a classifier."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, or anything accelerate knows."""
    cpu: bool = False
    """Use the CPU even where there is a GPU."""
    dry_run: bool = False
    """Print what would be trained, its memory and its time, and stop."""


@dataclass(frozen=True)
class Config:
    """Settings in groups. Every setting has a name of its own, so that names alone are enough."""

    def override(self, **values: Any) -> Self:
        """A copy with some settings changed, by their plain names: `config.override(alpha_min=0.8, seed=3)`."""
        parts = {}
        for part in fields(self):
            group = getattr(self, part.name)
            own = {f.name: values.pop(f.name) for f in fields(group) if f.name in values}
            parts[part.name] = replace(group, **{k: tuple(v) if isinstance(v, list) else v for k, v in own.items()})
        if values:
            raise ValueError(f"no setting named {', '.join(values)}")
        return type(self)(**parts)

    def checked(self, **values: Any) -> Self:
        """As `override`; values of another type than a setting has are refused."""
        groups = [getattr(self, f.name) for f in fields(self)]
        kinds = {name: kind for group in groups for name, kind in get_type_hints(type(group)).items()}
        config = self.override(**values)
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        check([(name, value, accepts(value, kinds[name]), in_words(kinds[name])) for name, value in listed.items()])
        return config

    def settings(self) -> dict[str, Any]:
        """Every setting by its plain name."""
        return {name: value for group in asdict(self).values() for name, value in group.items()}

    def save(self, path: Path) -> None:
        groups = {k: {n: list(v) if isinstance(v, tuple) else v for n, v in g.items()} for k, g in asdict(self).items()}
        write_text(path, yaml.safe_dump(groups, sort_keys=False))

    @classmethod
    def read(cls, path: Path) -> Self:
        """From YAML, grouped as written by `save` or flat."""
        _check_kind(path, cls().settings())
        flat = read_flat(path, {f.name for f in fields(cls)})
        try:
            return cls().checked(**flat)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def read_flat(path: Path, groups: set[str] | None = None) -> dict[str, Any]:
    """The settings in a YAML file by their plain names; without `groups`, of any kind of run."""
    try:
        content = yaml.safe_load(path.read_text("utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ValueError(f"{path}{f', line {mark.line + 1},' if mark else ''} is no YAML: {problem}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings: expected lines such as 'alpha_min: 0.8'")
    flat: dict[str, Any] = {}
    for name, value in content.items():
        grouped = isinstance(value, dict) and (groups is None or name in groups)
        flat |= value if grouped else {name: value}
    return {str(name): _number(value) for name, value in flat.items()}


KINDS = {
    "mask_ratio": "a pretraining run (residua pretrain)",
    "layer_decay": "a classifier's run (residua finetune)",
    "process": "a diffusion run (residua diffuse)",
}
"""Settings that one kind of run alone has, and what it is."""


def _check_kind(path: Path, own: dict[str, Any]) -> None:
    """Refuse settings of another kind of run than the one whose are `own`."""
    given = read_flat(path)
    theirs = next((kind for mark, kind in KINDS.items() if mark in given and mark not in own), None)
    if theirs is not None:
        ours = next(kind for mark, kind in KINDS.items() if mark in own)
        raise ValueError(f"{path} has the settings of {theirs}, not of {ours}")


def run_of(model: str | Path) -> Path | None:
    """The run that a path is, or that a checkpoint belongs to; None where there is none."""
    if is_name(model):
        return None
    path = Path(model).expanduser()
    runs = (p for p in (path, *path.parents) if (p / "checkpoints").is_dir() and (p / "config.yaml").is_file())
    return next(runs, None)


def setting_of(model: str | Path, name: str) -> str | None:
    """A setting in words of the run that a model belongs to; None where there is no run, or it does not say."""
    run = run_of(model)
    found = None if run is None else read_flat(run / "config.yaml").get(name)
    return found if isinstance(found, str) else None


def trained_on(model: str | Path) -> str | None:
    """The source of images that a run, or the run of a checkpoint, was trained on; None where there is no run."""
    return setting_of(model, "data")


def check_place(model: str | Path, spec: str, remedy: str = "give --data, or call this from there") -> None:
    """Where the images of a run are not there, relative to this folder, say which folder they are relative to."""
    kind, _, name = spec.partition("?")[0].partition(":")
    path, run = Path(name).expanduser(), run_of(model)
    if kind == "tar" and (pattern := re.search(r"[{*\[]", name)) and not path.exists():
        path = Path(name[: pattern.start()] + "x").expanduser().parent  # which holds the shards
    local = kind in ("folder", "parquet", "tar", "imagenet") and "://" not in name
    if not local or run is None or path.is_absolute() or path.exists():
        return
    try:
        cwd = json.loads((run / "environment.json").read_text("utf-8"))["cwd"]
    except (OSError, ValueError, KeyError, TypeError):  # of a run that does not say
        return
    raise ValueError(
        f"{spec}: {path} does not exist here; it is relative to {cwd}, where the run was started: {remedy}"
    )


def _number(value: Any) -> Any:
    """`1e-4` is text to YAML 1.1, which asks for `1.0e-4`; nobody else does."""
    numeric = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    if not numeric:
        return value
    number = float(value)
    return int(number) if number.is_integer() else number


def accepts(value: Any, kind: Any) -> bool:
    """Whether a value, with lists for tuples, is of the type that a setting is declared with."""
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(accepts(value, part) for part in parts)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in parts
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(kinds) and all(map(accepts, value, kinds))
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def in_words(kind: Any) -> str:
    """A type, for people."""
    plain = {float: "a number", int: "a whole number", bool: "true or false", str: "text", NoneType: "null", ...: "..."}
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(in_words(part) for part in parts)
    if get_origin(kind) is Literal:
        return " or ".join(parts)
    if get_origin(kind) is tuple:
        return f"[{', '.join(in_words(part) for part in parts)}]"
    return plain[kind]


# ---------------------------------------------------------------- what every kind of run checks and chooses


def common_rules(data: DataConfig, optim: OptimConfig, shortcut: ShortcutConfig, machine: MachineConfig) -> list[Rule]:
    """What holds for every run."""
    o, s, m = optim, shortcut, machine
    low, high = (0.2, 1.0) if data.scale == "auto" else data.scale
    fixed = s.schedule == "learned" or s.control != "none"
    return [
        *positive(data, "img_size"),
        ("scale", data.scale, 0 < low <= high <= 1, "two shares of the area, 0 < least <= greatest <= 1"),
        *positive(o, "epochs", "steps", "batch_size", "lr", "base_lr"),
        ("warmup", o.warmup, 0 <= o.warmup <= 1, "a share of the steps, in [0, 1]"),
        ("clip", o.clip, o.clip is None or o.clip > 0, "a positive norm"),
        ("ema", o.ema, o.ema is None or (o.ema != "auto" and 0 < o.ema < 1), "a decay between 0 and 1, such as 0.999"),
        ("anneal", s.anneal, 0 <= s.anneal <= 1, "a share of the steps, in [0, 1]"),
        ("anneal", s.anneal, not (s.anneal and fixed), "0 with learned shortcuts or a control: there is no alpha_min"),
        *positive(m, "micro_batch"),
        ("checkpoint_every", m.checkpoint_every, (m.checkpoint_every or 1) > 0, "a positive number of steps"),
        ("log_every", m.log_every, (m.log_every or 1) > 0, "a positive number of steps"),
        ("keep", m.keep, m.keep >= 0, "a number of checkpoints, or 0 for all"),
        ("eval_every", m.eval_every, 0 <= (m.eval_every or 0) < math.inf, "a positive number of epochs"),
        ("workers", m.workers, (m.workers or 0) >= 0, "a number of processes, or 0 for none"),
        ("resident_side", m.resident_side, not (m.resident_side and m.resident is False), "None where images stream"),
        ("cache_images", repr(m.cache_images), m.cache_images != "", "a folder, or auto"),
    ]  # fmt: skip


def positive(group: Any, *names: str) -> list[Rule]:
    """Settings of a group that are positive numbers, where they are not left open."""
    values = {name: getattr(group, name) for name in names}
    return [(n, v, v in (None, "auto") or 0 < v < math.inf, "a positive number") for n, v in values.items()]


def check(rules: list[Rule]) -> None:
    """Refuse what cannot be trained, before anything is loaded for it."""
    for name, value, holds, expected in rules:
        if not holds:
            raise ValueError(f"{name} is {value}; expected {expected}")


def machine_choices(machine: MachineConfig, device: str, steps: int) -> dict[str, Any]:
    """How a run of so many steps is best carried out on a device, where the settings leave it open."""
    m, gpu = machine, device != "cpu"
    return {
        "precision": ("bf16" if gpu and _has_bf16() else "fp32") if m.precision == "auto" else m.precision,
        "compile": (device == "cuda" and steps >= 1000) if m.compile == "auto" else m.compile,
        "checkpoint_every": m.checkpoint_every or max(1, steps // 20),
        "log_every": m.log_every or max(1, steps // 200),
    }


def steps_of(epochs: float, images: int, batch: int) -> int:
    """Whole steps that so many epochs take; what is one too many by rounding alone is none: 1.1 * 100 > 110."""
    return max(1, math.ceil(round(epochs * images / batch, 6)))


def auto_steps(optim: OptimConfig, images: int, batch: int, budget: int, least: int, most: int, fewest: int = 1) -> int:
    """Steps as asked for; else so many that about `budget` images are seen, in `least` to `most` epochs, but no fewer
    than `fewest`, however few the images."""
    if optim.steps:
        return optim.steps
    if optim.epochs != "auto":
        return steps_of(optim.epochs, images, batch)
    return max(fewest, math.ceil(min(most, max(least, round(budget / images))) * images / batch))


def check_images(config: Any, count: int, remedy: str = "start a new run") -> None:
    """A run that is resumed goes on with as many images as it was begun with."""
    o = config.optim
    if not config.machine.resume or not o.steps or "auto" in (o.epochs, o.batch_size):
        return
    then = round(o.steps * o.batch_size / o.epochs)
    if then != count:
        raise ValueError(
            f"the run was begun with {then:,} images and now there are {count:,}: put the images back as they were, or "
            f"{remedy}"
        )


SHORT, SHORT_FROM_ZERO = 2750, 7500
"""Steps up to which fading costs more than it brings, as far as we know; the second where branches start at zero."""
STRONGEST = 0.7
"""What `auto` goes down to: measured here with three seeds. The paper takes 0.6 for runs far longer than ours."""


def auto_alpha(steps: float, depth: int, zero_init: bool, schedule: Schedule = "linear") -> float:
    """alpha_min for a number of steps: `1 - 0.1 log2(steps / 2,750)` within [0.7, 1] for 12 blocks.

    Branches that start at zero need more steps, 7,500 instead of 2,750. Networks of another depth or schedule get the
    alpha_min with the same product of alphas, but no less than 0.5.
    """
    short = SHORT_FROM_ZERO if zero_init else SHORT
    alpha = min(1.0, max(STRONGEST, 1 - 0.1 * math.log2(max(steps, 1) / short)))
    known = Decay(alpha_min=alpha)
    if (depth, schedule) == (12, "linear") or alpha == 1.0:
        return round(alpha, 3)
    same = Decay(alpha_eff=float(known.alphas(12).prod()), schedule=schedule).target(depth)
    return round(max(0.5, same), 3)


def auto_size(typical: tuple[int, int]) -> int:
    """Images up to 64 px as they are; larger ones at the next common size below."""
    short = min(typical)
    return short if short <= 64 else max(s for s in (64, 96, 128, 224) if s <= short)


def auto_patch(side: int, exact: bool = False) -> int:
    """The largest patch that leaves 7 x 7 of them; of those that divide the side, where it is not ours to choose."""
    fit = [p for p in (2, 4, 8, 16) if side // p >= 7]
    return max((p for p in fit if not exact or side % p == 0), default=2 if side >= 4 else 1)


def _has_bf16() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
