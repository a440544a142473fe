"""Pixel labels in files of their own, beside a source of images."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from residua.data.decode import open_image
from residua.data.errors import BadImage, DataError
from residua.data.source import Source, Subset

MASK_SUFFIXES = (".png", ".npy", ".tif", ".tiff", ".bmp", ".gif")
COLOR = 1 << 24  # added to 0xRRGGBB, so that no colour is mistaken for an index


class MaskedSource(Subset):
    """Those images of a source that have a mask among `files`; the classes are the masks', not the images'."""

    def __init__(self, parent: Source, indices: np.ndarray, files: list[Path]) -> None:
        super().__init__(parent, indices)
        self.files, self.classes, self.labels = files, None, None

    def mask(self, i: int) -> np.ndarray | None:
        """Pixel labels (h, w): the numbers stored, or colours as `COLOR + 0xRRGGBB`.

        The mask may be of another size than the image, but must be of its shape.
        """
        mask = read_mask(self.files[i])
        (h, w), (height, width) = mask.shape, self.size(i)
        if abs(h * width - w * height) > max(h, w, height, width):  # more than rounding to a whole pixel explains
            raise DataError(
                f"{self.files[i]} is {w} x {h}, its image {self.identify(i)} {width} x {height}: a mask may be "
                "larger or smaller than its image, but not of another shape"
            )
        return mask


def with_masks(source: Source, path: str | Path) -> MaskedSource:
    """The images of `source` that have a mask below `path`: a file of the same name but for its suffix.

    Where several masks bear that name, the one whose folders end as the image's do. Masks are PNG (palette or
    grey: the stored numbers are the classes; colour: every colour is a class), TIFF, BMP, GIF, or `.npy`.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"masks {path}: {root} {'is no folder' if root.exists() else 'does not exist'}")
    known: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in MASK_SUFFIXES and not file.name.startswith("."):
            known[file.stem].append(file)
    matches = {i: _match(Path(source.identify(i)), known, root) for i in range(len(source))}
    found = {i: match for i, match in matches.items() if match is not None}
    if not found:
        first = Path(source.identify(0)).with_suffix(".png").name if len(source) else "NAME.png"
        raise DataError(
            f"masks {path}: none of the {len(source)} images of {source.name} has a mask there; "
            f"looked for the images' names with {', '.join(MASK_SUFFIXES)}, such as {first}"
        )
    return MaskedSource(source, np.fromiter(found, np.int64), list(found.values()))


def read_mask(path: Path) -> np.ndarray:
    """Pixel labels (h, w) as they are stored; colours as `COLOR + 0xRRGGBB`."""
    try:
        if path.suffix.lower() == ".npy":
            mask = np.load(path, allow_pickle=False)
        else:
            with open_image(path) as image:
                mask = np.asarray(image.convert("RGB") if image.mode in ("RGB", "RGBA", "PA") else image)
    except Exception as error:
        raise BadImage(str(path), error) from error
    if mask.ndim == 3 and mask.shape[2] == 3:
        r, g, b = np.moveaxis(mask.astype(np.int32), 2, 0)
        return COLOR + (r << 16) + (g << 8) + b
    if mask.ndim != 2 or 0 in mask.shape or mask.dtype.kind not in "bui":
        raise DataError(f"mask {path}: {mask.dtype} of shape {mask.shape}, expected whole numbers of shape (h, w)")
    return mask.astype(np.uint8) if mask.dtype == bool else mask


def _match(image: Path, known: dict[str, list[Path]], root: Path) -> Path | None:
    """The mask of an image, by name; among several, by as many folders as agree."""
    candidates = known.get(image.stem, [])
    if len(candidates) < 2:
        return candidates[0] if candidates else None

    def agreement(file: Path) -> int:
        ours, theirs = image.parent.parts[::-1], file.relative_to(root).parent.parts[::-1]
        return next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))

    scores = [agreement(file) for file in candidates]
    if scores.count(max(scores)) > 1:
        names = ", ".join(str(file) for file in candidates[:3])
        raise DataError(f"image {image} has several masks: {names}; keep one, or the same folders on both sides")
    return candidates[scores.index(max(scores))]
