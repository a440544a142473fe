"""What the runs of a sweep come to: means and intervals over seeds, ranks and differences at equal budget."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from residua.disk import write_text
from residua.evaluate import Report
from residua.evaluate.diffusion import best
from residua.evaluate.report import MODEL
from residua.recipes.sweep import Sweep
from residua.recipes.trial import Trial, same_value, text_of
from residua.report.runs import NotARun, headline, read_config, read_run
from residua.report.sweep import group_name
from residua.train.metrics import read_metrics
from residua.train.options import read_flat

Scores = dict[str, tuple[float, str]]
"""Name -> value and unit."""
LOSS = "training loss"
_LAST = 0.1  # share of the steps whose mean is the loss to quote
_LESS_IS_BETTER = ("FID", "Frechet distance", LOSS)


@dataclass(frozen=True)
class Difference:
    """A score minus the baseline's with the same seed: mean over seeds and its 95 % interval."""

    mean: float
    ci95: float
    """Half width, by Student's t on the differences of single seeds; NaN for one."""
    n: int
    """Seeds that both have."""


@dataclass(frozen=True)
class Summary:
    """One score of one group of runs that differ in nothing but the seed."""

    settings: dict[str, str]
    score: str
    unit: str
    mean: float
    ci95: float
    """Half width of the 95 % interval of the mean over seeds (Student's t); NaN for one seed."""
    by_seed: dict[str, float]
    images: int | None = None
    """Images seen in training, with repetition: steps x batch size."""
    rank: int | None = None
    """Place among the groups that saw as many images of the same data, 1 the best; None where more is neither better
    nor worse."""
    difference: Difference | None = None
    made: str = ""
    """What its runs were made with that is not the same in the whole sweep and should be; only like is compared."""

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(self.by_seed.values())

    @property
    def seeds(self) -> int:
        return len(self.by_seed)

    def __str__(self) -> str:
        return _text(self.mean, self.ci95, self.digits)

    @property
    def digits(self) -> int:
        if self.score == LOSS:
            return 4
        return 2 if self.unit == "nats" or self.score.startswith(_LESS_IS_BETTER) else 1

    def difference_text(self) -> str:
        """`+1.2 ± 0.8`."""
        d = self.difference
        return "–" if d is None else _text(d.mean, d.ci95, self.digits, "+")


def _text(mean: float, ci95: float, digits: int, sign: str = "") -> str:
    spread = "" if math.isnan(ci95) else f" ± {ci95:.{digits}f}"
    return f"{mean:{sign}z.{digits}f}{spread}"


def scores_of(run: Path) -> Scores:
    """The scores to quote of one run.

    Of the last block, for the probe of the one it chose on held-out images; of a diffusion model all at the block and
    noise level that the probe chose. FID: of `score.json`, else the last one measured while training.
    """
    found: Scores = {}
    report = _report(run)
    if report is not None and report.readout.startswith("t="):
        place = best(report)
        own = [s for s in report.scores if s.subject == MODEL and (s.layer, s.settings["readout"]) == place]
        found = {s.name: (s.value, s.unit) for s in own}
    elif report is not None:
        found = {name: (own[MODEL].value, own[MODEL].unit) for name, own in headline(report).items() if MODEL in own}
    records = read_metrics(run)
    if (run / "score.json").exists():
        scored = json.loads((run / "score.json").read_text("utf-8"))
        count = f"{scored['samples']['images']:,}"
        found |= {f"{name} ({count} samples)": (own["value"], "") for name, own in scored["scores"].items()}
    else:
        for key, name in (("eval/fid", "FID while training"), ("eval/frechet", "Frechet distance while training")):
            if measured := [record[key] for record in records if key in record]:
                found[name] = (measured[-1], "")
    losses = [record for record in records if isinstance(record.get("loss"), float)]
    if losses:
        late = [r["loss"] for r in losses if r["step"] > (1 - _LAST) * losses[-1]["step"]]
        found[LOSS] = (float(np.mean(late)), "")
    return found


def _report(run: Path) -> Report | None:
    path = run / "evaluation.json"
    return Report.from_dict(json.loads(path.read_text("utf-8"))) if path.exists() else read_run(run).evaluation


