"""The `residua` command: parses, calls, prints. One file a command."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import select
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from residua.commands.console import console, counting, fail, note, say, stop_counting
from residua.disk import FULL
from residua.progress import listen

# Threads that spin while they wait slow each other down a hundredfold where another program wants the cores too.
# Read when torch is imported, which happens inside the commands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Where there is no network, the Hub's library tells of every try; what it comes to is told in one line.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")

USAGE = """\
Residua trains, measures and explains residual networks whose shortcuts fade with depth.

  residua demo                                   three minutes on a CPU: what layers are made of, one page
  residua pretrain --data folder:my_photos       images in, encoder out
  residua evaluate RUN                           what its frozen features are worth
  residua finetune RUN --data folder:my_classes  train all of it on labels, and test it
  residua segment RUN                            do its patches find objects by themselves
  residua diffuse --data folder:my_photos        train a diffusion model
  residua sample RUN -n 1000                     images from it
  residua score folder:samples --reference DATA  how far generated images lie from real ones: FID, KID, ...
  residua sweep RECIPE --alpha-min 1.0 0.9       a grid of runs, mean and interval over seeds
  residua compare RUN RUN                        runs side by side on one page
  residua anatomy RUN                            what its blocks do: Residual Alignment, Neural Collapse
  residua counterfactual shortcut                does it happen without shortcuts, with other depths, classes, decay
  residua ujm --depth 16                         the same in the Unconstrained Jacobians Model
  residua export RUN --to timm                   the model for timm, transformers, torchvision, onnx, the Hub
  residua embed RUN --data folder:my_photos      features of your images, as a table
  residua data info|preview SOURCE               what a source of images holds
  residua recipes [NAME]                         rows of the paper, runnable

Add --help to a command for its options."""
_READ = ("demo", "sweep", "data", "recipes")
_TRAIN = ("pretrain", "finetune", "diffuse")
_TABLE = (
    "evaluate", "embed", "segment", "score", "sample", "compare", "anatomy", "counterfactual", "ujm", "export"
)  # fmt: skip
COMMANDS = {name: f"residua.cli.{name}" for name in _READ} | dict.fromkeys(_TRAIN, "residua.cli.train")
COMMANDS |= {name: f"residua.commands.{name}" for name in _TABLE}
"""Command -> the module that has its `Options` and does its `work`, or that reads what was typed by itself."""


def _as_note(show: Callable[..., None]) -> Callable[..., None]:
    """Warnings of ours as notes, those of others as they are."""

    def told(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
        if Path(__file__).parents[1] in Path(filename).parents:
            note(str(message))
        else:
            show(message, category, filename, *where, **more)

    return told


def _part() -> None:
    """Take leave of the processes that a command was shared with."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Where nobody reads on (`residua recipes | head -1`), it ends quietly."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # nor is it, where the shell closed it
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the very end
        return 141  # as of a program that the signal ends


def _unread() -> bool:
    """Whether what is printed goes into a pipe that nobody reads any more."""
    if sys.stdout is None:
        return True
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        say(USAGE)
        return 0
    if args[0] == "--version":
        from residua import __version__

        console.print(__version__)
        return 0
    name = args.pop(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2) or list(COMMANDS)
        return fail(f"there is no command {name!r}; did you mean {' or '.join(near)}?")
    try:
        module = importlib.import_module(COMMANDS[name])
        with warnings.catch_warnings():
            warnings.showwarning = _as_note(warnings.showwarning)
            listen(counting)
            try:
                if hasattr(module, "work"):
                    module.work(_parsed(module.Options, args, name))
                else:
                    getattr(module, name)(args)
            finally:
                listen(None)
                stop_counting()
            _part()
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("RESIDUA_DEBUG") or (isinstance(error, BrokenPipeError) and _unread()):
            raise
        if isinstance(error, OSError) and error.errno in FULL:
            return fail(_full(error))
        stopped = type(error).__name__ == "TrainingStopped"
        hint = (
            ""
            if stopped or isinstance(error, ValueError)
            else f" ({type(error).__name__}; RESIDUA_DEBUG=1 shows where)"
        )
        return fail(f"{error}{hint}", 1 if stopped else 2)
    return 0


def _parsed(options: type, args: list[str], name: str) -> Any:
    import tyro

    return tyro.cli(options, args=args, prog=f"residua {name}")


def _full(error: OSError) -> str:
    """A full disk, in words."""
    what = f"cannot write {error.filename}" if error.filename else "cannot write"
    return f"{what}: {os.strerror(error.errno or errno.ENOSPC)}. Free some space, or write to another disk"
