"""What the arguments of a command come to: its settings, by its own parser and its own rules."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes

from residua import recipes

Kind = Literal["pretrain", "diffuse", "finetune"]
INSTEAD = {"base_lr": ("lr", "auto"), "epochs": ("steps", None), "alpha_eff": ("alpha_min", "auto")}
"""Settings that take the place of another, and what that one then is."""


def settings(kind: Any, args: list[str], command: Literal["pretrain", "diffuse"], summary: str) -> Any:
    """What a command trains by: its defaults, a recipe or a file, and the options given."""
    default, _ = begun(command, args.pop(0) if args and not args[0].startswith("-") else None)
    default = instead(default, flags(args))
    return tyro.cli(
        kind, args=args, default=default, prog=f"residua {command} [RECIPE|SETTINGS.yaml]", config=(OmitArgPrefixes,),
        description=f"{summary} Every setting left at 'auto' is chosen from the images and the machine, and printed.",
    )  # fmt: skip


def begun(command: Kind, start: str | None) -> tuple[Any, Path | None]:
    """The settings of a recipe or a file, or of a network to fine-tune; and the file, where it is one."""
    kind = config_of(command)
    if start is None:
        return kind(), None
    file = Path(start).expanduser()
    if file.suffix in (".yaml", ".yml") and (command != "finetune" or file.is_file()):
        return kind.read(existing(start)), file
    if command == "finetune":
        return kind().override(model=start), None
    return recipes.get(start, command).config, None


def flags(args: Sequence[str]) -> set[str]:
    """Names of the settings that stand in arguments as `--name` or `--name=value`."""
    return {arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}


def instead(default: Any, given: set[str]) -> Any:
    """A recipe without the settings that those given take the place of; giving both is an error."""
    for name, (other, neutral) in INSTEAD.items():
        if {name, other} <= given:
            raise ValueError(f"give --{name.replace('_', '-')} or --{other.replace('_', '-')}, not both")
        if name in given:
            default = default.override(**{other: neutral})
    if "alpha_min" in given:  # over which alpha_eff would win, as base_lr and epochs do not over lr and steps
        default = default.override(alpha_eff=None)
    return default


def finetune_settings(args: list[str]) -> Any:
    """The same of `residua finetune`, whose first argument may also be what to train."""
    from residua.train import Finetune

    default, _ = begun("finetune", args.pop(0) if args and not args[0].startswith("-") else None)
    default = instead(default, flags(args))
    return tyro.cli(
        Finetune, args=args, default=default, prog="residua finetune RUN|CHECKPOINT|timm:NAME|NETWORK|SETTINGS.yaml",
        config=(OmitArgPrefixes,),
        description="Train an encoder with a new head end to end on labelled images, or a network from scratch, and "
        "test it. Every setting left at 'auto' is chosen from the network, the images and the machine, and printed.",
    )  # fmt: skip


def config_of(command: str) -> Any:
    """The class of a command's settings."""
    from residua import train

    return {"pretrain": train.Pretrain, "diffuse": train.Diffuse, "finetune": train.Finetune}[command]


def existing(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"there is no settings file {file}")
    return file


# ---------------------------------------------------------------- without running the command


def read(command: Kind, args: Sequence[str]) -> Any:
    """The configuration that a command would train by; what it refuses before it looks at images is a ValueError."""
    from residua.nn.shortcut import Decay
    from residua.train.options import check

    config = _parse(command, args)
    check(_rules(command, config))
    asked = config.shortcut.decay()
    Decay(**asked | ({"alpha_min": 1.0} if asked["alpha_min"] == "auto" else {}))
    return config


@functools.cache
def value_of(command: Kind, name: str, *values: str) -> Any:
    """What a setting as typed means: 1 and 1.0 are the same; as it is, where it means nothing."""
    flag = f"--{name.replace('_', '-')}"
    try:
        return _parse(command, [flag, *values]).settings()[name]
    except ValueError:
        return " ".join(values)


def _parse(command: Kind, args: Sequence[str]) -> Any:
    """By the command's own parser, whose words on what is wrong become a ValueError of one line."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            if command == "finetune":
                return finetune_settings(list(args))
            return settings(config_of(command), list(args), command, "")
    except SystemExit:
        raise ValueError(_reason(said.getvalue())) from None


def _reason(boxed: str) -> str:
    """The first paragraph of a box that the parser draws, below its title."""
    lines = (line.strip(" │|") for line in boxed.splitlines()[1:])
    words = itertools.groupby(lines, key=lambda line: any(c.isalnum() for c in line))
    return next((" ".join(part) for has, part in words if has), "the parser refuses it")


def _rules(command: Kind, config: Any) -> Any:
    """What has to hold, as the command itself has it."""
    from residua.train import config as pretrain_config
    from residua.train import diffuse_config, finetune_config

    modules: dict[Kind, Any] = {
        "pretrain": pretrain_config, "diffuse": diffuse_config, "finetune": finetune_config,
    }  # fmt: skip
    return modules[command].rules(config)
