"""Runs as reports see them: folders that training wrote, read back."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residua.evaluate import Report, Score
from residua.evaluate.report import MODEL, NOTHING, PIXELS, RANDOM
from residua.nn.resnet import RESNETS
from residua.report.page import Cell
from residua.train.config import Pretrain
from residua.train.diffuse_config import Diffuse
from residua.train.finetune_config import Finetune
from residua.train.metrics import scan_metrics
from residua.train.options import read_flat

NOT_SETTINGS = {"out", "resume", "dry_run"}  # where a run went and how it was called, not what it is
SUBJECTS = (MODEL, RANDOM, PIXELS)


class NotARun(ValueError):
    """A folder that no training wrote, or one that cannot be read."""


@dataclass
class Run:
    """One run folder, or the evaluation of a model from elsewhere, which has no `config`.

    `evaluation` is None where the run was not evaluated; `notes` say what could not be read.
    """

    name: str
    path: Path
    config: Pretrain | Finetune | Diffuse | None
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    evaluation: Report | None
    notes: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.config is None else self.config.settings()


def read_run(path: str | Path, name: str | None = None) -> Run:
    """A run from its folder; or what `residua evaluate MODEL --out FILE` wrote, from that file."""
    path = Path(path).expanduser()
    if path.is_file():
        return _read_evaluation(path, name or path.stem)
    if not path.is_dir():
        raise NotARun(f"{path} is no run: there is no such folder")
    if not (path / "config.yaml").exists():
        raise NotARun(f"{path} is no run: it holds no config.yaml; give a folder that training wrote")
    try:
        config = read_config(path / "config.yaml")
        environment = _json(path / "environment.json")
        scores = _json(path / "evaluation.json")
        evaluation = Report.from_dict(scores) if scores else _tested(config, _json(path / "finetune.json"))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise NotARun(f"the run {path} cannot be read: {error}") from error
    name = name or path.resolve().name
    metrics, broken = scan_metrics(path)
    notes = []
    if broken:
        lines = "1 line" if broken == 1 else f"{broken:,} lines"
        notes.append(f"{name}: {lines} of metrics.jsonl cannot be read and {'is' if broken == 1 else 'are'} left out.")
    steps = config.settings()["steps"]
    if metrics and isinstance(steps, int) and (last := max(record["step"] for record in metrics)) < steps:
        notes.append(f"{name}: trained for {last:,} of {steps:,} steps.")
    return Run(name, path, config, metrics, environment, evaluation, notes)


def _read_evaluation(path: Path, name: str) -> Run:
    try:
        return Run(name, path, None, [], {}, Report.from_dict(json.loads(path.read_text("utf-8"))))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise NotARun(
            f"{path} is neither a run's folder nor scores that residua evaluate --out wrote ({error})"
        ) from error


def read_config(path: Path) -> Pretrain | Finetune | Diffuse:
    """The settings of a run, of whichever kind it is."""
    own = read_flat(path)
    kind: type[Pretrain | Finetune | Diffuse] = Diffuse if "process" in own else Pretrain
    return (Finetune if "layer_decay" in own else kind).read(path)


def _tested(config: Pretrain | Finetune | Diffuse, result: dict[str, Any]) -> Report | None:
    """What a classifier's last test found, as scores."""
    if not result:
        return None
    side = config.data.img_size
    assert isinstance(side, int)
    common = {"n_train": result["n_train"], "n_test": result["n_test"], "seed": result["seed"]}
    report = Report(
        config.data.data, result["readout"] or "pooled", [-1], (side, side), result["n_train"], result["n_test"],
        result["test"], result["seed"],
    )  # fmt: skip
    spread = {"interval": result["interval"], "interval_of": "95 %, Wilson"}
    report.scores.append(Score("accuracy", MODEL, -1, result["accuracy"], "%", common | spread).checked())
    if result["top5"] is not None and result["top5"] == result["top5"]:
        report.scores.append(Score("top-5 accuracy", MODEL, -1, result["top5"], "%", common).checked())
    rank = {"n": result["n_test"], "of": "test", "center": "samples"}
    report.scores.append(Score("entropy rank", MODEL, -1, result["entropy_rank"], "nats", common | rank).checked())
    return report


