"""Classification, end to end: from a configuration to a run folder, by the same loop as pretraining."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from residua import data
from residua.adapt import is_name
from residua.adapt.encoder import create_model
from residua.data import Batch, DataError, Preprocessing, Source, Splits, mixing
from residua.nn import Classifier, ResNet, Shortcuts, UniformNet
from residua.nn.stream import residual_part
from residua.train import checkpoint as ckpt
from residua.train.finetune_config import (
    Finetune,
    RegularConfig,
    Start,
    body_of,
    is_resnet,
    open_start,
    own_shape,
    resolve,
)
from residua.train.loop import Objective
from residua.train.machine import count_parameters, training_flops
from residua.train.optim import UNDECAYED, Groups
from residua.train.options import DataConfig, check_place, setting_of, trained_on
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
    share_batch_norm,
    slug,
)

READOUTS = {"patches": "mean of patches", "tokens": "mean of all tokens", "cls": "class token"}


class Labelling(Augmentation):
    """The objective: crop, flip, erase and mix images, and predict the labels mixed likewise.

    All chance depends on seed, epoch and image alone: strengths, boxes and noise of an image, and which of the
    network's branches it goes without. An image is mixed with its neighbour in the batch, so pairs stay together.
    """

    def __init__(
        self,
        regular: RegularConfig,
        images: DataConfig,
        preprocessing: Preprocessing,
        labels: Tensor,
        classes: int,
        shortcut: Shortcuts,
        seed: int,
    ) -> None:
        device = labels.device
        super().__init__(images, preprocessing, seed, device)
        self.labels, self.classes = labels, classes
        off: Any = {name: value or None for name, value in asdict(regular).items()}
        self.erasing, self.smoothing = off["erasing"], off["smoothing"] or 0.0
        strengths = (off["mixup"], off["cutmix"])
        self.mixup, self.cutmix = (alpha and mixing.beta_quantiles(alpha).to(device) for alpha in strengths)
        self.together = 2 if any(strengths) else 1
        self.dropping: Tensor | None = None
        if off["drop_path"]:
            rates = torch.linspace(0, off["drop_path"], shortcut.depth, device=device)
            self.dropping = rates.repeat_interleave(shortcut.sublayers)

    @torch.no_grad()
    def view(self, batch: Batch, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented images (B, C, h, w) and the probabilities (B, classes) to predict for them."""
        with torch.autocast(batch.pixels.device.type, enabled=False):
            x = self.cropped(batch, epochs)
            if self.erasing:
                boxes = mixing.erase_boxes(self.uniform(batch, epochs, mixing.ERASE_LANES, "erase"), self.img_size,
                                           self.erasing)  # fmt: skip
                noise = mixing.normal(self.uniform(batch, epochs, x[0].numel(), "noise"))
                x = mixing.erase(x, boxes, noise.view_as(x))
            u = self.uniform(batch, epochs, mixing.MIX_LANES, "mix")
            weights = mixing.mix_weights(u, self.img_size, self.mixup, self.cutmix)
            if self.together > 1:
                x = mixing.mix(x, weights)
            if x.device.type == "cpu":  # where convolutions are faster on it; compiled ones choose for themselves
                x = x.contiguous(memory_format=torch.channels_last)
            return x, mixing.soft_targets(self.labels[batch.index], weights, self.classes, self.smoothing)

    @torch.no_grad()
    def keep(self, batch: Batch, epochs: Tensor) -> Tensor | None:
        """Scale of every branch for every image (B, steps): 0 where it is dropped, else 1 / (1 - rate)."""
        if self.dropping is None:
            return None
        u = self.uniform(batch, epochs, len(self.dropping), "drop path")
        return (u >= self.dropping) / (1 - self.dropping)

    def __call__(self, model: nn.Module, batch: Batch, epochs: Tensor) -> Tensor:
        images, targets = self.view(batch, epochs)
        return F.cross_entropy(model(images, self.keep(batch, epochs)).float(), targets)


