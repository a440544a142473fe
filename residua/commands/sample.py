"""Make images with a diffusion model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional, arg

from residua.commands.calling import measured, options_of
from residua.commands.console import accelerator_of, console, device_of, note, run_folder, say

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Options:
    """Images from a diffusion model. Image i depends on the weights, the settings and (seed, i) alone: a folder
    that was stopped anywhere is gone on with by the same command, and a larger -n adds to it."""

    model: Positional[str]
    """A run, a checkpoint, or published U-ViT or SiT weights."""
    n: Annotated[int, arg(aliases=["-n"])] = 64
    """How many."""
    out: str | None = None
    """A folder (PNG files), NAME.npz (one array, with labels), or NAME.png (one picture); default: samples in the run,
    in a folder named after step and settings, its end a short hash of all of them; a .npz file of that name where
    images have neither 1 nor 3 channels."""
    sampler: str = "dpm-solver"
    """dpm-solver, ddim, heun, or euler-maruyama, which adds noise at every step."""
    steps: int | None = None
    """Of the sampler; default: 50, for euler-maruyama 1,000."""
    guidance: float = 1.0
    """Of a conditional model: 1 is the class itself, more exaggerates it, 0 ignores the label."""
    classes: tuple[str | int, ...] = ()
    """Of a conditional model: numbers or names, dealt out in turn; default: all."""
    seed: int = 0
    """Of the noise."""
    spacing: Literal["uniform", "logsnr"] | None = None
    """Of the sampler's times: in t, or in the logarithm of the signal-to-noise ratio; default: the latter for the
    deterministic samplers of a VP model, else the former."""
    clip: bool | None = None
    """Keep what the model takes for the image in the range of pixels at every step; default: except for latents."""
    batch_size: int | None = None
    """Images at once; default: from the device, halved where memory runs out."""
    precision: Literal["float32", "tf32", "bf16", "fp16"] | None = None
    """Of the network; default: fp16 on CUDA, else float32. With bf16 steps near pure noise stay in float32."""
    compile: bool = False
    """Compile the network first: half a minute that thousands of samples repay."""
    latents: str | None = None
    """Autoencoder (of the diffusers library, by name or folder) that decodes what published weights make in latents."""
    ema: bool = True
    """Use the moving average of the weights, where the run kept one."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