def blocks_of(run: Run) -> int | None:
    """How many residual blocks a classifier has, where its settings say so."""
    if not isinstance(run.config, Finetune):
        return None
    network = run.config.network
    stages = network.stages or RESNETS.get(network.model or "", {}).get("stages")
    return sum(stages) if stages else getattr(network, "depth", None)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Several runs, named by as much of their paths as tells them apart."""
    folders = [Path(path).expanduser() for path in paths]
    names = _short_names([folder.resolve() for folder in folders])
    return [read_run(folder, name) for folder, name in zip(folders, names)]


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Setting -> its value in each run, for those settings alone that are not the same in all that were trained."""
    trained = [run.settings for run in runs if run.config is not None]
    names = dict.fromkeys(name for own in trained for name in own if name not in NOT_SETTINGS)
    differing = [name for name in names if any(own.get(name) != trained[0].get(name) for own in trained)]
    return {name: [run.settings.get(name) for run in runs] for name in differing}


def while_training(run: Run) -> dict[str, dict[float, float]]:
    """Metric -> epoch -> value, of the evaluations that `--eval-every` made while the run trained."""
    found: dict[str, dict[float, float]] = {}
    for record in run.metrics:
        for key, value in record.items():
            if key.startswith("eval/") and isinstance(value, int | float) and isinstance(record.get("epoch"), float):
                found.setdefault(key.removeprefix("eval/").replace("_", " "), {})[record["epoch"]] = float(value)
    return found


# ---------------------------------------------------------------- scores in words


def show(score: Score | None) -> str:
    """A score as it stands in a table."""
    return NOTHING if score is None else str(score)


def score_cell(score: Score | None) -> Cell:
    """A score in a page's table: as it is quoted, with all its digits behind it."""
    return Cell(show(score), None if score is None else score.value)


def name_cell(name: str, unit: str) -> Cell:
    """The name of a row of scores; a CSV file, whose numbers are bare, has the unit here."""
    return Cell(name, f"{name}, {unit}" if unit else name)


def score_label(report: Report, score: Score) -> str:
    """A score's name, with its read-out where that is not the report's first."""
    own = score.settings.get("readout")
    return score.name if own in (None, *_main_readouts(report)) else f"{score.name}, read-out {own}"


def interval_cell(score: Score | None) -> Cell:
    """The 95 % interval of an accuracy over the test images, where it is known."""
    if score is None or "interval" not in score.settings:
        return Cell(NOTHING, None)
    text = "{:.1f} to {:.1f}".format(*score.settings["interval"])
    return Cell(f"{text} %", text)


def headline(report: Report) -> dict[str, dict[str, Score]]:
    """The scores to quote, label -> subject -> score: of the last layer, for the probe of the one it chose."""
    found: dict[str, dict[str, Score]] = {}
    for score in report.scores:
        own = found.setdefault(score_label(report, score), {})
        best = own.get(score.subject)
        if best is None or _rank(score) > _rank(best):
            own[score.subject] = score
    return found


def by_depth(report: Report, metric: str, subject: str = MODEL) -> dict[int, float]:
    """A metric by block, for the first read-out and the smallest k where there are several."""
    own = [s for s in report.scores if (s.metric, s.subject) == (metric, subject) and s.value == s.value]
    own = [s for s in own if s.settings.get("readout", PIXELS) in _main_readouts(report)]
    ks = {s.settings["k"] for s in own if "k" in s.settings}
    return {s.layer: s.value for s in own if not ks or s.settings["k"] == min(ks)}


def _main_readouts(report: Report) -> tuple[str, str]:
    return report.readout.split(", ")[0], PIXELS


def protocol(report: Report) -> str:
    """What the numbers depend on, in a sentence."""
    size = " x ".join(map(str, report.img_size))
    text = f"{report.data}, {size} px, read-out {report.readout}, {report.n_train:,} training"
    text += f" and {report.n_test:,} test images ({report.test})." if report.n_test else " images, none to test on."
    rank = next((s.settings for s in report.scores if s.metric == "entropy rank"), None)
    if rank:
        text += f" Ranks: {rank['n']:,} {rank['of']} images."
    if any(s.metric == "linear probe" for s in report.scores) and len(report.layers) > 1:
        text += " The probe's block was chosen on images held out of the training set."
    return text


def _rank(score: Score) -> tuple[bool, int]:
    return bool(score.settings.get("selected")), score.layer


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds {type(content).__name__}, expected an object")
    return content


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes for all to differ."""
    longest = max(len(path.parts) for path in paths)
    for parts in range(1, longest + 1):
        names = [os.sep.join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise NotARun(f"the same run was given twice: {', '.join(map(str, paths))}")
