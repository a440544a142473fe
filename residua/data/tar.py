"""WebDataset shards: tar archives whose members belong together by name (`tar:PATH`, `tar:s3://BUCKET/KEY`).

Nothing is unpacked. Every shard is walked once for the places of its images; images are then read from there in any
order. Only images and labels are ever opened: other members, pickles among them, stay what they are.
"""

from __future__ import annotations

import glob
import io
import itertools
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from residua.data import remote
from residua.data.decode import SUFFIXES
from residua.data.errors import BadImage, DataError, did_you_mean, some, tell
from residua.data.index import Hashes, cache_dir, fingerprint_of
from residua.data.parquet import LABEL_NAMES, by_name, number_labels, split_of
from residua.data.source import EncodedSource, Source, Splits
from residua.disk import replacing
from residua.room import cores

_IMAGES = frozenset(suffix[1:] for suffix in SUFFIXES - {".npy"})
_SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # key and extension, at the first dot of a member's name
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_BRACES = re.compile(r"\{([^{}]*)\}")
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MOST_SHARDS = 100_000
_MOST_HEADER = 1 << 16  # bytes of a member's long name and attributes
_MOST_LABEL = 1 << 20  # bytes of a .cls or .json
_MOST_IMAGE = 1 << 30  # bytes of an encoded image
_INDEX_VERSION = 1  # a higher one where the same shard gives another index than before


@dataclass(frozen=True)
class LocalShard:
    """An archive on this machine."""

    path: Path
    name: str
    """Relative to the folder that holds all shards of the set."""

    def __str__(self) -> str:
        return str(self.path)

    def stamp(self) -> tuple[int, str]:
        """Bytes, and what changes when they do."""
        status = self.path.stat()
        return status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}"

    def place(self) -> str:
        """Where it is, the same for whoever names it."""
        return str(self.path.resolve())

    def prepare(self) -> None:
        """It is here."""

    def open(self) -> BinaryIO:
        return self.path.open("rb")

    def read(self, start: int, size: int) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            return file.read(size)


Shard = LocalShard | remote.RemoteFile


@dataclass
class Index:
    """What a shard holds: of every image its sample's key, its place and its label."""

    size: int
    tag: str
    keys: list[str] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """First byte of an image, and how many it has."""
    labels: list[int | str | None] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    """Of the first .json that there is."""
    notes: list[str] = field(default_factory=list)


class TarSource(EncodedSource):
    """Images of some shards, in the order of shards and members.

    Beside its key an image takes 36 bytes of memory.
    """

    def __init__(
        self,
        name: str,
        split: str,
        shards: Sequence[Shard],
        indices: Sequence[Index],
        *,
        classes: list[str] | None,
        labels: np.ndarray | None,
        like: Source | None = None,
    ) -> None:
        self.shards = list(shards)
        self._stamps = [(shard.name, index.size, index.tag) for shard, index in zip(shards, indices)]
        self._spans = np.concatenate([np.array(index.spans, np.int64).reshape(-1, 2) for index in indices])
        self._shard = np.repeat(np.arange(len(shards), dtype=np.int32), [len(index.spans) for index in indices])
        keys = [key.encode("utf-8", "surrogateescape") for index in indices for key in index.keys]
        self._keys, self._ends = b"".join(keys), np.cumsum([len(key) for key in keys], dtype=np.int64)
        self._version = np.array([int(fingerprint_of(stamp)[:15], 16) for stamp in self._stamps], np.int64)
        places = [shard.place() for shard in self.shards]
        self.hashes = Hashes(fingerprint_of("tar", places, self._shard, self._keys, self._ends), len(self._spans))
        super().__init__(name, split, len(self._spans), classes=classes, labels=labels, like=like)

    def encoded(self, i: int) -> bytes:
        start, size = self._spans[i].tolist()
        if size > _MOST_IMAGE:
            raise BadImage(self.identify(i), f"its {size:,} bytes are more than the {_MOST_IMAGE:,} an image may have")
        try:
            data = self.shards[self._shard[i]].read(start, size)
        except OSError as error:
            raise BadImage(self.identify(i), error) from error
        if len(data) < size:
            raise BadImage(self.identify(i), f"{len(data):,} of its {size:,} bytes are there: the shard has changed")
        return data

    def identify(self, i: int) -> str:
        """`SHARD/KEY`."""
        start = int(self._ends[i - 1]) if i else 0
        key = self._keys[start : int(self._ends[i])].decode("utf-8", "surrogateescape")
        return f"{self.shards[self._shard[i]].name}/{key}"

    def weights(self) -> np.ndarray:
        return self._spans[:, 1].copy()

    def stamps(self, numbers: np.ndarray) -> np.ndarray:
        start, size = self._spans[numbers].T
        return np.stack([size, self._version[self._shard[numbers]], start], 1)

    def state(self, numbers: np.ndarray) -> str:
        return fingerprint_of(self._stamps, self._spans, self._keys, numbers)


