"""Many runs of one recipe: a grid over settings and seeds, each run in processes of its own.

OUT/
  sweep.json                     what is swept, what all runs share, and how each ended
  runs/alpha_min=0.9,seed=1/     a run like any other
  logs/alpha_min=0.9,seed=1.txt  what it printed
  summary.json, summary.csv      scores by setting, see `residua.recipes.summary`

Torch is not imported with it, only where settings are read.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from residua.disk import claim, hold, write_text
from residua.recipes.arguments import INSTEAD, Kind, read, value_of
from residua.recipes.trial import Trial, name_before, same_value, text_of, trained
from residua.room import cores
from residua.train.processes import program

KINDS: tuple[Kind, ...] = ("pretrain", "diffuse", "finetune")
OnTrial = Callable[[Trial], None]
LOCK = ".lock"
"""File of a sweep's folder that its process holds."""
REFUSED = {"resume": (True, "the same command continues one"), "evaluate": (False, "its table is made of evaluations"),
           "dry_run": (True, "residua pretrain --dry-run looks at one run")}  # fmt: skip
"""Settings that no run of a sweep may have, and why."""
_LOOK = 0.1  # seconds between looks at a run
_PATIENCE = 0.5  # seconds between looks at a run that another process is busy with


@dataclass(frozen=True)
class Stage:
    """One command of a run, and the file that shows that it need not be run any more."""

    args: list[str]
    product: Path
    trains: bool = False

    @property
    def done(self) -> bool:
        """Whether the product is there; one that cannot be read, or is of a run half-way, is made again."""
        try:
            whole = not self.trains or trained(self.product.parent)
            return whole and isinstance(json.loads(self.product.read_text("utf-8")), dict)
        except (OSError, ValueError):
            return False


@dataclass
class Sweep:
    """A grid of runs in a folder. `fixed` are the arguments that all of them share."""

    folder: Path
    fixed: list[str]
    trials: list[Trial] = field(default_factory=list)
    kind: Kind = "pretrain"
    """The command that trains."""
    evaluate: list[str] = field(default_factory=list)
    """Options of `residua evaluate`, by which diffusion models are probed afterwards."""
    score: list[str] = field(default_factory=list)
    """Options of `residua score`, by which their samples are; none: they are not."""
    lists: list[str] = field(default_factory=list)
    """Settings of the grid whose values are lists, joined with commas."""
    switches: list[str] = field(default_factory=list)
    """Settings of the grid that are on or off: `--flip` for True, `--no-flip` for False."""
    shared: dict[str, str] = field(default_factory=dict)
    """Every setting that is not swept, as `fixed` and what is behind it (defaults, a recipe, a file) have it."""

    def run_folder(self, trial: Trial) -> Path:
        return self.folder / "runs" / trial.name

    def begun(self, trial: Trial) -> bool:
        return (self.run_folder(trial) / "config.yaml").exists()

    def done(self, trial: Trial) -> bool:
        return all(stage.done for stage in stages(self, trial))

    @property
    def waiting(self) -> list[Trial]:
        """What is still to be run."""
        return [trial for trial in self.trials if trial.status in ("waiting", "failed")]

    @property
    def left(self) -> list[Trial]:
        """What earlier calls began and this one does not ask for."""
        return [trial for trial in self.trials if trial.status == "left"]

    def meaning(self, name: str, text: str) -> str:
        """A setting as typed, the same for all ways to type it."""
        return text_of(value_of(self.kind, name, *(text.split(",") if name in self.lists else [text])))

    def told(self, name: str, text: str) -> str | None:
        """A setting as the trials have it, however it was typed; None where none has it."""
        own = (trial.settings[name] for trial in self.trials if name in trial.settings)
        return next((value for value in own if self.meaning(name, value) == self.meaning(name, text)), None)

    def save(self) -> None:
        content = asdict(self)
        del content["folder"]
        write_text(self.folder / "sweep.json", json.dumps(content, indent=1) + "\n")


def plan(
    folder: Path,
    fixed: Sequence[str],
    grid: Mapping[str, Sequence[str]],
    *,
    check: Callable[[Sweep], None] = lambda sweep: None,
    **options: Any,
) -> Sweep:
    """Every combination of the grid's values, and what an earlier call finished.

    `options` are fields of `Sweep`. All settings are read as the runs themselves will read them, and `check` may refuse
    the sweep, before anything is written. Every trial has a value for each setting that is swept, in this call or an
    earlier one, and a seed; one that an earlier call has, however it was typed, keeps its folder. What earlier calls
    began and this one does not ask for is left as it is. A folder that holds another sweep is refused; more values,
    settings or seeds of the same one are welcome, and so are scores of its samples. The folder belongs to this process
    until it ends or releases its lock.
    """
    sweep, config = checked(folder, fixed, grid, **options)
    if folder.exists():  # and another process may be about to write in it
        _claim(folder)
    before = _stored(folder) or replace(sweep, trials=[])
    names = [name for trial in [*before.trials, *sweep.trials] for name in trial.settings]
    swept = [*dict.fromkeys(name for name in names if name != "seed"), "seed"]
    sweep.score = sweep.score or before.score
    _check_same(before, sweep, {*swept, *(f.name for f in fields(config.machine))})
    sweep.lists, sweep.switches = sorted({*before.lists, *sweep.lists}), sorted({*before.switches, *sweep.switches})
    sweep.trials = _joined_trials(before, sweep, swept)
    sweep.fixed = _without(sweep.fixed, swept)
    sweep.shared = {name: text for name, text in sweep.shared.items() if name not in swept}
    for trial in sweep.trials:
        trial.status, trial.error = "done" if sweep.done(trial) else trial.status, ""
    check(sweep)
    _claim(folder)
    sweep.save()
    return sweep


