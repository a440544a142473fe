"""`residua sweep`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from rich.table import Table

from residua.recipes.arguments import existing

from .console import console, note, say, show

HELP = """\
usage: residua sweep [pretrain|diffuse|finetune] [RECIPE|SETTINGS.yaml|MODEL] --SETTING VALUE [VALUE ...] [options]

Run a recipe once for every combination of the values given, evaluate each, and put mean and interval into one table
and one page. Any setting of the command may be swept by giving it several values; with one value it holds for all
runs. Settings that are lists themselves are swept with commas: --stages 2,2,2,2 2,2,6,2. Runs are processes of their
own: one that fails is listed and the others go on. The same command continues a sweep that was stopped, and adds
values, settings or seeds to one that is finished.

The command is what the recipe says, and pretrain without one. finetune takes a run, a checkpoint or the name of a
network, as in residua finetune.

  --seeds N           seeds 0 to N - 1 for every combination (default 1)
  --jobs N            runs at once, on one GPU or CPU, which share the cores (default 1)
  --out DIR           folder of the sweep (default sweeps/RECIPE)
  --baseline S=V ...  also print differences to the runs with these settings, paired by seed
  --tune S=V,V,...    first give the baseline each of these values, then everything the one that suited it best in the
                      probe on held-out training images (of pretrain and diffuse)
  --open              open the page in the browser

Of diffusion models, which are probed by block and noise level when they are trained:
  --probe, --times, --layers, --k, --limit    as in residua evaluate
  --score N           also FID of N samples, by --fid-extractor and --fid-weights

On a Ray cluster (pip install 'residua[ray]'; folder and images where all its machines see them):
  --on ray            as many at once as fit, at most --jobs
  --ray-address A     of the cluster, or auto; default: this machine alone
  --gpus-per-run G    0.5: two on each GPU (default: one where there are any)

  residua sweep mae-tiny-imagenet --alpha-min 1.0 0.8 0.7 --seeds 3 --jobs 2 --baseline alpha_min=1.0
  residua sweep mae-tiny-imagenet --alpha-min 1.0 0.7 --baseline alpha_min=1.0 --tune lr=1.5e-4,3e-4,6e-4 --seeds 3
  residua sweep --data folder:my_photos --alpha-min 1.0 0.8 --anneal 0 0.5
  residua sweep uvit-cifar100 --alpha-min 1.0 0.7 --seeds 3 --score 10000 --on ray --gpus-per-run 0.5
  residua sweep finetune resnet18 --data cifar10 --alpha-min 1.0 0.7 --stages 2,2,2,2 2,2,6,2 --seeds 3
