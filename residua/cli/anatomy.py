"""`residua anatomy` and `residua ujm`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from tyro.conf import Positional

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
    say,
    show,
)

if TYPE_CHECKING:
    from residua.anatomy.study import Moment


@dataclass(frozen=True)
class AnatomyOptions:
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


def anatomy(args: list[str]) -> None:
    """Measure a network."""

    import residua
    from residua.adapt import is_name
    from residua.anatomy.study import Look, along, study
    from residua.disk import write_text
    from residua.report.anatomy import anatomy_page
    from residua.train.session import slug

    o = tyro.cli(AnatomyOptions, args=args, prog="residua anatomy")
    run = Path(o.model).expanduser()
    if o.every_checkpoint and not (run / "checkpoints").is_dir():
        raise ValueError(f"--every-checkpoint is for a run, and {o.model} is none: it has no folder checkpoints")
    if o.img_size and not is_name(o.model):
        raise ValueError(f"--img-size is for a model by name: {o.model} has the image size that it was trained with")
    folder = Path(o.out).expanduser() if o.out else run if run.is_dir() else run.parent
    if is_name(o.model) and not o.out:
        folder = Path(f"anatomy-{slug(o.model)}")
    check_folder(folder)
    model = open_any(o.model, o.weights, img_size(o.img_size))
    data = o.data or data_of(o.model)
    splits = residua.data.load(data)
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
    moments = along(run, splits, look, device=device, each=_moment) if o.every_checkpoint else []
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"model": o.model, "data": data}
    values = shown | found.to_dict() | {"checkpoints": [moment.to_dict() for moment in moments]}
    write_text(folder / "anatomy.json", json.dumps(values, indent=1))
    say(f"written: {folder / 'anatomy.json'}")
    of = "test" if splits.test is not None and len(splits.test) else "training"
    score = f"{of} accuracy (%)" if found.parts[0].accuracy is not None else "kNN, k = 20 (%)"
    show(anatomy_page(found, run.resolve().name, folder / "anatomy.html", moments, score), o.open)


def _moment(moment: Moment) -> None:
    scalars = moment.laws.scalars()
    score = "" if moment.score is None else f"  score {moment.score:.1f} %"
    coupling, share = scalars["RA2 coupling"][0], scalars["RA2 diagonal share"][0]
    say(f"step {moment.step:,}{score}  coupling {coupling:.3f}  diagonal share {share:.3f}")


@dataclass(frozen=True)
class UJMOptions:
    """The Unconstrained Jacobians Model: free matrices instead of a network, solved exactly and measured alike."""

    depth: int = 16
    """Number of Jacobians."""
    penalty: Literal["weights", "kinetic"] = "weights"
    """weights: squares of the Jacobians; kinetic: squares of the steps they make."""
    dim: int = 6
    """Dimensions."""
    samples: int = 40
    """Of the Gaussian clouds, over all classes."""
    classes: int = 2
    """Clouds: two at +-e_1, more at e_1, e_2, ..."""
    noise: float = 0.3
    """Of a cloud."""
    lam: float = 0.01
    """Strength of the penalty."""
    lam_w: float = 0.01
    """Strength of the classifier's weight decay."""
    seed: int = 0
    """Of the samples and of where the solver starts."""
    out: str | None = None
    """Folder for ujm.json and ujm.html; default: none are written."""
    open: bool = False
    """Open the page in the browser."""


def ujm(args: list[str]) -> None:
    """Solve and measure the unconstrained model."""
    from residua.anatomy import blobs, measure, solve
    from residua.anatomy.alignment import ujm_blocks
    from residua.disk import write_text
    from residua.report.anatomy import ujm_page

    o = tyro.cli(UJMOptions, args=args, prog="residua ujm")
    if o.open and o.out is None:
        raise ValueError("--open needs --out: the folder that the page is written to")
    if o.out is not None:
        check_folder(Path(o.out).expanduser())
    x, y = blobs(o.dim, o.samples, o.classes, o.noise, o.seed)
    model = solve(x, y, o.depth, penalty=o.penalty, lam=o.lam, lam_w=o.lam_w, seed=o.seed)
    rank = 1 if o.classes == 2 else o.classes  # two classes need one direction
    laws = measure(*ujm_blocks(model), k=min(o.dim, max(4, rank + 1)), classes=rank)
    console.print(laws.table(f"{o.depth} Jacobians of {o.dim} dimensions, {o.penalty} penalty, {o.classes} classes"))
    values = laws.S[0, :, 0]
    say(f"s_1 from {float(values[0]):.4f} (first) to {float(values[-1]):.4f} (last); sum {float(values.sum()):.3f}; "
        f"|<u, v>| {float(laws.left_right[0].mean()):.3f}; {model.accuracy():.1f} % classified right; "
        f"norm of the gradient {model.gradient:.1e}")  # fmt: skip
    if o.out is not None:
        folder = Path(o.out).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        summary = {"loss": model.loss, "gradient": model.gradient, "accuracy": model.accuracy()}
        write_text(folder / "ujm.json", json.dumps(summary | {"laws": laws.to_dict()}, indent=1))
        say(f"written: {folder / 'ujm.json'}")
        show(ujm_page(model, laws, folder / "ujm.html"), o.open)
