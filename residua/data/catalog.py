"""One spelling for where images come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from residua.data import arrays, folder, parquet, shapes
from residua.data.errors import DataError, did_you_mean
from residua.data.source import Source, Splits

_WITH_PATH = {"folder": "PATH", "parquet": "PATH", "hf": "NAME", "imagenet": "PATH"}
_COMMON = ("classes", "train")  # every source has these
_OPTIONS = {  # beside those
    "shapes": ("n", "size", "test"),
    "parquet": ("image", "label"),
    "hf": ("image", "label", "config", "revision"),
    "stl10": ("unlabeled",),
}
NAMES = ("shapes", "digits", *(f"{k}:{v}" for k, v in _WITH_PATH.items()), *arrays.TORCHVISION)


def load(spec: str, *, seed: int = 0, img_size: int | None = None) -> Splits:
    """Training and test images by name.

    | spec | images |
    |---|---|
    | `shapes` | procedural, made by `seed`; `shapes?n=2000&size=32&classes=8` |
    | `digits` | scikit-learn's 8 px digits |
    | `folder:PATH` | class folders, `train`/`test` folders, or any tree of images |
    | `parquet:PATH` | Hugging Face layout; `parquet:PATH?label=coarse_label&image=img` |
    | `hf:NAME` | the Hugging Face Hub; `?config=`, `?revision=`, `?label=`, `?image=` |
    | `cifar10 cifar100 stl10 mnist fashion-mnist imagenet:PATH` | torchvision's |

    Of any labelled set `?classes=3` keeps the images of the first three classes; of any set `?train=5000` draws that
    many of the training images, always the same ones, and leaves the test images as they are. `img_size` is the size
    `shapes` is drawn at unless the spec says; stored images keep theirs.
    """
    name, argument, options = _parse(spec)
    count = _integer(spec, "train", options.pop("train")) if "train" in options else None
    classes = None
    if "classes" in options and name != "shapes":
        classes = _integer(spec, "classes", options.pop("classes"))
    splits = _load(spec, name, argument, options, seed, img_size)
    if classes is not None:
        splits = _first_classes(spec, splits, classes)
    return splits if count is None else _fewer(spec, splits, count)


def _load(spec: str, name: str, argument: str, options: dict[str, str], seed: int, img_size: int | None) -> Splits:
    match name:
        case "shapes":
            numbers = {key: _integer(spec, key, value) for key, value in options.items()}
            return shapes.load_shapes(seed=seed, **({"size": img_size} if img_size else {}) | numbers)
        case "digits":
            return arrays.load_digits()
        case "folder":
            return folder.load_folder(argument)
        case "parquet":
            return parquet.load_parquet(argument, **options)
        case "hf":
            return parquet.load_hub(argument, **options)
        case "imagenet":
            return _load_imagenet(argument)
        case "stl10":
            unlabeled = bool(_integer(spec, "unlabeled", options.get("unlabeled", "0")))
            return arrays.load_torchvision(name, unlabeled=unlabeled)
        case _:
            return arrays.load_torchvision(name)


def _parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """`parquet:PATH?label=x` -> ("parquet", "PATH", {"label": "x"})."""
    head, _, query = spec.partition("?")
    name, colon, argument = head.partition(":")
    known = {*_WITH_PATH, "shapes", "digits", *arrays.TORCHVISION}
    if name not in known:
        hint = f"folder:{head}" if Path(head).expanduser().is_dir() else None
        advice = f"for a folder of images write {hint!r}" if hint else did_you_mean(name, NAMES)
        every = "" if advice.startswith("known") else f" (all: {', '.join(NAMES)})"
        raise DataError(f"unknown data {spec!r}: {advice}{every}")
    if name in _WITH_PATH and not argument:
        raise DataError(f"data {spec!r} lacks its {_WITH_PATH[name].lower()}: write {name}:{_WITH_PATH[name]}")
    if name not in _WITH_PATH and colon:
        raise DataError(f"data {spec!r}: {name} takes no path; options follow a question mark ({name}?key=value)")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for key in options:
        allowed = (*_OPTIONS.get(name, ()), *_COMMON)
        if key not in allowed:
            raise DataError(f"data {spec!r}: unknown option {key!r}; {did_you_mean(key, allowed)}")
    return name, argument, options


def _first_classes(spec: str, splits: Splits, count: int) -> Splits:
    """The images of classes 0 to count - 1."""
    train, test = splits.train, splits.test
    if train.labels is None:
        raise DataError(f"data {spec!r}: there are no labels, so there are no classes to choose from")
    most = len(train.classes) if train.classes else int(train.labels.max()) + 1
    if not 1 <= count <= most:
        raise DataError(f"data {spec!r}: classes={count}, expected 1 to {most}")

    def part(source: Source) -> Source:
        if source.labels is None:
            return source
        kept = source.subset(np.flatnonzero(source.labels < count))
        kept.classes = source.classes and source.classes[:count]
        return kept

    return Splits(splits.name, part(train), None if test is None else part(test))


def _fewer(spec: str, splits: Splits, count: int) -> Splits:
    """`count` of the training images, in their order; which ones depends on how many there are and nothing else."""
    total = len(splits.train)
    if not 1 <= count <= total:
        raise DataError(f"data {spec!r}: train={count}, expected 1 to {total:,}, the number of training images")
    drawn = np.random.default_rng(0).permutation(total)[:count]
    return replace(splits, train=splits.train.subset(np.sort(drawn)))


def _integer(spec: str, key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise DataError(f"data {spec!r}: {key}={value!r}, expected a whole number") from None


def _load_imagenet(path: str) -> Splits:
    """ImageNet-1k under PATH: unpacked `train` and `val` folders, or the archives (unpacked once)."""
    base = Path(path).expanduser()
    if not base.is_dir():
        raise DataError(f"imagenet:{path}: {base} does not exist; give the folder with train and val, or the archives")
    names: dict[str, str] = {}
    if any(base.glob("ILSVRC2012_devkit*")) or (base / "meta.bin").exists():
        from torchvision.datasets import ImageNet

        try:
            parts = [ImageNet(str(base), split=split) for split in ("train", "val")]
        except (RuntimeError, OSError) as error:
            raise DataError(f"imagenet:{path}: {error}") from error
        names = {wnid: words[0] for wnid, words in zip(parts[0].wnids, parts[0].classes)}
    splits = folder.load_folder(path)
    for part in (splits.train, splits.test):
        if part is not None and part.classes is not None:
            part.classes = [names.get(wnid, wnid) for wnid in part.classes]
    return Splits("imagenet", splits.train, splits.test)
