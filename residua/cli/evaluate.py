"""`residua evaluate` and `residua embed`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from residua.commands.console import (
    accelerator_of,
    bad_images,
    console,
    counting,
    data_of,
    device_of,
    img_size,
    layers,
    note,
    open_any,
    out_file,
    quickest_probe,
    say,
    warn_shared,
    writable,
)


@dataclass(frozen=True)
class EvaluateOptions:
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
    layers: tuple[str, ...] = ()
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
    cache: bool = True
    """Keep features on disk, so that the next evaluation of the same weights on the same images starts at once."""
    cache_dir: str | None = None
    """Where; default: features in the run, or the user's cache directory for models elsewhere."""
    bf16: bool = False
    """Run the encoder in bfloat16: faster on a GPU, slightly different features."""
    out: str | None = None
    """JSON file; default: in the run, evaluation.json for the images that it was trained on (with --limit, if there is
    none yet), else evaluation-NAME.json. Of what is no run nothing is kept without it."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


_NOT_KEPT = "not kept: --out FILE keeps it, for residua compare"


def evaluate(args: list[str]) -> None:
    """Score a frozen encoder."""
    import residua
    from residua.evaluate import FeatureCache, evaluate
    from residua.evaluate.diffusion import is_diffusion

    o = tyro.cli(EvaluateOptions, args=args, prog="residua evaluate")
    best = device_of(o.device)
    device: str | None = best
    model = open_any(o.model, o.weights, img_size(o.img_size))
    spec = o.data or data_of(o.model)
    where, chosen = _where(o, spec), _chosen(o, spec, best)
    splits = residua.data.load(spec)
    accelerator = accelerator_of(o.device)
    if accelerator is not None:
        device = o.device  # each process has its own unless told
    cache = FeatureCache(_cache_folder(o.model, o.cache_dir), note) if o.cache else None
    if is_diffusion(model):
        return _evaluate_diffusion(o, where, model, splits, device, accelerator, cache, chosen)
    if o.times:
        raise ValueError("--times is for diffusion models: there is no noise in what this one sees")
    report = evaluate(
        model, splits, knn=o.knn, rank=o.rank, geometry=o.geometry, shots=o.shots, layers=layers(o.layers or ("last",)),
        readout=o.readout, k=o.k, temperature=o.temperature, learning_rates=o.learning_rates or None,
        weight_decays=o.weight_decays or None, epochs=o.epochs, img_size=img_size(o.img_size), batch_size=o.batch_size,
        limit=o.limit, seed=o.seed, baselines=o.baselines, bf16=o.bf16,
        device=device, accelerator=accelerator, cache=cache, progress=counting, **chosen,
    )  # fmt: skip
    if accelerator is not None and not accelerator.is_main_process:
        return
    if cache is not None:
        say(f"features: {'read from' if not cache.computed else 'kept in'} {cache.folder}")
    warn_shared(splits)
    console.print(report.table())
    if (geometry := report.geometry_table()) is not None:
        console.print(geometry)
    say(_NOT_KEPT if where is None else f"written: {report.save(where)}")


def _chosen(o: EvaluateOptions, spec: str, device: str) -> dict[str, Any]:
    """The probe by the device, and what the run did about unreadable images; unless told."""
    stepwise = o.epochs is not None or o.learning_rates  # which lbfgs has none of
    probes = {"auto": "simple" if stepwise else quickest_probe(device.partition(":")[0]), "none": None}
    return {"probe": probes.get(o.probe, o.probe), "on_bad_image": o.on_bad_image or bad_images(o.model, spec)}


def _where(o: EvaluateOptions, spec: str) -> Path | None:
    """The JSON file: the one asked for, or one in the run.

    evaluation.json is what reports and cards quote: all images that the run was trained on, or some where there is
    nothing better. Anything else gets a name of its own.
    """
    from residua.train.options import trained_on
    from residua.train.session import slug

    run = Path(o.model).expanduser()
    if o.out:
        return out_file(o.out, "evaluation.json")
    if not (run / "checkpoints").is_dir():
        return None
    file = run / "evaluation.json"
    own = trained_on(run) in (None, spec)
    if own and (o.limit is None or not file.exists()):
        return writable(file)
    return writable(run / f"evaluation-{slug(spec)}{f'-{o.limit}' if o.limit else ''}.json")


def _evaluate_diffusion(
    o: EvaluateOptions,
    where: Path | None,
    model: Any,
    splits: Any,
    device: str | None,
    accelerator: Any,
    cache: Any,
    chosen: dict[str, Any],
) -> None:
    """Layers x noise levels: a table of each score, heat maps of accuracies, JSON."""
    from residua.evaluate.diffusion import MARKED, TIMES, best, evaluate_diffusion, grid, grid_table
    from residua.report.curves import noise_heatmap
    from residua.report.figures import save

    fixed = {"--geometry": o.geometry, "--shots": o.shots, "--img-size": o.img_size, "--readout": "cls" in o.readout}
    for name, given in fixed.items():
        if given:
            raise ValueError(f"{name} is not for diffusion models: leave it out")
    report = evaluate_diffusion(
        model, splits, times=o.times or TIMES, layers=layers(o.layers or ("all",)), knn=o.knn, rank=o.rank,
        k=o.k, temperature=o.temperature,
        learning_rates=o.learning_rates or None, weight_decays=o.weight_decays or None, epochs=o.epochs,
        baselines=o.baselines, batch_size=o.batch_size, device=device, limit=o.limit,
        seed=o.seed, bf16=o.bf16, accelerator=accelerator, cache=cache, progress=counting, **chosen,
    )  # fmt: skip
    if accelerator is not None and not accelerator.is_main_process:
        return
    warn_shared(splits)
    measured = {s.metric for s in report.scores}
    for metric in ("linear probe", "kNN", "entropy rank"):
        if metric in measured:
            console.print(grid_table(report, metric))
    if "linear probe" in measured:
        layer, noise = best(report)
        say(f"linear probe {report.value('linear probe'):.1f} % at layer {layer}, {noise}")
    if where is None:
        return say(_NOT_KEPT)
    say(f"written: {report.save(where)}")
    for metric in [metric for metric in MARKED if metric in measured]:
        picture = where.with_name(f"{where.stem}-{metric.split()[-1].lower()}.png")
        drawn = noise_heatmap(grid(report, metric), best(report, metric), f"{metric} (%)")
        say(f"picture: {save(drawn, picture)}")


def _cache_folder(model: str, given: str | None) -> Path:
    """`features` in the run that a model belongs to, if it can be written to; else the user's cache directory."""
    from residua.data.arrays import cache_dir

    if given:
        return Path(given)
    path = Path(model).expanduser()
    for folder in (path, *path.parents):
        if (folder / "checkpoints").is_dir() and os.access(folder, os.W_OK):
            return folder / "features"
    return cache_dir() / "features"


