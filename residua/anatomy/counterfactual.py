"""Would it have happened otherwise? Small networks that differ in one thing, trained alike and measured alike.

| kind | what differs | what the paper says |
|---|---|---|
| shortcut | shortcuts, or none | alignment vanishes without |
| classes | number of classes | the rank of Jacobians follows it |
| stochastic-depth | probability of dropping branches | alignment stays |
| depth | number of blocks | top singular values fall with the total depth |
| decay | alpha_min | nobody has measured it |

Every network is a run folder of its own, so a study that was stopped goes on where it was, and one that is finished
can be given more values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import torch

import residua.data
from residua.disk import write_text
from residua.evaluate.finetune import finetune
from residua.train.checkpoint import load
from residua.train.session import LOCK

from .alignment import Gauge
from .study import Look, sources_of, study

Kind = Literal["shortcut", "classes", "stochastic-depth", "depth", "decay"]

RECIPE: dict[str, Any] = {
    "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.01, "clip": 1.0, "batch_size": 64, "epochs": 150.0,
    "flip": False, "scale": (1.0, 1.0),
}  # fmt: skip
"""Plain SGD on images as they are, with enough weight decay for alignment to show in a minute of one core."""
MACHINE: dict[str, Any] = {"trackers": (), "keep": 1, "compile": False, "precision": "fp32"}
"""These networks are so small that compiling them takes longer than it saves."""


@dataclass(frozen=True)
class Case:
    """One network: what is varied, and the settings of `residua finetune` that train it."""

    series: str
    """Networks of one series differ in `x` alone."""
    x: float
    seed: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.series}-{self.x:g}-seed-{self.seed}".replace(" ", "-").replace("/", "-")


@dataclass(frozen=True)
class Outcome:
    """A trained and measured network."""

    case: Case
    accuracy: float
    """On test images, in percent."""
    laws: dict[str, dict[str, Any]]
    """Gauge -> `Alignment.to_dict()`."""
    reused: bool = field(default=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return {"case": asdict(self.case), "accuracy": self.accuracy, "laws": self.laws}


@dataclass(frozen=True)
class Point:
    """A number of several networks that differ in their seed, or of one."""

    x: float
    mean: float
    spread: float
    """Standard deviation over networks where there are several, else over samples."""


def plan(
    kind: Kind,
    *,
    network: str = "resmlp",
    data: str = "digits",
    width: int = 128,
    depths: Sequence[int] = (16,),
    alphas: Sequence[float] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5),
    classes: Sequence[int] = (2, 4, 7, 10),
    rates: Sequence[float] = (0.0, 0.25, 0.5),
    seeds: int = 1,
    seed: int = 0,
    **recipe: Any,
) -> list[Case]:
    """The networks of a study, `seeds` of every setting from `seed` on.

    `recipe` overrides `RECIPE`; lists that the kind does not vary are left alone.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"there is no counterfactual {kind!r}; choose one of {', '.join(get_args(Kind))}")
    if kind != "shortcut" and kind != "depth" and len(depths) != 1:
        raise ValueError(f"{kind} varies something else: give one depth, not {len(depths)}")
    if seeds < 1 or min(depths) < 2:
        raise ValueError(f"{seeds} seeds and depths {tuple(depths)}: give at least one seed and two blocks")
    if min(classes) < 2 or not 0 <= min(alphas) <= max(alphas) <= 1 or not 0 <= min(rates) <= max(rates) < 1:
        raise ValueError(
            f"classes {tuple(classes)}, alpha_min {tuple(alphas)} and drop path {tuple(rates)}: give at least 2 "
            "classes, alpha_min in [0, 1] and drop path in [0, 1)"
        )
    if network == "resconv_down" and min(depths) < 4:
        raise ValueError(f"depths {tuple(depths)}: resconv_down needs 4 blocks or more, so that two are of one shape")
    base = RECIPE | {"model": network, "data": data, "width": width, "depth": depths[0], "alpha_min": 1.0} | recipe
    varied: list[tuple[str, float, dict[str, Any]]]
    match kind:
        case "shortcut":
            none = {"alpha_min": 0.0, "schedule": "constant"}
            varied = [("shortcuts", d, {"depth": d}) for d in depths]
            varied += [("no shortcuts", d, {"depth": d} | none) for d in depths]
        case "depth":
            varied = [("depth", d, {"depth": d}) for d in depths]
        case "classes":
            varied = [("classes", c, {"data": _with_classes(data, c)}) for c in classes]
        case "stochastic-depth":
            varied = [("drop path", rate, {"drop_path": rate}) for rate in rates]
        case "decay":
            varied = [("alpha_min", a, {"alpha_min": a}) for a in alphas]
    cases = [
        Case(series, float(x), s, base | own | {"seed": s})
        for series, x, own in varied
        for s in range(seed, seed + seeds)
    ]
    return list({case.name: case for case in cases}.values())  # a value given twice is one network


def _with_classes(data: str, count: int) -> str:
    return f"{data}{'&' if '?' in data else '?'}classes={count}"


