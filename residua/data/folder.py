"""Images in a folder: class folders, or any tree without labels."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

from residua.data import decode
from residua.data.decode import SUFFIXES
from residua.data.errors import DataError, tell
from residua.data.index import Hashes, file_stamps, fingerprint_of, settled
from residua.data.remote import is_url
from residua.data.source import EncodedSource, Source, Splits, threaded

TEST_NAMES = ("test", "val", "valid", "validation")
_HELD_OUT = 0.1
_AT_ONCE = 1024  # files whose status a thread asks for at once
_ANNOTATIONS = Path("val", "val_annotations.txt")  # of Tiny-ImageNet


class FolderSource(EncodedSource):
    """Image files, named by their path relative to `base`."""

    def __init__(
        self,
        name: str,
        split: str,
        base: Path,
        files: list[str],
        *,
        classes: list[str] | None,
        labels: np.ndarray | None,
        like: Source | None = None,
    ) -> None:
        self.base, self.files = base, files
        self.hashes = Hashes(fingerprint_of("folder", str(base.resolve()), files), len(files))
        super().__init__(name, split, len(files), classes=classes, labels=labels, like=like)

    def encoded(self, i: int) -> Path:
        return self.base / self.files[i]

    def identify(self, i: int) -> str:
        return self.files[i]

    def weights(self) -> np.ndarray:
        return self._stamps(np.arange(len(self)))[:, 0]

    def stamps(self, numbers: np.ndarray) -> np.ndarray:
        asked = time.time()
        return settled(self._stamps(numbers), asked)

    def stamp(self) -> str:
        times = self._stamps(np.arange(len(self)))[:, :2]
        return fingerprint_of(decode.VERSION, self.files, times, self.labels if self.labels is not None else "none")

    def _stamps(self, numbers: np.ndarray) -> np.ndarray:
        def some(start: int) -> np.ndarray:
            part = numbers[start : start + _AT_ONCE].tolist()
            return file_stamps([os.path.join(self.base, self.files[i]) for i in part])  # `Path`s would take longer

        return np.concatenate(threaded(some, range(0, len(numbers), _AT_ONCE)))


def load_folder(path: str) -> Splits:
    """`PATH/train` with `PATH/test|val|valid|validation`, or class folders, or any tree of images.

    Folders are classes when every image lies directly in one of at least two of them; so is `train` if it holds
    images itself beside other such folders. A tenth of each class becomes the test split where none is given.
    Tiny-ImageNet is read as its archive unpacks, too.
    """
    if is_url(path):
        raise DataError(
            f"folder:{path}: folders are read from this machine only, as every image would be a request of its own: "
            "pack the images into tar or parquet files (tar:s3://BUCKET/{000..127}.tar), or copy them here"
        )
    base = Path(path).expanduser()
    if not base.is_dir():
        what = "is a file, not a folder" if base.exists() else "does not exist"
        raise DataError(f"folder:{path}: {base} {what}; give the folder that holds the images")
    name = base.resolve().name
    if (base / "train").is_dir() and (base / _ANNOTATIONS).is_file():
        return _load_tiny_imagenet(base, name)
    if (base / "train").is_dir() and not _train_is_class(base):
        return _load_presplit(base, name)
    files = list_images(base)
    if not files:
        raise DataError(f"folder:{path}: no images in {base}; looked for {', '.join(sorted(SUFFIXES))}")
    return _split(name, base, files, "")


def list_images(root: Path) -> list[str]:
    """Relative paths (with `/`) of all images below `root`, sorted, without hidden ones.

    Links to folders are followed, but no folder is entered twice.
    """
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    waiting = deque([str(root)])  # the root, then links, which so never stand in for a folder's own path
    while waiting:
        for folder, subfolders, names in os.walk(waiting.popleft()):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            paths = (os.path.join(folder, name) for name in subfolders)
            waiting += [path for path in paths if os.path.islink(path)]
            relative = Path(folder).relative_to(root).as_posix()
            start = "" if relative == "." else relative + "/"
            found += [start + name for name in names if _is_image(name)]
    return sorted(found)


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def class_names(files: list[str]) -> list[str] | None:
    """Folder names when every file is `CLASS/FILE` with at least two classes, else None."""
    names = sorted({file.split("/")[0] for file in files})
    return names if _in_class_folders(files) and len(names) >= 2 else None


def _in_class_folders(files: list[str]) -> bool:
    return all(file.count("/") == 1 for file in files)


def _train_is_class(base: Path) -> bool:
    """Whether `train` is one class of several: images lie in it and in a sibling that names no split (nor `test2`)."""
    holding = [name for name in _subfolders(base) if any(_is_image(file) for file in os.listdir(base / name))]
    words = [re.split(r"[^a-z]", name.lower())[0] for name in holding]
    return "train" in holding and any(word not in ("train", *TEST_NAMES) for word in words)


def _subfolders(base: Path) -> list[str]:
    """Names of the visible folders in `base` that can be entered."""
    names = (path.name for path in base.iterdir() if path.is_dir() and os.access(path, os.R_OK | os.X_OK))
    return sorted(name for name in names if not name.startswith("."))


def _load_presplit(base: Path, name: str) -> Splits:
    files = list_images(base / "train")
    if not files:
        raise DataError(f"folder:{base}: no images in {base / 'train'}; looked for {', '.join(sorted(SUFFIXES))}")
    candidates = [(part, list_images(base / part)) for part in TEST_NAMES if (base / part).is_dir()]
    candidates = [(part, found) for part, found in candidates if found]
    others = [part for part in _subfolders(base) if part not in ("train", *TEST_NAMES) and list_images(base / part)]
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
    classes = sorted({file.split("/")[0] for file in files})
    number = {label: k for k, label in enumerate(classes)}
    labels = {f"val/images/{file}": label for file, label, *_ in rows}
    unknown = sorted(set(labels.values()) - set(number))
    if unknown:
        raise DataError(f"folder:{base}: {_ANNOTATIONS} names {unknown[0]}, which is not a class of the training set")

    def source(split: str, of: dict[str, str], like: Source | None = None) -> FolderSource:
        numbers = np.array([number[label] for label in of.values()], np.int64)
        return FolderSource(name, split, base, list(of), classes=classes, labels=numbers, like=like)

    train = source("train", {f"train/{file}": file.split("/")[0] for file in files})
    return Splits(name, train, source("val", dict(sorted(labels.items())), train))


def _split(name: str, base: Path, files: list[str], prefix: str) -> Splits:
    """Hold out a part of labelled images; without labels there is nothing to test."""
    classes = class_names(files)
    held_out = _hold_out(files) if classes else set()
    _tell_unlabelled(base, prefix, files)
    kept = [file for file in files if file not in held_out]
    train = _source(name, "train", base, kept, prefix, classes)
    if not held_out:
        return Splits(name, train)
    return Splits(name, train, _source(name, "test", base, sorted(held_out), prefix, classes, like=train))


def _tell_unlabelled(base: Path, prefix: str, files: list[str]) -> None:
    """Say what keeps folders that look like classes from being classes."""
    folders = {file.split("/")[0] for file in files if file.count("/") == 1}
    outside = [file for file in files if file.count("/") != 1]
    if len(folders) >= 2 and outside:
        more = f" and {len(outside) - 1:,} more do" if len(outside) > 1 else " does"
        tell(
            f"folder:{base}: {len(folders)} folders look like classes but give no labels, because "
            f"{prefix}{outside[0]}{more} not lie directly in such a folder"
        )


def _source(
    name: str,
    split: str,
    base: Path,
    files: list[str],
    prefix: str,
    classes: list[str] | None,
    like: Source | None = None,
) -> FolderSource:
    """Files below `base/prefix`, labelled by their folder where there are classes."""
    labels = None
    if classes is not None:
        number = {label: k for k, label in enumerate(classes)}
        folders = [file.split("/")[0] for file in files]
        unknown = sorted(set(folders) - set(number))
        if unknown:
            raise DataError(
                f"folder:{base}: {prefix}{unknown[0]} is not a class of the training set; "
                f"its classes are {', '.join(classes[:10])}{' ...' if len(classes) > 10 else ''}"
            )
        labels = np.array([number[folder] for folder in folders], np.int64)
    paths = [prefix + file for file in files]
    return FolderSource(name, split, base, paths, classes=classes, labels=labels, like=like)


def _hold_out(files: list[str]) -> set[str]:
    """A tenth of every class (at least one image where a class has two), chosen by the hash of the path."""
    order = sorted(files, key=lambda file: hashlib.blake2b(os.fsencode(file)).digest())
    counts = Counter(file.split("/")[0] for file in files)
    quota = {k: max(1, round(_HELD_OUT * n)) if n >= 2 else 0 for k, n in counts.items()}
    chosen = set()
    for file in order:
        folder = file.split("/")[0]
        if quota[folder] > 0:
            quota[folder] -= 1
            chosen.add(file)
    return chosen
