"""`residua sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from residua.commands.console import console, data_of, note, say, show

from .sweep_options import (
    baseline_of,
    check_base,
    count_of,
    evaluate_options,
    parse,
    score_options,
    settings_of,
    split,
    told_baseline,
    tune_of,
)

HELP = """\
usage: residua sweep [pretrain|diffuse|finetune] [RECIPE|SETTINGS.yaml|MODEL] --SETTING VALUE [VALUE ...] [options]

Run a recipe once for every combination of the values given, evaluate each, and put mean and interval into one table
and one page. Any setting of the command may be swept by giving it several values; with one value it holds for all
runs. Settings that are lists themselves are swept with commas: --stages 2,2,2,2 2,2,6,2. Runs are processes of their
own: one that fails is listed and the others go on. The same command continues a sweep that was stopped, and adds
values, settings or seeds to one that is finished; calls with the same --out make one table of all their runs.

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

On a Ray cluster (needs Ray; folder and images where all its machines see them):
  --on ray            as many at once as fit, at most --jobs
  --ray-address A     of the cluster, or auto; default: this machine alone
  --gpus-per-run G    0.5: two on each GPU (default: one where there are any)

  residua sweep mae-tiny-imagenet --alpha-min 1.0 0.8 0.7 --seeds 3 --jobs 2 --baseline alpha_min=1.0
  residua sweep mae-tiny-imagenet --alpha-min 1.0 0.7 --baseline alpha_min=1.0 --tune lr=1.5e-4,3e-4,6e-4 --seeds 3
  residua sweep --data folder:my_photos --alpha-min 1.0 0.8 --anneal 0 0.5
  residua sweep mae-tiny-imagenet --alpha-min 0.7 --until None 0.75 --seeds 3 --baseline alpha_min=1.0 until=None
  residua sweep uvit-cifar100 --alpha-min 1.0 0.7 --seeds 3 --score 10000 --on ray --gpus-per-run 0.5
  residua sweep finetune resnet18 --data cifar10 --alpha-min 1.0 0.7 --stages 2,2,2,2 2,2,6,2 --seeds 3
