"""What is measured of features, entered into a report: every score with what it depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .featureset import FeatureSet
from .geometry import UNITS, layer_geometry
from .interval import wilson
from .knn import few_shot_knn
from .knn import knn as knn_score
from .neighbors import nearest_neighbors
from .protocols import ProbeResult, split
from .rank import CollapsedError, entropy_rank, lidar, rankme, spectrum
from .report import MODEL, Report, Score

Subjects = dict[str, tuple[FeatureSet, FeatureSet | None]]
"""Name -> features of training and test images."""
LIDAR_IMAGES, LIDAR_VIEWS = 1000, 10  # of its paper
HOW: dict[str, dict[str, Any]] = {"entropy rank": {"center": "samples"}, "silhouette": {"metric": "cosine"}}
HELD_OUT = 2000, 10_000  # training images that choose a layer of kNN: a tenth, within these and half of all


def add_knn(
    report: Report, subjects: Subjects, k: int | Sequence[int], temperature: float, device: torch.device
) -> None:
    """kNN of every subject and layer, for every k that there are training images for."""
    most = report.n_train
    ks = sorted({min(n, most) for n in ([k] if isinstance(k, int) else k)})
    best = _best_columns(subjects[MODEL][0], ks, temperature, device, report.seed)
    for name, (train, test) in subjects.items():
        assert test is not None
        for readout, layer in columns_of(train):
            sides = [part.of(readout).only(layer) for part in (train, test)]
            try:
                results = knn_score(*sides, k=ks, temperature=temperature, device=device)
                found = {n: result.accuracy for n, result in results.items()}
            except CollapsedError:
                found = dict.fromkeys(ks, math.nan)
            for n, accuracy in found.items():
                settings = {"k": n, "T": temperature} | _common(report, readout)
                if name == MODEL and best.get(n) == (readout, layer):
                    settings["chosen"] = True
                _accuracy(report, "kNN", name, layer, accuracy, settings)


def _best_columns(
    train: FeatureSet, ks: Sequence[int], temperature: float, device: torch.device, seed: int
) -> dict[int, tuple[str, int]]:
    """k -> the read-out and layer where held-out training images are told best; nothing where there is no choice."""
    columns = columns_of(train)
    if len(columns) < 2 or len(train.targets.unique()) == len(train):
        return {}
    least, most = HELD_OUT
    kept, held = split(train.targets, min(max(0.1, least / len(train)), most / len(train), 0.5), seed)
    counts = {n: min(n, len(kept)) for n in ks}
    found = {}
    for readout, layer in columns:
        whole = train.of(readout).only(layer)
        own = whole.subset(kept), whole.subset(held)  # copies: of one layer at a time
        try:
            found[readout, layer] = knn_score(
                *own, k=sorted({*counts.values()}), temperature=temperature, device=device
            )
        except CollapsedError:
            continue
    return {n: max(found, key=lambda column: found[column][fewer].accuracy) for n, fewer in counts.items() if found}


def add_probe(report: Report, name: str, train: FeatureSet, result: ProbeResult | None, protocol: str) -> None:
    """One subject's probe at every layer, and which of them held-out images chose."""
    if result is not None:
        report.probes[name] = result.to_dict()
    tested = {(t.readout, t.layer): t for t in result.tested} if result is not None else {}
    for readout, layer in columns_of(train):
        settings: dict[str, Any] = {"protocol": protocol} | _common(report, readout)
        own = tested.get((readout, layer))
        if result is None or own is None:
            settings |= {"epochs": 0, "holdout": 0.0, "selected": False}
            _accuracy(report, "linear probe", name, layer, math.nan, settings)
            continue
        settings |= {name: getattr(result, name) for name in ("epochs", "batch_size", "holdout", "precision")}
        settings |= {"selected": (readout, layer) == (result.best.readout, result.best.layer), "top5": own.top5}
        settings |= {"learning_rate": own.learning_rate, "weight_decay": own.weight_decay}
        _accuracy(report, "linear probe", name, layer, own.accuracy, settings)


def add_few_shot(
    report: Report, subjects: Subjects, shots: Sequence[int], temperature: float, device: torch.device
) -> None:
    """kNN with so many labelled images a class."""
    for name, (train, test) in subjects.items():
        assert test is not None
        for readout, layer in columns_of(train) if shots else ():
            sides = [part.of(readout).only(layer) for part in (train, test)]
            for n in shots:
                settings = {"shots": n, "T": temperature} | _common(report, readout)
                try:
                    r = few_shot_knn(*sides, shots=n, temperature=temperature, seed=report.seed, device=device)
                    settings |= {"k": r.k, "draws": len(r.accuracies), "std": r.std, "ci95": r.ci95}
                    report.scores.append(Score("few-shot kNN", name, layer, r.mean, "%", settings))
                except CollapsedError:
                    settings["collapsed"] = True
                    report.scores.append(Score("few-shot kNN", name, layer, math.nan, "%", settings))


def add_rank(report: Report, subjects: Subjects, geometry: bool) -> None:
    """Ranks of the test images, or of the training images where there are no others; with `geometry` all measures."""
    for name, (train, test) in subjects.items():
        measured = test or train
        for readout, layer in columns_of(measured):
            own = measured.of(readout).only(layer)
            settings = {"n": len(own), "of": "test" if test else "train"} | _common(report, readout)
            try:
                if geometry:
                    values = layer_geometry(replace(own, views={}))
                    if name == MODEL:
                        report.spectra.append({"readout": readout, "layer": layer, "values": spectrum(own).tolist()})
                else:
                    values = {"entropy rank": entropy_rank(own), "RankMe": rankme(own)}
            except CollapsedError:
                values, settings = {"entropy rank": 0.0, "RankMe": 1.0}, settings | {"collapsed": True}
            for metric, value in values.items():
                report.scores.append(Score(metric, name, layer, value, UNITS[metric], settings | HOW.get(metric, {})))


def add_lidar(report: Report, seen: dict[str, FeatureSet]) -> None:
    """LiDAR of images in several views."""
    for name, features in seen.items():
        for readout, layer in columns_of(features):
            settings = {"n": len(features), "views": LIDAR_VIEWS, "of": "train"} | _common(report, readout)
            try:
                value = lidar(features.of(readout).only(layer))
            except CollapsedError:
                value, settings = math.nan, settings | {"collapsed": True}
            report.scores.append(Score("LiDAR", name, layer, value, "", settings))


def add_neighbors(report: Report, images: FeatureSet, count: int, seed: int) -> None:
    """Some images and those nearest to them, to look at."""
    count = min(count, len(images) - 1)
    if count < 1:
        return
    report.neighbors = nearest_neighbors(images, n_queries=count, k=count, seed=seed)
    report.neighbor_ids = images.ids
    report.neighbor_index = images.index


def columns_of(features: FeatureSet) -> list[tuple[str, int]]:
    """Read-outs and layers."""
    return [(readout, layer) for readout in features.readouts for layer in features.of(readout).layers]


def _common(report: Report, readout: str) -> dict[str, Any]:
    """What every score depends on."""
    return {"readout": readout, "n_train": report.n_train, "n_test": report.n_test, "seed": report.seed}


def _accuracy(report: Report, metric: str, subject: str, layer: int, value: float, settings: dict[str, Any]) -> None:
    """An accuracy with its interval; NaN where the features collapsed."""
    if math.isnan(value):
        settings = settings | {"collapsed": True}
    else:
        settings = settings | {"interval": list(wilson(value, report.n_test)), "interval_of": "95 %, Wilson"}
    report.scores.append(Score(metric, subject, layer, value, "%", settings))
