"""Many runs of one recipe: a grid over settings and seeds, each run in processes of its own.

OUT/
  sweep.json                     what is swept, and how each run ended
  runs/alpha_min=0.9,seed=1/     a run like any other
  logs/alpha_min=0.9,seed=1.txt  what it printed
  summary.json, summary.csv      scores by setting, see `residua.recipes.summary`

Nothing here imports torch, so that those who only start runs are light.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from residua.lock import hold

Kind = Literal["pretrain", "diffuse", "finetune"]
KINDS: tuple[Kind, ...] = ("pretrain", "diffuse", "finetune")
Status = Literal["waiting", "done", "failed"]
OnEnd = Callable[["Trial"], None]
_LONGEST = 120  # characters of a run's name
_LOOK = 0.1  # seconds between looks at a run
_PATIENCE = 0.5  # seconds between looks at a run that another process is busy with


@dataclass
class Trial:
    """One run of a sweep."""

    settings: dict[str, str]
    """What distinguishes it, as typed: `{"alpha_min": "0.9", "seed": "1"}`; of lists `{"stages": "2,2,6,2"}`."""
    status: Status = "waiting"
    error: str = ""
    """The last line that a failed run printed."""

    @property
    def name(self) -> str:
        """Of its folder: the settings, and where those cannot be a name as they are, a hash that tells them apart."""
        text = ",".join(f"{key}={value.replace(',', '-')}" for key, value in self.settings.items()) or "run"
        clean = "".join(c if c.isalnum() or c in "=,._-" else "-" for c in text)
        if clean == text and len(clean) <= _LONGEST:
            return clean
        return f"{clean[:_LONGEST]}-{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"

    @property
    def group(self) -> tuple[tuple[str, str], ...]:
        """Its settings but for the seed: runs of one group are repetitions."""
        return tuple((key, value) for key, value in self.settings.items() if key != "seed")


@dataclass(frozen=True)
class Stage:
    """One command of a run, and the file that shows that it need not be run any more."""

    args: list[str]
    product: Path


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

    def run_folder(self, trial: Trial) -> Path:
        return self.folder / "runs" / trial.name

    def done(self, trial: Trial) -> bool:
        return all(stage.product.exists() for stage in stages(self, trial))

    def save(self) -> None:
        content = asdict(self)
        del content["folder"]
        part = self.folder / "sweep.json.part"
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, self.folder / "sweep.json")


def plan(folder: Path, fixed: Sequence[str], grid: Mapping[str, Sequence[str]], **options: Any) -> Sweep:
    """Every combination of the grid's values, and what an earlier call finished.

    `options` are fields of `Sweep`. A folder that holds another sweep is refused; more values or seeds of the same one
    are welcome, and so are scores of its samples.
    """
    names = list(grid)
    trials = [Trial(dict(zip(names, values))) for values in itertools.product(*grid.values())]
    sweep = Sweep(folder, list(fixed), trials, **options)
    known = folder / "sweep.json"
    if known.exists():
        before = {"kind": "pretrain", "evaluate": [], "score": []} | json.loads(known.read_text())
        sweep.score = sweep.score or before["score"]
        then, now = _of(before), _of(asdict(sweep))
        if then != now and then != [*now[:-1], []]:
            old, new = ("; ".join(" ".join(part) for part in side if part) for side in (then, now))
            raise ValueError(f"{folder} holds another sweep, of: {old}. This one is of: {new}. Choose another --out")
        mine = {trial.name for trial in trials}
        others = [t for row in before["trials"] if (t := Trial(**row)).name not in mine]
        sweep.trials += [t for t in others if sweep.done(t)]
    for trial in sweep.trials:
        trial.status = "done" if sweep.done(trial) else "waiting"
        trial.error = ""
    folder.mkdir(parents=True, exist_ok=True)
    sweep.save()
    return sweep


def _of(content: Mapping[str, Any]) -> list[list[str]]:
    """What a sweep is of, beside its grid."""
    return [[content["kind"], *content["fixed"]], content["evaluate"], content["score"]]


def stages(sweep: Sweep, trial: Trial) -> list[Stage]:
    """The commands of one run, as typed after `residua`; a run that was begun is continued."""
    flags: list[str] = []
    for key, value in trial.settings.items():
        if key in sweep.switches:
            flags.append(switch(key, value))
        else:
            flags += [f"--{key.replace('_', '-')}", *(value.split(",") if key in sweep.lists else [value])]
    run = sweep.run_folder(trial)
    begun = ["--resume"] if (run / "config.yaml").exists() else []
    tested = run / ("finetune.json" if sweep.kind == "finetune" else "evaluation.json")
    found = [Stage([sweep.kind, *sweep.fixed, *flags, "--out", str(run), *begun], tested)]
    if sweep.kind == "diffuse":
        found.append(Stage(["evaluate", str(run), *sweep.evaluate], tested))
        if sweep.score:
            scored = run / "score.json"
            found.append(Stage(["score", str(run), *sweep.score, "--out", str(scored)], scored))
    return found


def switch(name: str, value: str) -> str:
    """The flag of a setting that is on or off."""
    return f"--{'' if value == 'True' else 'no-'}{name.replace('_', '-')}"


def run(sweep: Sweep, jobs: int = 1, on_end: OnEnd = lambda trial: None) -> None:
    """Run what is waiting, `jobs` at once, which share the cores. A run that fails is noted and the others go on.

    An interrupt ends the running ones, which save where they are; the same call continues them.
    """
    lock, running = threading.Lock(), set[subprocess.Popen[bytes]]()
    stopped = threading.Event()
    threads = max(1, cores() // jobs) if jobs > 1 else None

    def one(trial: Trial) -> None:
        error = carry_out(sweep, trial, started=running.add, stopped=stopped.is_set, threads=threads)
        with lock:
            note_end(sweep, trial, error)
        if not stopped.is_set():
            on_end(trial)

    waiting = [trial for trial in sweep.trials if trial.status != "done"]
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        futures = [pool.submit(one, trial) for trial in waiting]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stopped.set()
            for process in list(running):
                process.terminate()  # nothing for one that has ended
            raise


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
    cwd: str | None = None,
    threads: int | None = None,
) -> str:
    """Run the commands that a trial still needs, one after another; returns what went wrong, or nothing.

    Where a process of an earlier call is still busy with it, that one is waited for. `threads` is how many a command
    may compute with, unless the environment says OMP_NUM_THREADS.
    """
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ if threads else None
    log = sweep.folder / "logs" / f"{trial.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        while not stopped() and not hold(file):  # which a run holds, too, as long as it lives
            time.sleep(_PATIENCE)
        for stage in stages(sweep, trial):
            if stopped():
                return "stopped"
            if stage.product.exists():
                continue
            command = [*program(), *stage.args]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=environment
            )
            started(process)
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


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def program() -> list[str]:
    """`residua`, as this interpreter runs it."""
    return [sys.executable, "-m", "residua.cli"]


def _last_line(log: Path) -> str:
    """What a run printed last that has words in it; of a box that a parser draws, the words."""
    lines = [line.strip(" │|") for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if any(c.isalnum() for c in line)]
    return lines[-1][:300] if lines else "nothing"
