"""The one training loop. It knows steps, learning rates and checkpoints; what is learned is handed to it."""

from __future__ import annotations

import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from residua.adapt import shortcuts
from residua.data import Batch, Feed, Order
from residua.disk import named
from residua.train import checkpoint as ckpt
from residua.train.health import Health
from residua.train.machine import autocast, peak_flops
from residua.train.metrics import Record, append_metrics, read_metrics, replace_metrics, truncate_metrics
from residua.train.optim import (
    Average,
    Groups,
    Settings,
    decay_strength,
    learning_rate,
    make_optimizer,
    parameter_groups,
    restore_optimizer,
)
from residua.train.processes import PATIENCE, Interrupted, TrainingStopped, agreed
from residua.train.recorded import Recorded

Objective = Callable[[nn.Module, Batch, Tensor], Tensor]
"""(model, batch, epoch of each image) -> loss, a mean over the batch. An objective that lets neighbours in the batch
have a part in each other says by its attribute `together` how many must not be separated."""


@dataclass
class Hooks:
    """What happens around the loop, handed in from above."""

    on_record: Callable[[Record], None] = lambda record: None
    on_message: Callable[[str], None] = print
    every: int | None = None
    """Call `on_interval` each so many steps, and not at the last. If it fails, that is told and training goes on, but
    for a `TrainingStopped`."""
    on_interval: Callable[[int, nn.Module], Record | None] = lambda step, model: None
    averaged: bool = False
    """Hand `on_interval` the moving average of the model, where one is kept."""


