"""Segmentation without labels: do patches of one class lie together in feature space, across all images?

Zhang, Yunis and Maire (2024): spectral embedding of the patches of all images together, k-means with as many
clusters as there are classes, clusters matched to classes once for the whole set, mean intersection over union.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor, nn

from residua.adapt import Foreign, encoder_of
from residua.data import DataError, Source, Splits, load
from residua.data.augment import center_boxes
from residua.data.feed import OnBadImage
from residua.data.masks import COLOR, with_masks
from residua.data.source import threaded
from residua.nn import ViT
from residua.nn.vit import patch_grid

from .features import ImgSize, pick_split, preprocessing_of
from .reading import View, collect_all, frozen, open_feed, prefix_of, read_layers, resolve_layers
from .report import MODEL, RANDOM
from .segmentation import Segmentation, SegmentScore, enlarge
from .spectral import spectral_embedding
from .suite import untrained

COLORS = "patch colours"
_MOST_CLASSES = 256


def segment(
    model: nn.Module,
    data: str | Splits,
    *,
    masks: str | Path | None = None,
    split: Literal["train", "test"] | None = None,
    layer: int = -1,
    max_images: int | None = 200,
    img_size: ImgSize | None = None,
    seed: int = 0,
    baselines: bool = True,
    count_absent: bool = False,
    ignore_index: int | None = 255,
    intra: int = 50,
    inter: int = 50,
    threshold: float = 0.1,
    batch_size: int = 256,
    on_bad_image: OnBadImage = "error",
    device: str | torch.device | None = None,
) -> Segmentation:
    """Cluster the patches of all images by their features and score the clusters against pixel masks.

    Masks come with the data (`shapes`) or lie in the folder `masks` under the images' names; images without one
    are left out. Pixels marked `ignore_index` count nowhere. What the model sees is scored, the central crop,
    at the resolution of the mask: patch labels are enlarged to it (nearest). There are as many clusters as
    classes occur in the masks used; those that the data names but the masks do not show are left out of the
    mean, or with `count_absent` count 0. Which cluster is which class is told by the same masks that are scored, so
    clusters that know nothing score above 0 too: see the baselines. `layer` is a block index, negative from the end;
    `max_images` of the split (test where there is one) are chosen by `seed`; `on_bad_image="skip"` leaves out those
    that cannot be read. `intra`, `inter` and `threshold` are those of `spectral_embedding`.

    >>> result = segment(model, "folder:images", masks="masks")
    >>> result.scores["model"].miou; rich.print(result.table()); result.save_picture("segments.png")
    """
    data = load(data) if isinstance(data, str) else data
    encoder = encoder_of(model)
    (block,) = resolve_layers([layer], encoder.depth)
    view = View(preprocessing_of(model, data.train, img_size), batch_size, seed=seed)
    source, without = _pick(data, masks, split, max_images, seed)
    if on_bad_image == "skip":
        source = source.readable()
    truth, names, absent = read_truth(source, view, ignore_index)
    readers: dict[str, Callable[[Tensor], Tensor]] = {MODEL: PatchReader(encoder, block)}
    with frozen(model, device) as where:
        grid = _grid(encoder, block, view.preprocessing.img_size)
        if baselines:
            readers[RANDOM] = PatchReader(untrained(encoder, seed).to(where), block)
            readers[COLORS] = ColorReader(grid)
        features = _read(source, readers, view, where)
    scores: dict[str, SegmentScore] = {}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, x in features.items():
        options: dict[str, Any] = {"intra": intra, "inter": inter, "threshold": threshold, "seed": seed}
        clusters, vectors = cluster_patches(x, len(names), device=where, **options)
        table = confusion(clusters.unflatten(1, grid), truth, len(names))
        scores[name], classes = score_clusters(table, names, absent if count_absent else ())
        found[name] = classes[clusters].unflatten(1, grid), vectors.unflatten(1, grid)
    return Segmentation(
        data=data.name,
        split=source.split,
        n_images=len(source),
        without_mask=without,
        layer=block,
        img_size=view.preprocessing.img_size,
        seed=seed,
        classes=names,
        absent=absent,
        count_absent=count_absent,
        settings={"intra": intra, "inter": inter, "threshold": threshold, "ignore_index": ignore_index},
        scores=scores,
        labels=found[MODEL][0],
        eigenvectors=found[MODEL][1],
        truth=truth,
        source=source,
        crop_pct=view.preprocessing.crop_pct,
        crop_mode=view.preprocessing.crop_mode,
    )


def cluster_patches(
    features: Any, k: int, *, seed: int = 0, device: str | torch.device | None = None, **graph: Any
) -> tuple[Tensor, Tensor]:
    """k-means of all patches: features (N, P, D) -> cluster numbers (N, P) and eigenvectors (N, P, >= 3).

    k-means sees the first k eigenvectors of the patch graph: the constant one, which cannot tell patches apart,
    and k - 1 of those that `spectral_embedding` returns. `graph` are its options.
    """
    if k < 2:
        raise ValueError(f"{k} clusters: there is nothing to tell apart; give at least 2")
    vectors = spectral_embedding(features, max(k - 1, 3), seed=seed, device=device, **graph)
    points = vectors[..., : k - 1].flatten(0, 1).double().numpy()
    numbers = KMeans(k, n_init=10, random_state=seed).fit_predict(points)
    return torch.from_numpy(numbers).long().unflatten(0, vectors.shape[:2]), vectors


def confusion(clusters: Tensor, truth: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Pixels by cluster and class, (k, C) with k = C: patches (N, rows, cols) against masks (h, w) of classes.

    A pixel belongs to the patch that its centre lies in. Negative classes are ignored.
    """
    table = np.zeros((classes, classes), np.int64)
    for patches, mask in zip(clusters.numpy(), truth):
        shown = mask >= 0
        guess = enlarge(patches, mask.shape)[shown]
        table += np.bincount(guess * classes + mask[shown], minlength=classes**2).reshape(classes, classes)
    return table


