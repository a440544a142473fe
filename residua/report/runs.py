"""Runs as reports see them: folders that pretraining wrote, read back."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from residua.evaluate import Report, Score
from residua.evaluate.report import MODEL, NOTHING, PIXELS, RANDOM
from residua.train.config import Pretrain
from residua.train.loop import read_metrics

SUBJECTS = (MODEL, RANDOM, PIXELS)


class NotARun(ValueError):
    """A folder that no pretraining wrote, or one that cannot be read."""


@dataclass
class Run:
    """One run folder. `evaluation` is None where the run was not evaluated."""

    name: str
    path: Path
    config: Pretrain
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    evaluation: Report | None


def read_run(path: str | Path, name: str | None = None) -> Run:
    """A run from its folder."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise NotARun(f"{path} is no run: there is no such folder")
    if not (path / "config.yaml").exists():
        raise NotARun(f"{path} is no run: it holds no config.yaml; give a folder that residua pretrain wrote")
    try:
        config = Pretrain.read(path / "config.yaml")
        environment = _json(path / "environment.json")
        scores = _json(path / "evaluation.json")
        evaluation = Report.from_dict(scores) if scores else None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise NotARun(f"the run {path} cannot be read: {error}") from error
    return Run(name or path.resolve().name, path, config, read_metrics(path), environment, evaluation)


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Several runs, named by as much of their paths as tells them apart."""
    folders = [Path(path).expanduser() for path in paths]
    names = _short_names([folder.resolve() for folder in folders])
    return [read_run(folder, name) for folder, name in zip(folders, names)]


# ---------------------------------------------------------------- scores in words


def show(score: Score | None) -> str:
    """A score as it stands in a table."""
    return NOTHING if score is None else str(score)


def headline(report: Report) -> dict[str, dict[str, Score]]:
    """The scores to quote, name -> subject -> score: of the last layer, for the probe of the one it chose."""
    found: dict[str, dict[str, Score]] = {}
    for score in report.scores:
        best = found.setdefault(score.name, {}).get(score.subject)
        if best is None or _rank(score) > _rank(best):
            found[score.name][score.subject] = score
    return found


def by_depth(report: Report, metric: str, subject: str = MODEL) -> dict[int, float]:
    """A metric by block, for the smallest k where there are several."""
    own = [s for s in report.scores if (s.metric, s.subject) == (metric, subject) and s.value == s.value]
    ks = {s.settings["k"] for s in own if "k" in s.settings}
    return {s.layer: s.value for s in own if not ks or s.settings["k"] == min(ks)}


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
    content = json.loads(path.read_text())
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
