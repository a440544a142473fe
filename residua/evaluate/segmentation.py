"""The result of a segmentation: scores, patch labels, and a picture of them."""

from __future__ import annotations

import colorsys
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.table import Table
from torch import Tensor

from residua.data import Batch, Source, center_view
from residua.data.augment import CropMode
from residua.data.preprocess import to_canvas
from residua.data.preview import save_picture
from residua.data.source import evenly
from residua.disk import write_text

from .report import NOTHING

_TILE = 128  # pixels of a picture's longer side
_GAP = 4
_ROWS = 30  # classes that a table shows


@dataclass(frozen=True)
class SegmentScore:
    """In percent: mean intersection over union, share of pixels right, IoU by class (NaN: does not occur)."""

    miou: float
    accuracy: float
    iou: dict[str, float]

    def __float__(self) -> float:
        return self.miou


@dataclass
class Segmentation:
    """What `segment` found, for the model and its baselines."""

    data: str
    split: str
    n_images: int
    without_mask: int
    """Images of the split that have no mask and were left out."""
    layer: int
    img_size: tuple[int, int]
    seed: int
    classes: list[str]
    absent: list[str]
    """Classes that the data names and the masks do not show."""
    count_absent: bool
    settings: dict[str, Any]
    scores: dict[str, SegmentScore]
    labels: Tensor
    """(N, rows, cols) class number of each patch by the model; -1 for a cluster without a class."""
    eigenvectors: Tensor
    """(N, rows, cols, at least 3) leading eigenvectors of the model's patch graph."""
    truth: list[np.ndarray]
    """Class numbers (h, w) of what the model sees of each image; -1 where ignored."""
    source: Source
    crop_pct: float = 1.0
    crop_mode: CropMode = "center"

    def table(self) -> Table:
        """The scores side by side; the classes that fill most pixels first."""
        size = " x ".join(map(str, self.img_size))
        title = f"{self.data}, {self.n_images:,} {self.split} images at {size} px, layer {self.layer}"
        table = Table(title=title, caption=self._caption(), title_justify="left", caption_justify="left")
        for heading in ("", *self.scores):
            table.add_column(heading, justify="right" if heading else "left")
        own = self.scores.values()
        table.add_row("mIoU", *(_percent(s.miou) for s in own))
        table.add_row("pixels right", *(_percent(s.accuracy) for s in own), end_section=True)
        pixels = np.sum([np.bincount(t[t >= 0].ravel(), minlength=len(self.classes)) for t in self.truth], axis=0)
        for i in np.argsort(-pixels, kind="stable")[:_ROWS]:
            name = self.classes[i]
            table.add_row(f"IoU {name}", *(_percent(s.iou[name]) for s in own))
        return table

    def _caption(self) -> str:
        lines = [f"spectral clustering, {len(self.classes)} clusters matched to {len(self.classes)} classes"]
        if self.absent:
            what = "counted as 0" if self.count_absent else "left out of the mean"
            lines.append(f"not in these images and {what}: {', '.join(self.absent)}")
        return "\n".join(lines)

    def picture(self, count: int = 8) -> np.ndarray:
        """(H, W, 3) uint8: for some images, from top to bottom, the image, the truth and the model's segments."""
        chosen = evenly(self.n_images, count)
        longest = max(self.img_size)
        h, w = (max(1, round(_TILE * n / longest)) for n in self.img_size)
        colors = palette(len(self.classes))
        rows = [
            self._images(chosen, (h, w)),
            np.stack([colors[enlarge(self.truth[i], (h, w))] for i in chosen]),
            np.stack([colors[enlarge(self.labels[i].numpy(), (h, w))] for i in chosen]),
        ]
        sheet = np.full((3 * (h + _GAP) - _GAP, len(chosen) * (w + _GAP) - _GAP, 3), 255, np.uint8)
        for r, row in enumerate(rows):
            for c, cell in enumerate(row):
                sheet[r * (h + _GAP) : r * (h + _GAP) + h, c * (w + _GAP) : c * (w + _GAP) + w] = cell
        return sheet

    def save_picture(self, path: str | Path, count: int = 8) -> Path:
        """Write `picture` as a PNG."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_picture(Image.fromarray(self.picture(count)), path)
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; no tensors."""
        skip = {"labels", "eigenvectors", "truth", "source", "scores", "crop_pct", "crop_mode"}
        plain = {name: value for name, value in vars(self).items() if name not in skip}
        plain["scores"] = {
            name: asdict(s) | {"iou": {c: None if math.isnan(v) else v for c, v in s.iou.items()}}
            for name, s in self.scores.items()
        }
        return plain | {"unit": "%", "palette": [_hex(c) for c in palette(len(self.classes))[:-1]]}

    def save(self, path: str | Path) -> Path:
        """Write the JSON; the file is whole or not there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")
        return path

    def _images(self, chosen: Sequence[int], size: tuple[int, int]) -> np.ndarray:
        pixels, sizes = to_canvas(
            [self.source.read(i, max(size)) for i in chosen], max(size), squash=self.crop_mode == "squash"
        )
        batch, channels = Batch(pixels, sizes, torch.tensor(chosen)), pixels.shape[1]
        images = center_view(batch, size, [0.0] * channels, [1.0] * channels, self.crop_pct, crop_mode=self.crop_mode)
        if self.source.dtype != np.uint8:
            low, high = images.min(), images.max()
            images = (images - low) / (high - low).clamp(min=1e-12)
        shown = images[:, :3] if channels >= 3 else images[:, :1].expand(-1, 3, -1, -1)
        return (shown.clamp(0, 1) * 255 + 0.5).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def palette(classes: int) -> np.ndarray:
    """(classes + 1, 3) uint8: the first dark, the others spread over the hues; white, the last, for class -1."""
    colors = [(0.13, 0.13, 0.15)]
    for i in range(1, classes):
        hue = i * 0.618034 % 1  # the golden ratio spreads any number of them
        colors.append(colorsys.hsv_to_rgb(hue, 0.55 + 0.35 * (i // 2 % 2), 0.95 - 0.25 * (i % 2)))
    return (np.array([*colors, (1.0, 1.0, 1.0)]) * 255 + 0.5).astype(np.uint8)


def enlarge(patches: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """A grid (rows, cols) of labels at pixel size (h, w): every pixel takes the label its centre lies in."""
    y, x = (((np.arange(n) + 0.5) * m / n).astype(np.int64) for n, m in zip(size, patches.shape))
    return patches[y[:, None], x]


def _percent(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.1f} %"


def _hex(color: np.ndarray) -> str:
    return "#" + "".join(f"{int(c):02x}" for c in color)
