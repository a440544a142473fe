"""Pretraining of masked autoencoders: from a configuration to a run folder."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn

from residua import data
from residua.data import Batch, Feed, Preprocessing, Splits
from residua.nn import MAE
from residua.train import checkpoint as ckpt
from residua.train.config import MachineConfig, Pretrain, build_model, resolve
from residua.train.loop import Hooks, Loop
from residua.train.machine import activation_bytes, count_parameters, device_name, environment, training_flops
from residua.train.optim import Settings


class Reconstruction:
    """The objective: crop, flip, hide patches, reconstruct them. All chance depends on seed, epoch and image alone."""

    def __init__(self, config: Pretrain, preprocessing: Preprocessing, patches: int, device: torch.device) -> None:
        self.img_size, self.patches, self.seed = preprocessing.img_size, patches, config.optim.seed
        self.mean, self.std = (torch.tensor(v, device=device) for v in (preprocessing.mean, preprocessing.std))
        self.scale, self.flip = config.data.scale, config.data.flip

    @torch.no_grad()
    def view(self, batch: Batch, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented images (B, C, h, w) and mask noise (B, N)."""
        with torch.autocast(batch.pixels.device.type, enabled=False):
            images = data.train_view(
                batch,
                self.img_size,
                self.mean,
                self.std,
                seed=self.seed,
                epoch=epochs,
                scale=self.scale,
                flip=self.flip,
            )
        return images, data.rng.uniform(self.seed, epochs, batch.index, self.patches, "mask")

    def __call__(self, model: nn.Module, batch: Batch, epochs: Tensor) -> Tensor:
        return model(*self.view(batch, epochs))[0]


@dataclass
class Session:
    """A run made ready: everything is checked and chosen, nothing is trained yet."""

    config: Pretrain
    splits: Splits
    model: MAE
    feed: Feed
    accelerator: Accelerator
    settings: Settings
    run: Path | None
    preprocessing: Preprocessing

    @property
    def steps_per_epoch(self) -> float:
        return len(self.feed) / self.settings.batch_size

    def loop(self, hooks: Hooks | None = None) -> Loop:
        objective = Reconstruction(self.config, self.preprocessing, self.model.num_patches, self.accelerator.device)
        return Loop(self.model, objective, self.feed, self.settings, self.accelerator, self.run, hooks)

    def lines(self) -> list[tuple[str, str]]:
        """What will be trained, on what, where: (heading, text)."""
        c, o, m = self.config, self.config.optim, self.config.machine
        source = self.splits.train
        labels = f"{len(source.classes)} classes" if source.classes else "no labels"
        plural = "s" if source.channels > 1 else ""
        encoder, rest = (count_parameters(part) / 1e6 for part in (self.model.encoder, self.model.decoder))
        shortcut = self.model.encoder.shortcut
        eff = float(shortcut.alpha.detach().double().prod())
        fading = f"alpha_min {1 - float(1 - shortcut.alpha.detach().min()):.3g} (alpha_eff {eff:.2g})"
        if c.shortcut.control != "none":
            fading = f"control: {c.shortcut.control} scaled by sqrt(0.5)"
        if c.shortcut.anneal:
            fading += f", annealed over {100 * c.shortcut.anneal:.0f} % of the steps"
        name = {"ushape": "U-shaped", "plain": "plain"}[c.model.decoder]
        world = self.accelerator.num_processes
        where = "whole data set on the device" if self.feed.resident else f"streamed by {self.feed.workers} workers"
        compiled = ", compiled" if m.compile else ""
        lines = [
            ("data", f"{source.name}: {len(self.feed):,} images, {source.channels} channel{plural}, {labels} -> "
                     f"{c.data.img_size} px, patch {c.model.patch_size}"),
            ("model", f"ViT-{c.model.size} ({encoder:.1f} M) + {name} decoder ({rest:.1f} M), {fading}"),
            ("steps", f"{o.steps:,} of {o.batch_size} images ({o.epochs:.4g} epochs), peak learning rate {o.lr:.2g}, "
                      f"seed {o.seed}"),
            ("device", f"{world} x {device_name(self.accelerator.device)}, {m.precision}{compiled}; {where}"),
        ]  # fmt: skip
        if self.feed.skipped:
            lines.append(("skipped", f"{self.feed.skipped} unreadable images"))
        return lines if self.run is None else [*lines, ("run", str(self.run))]


