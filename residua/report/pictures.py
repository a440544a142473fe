"""From tensors to pictures: images, reconstructions and neighbours, ready to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residua.data import Preprocessing, Source, Splits
from residua.data.augment import per_channel
from residua.evaluate import Report
from residua.evaluate.features import frozen, preprocessing_of
from residua.evaluate.neighbors import Neighbors, neighbor_images
from residua.nn import MAE

Range = tuple[Tensor, Tensor]
HIDDEN = 0.5  # the grey of a hidden patch


def reconstruct(models: Mapping[str, MAE], images: Tensor, source: Source, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows for `figures.reconstructions`: truth, masked, and what each model fills in behind one mask."""
    first = next(iter(models.values()))
    noise = torch.rand(len(images), first.num_patches, generator=torch.Generator().manual_seed(seed))
    preprocessing = preprocessing_of(first, source)
    _check_alike(models)
    truth = preprocessing.denormalize(images)
    limits = display_range(truth, source)
    rows: dict[str, np.ndarray] = {"truth": displayable(truth, limits)}
    for name, model in models.items():
        own = preprocessing_of(model, source)
        with frozen(model) as device:
            filled, mask = model.reconstruct(renormalize(images, preprocessing, own).to(device), noise.to(device))
        if not filled.isfinite().all():
            raise ValueError(f"what {name} fills in is not finite; did training diverge?")
        if "masked" not in rows:
            hidden = mask.cpu().permute(0, 2, 3, 1).numpy()
            rows["masked"] = rows["truth"] * (1 - hidden) + HIDDEN * hidden
        rows[name] = displayable(own.denormalize(filled.float().cpu()), limits)
    return rows


def renormalize(images: Tensor, before: Preprocessing, after: Preprocessing) -> Tensor:
    """Images normalised by one model's statistics, by another's instead; the same tensor where they agree."""
    if (before.mean, before.std) == (after.mean, after.std):
        return images
    plain = images * per_channel(before.std, images) + per_channel(before.mean, images)
    return (plain - per_channel(after.mean, images)) / per_channel(after.std, images)


def _check_alike(models: Mapping[str, MAE]) -> None:
    """One mask fits all only where images, patches and the share that is hidden are the same."""
    kinds = {name: (m.encoder.img_size, m.patch_size, m.mask_ratio, m.encoder.in_chans) for name, m in models.items()}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{name}: {k[0]} px, patch {k[1]}, {k[2]:.0%} hidden" for name, k in kinds.items())
        raise ValueError(f"one mask cannot serve models of different images, patches or mask ratios ({told})")


def neighbor_pictures(evaluation: Report, splits: Splits) -> np.ndarray | None:
    """(Q, 1 + k, h, w, 3) of an evaluation's neighbours, looked up by name; None where there are none."""
    named: list[dict[str, Any]] = evaluation.to_dict()["named_neighbors"]
    if not named:
        return None
    names = {name for row in named for name in (row["query"], *row["neighbors"])}
    for source in (splits.test, splits.train):
        if source is None:
            continue
        number = {name: i for i in range(len(source)) if (name := source.identify(i)) in names}
        if names <= number.keys():
            queries = torch.tensor([number[row["query"]] for row in named])
            nearest = torch.tensor([[number[name] for name in row["neighbors"]] for row in named])
            found = Neighbors(queries, nearest, torch.zeros(nearest.shape))
            images = neighbor_images(source, found, img_size=min(96, max(evaluation.img_size)))
            return displayable_grid(images, source)
    return None


def displayable_grid(images: Tensor, source: Source) -> np.ndarray:
    """(Q, k, C, h, w) as (Q, k, h, w, 3), one range of values for all."""
    flat = images.flatten(0, 1)
    return displayable(flat, display_range(flat, source)).reshape(*images.shape[:2], *images.shape[3:], 3)


def display_range(images: Tensor, source: Source) -> Range | None:
    """Least and greatest value per channel where pixels are no plain bytes, else None: shown as they are."""
    if source.dtype == np.uint8:
        return None
    return images.amin(dim=(0, 2, 3), keepdim=True), images.amax(dim=(0, 2, 3), keepdim=True)


def displayable(images: Tensor, limits: Range | None = None) -> np.ndarray:
    """(N, C, h, w) in [0, 1] as (N, h, w, 3): the first three channels, or the first as grey."""
    if limits is not None:
        images = (images - limits[0]) / (limits[1] - limits[0]).clamp(min=1e-12)
    shown = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    return shown.clamp(0, 1).permute(0, 2, 3, 1).double().numpy()


def channels_note(channels: int) -> str:
    """What a caption has to say about channels that cannot all be shown."""
    if channels == 2:
        return " Shown: the first of 2 channels."
    return f" Shown: channels 1 to 3 of {channels}." if channels > 3 else ""