@overload
def sample(
    model: str | PathLike[str] | nn.Module, n: int = 64, out: None = None, *, progress: bool = False, **options: Any
) -> Tensor: ...
@overload
def sample(
    model: str | PathLike[str] | nn.Module, n: int, out: str | Path, *, progress: bool = False, **options: Any
) -> Path: ...
def sample(
    model: str | PathLike[str] | nn.Module,
    n: int = 64,
    out: str | Path | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Tensor | Path:
    """Images from a diffusion model: uint8 (n, C, H, W), on the CPU; or, with `out`, as the files that `residua sample`
    writes, whose place is returned.

    `model` is a run, a checkpoint, published weights or a model in memory. Image i depends on the weights, the settings
    and (seed, i) alone. `options` are those of `residua sample --help` by their plain names: `sampler`, `steps`,
    `guidance`, `classes` (a number or name, or several), `seed`, `precision`, `batch_size`, ...

    >>> images = residua.sample("runs/d", 64, steps=25, classes=("cat",), guidance=2.0)
    >>> residua.sample(model, 10_000, "samples")
    """
    given = options_of(Options, options, model=model, n=n, out=out)
    return measured(progress, _images, given) if out is None else measured(progress, work, given)


def _images(o: Options) -> Tensor:
    """The images themselves."""
    from residua.train.sample import attach_autoencoder, sample

    model = network(o)
    device = o.device if o.device is None and not isinstance(o.model, str) else device_of(o.device)
    if o.latents:
        attach_autoencoder(model, o.latents, device)
    return sample(model, o.n, settings=asked(o), batch_size=o.batch_size, device=device)


def work(o: Options) -> Path:
    """What the command does."""
    planned = plan(o)
    pre = planned.model.preprocessing
    if make(o, planned) and not _is_picture(planned.out) and pre.in_chans in (1, 3):
        from residua.train.options import trained_on
        from residua.train.samplefiles import described

        folder = planned.out.is_dir()
        source = (trained_on(o.model) if isinstance(o.model, str) else None) or "DATA"
        there = sum(1 for _ in planned.out.glob("*.png")) if folder else described(planned.out).get("n", 0)
        if there > o.n:
            note(f"{planned.out} holds {there:,} samples, from earlier calls: a score of it is of them all")
        out, source = shlex.quote(str(planned.out)), shlex.quote(source)
        side = " ".join(map(str, dict.fromkeys(pre.img_size)))  # once where height and width are the same
        say(f"score:    residua score {out} --reference {source} --reference-split train --img-size {side}")
    return planned.out


@dataclass(frozen=True)
class Plan:
    """Samples of which everything is known but the pixels."""

    model: Any
    settings: Any
    """Checked: a `residua.train.sample.Sampling`."""
    out: Path
    about: dict[str, Any]
    device: Any
    accelerator: Any


def plan(o: Options) -> Plan:
    """Check and choose everything before anything is made."""

    from residua.data.autoencoder import open_autoencoder
    from residua.train.checkpoint import weights_file
    from residua.train.sample import attach_autoencoder, check_sampling
    from residua.train.samplefiles import describe, hash_weights

    model = network(o)
    accelerator, device = accelerator_of(o.device), device_of(o.device)
    if accelerator is not None:
        device = accelerator.device
    if o.latents:
        attach_autoencoder(model, o.latents, device)
    elif (space := getattr(model, "autoencoder", None)) is not None:
        open_autoencoder(space, device)  # whether it is there, before the first samples want it
    settings = check_sampling(model, asked(o), device)
    about = {"weights": hash_weights(model)}
    if isinstance(o.model, str):
        weights = weights_file(Path(o.model).expanduser(), ema=o.ema).resolve()
        about = {"checkpoint": str(weights)} | about
    if o.out:
        return Plan(model, settings, Path(o.out).expanduser(), about, device, accelerator)
    out = _default_out(o, weights, describe(model, settings, o.n) | about)
    if model.preprocessing.in_chans not in (1, 3):  # which are no PNGs
        out = out.with_name(f"{out.name}.npz")
    return Plan(model, settings, out, about, device, accelerator)


def network(o: Options) -> Any:
    """The model to sample from: loaded, or the one in memory."""
    from residua.train.checkpoint import load

    if isinstance(o.model, str):
        return load(o.model, ema=o.ema)
    if o.latents:
        raise ValueError("latents are for weights in a file: a model in memory has its own (model.autoencoder)")
    return o.model


def asked(o: Options) -> Any:
    """The sampler's settings, as `residua.train.sample` has them."""
    from residua.train.sample import Sampling

    return Sampling(o.sampler, o.steps, o.guidance, o.classes, o.seed, o.spacing, o.clip, o.precision, o.compile)


def make(o: Options, planned: Plan) -> bool:
    """Make the images asked for, or those of them that are missing; whether this process is the one that speaks."""
    from residua.train.samplefiles import write_samples

    out, settings, accelerator = planned.out, planned.settings, planned.accelerator
    main = accelerator is None or accelerator.is_main_process
    columns = (TextColumn("{task.percentage:3.0f} %"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (main and console.is_terminal)) as bar:
        task = bar.add_task("", total=o.n)
        try:
            write_samples(
                planned.model, out, o.n, settings, about=planned.about, batch_size=o.batch_size,
                device=planned.device, accelerator=accelerator,
                progress=lambda done, total: bar.update(task, completed=done),
            )  # fmt: skip
        except KeyboardInterrupt:
            if main and out.is_dir():
                note(f"stopped; what is finished waits in {out}, and the same command goes on from there")
            raise
        bar.update(task, completed=o.n)
    if main:
        guidance = f", guidance {o.guidance:g}" if settings.classes else ""
        say(f"{o.n:,} samples ({settings.sampler}, {settings.steps} steps{guidance}, seed {o.seed}): {out}")
    return main


def _default_out(o: Options, weights: Path, made: dict[str, Any]) -> Path:
    """RUN/samples/NAME, or samples/NAME for weights elsewhere; other weights or settings have another name."""
    from residua.train.samplefiles import hash_settings

    run = run_folder(o.model)
    home = Path("samples") if run is None else run / "samples"
    step = weights.parent.name if weights.parent.parent.name == "checkpoints" else weights.stem
    parts = [step, made["sampler"], str(made["steps"]), f"seed{o.seed}"]
    if o.guidance != 1:
        parts.append(f"guidance{o.guidance:g}")
    if 0 < len(o.classes) <= 4 and made["classes"] != "all":
        parts.append("classes" + "+".join(map(str, made["classes"])))
    if not o.ema:
        parts.append("no-ema")
    return home / "-".join([*parts, hash_settings(made)])


def _is_picture(out: Path) -> bool:
    return out.suffix.lower() == ".png"