def load_tar(path: str, *, image: str | None = None, label: str | None = None) -> Splits:
    """A shard, a folder of them, or a pattern: `{000..127}.tar`, `{a,b}.tar`, `*.tar`; by path or by URL.

    A sample is what a shard's members with one name up to the first dot hold together. Its image is its member with
    the extension `image`, else the first .jpg, .png, .webp, ...; its label is in its member with the extension `label`
    (by default .cls), or in the field `label` of its .json. Names of shards tell the splits, as those of parquet files
    do.
    """
    name, shards = _find(path)
    groups: dict[str, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(split_of(shard.name), []).append(shard)
    chosen = image and image.lower().removeprefix("."), label and label.removeprefix(".")
    return by_name(name, groups, lambda split, part, like: _open(name, split, part, *chosen, like), "tar")


def _open(
    name: str, split: str, shards: list[Shard], image: str | None, label: str | None, like: Source | None
) -> tuple[TarSource, str | None]:
    """The images of a split and, where there are labels that cannot be used, why."""
    with ThreadPoolExecutor(min(8, 2 * cores())) as pool:
        indices = list(pool.map(lambda shard: index_of(shard, image, label), shards))
    for note in [note for index in indices for note in index.notes][:4]:
        tell(note)
    if not any(index.spans for index in indices):
        raise DataError(_without_images(name, split, shards, indices, image))
    values = [value for index in indices for value in index.labels]
    classes = None if like is None else like.classes
    labels, why = None, None
    if any(value is not None for value in values):
        labels, classes, why = number_labels(name, label or "label", [_column(values)], classes)
    elif label is not None:
        known = sorted({word for index in indices for word in (*index.extensions, *index.fields)})
        raise DataError(f"{name}: no member .{label} and no field {label!r} of a .json; {did_you_mean(label, known)}")
    return TarSource(name, split, shards, indices, classes=classes, labels=labels, like=like), why


def _without_images(name: str, split: str, shards: Sequence[Shard], indices: Sequence[Index], image: str | None) -> str:
    looked = f".{image}" if image else ", ".join(f".{word}" for word in sorted(_IMAGES))
    found = sorted({word for index in indices for word in index.extensions})
    there = f"their members are .{some(found, 8)}; choose with ?image=EXTENSION" if found else "they hold no files"
    where = some([str(shard) for shard in shards])
    return f"{name}: no images in the {split} split ({where}): looked for {looked}; {there}"


def _column(values: list[int | str | None]) -> pa.ChunkedArray:
    """Labels as numbers, or as words where one is a word."""
    words = any(isinstance(value, str) for value in values)
    if words:
        return pa.chunked_array([pa.array([None if value is None else str(value) for value in values], pa.string())])
    bound = 2**62  # more is no number of a class either
    return pa.chunked_array([pa.array([None if v is None else max(-1, min(v, bound)) for v in values], pa.int64())])  # type: ignore[type-var]


def _find(path: str) -> tuple[str, list[Shard]]:
    """The set's name and its shards, in order."""
    if remote.is_url(path):
        name, found = remote.as_set(remote.find(path, expand(path), ".tar"))
        return name, [*found]
    base = Path(path).expanduser()
    if base.is_file():
        return base.name.split(".")[0], [LocalShard(base, base.name)]
    if base.is_dir():
        files = [file for file in sorted(base.rglob("*.tar")) if not file.name.startswith(".") and file.is_file()]
        if not files:
            raise DataError(f"tar:{path}: no .tar files in {base}")
        return base.resolve().name, [LocalShard(file, file.relative_to(base).as_posix()) for file in files]
    files = [file for pattern in expand(str(base)) for file in _matching(path, pattern)]
    folder = remote.common_folder([str(file) for file in files])
    return Path(folder).resolve().name, [LocalShard(file, str(file)[len(folder) :].lstrip("/\\")) for file in files]


def _matching(path: str, pattern: str) -> list[Path]:
    if Path(pattern).is_file():  # whatever signs it has in its name
        return [Path(pattern)]
    found = [file for file in sorted(map(Path, glob.glob(pattern, recursive=True))) if file.is_file()]
    if not found:
        raise DataError(
            f"tar:{path}: {pattern} does not exist; give a .tar file, a folder of them, or a pattern such as "
            "'shards/{000..127}.tar' or 'shards/*.tar'"
        )
    return found


def expand(pattern: str) -> list[str]:
    """`{08..11}.tar` -> `08.tar`, ..., `11.tar`; `{a,b}.tar` -> `a.tar`, `b.tar`, as shells do."""
    words = _BRACES.split(pattern)  # text, inside of braces, text, ...
    choices = [_alternatives(word) if k % 2 else [word] for k, word in enumerate(words)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MOST_SHARDS:
        raise DataError(f"{pattern} names {count:,} shards, expected at most {_MOST_SHARDS:,}")
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _alternatives(inside: str) -> Sequence[str]:
    ends = _RANGE.fullmatch(inside)
    if ends is None:
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    first, last = (int(end) for end in ends.groups())
    if abs(last - first) >= _MOST_SHARDS:
        raise DataError(f"{{{inside}}} names {abs(last - first) + 1:,} shards, expected at most {_MOST_SHARDS:,}")
    padded = max(map(len, ends.groups())) if any(end[0] == "0" and len(end) > 1 for end in ends.groups()) else 0
    return [f"{k:0{padded}}" for k in range(first, last + 1) or range(first, last - 1, -1)]


def index_of(shard: Shard, image: str | None, label: str | None) -> Index:
    """Of a shard, kept in the cache until the shard changes."""
    try:
        shard.prepare()
        size, tag = shard.stamp()
        key = fingerprint_of(_INDEX_VERSION, shard.place(), size, tag, image, label)
        stored = cache_dir() / "tar" / f"{key}.json.zip"
        with suppress(OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile):
            return _load_index(stored)
        with shard.open() as file:
            index = read_index(file, str(shard), Index(size, tag), image, label)
    except OSError as error:
        raise DataError(f"{shard} cannot be read: {error}") from error
    with suppress(OSError):  # it is made again next time
        stored.parent.mkdir(parents=True, exist_ok=True)
        with replacing(stored) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("index.json", json.dumps(asdict(index)))
    return index


def _load_index(path: Path) -> Index:
    with zipfile.ZipFile(path) as archive:
        index = Index(**json.loads(archive.read("index.json")))
    if not len(index.keys) == len(index.spans) == len(index.labels):
        raise ValueError("it is incomplete")
    return index


def read_index(file: BinaryIO, where: str, index: Index, image: str | None, label: str | None) -> Index:
    """Walk the headers of a shard; of its contents only labels are read."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    labels: dict[str, int | str] = {}
    left_out: list[str] = []
    for member in _members(file, where):
        name = member.name.removeprefix("./")
        sample = _SAMPLE.fullmatch(name)
        if sample is None or member.isdir():
            continue
        if not _is_plain(member) or name.startswith("/") or ".." in name.split("/"):
            left_out.append(name)
            continue
        key, extension = sample[1], sample[2].lower()
        samples.setdefault(key, {})[extension] = (member.offset_data, member.size)
        if extension in ("cls", "json", label):
            value = _label(file, where, member, label, index)
            if value is not None and (extension != "json" or key not in labels):
                labels[key] = value
    index.extensions = sorted({extension for parts in samples.values() for extension in parts})[:100]
    several = 0
    for key, parts in samples.items():
        found = [extension for extension in parts if (extension == image if image else extension in _IMAGES)]
        if found:
            several += len(found) > 1
            index.keys.append(key)
            index.spans.append(parts[found[0]])
            index.labels.append(labels.get(key))
    if left_out:
        index.notes.append(
            f"{where}: {len(left_out):,} members are left out (links, sparse files, paths out of the archive): "
            f"{some(left_out)}"
        )
    if several:
        index.notes.append(
            f"{where}: {several:,} samples hold several images, of which the first is taken; "
            "choose with ?image=EXTENSION"
        )
    if index.keys and (bare := len(samples) - len(index.keys)):
        index.notes.append(f"{where}: {bare:,} of {len(samples):,} samples hold no image and are left out")
    return index


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None  # type: ignore[attr-defined]


def _label(file: BinaryIO, where: str, member: tarfile.TarInfo, label: str | None, index: Index) -> int | str | None:
    """The class, by number or name, in a .cls, a .json or the member that the user named; None where there is none."""
    extension = member.name.rpartition("/")[2].partition(".")[2].lower()
    if label is not None and extension not in (label, "json"):
        return None
    if member.size > _MOST_LABEL:
        raise DataError(
            f"{where}: {member.name} has {member.size:,} bytes, expected a label of at most {_MOST_LABEL:,}"
        )
    file.seek(member.offset_data)
    data = file.read(member.size)
    try:
        text = data.decode("utf-8").strip()
        value: Any = _of_json(json.loads(text), label, index) if extension == "json" and label != "json" else text
        if isinstance(value, str) and extension != "json":
            value = int(value) if re.fullmatch(r"[+-]?\d{1,18}", value) else value or None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {member.name} is not a readable label: {error}") from error
    if isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, int | str):
        raise DataError(
            f"{where}: the label in {member.name} is {json.dumps(value)[:60]}, expected the number or name of a class; "
            "choose with ?label=NAME"
        )
    return value


def _of_json(found: Any, label: str | None, index: Index) -> Any:
    if not isinstance(found, dict):
        return found if label is None and isinstance(found, int | str) else None
    if not index.fields:
        index.fields = sorted(found)[:100]
    return next((found[name] for name in ([label] if label else [*LABEL_NAMES, "cls", "class"]) if name in found), None)


def _members(file: BinaryIO, where: str) -> Iterator[tarfile.TarInfo]:
    """All of an archive; a damaged or truncated one is refused."""
    start = file.read(6)
    file.seek(0)
    packed = next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), None)
    if packed:
        raise DataError(
            f"{where} is compressed ({packed}), so its images cannot be read in any order: unpack it to a plain .tar "
            "(images are compressed already)"
        )
    at = 0
    try:
        tar: Any = tarfile.open(fileobj=_Headers(file), mode="r:")  # noqa: SIM115
        while (member := tar.next()) is not None:
            tar.members = []  # which would be kept for all
            if tar.offset <= at or member.size < 0:
                raise ValueError(f"member {member.name} has {member.size:,} bytes")
            at = tar.offset
            yield member
        file.seek(at)
        rest = file.read(tarfile.BLOCKSIZE)
        if rest.strip(b"\0") or (not rest and at):
            raise ValueError("expected the header of a member, or the blocks of zeros that end an archive")
    except DataError:
        raise
    except Exception as error:  # whatever damaged headers lead to
        raise DataError(
            f"{where} is not a readable tar archive: at byte {at:,}: {error}; was it cut short? fetch or pack it again"
        ) from error


class _Headers(io.RawIOBase):
    """An archive for `tarfile`, which would take any amount of memory for what a header claims to be its name."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MOST_HEADER:
            raise ValueError(f"a header of {size:,} bytes, expected at most {_MOST_HEADER:,}")
        return self.file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()