def score_clusters(table: np.ndarray, names: Sequence[str], absent: Sequence[str] = ()) -> tuple[SegmentScore, Tensor]:
    """The best one-to-one matching of clusters to classes, from pixel counts (k, C), and the score under it.

        IoU = |cluster and class| / |cluster or class|

    The Hungarian method finds the matching with the greatest sum of IoU. Also returns the class of each cluster
    (k,), -1 for one without. A class that occurs but has no cluster counts 0, one that does not occur is left
    out of the mean (NaN); `absent` names further classes to count as 0.
    """
    both = table.astype(np.float64)
    either = both.sum(1, keepdims=True) + both.sum(0) - both
    iou = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    rows, columns = linear_sum_assignment(iou, maximize=True)
    per_class = np.zeros(table.shape[1])
    per_class[columns] = iou[rows, columns]
    occurs = table.sum(0) > 0
    mean = per_class[occurs].sum() / max(1, occurs.sum() + len(absent))
    classes = torch.full((len(table),), -1)
    classes[rows] = torch.from_numpy(columns).long()
    right = both[rows, columns].sum() / max(1, both.sum())
    percent = {name: 100 * float(v) if here else float("nan") for name, v, here in zip(names, per_class, occurs)}
    return SegmentScore(100 * float(mean), 100 * float(right), percent | dict.fromkeys(absent, 0.0)), classes


