"""`residua data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, subcommand

from residua.commands.console import counting, note, out_file, print_nested, say

if TYPE_CHECKING:
    from residua.data import Splits

_SHOWN = 10  # classes


@dataclass(frozen=True)
class InfoOptions:
    """Counts, sizes, classes, statistics; images that cannot be read, and those of both parts; stores of the images."""

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


@dataclass(frozen=True)
class StoresOptions:
    """Images that are kept decoded (--cache-images): which, how large, when last used."""

    place: Positional[str] = "auto"
    """Folder of the stores; auto: in the user's cache directory."""
    verify: bool = False
    """Read them through, and compare all checksums."""
    remove: tuple[str, ...] = ()
    """Take away the stores whose names begin so, or all."""


Options = (
    Annotated[InfoOptions, subcommand("info")]
    | Annotated[PreviewOptions, subcommand("preview")]
    | Annotated[StoresOptions, subcommand("stores")]
)


def data(args: list[str]) -> None:
    """What a source of images holds."""
    from residua import data
    from residua.data.errors import some

    o: InfoOptions | PreviewOptions | StoresOptions = tyro.cli(
        Options, args=args, prog="residua data", description="What a source of images holds."
    )  # type: ignore[arg-type]
    if isinstance(o, StoresOptions):
        return _stores(o)
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
    _tell_stores(splits)


def _tell_stores(splits: Splits) -> None:
    """Stores of these images in the user's cache directory, and how to be rid of them."""
    from residua.data.store import place_of, stores_in

    kept = stores_in(place_of("auto"))
    own = {part.fingerprint() for part in (splits.train, splits.test) if part is not None} if kept else set()
    for store in kept:
        if store.about.get("fingerprint") in own:
            say(f"store        {store}")
            say(f"             residua data stores --remove {store.folder.name[:8]} removes it")


def _stores(o: StoresOptions) -> None:
    """List, check or remove them."""
    from residua.data.store import place_of, remove, stores_in, verify

    place = place_of(o.place)
    found = stores_in(place)
    names = [store.folder.name for store in found]
    wrong = [n for n in o.remove if n != "all" and not (n and any(name.startswith(n) for name in names))]
    if wrong:
        raise ValueError(f"--remove {' '.join(wrong)}: no store in {place} is called so")
    damaged: list[str] = []
    for store in found:
        say(str(store))
        if o.verify and store.state == "whole":
            count = verify(store, counting)
            damaged += [store.folder.name] * (count > 0)
            text = f"{count:,} of its images are damaged, and read from the set itself"
            text = text if count else "all images are as written"
            (note if count else say)(f"{store.folder.name}: {text}")
        if any(name == "all" or store.folder.name.startswith(name) for name in o.remove):
            remove(store)
            say(f"removed: {store.folder.name}")
    if not found:
        say(f"no stores in {place}")
    left = [name for name in damaged if not any(part == "all" or name.startswith(part) for part in o.remove)]
    if left:
        raise ValueError(f"damaged: {', '.join(left)}; --remove makes way for new ones")


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
