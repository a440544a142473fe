"""What the features of a diffusion model are worth, by layer and noise level.

A diffusion model sees noised images: `x_t = a(t) x_0 + s(t) eps`. Its features of an image are those of x_t at a level
t, without a label, and where they are best, in depth and in noise, has to be found: every layer at every level is a
candidate, and held-out training images choose. Noise levels take the place of read-outs: "t=0.05".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from residua.data import DataError, Preprocessing, Source, Splits, load, mixing, rng
from residua.data.autoencoder import Autoencoder, open_autoencoder
from residua.data.feed import OnBadImage, Progress
from residua.nn import SiT, UViT, create_model
from residua.nn.diffusion import noised, process_config

from .cache import weights_hash
from .features import (
    Cache,
    Layers,
    Subject,
    View,
    open_cache,
    open_feed,
    pick_split,
    pixel_subject,
    read_features,
    structure,
    with_test,
)
from .knn import check_votes
from .protocols import PROTOCOLS, ProbeResult, Protocol, resolve_recipe
from .reading import Column, Reader, frozen, resolve_layers, undisturbed
from .report import MODEL, PIXELS, RANDOM, Report
from .scoring import add_knn, add_probe, add_rank
from .suite import has_classes, probe_features

TIMES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Noise levels that are looked at unless told."""


def is_diffusion(model: nn.Module) -> bool:
    return isinstance(model, UViT | SiT)


def level(t: float) -> str:
    """A noise level's name."""
    return f"t={t:g}"


def block_names(model: Any) -> list[str]:
    """The steps that end a block, first to last."""
    return [step.name for step in model.steps() if step.name.endswith(".mlp")]


@dataclass(frozen=True)
class NoisedReader:
    """Mean of the patch tokens after some blocks, of images noised to some levels; keyed by `Column`.

    The noise of an image depends on the seed, the split and the image's number, and is the same at all levels. Test
    images have noise of their own: else a probe could know the noise of a training image of the same number again,
    and, where images are sorted by class, the class by it.
    """

    model: Any
    columns: Sequence[Column]
    seed: int
    autoencoder: Autoencoder | None = None
    part: str = "train"
    numbered = True

    def __call__(self, images: Tensor, index: Tensor) -> dict[Any, Tensor]:
        with torch.autocast(images.device.type, enabled=False):
            x_0 = images if self.autoencoder is None else self.autoencoder.encode(images)
            stream = "probe" if self.part == "train" else f"probe {self.part}"
            eps = mixing.normal(rng.uniform(self.seed, 0, index, x_0[0].numel(), stream)).view_as(x_0)
        out: dict[Any, Tensor] = {}
        for name in dict.fromkeys(name for name, _ in self.columns):
            self._read(name, x_0, eps, out)
        return out

    def _read(self, name: str, x_0: Tensor, eps: Tensor, out: dict[Any, Tensor]) -> None:
        model = self.model
        wanted = {block_names(model)[layer]: layer for own, layer in self.columns if own == name}
        t = x_0.new_full((len(x_0),), float(name.removeprefix("t=")))
        with torch.autocast(x_0.device.type, enabled=False):
            x_t = noised(model.process, x_0, eps, t)

        def tap(step: str, stream: Tensor) -> None:
            if step in wanted:
                out[name, wanted[step]] = stream[:, model.num_prefix_tokens :].float().mean(1)

        model.forward_features(x_t, model.process.time_input(t), tap=tap)


def noised_subject(
    model: Any,
    layers: Sequence[int],
    times: Sequence[float],
    seed: int,
    autoencoder: Autoencoder | None = None,
    part: str = "train",
) -> Subject:
    """Layers x noise levels of a diffusion model, on images of one split."""

    def reader(columns: Sequence[Column]) -> Reader:
        return NoisedReader(model, columns, seed, autoencoder, part)

    def identity() -> dict[str, Any]:
        from residua import __version__

        space = autoencoder.space.to_dict() if autoencoder else None
        own = {"process": process_config(model.process), "autoencoder": space, "noise": [seed, part]}
        return {"weights": weights_hash(model), "config": structure(model), "residua": __version__} | own

    return Subject(reader, [(level(t), i) for t in times for i in layers], identity)


