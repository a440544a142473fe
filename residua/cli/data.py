"""`residua data`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from .console import console, note, print_nested


@dataclass(frozen=True)
class DataOptions:
    """What a source of images holds."""

    action: Positional[Literal["info", "preview"]]
    """info: counts, sizes, classes, statistics; preview: a grid of images as PNG."""
    data: Positional[str] = "shapes"
    """shapes, digits, cifar10, cifar100, stl10, mnist, fashion-mnist, folder:PATH, parquet:PATH, hf:NAME or
    imagenet:PATH."""
    out: str = "preview.png"
    """preview: file to write."""
    n: int = 64
    """preview: number of images."""
    img_size: int | None = None
    """preview: side of an image."""
    augmented: bool = False
    """preview: random crops and flips, as in training."""


def data(args: list[str]) -> None:
    """What a source of images holds."""
    from residua import data

    o = tyro.cli(DataOptions, args=args, prog="residua data")
    splits = data.load(o.data)
    if o.action == "preview":
        path = data.preview(splits, Path(o.out), n=o.n, img_size=o.img_size, augmented=o.augmented)
        return console.print(f"written: {path}", markup=False)
    found = data.describe(splits)
    print_nested(found)
    for part in filter(None, (found["train"], found["test"])):
        if part["unreadable"]:
            note(f"{part['unreadable']:,} of {part['opened']:,} images opened in {part['split']} cannot be read")
    if found["shared"]:
        note(f"test images that also occur in the training part: {found['shared']:,}")
