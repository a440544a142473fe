"""Everything at once: what a model's features are worth, beside what costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from residua.adapt import Foreign, encoder_of
from residua.adapt import untrained as untrained_model
from residua.adapt.encoder import create_model
from residua.data import Feed, Source, Splits, load
from residua.data.feed import OnBadImage, Progress
from residua.nn import ViT

from .features import (
    Cache,
    ImgSize,
    Layers,
    Subject,
    View,
    encoder_subject,
    frozen,
    open_cache,
    open_feed,
    pick_split,
    pixel_subject,
    preprocessing_of,
    read_features,
    resolve_layers,
    undisturbed,
    with_test,
)
from .featureset import FeatureSet, Readout
from .knn import check_votes
from .online import probe_online
from .probe import linear_probe, moments
from .protocols import PROTOCOLS, ProbeResult, Protocol, resolve_recipe
from .rank import CollapsedError
from .reading import check_readouts
from .report import MODEL, PIXELS, RANDOM, Report
from .scoring import (
    LIDAR_IMAGES,
    LIDAR_VIEWS,
    Subjects,
    add_few_shot,
    add_knn,
    add_lidar,
    add_neighbors,
    add_probe,
    add_rank,
    columns_of,
)

Open = Callable[..., Feed]
E = TypeVar("E", ViT, Foreign)


def evaluate(
    model: nn.Module,
    data: str | Splits,
    *,
    knn: bool = True,
    probe: Protocol | None = "simple",
    rank: bool = True,
    geometry: bool = False,
    shots: Sequence[int] = (),
    layers: Layers = "last",
    readout: Readout | Sequence[Readout] = "tokens",
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    learning_rates: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
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
    cache: Cache = None,
    progress: Progress | None = None,
) -> Report:
    """Score a frozen encoder; every score stands beside the same encoder untrained and raw pixels.

    kNN and probe need labels of two classes or more; without, there are ranks and `neighbors` nearest
    neighbours to look at. Where labelled data has no test split, a fifth of the training images (stratified,
    always the same) is the test set. No `k` exceeds the number of training images. One pass over the images serves
    the model and both baselines, all layers and all read-outs; with `cache`, a folder, a second evaluation needs none.
    `views` random views per training image are read for the cached probe only. The "mae" probe passes the images
    through the encoder again in every epoch. `progress` is told of images and of the probe, as by `extract`.

    `shots` adds kNN with only so many labelled images a class, over ten draws of them. `geometry` adds the other ranks,
    how classes lie, each layer's spectrum, and LiDAR, for which 1,000 training images are read in ten views.

    Of several layers or read-outs the one to use is chosen on held-out training images: by the probe with its
    settings on a tenth, and by kNN on its own (`chosen` among the score's settings) on half of few.

    Accuracies stand with their 95 % interval over the test images (Wilson). Features that are all alike get no
    accuracy: NaN, with `collapsed` among the score's settings.

    >>> report = evaluate(model, "cifar100", probe="lbfgs", layers="all", readout=("tokens", "cls"))
    >>> rich.print(report.table()); report.save("scores.json")
    """
    if probe is not None and probe not in PROTOCOLS:
        raise ValueError(f"unknown probe protocol {probe!r}; there are {', '.join(PROTOCOLS)}")
    check_votes(k if knn else 1, temperature)
    model = accelerator.unwrap_model(model) if accelerator is not None else model
    device = accelerator.device if device is None and accelerator is not None else device
    data, note = with_test(load(data) if isinstance(data, str) else data)
    encoder = encoder_of(model)
    chosen, readouts = resolve_layers(layers, encoder.depth), check_readouts(readout)
    view = View(preprocessing_of(model, data.train, img_size), batch_size, seed=seed, bf16=bf16)
    options = {"learning_rates": learning_rates, "weight_decays": weight_decays, "epochs": epochs}
    if probe is not None:
        resolve_recipe(probe, len(data.train), **options)  # type: ignore[arg-type]
    sources = {name: pick_split(data, name, limit, seed) for name in ("train", "test")}
    _check_shots(shots, sources["train"])
    readers = {MODEL: encoder_subject(encoder, chosen, readouts)}
    results: dict[str, ProbeResult | None] = {}
    with frozen(model, device) as where:
        if baselines:
            readers[RANDOM] = encoder_subject(untrained(encoder, seed).to(where), chosen, readouts)
            readers[PIXELS] = pixel_subject(pixel_size)
        open_with = partial(open_feed, device=where, on_bad_image=on_bad_image, progress=progress)
        wanted = views if probe == "cached" and data.train.labels is not None else 0
        read = partial(read_features, readers, open_with=open_with, cache=open_cache(cache), on_bad_image=on_bad_image)
        whole = {name: read(source, view=_viewed(view, name, wanted)) for name, source in sources.items() if source}
        subjects = {name: (whole["train"][name], whole.get("test", {}).get(name)) for name in readers}
        seen = {}
        if geometry:
            seen = read(_some(sources["train"], seed), view=replace(view, views=LIDAR_VIEWS - 1))
        labelled = has_classes(*subjects[MODEL])
        if labelled and probe == "mae":
            results = _probe_online(readers, subjects, sources, view, open_with, options, progress)
    if labelled and probe is not None and probe != "mae":
        results = probe_features(subjects, probe, options | {"seed": seed, "device": where, "progress": progress})
    train, test = subjects[MODEL]
    report = Report(
        data=data.name,
        readout=", ".join(readouts),
        layers=chosen,
        img_size=view.preprocessing.img_size,
        n_train=len(train),
        n_test=0 if test is None else len(test),
        test=note,
        seed=seed,
    )
    if labelled and knn:
        add_knn(report, subjects, k, temperature, where)
    if labelled:
        add_few_shot(report, subjects, shots, temperature, where)
    for name, result in results.items():
        add_probe(report, name, subjects[name][0], result, str(probe))
    if rank or geometry:
        add_rank(report, subjects, geometry)
    if geometry:
        add_lidar(report, seen)
    if neighbors:
        add_neighbors(report, test or train, neighbors, seed)
    return report


def _check_shots(shots: Sequence[int], train: Source | None) -> None:
    """Whether every class has so many images to draw from."""
    if shots and min(shots) < 1:
        raise ValueError(f"few-shot kNN needs at least one image a class, got shots {list(shots)}")
    if not shots or train is None or train.labels is None or len(set(train.labels.tolist())) < 2:
        return
    classes, sizes = torch.from_numpy(train.labels).unique(return_counts=True)
    least, most = int(sizes.min()), max(shots)
    if most > least:
        which = int(classes[sizes.argmin()])
        raise ValueError(f"{most} images a class were asked for, but class {which} has only {least} training images; "
                         f"ask for at most {least}")  # fmt: skip


def _viewed(view: View, part: str, views: int) -> View:
    """Only training images are seen in random views."""
    return replace(view, views=views if part == "train" else 0)


def untrained(encoder: E, seed: int = 0) -> E:
    """The same architecture at random initialisation.

    Zero-initialised branches are drawn at random instead: otherwise the network would be its shortcuts alone.
    """
    if isinstance(encoder, Foreign):
        with undisturbed(seed):
            twin: Any = Foreign(untrained_model(encoder.model)).eval()
            return twin
    config: dict[str, Any] = dict(encoder.config)
    if "zero_init" in config:
        config["zero_init"] = False
    with undisturbed(seed):
        return encoder_of(create_model(**config)).eval()


def has_classes(train: FeatureSet, test: FeatureSet | None) -> bool:
    """Whether there are labels to learn, of two classes or more, and to test what was learnt."""
    tested = test is not None and test.labels is not None
    return tested and train.labels is not None and len(train.labels.unique()) > 1


def probe_features(subjects: Subjects, protocol: Protocol, options: dict[str, Any]) -> dict[str, ProbeResult | None]:
    """The probe of every subject; None where all its features collapsed."""
    results: dict[str, ProbeResult | None] = {}
    for name, (train, test) in subjects.items():
        assert test is not None
        try:
            results[name] = linear_probe(train, test, protocol=protocol, **options)
        except CollapsedError:
            sides = [_without(part, _collapsed(train)) for part in (train, test)]
            whole = [side for side in sides if side is not None]
            results[name] = linear_probe(*whole, protocol=protocol, **options) if whole else None
    return results


def _probe_online(
    readers: dict[str, Subject],
    subjects: Subjects,
    sources: dict[str, Source | None],
    view: View,
    open_with: Open,
    options: dict[str, Any],
    progress: Progress | None,
) -> dict[str, ProbeResult | None]:
    """The "mae" probe of all subjects, by the same passes over the images."""
    sound = {}
    for name, reader in readers.items():
        gone = _collapsed(subjects[name][0])
        columns = [column for column in reader.columns if column not in gone]
        if columns:
            sound[name] = replace(reader, columns=columns)
    train, test = subjects[MODEL]
    source, other = sources["train"], sources["test"]
    assert test is not None
    assert source is not None
    assert other is not None
    feeds = [open_with(part, view=view, again=True, whole=True) for part in (source, other)]
    rows = [part.index for part in (train, test) if part.index is not None]
    assert len(rows) == 2
    recipe = resolve_recipe("mae", len(train), **options)
    try:
        found = probe_online(sound, feeds, rows, view, recipe, progress=progress)
    finally:
        for feed in feeds:
            feed.close()
    return {name: found.get(name) for name in readers}


def _collapsed(features: FeatureSet) -> list[tuple[str, int]]:
    """Columns in which all images have the same features, as the probe sees it."""

    def alike(x: Tensor) -> bool:
        try:
            moments(x, x.device, "")
        except CollapsedError:
            return True
        return False

    return [(readout, i) for readout, i in columns_of(features) if alike(features.of(readout).layer(i))]


def _without(features: FeatureSet, gone: Sequence[tuple[str, int]]) -> FeatureSet | None:
    """The features less some columns; None where none are left."""
    kept = []
    for readout in features.readouts:
        part = features.of(readout)
        layers = [i for i in part.layers if (readout, i) not in gone]
        if layers:
            views = {i: part.views[i] for i in layers if i in part.views}
            kept.append(replace(part, features={i: part.layer(i) for i in layers}, views=views))
    return replace(kept[0], others={part.readout: part for part in kept[1:]}) if kept else None


def _some(train: Source | None, seed: int) -> Source:
    """The training images that LiDAR looks at."""
    assert train is not None
    found = pick_split(Splits(train.name, train), "train", LIDAR_IMAGES, seed)
    assert found is not None
    return found
