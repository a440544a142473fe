"""`residua segment`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from residua.commands.console import (
    accelerator_of,
    bad_images,
    console,
    data_of,
    device_of,
    img_size,
    note,
    open_any,
    out_file,
    say,
    writable,
)


@dataclass(frozen=True)
class SegmentOptions:
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
    out: str | None = None
    """JSON file, a PNG lands beside it; default: segmentation.json in the run."""
    device: str | None = None
    """cuda, cpu, ...; default: cuda where there is one."""


def segment(args: list[str]) -> None:
    """Cluster patches, score against masks."""
    import residua
    from residua.evaluate import segment

    o = tyro.cli(SegmentOptions, args=args, prog="residua segment")
    size, accelerator = img_size(o.img_size), accelerator_of(o.device)
    device = device_of(o.device) if accelerator is None else str(accelerator.device)
    model = open_any(o.model, o.weights, size)
    data, run = o.data or data_of(o.model), Path(o.model).expanduser()
    where = run / "segmentation.json" if (run / "checkpoints").is_dir() else None
    where = out_file(o.out, "segmentation.json") if o.out else where and writable(where)
    if where is not None and where.suffix.lower() == ".png":
        raise ValueError(f"--out {where}: name the JSON file; the picture lands beside it")
    splits = residua.data.load(data)
    result = segment(
        model, splits, masks=o.masks, split=o.split, layer=o.layer, max_images=o.max_images,
        img_size=size, ignore_index=None if o.ignore_index < 0 else o.ignore_index,
        count_absent=o.count_absent, seed=o.seed, baselines=o.baselines, batch_size=o.batch_size,
        intra=o.intra, inter=o.inter, device=device,
        on_bad_image=o.on_bad_image or bad_images(o.model, data),
    )  # fmt: skip
    if accelerator is not None and not accelerator.is_main_process:
        return
    if result.without_mask:
        note(f"{result.without_mask:,} images have no mask in {o.masks} and were left out")
    console.print(result.table())
    if where is not None:
        say(f"written: {result.save(where)}")
        say(f"picture: {result.save_picture(where.with_suffix('.png'))}")
