"""The one training loop. It knows steps, learning rates and checkpoints; what is learned is handed to it."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from residua.data import Batch, Feed
from residua.train import checkpoint as ckpt
from residua.train.health import Health
from residua.train.machine import autocast, peak_flops
from residua.train.order import Order

Objective = Callable[[nn.Module, Batch, Tensor], Tensor]
"""(model, batch, epoch of each image) -> loss, a mean over the batch."""
Record = dict[str, Any]


class TrainingStopped(RuntimeError):
    """The run ended before its last step; its message says why and what is kept."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know."""

    steps: int
    batch_size: int
    lr: float
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.05
    clip: float | None = None
    ema: float | None = None
    anneal: float = 0.0
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False
    micro_batch: int | None = None
    checkpoint_every: int = 1000
    keep: int = 2
    log_every: int = 50
    flops_per_image: float | None = None


@dataclass
class Hooks:
    """What happens around the loop, handed in from above."""

    on_record: Callable[[Record], None] = lambda record: None
    on_message: Callable[[str], None] = print
    every: int | None = None
    """Call `on_interval` each so many steps, and not at the last."""
    on_interval: Callable[[int, nn.Module], Record | None] = lambda step, model: None


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up to the peak, then a cosine to zero; `step` counts from 0."""
    warm = settings.warmup * settings.steps
    if step < warm:
        return settings.lr * (step + 1) / max(warm, 1.0) if step + 1 < warm else settings.lr
    progress = (step - warm) / max(settings.steps - warm, 1)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def decay_strength(step: int, settings: Settings) -> float:
    """Share of the full decay in force at a step: 0 to 1 over the first `anneal` of the run."""
    span = settings.anneal * settings.steps
    return 1.0 if step >= span else step / span


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices (and convolutions) alone: biases, norms, tokens and alphas have none."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and not name.endswith("token")
            (decayed if matrix else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.AdamW:
    groups = parameter_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=device.type in ("cuda", "cpu"))


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
    ) -> None:
        self.bare, self.objective, self.feed, self.settings = model, objective, feed, settings
        self.accelerator, self.run, self.hooks = accelerator, run, hooks or Hooks()
        self.device = accelerator.device
        world = accelerator.num_processes
        self.order = Order(len(feed), settings.batch_size, settings.seed, accelerator.process_index, world)
        self.micro = min(settings.micro_batch or self.order.share, self.order.share)
        model.to(self.device)
        optimizer = make_optimizer(model, settings, self.device)
        self.ema = None
        if settings.ema:
            self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema))
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.loss = self._make_loss()
        self.shortcut = getattr(getattr(model, "encoder", model), "shortcut", None)
        self.health = Health(settings.steps)
        self.peak = peak_flops(self.device, settings.precision)
        self.step = 0

    # ------------------------------------------------------------ one step

    def _make_loss(self) -> Callable[[Batch, Tensor], Tensor]:
        """The objective from pixels to loss, compiled as a whole where asked for."""

        def loss(pixels: Tensor, sizes: Tensor, index: Tensor, epochs: Tensor) -> Tensor:
            return self.objective(self.model, Batch(pixels, sizes, index), epochs)

        if self.settings.compile:
            # small networks spend their time launching kernels; a recorded graph does not. Accumulated gradients
            # and several processes need the ordinary way.
            alone = self.accelerator.num_processes == 1 and self.micro == self.order.share
            recorded = self.device.type == "cuda" and alone
            loss = torch.compile(loss, mode="reduce-overhead" if recorded else "default")
        return lambda batch, epochs: loss(batch.pixels, batch.sizes, batch.index, epochs)

    def _micro_batches(self, batch: Batch, epochs: Tensor) -> Iterator[tuple[Batch, Tensor, float, bool]]:
        count = len(batch.index)
        for start in range(0, count, self.micro):
            stop = min(start + self.micro, count)
            part = Batch(batch.pixels[start:stop], batch.sizes[start:stop], batch.index[start:stop])
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

    def _try_gradients(self, batch: Batch, epochs: Tensor) -> Tensor:
        """As `_gradients`, halving the micro-batch when memory runs out. Randomness depends on the image alone."""
        while True:
            try:
                return self._gradients(batch, epochs)
            except torch.OutOfMemoryError as error:
                self.optimizer.zero_grad(set_to_none=True)
                if self.accelerator.num_processes > 1 or self.micro == 1:
                    raise TrainingStopped(
                        f"out of memory with {self.micro} images at once at step {self.step:,}: "
                        "set a smaller --micro-batch, add --grad-checkpointing, or take a smaller model"
                    ) from error
            self.micro = -(-self.micro // 2)
            self.loss = self._make_loss()  # a recorded graph cannot accumulate
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            parts = -(-self.order.share // self.micro)
            self.hooks.on_message(
                f"out of memory: from here {self.micro} images at once, {parts} times a step; "
                f"the batch stays {self.settings.batch_size}"
            )

    def _advance(self, batch: Batch) -> tuple[Tensor, Tensor]:
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, settings)
        if settings.anneal and self.shortcut is not None:
            self.shortcut.set_strength(decay_strength(self.step, settings))
        epochs = self.order.epoch_of(self.step).to(self.device, non_blocking=True)
        loss = self._try_gradients(batch, epochs)
        norm = torch.zeros((), device=self.device)
        if settings.clip is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update_parameters(self.bare)
        self.step += 1
        return loss, norm

    # ------------------------------------------------------------ the run

    def fit(self) -> nn.Module:
        """Train to the last step and return the model (its moving average, where one is kept)."""
        with _Interrupt() as interrupt:
            self._fit(interrupt)
        if self.ema is not None:
            self.bare.load_state_dict(self.ema.module.state_dict())
        return self.bare

    def _fit(self, interrupt: _Interrupt) -> None:
        settings, hooks = self.settings, self.hooks
        if self.step < settings.steps:
            self.model.train()
        losses: list[Tensor] = []
        started, waited = time.perf_counter(), self.feed.wait_seconds
        for batch in self.feed.iterate(self.order.batches(self.step, settings.steps)):
            loss, norm = self._advance(batch)
            losses.append(loss)
            last = self.step == settings.steps
            evaluate = hooks.every is not None and self.step % hooks.every == 0 and not last
            save = last or self.step % settings.checkpoint_every == 0
            alone = self.accelerator.num_processes == 1  # several processes must stop at the same step
            if save or evaluate or self.step % settings.log_every == 0 or (alone and interrupt.asked):
                record = self._record(losses, norm, started, waited)
                if evaluate:
                    record |= hooks.on_interval(self.step, self.bare) or {}
                    self.model.train()
                self._log(record)
                losses, started, waited = [], time.perf_counter(), self.feed.wait_seconds
                leave = self._leave(interrupt) and not last
                if save or leave:
                    self.save()
                if leave:
                    raise TrainingStopped(
                        f"stopped at step {self.step:,} of {settings.steps:,}; continue with --resume"
                    )

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
            record["alpha_last"] = float(self.shortcut.alpha[-1])
        if self.peak and self.settings.flops_per_image:
            record["mfu"] = rate * self.settings.flops_per_image / (self.peak * self.accelerator.num_processes)
        if self.feed.skipped:
            record["skipped_images"] = self.feed.skipped
        share = (self.feed.wait_seconds - waited) / seconds
        for message in self.health.check(self.step, record["loss"], share, self.device):
            self.hooks.on_message(message)
        return record

    def _stop(self, what: str, step: int) -> NoReturn:
        kept = ckpt.checkpoints(self.run) if self.run else []
        raise TrainingStopped(
            f"{what} at step {step + 1:,}, learning rate {learning_rate(step, self.settings):.2e}. "
            + (f"The last good checkpoint is {kept[-1]}. " if kept else "No checkpoint was written before. ")
            + "Try a smaller --lr, --clip 1.0, --zero-init True, or a larger --alpha-min."
        )

    def _log(self, record: Record) -> None:
        if not self.accelerator.is_main_process:
            return
        if self.run is not None:
            line = json.dumps(record) + "\n"
            ckpt.guard_writes(lambda: _append(self.run / "metrics.jsonl", line), self.run)  # type: ignore[operator]
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
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
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            training = {"step": self.step, "optimizer": self.optimizer.state_dict(), "micro": self.micro}
            averaged = None
            if self.ema is not None:
                training["ema_updates"] = self.ema.n_averaged
                averaged = self.ema.module.state_dict()
            ckpt.write_checkpoint(self.run, self.step, self.bare, training, averaged, self.settings.keep)
        self.accelerator.wait_for_everyone()

    def resume(self) -> int:
        """Continue from the run's last checkpoint; returns the step reached (0: there was none)."""
        assert self.run is not None
        done = ckpt.checkpoints(self.run)
        if done:
            weights = ckpt.load_file(done[-1] / "model.safetensors")
            ckpt.load_weights(self.bare, weights, what=str(done[-1]))
            training = ckpt.load_training(done[-1])
            self.optimizer.load_state_dict(training["optimizer"])
            self.step, self.micro = training["step"], min(training["micro"], self.micro)
            if self.ema is not None:
                self.ema.module.load_state_dict(ckpt.load_file(done[-1] / "ema.safetensors"))
                self.ema.n_averaged.copy_(training["ema_updates"])
        if self.accelerator.is_main_process:
            _truncate(self.run / "metrics.jsonl", self.step)
            for left in (self.run / "checkpoints").glob(".unfinished-*"):
                shutil.rmtree(left, ignore_errors=True)
        return self.step


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def read_metrics(run: Path) -> list[Record]:
    """The records of a run, in order; a last line cut short by a crash is left out."""
    path = run / "metrics.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _truncate(path: Path, step: int) -> None:
    """Drop records after `step`: they will be written again."""
    if path.exists():
        kept = [record for record in read_metrics(path.parent) if record["step"] <= step]
        ckpt.write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
