"""Score frozen features."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from residua.commands.calling import measured, options_of
from residua.commands.console import (
    Layers,
    accelerator_of,
    bad_images,
    cached,
    console,
    counting,
    data_of,
    device_of,
    img_size,
    layers,
    note,
    open_any,
    opened,
    out_file,
    quickest_probe,
    run_folder,
    say,
    warn_shared,
    writable,
)

if TYPE_CHECKING:
    from torch import nn

    from residua.data import Splits
    from residua.evaluate import Report


@dataclass(frozen=True)
class Options:
    """What frozen features are worth: kNN, linear probe and rank, beside the untrained encoder and raw pixels."""

    model: Positional[str]
    """A run, a checkpoint, published MAE or U-ViT weights, or a model by name: timm:NAME, torchvision:NAME,
    transformers:FOLDER."""
    weights: str | None = None
    """Of a model by name: a file of weights instead of the published ones, or random."""
    data: str | None = None
    """Source of images; default: what the run was trained on."""
    knn: bool = True
    """Weighted nearest neighbours."""
    probe: Literal["auto", "lbfgs", "simple", "cached", "mae", "none"] = "auto"
    """Linear probe: lbfgs (the optimum, fast), simple (one view), cached (the paper's, 4 views), mae (He et al.'s);
    auto, as at the end of residua pretrain: lbfgs on a CPU, else simple; with --epochs or --learning-rates simple."""
    rank: bool = True
    """Entropy rank and RankMe."""
    geometry: bool = False
    """Also participation ratio, stable rank, alpha-ReQ, LiDAR, class separation, silhouette, spectra; per layer."""
    shots: tuple[int, ...] = ()
    """Also kNN with only so many labelled images a class, mean of ten draws: --shots 1 5 10."""
    layers: Layers = ()
    """last, all, or block numbers; default: last, of a diffusion model all."""
    times: tuple[float, ...] = ()
    """Of a diffusion model: noise levels, in (0, 1), at which its layers are read; default: 0.02 0.05 0.1 0.2 0.4."""
    readout: tuple[Literal["tokens", "patches", "cls"], ...] = ("tokens",)
    """tokens: mean of all tokens; patches: mean of patches; cls: the class token. Several are read in one pass. Of a
    diffusion model: always patches."""
    learning_rates: tuple[float, ...] = ()
    """Of the probe, to choose among on held-out training images; for mae per 256 images. Default: the protocol's."""
    weight_decays: tuple[float, ...] = ()
    """Of the probe, to choose among likewise; for lbfgs the L2 penalty."""
    epochs: int | None = None
    """Of the probe; default: the protocol's."""
    k: tuple[int, ...] = (20,)
    """Neighbours that vote."""
    temperature: float = 0.07
    """Of the votes."""
    img_size: tuple[int, ...] = ()
    """Another image size, SIDE or HEIGHT WIDTH; positions are interpolated."""
    batch_size: int = 256
    """Images at once."""
    limit: int | None = None
    """Use at most so many images of each split."""
    seed: int = 0
    """Of the held-out part, the subsets and the random encoder."""
    baselines: bool = True
    """Score the untrained encoder and raw pixels too."""
    on_bad_image: Literal["error", "skip"] | None = None
    """What to do about an unreadable image; default: what the run did, on the images that it was trained on, else
    error."""
    cache_images: str | None = None
    """Read the images from a store at 256 px on their shorter side (more for views above 224 px), made if need be in
    this folder; auto: in the user's cache directory. The scores say so: they differ a little from those of the images
    themselves."""
    cache: bool = True
    """Keep features on disk, so that the next evaluation of the same weights on the same images starts at once."""
    cache_dir: str | None = None
    """Where; default: features in the run, or the user's cache directory for models elsewhere."""
    bf16: bool = False
    """Run the encoder in bfloat16: faster on a GPU, slightly different features."""
    out: str | None = None
    """JSON file; default: in the run, evaluation.json for the images that it was trained on (with --limit, if there is
    none yet), else evaluation-NAME.json; with --cache-images evaluation-NAME-stored.json. Of what is no run nothing is
    kept without it."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


COMMON = (
    "knn", "rank", "k", "temperature", "epochs", "batch_size", "limit", "seed", "baselines", "bf16"
)  # fmt: skip
"""Options that mean the same of encoders and diffusion models, and arrive as they are."""


def evaluate(
    model: str | PathLike[str] | nn.Module,
    data: str | Path | Splits | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Report:
    """Score a frozen encoder or diffusion model, as `residua evaluate` does; every score stands beside the same network
    untrained and raw pixels.

    `model` is a run, a checkpoint, a model by name or a network in memory, `data` a source of images or `Splits`, by
    default what a run was trained on. `options` are those of `residua evaluate --help` by their plain names: `knn`,
    `probe="lbfgs"` (None: no probe), `layers="all"`, `readout=("tokens", "cls")`, `k=(1, 20)`, `shots=5`, `geometry`,
    `limit`, `out`, ... The scores of a run are kept in it. Of a network in memory features are kept only where
    `cache_dir` says. `progress` shows what the terminal shows.

    >>> report = residua.evaluate("runs/a", layers="all", probe="lbfgs")
    >>> report.value("linear probe"), report.value("kNN", "pixels")
    >>> residua.evaluate(model, data="cifar100", probe=None).value("kNN")
    """
    return measured(progress, work, options_of(Options, options, model=model, data=data))


def work(o: Options) -> Report:
    """What the command does."""
    from residua.evaluate import FeatureCache, suite
    from residua.evaluate.diffusion import TIMES, evaluate_diffusion, is_diffusion

    device, size = device_of(o.device), img_size(o.img_size)
    model = open_any(o.model, o.weights, size)
    data = o.data or data_of(o.model)
    where = _where(o, data)
    on_bad_image = o.on_bad_image or bad_images(o.model, data)
    stepwise = o.epochs is not None or o.learning_rates  # which lbfgs has none of
    probes = {"auto": "simple" if stepwise else quickest_probe(device.partition(":")[0]), "none": None}
    accelerator = accelerator_of(o.device)
    splits = cached(opened(data), o.cache_images, model, size, on_bad_image)
    folder = _cache_folder(o)
    cache = None if folder is None else FeatureCache(folder, note)
    options: dict[str, Any] = {name: getattr(o, name) for name in COMMON} | {
        "probe": probes.get(o.probe, o.probe), "on_bad_image": on_bad_image, "cache": cache, "progress": counting,
        "learning_rates": o.learning_rates or None, "weight_decays": o.weight_decays or None,
        "accelerator": accelerator, "device": device if accelerator is None else o.device,  # else each has its own
    }  # fmt: skip
    noised = is_diffusion(model)
    if noised:
        fixed = {"--geometry": o.geometry, "--shots": o.shots, "--img-size": size, "--readout": "cls" in o.readout}
        for name, given in fixed.items():
            if given:
                raise ValueError(f"{name} is not for diffusion models: leave it out")
        chosen = layers(o.layers or ("all",))
        report = evaluate_diffusion(model, splits, times=o.times or TIMES, layers=chosen, **options)
    elif o.times:
        raise ValueError("--times is for diffusion models: there is no noise in what this one sees")
    else:
        options |= {"geometry": o.geometry, "shots": o.shots, "readout": o.readout, "img_size": size}
        report = suite.evaluate(model, splits, layers=layers(o.layers or ("last",)), **options)
    if accelerator is not None and not accelerator.is_main_process:
        return report
    if cache is not None and not noised:
        say(f"features: {'read from' if not cache.computed else 'kept in'} {cache.folder}")
    warn_shared(splits)
    _show_noised(report) if noised else _show(report)
    if where is None:
        say("not kept: --out FILE keeps it, for residua compare")
    else:
        say(f"written: {report.save(where)}")
        if noised:
            _draw(report, where)
    return report


def _show(report: Report) -> None:
    console.print(report.table())
    if (geometry := report.geometry_table()) is not None:
        console.print(geometry)


def _show_noised(report: Report) -> None:
    """Layers x noise levels: a table of each score."""
    from residua.evaluate.diffusion import best, grid_table

    metrics = {s.metric for s in report.scores}
    for metric in ("linear probe", "kNN", "entropy rank"):
        if metric in metrics:
            console.print(grid_table(report, metric))
    if "linear probe" in metrics:
        layer, noise = best(report)
        say(f"linear probe {report.value('linear probe'):.1f} % at layer {layer}, {noise}")


def _draw(report: Report, where: Path) -> None:
    """Heat maps of accuracies beside the JSON file."""
    from residua.evaluate.diffusion import MARKED, best, grid
    from residua.report.curves import noise_heatmap
    from residua.report.figures import save

    for metric in [name for name in MARKED if any(s.metric == name for s in report.scores)]:
        picture = where.with_name(f"{where.stem}-{metric.split()[-1].lower()}.png")
        drawn = noise_heatmap(grid(report, metric), best(report, metric), f"{metric} (%)")
        say(f"picture: {save(drawn, picture)}")


def _where(o: Options, data: str | Splits) -> Path | None:
    """The JSON file: the one asked for, or one in the run.

    evaluation.json is what reports and cards quote: all images that the run was trained on, or some where there is
    nothing better. Anything else gets a name of its own.
    """
    from residua.train.options import trained_on
    from residua.train.session import slug

    if o.out:
        return out_file(o.out, "evaluation.json")
    run = run_folder(o.model)
    if run is None:
        return None
    file = run / "evaluation.json"
    own = trained_on(run) in (None, data)
    if own and not o.cache_images and (o.limit is None or not file.exists()):
        return writable(file)
    more = (f"-{o.limit}" if o.limit else "") + ("-stored" if o.cache_images else "")
    name = slug(data if isinstance(data, str) else data.name)
    return writable(run / f"evaluation-{name}{more}.json")


def _cache_folder(o: Options) -> Path | None:
    """`features` in the run that a model belongs to, if it can be written to; else the user's cache directory. Those of
    a network in memory, which may change with every call, are kept only where that is asked for."""
    from residua.data.arrays import cache_dir

    if o.cache_dir or not o.cache or not isinstance(o.model, str):
        return Path(o.cache_dir) if o.cache_dir and o.cache else None
    path = Path(o.model).expanduser()
    for folder in (path, *path.parents):
        if (folder / "checkpoints").is_dir() and os.access(folder, os.W_OK):
            return folder / "features"
    return cache_dir() / "features"
