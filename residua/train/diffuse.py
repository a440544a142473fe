"""Training of diffusion models: from a configuration to a run folder, by the same loop as everything else."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import Tensor, nn

from residua import data
from residua.data import Batch, Crops, DataError, Preprocessing, Source, mixing
from residua.data.arrays import cache_dir
from residua.data.augment import normalize
from residua.data.autoencoder import LatentSpace, open_autoencoder
from residua.data.latents import latent_view, latents_of
from residua.nn.conditioning import drop_labels
from residua.nn.diffusion import Process, make_process, noised, target
from residua.train.checkpoint import checkpoints, damaged
from residua.train.diffuse_config import Diffuse, build_model, resolve
from residua.train.loop import Hooks, Objective
from residua.train.machine import count_parameters, training_flops
from residua.train.processes import agreed, in_turn
from residua.train.sample import Sampling, grid_image, sample, save_png
from residua.train.session import (
    Augmentation,
    Lines,
    Session,
    check_batch,
    crops_of,
    images_for,
    loop_settings,
    open_accelerator,
    open_feed,
    released_on_failure,
    resumed,
    run_folder,
    slug,
)

GRID = Sampling(sampler="dpm-solver", steps=50)
PROCESS = {"vp": "variance preserving, predicts noise", "flow": "straight path, predicts velocity"}


class Denoising(Augmentation):
    """The objective: `|| model(x_t, t, y) - target ||^2`, its mean over pixels and images, `x_t = a(t) x_0 + s(t) eps`.

    t is uniform in (0, 1), eps normal. All chance (time, noise, crop, flip, whether the label is told) depends on seed,
    epoch and image alone. `labels` are those of all images; `full` says that every image fills its canvas.
    """

    def __init__(
        self,
        config: Diffuse,
        process: Process,
        preprocessing: Preprocessing,
        device: torch.device,
        *,
        labels: Tensor | None = None,
        classes: int = 0,
        space: LatentSpace | None = None,
        full: bool = False,
    ) -> None:
        super().__init__(config.data, preprocessing, config.optim.seed, device)
        self.crops = views_of(config)
        self.process, self.labels, self.classes, self.space = process, labels, classes, space
        self.dropout, self.full = config.model.label_dropout, full

    def view(self, batch: Batch, epochs: Tensor) -> Tensor:
        """x_0: images (B, C, h, w) in [-1, 1], or latents."""
        if self.space is not None:
            space = self.space
            return latent_view(
                batch, space.channels, space.shift, space.scale, seed=self.seed, epoch=epochs, flip=self.crops.flip
            )
        if batch.cut or not (self.crops.central and self.full and batch.pixels.shape[2:] == self.img_size):
            return self.cropped(batch, epochs)
        mirrored = self.crops.mirrored(batch.index, epochs)
        x = batch.pixels.float()
        x = x / 255 if batch.pixels.dtype == torch.uint8 else x
        x = x if mirrored is None else torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        return normalize(x, self.mean, self.std)

    @torch.no_grad()
    def draw(self, batch: Batch, epochs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x_0, eps (B, C, h, w), t (B,), and labels (B,) where the model takes them."""
        with torch.autocast(batch.pixels.device.type, enabled=False):
            x_0 = self.view(batch, epochs)
            eps = mixing.normal(self.uniform(batch, epochs, x_0[0].numel(), "noise")).view_as(x_0)
            t = self.uniform(batch, epochs, 1, "time")[:, 0].clamp(min=2.0**-24)
            if self.labels is None:
                return x_0, eps, t, None
            u = self.uniform(batch, epochs, 1, "label")[:, 0]
            return x_0, eps, t, drop_labels(self.labels[batch.index], u, self.dropout, self.classes)

    def __call__(self, model: nn.Module, batch: Batch, epochs: Tensor) -> Tensor:
        x_0, eps, t, y = self.draw(batch, epochs)
        with torch.autocast(batch.pixels.device.type, enabled=False):
            x_t, wanted = noised(self.process, x_0, eps, t), target(self.process, x_0, eps, t)
        prediction = model(x_t, self.process.time_input(t), *(() if y is None else (y,)))
        return F.mse_loss(prediction.float(), wanted)