def prepare(config: Pretrain, progress: data.feed.Progress | None = None) -> Session:
    """Check and choose everything before anything is trained."""
    if config.machine.resume:
        config = _resumed(config)
    trackers = _trackers(config)
    run_given = Path(config.machine.out).expanduser() if config.machine.out else None
    splits = data.load(config.data.data)
    accelerator = Accelerator(cpu=config.machine.cpu, log_with=trackers or None, project_dir=run_given or "runs")
    device = accelerator.device
    config = resolve(config, splits.train, device.type)
    _check_batch(config, accelerator)
    side = config.data.img_size
    assert isinstance(side, int)
    set_seed(config.optim.seed)
    torch.set_float32_matmul_precision("high")
    model = build_model(config, splits.train.channels)
    if config.optim.init and not (config.machine.resume and run_given and ckpt.checkpoints(run_given)):
        ckpt.initialize(model, config.optim.init)
    run = None
    if not config.machine.dry_run:
        run = _run_folder(config, accelerator)
        accelerator.project_configuration.set_directories(str(run))
    mean, std = splits.train.stats()
    crop = 0.875 if side >= 160 else 1.0
    preprocessing = Preprocessing((side, side), mean, std, splits.train.channels, crop)
    model.preprocessing = model.encoder.preprocessing = preprocessing
    example = torch.zeros(1, splits.train.channels, side, side), torch.rand(1, model.num_patches)
    flops = training_flops(model, *example)
    model.set_grad_checkpointing(config.machine.grad_checkpointing)
    feed = Feed(
        splits.train, device, img_size=side, workers=config.machine.workers, on_bad_image=config.machine.on_bad_image,
        resident=None if config.machine.resident == "auto" else config.machine.resident, progress=progress,
    )  # fmt: skip
    return Session(config, splits, model, feed, accelerator, _settings(config, flops), run, preprocessing)


def _settings(config: Pretrain, flops: float) -> Settings:
    values = config.settings()
    chosen = {f.name: values[f.name] for f in fields(Settings) if f.name in values}
    return Settings(**chosen, flops_per_image=flops)


def fit(session: Session, hooks: Hooks | None = None) -> MAE:
    """Train, and return the autoencoder in evaluation mode. The run folder has it too."""
    loop = session.loop(hooks)
    if session.run is not None:
        main = session.accelerator.is_main_process
        if main:
            session.config.save(session.run / "config.yaml")
            ckpt.write_text(session.run / "environment.json", json.dumps(environment(), indent=1))
        numbers = {k: v for k, v in session.config.settings().items() if isinstance(v, int | float | str | bool)}
        session.accelerator.init_trackers("residua", config=numbers)
        if session.config.machine.resume:
            loop.resume()
    try:
        loop.fit()
    finally:
        session.accelerator.end_training()
        session.feed.close()
    return session.model.eval()


def estimate(session: Session, steps: int = 3) -> dict[str, float]:
    """Memory in GiB and time in seconds of a whole run, from a few real steps on throw-away weights."""
    model, device = session.model, session.accelerator.device
    side = session.preprocessing.img_size
    example = torch.zeros(1, session.splits.train.channels, *side), torch.rand(1, model.num_patches)
    micro = min(session.config.machine.micro_batch or session.settings.batch_size, session.settings.batch_size)
    weights = 16 * count_parameters(model)  # float32 weight, gradient and two moments
    half = 0.5 if session.settings.precision == "bf16" else 1.0
    kept = half * micro * activation_bytes(model, *example)
    loop = session.loop()
    times = []
    for images in loop.batches(0, steps):
        start = time.perf_counter()
        float(loop.advance(images)[0])
        times.append(time.perf_counter() - start)
    memory = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else weights + kept
    return {"memory_gib": memory / 2**30, "seconds": min(times) * session.settings.steps}


