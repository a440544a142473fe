"""What features are worth along training: every checkpoint of one run or several, measured alike.

found = dynamics(["runs/a", "runs/b", "runs/c"])
found.curve("linear probe", "a")      # epoch -> accuracy
found.correlation()                   # Pearson's r between rank and accuracy over the runs, at each epoch
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from residua.data import Splits, load
from residua.data.source import evenly, fingerprint_of
from residua.disk import write_text
from residua.train.checkpoint import checkpoints, weights_file
from residua.train.checkpoint import load as load_model
from residua.train.config import Pretrain

from .features import Layers
from .featureset import Readout
from .maps import feature_norms, sample_images
from .probe import Protocol
from .suite import evaluate

RANK, PROBE, KNN, NORM = "entropy rank", "linear probe", "kNN", "feature norm"
_FORMAT = 2  # of dynamics.json, and of what its scores mean
_NORM_IMAGES = 64

Runs: TypeAlias = Sequence[str | Path] | Mapping[str, str | Path]
Tell: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """One number of one checkpoint. `layer` is a block's number."""

    run: str
    step: int
    epoch: float
    metric: str
    layer: int
    value: float


@dataclass(frozen=True)
class Correlation:
    """Pearson's r between two metrics over `n` runs at one epoch; NaN where it is undefined, and `why`."""

    epoch: float
    n: int
    r: float
    p: float
    why: str = ""


@dataclass
class Dynamics:
    """A table of points; `notes` say what could not be measured."""

    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(p.run for p in self.points))

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(p.metric for p in self.points))

    def rows(self) -> list[dict[str, Any]]:
        """Plain rows, for pandas or CSV: run, step, epoch, metric, layer, value."""
        return [asdict(point) for point in self.points]

    def curve(self, metric: str, run: str, layer: int | None = None) -> dict[float, float]:
        """Epoch -> value, of the deepest layer measured unless told."""
        own = [p for p in self.points if (p.metric, p.run) == (metric, run) and math.isfinite(p.value)]
        if layer is None and own:
            layer = max(p.layer for p in own)
        return {p.epoch: p.value for p in sorted(own, key=lambda p: p.step) if p.layer == layer}

    def by_layer(self, metric: str, run: str) -> dict[int, dict[float, float]]:
        """Block -> epoch -> value."""
        layers = sorted({p.layer for p in self.points if (p.metric, p.run) == (metric, run)})
        return {i: self.curve(metric, run, i) for i in layers}

    def correlation(self, rank: str = RANK, accuracy: str = PROBE) -> list[Correlation]:
        """Pearson's correlation between two metrics over the runs, at each epoch that any run measured both."""
        pairs: dict[float, list[tuple[float, float]]] = {}
        for run in self.runs:
            x, y = ({round(e, 4): v for e, v in self.curve(m, run).items()} for m in (rank, accuracy))
            for epoch in x.keys() & y.keys():
                pairs.setdefault(epoch, []).append((x[epoch], y[epoch]))
        return [pearson(epoch, *zip(*pairs[epoch])) for epoch in sorted(pairs)]