def _claim(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not claim(folder / LOCK):
        raise ValueError(f"{folder} is being swept by another process: wait for it, or choose another --out")


def checked(folder: Path, fixed: Sequence[str], grid: Mapping[str, Sequence[str]], **options: Any) -> tuple[Sweep, Any]:
    """Every combination of the grid's values, and the configuration of the first; raises what is wrong with any."""
    cells = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    sweep = Sweep(folder, list(fixed), [Trial(cell) for cell in cells], **options)
    config, *_ = [_read(sweep, trial) for trial in sweep.trials]
    sweep.shared = _shared(config)
    return sweep, config


def _read(sweep: Sweep, trial: Trial) -> Any:
    """The configuration of a run, or what is wrong with it."""
    try:
        config = read(sweep.kind, [*sweep.fixed, *_flags(sweep, trial)])
        settings = config.settings()
        for name, (value, why) in REFUSED.items():
            if settings.get(name) is value:
                raise ValueError(f"{name} {value} is not for sweeps: {why}")
    except ValueError as error:
        raise ValueError(f"{trial.name}: {error}") from None
    return config


def _shared(config: Any) -> dict[str, str]:
    return {name: text_of(value) for name, value in config.settings().items() if name not in ("out", *REFUSED)}


def _stored(folder: Path) -> Sweep | None:
    """The sweep of earlier calls. Those that do not say what their runs share or are named, come to it as they did."""
    path = folder / "sweep.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        rows = content.pop("trials")
        sweep = Sweep(folder, **content)
        for row in rows:
            taken = {trial.name for trial in sweep.trials}
            name = row.get("name") or name_before(row["settings"])
            sweep.trials.append(Trial(**row | {"name": "" if name in taken else name}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): put it back as it was, or remove it; runs are found by their folders"
        ) from None
    sweep.shared = sweep.shared or _shared(_read(sweep, Trial({})))
    return sweep


def _check_same(before: Sweep, now: Sweep, free: Collection[str]) -> None:
    """Refuse to mix sweeps that differ in more than the settings that are `free` to."""
    then, given = (
        {"the command": s.kind, "evaluate": _options(s.evaluate), "score": _options(s.score)}
        | {name: text for name, text in s.shared.items() if name not in free}
        for s in (before, now)
    )
    then["score"] = then["score"] or given["score"]
    unlike = [name for name in then if name in given and not same_value(then[name], given[name])]
    if unlike:
        texts = (f"{name} is {then[name] or 'nothing'} there, {given[name] or 'nothing'} here" for name in unlike[:3])
        raise ValueError(f"{now.folder} holds another sweep: {'; '.join(texts)}. Choose another --out")


def _options(args: Sequence[str]) -> str:
    """In one order, and without the device."""
    options = " ".join(args).removeprefix("--").split(" --")
    return ", ".join(sorted(option for option in options if not option.startswith("device ")))


def _joined_trials(before: Sweep, now: Sweep, swept: Sequence[str]) -> list[Trial]:
    """The trials asked for, as earlier calls have them where they do, and what else those finished or began."""
    texts: dict[tuple[str, str], str] = {}  # a value is told as it was first typed
    for trial in [*before.trials, *now.trials]:
        for name, text in trial.settings.items():
            texts.setdefault((name, now.meaning(name, text)), text)

    def settled(trial: Trial, shared: Mapping[str, str]) -> dict[str, str]:
        whole = {name: trial.settings.get(name, shared.get(name, "")) for name in swept}
        return {name: texts.setdefault((name, now.meaning(name, text)), text) for name, text in whole.items()}

    known: dict[tuple[str, ...], Trial] = {}
    for trial in before.trials:
        trial.settings = settled(trial, before.shared)
        key = tuple(trial.settings.values())
        if key not in known or not now.done(known[key]):
            known[key] = trial
    asked: dict[tuple[str, ...], Trial] = {}
    for trial in now.trials:
        settings = settled(trial, now.shared)
        key = tuple(settings.values())
        asked[key] = asked.get(key) or known.get(key) or Trial(settings)
    others = [trial for key, trial in known.items() if key not in asked and (before.done(trial) or now.begun(trial))]
    for trial in asked.values():
        trial.status = "waiting"
    for trial in others:
        trial.status = "waiting" if before.done(trial) else "left"
    return [*asked.values(), *others]


def _without(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Arguments less those of some settings."""
    found, keep = [], True
    for part in args:
        if part.startswith("--"):
            keep = part[2:].partition("=")[0].removeprefix("no-").replace("-", "_") not in names
        if keep:
            found.append(part)
    return found


def stages(sweep: Sweep, trial: Trial) -> list[Stage]:
    """The commands of one run, as typed after `residua`; a run that was begun is continued."""
    run = sweep.run_folder(trial)
    begun = ["--resume"] if sweep.begun(trial) else []
    tested = run / ("finetune.json" if sweep.kind == "finetune" else "evaluation.json")
    found = [Stage([sweep.kind, *sweep.fixed, *_flags(sweep, trial), "--out", str(run), *begun], tested, trains=True)]
    if sweep.kind == "diffuse":
        found.append(Stage(["evaluate", str(run), *sweep.evaluate], tested))
        if sweep.score:
            scored = run / "score.json"
            found.append(Stage(["score", str(run), *sweep.score, "--out", str(scored)], scored))
    return found


def _flags(sweep: Sweep, trial: Trial) -> list[str]:
    """A trial's settings as arguments; of two that take each other's place, the one that is in force."""
    given = dict(trial.settings)
    for name, (other, neutral) in INSTEAD.items():
        if {name, other} <= given.keys():
            del given[other if given[other] == str(neutral) else name]
    flags: list[str] = []
    for key, value in given.items():
        if key in sweep.switches:
            flags.append(switch(key, value))
        else:
            flags += [f"--{key.replace('_', '-')}", *(value.split(",") if key in sweep.lists else [value])]
    return flags


def switch(name: str, value: str) -> str:
    """The flag of a setting that is on or off."""
    return f"--{'' if value == 'True' else 'no-'}{name.replace('_', '-')}"


def run(
    sweep: Sweep, jobs: int = 1, on_end: OnTrial = lambda trial: None, on_wait: OnTrial = lambda trial: None
) -> None:
    """Run what is waiting, `jobs` at once, which share the cores. A run that fails is noted and the others go on.

    An interrupt or SIGTERM ends the running ones, which save where they are; the same call continues them. `on_wait` is
    called for a run that a process of an earlier call is still busy with, `on_end` when a run has ended.
    """
    lock, running = threading.Lock(), set[subprocess.Popen[bytes]]()
    stopped = threading.Event()
    threads = max(1, cores() // jobs) if jobs > 1 else None

    def one(trial: Trial) -> None:
        error = carry_out(
            sweep, trial, started=running.add, stopped=stopped.is_set, waits=lambda: on_wait(trial), threads=threads
        )
        if stopped.is_set():  # which is no failure of the run
            return
        with lock:
            note_end(sweep, trial, error)
        on_end(trial)

    with _sigterm_interrupts(), ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        futures = [pool.submit(one, trial) for trial in sweep.waiting]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stopped.set()
            for process in list(running):
                process.terminate()  # nothing for one that has ended
            raise


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM as Ctrl-C, where this is the main thread."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def note_end(sweep: Sweep, trial: Trial, error: str) -> None:
    """Write down how a run ended."""
    trial.status, trial.error = ("failed", error) if error else ("done", "")
    sweep.save()


def carry_out(
    sweep: Sweep,
    trial: Trial,
    *,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
    stopped: Callable[[], bool] = lambda: False,
    waits: Callable[[], None] = lambda: None,
    cwd: str | None = None,
    threads: int | None = None,
) -> str:
    """Run the commands that a trial still needs, one after another; returns what went wrong, or nothing.

    Where a process of an earlier call is still busy with it, `waits` is called and that one is waited for. `threads` is
    how many a command may compute with, unless the environment says OMP_NUM_THREADS.
    """
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ if threads else None
    log = sweep.folder / "logs" / f"{trial.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        mine = hold(file)  # which a run holds, too, as long as it lives
        if not mine:
            waits()
        while not mine and not stopped():
            time.sleep(_PATIENCE)
            mine = hold(file)
        todo = stages(sweep, trial)
        for i, stage in enumerate(todo):
            if stopped():
                return "stopped"
            if stage.done:
                continue
            for later in todo[i:]:  # what was measured before is of a run that it no longer is
                later.product.unlink(missing_ok=True)
            command = [*program(), *stage.args]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=environment
            )
            started(process)
            if stopped():  # just now, and nobody knew of it
                process.terminate()
            try:
                while (status := process.poll()) is None:
                    time.sleep(_LOOK)  # where Ray's interrupts arrive, as they would not in a wait
            except BaseException:
                process.terminate()
                process.wait()
                raise
            if status:
                killed = f"killed by signal {-status}; it printed last: " if status < 0 else ""
                return killed + _last_line(log)
    return "" if sweep.done(trial) else f"nothing was measured; it printed last: {_last_line(log)}"


def _last_line(log: Path) -> str:
    """What a run printed last that has words in it; of a box that a parser draws, the words."""
    lines = [line.strip(" │|") for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if any(c.isalnum() for c in line)]
    return lines[-1][:300] if lines else "nothing"