def images_seen(run: Path) -> int | None:
    """Images that a run is trained on, with repetition, where its settings say so."""
    path = run / "config.yaml"
    settings = read_flat(path) if path.exists() else {}
    steps, batch = settings.get("steps"), settings.get("batch_size")
    return steps * batch if isinstance(steps, int) and isinstance(batch, int) else None


@dataclass(frozen=True)
class _Result:
    """What one run came to."""

    scores: Scores
    images: int | None
    data: str
    count: int | None
    """Images there are of that name, without repetition."""
    unlike: str
    """Settings that it has and the sweep does not ask for."""


def summarise(sweep: Sweep, baseline: Mapping[str, str] | None = None) -> list[Summary]:
    """Mean and interval over seeds of every score of a group of finished runs, ranked at equal budget.

    With a `baseline`, such as {"alpha_min": "1.0"}, also the difference to the runs that have these settings, are
    otherwise the same, and saw as many images; paired by seed. Runs of other settings or images than the rest are told,
    and compared among themselves; one whose files cannot be read has failed.
    """
    results = _results(sweep)
    made = _made(results)
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = {}
    for trial in sweep.trials:
        if trial.name in results:
            groups.setdefault(trial.group, []).append(trial)
    found = []
    for group, trials in groups.items():
        own = {trial.settings.get("seed", ""): results[trial.name] for trial in trials}
        images = results[trials[0].name].images
        apart = ", ".join(dict.fromkeys(made[trial.name] for trial in trials if made[trial.name]))
        for name, unit in {name: unit for r in own.values() for name, (_, unit) in r.scores.items()}.items():
            by_seed = {seed: r.scores[name][0] for seed, r in own.items() if name in r.scores}
            if len(by_seed) < len(own):
                lack = ", ".join(seed for seed in own if seed not in by_seed)
                _tell(f"{name} is over {len(by_seed)} of {len(own)} seeds of {group_name(group)}: seed {lack} has none")
            interval = mean_and_interval(list(by_seed.values()))
            found.append(Summary(dict(group), name, unit, *interval, by_seed, images, made=apart))
    blind = LOSS if sweep.kind == "pretrain" else ""  # the loss of pretraining does not tell which features are good
    found = [replace(s, rank=_rank(s, found)) if s.score != blind else s for s in found]
    told = {name: sweep.told(name, text) or text for name, text in (baseline or {}).items()}
    return compare(found, told) if told else found


def _results(sweep: Sweep) -> dict[str, _Result]:
    """Name -> result, of all finished runs that can be read; the others are marked as failed."""
    found = {}
    for trial in sweep.trials:
        if not sweep.done(trial):
            continue
        try:
            found[trial.name] = _result(sweep, trial)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            told = isinstance(error, NotARun)
            trial.error = reason if told else f"the run {sweep.run_folder(trial)} cannot be read: {reason}"
            trial.status = "failed"
    return found


def _result(sweep: Sweep, trial: Trial) -> _Result:
    run = sweep.run_folder(trial)
    scores, images = scores_of(run), images_seen(run)
    if not (run / "config.yaml").exists():
        return _Result(scores, images, "", None, "")
    read_run(run)  # for what the page shows of it
    settings = read_flat(run / "config.yaml")
    epochs = settings.get("epochs")
    count = round(images / epochs) if images and isinstance(epochs, int | float) and epochs else None
    return _Result(scores, images, str(settings.get("data", "")), count, _unlike(sweep, trial, run))


def _unlike(sweep: Sweep, trial: Trial, run: Path) -> str:
    """Settings of a run that are others than those asked for: a file of settings was edited, say."""
    config, there = read_config(run / "config.yaml"), read_flat(run / "config.yaml")
    fresh = type(config)().settings()
    free = {f.name for f in fields(config.machine)} | {"epochs", "batch_size"}  # which come to what the images allow
    found = []
    for name, asked in (sweep.shared | trial.settings).items():
        default = same_value(asked, text_of(fresh.get(name)))
        if name not in there or name in free or default or asked in ("auto", "None"):
            continue
        own = text_of(there[name])
        if not same_value(own, asked) and not same_value(own, sweep.meaning(name, asked)):
            found.append(f"{name} {own}")
    return ", ".join(found)


