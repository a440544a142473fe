"""Residual Alignment of a trained network."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from residua.commands.calling import measured, options_of
from residua.commands.console import (
    bad_images,
    check_folder,
    console,
    counting,
    data_of,
    device_of,
    img_size,
    note,
    open_any,
    opened,
    run_folder,
    say,
    show,
)

if TYPE_CHECKING:
    from torch import nn

    from residua.anatomy.study import Anatomy, Moment
    from residua.data import Splits


@dataclass(frozen=True)
class Options:
    """Residual Alignment: what the blocks of a trained network do, measured by the Jacobians of their branches."""

    model: Positional[str]
    """A run or a checkpoint (classifiers, autoencoders, encoders, diffusion models), or a model by name:
    torchvision:resnet18, timm:NAME, transformers:FOLDER."""
    weights: str | None = None
    """Of a model by name: a file of weights instead of the published ones, or random."""
    img_size: tuple[int, ...] = ()
    """Of a model by name: another image size, SIDE or HEIGHT WIDTH."""
    data: str | None = None
    """Source of images; default: what the run was trained on."""
    top: int = 30
    """Singular triplets of every block."""
    images: int = 8
    """Images whose Jacobians are taken, of each split."""
    gauge: Literal["J", "J/alpha"] = "J"
    """Of faded shortcuts: the branch's own Jacobian, or that of the ordinary network it is equivalent to."""
    token: int | None = None
    """Of transformers: the Jacobian of this token alone (0: the class token), which is small; default: all tokens."""
    time: float = 0.1
    """Of diffusion models: the noise level in (0, 1) at which they are looked at."""
    split: Literal["train", "test", "both"] = "both"
    """Which images."""
    every_checkpoint: bool = False
    """Also measure every checkpoint that the run kept (finetune and pretrain --keep 0 keep all), on test images where
    there are some."""
    classes: int | None = None
    """Of RA3: how many classes it was trained on; default: known of classifiers of ours."""
    precision: Literal["float64", "float32"] = "float64"
    """float64 where a rank is claimed; float32 is twice as fast on a CPU, much more on most GPUs."""
    method: Literal["auto", "dense", "formed", "lanczos"] = "auto"
    """dense: form Jacobians and decompose them; formed: form them and find the top by Lanczos; lanczos: never form
    them; auto: by size, dense to about 400 dimensions, formed to about 2,900."""
    budget: float = 2.0
    """GiB that products with Jacobians may take at once."""
    on_bad_image: Literal["error", "skip"] | None = None
    """What to do about an unreadable image; default: what the run did, on the images that it was trained on, else
    error. To skip them, all images are read first."""
    seed: int = 0
    """Of the choice of images, of a diffusion model's noise and of the plane that paths are drawn in."""
    out: str | None = None
    """Folder for anatomy.json and anatomy.html; default: the run."""
    device: str | None = None
    """cuda, cpu, ...; default: cuda where there is one."""
    open: bool = False
    """Open the page in the browser."""


def anatomy(
    model: str | PathLike[str] | nn.Module,
    data: str | Path | Splits | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Anatomy:
    """Measure what the blocks of a trained network do, as `residua anatomy` does: Residual Alignment, by the Jacobians
    of their branches, and Neural Collapse.

    `model` is a run, a checkpoint, a model by name or a network in memory, of which files are written only where `out`
    names a folder; `data` is a source of images or `Splits`, by default what a run was trained on. `options` are those
    of `residua anatomy --help` by their plain names.

    >>> found = residua.anatomy("runs/a", images=2, top=4)
    >>> found.parts[0].laws.scalars(), found.parts[0].laws.verdicts()
    """
    return measured(progress, work, options_of(Options, options, model=model, data=data))


def work(o: Options) -> Anatomy:
    """What the command does."""
    from residua.adapt import is_name
    from residua.anatomy.study import Look, along, study
    from residua.disk import write_text
    from residua.report.anatomy import anatomy_page

    run, name = run_folder(o.model), o.model if isinstance(o.model, str) else type(o.model).__name__
    if o.every_checkpoint and run is None:
        raise ValueError(f"--every-checkpoint is for a run, and {name} is none: it has no folder checkpoints")
    if o.img_size and not is_name(o.model):
        raise ValueError(f"--img-size is for a model by name: {name} has the image size that it was trained with")
    folder = _folder(o)
    if folder is not None:
        check_folder(folder)
    model = open_any(o.model, o.weights, img_size(o.img_size))
    data = o.data or data_of(o.model)
    splits = opened(data)
    if (o.on_bad_image or bad_images(o.model, data)) == "skip":
        splits = replace(splits, train=splits.train.readable(), test=splits.test and splits.test.readable())
    look = Look(
        k=o.top, images=o.images, gauge=o.gauge, token=o.token, time=o.time, precision=o.precision, method=o.method,
        budget=o.budget, classes=o.classes, seed=o.seed,
    )  # fmt: skip
    device = device_of(o.device)
    found = study(model, splits, o.split, look, device=device, progress=partial(counting, "blocks"))
    if found.left_out:
        n = len(found.parts[0].laws.names)
        note(f"of another shape than the {n} blocks compared, only singular values: {', '.join(found.left_out)}")
    for part in found.parts:
        laws = part.laws
        title = f"{len(laws.S)} {part.split} images, {len(laws.names)} blocks, top {laws.S.shape[-1]}, gauge {o.gauge}"
        console.print(laws.table(title))
        if laws.converged < 1:
            note(f"{100 * (1 - laws.converged):.1f} % of the triplets did not converge: trust the leading ones only")
    moments = along(run, splits, look, device=device, each=_moment) if o.every_checkpoint and run is not None else []
    if folder is None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"model": name, "data": data if isinstance(data, str) else data.name}
    values = shown | found.to_dict() | {"checkpoints": [moment.to_dict() for moment in moments]}
    write_text(folder / "anatomy.json", json.dumps(values, indent=1))
    say(f"written: {folder / 'anatomy.json'}")
    title = Path(o.model).expanduser().resolve().name if isinstance(o.model, str) else name
    of = "test" if splits.test is not None and len(splits.test) else "training"
    score = f"{of} accuracy (%)" if found.parts[0].accuracy is not None else "kNN, k = 20 (%)"
    show(anatomy_page(found, title, folder / "anatomy.html", moments, score), o.open)
    return found


def _folder(o: Options) -> Path | None:
    """Where files go: the folder asked for, the run, or one beside a file; none for a network in memory."""
    from residua.adapt import is_name
    from residua.train.session import slug

    if o.out:
        return Path(o.out).expanduser()
    if not isinstance(o.model, str):
        return None
    path = Path(o.model).expanduser()
    return Path(f"anatomy-{slug(o.model)}") if is_name(o.model) else path if path.is_dir() else path.parent


def _moment(moment: Moment) -> None:
    scalars = moment.laws.scalars()
    score = "" if moment.score is None else f"  score {moment.score:.1f} %"
    coupling, share = scalars["RA2 coupling"][0], scalars["RA2 diagonal share"][0]
    say(f"step {moment.step:,}{score}  coupling {coupling:.3f}  diagonal share {share:.3f}")
