"""What the commands share: the terminal, the progress line, and options that several of them take."""

from __future__ import annotations

import math
import os
import time
import warnings
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.status import Status

if TYPE_CHECKING:
    from torch import nn

    from residua.data import Splits
    from residua.train.session import Estimate, Session


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise  # to `main`, which ends quietly


console = _Terminal(highlight=False, soft_wrap=True)
errors = _Terminal(stderr=True, highlight=False, soft_wrap=True)


as_warnings = False  # notes, where nobody reads the terminal
_status: Status | None = None  # the line of `counting`, while there is one
_spoke = time.monotonic()  # when it last wrote a line where there is no terminal


class Bar:
    """The progress line: step, loss, images/s, share of the chip's peak, time left."""

    def __init__(self, steps: int, batch_size: int, show: bool) -> None:
        self.steps, self.batch_size, self.show, self.lines = steps, batch_size, show, 0
        text = "step {task.completed:,.0f}/{task.total:,.0f}  {task.fields[text]}"
        self.progress = Progress(
            TextColumn("{task.percentage:3.0f} %"), BarColumn(24), TextColumn(text), console=console,
            disable=not (show and console.is_terminal),
        )  # fmt: skip
        self.task = self.progress.add_task("", total=steps, text="starting")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.progress.disable:  # where it is, rich before 14.3 leaves an empty line
            self.progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        from residua.train.session import hours

        parts = [f"loss {record['loss']:.4f}", f"{record['images_per_s']:,.0f} img/s"]
        if "mfu" in record:
            parts.append(f"MFU {100 * record['mfu']:.0f} %")
        parts += [
            f"{key.removeprefix('eval/')} {value:.4g}" for key, value in record.items() if key.startswith("eval/")
        ]
        left = (self.steps - record["step"]) * self.batch_size / record["images_per_s"]
        text = "  ".join([*parts, f"{hours(left)} left"])
        self.progress.update(self.task, completed=record["step"], text=text)
        if self.show and not console.is_terminal and 10 * record["step"] // self.steps > self.lines:
            self.lines = 10 * record["step"] // self.steps
            say(f"step {record['step']:,}/{self.steps:,}  {text}")


def typed(args: Sequence[str]) -> set[str]:
    """Names of the settings that stand in arguments as `--name`, `--name=value` or `--no-name`, or in a settings file
    that is the first of them."""
    from residua.recipes.arguments import flags
    from residua.train.options import read_flat

    file = Path(args[0]).expanduser() if args else Path()
    written = read_flat(file) if file.suffix in (".yaml", ".yml") and file.is_file() else {}
    return {flag.removeprefix("no_") for flag in flags(args)} | written.keys()


Layers = tuple[Literal["last", "all"] | int, ...]


def layers(given: Layers) -> Any:
    """As the readers of features take them: a word, or block numbers."""
    words = [item for item in given if isinstance(item, str)]
    if words and len(given) > 1:
        raise ValueError(f"layers {' '.join(map(str, given))}: give last, all, or block numbers")
    return words[0] if words else list(given)


def img_size(given: tuple[int, ...]) -> tuple[int, int] | None:
    if len(given) > 2:
        raise ValueError(f"--img-size {' '.join(map(str, given))}: give a side, or height and width")
    return (given[0], given[-1]) if given else None


def run_folder(model: str | nn.Module) -> Path | None:
    """The run that a model is given as; None where it is something else."""
    path = Path(model).expanduser() if isinstance(model, str) else None
    return path if path is not None and (path / "checkpoints").is_dir() else None


def opened(data: str | Splits) -> Splits:
    from residua.data import load

    return load(data) if isinstance(data, str) else data


def open_any(model: str | nn.Module, weights: str | None = None, size: tuple[int, int] | None = None) -> Any:
    """A run's model, one of another library by name, or the one in memory."""
    import residua
    from residua.adapt import encoder_of, is_name, open_model
    from residua.adapt.foreign import preprocessing_of

    if not isinstance(model, str):
        if weights is not None:
            raise ValueError(f"weights are for a model by name: a {type(model).__name__} in memory has its own")
        return model
    if not is_name(model) or size is None:
        return residua.load(model, weights=weights)
    options: dict[str, Any] = (
        {"img_size": size} if model.startswith("timm:") else {}
    )  # whose transformers are built for one size
    found: Any = open_model(model, weights, **options)
    pre = preprocessing_of(found)
    found.preprocessing = replace(pre, img_size=size)
    try:
        encoder_of(found).widths()
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"{model} does not run on images of {size[0]} x {size[1]}: {error}") from error
    return found


def data_of(model: str | nn.Module) -> str:
    """What a run was trained on."""
    from residua.train.options import check_place, trained_on

    if not isinstance(model, str):
        raise ValueError(f"a {type(model).__name__} in memory does not say which images to use: give data")
    found = trained_on(model)
    if found is None:
        raise ValueError(f"{model} does not say which images to use: add --data")
    check_place(model, found)
    return found


