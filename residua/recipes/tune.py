"""The value of a setting that suits the baseline of a sweep best, so that the others are compared with a strong one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from residua.evaluate.report import MODEL
from residua.recipes.sweep import Sweep


def tuned(sweep: Sweep, cell: Mapping[str, str], name: str, values: Sequence[str]) -> dict[str, float]:
    """Value -> probe on held-out training images, mean over seeds, of the runs with the settings of `cell`; the best
    first. Values of which a run failed are left out. The test images are not looked at."""
    found = {}
    for value in values:
        wanted = {key: sweep.meaning(key, text) for key, text in {**cell, name: value}.items()}
        own = [t for t in sweep.trials if all(sweep.meaning(k, t.settings[k]) == v for k, v in wanted.items())]
        scores = [held_out(sweep.run_folder(trial)) if sweep.done(trial) else math.nan for trial in own]
        if scores and all(map(math.isfinite, scores)):
            found[value] = fmean(scores)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def held_out(run: Path) -> float:
    """Accuracy of the probe that a run chose, on the training images held out to choose it; NaN without labels."""
    probes = json.loads((run / "evaluation.json").read_text()).get("probes", {})
    best = probes.get(MODEL, {}).get("best", {}).get("held_out")
    return math.nan if best is None else float(best)
