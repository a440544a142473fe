"""One spelling for where images come from."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from residua.data import arrays, folder, parquet, shapes, tar
from residua.data.errors import DataError, did_you_mean, some
from residua.data.source import Source, Splits, Subset

_WITH_PATH = {"folder": "PATH", "parquet": "PATH", "tar": "PATH", "hf": "NAME", "imagenet": "PATH"}
_COMMON = ("classes", "train")  # every source has these
_OPTIONS = {  # beside those
    "shapes": ("n", "size", "test"),
    "parquet": ("image", "label"),
    "tar": ("image", "label"),
    "hf": ("image", "label", "config", "revision"),
    "stl10": ("unlabeled",),
}
_LISTS = Path(__file__).parent / "classes"  # of class names, by their own name
NAMES = ("shapes", "digits", *(f"{k}:{v}" for k, v in _WITH_PATH.items()), *arrays.TORCHVISION)


def load(spec: str, *, seed: int = 0, img_size: int | None = None) -> Splits:
    """Training and test images by name.

    | spec | images |
    |---|---|
    | `shapes` | procedural, made by `seed`; `shapes?n=2000&size=32&classes=8` |
    | `digits` | scikit-learn's 8 px digits |
    | `folder:PATH` | class folders, `train`/`test` folders, or any tree of images |
    | `parquet:PATH` | Hugging Face layout; `parquet:PATH?label=coarse_label&image=img` |
    | `tar:PATH` | WebDataset shards: file, folder, `{000..127}.tar`, `s3://...`; `?image=jpg`, `?label=cls` |
    | `hf:NAME` | the Hugging Face Hub; `?config=`, `?revision=`, `?label=`, `?image=` |
    | `cifar10 cifar100 stl10 mnist fashion-mnist imagenet:PATH` | torchvision's |

    Of any labelled set `?classes=3` keeps the images of the first three classes, `?classes=FILE` those of the classes
    that a file names, numbered in its order (text, one name a line, or a JSON list), and `?classes=tiny-imagenet-100`
    those of a list that comes with the package: the first 100 WordNet ids of Tiny-ImageNet. Of any set `?train=5000`
    draws that many of the training images, always the same ones, and leaves the test images as they are. `img_size` is
    the size `shapes` is drawn at unless the spec says; stored images keep theirs.
    """
    name, argument, options = _parse(spec)
    count = _integer(spec, "train", options.pop("train")) if "train" in options else None
    classes: int | list[str] | None = None
    if "classes" in options and name != "shapes":
        classes = _which_classes(spec, options.pop("classes"))
    splits = _load(spec, name, argument, options, seed, img_size)
    if classes is not None:
        splits = _of_classes(spec, splits, classes)
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
        case "tar":
            return tar.load_tar(argument, **options)
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


def _which_classes(spec: str, value: str) -> int | list[str]:
    """A number of classes, or the names in a file or in a list of the package."""
    if value.isdecimal():
        return int(value)
    lists = {file.stem: file for file in sorted(_LISTS.glob("*.txt"))}
    file = lists.get(value) or Path(value).expanduser()
    if not file.is_file():
        raise DataError(
            f"data {spec!r}: classes={value!r}, expected a whole number, a file of class names, or {' or '.join(lists)}"
        )
    return _names(spec, file)


def _names(spec: str, file: Path) -> list[str]:
    """Class names in a file: one a line, or a JSON list, or the keys of a JSON object."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else [line.strip() for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"data {spec!r}: {file} is not a readable list of class names: {error}") from error
    if not isinstance(found, list | dict) or not all(isinstance(name, str) for name in found):
        raise DataError(f'data {spec!r}: {file} holds no list of class names, such as ["n01443537", "n01629819"]')
    names = [name for name in found if name]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise DataError(f"data {spec!r}: {file} names {f'{some(twice)} more than once' if twice else 'no class'}")
    return names


def _of_classes(spec: str, splits: Splits, chosen: int | list[str]) -> Splits:
    """The images of the first so many classes, or of those with these names, numbered in their order."""
    train, test = splits.train, splits.test
    if train.labels is None:
        raise DataError(f"data {spec!r}: there are no labels, so there are no classes to choose from")
    most = len(train.classes) if train.classes else int(train.labels.max()) + 1
    number = np.full(most, -1)  # of each class in the new order; -1: left out
    if isinstance(chosen, int):
        if not 1 <= chosen <= most:
            raise DataError(f"data {spec!r}: classes={chosen}, expected 1 to {most}")
        number[:chosen] = np.arange(chosen)
        names = train.classes and train.classes[:chosen]
    else:
        names, known = chosen, train.classes or []
        count, at = Counter(known), {name: k for k, name in enumerate(known)}
        unclear = [name for name in names if count[name] != 1]
        if unclear:
            raise DataError(
                f"data {spec!r}: {len(unclear):,} of the {len(names):,} classes to keep ({some(unclear)}) are not the "
                f"name of one class; the set's {len(known):,} classes are {some(known)}"
            )
        number[[at[name] for name in names]] = np.arange(len(names))

    def part(source: Source) -> Source:
        if source.labels is None:
            return source
        indices = np.flatnonzero(number[source.labels] >= 0)
        return Subset(source, indices, number[source.labels[indices]], names)

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