def read_truth(source: Source, view: View, ignore_index: int | None) -> tuple[list[np.ndarray], list[str], list[str]]:
    """Masks of class numbers (-1: ignored) cropped to what the model sees, names of the classes that occur in
    them, and of those that the data names but the masks do not show."""
    p = view.preprocessing

    def read(i: int) -> np.ndarray:
        mask = source.mask(i)
        if mask is None:
            raise DataError(f"{source.identify(i)} has no mask")
        (box,) = center_boxes(torch.tensor([mask.shape]), p.img_size, p.crop_pct, p.crop_mode).tolist()
        top, left, height, width = box  # of pixels that a box's edge cuts, those whose larger part lies in it
        return mask[round(top) : round(top + height), round(left) : round(left + width)]

    raw = threaded(read, range(len(source)))
    values = sorted(set[int]().union(*(np.unique(mask).tolist() for mask in raw)))
    known = [v for v in values if v != ignore_index]
    if len(known) < 2:
        binary = (
            " (in black and white masks, 255 is a class: ignore_index=None, --ignore-index -1)"
            if set(values) == {0, 255}
            else ""
        )
        raise DataError(f"the masks show {len(known)} class{'es' * (len(known) != 1)}; at least 2 are needed{binary}")
    if len(known) > _MOST_CLASSES:
        raise DataError(
            f"the masks hold {len(known):,} different values; are they label masks, stored without loss and smoothing?"
        )
    if known[0] < COLOR <= known[-1]:
        raise DataError("some masks hold numbers and some hold colours; store all of them alike")
    named = ["background", *source.classes] if source.classes else None
    truth = [np.where(np.isin(m, known), np.searchsorted(known, m), -1).astype(np.int16) for m in raw]
    names = [_name(v, named) for v in known]
    return truth, names, [name for name in named or [] if name not in names]


@dataclass(frozen=True)
class PatchReader:
    """Patch tokens (B, P, D) after one block; after the final norm where that block is the last."""

    encoder: ViT | Foreign
    block: int

    def __call__(self, images: Tensor) -> Tensor:
        taken: dict[int, Tensor] = {}
        read_layers(self.encoder, images, [self.block], taken.__setitem__)
        return taken[self.block][:, prefix_of(self.encoder, self.block) :].float()


@dataclass(frozen=True)
class ColorReader:
    """Mean normalised colour of each patch with a 1 beside it (B, P, C + 1): brightness too has a direction."""

    grid: tuple[int, int]

    def __call__(self, images: Tensor) -> Tensor:
        color = F.adaptive_avg_pool2d(images, self.grid).flatten(2).transpose(1, 2)
        return torch.cat([color, torch.ones_like(color[..., :1])], 2)


def _grid(encoder: ViT | Foreign, block: int, img_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the patches after a block."""
    if isinstance(encoder, Foreign):
        return encoder.grid(block, img_size)
    return patch_grid(img_size, encoder.patch_size)


def _pick(
    data: Splits, masks: str | Path | None, split: str | None, limit: int | None, seed: int
) -> tuple[Source, int]:
    """The images to segment, and how many have no mask and are left out."""
    split = split or ("test" if data.test is not None else "train")
    whole = pick_split(data, split)
    if whole is None:
        raise DataError(f"{data.name} has no {split} split")
    if masks is not None:
        masked: Source = with_masks(whole, masks)
    elif len(whole) == 0 or whole.mask(0) is None:
        raise DataError(f"{data.name} has no pixel masks: give a folder with them (masks), or use shapes")
    else:
        masked = whole
    source = pick_split(Splits(data.name, masked), "train", limit, seed)
    assert source is not None
    return source, len(whole) - len(masked)


def _read(
    source: Source, readers: dict[str, Callable[[Tensor], Tensor]], view: View, device: torch.device
) -> dict[str, Tensor]:
    """Patch features (N, P, D) of every reader by one pass over the images."""
    feed = open_feed(source, device, view)
    _, found = collect_all(feed, lambda images: {name: read(images) for name, read in readers.items()}, view)
    feed.close()
    return {name: x[0] for name, x in found.items()}


def _name(value: int, named: Sequence[str] | None) -> str:
    if value >= COLOR:
        return f"#{value - COLOR:06x}"
    return named[value] if named is not None and value < len(named) else str(value)