@dataclass(frozen=True)
class EmbedOptions:
    """Write frozen features with image paths to a parquet file: search, de-duplicate, plot elsewhere."""

    model: Positional[str]
    """A run, a checkpoint, published MAE weights, or a model by name: timm:NAME, torchvision:NAME,
    transformers:FOLDER."""
    data: str
    """Source of images."""
    weights: str | None = None
    """Of a model by name: a file of weights instead of the published ones, or random."""
    out: str = "features.parquet"
    """File to write."""
    layers: tuple[str, ...] = ("last",)
    """last, all, or block numbers."""
    readout: Literal["tokens", "patches", "cls"] = "tokens"
    """tokens: mean of all tokens; patches: mean of patches; cls: the class token."""
    img_size: tuple[int, ...] = ()
    """Another image size, SIDE or HEIGHT WIDTH; positions are interpolated."""
    batch_size: int = 256
    """Images at once."""
    on_bad_image: Literal["error", "skip"] | None = None
    """What to do about an unreadable image; default: what the run did, on the images that it was trained on, else
    error."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


def embed(args: list[str]) -> None:
    """Features as a table."""
    import residua
    from residua.evaluate.diffusion import is_diffusion

    o = tyro.cli(EmbedOptions, args=args, prog="residua embed")
    device, accelerator = device_of(o.device), accelerator_of(o.device)
    if accelerator is not None:
        device = str(accelerator.device)
    model = open_any(o.model, o.weights, img_size(o.img_size))
    if is_diffusion(model):
        raise ValueError(f"{o.model} is a diffusion model, which embed does not read: residua evaluate scores it")
    path = residua.evaluate.embed(
        model, o.data, out_file(o.out, "features.parquet"), layers=layers(o.layers), readout=o.readout,
        img_size=img_size(o.img_size), batch_size=o.batch_size, device=device,
        on_bad_image=o.on_bad_image or bad_images(o.model, o.data), progress=counting,
    )  # fmt: skip
    if accelerator is None or accelerator.is_main_process:
        say(f"written: {path}")
