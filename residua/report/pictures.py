"""From tensors to pictures: images, reconstructions, patch features and neighbours, ready to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from residua.data import Source, Splits
from residua.data.source import evenly
from residua.evaluate import Report
from residua.evaluate.features import frozen, preprocessing_of
from residua.evaluate.neighbors import Neighbors, neighbor_images
from residua.nn import MAE, encoder_of

Range = tuple[Tensor, Tensor]
HIDDEN = 0.5  # the grey of a hidden patch


def sample(model: nn.Module, splits: Splits, count: int = 8) -> Tensor:
    """Test images (training ones where there are none), as the model takes them: normalised (N, C, h, w)."""
    source = splits.test or splits.train
    preprocessing = preprocessing_of(model, splits.train)
    target = max(preprocessing.img_size)
    return preprocessing([source.read(i, target) for i in evenly(len(source), count)])


def reconstruct(models: Mapping[str, MAE], images: Tensor, source: Source, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows for `figures.reconstructions`: truth, masked, and what each model fills in behind one mask."""
    first = next(iter(models.values()))
    noise = torch.rand(len(images), first.num_patches, generator=torch.Generator().manual_seed(seed))
    preprocessing = preprocessing_of(first, source)
    truth = preprocessing.denormalize(images)
    limits = display_range(truth, source)
    rows: dict[str, np.ndarray] = {"truth": displayable(truth, limits)}
    for name, model in models.items():
        with frozen(model) as device:
            filled, mask = model.reconstruct(images.to(device), noise.to(device))
        if "masked" not in rows:
            shown = displayable(truth, limits)
            hidden = mask.cpu().permute(0, 2, 3, 1).numpy()
            rows["masked"] = shown * (1 - hidden) + HIDDEN * hidden
        rows[name] = displayable(preprocessing.denormalize(filled.float().cpu()), limits)
    return rows


@torch.no_grad()
def patch_colors(model: nn.Module, images: Tensor) -> np.ndarray:
    """Last-block patch features as colours, (N, rows, cols, 3): see `principal_rgb`."""
    encoder = encoder_of(model)
    with frozen(model) as device:
        tokens = encoder.forward_features(images.to(device))[:, encoder.num_prefix_tokens :].float().cpu()
    rows, cols = (n // p for n, p in zip(images.shape[2:], encoder.patch_size))
    return principal_rgb(tokens).reshape(len(images), rows, cols, 3)


def principal_rgb(tokens: Tensor) -> np.ndarray:
    """(N, P, D) -> (N, P, 3): the first three principal directions of all N * P features, each in [0, 1].

    One basis for all images; the largest entry of a direction is positive; the outer 1 % are clipped.
    """
    x = tokens.flatten(0, 1).double()
    x = x - x.mean(0)
    directions = torch.linalg.svd(x, full_matrices=False).Vh[:3]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    scores = x @ (directions * largest.sign()).T
    if scores.shape[1] < 3:
        scores = nn.functional.pad(scores, (0, 3 - scores.shape[1]))
    low, high = torch.quantile(scores, torch.tensor([0.01, 0.99], dtype=scores.dtype), dim=0)
    unit = ((scores - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return unit.unflatten(0, tokens.shape[:2]).numpy()


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
            limits = display_range(images.flatten(0, 1), source)
            return displayable(images.flatten(0, 1), limits).reshape(*nearest.shape[:1], -1, *images.shape[3:], 3)
    return None


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