class Classification(Session[Finetune, Any]):
    """A classifier about to be trained; its model is a `Classifier`, a `ResNet` or a `UniformNet`."""

    @property
    def from_scratch(self) -> bool:
        name = self.config.network.model
        return name is not None and not Path(name).expanduser().exists() and not is_name(name)

    def objective(self) -> Objective:
        labels = torch.from_numpy(self.feed.source.labels).to(self.accelerator.device)
        c = self.config
        return Labelling(
            c.regular, c.data, self.preprocessing, labels, self.model.num_classes, residual_part(self.model).shortcut,
            c.optim.seed,
        )  # fmt: skip

    def groups(self) -> Groups | None:
        o = self.config.optim
        if o.layer_decay == 1.0:
            return None
        assert isinstance(o.weight_decay, float | int)
        assert isinstance(o.layer_decay, float)
        free = [name for name, _ in self.model.named_parameters() if name.endswith(UNDECAYED)]
        return param_groups_layer_decay(
            self.model, o.weight_decay, no_weight_decay_list=free, layer_decay=o.layer_decay
        )

    def example(self) -> tuple[Tensor, ...]:
        return (torch.zeros(1, self.splits.train.channels, *self.preprocessing.img_size),)

    def lines(self) -> Lines:
        c, o = self.config, self.config.optim
        test = self.splits.test
        tested = f"; test: {len(test):,} images" if test is not None and test.labels is not None else ""
        regular = ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in asdict(c.regular).items() if v) or "none"
        return [
            ("data", self._data_line(f"{c.data.img_size} px{tested}")),
            ("model", self._describe_model()),
            ("recipe", f"{o.optimizer}, weight decay {o.weight_decay:g}, layer decay {o.layer_decay:g}; {regular}"),
            ("steps", f"{o.steps:,} of {o.batch_size} images ({o.epochs:.4g} epochs), peak learning rate {o.lr:.2g}, "
                      f"seed {o.seed}"),
            *self._closing_lines(),
        ]  # fmt: skip

    def _describe_model(self) -> str:
        model, name = self.model, self.config.network.model
        shortcut = residual_part(model).shortcut
        kind = "ViT" if isinstance(model, Classifier) else type(model).__name__
        origin = ""
        if name is not None:
            origin = f", {name} from scratch" if self.from_scratch else f" from {name}"
        head = f", read-out: {READOUTS[model.readout]}" if isinstance(model, Classifier) else ""
        return (
            f"{kind} ({count_parameters(model) / 1e6:.1f} M, {shortcut.depth} blocks){origin}, {shortcut.words()}{head}"
        )


def prepare(
    config: Finetune,
    *,
    start: nn.Module | None = None,
    load: Callable[[str], Splits] = data.load,
    write: bool = True,
    progress: data.feed.Progress | None = None,
    given: Collection[str] = (),
) -> Classification:
    """Check and choose everything before anything is trained.

    `start` is a network in memory instead of the setting `model`; `load` turns the source's name into splits; without
    `write` there is no run folder. Where a run is resumed, `given` names settings that are meant even if they have
    their default value.
    """
    if config.machine.resume:
        config = resumed(config, given)
    accelerator = open_accelerator(config.machine)
    with agreed():
        begun = _begun(config)  # a run that goes on needs nothing of what it started from
        begin: Start = begun or (open_start(config.network.model, config.network.weights) if start is None else start)
        config = _with_source(config, given)
    splits = in_turn(lambda: load(config.data.data))
    with agreed():
        check_labels(splits)
        config = resolve(config, begin, splits.train, accelerator.device.type)
        side, batch, regular = config.data.img_size, config.optim.batch_size, config.regular
        assert isinstance(side, int)
        assert isinstance(batch, int)
        check_batch(batch, accelerator, together=2 if regular.mixup or regular.cutmix else 1)
        set_seed(config.optim.seed)
        torch.set_float32_matmul_precision("high")
        model = begun or build_model(config, begin, splits.train)
        share_batch_norm(model, accelerator)
        preprocessing = _preprocessing(begin, splits.train, side)
        for part in (model, getattr(model, "encoder", model)):
            part.preprocessing = preprocessing
    run = None
    if write and not config.machine.dry_run:
        name = config.network.model if isinstance(begin, str) else "finetune"
        run = run_folder(config.machine, f"{slug(config.data.data)}-{name}", accelerator)
    source = images_for(config.machine, splits.train, side, progress, run)
    with released_on_failure(run):
        with agreed():
            flops = training_flops(model, torch.zeros(1, splits.train.channels, side, side))
            model.set_grad_checkpointing(config.machine.grad_checkpointing)
            crops = crops_of(config.data, config.optim.seed)
        feed = open_feed(config.machine, source, accelerator.device, side, progress, crops)
    return Classification(
        config, splits, model, feed, accelerator, loop_settings(config, flops), run, preprocessing
    )  # fmt: skip