def evaluate_diffusion(
    model: nn.Module,
    data: str | Splits,
    *,
    times: Sequence[float] = TIMES,
    layers: Layers = "all",
    knn: bool = True,
    probe: Protocol | None = "simple",
    rank: bool = False,
    k: int | Sequence[int] = 20,
    temperature: float = 0.07,
    learning_rates: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
    epochs: int | None = None,
    views: int = 3,
    baselines: bool = True,
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
    """Score the frozen features of a diffusion model, blocks x noise levels, beside the untrained model and pixels.

    One pass over the images computes all; all heads of the probe train together, and (layer, t) is chosen on held-out
    training images: `report.value("linear probe")` is the chosen one's, on test images. `times` are noise levels in
    (0, 1); other options are those of `suite.evaluate`, and features are the mean of the patch tokens.

    >>> report = evaluate_diffusion(residua.load("runs/d"), "cifar100", probe="lbfgs")
    >>> report.value("linear probe"), best(report)
    """
    model = accelerator.unwrap_model(model) if accelerator is not None else model
    device = accelerator.device if device is None and accelerator is not None else device
    data, note = with_test(load(data) if isinstance(data, str) else data)
    levels = check_times(times)
    view = View(_preprocessing(model, data.train), batch_size, seed=seed, bf16=bf16)
    options = {"learning_rates": learning_rates, "weight_decays": weight_decays, "epochs": epochs}
    _check_probe(probe, len(data.train), options)
    check_votes(k if knn else 1, temperature)
    chosen = resolve_layers(layers, len(block_names(model)))
    if getattr(model, "label_dropout", None) == 0:
        warnings.warn(
            "this model was trained with label_dropout 0, so never without labels, but its features are read without: "
            'what stands for "no label" is as it was initialised',
            stacklevel=2,
        )
    results: dict[str, ProbeResult | None] = {}
    with frozen(model, device) as where:
        space = getattr(model, "autoencoder", None)
        autoencoder = open_autoencoder(space, where) if space else None
        fresh = untrained(model, seed).to(where) if baselines else None

        def readers(part: str) -> dict[str, Subject]:
            found = {MODEL: noised_subject(model, chosen, levels, seed, autoencoder, part)}
            if fresh is not None:
                found[RANDOM] = noised_subject(fresh, chosen[-1:], levels, seed, autoencoder, part)
                found[PIXELS] = pixel_subject(16)
            return found

        open_with = partial(open_feed, device=where, on_bad_image=on_bad_image, progress=progress)
        read = partial(read_features, open_with=open_with, cache=open_cache(cache), on_bad_image=on_bad_image)
        seen = {"train": views if probe == "cached" and data.train.labels is not None else 0, "test": 0}
        sources = {name: pick_split(data, name, limit, seed) for name in seen}
        whole = {
            part: read(readers(part), source, view=replace(view, views=seen[part]))
            for part, source in sources.items()
            if source is not None
        }
    subjects = {name: (train, whole.get("test", {}).get(name)) for name, train in whole["train"].items()}
    if not has_classes(*subjects[MODEL]):
        raise DataError(f"{data.name} has no labels of two classes or more: there is nothing to probe for")
    if probe is not None:
        results = probe_features(subjects, probe, options | {"seed": seed, "device": where, "progress": progress})
    train, test = subjects[MODEL]
    report = Report(
        data=data.name, readout=", ".join(map(level, levels)), layers=chosen, img_size=view.preprocessing.img_size,
        n_train=len(train), n_test=0 if test is None else len(test), test=note, seed=seed,
    )  # fmt: skip
    if knn:
        add_knn(report, subjects, k, temperature, where)
    for name, result in results.items():
        add_probe(report, name, subjects[name][0], result, str(probe))
    if rank:
        add_rank(report, subjects, geometry=False)
    return report


def check_times(times: Sequence[float]) -> list[float]:
    """Noise levels in order, each once."""
    if not times or not all(0 < t < 1 for t in times):
        raise ValueError(f"noise levels {', '.join(map(str, times)) or 'none'}: give numbers between 0 and 1")
    return sorted(set(times))


def _check_probe(probe: str | None, n: int, options: dict[str, Any]) -> None:
    if probe == "mae":
        raise ValueError("the mae probe sees new views in every epoch; of diffusion models: simple, cached, lbfgs")
    if probe is not None and probe not in PROTOCOLS:
        raise ValueError(f"unknown probe protocol {probe!r}; there are {', '.join(PROTOCOLS)}")
    if probe is not None:
        resolve_recipe(probe, n, **options)


def _preprocessing(model: nn.Module, train: Source) -> Preprocessing:
    """The model's own, checked against the images."""
    if not is_diffusion(model):
        raise ValueError(f"a {type(model).__name__} is no diffusion model: residua.evaluate scores it")
    own: Any = getattr(model, "preprocessing", None)
    if own is None or getattr(model, "process", None) is None:
        raise ValueError("this model lacks a process or preprocessing: set model.process and model.preprocessing")
    if train.channels != own.in_chans:
        raise DataError(f"{train.name} has {train.channels} channels, the model takes {own.in_chans}")
    return own


def untrained(model: Any, seed: int = 0) -> Any:
    """The same architecture at random initialisation, its branches too."""
    with undisturbed(seed):
        fresh: Any = create_model(**model.config | {"zero_init": False}).eval()
    fresh.process = model.process
    return fresh


def best(report: Report, metric: str = "linear probe") -> tuple[int, str]:
    """Layer and noise level: those that held-out images chose; the highest where they chose none.

    Of several k of kNN the smallest counts, as in `grid`: the highest of them would be the test images' choice.
    """
    own = [s for s in report.scores if (s.metric, s.subject) == (metric, MODEL)]
    if not own:
        raise KeyError(f"no {metric!r} in this report")
    own = [s for s in own if s.settings.get("k") == own[0].settings.get("k")]
    sound = [s for s in own if not math.isnan(s.value)] or own
    top = max(sound, key=lambda s: (bool(s.settings.get("selected") or s.settings.get("chosen")), s.value))
    return top.layer, str(top.settings["readout"])


def grid(report: Report, metric: str = "linear probe") -> dict[int, dict[str, float]]:
    """Layer -> noise level -> value; of several k of kNN the smallest."""
    found: dict[int, dict[str, float]] = {layer: {} for layer in report.layers}
    for s in report.scores:
        if (s.metric, s.subject) == (metric, MODEL):
            found[s.layer].setdefault(str(s.settings["readout"]), s.value)
    return found


MARKED = ("linear probe", "kNN")
"""Where a star marks what held-out training images chose; a rank is no score, and none of it is marked."""


def grid_table(report: Report, metric: str = "linear probe") -> Table:
    """Layers down, noise levels across; of accuracies the one to quote is marked."""
    levels = report.readout.split(", ")
    own = next(s for s in report.scores if (s.metric, s.subject) == (metric, MODEL))
    star, digits = (best(report, metric), 1) if metric in MARKED else (None, 2)
    caption = "(*) chosen on held-out training images" if metric in MARKED else f"of the {own.settings['of']} images"
    title = f"{own.name}, {own.unit}: {report.data}, {report.n_train:,} train and {report.n_test:,} test images"
    table = Table(title=title, caption=f"{caption}; mean of patch tokens", title_justify="left", caption_justify="left")
    for heading in ("layer", *levels):
        table.add_column(heading, justify="right")
    for layer, row in grid(report, metric).items():
        cells = [f"{row.get(name, math.nan):.{digits}f}{' *' * ((layer, name) == star)}" for name in levels]
        table.add_row(str(layer), *cells, end_section=layer == report.layers[-1])
    fresh = {s.settings["readout"]: s for s in report.scores if (s.metric, s.subject) == (metric, RANDOM)}
    plain = [s for s in report.scores if (s.metric, s.subject) == (metric, PIXELS)]
    if fresh:
        table.add_row(f"{RANDOM}, last", *(f"{fresh[name].value:.{digits}f}" for name in levels))
    if plain:
        table.add_row(PIXELS, f"{plain[0].value:.{digits}f}", *[""] * (len(levels) - 1))
    return table
