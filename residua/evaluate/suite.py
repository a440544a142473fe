"""Everything at once: what a model's features are worth, beside what costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from residua.data import Feed, Source, Splits, load
from residua.data.feed import OnBadImage
from residua.nn import ViT, create_model, encoder_of

from .features import (
    EncoderReader,
    ImgSize,
    Layers,
    PixelReader,
    View,
    check_readout,
    collect_all,
    describe,
    frozen,
    open_feed,
    pick_split,
    preprocessing_of,
    resolve_layers,
    undisturbed,
)
from .featureset import FeatureSet, Readout
from .knn import knn as knn_score
from .neighbors import nearest_neighbors
from .probe import PROTOCOLS, Protocol, linear_probe, split
from .rank import CollapsedError, entropy_rank, rankme
from .report import MODEL, PIXELS, RANDOM, Report, Score

Subjects = dict[str, tuple[FeatureSet, FeatureSet | None]]
_TEST_SHARE = 0.2  # of the training images, where a labelled data set brings no test split


def evaluate(
    model: nn.Module,
    data: str | Splits,
    *,
    knn: bool = True,
    probe: Protocol | None = "simple",
    rank: bool = True,
    layers: Layers = "last",
    readout: Readout = "tokens",
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    learning_rates: Sequence[float] | None = None,
    epochs: int | None = None,
    views: int = 3,
    baselines: bool = True,
    pixel_size: int = 16,
    neighbors: int = 8,
    img_size: ImgSize | None = None,
    batch_size: int = 256,
    device: str | torch.device | None = None,
    limit: int | None = None,
    seed: int = 0,
    bf16: bool = False,
    on_bad_image: OnBadImage = "error",
    accelerator: Any = None,
) -> Report:
    """Score a frozen encoder; every score stands beside the same encoder untrained and raw pixels.

    kNN and probe need labels of two classes or more; without, there are ranks and `neighbors` nearest
    neighbours to look at. Where labelled data has no test split, a fifth of the training images (stratified,
    by `seed`) is the test set. No `k` exceeds the number of training images. One pass over the images serves
    the model and both baselines. `views` random views per training image are read for the cached probe only.

    >>> report = evaluate(model, "cifar100", probe="lbfgs", layers="all")
    >>> rich.print(report.table()); report.save("scores.json")
    """
    if probe is not None and probe not in PROTOCOLS:
        raise ValueError(f"unknown probe protocol {probe!r}; there are {', '.join(PROTOCOLS)}")
    model = accelerator.unwrap_model(model) if accelerator is not None else model
    device = accelerator.device if device is None and accelerator is not None else device
    data = load(data) if isinstance(data, str) else data
    encoder = encoder_of(model)
    chosen = resolve_layers(layers, encoder.depth)
    view = View(preprocessing_of(model, data.train, img_size), batch_size, seed=seed, bf16=bf16)
    readers: dict[str, Any] = {MODEL: EncoderReader(encoder, chosen, check_readout(readout))}
    with frozen(model, device) as where:
        if baselines:
            readers[RANDOM] = EncoderReader(untrained(encoder, seed).to(where), chosen, readout)
            readers[PIXELS] = PixelReader(pixel_size)
        open_with = partial(open_feed, device=where, view=view, on_bad_image=on_bad_image)
        wanted = views if probe == "cached" and data.train.labels is not None else 0
        subjects = _read_splits(readers, data, replace(view, views=wanted), limit, open_with)
    subjects, labelled, note = _test_set(subjects, seed)
    train, test = subjects[MODEL]
    report = Report(
        data=data.name,
        readout=readout,
        layers=chosen,
        img_size=view.preprocessing.img_size,
        n_train=len(train),
        n_test=0 if test is None else len(test),
        test=note,
        seed=seed,
    )
    if labelled and knn:
        _add_knn(report, subjects, k, temperature, where)
    if labelled and probe:
        options = {"learning_rates": learning_rates, "epochs": epochs, "seed": seed, "device": where}
        _add_probe(report, subjects, probe, options)
    if rank:
        _add_rank(report, subjects)
    if neighbors:
        _add_neighbors(report, test or train, neighbors, seed)
    return report


def untrained(encoder: ViT, seed: int = 0) -> ViT:
    """The same architecture at random initialisation.

    Zero-initialised branches are drawn at random instead: otherwise the network would be its shortcuts alone.
    """
    config: dict[str, Any] = dict(encoder.config)
    if "zero_init" in config:
        config["zero_init"] = False
    with undisturbed(seed):
        return encoder_of(create_model(**config)).eval()


def _read_splits(
    readers: dict[str, Any], data: Splits, view: View, limit: int | None, open_with: Callable[[Source], Feed]
) -> Subjects:
    """(train, test) features of every reader, by one pass over each split; only training images get views."""

    def reader(images: Tensor) -> dict[Any, Tensor]:
        return {(name, i): x for name, read in readers.items() for i, x in read(images).items()}

    found: dict[str, dict[str, FeatureSet]] = {"train": {}, "test": {}}
    for part in found:
        source: Source | None = pick_split(data, part, limit, view.seed)
        if source is None:
            continue
        feed = open_with(source)
        with undisturbed():
            index, features = collect_all(feed, reader, view if part == "train" else replace(view, views=0))
        for name in readers:
            layers = {i: x for (owner, i), x in features.items() if owner == name}
            found[part][name] = describe(feed.source, index, layers)
            found[part][name].readout = "pixels" if name == PIXELS else readers[MODEL].readout
        feed.close()
    return {name: (found["train"][name], found["test"].get(name)) for name in readers}


def _test_set(subjects: Subjects, seed: int) -> tuple[Subjects, bool, str]:
    """The subjects with a test set each, whether there are labels, and where the test set came from."""
    train, test = subjects[MODEL]
    if train.labels is None or len(train.labels.unique()) < 2:
        return subjects, False, "test split" if test else "none"
    if test is not None and test.labels is not None:
        return subjects, True, "test split"
    kept, held = split(train.labels, _TEST_SHARE, seed)
    parts: Subjects = {name: (own.subset(kept), own.subset(held)) for name, (own, _) in subjects.items()}
    return parts, True, f"{_TEST_SHARE:.0%} of the training images"


def _add_knn(
    report: Report, subjects: Subjects, k: int | Sequence[int], temperature: float, device: torch.device
) -> None:
    most = report.n_train
    ks = sorted({min(n, most) for n in ([k] if isinstance(k, int) else k)})
    for name, (train, test) in subjects.items():
        assert test is not None
        for layer in train.layers:
            results = knn_score(train.only(layer), test.only(layer), k=ks, temperature=temperature, device=device)
            for n, result in results.items():
                settings = {"k": n, "T": temperature}
                report.scores.append(Score("kNN", name, layer, result.accuracy, "%", settings))


def _add_probe(report: Report, subjects: Subjects, protocol: Protocol, options: dict[str, Any]) -> None:
    for name, (train, test) in subjects.items():
        assert test is not None
        result = linear_probe(train, test, protocol=protocol, **options)
        report.probes[name] = result.to_dict()
        for layer, accuracy in result.by_layer.items():
            settings = {
                "protocol": protocol,
                "epochs": result.epochs,
                "holdout": result.holdout,
                "selected": layer == result.best.layer,
            }
            report.scores.append(Score("linear probe", name, layer, accuracy, "%", settings))


def _add_rank(report: Report, subjects: Subjects) -> None:
    for name, (train, test) in subjects.items():
        measured = test or train
        for layer in measured.layers:
            x = measured.layer(layer)
            settings = {"n": len(x), "of": "test" if test else "train"}
            try:
                values = entropy_rank(x), rankme(x)
            except CollapsedError:
                values, settings = (0.0, 1.0), settings | {"collapsed": True}
            centred = settings | {"center": "samples"}
            report.scores.append(Score("entropy rank", name, layer, values[0], "nats", centred))
            report.scores.append(Score("RankMe", name, layer, values[1], "", settings))


def _add_neighbors(report: Report, images: FeatureSet, count: int, seed: int) -> None:
    count = min(count, len(images) - 1)
    if count < 1:
        return
    report.neighbors = nearest_neighbors(images, n_queries=count, k=count, seed=seed)
    report.neighbor_ids = images.ids
    report.neighbor_index = images.index