def run(
    cases: Sequence[Case],
    folder: Path,
    look: Look | None = None,
    *,
    gauges: Sequence[Gauge] = ("J",),
    split: Literal["train", "test"] = "train",
    device: str = "cpu",
    jobs: int = 1,
    each: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Train and measure every network that is not there yet, each in `folder/NAME`, `jobs` of them at a time."""
    if jobs < 1:
        raise ValueError(f"{jobs} jobs: give at least one")
    if "J/alpha" in gauges and any(case.settings["alpha_min"] == 0 for case in cases):
        raise ValueError("gauge J/alpha divides by alpha, which is 0 in one of the networks: use gauge J alone")
    there = [_check_folder(case, folder / case.name) for case in cases]
    for data in dict.fromkeys(case.settings["data"] for case, done in zip(cases, there) if not done):
        sources_of(residua.data.load(data), split)
    asked = [
        (case, folder / case.name, done, look or Look(), gauges, split, device) for case, done in zip(cases, there)
    ]
    with ExitStack() as stack:
        outcomes: Iterable[Outcome] = starmap(_measure, asked)
        if jobs > 1:
            threads = max(1, torch.get_num_threads() // jobs)
            pool = ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (threads,))
            outcomes = stack.enter_context(pool).map(_measure, *zip(*asked))
        found = []
        for outcome in outcomes:
            each(outcome)
            found.append(outcome)
    return found


def _check_folder(case: Case, home: Path) -> bool:
    """Whether the network is trained already; an error where the folder holds another one."""
    asked = json.loads(json.dumps(case.settings))
    written = home / "case.json"
    if not (home / "config.yaml").exists():  # its training has not begun
        made = {written.name, LOCK, "checkpoints"}
        if home.exists() and any(path.name not in made for path in home.iterdir()):
            raise ValueError(f"{home} is no network of a counterfactual: choose another --out")
        home.mkdir(parents=True, exist_ok=True)
        write_text(written, json.dumps(asked, indent=1))
    saved = json.loads(written.read_text("utf-8"))
    for name in asked.keys() | saved.keys():
        before, now = saved.get(name), asked.get(name)
        if before != now:
            raise ValueError(f"{home} holds a network with {name} {before}, not {now}: choose another --out")
    return (home / "finetune.json").exists()


def _measure(
    case: Case, home: Path, there: bool, look: Look, gauges: Sequence[Gauge], split: Any, device: str
) -> Outcome:
    settings = dict(case.settings)
    if not there:
        begun = (home / "config.yaml").exists()
        options = settings | MACHINE | {"out": str(home), "resume": begun, "cpu": device == "cpu"}
        finetune(options.pop("model"), options.pop("data"), **options)
    accuracy = json.loads((home / "finetune.json").read_text("utf-8"))["accuracy"]
    asked = {"split": split, **asdict(replace(look, per_class=1))}
    cache = home / "laws.json"
    known = json.loads(cache.read_text("utf-8")) if cache.exists() else {}
    laws = known.get("laws", {}) if known.get("look") == asked else {}
    reused = there and set(gauges) <= set(laws)
    missing = [gauge for gauge in gauges if gauge not in laws]
    if missing:
        model, splits = load(home), residua.data.load(settings["data"])
        for gauge in missing:
            part = study(model, splits, split, replace(look, gauge=gauge, per_class=1), device=device).parts[0]
            laws[gauge] = part.laws.to_dict()
        write_text(cache, json.dumps({"look": asked, "laws": laws}))
    return Outcome(case, accuracy, {gauge: laws[gauge] for gauge in gauges}, reused)


def accuracies(outcomes: Sequence[Outcome], series: str) -> list[Point]:
    """Test accuracy over one series, in percent; a single network has no spread."""
    by_x: dict[float, list[float]] = {}
    for outcome in outcomes:
        if outcome.case.series == series:
            by_x.setdefault(outcome.case.x, []).append(outcome.accuracy)
    return [Point(x, fmean(own), stdev(own) if len(own) > 1 else 0.0) for x, own in sorted(by_x.items())]


def points(outcomes: Sequence[Outcome], series: str, number: str, gauge: str = "J") -> list[Point]:
    """A number of the laws over one series, in the order of what is varied."""
    by_x: dict[float, list[dict[str, float]]] = {}
    for outcome in outcomes:
        scalars = outcome.laws[gauge]["scalars"]
        if outcome.case.series == series and number in scalars:
            by_x.setdefault(outcome.case.x, []).append(scalars[number])
    return [
        Point(x, fmean(s["mean"] for s in own), stdev(s["mean"] for s in own) if len(own) > 1 else own[0]["spread"])
        for x, own in sorted(by_x.items())
    ]


def mean_s1(outcomes: Sequence[Outcome], series: str, gauge: str) -> list[Point]:
    """Largest singular value, mean over blocks, of every network of a series; spread over blocks of all of them."""
    by_x: dict[float, list[float]] = {}
    for outcome in outcomes:
        if outcome.case.series == series:
            values = [row[0] for row in outcome.laws[gauge]["singular_values"]]
            by_x.setdefault(outcome.case.x, []).extend(values)
    return [Point(x, fmean(v), stdev(v) if len(v) > 1 else 0.0) for x, v in sorted(by_x.items())]
