"""Images in a folder: class folders, or any tree without labels."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from residua.data.decode import SUFFIXES
from residua.data.errors import DataError, tell
from residua.data.index import Listing, file_stamps, fingerprint_of, is_image, list_images, settled
from residua.data.remote import Packs, RemoteFolder, is_url
from residua.data.source import EncodedSource, Source, Splits, threaded

TEST_NAMES = ("test", "val", "valid", "validation")
_HELD_OUT = 0.1
_AT_ONCE = 256  # files whose status a thread asks for at once
_ANNOTATIONS = Path("val", "val_annotations.txt")  # of Tiny-ImageNet


class FolderSource(EncodedSource):
    """Image files, named by their path relative to `base`."""

    def __init__(
        self,
        name: str,
        split: str,
        base: Path | RemoteFolder,
        files: Listing | Sequence[str],
        *,
        classes: list[str] | None,
        labels: np.ndarray | None,
        like: Source | None = None,
    ) -> None:
        self.base, self.files = base, files if isinstance(files, Listing) else Listing.of(str(base), files)
        self.hashes = self.files.hashes
        super().__init__(name, split, len(files), classes=classes, labels=labels, like=like)

    def encoded(self, i: int) -> bytes | Path:
        assert isinstance(self.base, Path)
        return self.base / self.files[i]

    def identify(self, i: int) -> str:
        return self.files[i]

    def weights(self) -> np.ndarray:
        sizes = self.files.sizes  # when the folder was listed
        return self._stamps(np.arange(len(self)))[:, 0] if sizes is None else sizes

    def stamps(self, numbers: np.ndarray) -> np.ndarray:
        asked = time.time()
        return settled(self._stamps(numbers), asked)

    def state(self, numbers: np.ndarray) -> str:
        state = hashlib.blake2b(digest_size=16)
        for start in range(0, len(numbers), _AT_ONCE * _AT_ONCE):
            part = numbers[start : start + _AT_ONCE * _AT_ONCE]
            state.update(fingerprint_of(self.files.codes(part), self._stamps(part)[:, :2]).encode())
        return state.hexdigest()

    def _stamps(self, numbers: np.ndarray) -> np.ndarray:
        base = os.fsencode(str(self.base))

        def some(start: int) -> np.ndarray:
            names = self.files.codes(numbers[start : start + _AT_ONCE])
            return file_stamps([b"%b/%b" % (base, name) for name in names])  # `Path`s would take longer

        return np.concatenate(threaded(some, range(0, len(numbers), _AT_ONCE)))


class RemoteFolderSource(FolderSource):
    """The same on an object store; images come from the packs of the cache."""

    def __init__(self, name: str, split: str, base: RemoteFolder, files: Listing, packs: Packs, **about: Any) -> None:
        self.packs, self.rows = packs, files.rows
        super().__init__(name, split, base, files, **about)

    def encoded(self, i: int) -> bytes:
        return self.packs.read(int(self.rows[i]))

    def stamps(self, numbers: np.ndarray) -> np.ndarray:
        return self._stamps(numbers)

    def _stamps(self, numbers: np.ndarray) -> np.ndarray:
        sizes = self.files.sizes
        assert sizes is not None
        return np.stack([sizes[numbers], self.files.field("versions")[numbers], np.zeros_like(numbers)], 1)


def load_folder(path: str) -> Splits:
    """`PATH/train` with `PATH/test|val|valid|validation`, or class folders, or any tree of images.

    Folders are classes when every image lies directly in one of at least two of them; so is `train` if it holds
    images itself beside other such folders. A tenth of each class becomes the test split where none is given.
    Tiny-ImageNet is read as its archive unpacks, too.
    """
    base: Path | RemoteFolder = RemoteFolder(path) if is_url(path) else Path(path).expanduser()
    if not base.is_dir():
        what = "is a file, not a folder" if isinstance(base, Path) and base.exists() else "does not exist"
        raise DataError(f"folder:{path}: {base} {what}; give the folder that holds the images")
    name = base.resolve().name if isinstance(base, Path) else base.name
    if isinstance(base, Path) and (base / "train").is_dir() and (base / _ANNOTATIONS).is_file():
        return _load_tiny_imagenet(base, name)
    if (base / "train").is_dir() and not _train_is_class(base):
        return _load_presplit(base, name)
    files = _listed(base)
    if not files:
        raise DataError(f"folder:{path}: no images in {base}; looked for {', '.join(sorted(SUFFIXES))}")
    return _split(name, base, files, "")


def _listed(base: Path | RemoteFolder) -> Listing:
    return list_images(base) if isinstance(base, Path) else base.list_images()


def class_names(files: Listing) -> list[str] | None:
    """Folder names when every file is `CLASS/FILE` with at least two classes, else None."""
    names = sorted(files.groups) if _in_class_folders(files) else []
    return names if len(names) >= 2 else None


def _in_class_folders(files: Listing) -> bool:
    return not (files.field("depths") != 1).any()


def _train_is_class(base: Path | RemoteFolder) -> bool:
    """Whether `train` is one class of several: images lie in it and in a sibling that names no split (nor `test2`)."""
    holding = [name for name in _subfolders(base) if _holds_images(base / name)]
    words = [re.split(r"[^a-z]", name.lower())[0] for name in holding]
    return "train" in holding and any(word not in ("train", *TEST_NAMES) for word in words)


def _holds_images(folder: Path | RemoteFolder) -> bool:
    if isinstance(folder, RemoteFolder):
        return folder.holds_images()
    with os.scandir(folder) as entries:
        return any(is_image(entry.name) for entry in entries)


def _subfolders(base: Path | RemoteFolder) -> list[str]:
    """Names of the visible folders in `base` that can be entered."""
    if isinstance(base, RemoteFolder):
        return base.subfolders()
    names = (path.name for path in base.iterdir() if path.is_dir() and os.access(path, os.R_OK | os.X_OK))
    return sorted(name for name in names if not name.startswith("."))


def _load_presplit(base: Path | RemoteFolder, name: str) -> Splits:
    files = _listed(base / "train")
    if not files:
        raise DataError(f"folder:{base}: no images in {base / 'train'}; looked for {', '.join(sorted(SUFFIXES))}")
    candidates = [(part, _listed(base / part)) for part in TEST_NAMES if (base / part).is_dir()]
    candidates = [(part, found) for part, found in candidates if found]
    others = [part for part in _subfolders(base) if part not in ("train", *TEST_NAMES) and _listed(base / part)]
    if others:
        tell(
            f"folder:{base}: the images in {', '.join(others)} are not used; only those in train and a test folder are"
        )
    if not candidates:
        return _split(name, base, files, "train/")
    classes = class_names(files)
    train = _source(name, "train", base, files, "train/", classes)
    if classes is not None:  # an unlabelled test folder (as ImageNet's) is of no use beside a labelled one
        candidates.sort(key=lambda candidate: not _in_class_folders(candidate[1]))
    part, found = candidates[0]
    known = classes if _in_class_folders(found) else None
    _tell_unlabelled(base, "train/", files)
    _tell_unlabelled(base, f"{part}/", found)
    return Splits(name, train, _source(name, part, base, found, f"{part}/", known, like=train))


def _load_tiny_imagenet(base: Path, name: str) -> Splits:
    """`train/CLASS/images/FILE`, and `val/images/FILE` with the classes in a table; its `test` has no labels."""
    files = list_images(base / "train")
    rows = [line.split("\t") for line in (base / _ANNOTATIONS).read_text(encoding="utf-8").splitlines() if line]
    if not files or not rows or min(map(len, rows)) < 2:
        raise DataError(f"folder:{base}: expected train/CLASS/images and lines of file and class in {_ANNOTATIONS}")
    classes = sorted(files.groups)
    number = {label: k for k, label in enumerate(classes)}
    labels = {f"val/images/{file}": label for file, label, *_ in rows}
    unknown = sorted(set(labels.values()) - set(number))
    if unknown:
        raise DataError(f"folder:{base}: {_ANNOTATIONS} names {unknown[0]}, which is not a class of the training set")

    train = _source(name, "train", base, files, "train/", classes)
    ordered = sorted(labels.items())
    test_labels = np.array([number[label] for _, label in ordered], np.int64)
    test_files = Listing.of(base, (file for file, _ in ordered))
    return Splits(
        name, train, FolderSource(name, "val", base, test_files, classes=classes, labels=test_labels, like=train)
    )


def _split(name: str, base: Path | RemoteFolder, files: Listing, prefix: str) -> Splits:
    """Hold out a part of labelled images; without labels there is nothing to test."""
    classes = class_names(files)
    _tell_unlabelled(base, prefix, files)
    held_out = _hold_out(files) if classes else np.zeros(0, bool)
    if not held_out.any():
        return Splits(name, _source(name, "train", base, files, prefix, classes))
    kept, held = (files.take(np.flatnonzero(part)) for part in (~held_out, held_out))
    train = _source(name, "train", base, kept, prefix, classes)
    return Splits(name, train, _source(name, "test", base, held, prefix, classes, like=train))


def _tell_unlabelled(base: Path | RemoteFolder, prefix: str, files: Listing) -> None:
    """Say what keeps folders that look like classes from being classes."""
    tops, depths = files.field("tops"), files.field("depths")
    folders, outside = len(np.unique(tops[depths == 1])), np.flatnonzero(depths != 1)
    if folders >= 2 and len(outside):
        more = f" and {len(outside) - 1:,} more do" if len(outside) > 1 else " does"
        tell(
            f"folder:{base}: {folders} folders look like classes but give no labels, because "
            f"{prefix}{files[int(outside[0])]}{more} not lie directly in such a folder"
        )


def _source(
    name: str,
    split: str,
    base: Path | RemoteFolder,
    files: Listing,
    prefix: str,
    classes: list[str] | None,
    like: Source | None = None,
) -> FolderSource:
    """Files below `base/prefix`, labelled by their folder where there are classes."""
    labels = None
    if classes is not None:
        number = {label: k for k, label in enumerate(classes)}
        groups = files.groups
        unknown = sorted(set(groups) - set(number))
        if unknown:
            raise DataError(
                f"folder:{base}: {prefix}{unknown[0]} is not a class of the training set; "
                f"its classes are {', '.join(classes[:10])}{' ...' if len(classes) > 10 else ''}"
            )
        labels = np.array([number[group] for group in groups], np.int64)[files.field("tops")]
    if isinstance(base, RemoteFolder):
        packs = Packs(base / prefix if prefix else base, files.whole())
        about: dict[str, Any] = {"classes": classes, "labels": labels, "like": like}
        return RemoteFolderSource(name, split, base, files.below(prefix), packs, **about)
    return FolderSource(name, split, base, files.below(prefix), classes=classes, labels=labels, like=like)


def _hold_out(files: Listing) -> np.ndarray:
    """A tenth of every class (at least one image where a class has two), chosen by the hash of the path: a mask."""
    tops, draws = files.field("tops"), files.field("draws")
    order = np.lexsort((draws, tops))
    counts = np.bincount(tops)
    quota = np.where(counts >= 2, np.maximum(1, np.rint(_HELD_OUT * counts)), 0)
    first = np.cumsum(counts) - counts
    chosen = np.zeros(len(files), bool)
    chosen[order] = np.arange(len(files)) - first[tops[order]] < quota[tops[order]]
    return chosen
