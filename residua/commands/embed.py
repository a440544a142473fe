"""Write features to a table."""

from __future__ import annotations

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
    counting,
    device_of,
    img_size,
    layers,
    open_any,
    opened,
    out_file,
    say,
)

if TYPE_CHECKING:
    from torch import nn

    from residua.data import Splits


@dataclass(frozen=True)
class Options:
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
    layers: Layers = ("last",)
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
    cache_images: str | None = None
    """Read the images from a store at 256 px on their shorter side (more for views above 224 px), made if need be in
    this folder; auto: in the user's cache directory. The file's metadata say so."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


def embed(
    model: str | PathLike[str] | nn.Module,
    data: str | Path | Splits,
    out: str | Path | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Path:
    """Write frozen features to a parquet file, as `residua embed` does; returns the file.

    Columns: `id` (path or number of the image), `split`, `label` and `class` (null where unknown), and one `layer_<i>`
    of float32 vectors per layer. How they were made is in the file's metadata under "residua". `model` is a run, a
    checkpoint, a model by name or a network in memory, `data` a source of images or `Splits`; `options` are those of
    `residua embed --help` by their plain names.

    >>> residua.embed("runs/a", "folder:photos", "features.parquet", layers="all")
    """
    return measured(progress, work, options_of(Options, options, model=model, data=data, out=out))


def work(o: Options) -> Path:
    """What the command does."""
    from residua.evaluate.diffusion import is_diffusion
    from residua.evaluate.table import write_table

    device, accelerator, size = device_of(o.device), accelerator_of(o.device), img_size(o.img_size)
    if accelerator is not None:
        device = str(accelerator.device)
    model = open_any(o.model, o.weights, size)
    if is_diffusion(model):
        name = o.model if isinstance(o.model, str) else f"a {type(o.model).__name__}"
        raise ValueError(f"{name} is a diffusion model, which embed does not read: residua evaluate scores it")
    out, on_bad_image = out_file(o.out, "features.parquet"), o.on_bad_image or bad_images(o.model, o.data)
    path = write_table(
        model, cached(opened(o.data), o.cache_images, model, size, on_bad_image), out, layers=layers(o.layers),
        readout=o.readout, img_size=size, batch_size=o.batch_size, device=device, on_bad_image=on_bad_image,
        progress=counting,
    )  # fmt: skip
    if accelerator is None or accelerator.is_main_process:
        say(f"written: {path}")
    return path
