"""The value of a setting that suits the baseline of a sweep best, so that the others are compared with a strong one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from residua.evaluate.report import MODEL
from residua.recipes.sweep import Sweep
from residua.recipes.trial import Trial


def tuned(sweep: Sweep, name: str, values: Sequence[str]) -> dict[str, float]:
    """Value -> probe on held-out training images, mean over the seeds that every value has; the best first.

    Of the runs that are asked for, with which the trials begin, and of those that are otherwise the same. Values of
    which one failed are left out. The test images are not looked at.
    """
    first = sweep.trials[0].settings
    rest = [key for key in first if key not in (name, "seed")]
    runs: dict[str, dict[str, Trial]] = {value: {} for value in values}
    for value, trial in itertools.product(values, sweep.trials):
        settings = trial.settings
        same = trial.status != "left" and all(settings[key] == first[key] for key in rest)
        if same and sweep.meaning(name, settings[name]) == sweep.meaning(name, value):
            runs[value][settings["seed"]] = trial
    seeds = set.intersection(*map(set, runs.values()))
    found = {}
    for value, by_seed in runs.items():
        own = [by_seed[seed] for seed in seeds]
        scores = [held_out(sweep.run_folder(trial)) if sweep.done(trial) else math.nan for trial in own]
        if scores and all(map(math.isfinite, scores)):
            found[value] = fmean(scores)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def held_out(run: Path) -> float:
    """Accuracy of the probe that a run chose, on the training images held out to choose it; NaN without labels."""
    probes = json.loads((run / "evaluation.json").read_text("utf-8")).get("probes", {})
    best = probes.get(MODEL, {}).get("best", {}).get("held_out")
    return math.nan if best is None else float(best)