def _made(results: Mapping[str, _Result]) -> dict[str, str]:
    """Name -> what a run was made with that is not the same in all, which is told."""
    counts: dict[str, set[int | None]] = {}
    for result in results.values():
        counts.setdefault(result.data, set()).add(result.count)
    made = {}
    for name, result in results.items():
        several = len(counts[result.data]) > 1 and result.count is not None
        images = f"{result.count:,} images of {result.data}" if several else ""
        made[name] = ", ".join(part for part in (result.unlike, images) if part)
    for text in dict.fromkeys(filter(None, made.values())):
        names = "; ".join(name for name, own in made.items() if own == text)
        _tell(f"not all runs are alike, and only like ones are compared; made with {text}: {names}")
    return made


def _tell(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def compare(found: Sequence[Summary], baseline: Mapping[str, str]) -> list[Summary]:
    """The same with their differences to the baseline."""
    return [replace(s, difference=_difference(s, found, baseline)) for s in found]


def direction(score: str, unit: str) -> int:
    """1 where more is better, -1 where less is, 0 where it is neither."""
    return -1 if score.startswith(_LESS_IS_BETTER) else 1 if unit == "%" else 0


def _rank(s: Summary, found: Sequence[Summary]) -> int | None:
    way = direction(s.score, s.unit)
    if not way or math.isnan(s.mean):
        return None
    own = (s.score, s.images, s.made, s.settings.get("data"))
    rivals = [r for r in found if (r.score, r.images, r.made, r.settings.get("data")) == own]
    return 1 + sum(way * r.mean > way * s.mean for r in rivals)


def _difference(s: Summary, found: Sequence[Summary], baseline: Mapping[str, str]) -> Difference | None:
    wanted = {name: baseline.get(name, value) for name, value in s.settings.items()}
    for other in found:
        alike = (other.score, other.images, other.made) == (s.score, s.images, s.made)
        if alike and _same(other.settings, wanted):
            shared = [seed for seed in s.by_seed if seed in other.by_seed]
            if other.settings == s.settings or not shared:
                return None
            mean, ci95 = mean_and_interval([s.by_seed[seed] - other.by_seed[seed] for seed in shared])
            return Difference(mean, ci95, len(shared))
    return None


def _same(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    return a.keys() == b.keys() and all(same_value(a[name], b[name]) for name in a)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half width of its 95 % interval by Student's t; NaN for a single value."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))


# ---------------------------------------------------------------- on disk


def write_summary(folder: Path, found: Sequence[Summary]) -> Path:
    """summary.json and summary.csv in the sweep's folder."""
    rows = [_row(s) for s in found]
    write_text(folder / "summary.json", json.dumps(rows, indent=1) + "\n")
    text = io.StringIO()
    names = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("settings", "by_seed")))
    writer = csv.DictWriter(text, [*names, *columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row["settings"], **row} for row in rows)
    write_text(folder / "summary.csv", text.getvalue())
    return folder / "summary.csv"


def _row(s: Summary) -> dict[str, Any]:
    row: dict[str, Any] = {
        "settings": s.settings, "score": s.score, "unit": s.unit, "mean": _or_none(s.mean), "ci95": _or_none(s.ci95),
        "seeds": s.seeds, "images": s.images, "rank": s.rank,
        "by_seed": {seed: _or_none(value) for seed, value in s.by_seed.items()},
    }  # fmt: skip
    if s.difference is not None:
        d = s.difference
        row |= {"difference": _or_none(d.mean), "difference_ci95": _or_none(d.ci95), "difference_seeds": d.n}
    return row | ({"made": s.made} if s.made else {})


def read_summary(path: Path) -> list[Summary]:
    """From a summary.json."""
    found = []
    for row in json.loads(path.read_text("utf-8")):
        mean, ci95, to_baseline, spread = (
            _number(row.get(k)) for k in ("mean", "ci95", "difference", "difference_ci95")
        )
        by_seed = {seed: _number(value) for seed, value in row["by_seed"].items()}
        difference = Difference(to_baseline, spread, row["difference_seeds"]) if "difference" in row else None
        about = row["settings"], row["score"], row["unit"]
        found.append(Summary(*about, mean, ci95, by_seed, row["images"], row["rank"], difference, row.get("made", "")))
    return found


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
