"""`residua data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, subcommand

from residua.commands.console import note, out_file, print_nested, say

_SHOWN = 10  # classes


@dataclass(frozen=True)
class InfoOptions:
    """Counts, sizes, classes, statistics; images that cannot be read, and those of both parts."""

    data: Positional[str] = "shapes"
    """shapes, digits, cifar10, cifar100, stl10, mnist, fashion-mnist, folder:PATH, parquet:PATH, tar:PATH, hf:NAME
    or imagenet:PATH; with ?label=COLUMN and ?image=COLUMN of a parquet file or the Hub, ?label= and ?image= with an
    extension of a tar's members, ?classes=N the first N classes, ?classes=FILE those that a file names, ?train=N that
    many of the training images."""


@dataclass(frozen=True)
class PreviewOptions:
    """A grid of images as PNG."""

    data: Positional[str] = "shapes"
    """Source of images, as of residua data info."""
    out: str = "preview.png"
    """File to write."""
    n: int = 64
    """Number of images."""
    img_size: int | None = None
    """Side of an image."""
    augmented: bool = False
    """Random crops and flips, as in training."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do about an unreadable image."""


Options = Annotated[InfoOptions, subcommand("info")] | Annotated[PreviewOptions, subcommand("preview")]


def data(args: list[str]) -> None:
    """What a source of images holds."""
    from residua import data
    from residua.data.errors import some

    o: InfoOptions | PreviewOptions = tyro.cli(
        Options, args=args, prog="residua data", description="What a source of images holds."
    )  # type: ignore[arg-type]
    splits = data.load(o.data)
    if isinstance(o, PreviewOptions):
        path = data.preview(
            splits,
            out_file(o.out, "preview.png"),
            n=o.n,
            img_size=o.img_size,
            augmented=o.augmented,
            on_bad_image=o.on_bad_image,
        )
        return say(f"written: {path}")
    found = data.describe(splits)
    print_nested(_shortened(found))
    for part in filter(None, (found["train"], found["test"])):
        if part["unreadable"]:
            count = f"{part['unreadable']:,} of {part['opened']:,} images opened in {part['split']}"
            note(f"{count} cannot be read: {some(part['unreadable_images'])}")
    if found["shared"]:
        note(f"test images that also occur in the training part: {found['shared']:,}")


def _shortened(found: dict[str, Any]) -> dict[str, Any]:
    """What `describe` found, for people: few digits, and some of many classes."""
    from residua.data.errors import some

    shown = {key: _shortened(value) if isinstance(value, dict) else value for key, value in found.items()}
    for key in ("mean", "std"):
        if key in shown:
            shown[key] = [f"{value:.4g}" for value in shown[key]]
    if shown.get("classes") is not None:
        shown["classes"] = f"{len(found['classes'])}: " + some(found["classes"], _SHOWN)
    if shown.get("per_class") is not None:
        shown["per_class"] = some([f"{name} {count:,}" for name, count in found["per_class"].items()], _SHOWN)
    shown.pop("unreadable_images", None)
    return shown