def cached(splits: Splits, where: str | None, model: Any, size: tuple[int, int] | None, on_bad_image: Any) -> Splits:
    """The images from stores that suit what a model sees of them, where that is asked for."""
    if where is None:
        return splits
    from residua.adapt import encoder_of
    from residua.data.store import side_for, stored_splits

    known = getattr(model, "preprocessing", None) or getattr(encoder_of(model), "preprocessing", None)
    view = max(size or (known.img_size if known else encoder_of(model).img_size))
    side = side_for(view, known.crop_pct if known else 1.0)
    found = stored_splits(splits, where, side, on_bad_image=on_bad_image, progress=counting)
    if found.name == splits.name:
        raise ValueError(f"{splits.name} has no store: leave --cache-images out")
    return found


def bad_images(model: str | nn.Module, data: str | Splits) -> Any:
    """What the run did about unreadable images, if these are its own."""
    from residua.train.options import setting_of, trained_on

    if not isinstance(model, str) or trained_on(model) != data:
        return "error"
    return setting_of(model, "on_bad_image") or "error"


def out_file(given: str, name: str) -> Path:
    """The file that --out names, which is no folder and can be written."""
    out = Path(given).expanduser()
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name the file to write, such as {out / name}")
    return writable(out)


def writable(file: Path) -> Path:
    """A file to write, looked at before the work starts."""
    check_folder(file.parent)
    return file


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is measured."""
    above = (folder.absolute(), *folder.absolute().parents)
    there = next((path for path in above if path.exists()), folder)  # none: a drive that is not there
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"nothing can be written to {folder}: {there} is no folder, or read-only; choose another --out"
        )


def quickest_probe(device: str) -> Literal["simple", "lbfgs"]:
    """One layer after the other to its optimum suits a CPU; many small steps for all layers at once, a GPU."""
    return "lbfgs" if device == "cpu" else "simple"


def dry_run(session: Session[Any, Any]) -> Estimate:
    """What a run would take."""
    from residua.train.session import estimate, hours

    guess = estimate(session)
    images = ", and all images" * (guess.decoding_first > 0)
    console.print(f"[bold]memory[/]   about {guess.memory_gib:.2g} GiB for the network and one micro-batch{images}")
    rates = ", ".join(f"{stage} {rate:,.0f}" for stage, rate in guess.rates.items() if math.isfinite(rate))
    console.print(f"[bold]images/s[/] {rates}: {guess.limit} is the limit")
    first = f", {hours(guess.decoding_first)} of it for decoding all images first" if guess.decoding_first else ""
    console.print(
        f"[bold]time[/]     about {hours(guess.seconds)}{first}, from three steps; nothing was trained or written"
    )
    return guess


def warn_shared(splits: Splits) -> None:
    from residua.data import count_shared
    from residua.evaluate.features import with_test

    splits, _ = with_test(splits)  # as it is evaluated
    if splits.test is None:
        return
    shared = count_shared(splits.train, splits.test)
    if shared:
        note(f"{shared:,} test image{'s' * (shared > 1)} also occur{'s' * (shared == 1)} in the training part")


def counting(what: str, done: int, total: int) -> None:
    """Say on a terminal how far some work has come, in a line that goes when it is done, and elsewhere a line a minute;
    of several processes the first does. A total of 0 is not known."""
    global _status, _spoke
    if console.quiet or os.environ.get("RANK", "0") != "0":
        return
    text = f"{what}: {done:,}" + f" of {total:,}" * (total > 0)
    if not console.is_terminal:
        if time.monotonic() > _spoke + 60:
            _spoke = time.monotonic()
            say(text)
        return
    if _status is None:
        _status = console.status("")
        _status.start()
    _status.update(escape(text))
    if done == total:
        stop_counting()


def stop_counting() -> None:
    global _status
    if _status is not None:
        _status.stop()
        _status = None


def note(text: str) -> None:
    if as_warnings:
        return warnings.warn(text, stacklevel=2)
    console.print(f"[yellow]note[/]     {escape(text)}")


def say(text: str) -> None:
    console.print(text, markup=False)


def fail(text: str, status: int = 2) -> int:
    errors.print(f"[red]error[/]: {escape(text)}")
    return status


def show(page: Path, open_it: bool) -> None:
    say(f"page: {page}")
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def print_nested(values: dict[str, Any], indent: int = 0) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            console.print(" " * indent + f"[bold]{escape(str(key))}[/]")
            print_nested(value, indent + 2)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            console.print(" " * indent + f"{escape(str(key)):12} {escape(str(text))}")


def announce(session: Session[Any, Any]) -> bool:
    """Say what will be trained; whether this process is the one that speaks."""
    main = session.accelerator.is_main_process
    if main:
        for heading, text in session.lines():
            console.print(f"[bold]{heading:8}[/] {escape(text)}")
    return main


def accelerator_of(device: str | None) -> Any:
    """What connects the processes that share a command (`accelerate launch`); None where it has one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu")


def device_of(given: str | None) -> str:
    """The one asked for, if it is there, or the GPU where there is one."""
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError):
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        there += ["mps"] * torch.backends.mps.is_available()
        raise ValueError(f"--device {given}: there is no such device; there is {', '.join(there)}") from None
    return given
