"""What was typed after `residua sweep`: recipe, grid, baseline, and options of its own."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_origin

from residua.recipes.arguments import config_of, existing

if TYPE_CHECKING:
    from residua.recipes.sweep import Sweep


def parse(args: Sequence[str]) -> tuple[str, str, dict[str, list[str]]]:
    """The command to sweep; recipe, settings file or model, if any; and every flag with the values that follow it."""
    from residua.recipes.sweep import KINDS

    args = list(args)
    kind = args.pop(0) if args and args[0] in KINDS else ""
    base = args.pop(0) if args and not args[0].startswith("--") else ""
    given: dict[str, list[str]] = {}
    current: list[str] | None = None
    for arg in args:
        if arg.startswith("--"):
            name, _, value = arg[2:].partition("=")
            current = given.setdefault(name.replace("-", "_"), [])
            if value:
                current.append(value)
        elif current is None:
            raise ValueError(f"{arg!r} belongs to no setting; flags look like --alpha-min 1.0 0.9")
        else:
            current.append(arg)
    return kind or kind_of(base), base, given


def kind_of(base: str) -> str:
    """The command that a recipe is of, or that knows all settings in a file."""
    from residua import recipes
    from residua.recipes.sweep import KINDS

    if not base:
        return "pretrain"
    if base.endswith((".yaml", ".yml")):
        from residua.train.options import read_flat

        names = set(read_flat(existing(base)))
        return next((kind for kind in KINDS if names <= settings_of(kind).keys()), "pretrain")
    try:
        return recipes.get(base).command
    except ValueError as error:
        raise ValueError(f"{error} To train a network or run on labels: residua sweep finetune {base}") from None


def check_base(kind: str, base: str, named: bool) -> None:
    """Raise what the runs would, before any is begun."""
    from residua import recipes

    if kind == "finetune":
        if not base and not named:
            raise ValueError("say what to train: residua sweep finetune resnet18, or a run or checkpoint")
        if base and not Path(base).expanduser().exists():
            from residua.train.finetune_config import open_start

            open_start(base)
    elif base.endswith((".yaml", ".yml")):
        existing(base)
    elif base:
        recipes.get(base, "diffuse" if kind == "diffuse" else "pretrain")


def split(given: Mapping[str, list[str]], kind: str = "pretrain") -> tuple[list[str], dict[str, list[str]]]:
    """Arguments that all runs share, and the grid; settings that are lists themselves are swept with commas."""
    from residua.recipes.sweep import switch

    known = settings_of(kind)
    fixed: list[str] = []
    grid: dict[str, list[str]] = {}
    for name, values in given.items():
        if name not in known and known.get(name.removeprefix("no_")) != "switch":
            near = difflib.get_close_matches(name, known, n=2) or ["alpha_min", "lr"]
            raise ValueError(f"no setting of {kind} named {name!r} to sweep; did you mean {' or '.join(near)}?")
        flag = f"--{name.replace('_', '-')}"
        if name not in known and values:
            raise ValueError(f"{flag} {values[0]}: give {flag} alone, or --{flag[5:]} True False to sweep it")
        if known.get(name) == "switch" and values:
            wrong = [value for value in values if value not in ("True", "False")]
            if wrong:
                raise ValueError(f"{flag} {wrong[0]}: it is on or off, True or False")
            if len(set(values)) > 1:
                grid[name] = list(dict.fromkeys(values))
            else:
                fixed.append(switch(name, values[0]))
        elif known.get(name) == "list" and (len(values) == 1 or not any("," in value for value in values)):
            fixed += [flag, *(part for value in values for part in value.split(","))]
        elif known.get(name) == "list" and any("," not in v and v not in ("auto", "None") for v in values):
            raise ValueError(f"{flag} {' '.join(values)}: join each list with commas, as in {flag} 2,2,2,2 2,2,6,2")
        elif len(values) > 1:
            grid[name] = list(dict.fromkeys(values))
        else:
            fixed += [flag, *values]
    return fixed, grid


def settings_of(kind: str) -> dict[str, str]:
    """Settings of a command, and the form of their values: "list", "switch" (on or off) or "value"."""
    import typing
    from dataclasses import fields

    config = config_of(kind)()
    found: dict[str, str] = {}
    for group in fields(config):
        for name, hint in typing.get_type_hints(type(getattr(config, group.name))).items():
            listed = any(get_origin(k) is tuple for k in (hint, *get_args(hint)))
            found[name] = "list" if listed else "switch" if hint is bool else "value"
    return found


def baseline_of(given: list[str] | None) -> dict[str, str]:
    """Settings of the runs that the others are compared with, as typed."""
    found = {}
    for text in given or []:
        name, _, value = text.partition("=")
        found[name.replace("-", "_")] = value
    if given is not None and not found:
        raise ValueError("--baseline needs a setting that is swept, as in --baseline alpha_min=1.0")
    return found


def told_baseline(baseline: Mapping[str, str], plan: Sweep) -> dict[str, str]:
    """The same as the runs have it, of this call or earlier ones; raises where none has."""
    found = {name: plan.told(name, text) for name, text in baseline.items() if name != "seed"}
    for name, text in baseline.items():
        if found.get(name) is None:
            swept = dict.fromkeys(f"{key}={value}" for trial in plan.trials for key, value in trial.group)
            told = ", ".join(swept) or "none"
            raise ValueError(f"--baseline {name}={text} is none of the settings that are swept: {told}")
    return {name: text for name, text in found.items() if text is not None}


def tune_of(given: list[str], kind: str, taken: Collection[str], free: Collection[str]) -> tuple[str, list[str]]:
    """The setting to tune and the values to try."""
    name, _, text = given[0].partition("=")
    name, values = name.replace("-", "_"), list(dict.fromkeys(text.split(",")))
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"--tune {given[0]}: give a setting and numbers to try, as in --tune lr=1e-4,3e-4,1e-3")
    if kind == "finetune":
        raise ValueError("--tune chooses by the probe on held-out images, which finetune has not: sweep the setting")
    if settings_of(kind).get(name) != "value" or name == "seed" or name in taken:
        raise ValueError(f"--tune {name}: it must be a setting of {kind} that is neither swept nor given")
    if free:
        raise ValueError(f"--tune needs to know the baseline: give --baseline a value of {', '.join(sorted(free))} too")
    return name, values


def evaluate_options(after: Mapping[str, list[str]], given: Mapping[str, list[str]]) -> list[str]:
    """Options of `residua evaluate`; the features of many runs would fill a disk, so none are kept."""
    import tyro

    from residua.commands.console import device_of, quickest_probe
    from residua.commands.evaluate import Options

    cpu = "cpu" in given
    options = [part for name, values in after.items() for part in (f"--{name}", *values)]
    if "probe" not in after:
        options += ["--probe", quickest_probe(device_of("cpu" if cpu else None))]
    options += ["--no-cache", *(["--device", "cpu"] if cpu else [])]
    asked = tyro.cli(Options, args=["run", *options], prog="residua sweep")
    if asked.probe in ("none", "mae"):
        raise ValueError(f"--probe {asked.probe}: of diffusion models there are lbfgs, simple and cached")
    return options


def score_options(values: list[str], kind: str, given: Mapping[str, list[str]]) -> list[str]:
    """Options of `residua score`; its network is opened once before anything is trained."""
    if kind != "diffuse":
        raise ValueError(f"--score is for diffusion models: {kind} makes no images")
    from residua.evaluate.extractor import open_extractor

    name, weights = (given.get(f"fid_{what}", [None])[0] for what in ("extractor", "weights"))
    open_extractor(name or "inception", weights)
    options = ["--n", str(count_of("score", values)), "--fid"]
    options += [
        part for flag, value in (("--extractor", name), ("--weights", weights)) if value for part in (flag, value)
    ]
    return options + (["--device", "cpu"] if "cpu" in given else [])


def count_of(name: str, values: list[str]) -> int:
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise ValueError(f"--{name} {' '.join(values)}: give one whole number from 1")
    return int(values[0])