"""
OWN = ("out", "seeds", "jobs", "open", "baseline", "tune", "on", "ray_address", "gpus_per_run", "score")
EVALUATE = ("probe", "times", "layers", "k", "limit")


def sweep(args: list[str]) -> None:
    """A grid of runs."""
    if not args or "--help" in args or "-h" in args:
        say(HELP)
        raise SystemExit(0)
    from residua.disk import release
    from residua.recipes.sweep import LOCK

    kind, base, given = parse(args)
    own = {name: given.pop(name, None) for name in OWN}
    for name in ("out", "tune", "ray_address"):
        values = own[name]
        if values is not None and len(values) != 1:
            raise ValueError(f"--{name.replace('_', '-')} {' '.join(values)}: it takes one value")
    folder = Path(own["out"][0] if own["out"] else f"sweeps/{Path(base).stem or kind}").expanduser()
    try:
        _sweep(folder, kind, base, given, own)
    except KeyboardInterrupt:
        if (folder / "sweep.json").exists():
            note(f"stopped; the same command goes on with the runs in {folder}")
        raise
    finally:
        release(folder / LOCK)


def _sweep(folder: Path, kind: Any, base: str, given: Mapping[str, list[str]], own: Mapping[str, Any]) -> None:
    from residua.recipes import sweep as engine

    after = {name: values for name, values in given.items() if kind == "diffuse" and name in EVALUATE}
    given = {name: values for name, values in given.items() if name not in after}
    fixed, grid = split(given, kind)
    check_base(kind, base, "model" in given)
    if own["seeds"] is not None:
        if "seed" in given:
            raise ValueError("give --seeds N or --seed A B C, not both")
        grid["seed"] = [str(seed) for seed in range(count_of("seeds", own["seeds"]))]
    if not grid:
        raise ValueError("nothing is swept: give a setting several values, as in --alpha-min 1.0 0.9, or --seeds 3")
    baseline = baseline_of(own["baseline"])
    name, values = (
        tune_of(own["tune"], kind, {*grid, *given}, {*grid} - {"seed", *baseline}) if own["tune"] else ("", [])
    )
    of = settings_of(kind)
    options: dict[str, Any] = {
        what: [name for name in grid if of[name] == form] for what, form in (("lists", "list"), ("switches", "switch"))
    } | {"kind": kind}
    options["evaluate"] = evaluate_options(after, given) if kind == "diffuse" else []
    options["score"] = score_options(own["score"], kind, given) if own["score"] is not None else []
    start = _start(own)

    def check(plan: engine.Sweep) -> None:
        told_baseline(baseline, plan)
        if own["on"] is None:
            _open_data(plan)

    args = ([base] if base else []) + fixed
    if name:
        baseline = told_baseline(baseline, engine.checked(folder, args, {**grid, name: values}, **options)[0])
        seeds = {"seed": grid["seed"]} if "seed" in grid else {}
        cell = {key: [value] for key, value in baseline.items()}
        plan = engine.plan(folder, args, {**cell, name: values, **seeds}, check=check, **options)
        _carry_out(plan, start)
        grid[name] = [_best(plan, name, values)]
    plan = engine.plan(folder, args, grid, check=check, **options)
    _carry_out(plan, start)
    _conclude(plan, told_baseline(baseline, plan), own["open"] is not None)


def _open_data(plan: Any) -> None:
    """Open the images of all runs that are waiting, so that what is wrong with them is told once, before any begins."""
    from residua.data import load

    waiting = [plan.shared | trial.settings for trial in plan.waiting]
    for spec in dict.fromkeys(data_of(s["model"]) if s["data"] == "auto" else s["data"] for s in waiting):
        load(spec)


def _carry_out(plan: Any, start: Any) -> None:
    runs = len(plan.trials) - len(plan.left)
    say(f"{runs} runs in {plan.folder}, {runs - len(plan.waiting)} of them finished before")
    if plan.waiting:
        start(plan, _ended)


def _best(plan: Any, name: str, values: Sequence[str]) -> str:
    """The value of a setting that suits the baseline best."""
    from residua.recipes.tune import tuned

    found = tuned(plan, name, values)
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
    if plan.left:
        names = "; ".join(trial.name for trial in plan.left)
        note(f"begun before, not finished and not asked for now: {names}. Sweep their values again to continue them")
    if failed:
        names = "; ".join(name for name, _ in failed)
        count = len(plan.trials) - len(plan.left)
        raise ValueError(f"{len(failed)} of {count} runs failed: {names}; see {plan.folder / 'logs'}")


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
        count = 1 if jobs is None else count_of("jobs", jobs)
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
    most = count_of("jobs", jobs) if jobs else None
    return lambda plan, ended: cluster.run_on_ray(plan, address=address, gpus=gpus, jobs=most, on_end=ended)


# ---------------------------------------------------------------- what is printed


def _print(found: Sequence[Any], baseline: Mapping[str, str]) -> None:
    """All scores, each with its value for every setting, and the same of differences to the baseline."""
    from residua.report.sweep import difference_note, ranking_note, spread

    if not found:
        return

    def facts(s: Any) -> list[str]:
        return [str(s.seeds), "–" if s.images is None else f"{s.images:,}", "–" if s.rank is None else str(s.rank)]

    say(spread(found))
    _tabulate(["seeds", "images seen", "rank", "value"], [(s, [*facts(s), str(s)]) for s in found])
    if text := ranking_note(found):
        say(text)
    compared = [s for s in found if s.difference is not None]
    if compared:
        say(difference_note(baseline, found))
        _tabulate(["n", "difference"], [(s, [str(s.difference.n), s.difference_text()]) for s in compared])
        say("n: seeds that both have")
    elif baseline:
        note("nothing to compare with the baseline: no finished run has seed and number of images in common with it")


def _tabulate(header: Sequence[str], rows: Sequence[tuple[Any, Sequence[str]]]) -> None:
    """Scores one after the other; the settings that are swept stand between a score's name and its numbers."""
    table = Table("score")
    names = list(dict.fromkeys(name for s, _ in rows for name in s.settings))
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    for score in dict.fromkeys(s.score for s, _ in rows):
        own = [(s, cells) for s, cells in rows if s.score == score]
        for i, (s, cells) in enumerate(own):
            label = "" if i else f"{score} ({s.unit})" if s.unit else score
            table.add_row(label, *(s.settings.get(name, "") for name in names), *cells, end_section=i == len(own) - 1)
    console.print(table)