def views_of(config: Diffuse) -> Crops:
    """The training views: where nothing is to be cut off, the central square."""
    return crops_of(config.data, config.optim.seed, central=config.data.scale == (1.0, 1.0))


class Diffusion(Session[Diffuse, Any]):
    """A diffusion model about to be trained."""

    def objective(self) -> Objective:
        device, model, labels = self.accelerator.device, self.model, None
        if model.num_classes is not None:
            labels = torch.from_numpy(told_labels(self.feed.source, self.splits.train)).to(device)
        return Denoising(
            self.config, model.process, self.preprocessing, device, labels=labels, classes=model.num_classes or 0,
            space=getattr(model, "autoencoder", None), full=self.feed.full,
        )  # fmt: skip

    def example(self) -> tuple[Tensor, ...]:
        return example(self.model)

    @property
    def steps_per_grid(self) -> int | None:
        """Steps between pictures of samples."""
        every = self.config.machine.sample_every
        return max(1, round(every * self.steps_per_epoch)) if every else None

    def hooks(self, **hooks: Any) -> Hooks:
        """Pictures of samples while training, beside what is given."""
        every, also = self.steps_per_grid, hooks.pop("on_interval", None)

        def on_interval(step: int, model: nn.Module) -> dict[str, Any] | None:
            self.write_grid(step, model)
            return also(step, model) if also is not None else None

        return Hooks(**hooks, every=every, on_interval=on_interval, averaged=True)

    def write_grid(self, step: int, model: nn.Module) -> Path | None:
        """A picture of samples, always of the same noise: RUN/samples/step-0001000.png."""
        if self.run is None or not self.accelerator.is_main_process or not self.config.machine.sample_every:
            return None
        if self.preprocessing.in_chans not in (1, 3):
            return None
        path = self.run / "samples" / f"step-{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        images = sample(model, self.config.machine.samples, settings=replace(GRID, seed=self.config.optim.seed))
        save_png(grid_image(images), path)
        return path

    def lines(self) -> Lines:
        c, o, m = self.config, self.config.optim, self.config.model
        told = f"{self.model.num_classes} classes" if self.model.num_classes else "no labels"
        name = {"uvit": "U-ViT", "sit": "SiT"}[m.network]
        space = getattr(self.model, "autoencoder", None)
        inner = f", latents {space.channels} x {self.model.img_size[0]} x {self.model.img_size[1]}" if space else ""
        rate = "then constant" if o.lr_schedule == "constant" else "then cosine to 0"
        return [
            ("data", self._data_line(f"{c.data.img_size} px{inner}, patch {m.patch_size}")),
            ("model", f"{name}-{m.size} ({count_parameters(self.model) / 1e6:.1f} M), {self._fading()}"),
            ("process", f"{PROCESS[str(m.process)]}; told: {told}" + (
                f", {100 * m.label_dropout:.0f} % of them dropped" if self.model.num_classes else "")),
            ("steps", f"{o.steps:,} of {o.batch_size} images ({o.epochs:.4g} epochs), rate {o.lr:.2g}, {rate}; "
                      f"average {'none' if o.ema is None else format(o.ema, '.5g')}, seed {o.seed}"),
            *self._closing_lines(),
        ]  # fmt: skip


def example(model: Any) -> tuple[Tensor, ...]:
    """What a diffusion model is called with, for one image."""
    x = torch.zeros(1, model.in_chans, *model.img_size)
    labels = () if model.num_classes is None else (torch.zeros(1, dtype=torch.long),)
    return x, torch.zeros(1), *labels


