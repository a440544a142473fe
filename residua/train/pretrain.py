"""Pretraining of masked autoencoders: from a configuration to a run folder."""

from __future__ import annotations

from collections.abc import Collection

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from residua import data
from residua.adapt.encoder import model_data
from residua.data import Batch, Preprocessing
from residua.nn import MAE
from residua.train import checkpoint as ckpt
from residua.train.config import Pretrain, build_model, resolve
from residua.train.loop import Objective
from residua.train.machine import count_parameters, training_flops
from residua.train.processes import agreed, in_turn
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
    out_folder,
    released_on_failure,
    resumed,
    run_folder,
    slug,
)
from residua.train.start import as_in, check_shape, tell_shortcuts


class Reconstruction(Augmentation):
    """The objective: crop, flip, hide patches, reconstruct them. All chance depends on seed, epoch and image alone."""

    def __init__(self, config: Pretrain, preprocessing: Preprocessing, patches: int, device: torch.device) -> None:
        super().__init__(config.data, preprocessing, config.optim.seed, device)
        self.patches = patches

    @torch.no_grad()
    def view(self, batch: Batch, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented images (B, C, h, w) and mask noise (B, N)."""
        with torch.autocast(batch.pixels.device.type, enabled=False):
            images = self.cropped(batch, epochs)
        return images, self.uniform(batch, epochs, self.patches, "mask")

    def __call__(self, model: nn.Module, batch: Batch, epochs: Tensor) -> Tensor:
        return model(*self.view(batch, epochs))[0]


class Pretraining(Session[Pretrain, MAE]):
    """A masked autoencoder about to be trained."""

    def objective(self) -> Objective:
        return Reconstruction(self.config, self.preprocessing, self.model.num_patches, self.accelerator.device)

    def example(self) -> tuple[Tensor, ...]:
        images = torch.zeros(1, self.splits.train.channels, *self.preprocessing.img_size)
        return images, torch.rand(1, self.model.num_patches)

    def lines(self) -> Lines:
        c, o = self.config, self.config.optim
        encoder, rest = (count_parameters(part) / 1e6 for part in (self.model.encoder, self.model.decoder))
        name = {"ushape": "U-shaped", "plain": "plain"}[c.model.decoder]
        body = f"ViT-{c.model.size}" if c.model.encoder is None else f"{c.model.encoder}, {c.model.encoder_weights},"
        return [
            ("data", self._data_line(f"{c.data.img_size} px, patch {c.model.patch_size}")),
            ("model", f"{body} ({encoder:.1f} M) + {name} decoder ({rest:.1f} M), {self._fading()}"),
            ("steps", f"{o.steps:,} of {o.batch_size} images ({o.epochs:.4g} epochs), peak learning rate {o.lr:.2g}, "
                      f"seed {o.seed}"),
            *self._closing_lines(),
        ]  # fmt: skip


def prepare(config: Pretrain, progress: data.feed.Progress | None = None, given: Collection[str] = ()) -> Pretraining:
    """Check and choose everything before anything is trained.

    Where a run is resumed or starts from weights, `given` names settings that are meant even if they have their
    default value.
    """
    if config.machine.resume:
        config = resumed(config, given)
    folder = out_folder(config.machine)
    accelerator = open_accelerator(config.machine)
    splits = in_turn(lambda: data.load(config.data.data))
    with agreed():
        device, init = accelerator.device, config.optim.init
        there = ckpt.model_config(init) if init and not config.machine.resume else None
        if there is not None:
            config = as_in(config, there, given)
        config = resolve(config, splits.train, device.type)
        side, batch = config.data.img_size, config.optim.batch_size
        assert isinstance(side, int)
        assert isinstance(batch, int)
        check_batch(batch, accelerator)
        set_seed(config.optim.seed)
        torch.set_float32_matmul_precision("high")
        begun = bool(config.machine.resume and folder and ckpt.checkpoints(folder))
        model = build_model(config, splits.train.channels, begun)
        if init and there is not None:
            check_shape(model, init, there)
            tell_shortcuts(model, config, there)
        if init and not begun:
            ckpt.initialize(model, init)
    run = None
    if not config.machine.dry_run:
        run = run_folder(config.machine, slug(config.data.data), accelerator)
    source = images_for(config.machine, splits.train, side, progress, run)
    with released_on_failure(run):
        with agreed():
            mean, std = splits.train.stats()
            if config.model.encoder and config.model.encoder_weights != "random":  # trained weights know their own
                known = model.encoder.preprocessing or model_data(config.model.encoder, splits.train.channels)
                mean, std = known.mean, known.std
            crop = 0.875 if side >= 160 else 1.0
            preprocessing = Preprocessing((side, side), mean, std, splits.train.channels, crop)
            model.preprocessing = model.encoder.preprocessing = preprocessing
            example = torch.zeros(1, splits.train.channels, side, side), torch.rand(1, model.num_patches)
            flops = training_flops(model, *example)
            model.set_grad_checkpointing(config.machine.grad_checkpointing)
            crops = crops_of(config.data, config.optim.seed)
        feed = open_feed(config.machine, source, device, side, progress, crops)
    return Pretraining(
        config, splits, model, feed, accelerator, loop_settings(config, flops), run, preprocessing
    )  # fmt: skip
