"""Many runs of one recipe: a grid over settings and seeds, each run a process of its own, and what they come to.

OUT/
  sweep.json                     what is swept, and how each run ended
  runs/alpha_min=0.9,seed=1/     a run like any other
  logs/alpha_min=0.9,seed=1.txt  what it printed
  summary.json, summary.csv      scores by setting: mean and 95 % interval over seeds
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

from residua.evaluate import Report
from residua.evaluate.report import MODEL
from residua.report.runs import headline
from residua.train.checkpoint import write_text

Status = Literal["waiting", "done", "failed"]
OnEnd = Callable[["Trial"], None]


@dataclass
class Trial:
    """One run of a sweep."""

    settings: dict[str, str]
    """What distinguishes it, as typed: `{"alpha_min": "0.9", "seed": "1"}`."""
    status: Status = "waiting"
    error: str = ""
    """The last line that a failed run printed."""

    @property
    def name(self) -> str:
        text = ",".join(f"{key}={value}" for key, value in self.settings.items()) or "run"
        return "".join(c if c.isalnum() or c in "=,._-" else "-" for c in text)

    @property
    def group(self) -> tuple[tuple[str, str], ...]:
        """Its settings but for the seed: runs of one group are repetitions."""
        return tuple((key, value) for key, value in self.settings.items() if key != "seed")


@dataclass
class Sweep:
    """A grid of runs in a folder. `fixed` are the arguments that all of them share."""

    folder: Path
    fixed: list[str]
    trials: list[Trial] = field(default_factory=list)

    def run_folder(self, trial: Trial) -> Path:
        return self.folder / "runs" / trial.name

    def done(self, trial: Trial) -> bool:
        return (self.run_folder(trial) / "evaluation.json").exists()

    def save(self) -> None:
        content = {"fixed": self.fixed, "trials": [asdict(trial) for trial in self.trials]}
        write_text(self.folder / "sweep.json", json.dumps(content, indent=1) + "\n")


def plan(folder: Path, fixed: Sequence[str], grid: Mapping[str, Sequence[str]]) -> Sweep:
    """Every combination of the grid's values; runs that another call finished are done already.

    A folder that holds another sweep is refused; more values or seeds of the same one are welcome.
    """
    names = list(grid)
    trials = [Trial(dict(zip(names, values))) for values in itertools.product(*grid.values())]
    sweep = Sweep(folder, list(fixed), trials)
    known = folder / "sweep.json"
    if known.exists():
        before = json.loads(known.read_text())
        if before["fixed"] != sweep.fixed:
            raise ValueError(
                f"{folder} holds another sweep, of: {' '.join(before['fixed'])}; this one is of: "
                f"{' '.join(sweep.fixed)}. Choose another --out"
            )
        mine = {trial.name for trial in trials}
        sweep.trials += [t for row in before["trials"] if (t := Trial(**row)).name not in mine]
    for trial in sweep.trials:
        trial.status = "done" if sweep.done(trial) else "waiting"
        trial.error = ""
    folder.mkdir(parents=True, exist_ok=True)
    sweep.save()
    return sweep


def command(sweep: Sweep, trial: Trial) -> list[str]:
    """What a terminal would run for one trial; a run that was begun is continued."""
    flags = [part for key, value in trial.settings.items() for part in (f"--{key.replace('_', '-')}", value)]
    run = sweep.run_folder(trial)
    begun = ["--resume"] if (run / "config.yaml").exists() else []
    return [sys.executable, "-m", "residua.cli", "pretrain", *sweep.fixed, *flags, "--out", str(run), *begun]


def run(sweep: Sweep, jobs: int = 1, on_end: OnEnd = lambda trial: None) -> None:
    """Run what is waiting, `jobs` at once. A run that fails is noted and the others go on.

    An interrupt ends the running ones, which save where they are; the same call continues them.
    """
    lock, running = threading.Lock(), set[subprocess.Popen[bytes]]()
    stopped = threading.Event()

    def one(trial: Trial) -> None:
        if stopped.is_set():
            return
        log = sweep.folder / "logs" / f"{trial.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(command(sweep, trial), stdout=file, stderr=subprocess.STDOUT)
            with lock:
                running.add(process)
            status = process.wait()
        with lock:
            running.discard(process)
            trial.status = "done" if status == 0 and sweep.done(trial) else "failed"
            trial.error = "" if trial.status == "done" else _last_line(log)
            sweep.save()
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
                process.terminate()
            raise


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


# ---------------------------------------------------------------- what they come to


@dataclass(frozen=True)
class Summary:
    """One score of one group of runs that differ in nothing but the seed."""

    settings: dict[str, str]
    score: str
    unit: str
    mean: float
    ci95: float
    """Half width of the 95 % interval of the mean over seeds (Student's t); NaN for one seed."""
    values: tuple[float, ...]

    @property
    def seeds(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        digits = 2 if self.unit == "nats" else 1
        spread = "" if math.isnan(self.ci95) else f" ± {self.ci95:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def summarise(sweep: Sweep) -> list[Summary]:
    """Mean and interval over seeds, of every score that all finished runs of a group have.

    As quoted everywhere: of the last block, for the probe of the one it chose on held-out images.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Report]] = {}
    for trial in sweep.trials:
        if sweep.done(trial):
            content = json.loads((sweep.run_folder(trial) / "evaluation.json").read_text())
            groups.setdefault(trial.group, []).append(Report.from_dict(content))
    found = []
    for group, reports in groups.items():
        quoted = [headline(report) for report in reports]
        for score in quoted[0]:
            own = [q[score][MODEL] for q in quoted if MODEL in q.get(score, {})]
            if len(own) == len(reports):
                values = tuple(s.value for s in own)
                found.append(Summary(dict(group), score, own[0].unit, *mean_and_interval(values), values))
    return found


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half width of its 95 % interval by Student's t; NaN for a single value."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))


def write_summary(sweep: Sweep, found: Sequence[Summary]) -> Path:
    """summary.json and summary.csv in the sweep's folder."""
    rows: list[dict[str, Any]] = [
        {**s.settings, "score": s.score, "unit": s.unit, "mean": s.mean, "ci95": _or_none(s.ci95), "seeds": s.seeds,
         "values": list(s.values)}
        for s in found
    ]  # fmt: skip
    write_text(sweep.folder / "summary.json", json.dumps(rows, indent=1) + "\n")
    text = io.StringIO()
    names = list(dict.fromkeys(key for row in rows for key in row if key != "values"))
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(sweep.folder / "summary.csv", text.getvalue())
    return sweep.folder / "summary.csv"


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