def pearson(epoch: float, x: Iterable[float], y: Iterable[float]) -> Correlation:
    """`r = cov(x, y) / (sd(x) sd(y))` with its two-sided p-value (scipy); undefined below three runs."""
    from scipy.stats import ConstantInputWarning, pearsonr

    x, y = list(x), list(y)
    nothing = math.nan, math.nan
    if len(x) < 3:
        return Correlation(epoch, len(x), *nothing, why=f"{len(x)} run{'s' * (len(x) != 1)}: three or more are needed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        r, p = (float(v) for v in pearsonr(x, y))
    why = "" if math.isfinite(r) else "one of the two is the same in all runs"
    return Correlation(epoch, len(x), r, p, why)


def dynamics(
    runs: Runs,
    *,
    data: str | None = None,
    knn: bool = True,
    probe: Protocol | None = "lbfgs",
    rank: bool = True,
    layers: Layers = "last",
    readout: Readout = "tokens",
    k: int = 20,
    limit: int | None = 2000,
    seed: int = 0,
    device: str | torch.device | None = None,
    cache: bool = True,
    on_message: Tell = lambda text: None,
) -> Dynamics:
    """Measure every checkpoint of the runs: kNN, probe, ranks, and the norm of the stream by block.

    `runs` are folders, or folders by the name to show. `limit` images of each split are used (None: all).
    What was measured is kept in each run as dynamics.json, so that a second call computes new checkpoints only;
    scores of checkpoints that training has dropped since stay. Other settings, images or versions of Residua start the
    file again; where the images cannot be opened any more, what was measured on them stands.
    """
    from residua import __version__

    wanted = {
        "knn": knn, "probe": probe, "rank": rank, "layers": layers if isinstance(layers, str) else list(layers),
        "readout": readout, "k": k, "limit": limit, "seed": seed,
    }  # fmt: skip
    images = _Images()
    found = Dynamics()
    for name, run in _named(runs).items():
        config = Pretrain.read(run / "config.yaml")
        spec = data or config.data.data
        kept = _Kept(run, {})
        if cache:
            about = {"config": _science(config), "data": spec, "images": images.fingerprint(spec)}
            kept = _Kept.read(run, {"residua": __version__, **about, **wanted})
        for step, folder in _steps(run).items():
            if kept.knows(step, folder):
                continue
            on_message(f"{name}: step {step:,}")
            try:
                kept.scores[step] = measure(load_model(folder), images.load(spec), device=device, **wanted)
            except (ValueError, OSError) as error:
                found.notes.append(f"{name}, step {step:,} could not be measured: {error}")
                continue
            kept.files[step] = _identity(folder)
            if cache and (problem := kept.write()):
                on_message(problem)
        if not kept.scores:
            found.notes.append(f"{name} has no checkpoint that could be measured")
            continue
        per_step = _epochs_per_step(config, run)
        for step, scores in sorted(kept.scores.items()):
            found.points += [Point(name, step, step * per_step, m, i, v) for m, i, v in scores]
    return found


Scores: TypeAlias = list[tuple[str, int, float]]


def measure(model: Any, splits: Splits, *, device: str | torch.device | None = None, **settings: Any) -> Scores:
    """(metric, layer, value) of one model; settings are those of `evaluate`."""
    report = evaluate(model, splits, baselines=False, neighbors=0, device=device, **settings)
    scores = [(s.metric, s.layer, s.value) for s in report.scores]
    norms = feature_norms(model, sample_images(model, splits, _NORM_IMAGES))
    return scores + [(NORM, i, value) for i, value in norms.items()]


def norm_history(runs: Runs, splits: Splits, *, images: int = 32, most: int = 12) -> Dynamics:
    """The norm of the stream by block at up to `most` checkpoints of each run: seconds, where `dynamics` is minutes."""
    found = Dynamics()
    for name, run in _named(runs).items():
        per_step = _epochs_per_step(Pretrain.read(run / "config.yaml"), run)
        folders = list(_steps(run).items())
        for i in evenly(len(folders), most):
            step, folder = folders[i]
            try:
                model = load_model(folder)
                norms = feature_norms(model, sample_images(model, splits, images))
            except (ValueError, OSError) as error:
                found.notes.append(f"{name}, step {step:,} could not be measured: {error}")
                continue
            found.points += [Point(name, step, step * per_step, NORM, layer, v) for layer, v in norms.items()]
    return found


class _Images:
    """Data sets by name, each opened once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Splits] = {}

    def load(self, spec: str) -> Splits:
        if spec not in self._loaded:
            self._loaded[spec] = load(spec)
        return self._loaded[spec]

    def fingerprint(self, spec: str) -> str | None:
        """A key that changes when the images or labels do; None where they cannot be opened."""
        try:
            splits = self.load(spec)
            return fingerprint_of(*(part.stamp() for part in (splits.train, splits.test) if part is not None))
        except (ValueError, OSError):
            return None


def _steps(run: Path) -> dict[int, Path]:
    return {int(folder.name.removeprefix("step-")): folder for folder in checkpoints(run)}


# ---------------------------------------------------------------- what is kept between calls


@dataclass
class _Kept:
    """dynamics.json of a run: the settings, and for each step the scores and which file they are of."""

    run: Path
    settings: dict[str, Any]
    scores: dict[int, Scores] = field(default_factory=dict)
    files: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path, settings: dict[str, Any]) -> _Kept:
        """What was measured with these settings; nothing where the file is absent, broken or of others.

        Where the images cannot be opened, which they were is not asked.
        """
        settings = {"format": _FORMAT, **settings}
        unasked = {"images": None} if settings["images"] is None else {}
        try:
            content = json.loads((run / "dynamics.json").read_text("utf-8"))
            if content["settings"] | unasked != settings:
                return cls(run, settings)
            rows = {int(step): entry for step, entry in content["checkpoints"].items()}
            scores = {
                step: [(str(m), int(i), math.nan if v is None else float(v)) for m, i, v in entry["scores"]]
                for step, entry in rows.items()
            }
            return cls(run, settings, scores, {step: list(entry["file"]) for step, entry in rows.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(run, settings)

    def knows(self, step: int, folder: Path) -> bool:
        return step in self.scores and self.files.get(step) == _identity(folder)

    def write(self) -> str:
        """Save; returns what went wrong, if anything: the scores are good without their file."""
        rows = {
            str(step): {
                "file": self.files[step],
                "scores": [(m, i, v if math.isfinite(v) else None) for m, i, v in scores],
            }
            for step, scores in sorted(self.scores.items())
        }
        try:
            write_text(self.run / "dynamics.json", json.dumps({"settings": self.settings, "checkpoints": rows}))
        except OSError as error:
            return f"cannot keep scores in {self.run}: {error}"
        return ""


def _science(config: Pretrain) -> str:
    """A key of what a run learns: all settings but where and how it is computed."""
    return fingerprint_of({name: group for name, group in asdict(config).items() if name != "machine"})


def _identity(folder: Path) -> list[int]:
    """Size and time of the weights: they change when a step is trained again."""
    stat = weights_file(folder).stat()
    return [stat.st_size, stat.st_mtime_ns]


def _named(runs: Runs) -> dict[str, Path]:
    if isinstance(runs, Mapping):
        return {name: Path(run).expanduser() for name, run in runs.items()}
    folders = [Path(run).expanduser() for run in runs]
    short = [folder.resolve().name for folder in folders]
    return {name if short.count(name) == 1 else str(folder): folder for name, folder in zip(short, folders)}


def _epochs_per_step(config: Pretrain, run: Path) -> float:
    epochs, steps = config.optim.epochs, config.optim.steps
    if not isinstance(epochs, int | float) or not steps:
        raise ValueError(f"{run}/config.yaml does not say how many epochs its steps are: was the run ever started?")
    return epochs / steps
