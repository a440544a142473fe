"""What a command needs when it is called from Python: settings by keyword, quiet, and the caller's world as it was."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from residua.commands import console
from residua.commands.run import Run, temporary_folder
from residua.progress import listen

Command = Literal["pretrain", "diffuse", "finetune"]
Options = TypeVar("Options")
Result = TypeVar("Result")


def settled(
    command: Command, start: str | os.PathLike[str] | None, settings: Mapping[str, Any]
) -> tuple[Any, set[str]]:
    """The configuration that a recipe or settings file and keywords come to, and the names of what was given."""
    from residua.recipes.arguments import begun, instead
    from residua.train.options import read_flat

    values = {name: plain(value) for name, value in settings.items()}
    default, file = begun(command, plain(start))
    names = set(values) | (set(read_flat(file)) if file is not None else set())
    return instead(default, set(values)).checked(**values), names


def trained(
    command: Command,
    start: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    progress: bool,
    train: Callable[[Any, set[str]], Any],
) -> Any:
    """Train by what a start and keywords come to, in a temporary folder where they name none: a `Run`; of a dry run its
    `Estimate`.

    Ctrl-C saves a checkpoint and is a `KeyboardInterrupt` then. A run that did not come to its end stays where it is.
    """
    from residua.train.processes import Interrupted

    config, given = settled(command, start, settings)
    own = config.machine.out is None and not config.machine.dry_run
    folder = temporary_folder() if own else None
    if folder is not None:
        config = config.override(out=str(folder))
    run: Run | None = None
    try:
        with undisturbed_world(), heard(progress):
            found = train(config, given)
        if config.machine.dry_run:
            return found
        path, model = found
        run = Run(path, model, temporary=own)
        return run
    except Interrupted as stopped:
        raise KeyboardInterrupt(f"{stopped} (resume=True, out={str(folder or config.machine.out)!r})") from None
    finally:
        if folder is not None and run is None and not any(folder.glob("checkpoints/step-*")):
            shutil.rmtree(folder, ignore_errors=True)


def measured(progress: bool, work: Callable[[Any], Result], options: Any) -> Result:
    """Do what a command does by its options, quietly unless told, and leave the caller's world as it was."""
    with undisturbed_world(), heard(progress):
        return work(options)


def options_of(kind: type[Options], given: Mapping[str, Any], **first: Any) -> Options:
    """Options of a command from keywords; `first` are the arguments by place, which may be objects in memory.

    A single value stands for a list of one, and None for an option that is left out or that "none" turns off.
    """
    from residua.data.errors import did_you_mean
    from residua.train.options import accepts, check, in_words

    kinds = get_type_hints(kind)
    for name in given:
        if name not in kinds:
            raise ValueError(f"no option named {name}; {did_you_mean(name, kinds)}")
    values = {name: _as_declared(value, kinds[name]) for name, value in given.items()}
    check([(name, given[name], accepts(value, kinds[name]), in_words(kinds[name])) for name, value in values.items()])
    places = {name: plain(value) for name, value in first.items() if value is not None}
    return kind(**places, **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _as_declared(value: Any, kind: Any) -> Any:
    """A keyword's value in the form that settings of this type have in a file."""
    value = value.tolist() if hasattr(value, "tolist") else value  # an array's
    if get_origin(kind) is tuple:
        return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if value is None and "none" in get_args(kind):
        return "none"
    return plain(value)


def plain(value: Any) -> Any:
    """The path of what has one, such as a `Run`; all else as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@contextmanager
def heard(progress: bool) -> Iterator[None]:
    """Say what the terminal says, or nothing: notes are warnings then."""
    before = console.console.quiet, console.as_warnings
    console.console.quiet, console.as_warnings = not progress, not progress
    listen(console.counting)
    try:
        yield
    finally:
        listen(None)
        console.stop_counting()
        console.console.quiet, console.as_warnings = before


@contextmanager
def undisturbed_world() -> Iterator[None]:
    """Leaves global random states and the precision of products as they were."""
    import torch

    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    precision, python, numpy = torch.get_float32_matmul_precision(), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            random.setstate(python)
            np.random.set_state(numpy)
