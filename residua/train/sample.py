"""Images from a diffusion model.

Image i is a function of the weights, the settings and (seed, i): noise comes from `residua.data.rng`, so any part of a
set of samples can be made anywhere, in any order, and made again; batches of another size differ in rounding alone.
This stands in `train`, not in `nn`, because of that noise, and because training shows samples as it goes.

Precision: a VP model's prediction at t = 1 is divided by a(1) = 0.007 to become an image, so an error of bfloat16
(1e-2) comes out larger than the image itself. With `precision="bf16"` the network therefore still runs in float32
wherever a(t) < 0.1; float16, whose rounding is eight times finer, serves throughout.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from residua.data import Preprocessing, mixing, rng
from residua.data.autoencoder import open_autoencoder
from residua.disk import replacing
from residua.nn import SiT, UViT
from residua.nn.diffusion import SAMPLERS, VP, Denoiser, Process, Steps, clipped, guided, times

Progress = Callable[[int, int], None]
Precision = Literal["float32", "tf32", "bf16", "fp16"]
STEPS = {"euler-maruyama": 1000}  # of a sampler, unless told; 50 of the others
_SAFE = 0.1  # least a(t) at which bfloat16 will do


@dataclass(frozen=True)
class Sampling:
    """How samples are made."""

    sampler: str = "dpm-solver"
    steps: int | None = None
    """None: 1,000 for Euler-Maruyama, 50 for the others."""
    guidance: float = 1.0
    """Classifier-free: 1 is the model of the class itself, more exaggerates it, 0 ignores the label."""
    classes: tuple[int | str, ...] = ()
    """Numbers or names, dealt out in turn: image i is of class `i mod len(classes)`; none: all of them."""
    seed: int = 0
    spacing: Steps | None = None
    """Of the times: "uniform" in t, or in the logarithm of the signal-to-noise ratio, "logsnr"; None: the latter for
    the deterministic samplers of a VP model. There 50 uniform steps end with one from t = 0.02, which smooths away
    what is finer than s(0.02) = 0.08: with the exact denoiser, white noise of deviation 0.1 comes out at 0.08, and with
    logsnr at 0.10."""
    clip: bool | None = None
    """Keep x_0 in [-1, 1] at every step, as DDPM does: without it a model trained too little makes noise. None: for
    pixels, not for latents."""
    precision: Precision | None = None
    """Of the network: float32, tf32 (the same with shorter products, on NVIDIA GPUs), bf16 or fp16; None: fp16 on CUDA,
    else float32."""
    compile: bool = False
    """Compile the network first: half a minute that many samples repay."""


def check_sampling(model: Any, settings: Sampling, device: str | torch.device | None = None) -> Sampling:
    """Settings with everything chosen, or an error that says what does not fit the model; `device`: where it will run,
    by default where the model is."""
    _check_model(model)
    settings = replace(settings, classes=_several(settings.classes))
    if settings.sampler not in SAMPLERS:
        near = difflib.get_close_matches(settings.sampler, SAMPLERS, n=2, cutoff=0.4) or list(SAMPLERS)
        raise ValueError(f"no sampler named {settings.sampler!r}; did you mean {' or '.join(near)}?")
    steps = STEPS.get(settings.sampler, 50) if settings.steps is None else settings.steps
    if not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"steps is {steps}; expected a whole number, at least 1")
    if not 0 <= settings.guidance < math.inf:
        raise ValueError(f"guidance is {settings.guidance}; expected a finite number, at least 0")
    if settings.precision is None:
        where = next(model.parameters()).device if device is None else torch.device(device)
        settings = replace(settings, precision="fp16" if where.type == "cuda" else "float32")
    if settings.precision not in get_args(Precision):
        raise ValueError(f"precision is {settings.precision!r}; choose one of {', '.join(get_args(Precision))}")
    if settings.clip is None:
        settings = replace(settings, clip=getattr(model, "autoencoder", None) is None)
    if settings.spacing is None:
        deterministic = settings.sampler != "euler-maruyama" and isinstance(model.process, VP)
        settings = replace(settings, spacing="logsnr" if deterministic else "uniform")
    if model.num_classes is None:
        if settings.classes or settings.guidance != 1.0:
            raise ValueError("this model was trained without labels: it takes neither classes nor guidance")
        return replace(settings, steps=int(steps))
    if settings.guidance != 1.0 and getattr(model, "label_dropout", None) == 0:
        raise ValueError("this model was trained with label_dropout 0, so never without labels: guidance must stay 1")
    return replace(settings, steps=int(steps), classes=_numbers(model, settings.classes))


def _check_model(model: Any) -> None:
    """Whether a model has what sampling needs."""
    if not isinstance(model, UViT | SiT):
        raise ValueError(f"a {type(model).__name__} makes no samples: give a diffusion model (residua diffuse)")
    if getattr(model, "process", None) is None:
        raise ValueError("this model does not say which process it belongs to: set model.process, to VP() or Flow()")
    if model.preprocessing is None:
        raise ValueError(
            "this model does not say how its numbers become pixels: set model.preprocessing, or, where they are "
            "latents, name their autoencoder (--latents)"
        )


def _several(classes: Any) -> tuple[int | str, ...]:
    """Classes as a tuple, where they may be one name or number, or an array of numbers."""
    given = classes.tolist() if hasattr(classes, "tolist") else classes
    return (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)


def check_numbers(n: int, first: int, batch_size: int | None) -> None:
    """Which images, and how many at once."""
    given = {"n": (n, 1), "first": (first, 0), "batch_size": (1 if batch_size is None else batch_size, 1)}
    for name, (value, least) in given.items():
        if not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} is {value}; expected a whole number, at least {least}")


def _numbers(model: Any, classes: Sequence[int | str]) -> tuple[int, ...]:
    """Labels of classes by number or name; of all, where none are given."""
    names: list[str] = list(getattr(model, "classes", None) or [])
    numbered = bool(names) and all(name.isdecimal() for name in names)  # then text is a name: some may be missing
    found = []
    for given in classes:
        if isinstance(given, str) and given in names:  # a number stays one, whatever classes are called
            found.append(names.index(given))
        elif re.fullmatch(r"-?\d+", str(given)) and not (numbered and isinstance(given, str)):
            found.append(int(given))
        else:
            near = difflib.get_close_matches(str(given), names, n=3, cutoff=0.4) or names[:5]
            raise ValueError(f"no class named {given!r}; did you mean {', '.join(near) or 'a number'}?")
    wrong = [label for label in found if not 0 <= label < model.num_classes]
    if wrong:
        raise ValueError(f"class {wrong[0]} was asked for; the model has {model.num_classes}, 0 to "
                         f"{model.num_classes - 1}")  # fmt: skip
    return tuple(found) or tuple(range(model.num_classes))


def attach_autoencoder(model: Any, name: str, device: str | torch.device = "cpu") -> None:
    """Let a model of latents, which came without its autoencoder, be decoded by this one; or say where the one that it
    was trained with lies now."""
    if getattr(model, "in_pixels", False):
        raise ValueError("this model was trained on pixels: leave --latents out")
    space, own = open_autoencoder(name, torch.device(device)).space, getattr(model, "autoencoder", None)
    if own is not None and replace(space, name=own.name) != own:
        raise ValueError(
            f"{name} is not the autoencoder that this model was trained with ({own.name}, weights {own.weights}): its "
            f"weights are {space.weights}, scale {space.scale:g}, shift {space.shift:g}; leave --latents out, or give "
            "the folder where the right one lies now"
        )
    if space.channels != model.in_chans:
        raise ValueError(f"{name} has latents of {space.channels} channels; the model makes {model.in_chans}")
    side = tuple(n * space.factor for n in model.img_size)
    model.autoencoder, model.preprocessing = space, Preprocessing(side, (0.5,) * 3, (0.5,) * 3)


def labels_of(index: Tensor, settings: Sampling) -> Tensor | None:
    """Class (B,) of every image, where there are classes and they are not ignored; `settings` are checked ones."""
    if not settings.classes or settings.guidance == 0:
        return None
    table = torch.tensor([int(label) for label in settings.classes], device=index.device)
    return table[index % len(table)]


@torch.no_grad()
def generate(model: Any, index: Tensor, settings: Sampling, progress: Progress | None = None) -> Tensor:
    """Images `index` (B,) under checked settings: uint8 (B, C, H, W). Where memory runs out, in halves."""
    try:
        x = _solve(model, index, settings, progress)
        if settings.precision in ("bf16", "fp16") and not _finite(x):
            x = _solve(model, index, replace(settings, precision="float32"), progress)
            if _finite(x):
                warnings.warn(
                    f"{settings.precision} is too coarse for this model: these images are made in float32", stacklevel=2
                )
        if not _finite(x):
            raise ValueError(_not_finite(model, settings))
        return _pixels(model, x)
    except torch.OutOfMemoryError:
        if len(index) == 1:
            raise
    torch.cuda.empty_cache()
    return torch.cat([generate(model, part, settings, progress) for part in index.chunk(2)])


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _not_finite(model: nn.Module, settings: Sampling) -> str:
    """Why there are no images."""
    bad = [name for name, value in model.state_dict().items() if not _finite(value)]
    if bad:
        return f"the model has weights that are not finite ({bad[0]}): it makes no images; take an earlier checkpoint"
    labelled = bool(settings.classes)
    guidance, nearer = f"guidance {settings.guidance:g}, " * labelled, "guidance nearer to 1, " * labelled
    return (
        f"samples are not finite with {guidance}{settings.sampler}, {settings.steps} steps, clip {settings.clip}: try "
        f"{nearer}more steps{'' if settings.clip else ', or clip True'}"
    )


def _solve(model: Any, index: Tensor, settings: Sampling, progress: Progress | None) -> Tensor:
    """From noise to x_0 (B, C, h, w)."""
    process, shape = model.process, (len(index), model.in_chans, *model.img_size)

    def noise(step: int) -> Tensor:
        """Of x_1 for step -1, and what a stochastic sampler adds in a step."""
        u = rng.uniform(settings.seed, step + 1, index, math.prod(shape[1:]), "sample")
        return mixing.normal(u).reshape(shape)

    y = labels_of(index, settings)
    denoise = _denoiser(model, process, y, settings.precision)
    if y is not None:
        denoise = guided(denoise, _denoiser(model, process, None, settings.precision), settings.guidance)
    if settings.clip:
        denoise = clipped(denoise, process)
    assert settings.steps is not None
    assert settings.spacing is not None
    grid = times(process, settings.steps, settings.spacing)
    own = {"noise": noise} if settings.sampler == "euler-maruyama" else {}
    return SAMPLERS[settings.sampler](denoise, process, noise(-1), grid, progress, **own)


def _denoiser(model: Any, process: Process, y: Tensor | None, precision: Precision | None) -> Denoiser:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "float32")

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        safe = half is torch.float16 or (half is not None and float(process.a(t[0])) > _SAFE)
        with torch.autocast(x.device.type, half, enabled=safe):
            return model(x, process.time_input(t), *(() if y is None else (y,))).float()

    return denoise


def _pixels(model: Any, x: Tensor) -> Tensor:
    """x_0 to uint8 (B, C, H, W)."""
    space = getattr(model, "autoencoder", None)
    if space is not None:
        x = torch.cat([open_autoencoder(space, x.device).decode(part) for part in x.split(16)])
        if not _finite(x):
            raise ValueError(f"the autoencoder {space.name} decodes these latents to values that are not finite")
    return (model.preprocessing.denormalize(x) * 255).round().to(torch.uint8)


def default_batch(model: Any, device: torch.device) -> int:
    """Images at once: what keeps a GPU busy, less where images have many patches."""
    tokens = model.grid[0] * model.grid[1]
    return max(8, min(1024, 2**17 // tokens)) if device.type != "cpu" else 64


def sample(
    model: nn.Module,
    n: int,
    *,
    settings: Sampling | None = None,
    first: int = 0,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Tensor:
    """Images `first` to `first + n - 1` of a diffusion model: uint8 (n, C, H, W), on the CPU.

    Options are those of `Sampling`: sampler ("dpm-solver", "ddim", "heun", "euler-maruyama"), steps, guidance, classes
    (a number or name, or several), seed, spacing, clip, precision, compile.

    >>> images = residua.sample(residua.load("runs/d"), 64, steps=25, classes=("cat",), guidance=2.0)
    """
    check_numbers(n, first, batch_size)
    chosen = check_sampling(model, replace(settings or Sampling(), **options), device)
    with evaluating(model, device, chosen) as where:
        done: list[Tensor] = []
        size = batch_size or default_batch(model, where)
        for index in torch.arange(first, first + n, device=where).split(size):
            before = sum(map(len, done))
            told = within(progress, before, len(index), n)
            done.append(generate(model, filled(index, size, chosen), chosen, told)[: len(index)].cpu())
    return torch.cat(done)


def filled(index: Tensor, size: int, settings: Sampling) -> Tensor:
    """A last batch as long as the ones before it where the network is compiled: for one size of batches, then."""
    return torch.cat([index, index[:1].expand(size - len(index))]) if settings.compile else index


def within(progress: Progress | None, before: int, batch: int, total: int) -> Progress | None:
    """Steps of a sampler as images of the whole."""
    if progress is None:
        return None
    return lambda step, steps: progress(before + batch * step // steps, total)


@contextmanager
def evaluating(
    model: nn.Module, device: str | torch.device | None = None, settings: Sampling | None = None
) -> Iterator[torch.device]:
    """The model in evaluation mode, on `device` where one is given, compiled and in the precision that the settings
    ask for; put back afterwards."""
    settings = settings or Sampling()
    home, training = next(model.parameters()).device, model.training
    where = home if device is None else torch.device(device)
    precision, compiled = torch.get_float32_matmul_precision(), model._compiled_call_impl
    convolutions, exact = torch.backends.cudnn.allow_tf32, settings.precision == "float32"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact  # which PyTorch lets convolutions have unless told
    model.eval().to(where)
    if settings.compile:
        model.compile()
    try:
        yield where
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions
        model._compiled_call_impl = compiled
        model.train(training).to(home)


def grid_image(images: Tensor, columns: int | None = None) -> Tensor:
    """uint8 (n, C, H, W) side by side, two pixels apart: (C, rows, columns)."""
    n, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = -(-n // columns)
    sheet = images.new_full((channels, rows * (height + 2) - 2, columns * (width + 2) - 2), 255)
    for i, image in enumerate(images):
        top, left = i // columns * (height + 2), i % columns * (width + 2)
        sheet[:, top : top + height, left : left + width] = image
    return sheet


def save_png(image: Tensor, path: Path) -> None:
    """uint8 (C, H, W), grey or colour; the file is whole or not there."""
    if image.shape[0] not in (1, 3):
        raise ValueError(f"an image of {image.shape[0]} channels is no PNG: write a .npz file instead")
    array = image.permute(1, 2, 0).squeeze(2).numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()
    with replacing(path) as part:
        Image.fromarray(array).save(part, format="PNG")