def _trackers(config: Pretrain) -> list[str]:
    """The trackers asked for, or an error for one that is not installed."""
    from accelerate.tracking import get_available_trackers

    there = [str(name.value) for name in get_available_trackers()]
    for name in config.machine.trackers:
        if name not in there:
            raise ValueError(
                f"tracker {name!r} is unknown or not installed here; there are {', '.join(there) or 'none'}"
            )
    return [] if config.machine.dry_run else list(config.machine.trackers)


def _check_batch(config: Pretrain, accelerator: Accelerator) -> None:
    batch = config.optim.batch_size
    assert isinstance(batch, int)
    if batch % accelerator.num_processes:
        world = accelerator.num_processes
        raise ValueError(f"batch size {batch} cannot be shared by {world} processes: use a multiple of {world}")


def _run_folder(config: Pretrain, accelerator: Accelerator) -> Path:
    """The folder of this run, made now so that a read-only disk shows before any work."""
    chosen: list[str | None] = [None]
    if accelerator.is_main_process:
        given = config.machine.out
        base = Path(given).expanduser() if given else Path("runs") / f"{date.today()}-{_slug(config.data.data)}"
        path, number = base, 2
        while not config.machine.resume and (path / "config.yaml").exists():
            if given:
                raise ValueError(f"{path} holds a run already: add --resume to continue it, or choose another --out")
            path, number = base.with_name(f"{base.name}-{number}"), number + 1
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            ckpt.write_text(path / "environment.json", "{}")
        except OSError as error:
            raise ValueError(f"cannot write to the run folder {path}: {error}; choose another with --out") from error
        chosen = [str(path)]
    if accelerator.num_processes > 1:
        broadcast_object_list(chosen)
    assert chosen[0] is not None
    return Path(chosen[0])


def _slug(spec: str) -> str:
    tail = spec.split("?")[0].rstrip("/").split(":")[-1].split("/")[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", tail) or "run"


def _resumed(given: Pretrain) -> Pretrain:
    """The configuration of the run that is continued: its own, with this call's orchestration."""
    if given.machine.out is None:
        raise ValueError("--resume needs --out: the folder of the run to continue")
    path = Path(given.machine.out).expanduser() / "config.yaml"
    if not path.exists():
        raise ValueError(f"there is no run to resume at {path.parent}: {path.name} is missing")
    saved = Pretrain.read(path)
    fresh, before, now = Pretrain().settings(), saved.settings(), given.settings()
    orchestration = {f.name for f in fields(MachineConfig)}
    # what was asked for then is known as what it came to: whole steps, a batch no larger than the data
    images = round(before["steps"] * before["batch_size"] / before["epochs"])
    came_to = {
        "batch_size": lambda batch: min(batch, images),
        "epochs": lambda epochs: math.ceil(epochs * images / before["batch_size"]) * before["batch_size"] / images,
    }
    for name, value in now.items():
        if name in orchestration or value in (fresh[name], before[name]):
            continue
        if came_to.get(name, lambda v: v)(value) != before[name]:
            raise ValueError(
                f"--resume continues the run as it was: {name} is {before[name]!r} there, {value!r} was given. "
                "Leave it out, or start a new run with another --out"
            )
    changed = {k: now[k] for k in orchestration if now[k] != fresh[k]}
    return saved.override(**changed)


def hours(seconds: float) -> str:
    """12 s, 3 min, 2 h 5 min."""
    minutes = math.ceil(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