def prepare(config: Diffuse, progress: data.feed.Progress | None = None, given: Collection[str] = ()) -> Diffusion:
    """Check and choose everything before anything is trained.

    Where a run is resumed, `given` names settings that are meant even if they have their default value.
    """
    if config.machine.resume:
        config = resumed(config, given)
    accelerator = open_accelerator(config.machine)
    device = accelerator.device
    splits = in_turn(lambda: data.load(config.data.data))
    with agreed():
        if config.machine.fid_every and accelerator.num_processes > 1:
            raise ValueError("fid_every is for one process; score samples afterwards: residua sample, residua score")
        if config.machine.fid_every and splits.train.channels not in (1, 3):
            raise DataError(
                f"fid_every is for images of 1 or 3 channels; {splits.train.name} has {splits.train.channels}: leave "
                "it out"
            )
        autoencoder = open_autoencoder(config.model.latents, device) if config.model.latents else None
        space = autoencoder.space if autoencoder else None
        config = resolve(config, splits.train, device.type, space)
        side, batch = config.data.img_size, config.optim.batch_size
        assert isinstance(side, int)
        assert isinstance(batch, int)
        check_batch(batch, accelerator)
        classes = class_names(splits.train) if config.model.conditional else None
        set_seed(config.optim.seed)
        torch.set_float32_matmul_precision("high")
        channels = space.channels if space else splits.train.channels
        model = build_model(config, channels, len(classes) if classes else None, space.factor if space else 1)
        preprocessing = _attach(model, config, splits.train.channels, classes, space)
        if config.machine.resume:
            _check_begun(model, Path(str(config.machine.out)).expanduser())
    run = None if config.machine.dry_run else run_folder(config.machine, f"{slug(config.data.data)}-diffusion",
                                                         accelerator)  # fmt: skip
    source = images_for(config.machine, splits.train, side, progress, run)
    with released_on_failure(run):
        with agreed():
            flops = training_flops(model, *example(model))
            model.set_grad_checkpointing(config.machine.grad_checkpointing)
            if autoencoder is not None:
                source = latents_of(
                    source, autoencoder, side, cache_dir() / "latents", device,
                    writes=accelerator.is_local_main_process, on_bad_image=config.machine.on_bad_image,
                    workers=config.machine.workers, progress=progress,
                )  # fmt: skip
            crops = None if space else views_of(config)
        feed = open_feed(config.machine, source, device, side // (space.factor if space else 1), progress, crops)
    return Diffusion(config, splits, model, feed, accelerator, loop_settings(config, flops), run, preprocessing)


def class_names(source: Source) -> list[str]:
    """One name a class that has images; numbers where there are no names.

    A class without images would not be learned, and yet be dealt out among the samples.
    """
    assert source.labels is not None
    names = source.classes or [str(i) for i in range(int(source.labels.max()) + 1)]
    if len(source.labels) and not 0 <= source.labels.min() <= source.labels.max() < len(names):
        low, high = int(source.labels.min()), int(source.labels.max())
        raise DataError(f"{source.name} has labels from {low} to {high}; expected 0 to {len(names) - 1}")
    return [names[i] for i in np.unique(source.labels)]


def told_labels(source: Source, train: Source) -> np.ndarray:
    """Numbers of the images' classes among `class_names(train)`."""
    assert source.labels is not None
    assert train.labels is not None
    return np.searchsorted(np.unique(train.labels), source.labels)


def _attach(
    model: Any, config: Diffuse, channels: int, classes: list[str] | None, space: LatentSpace | None
) -> Preprocessing:
    """What belongs to the model beside its weights: pixels go to [-1, 1]."""
    side = config.data.img_size
    assert isinstance(side, int)
    model.preprocessing = Preprocessing((side, side), (0.5,) * channels, (0.5,) * channels, channels)
    model.process = make_process(str(config.model.process))
    model.in_pixels = space is None
    if classes:
        model.classes, model.label_dropout = classes, config.model.label_dropout
    if space is not None:
        model.autoencoder = space
    return model.preprocessing


def _check_begun(model: Any, run: Path) -> None:
    """Refuse to go on with other latents than a run was begun with, or with labels that mean something else."""
    saved = checkpoints(run)
    if not saved:
        return
    space = getattr(model, "autoencoder", None)
    try:
        before = json.loads((saved[-1] / "model.json").read_text("utf-8"))
        known = before.get("autoencoder")
        other = space and (not known or replace(space, name=known["name"]).to_dict() != known)
    except Exception as error:  # whatever a damaged file makes of itself
        raise damaged(saved[-1], error) from error
    remedy = "put back what was there, or start a new run with another --out"
    if space and other:
        raise DataError(f"the autoencoder {space.name} is not the one that {run} was begun with: {remedy}")
    if before.get("classes") != getattr(model, "classes", None):
        raise DataError(f"the images have other classes than when {run} was begun: {remedy}")
