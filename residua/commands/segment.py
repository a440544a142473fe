"""Segment images without labels."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from residua.commands.calling import measured, options_of
from residua.commands.console import (
    accelerator_of,
    bad_images,
    cached,
    console,
    data_of,
    device_of,
    img_size,
    note,
    open_any,
    opened,
    out_file,
    run_folder,
    say,
    writable,
)

if TYPE_CHECKING:
    from torch import nn

    from residua.data import Splits
    from residua.evaluate import Segmentation


@dataclass(frozen=True)
class Options:
    """Segmentation without labels: patches of all images clustered by their features, scored against masks."""

    model: Positional[str]
    """A run, a checkpoint, published MAE weights, or a model by name: timm:NAME, torchvision:NAME,
    transformers:FOLDER."""
    weights: str | None = None
    """Of a model by name: a file of weights instead of the published ones, or random."""
    data: str | None = None
    """Source of images; default: what the run was trained on."""
    masks: str | None = None
    """Folder of masks named as the images (PNG: numbers, palette or colours); shapes brings its own."""
    split: Literal["train", "test"] | None = None
    """Which images; default: test where there is one."""
    layer: int = -1
    """Block whose patches to cluster; negative from the end."""
    max_images: int = 200
    """At most so many images, chosen by the seed."""
    img_size: tuple[int, ...] = ()
    """Another image size, SIDE or HEIGHT WIDTH; positions are interpolated."""
    intra: int = 50
    """Neighbours of a patch in its own image; fewer for coarse grids, where 50 patches are all there are."""
    inter: int = 50
    """Neighbours of a patch in the other images."""
    ignore_index: int = 255
    """Mask value that counts nowhere; negative: none."""
    count_absent: bool = False
    """Count classes that no mask shows as 0."""
    seed: int = 0
    """Of the choice of images, the clustering and the random encoder."""
    baselines: bool = True
    """Score the untrained encoder and mean patch colours too."""
    batch_size: int = 256
    """Images at once."""
    on_bad_image: Literal["error", "skip"] | None = None
    """What to do about an unreadable image; default: what the run did, on the images that it was trained on, else
    error."""
    cache_images: str | None = None
    """Read the images from a store at 256 px on their shorter side (more for views above 224 px), made if need be in
    this folder; auto: in the user's cache directory. The scores say so."""
    out: str | None = None
    """JSON file, a PNG lands beside it; default: segmentation.json in the run, with --cache-images
    segmentation-stored.json."""
    device: str | None = None
    """cuda, cpu, ...; default: cuda where there is one."""


COMMON = (
    "masks", "split", "layer", "max_images", "intra", "inter", "count_absent", "seed", "baselines", "batch_size"
)  # fmt: skip
"""Options that arrive as they are."""


def segment(
    model: str | PathLike[str] | nn.Module,
    data: str | Path | Splits | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> Segmentation:
    """Segment images without labels, as `residua segment` does: cluster the patches of all images by their features and
    score the clusters against pixel masks.

    Masks come with the data (`shapes`) or lie in the folder `masks` under the images' names; images without one are
    left out. What the model sees is scored, the central crop, at the resolution of the mask. `model` is a run, a
    checkpoint, a model by name or a network in memory, `data` a source of images or `Splits`, by default what a run was
    trained on. `options` are those of `residua segment --help` by their plain names; `ignore_index=None` counts every
    value. Scores and picture of a run are kept in it.

    >>> result = residua.segment(model, "folder:images", masks="masks")
    >>> result.scores["model"].miou; rich.print(result.table()); result.save_picture("segments.png")
    """
    if options.get("ignore_index", 0) is None:
        options["ignore_index"] = -1
    return measured(progress, work, options_of(Options, options, model=model, data=data))


def work(o: Options) -> Segmentation:
    """What the command does."""
    from residua.evaluate import clusters

    size, accelerator = img_size(o.img_size), accelerator_of(o.device)
    device = device_of(o.device) if accelerator is None else str(accelerator.device)
    model = open_any(o.model, o.weights, size)
    data, run = o.data or data_of(o.model), run_folder(o.model)
    name = "segmentation-stored.json" if o.cache_images else "segmentation.json"
    where = out_file(o.out, "segmentation.json") if o.out else run and writable(run / name)
    if where is not None and where.suffix.lower() == ".png":
        raise ValueError(f"--out {where}: name the JSON file; the picture lands beside it")
    on_bad_image = o.on_bad_image or bad_images(o.model, data)
    result = clusters.segment(
        model, cached(opened(data), o.cache_images, model, size, on_bad_image), img_size=size, device=device,
        ignore_index=None if o.ignore_index < 0 else o.ignore_index, on_bad_image=on_bad_image,
        **{name: getattr(o, name) for name in COMMON},
    )  # fmt: skip
    if accelerator is not None and not accelerator.is_main_process:
        return result
    if result.without_mask:
        note(f"{result.without_mask:,} images have no mask in {o.masks} and were left out")
    console.print(result.table())
    if where is not None:
        say(f"written: {result.save(where)}")
        say(f"picture: {result.save_picture(where.with_suffix('.png'))}")
    return result