@dataclass
class _Interrupt:
    """SIGTERM and SIGINT ask the loop to save and leave; a second one leaves at once."""

    asked: bool = False
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> _Interrupt:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not in the main thread: leave signals alone
            pass
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Loop:
    """Trains `model` on `objective` over the images of `feed`, into the folder `run` (None: keep nothing)."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        feed: Feed,
        settings: Settings,
        accelerator: Accelerator,
        run: Path | None = None,
        hooks: Hooks | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.bare, self.objective, self.feed, self.settings = model, objective, feed, settings
        self.accelerator, self.run, self.hooks = accelerator, run, hooks or Hooks()
        self.device = accelerator.device
        world = accelerator.num_processes
        self.order = Order(len(feed), settings.batch_size, settings.seed, accelerator.process_index, world)
        self.together = getattr(objective, "together", 1)
        self.micro = min(self._whole(settings.micro_batch or self.order.share), self.order.share)
        with agreed():
            model.to(self.device)
            self.ema = Average(model, settings.ema) if settings.ema else None
            groups = groups or parameter_groups(model, settings.weight_decay)
            optimizer = make_optimizer(groups, settings, self.device)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.rates = torch.tensor([group.get("lr_scale", 1.0) for group in groups], device=self.device)
        self.scales = self.rates.clone()
        self.loss = self._make_loss()
        self.recorded = Recorded(self._update, self.hooks.on_message) if self._recordable() else None
        self.shortcut = shortcuts(model)
        self.health = Health(settings.steps)
        together = world > 1 and self.hooks.every
        self.meeting: Any = dist.new_group(backend="gloo", timeout=PATIENCE) if together else None
        self.peak = peak_flops(self.device, settings.precision)
        self.step = 0

    # ------------------------------------------------------------ one step

    def _recordable(self) -> bool:
        """Whether a step is the same sequence of kernels each time, on one device: then it can be replayed."""
        alone = self.accelerator.num_processes == 1 and self.micro == self.order.share
        return self.settings.compile and self.device.type == "cuda" and alone

    def _make_loss(self) -> Callable[[Batch, Tensor], Tensor]:
        """The objective from pixels to loss, compiled as a whole where asked for."""

        cut = self.feed.cuts

        def loss(pixels: Tensor, sizes: Tensor, index: Tensor, epochs: Tensor) -> Tensor:
            return self.objective(self.model, Batch(pixels, sizes, index, cut), epochs)

        if self.settings.compile:
            loss = torch.compile(loss)
        return lambda batch, epochs: loss(batch.pixels, batch.sizes, batch.index, epochs)

    def _whole(self, count: int) -> int:
        """So many images or a few more, so that none is separated from those it belongs to."""
        return -(-count // self.together) * self.together

    def _micro_batches(self, batch: Batch, epochs: Tensor) -> Iterator[tuple[Batch, Tensor, float, bool]]:
        count = len(batch.index)
        for start in range(0, count, self.micro):
            stop = min(start + self.micro, count)
            part = Batch(batch.pixels[start:stop], batch.sizes[start:stop], batch.index[start:stop], batch.cut)
            yield part, epochs[start:stop], (stop - start) / count, stop == count

    def _gradients(self, batch: Batch, epochs: Tensor) -> Tensor:
        """Forward and backward over the batch, in micro-batches; returns its mean loss."""
        total = torch.zeros((), device=self.device)
        for part, part_epochs, weight, last in self._micro_batches(batch, epochs):
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with autocast(self.device, self.settings.precision):
                    loss = self.loss(part, part_epochs)
                self.accelerator.backward(loss * weight if weight != 1.0 else loss)
            total += loss.detach() * weight
        return total

    def _update(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """From image numbers (or pixels, sizes and numbers) and epochs to new weights; loss and gradient norm."""
        *images, epochs = inputs
        if len(images) == 1:
            batch = self.feed.gather(images[0])
        else:
            pixels, sizes, index = images
            batch = Batch(pixels, sizes, index, self.feed.cuts)
        loss = self._gradients(batch, epochs)
        norm = torch.zeros((), device=self.device)
        if self.settings.clip is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _try_update(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As `_update`, halving the micro-batch when memory runs out. Randomness depends on the image alone."""
        while True:
            try:
                return self.recorded(*inputs) if self.recorded else self._update(*inputs)
            except torch.OutOfMemoryError as error:
                self.optimizer.zero_grad(set_to_none=True)
                if not self._splits():
                    raise TrainingStopped(
                        f"out of memory with {self.micro} images at once at step {self.step:,}: "
                        "try --grad-checkpointing, a smaller model or, with several processes, a smaller --micro-batch"
                    ) from error
            self.micro = self._whole(-(-self.micro // 2))
            self.recorded = None  # accumulated steps are not replayed
            self.loss = self._make_loss()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            parts = -(-self.order.share // self.micro)
            self.hooks.on_message(
                f"out of memory: from here {self.micro} images at once, {parts} times a step; "
                f"the batch stays {self.settings.batch_size}"
            )

    def _splits(self) -> bool:
        """Whether the run goes on with fewer images at once where memory runs out."""
        return self.accelerator.num_processes == 1 and self.micro > self.together

    def _set_rates(self) -> None:
        """The learning rate of every group; on CUDA as tensors, so that a recorded step reads today's."""
        rate = learning_rate(self.step, self.settings)
        on_device = self.device.type == "cuda"
        if on_device:
            torch.mul(self.scales, rate, out=self.rates)
        for i, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.rates[i] if on_device else rate * group.get("lr_scale", 1.0)

    def batches(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        """What `advance` takes at each step: image numbers where the feed is resident, else also their pixels."""
        numbers = self.order.batches(start, stop)
        if self.feed.resident:
            return ((index.to(self.device, non_blocking=True),) for index in numbers)
        epochs = (self.order.epoch_of(step) for step in range(start, stop))
        return ((batch.pixels, batch.sizes, batch.index) for batch in self.feed.iterate(numbers, epochs))

    def advance(self, images: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One step of training; returns its loss and gradient norm, on the device."""
        settings = self.settings
        self._set_rates()
        if settings.anneal and self.shortcut is not None:
            self.shortcut.set_strength(decay_strength(self.step, settings))
        epochs = self.order.epoch_of(self.step).to(self.device, non_blocking=True)
        loss, norm = self._try_update((*images, epochs))
        if self.ema is not None:
            self.ema.update(self.step)
        self.step += 1
        return loss, norm

    # ------------------------------------------------------------ the run

    def fit(self) -> nn.Module:
        """Train to the last step and return the model (its moving average, where one is kept)."""
        with _Interrupt() as interrupt:
            self._fit(interrupt)
        if self.ema is not None:
            self.bare.load_state_dict(self.ema.model.state_dict())
        return self.bare

    def _fit(self, interrupt: _Interrupt) -> None:
        settings, hooks = self.settings, self.hooks
        if self.step < settings.steps:
            self.model.train()
        losses: list[Tensor] = []
        started, waited = time.perf_counter(), self.feed.wait_seconds
        for images in self.batches(self.step, settings.steps):
            loss, norm = self.advance(images)
            losses.append(loss)
            last = self.step == settings.steps
            evaluate = hooks.every is not None and self.step % hooks.every == 0 and not last
            save = last or self.step % settings.checkpoint_every == 0
            alone = self.accelerator.num_processes == 1  # several processes must stop at the same step
            if save or evaluate or self.step % settings.log_every == 0 or (alone and interrupt.asked):
                record = self._record(losses, norm, started, waited)
                self._write(record, append_metrics)
                leave = self._leave(interrupt) and not last
                if save or leave:
                    self.save()
                if evaluate and not leave:
                    record |= self._look()
                    self._write(record, replace_metrics)
                self._tell(record)
                losses, started, waited = [], time.perf_counter(), self.feed.wait_seconds
                if leave:
                    raise Interrupted(f"stopped at step {self.step:,} of {settings.steps:,}; continue with --resume")

    def _leave(self, interrupt: _Interrupt) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return interrupt.asked
        asked = torch.tensor(float(interrupt.asked), device=self.device)
        return bool(self.accelerator.reduce(asked, "sum") > 0)

    def _record(self, losses: Sequence[Tensor], norm: Tensor, started: float, waited: float) -> Record:
        """Mean loss and speed since the last record; stops the run if a loss was not finite."""
        values = self.accelerator.reduce(torch.stack(list(losses)), "mean").double().cpu()
        seconds = time.perf_counter() - started
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            self._stop(f"the loss became {float(values[bad[0]])}", self.step - len(losses) + int(bad[0]))
        rate = len(losses) * self.settings.batch_size / seconds
        record: Record = {
            "step": self.step,
            "epoch": self.step * self.settings.batch_size / len(self.feed),
            "loss": float(values.mean()),
            "lr": learning_rate(self.step - 1, self.settings),
            "images_per_s": rate,
        }
        if self.settings.clip is not None:
            record["grad_norm"] = float(norm)
        if self.shortcut is not None:
            record["alpha_last"] = float(self.shortcut.alpha[-1].detach())
        if self.peak and self.settings.flops_per_image:
            record["mfu"] = rate * self.settings.flops_per_image / (self.peak * self.accelerator.num_processes)
        if self.feed.skipped:
            record["skipped_images"] = self.feed.skipped
        share = (self.feed.wait_seconds - waited) / seconds
        found = self.health.check(self.step, record["loss"], share, self.device, self._splits())
        for message in found:
            self.hooks.on_message(message)
        return record

    def _stop(self, what: str, step: int) -> NoReturn:
        kept = ckpt.checkpoints(self.run) if self.run else []
        raise TrainingStopped(
            f"{what} at step {step + 1:,}, learning rate {learning_rate(step, self.settings):.2e}. "
            + (f"The last good checkpoint is {kept[-1]}. " if kept else "No checkpoint was written before. ")
            + "Try a smaller --lr, --clip 1.0 or, where shortcuts fade, a larger --alpha-min."
        )

    def _look(self) -> Record:
        """What `on_interval` finds; nothing where it fails, which is told. Processes go on together."""
        hooks, found, failed = self.hooks, None, ""
        try:
            found = hooks.on_interval(self.step, self.ema.model if self.ema and hooks.averaged else self.bare)
        except TrainingStopped:
            raise
        except Exception as error:  # of whatever kind: what is learned does not depend on it
            failed = f"{error} ({type(error).__name__})"
        if failed:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # memory may be what it lacked
            text = f"the preview or evaluation at step {self.step:,} failed, training goes on: {failed}"
            if self.accelerator.is_main_process:
                hooks.on_message(text)
            else:  # others are silent, but nobody else knows of this
                warnings.warn(f"process {self.accelerator.process_index}: {text}", stacklevel=2)
        self.model.train()
        self._meet(failed)
        return found or {}

    def _meet(self, failed: str) -> None:
        """Wait until no process is busy with `on_interval`, in a group of its own: in the common one, a process that
        has failed would be taken for an answer by those that still share their work."""
        if self.meeting is None:
            return
        try:
            dist.barrier(self.meeting)
        except RuntimeError as error:
            raise TrainingStopped(
                f"processes lost each other at step {self.step:,}, in a preview or evaluation that not all came out of"
                f"{f': {failed}' if failed else ''}; continue with --resume"
            ) from error

    def _write(self, record: Record, write: Callable[[Path, Record], None]) -> None:
        with agreed():
            if self.run is not None and self.accelerator.is_main_process:
                write(self.run, record)

    def _tell(self, record: Record) -> None:
        with agreed():
            if self.accelerator.is_main_process:
                numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
                with named(self.run or Path()):
                    self.accelerator.log(numbers, step=record["step"])
                self.hooks.on_record(record)

    # ------------------------------------------------------------ stopping and going on

    def save(self) -> None:
        """Write a checkpoint of this moment."""
        if self.run is None:
            return
        norms = torch.stack(torch._foreach_norm([p.detach() for p in self.bare.parameters()]))
        if not norms.isfinite().all():  # a finite loss may have a gradient that is not
            self._stop("the weights became infinite or NaN", self.step - 1)
        with agreed():
            if self.accelerator.is_main_process:
                training = {"step": self.step, "optimizer": self.optimizer.state_dict(), "micro": self.micro}
                averaged = None if self.ema is None else self.ema.model.state_dict()
                ckpt.write_checkpoint(self.run, self.step, self.bare, training, averaged, self.settings.keep)

    def resume(self) -> int:
        """Continue from the run's last checkpoint; returns the step reached (0: there was none)."""
        assert self.run is not None
        done = ckpt.checkpoints(self.run)
        if done:
            self._restore(done[-1])
        losses = (r["loss"] for r in read_metrics(self.run) if r["step"] <= self.step and "loss" in r)
        self.health.first_loss = next(losses, None)
        if self.accelerator.is_main_process:
            truncate_metrics(self.run, self.step)
            for left in (self.run / "checkpoints").glob(".unfinished-*"):
                shutil.rmtree(left, ignore_errors=True)
        return self.step

    def _restore(self, checkpoint: Path) -> None:
        weights, averaged, training = ckpt.read_checkpoint(checkpoint, ema=self.ema is not None)
        ckpt.check_model(checkpoint, self.bare, ema=self.ema is not None)
        ckpt.load_weights(self.bare, weights, what=str(checkpoint))
        try:
            if checkpoint.name != f"step-{training['step']:07d}" or training["micro"] < 1:
                raise ValueError(f"its training.pt is of step {training['step']}, by {training['micro']} images")
            restore_optimizer(self.optimizer, training["optimizer"])
            self.step, self.micro = training["step"], min(training["micro"], self.micro)
            if self.ema is not None:
                self.ema.model.load_state_dict(averaged)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever damaged values make of themselves
            raise ckpt.damaged(checkpoint, error) from error
        self.recorded = self.recorded if self._recordable() else None
