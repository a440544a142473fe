"""`residua sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from rich.table import Table

from .console import console, note, say, show
from .pretrain import existing

HELP = """\
usage: residua sweep [RECIPE|SETTINGS.yaml] --SETTING VALUE [VALUE ...] [--seeds N] [--jobs N] [--out DIR] [--open]

Run a recipe once for every combination of the values given, evaluate each, and put mean and interval into one table
and one page. Any setting of `residua pretrain` may be swept by giving it several values; with one value it holds for
all runs. Runs are processes of their own: one that fails is listed and the others go on. The same command continues a
sweep that was stopped, and adds values or seeds to one that is finished.

  --seeds N    seeds 0 to N - 1 for every combination (default 1)
  --jobs N     runs at once, on one GPU or CPU (default 1)
  --out DIR    folder of the sweep (default sweeps/RECIPE)
  --open       open the page in the browser

  residua sweep mae-tiny-imagenet --alpha-min 1.0 0.9 0.8 --seeds 3 --jobs 2
  residua sweep --data folder:my_photos --alpha-min 1.0 0.8 --anneal 0 0.5
"""


def sweep(args: list[str]) -> None:
    """A grid of runs."""
    if not args or "--help" in args or "-h" in args:
        console.print(HELP, markup=False)
        raise SystemExit(0)
    from residua import recipes
    from residua.recipes import sweep as engine
    from residua.report.sweep import sweep_page

    base, given = _parse(args)
    if base.endswith((".yaml", ".yml")):
        existing(base)
    elif base:
        recipes.get(base, "pretrain")
    own = {name: given.pop(name, None) for name in ("out", "seeds", "jobs", "open")}
    fixed, grid = _split(given)
    if own["seeds"]:
        if "seed" in given:
            raise ValueError("give --seeds N or --seed A B C, not both")
        grid["seed"] = [str(seed) for seed in range(_count("seeds", own["seeds"]))]
    if not grid:
        raise ValueError("nothing is swept: give a setting several values, as in --alpha-min 1.0 0.9, or --seeds 3")
    folder = Path(own["out"][0] if own["out"] else f"sweeps/{Path(base).stem or 'pretrain'}").expanduser()
    plan = engine.plan(folder, ([base] if base else []) + fixed, grid)
    ready = sum(trial.status == "done" for trial in plan.trials)
    say(f"{len(plan.trials)} runs in {folder}, {ready} of them finished before")

    def ended(trial: Any) -> None:
        if trial.status == "done":
            say(f"done    {trial.name}")
        else:
            note(f"failed: {trial.name}: {trial.error} (logs/{trial.name}.txt)")

    engine.run(plan, _count("jobs", own["jobs"] or ["1"]), ended)
    found = engine.summarise(plan)
    failed = [(trial.name, trial.error) for trial in plan.trials if trial.status == "failed"]
    if found:
        console.print(_table(found))
    say(f"written: {engine.write_summary(plan, found)}")
    runs: dict[Any, list[Path]] = {}
    for trial in plan.trials:
        if trial.status == "done":
            runs.setdefault(trial.group, []).append(plan.run_folder(trial))
    show(sweep_page(folder, found, runs, failed), own["open"] is not None)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(plan.trials)} runs failed: {', '.join(name for name, _ in failed)}")


def _parse(args: list[str]) -> tuple[str, dict[str, list[str]]]:
    """The recipe or settings file, if any, and every flag with the values that follow it."""
    args = list(args)
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
    return base, given


def _split(given: dict[str, list[str]]) -> tuple[list[str], dict[str, list[str]]]:
    """Arguments that all runs share, and the grid; settings that are pairs or lists themselves are shared."""
    known = _settings()
    fixed: list[str] = []
    grid: dict[str, list[str]] = {}
    for name, values in given.items():
        plain = name.removeprefix("no_")
        if name not in known and plain not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=2) or ["alpha_min", "lr"]
            raise ValueError(f"no setting named {name!r} to sweep; did you mean {' or '.join(near)}?")
        if name in ("resume", "dry_run"):
            raise ValueError(f"--{name.replace('_', '-')} is not for sweeps: the same command continues one by itself")
        if len(values) > 1 and not known.get(name):
            grid[name] = list(dict.fromkeys(values))
        else:
            fixed += [f"--{name.replace('_', '-')}", *values]
    return fixed, grid


def _settings() -> dict[str, bool]:
    """Settings of `residua pretrain`, and whether their value is a list."""
    import typing
    from dataclasses import fields

    from residua.train import Pretrain

    found: dict[str, bool] = {}
    for group in fields(Pretrain()):
        part = type(getattr(Pretrain(), group.name))
        for name, kind in typing.get_type_hints(part).items():
            found[name] = any(get_origin(k) is tuple for k in (kind, *get_args(kind)))
    return found


def _count(name: str, values: list[str]) -> int:
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise ValueError(f"--{name} {' '.join(values)}: give one whole number from 1")
    return int(values[0])


def _table(found: list[Any]) -> Table:
    settings = list(dict.fromkeys(key for s in found for key in s.settings))
    scores = list(dict.fromkeys(s.score for s in found))
    table = Table(title="mean ± 95 % interval over seeds", title_justify="left")
    for name in (*settings, "seeds", *scores):
        table.add_column(name, justify="right")
    groups: dict[Any, dict[str, Any]] = {}
    for s in found:
        groups.setdefault(tuple(s.settings.items()), {})[s.score] = s
    for group, own in groups.items():
        cells = [str(own[name]) if name in own else "–" for name in scores]
        seeds = max(s.seeds for s in own.values())
        table.add_row(*(dict(group).get(name, "") for name in settings), str(seeds), *cells)
    return table