def _begun(config: Finetune) -> Any:
    """The network of the run that is resumed, if it came to a checkpoint."""
    folder = out_folder(config.machine)
    if not config.machine.resume or folder is None or not ckpt.checkpoints(folder):
        return None
    return ckpt.load(folder, ema=False).train()


def build_model(config: Finetune, start: Start, source: Source) -> Any:
    """The classifier of a resolved configuration with a fresh head, on the CPU; `start` is left as it is."""
    assert source.labels is not None
    classes = source.classes or [str(i) for i in range(int(source.labels.max()) + 1)]
    network, given = config.network, {"img_size": config.data.img_size, "num_classes": len(classes)}
    if isinstance(start, str):
        own = {name: getattr(network, name) for name in own_shape(start)}
        shape: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if not is_resnet(start):
            shape["readout"] = network.readout
        model: Any = create_model(start, in_chans=source.channels, **given, **shape, **config.shortcut.decay())
    else:
        body = body_of(start)
        if body.in_chans != source.channels:
            raise DataError(f"{source.name} has {source.channels} channels, the network takes {body.in_chans}")
        model = _on_resnet(body, given) if is_resnet(body) else _on_encoder(body, given, network.readout)
    model.classes = list(classes)
    return model


def _on_encoder(encoder: Any, given: dict[str, Any], readout: str) -> Classifier:
    """A new head on a copy of an encoder, whose positions are interpolated where the image size is another."""
    config = {name: value for name, value in encoder.config.items() if name != "final_norm"}
    model: Any = create_model(**config | given, readout=readout)
    state = {name: value for name, value in encoder.state_dict().items() if not name.startswith("norm.")}
    positions = encoder.positions(model.encoder.grid)[:, -model.encoder.pos_embed.shape[1] :]
    model.encoder.load_state_dict(state | {"pos_embed": positions})
    if encoder.final_norm and readout == "cls":  # the norm that pretraining gave this token
        model.norm.load_state_dict(encoder.norm.state_dict())
    return model


def _on_resnet(body: ResNet | UniformNet, given: dict[str, Any]) -> Any:
    model: Any = create_model(**body.config | given)
    own = {name: value for name, value in body.state_dict().items() if not name.startswith(("fc.", "head."))}
    model.load_state_dict(own, strict=False)
    return model


def check_labels(splits: Splits) -> None:
    """Whether a classifier can be trained and tested on these."""
    train, test = splits.train, splits.test
    if train.labels is None:
        raise DataError(
            f"{splits.name} has no labels to learn: put the images of each class into a folder of its own, or use a "
            "source with labels. Without labels there is residua evaluate"
        )
    count = len(train.classes) if train.classes else int(train.labels.max()) + 1
    seen = len(set(train.labels.tolist()))
    if seen < 2:
        raise DataError(f"{splits.name} has training images of {seen} class: there is nothing to tell apart")
    for part in (train, test):
        if part is None or part.labels is None:
            continue
        if part.classes != train.classes:
            raise DataError(f"{splits.name}: the classes of its {part.split} split are not those of its train split")
        if len(part.labels) and not 0 <= part.labels.min() <= part.labels.max() < count:
            low, high = int(part.labels.min()), int(part.labels.max())
            raise DataError(f"{splits.name}: labels of its {part.split} split go from {low} to {high}; expected 0 to "
                            f"{count - 1}, the {count} classes of the train split")  # fmt: skip


def _with_source(config: Finetune, given: Collection[str]) -> Finetune:
    """The images that the network was trained on, and what was done there about unreadable ones, unless told."""
    if config.data.data != "auto":
        return config
    run = config.network.model
    found = trained_on(run) if run else None
    if run is None or found is None:
        raise ValueError(f"{run or 'the model'} does not say which images to use: add --data")
    check_place(run, found)
    bad = None if "on_bad_image" in given else setting_of(run, "on_bad_image")
    return config.override(data=found, on_bad_image=bad or config.machine.on_bad_image)


def _preprocessing(start: Start, source: Source, side: int) -> Preprocessing:
    """The network's own numbers at this image size, or those of the training images."""
    own = None if isinstance(start, str) else getattr(start, "preprocessing", None)
    if own is not None:
        return replace(own, img_size=(side, side))
    mean, std = source.stats()
    return Preprocessing((side, side), mean, std, source.channels, 0.875 if side >= 160 else 1.0)