"""
OWN = ("out", "seeds", "jobs", "open", "baseline", "tune", "on", "ray_address", "gpus_per_run", "score")
EVALUATE = ("probe", "times", "layers", "k", "limit")


def sweep(args: list[str]) -> None:
    """A grid of runs."""
    if not args or "--help" in args or "-h" in args:
        console.print(HELP, markup=False)
        raise SystemExit(0)
    from residua.lock import release
    from residua.recipes.sweep import LOCK

    kind, base, given = _parse(args)
    own = {name: given.pop(name, None) for name in OWN}
    folder = Path(own["out"][0] if own["out"] else f"sweeps/{Path(base).stem or kind}").expanduser()
    try:
        _sweep(folder, kind, base, given, own)
    finally:
        release(folder / LOCK)


def _sweep(folder: Path, kind: Any, base: str, given: Mapping[str, list[str]], own: Mapping[str, Any]) -> None:
    from residua.recipes import sweep as engine

    after = {name: values for name, values in given.items() if kind == "diffuse" and name in EVALUATE}
    given = {name: values for name, values in given.items() if name not in after}
    fixed, grid = _split(given, kind)
    _check_base(kind, base, "model" in given)
    if own["seeds"]:
        if "seed" in given:
            raise ValueError("give --seeds N or --seed A B C, not both")
        grid["seed"] = [str(seed) for seed in range(_count("seeds", own["seeds"]))]
    if not grid:
        raise ValueError("nothing is swept: give a setting several values, as in --alpha-min 1.0 0.9, or --seeds 3")
    baseline = _baseline(own["baseline"], grid)
    name, values = _tune(own["tune"], kind, {*grid, *given}, {*grid} - {"seed", *baseline}) if own["tune"] else ("", [])
    of = _settings(kind)
    options: dict[str, Any] = {
        what: [name for name in grid if of[name] == form] for what, form in (("lists", "list"), ("switches", "switch"))
    } | {"kind": kind}
    options["evaluate"] = _evaluate(after, given) if kind == "diffuse" else []
    options["score"] = _score(own["score"], kind, given) if own["score"] is not None else []
    start = _start(own)
    args = ([base] if base else []) + fixed
    if name:
        seeds = {"seed": grid["seed"]} if "seed" in grid else {}
        cell = {key: [value] for key, value in baseline.items()}
        plan = engine.plan(folder, args, {**cell, name: values, **seeds}, **options)
        _carry_out(plan, start)
        grid[name] = [_best(plan, baseline, name, values)]
    plan = engine.plan(folder, args, grid, **options)
    _carry_out(plan, start)
    _conclude(plan, baseline, own["open"] is not None)


def _carry_out(plan: Any, start: Any) -> None:
    ready = sum(trial.status == "done" for trial in plan.trials)
    say(f"{len(plan.trials)} runs in {plan.folder}, {ready} of them finished before")
    if ready < len(plan.trials):
        start(plan, _ended)


def _best(plan: Any, baseline: Mapping[str, str], name: str, values: Sequence[str]) -> str:
    """The value of a setting that suits the baseline best."""
    from residua.recipes.tune import tuned

    found = tuned(plan, baseline, name, values)
    if not found:
        raise ValueError(
            f"--tune {name}: no value has a probe on held-out images for every seed; it needs labels, and runs that do "
            f"not fail, see {plan.folder / 'logs'}"
        )
    best = next(iter(found))
    say(f"tuned   {name} {best}: held-out probe " + ", ".join(f"{found[v]:.2f} % at {v}" for v in values if v in found))
    if len(found) < len(values):
        note(f"left out of it, as runs failed: {', '.join(v for v in values if v not in found)}")
    if best in (min(values, key=float), max(values, key=float)):
        note(f"{name} {best} is at the end of the values tried: one beyond it may suit the baseline better")
    return best


def _ended(trial: Any) -> None:
    if trial.status == "done":
        say(f"done    {trial.name}")
    else:
        note(f"failed: {trial.name}: {trial.error} (logs/{trial.name}.txt)")


def _waited_for(trial: Any) -> None:
    say(f"waiting for {trial.name}, still running from an earlier call")


def _conclude(plan: Any, baseline: Mapping[str, str], open_it: bool) -> None:
    """Tables, files and page of what there is."""
    from residua.recipes.summary import summarise, write_summary
    from residua.report.sweep import sweep_page

    found = summarise(plan, baseline)
    failed = [(trial.name, trial.error) for trial in plan.trials if trial.status == "failed"]
    _print(found, baseline)
    say(f"written: {write_summary(plan.folder, found)}")
    runs: dict[Any, list[Path]] = {}
    for trial in plan.trials:
        folder = plan.run_folder(trial)
        if trial.status == "done" and (folder / "config.yaml").exists():
            runs.setdefault(trial.group, []).append(folder)
    show(sweep_page(plan.folder, found, runs, failed, baseline), open_it)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(plan.trials)} runs failed: {', '.join(name for name, _ in failed)}")


# ---------------------------------------------------------------- what was typed


def _parse(args: Sequence[str]) -> tuple[str, str, dict[str, list[str]]]:
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
    return kind or _kind_of(base), base, given


def _kind_of(base: str) -> str:
    """The command that a recipe is of, or that knows all settings in a file."""
    from residua import recipes
    from residua.recipes.sweep import KINDS

    if not base:
        return "pretrain"
    if base.endswith((".yaml", ".yml")):
        from residua.train.options import read_flat

        names = set(read_flat(existing(base)))
        return next((kind for kind in KINDS if names <= _settings(kind).keys()), "pretrain")
    try:
        return recipes.get(base).command
    except ValueError as error:
        raise ValueError(f"{error} To train a network or run on labels: residua sweep finetune {base}") from None


def _check_base(kind: str, base: str, named: bool) -> None:
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


def _split(given: Mapping[str, list[str]], kind: str = "pretrain") -> tuple[list[str], dict[str, list[str]]]:
    """Arguments that all runs share, and the grid; settings that are lists themselves are swept with commas."""
    from residua.recipes.sweep import switch

    known = _settings(kind)
    fixed: list[str] = []
    grid: dict[str, list[str]] = {}
    for name, values in given.items():
        if name not in known and name.removeprefix("no_") not in known:
            near = difflib.get_close_matches(name, known, n=2) or ["alpha_min", "lr"]
            raise ValueError(f"no setting of {kind} named {name!r} to sweep; did you mean {' or '.join(near)}?")
        flag = f"--{name.replace('_', '-')}"
        if known.get(name) == "switch" and values:
            wrong = [value for value in values if value not in ("True", "False")]
            if wrong:
                raise ValueError(f"{flag} {wrong[0]}: it is on or off, True or False")
            if len(set(values)) > 1:
                grid[name] = list(dict.fromkeys(values))
            else:
                fixed.append(switch(name, values[0]))
        elif known.get(name) == "list":
            several = [value for value in values if "," in value]
            if len(several) not in (0, len(values)):
                raise ValueError(f"{flag} {' '.join(values)}: join each list with commas, as in {flag} 2,2,2,2 2,2,6,2")
            if len(several) > 1:
                grid[name] = list(dict.fromkeys(values))
            else:
                fixed += [flag, *(part for value in values for part in value.split(","))]
        elif len(values) > 1:
            grid[name] = list(dict.fromkeys(values))
        else:
            fixed += [flag, *values]
    return fixed, grid


def _settings(kind: str) -> dict[str, str]:
    """Settings of a command, and the form of their values: "list", "switch" (on or off) or "value"."""
    import typing
    from dataclasses import fields

    from residua.train import Finetune, Pretrain
    from residua.train.diffuse_config import Diffuse

    config: Any = {"pretrain": Pretrain, "diffuse": Diffuse, "finetune": Finetune}[kind]()
    found: dict[str, str] = {}
    for group in fields(config):
        for name, hint in typing.get_type_hints(type(getattr(config, group.name))).items():
            listed = any(get_origin(k) is tuple for k in (hint, *get_args(hint)))
            found[name] = "list" if listed else "switch" if hint is bool else "value"
    return found


def _baseline(given: list[str] | None, grid: Mapping[str, list[str]]) -> dict[str, str]:
    """Settings of the runs that the others are compared with."""
    from residua.recipes.trial import same_value

    if given is None:
        return {}
    found = {}
    for text in given:
        name, _, value = text.replace("-", "_", text.partition("=")[0].count("-")).partition("=")
        own = [v for v in grid.get(name, []) if name != "seed" and same_value(v, value)]
        if not own:
            swept = ", ".join(f"{k}={v}" for k, values in grid.items() if k != "seed" for v in values) or "none"
            raise ValueError(f"--baseline {text} is none of the settings that are swept: {swept}")
        found[name] = own[0]
    if not found:
        raise ValueError("--baseline needs a setting that is swept, as in --baseline alpha_min=1.0")
    return found


def _tune(given: list[str], kind: str, taken: Collection[str], free: Collection[str]) -> tuple[str, list[str]]:
    """The setting to tune and the values to try."""
    name, _, text = given[0].partition("=") if given else ("", "", "")
    name, values = name.replace("-", "_"), list(dict.fromkeys(text.split(",")))
    if len(given) != 1 or len(values) < 2 or not all(map(_is_number, values)):
        raise ValueError(f"--tune {' '.join(given)}: give a setting and numbers to try, as in --tune lr=1e-4,3e-4,1e-3")
    if kind == "finetune":
        raise ValueError("--tune chooses by the probe on held-out images, which finetune has not: sweep the setting")
    if _settings(kind).get(name) != "value" or name == "seed" or name in taken:
        raise ValueError(f"--tune {name}: it must be a setting of {kind} that is neither swept nor given")
    if free:
        raise ValueError(f"--tune needs to know the baseline: give --baseline a value of {', '.join(sorted(free))} too")
    return name, values


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _evaluate(after: Mapping[str, list[str]], given: Mapping[str, list[str]]) -> list[str]:
    """Options of `residua evaluate`; the features of many runs would fill a disk, so none are kept."""
    import torch
    import tyro

    from .evaluate import EvaluateOptions

    cpu = "cpu" in given
    options = [part for name, values in after.items() for part in (f"--{name}", *values)]
    if "probe" not in after:
        options += ["--probe", "lbfgs" if cpu or not torch.cuda.is_available() else "simple"]
    options += ["--no-cache", *(["--device", "cpu"] if cpu else [])]
    asked = tyro.cli(EvaluateOptions, args=["run", *options], prog="residua sweep")
    if asked.probe in ("none", "mae"):
        raise ValueError(f"--probe {asked.probe}: of diffusion models there are lbfgs, simple and cached")
    return options


def _score(values: list[str], kind: str, given: Mapping[str, list[str]]) -> list[str]:
    """Options of `residua score`; its network is opened once before anything is trained."""
    if kind != "diffuse":
        raise ValueError(f"--score is for diffusion models: {kind} makes no images")
    from residua.evaluate.extractor import open_extractor

    name, weights = (given.get(f"fid_{what}", [None])[0] for what in ("extractor", "weights"))
    open_extractor(name or "inception", weights)
    options = ["--n", str(_count("score", values)), "--fid"]
    options += [
        part for flag, value in (("--extractor", name), ("--weights", weights)) if value for part in (flag, value)
    ]
    return options + (["--device", "cpu"] if "cpu" in given else [])


def _start(own: Mapping[str, list[str] | None]) -> Any:
    """What runs a plan: this machine, or Ray."""
    from residua.recipes import cluster
    from residua.recipes import sweep as engine

    where, jobs = own["on"], own["jobs"]
    if where is None:
        for name in ("ray_address", "gpus_per_run"):
            if own[name] is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for --on ray; on one GPU, --jobs N runs several at once"
                )
        count = _count("jobs", jobs or ["1"])
        return lambda plan, ended: engine.run(plan, count, ended, _waited_for)
    if where != ["ray"]:
        raise ValueError(f"--on {' '.join(where)}: give ray, or leave it out to run here")
    cluster.open_ray()
    gpus = None
    if own["gpus_per_run"] is not None:
        try:
            (gpus,) = map(float, own["gpus_per_run"])
        except ValueError:
            raise ValueError(f"--gpus-per-run {' '.join(own['gpus_per_run'])}: give one number, such as 0.5") from None
        cluster.check_gpus(gpus)
    address = (own["ray_address"] or [None])[0]  # type: ignore[list-item]
    most = _count("jobs", jobs) if jobs else None
    return lambda plan, ended: cluster.run_on_ray(plan, address=address, gpus=gpus, jobs=most, on_end=ended)


def _count(name: str, values: list[str]) -> int:
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise ValueError(f"--{name} {' '.join(values)}: give one whole number from 1")
    return int(values[0])


# ---------------------------------------------------------------- what is printed


def _print(found: Sequence[Any], baseline: Mapping[str, str]) -> None:
    from residua.report.sweep import difference_note, difference_rows, ranking_note, score_rows

    if not found:
        return
    console.print(_table("mean ± 95 % interval over seeds", ranking_note(found), *score_rows(found)))
    differences = difference_rows(found)
    if differences[1]:
        console.print(_table(difference_note(baseline), "n: seeds that both have", *differences))
    elif baseline:
        note("nothing to compare with the baseline: no finished runs have its settings, seeds and number of images")


def _table(title: str, caption: str, header: list[str], rows: Sequence[Sequence[Any]], first: int) -> Table:
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for name in header:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else cell.text for cell in row))
    return table
