"""Hugging Face parquet files (`parquet:PATH`, `parquet:s3://BUCKET/KEY`), or those of the Hub (`hf:NAME`)."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from residua.data import remote
from residua.data.errors import BadImage, DataError, did_you_mean, tell
from residua.data.index import UNSURE, Hashes, cache_dir, file_stamps, fingerprint_of, settled
from residua.data.remote import RemoteFile
from residua.data.source import EncodedSource, Source, Splits
from residua.disk import replacing
from residua.room import memory

F = TypeVar("F")
File = Path | RemoteFile

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "dev": "valid",
}
LABEL_NAMES = ("label", "fine_label", "labels")
_MOST_CLASSES = 100_000  # without names; more only where there are as many images
_SPILL_SHARE = 0.25  # of this process's memory; larger sets are mapped from a file instead


class ParquetSource(EncodedSource):
    """Rows of some parquet files; encoded images are held in memory, or memory-mapped when there are many.

    A row may name a file instead of holding an image, relative to the first parquet file and below `root`. Of remote
    files the image column is unpacked into the cache, row group by row group, and memory-mapped.
    """

    _lengths: np.ndarray | None

    def __init__(
        self,
        name: str,
        split: str,
        files: list[File],
        *,
        root: Path | None,
        image: str,
        classes: list[str] | None,
        labels: np.ndarray | None,
        like: Source | None = None,
    ) -> None:
        self.files, self.root, self.image = files, root, image
        self._version = _version_of(files)
        self._open()
        places = [str(file.resolve()) if isinstance(file, Path) else file.url for file in files]
        self.hashes = Hashes(fingerprint_of("parquet", places, image), int(self._starts[-1]))
        super().__init__(name, split, int(self._starts[-1]), classes=classes, labels=labels, like=like)

    def encoded(self, i: int) -> bytes | Path:
        chunk = int(np.searchsorted(self._starts, i, side="right")) - 1
        row = i - int(self._starts[chunk])
        data, paths = self._chunks[chunk]
        value = data[row].as_py()
        if value is None and paths is not None and paths[row].as_py():
            return self._beside(paths[row].as_py(), i)
        return value or b""

    def identify(self, i: int) -> str:
        return f"{self.split}/{i:06d}"

    def weights(self) -> np.ndarray:
        import pyarrow.compute as pc

        lengths = [pc.fill_null(pc.binary_length(data), -1).to_numpy() for data, _ in self._chunks]
        return np.concatenate(lengths).astype(np.int64)

    def stamps(self, numbers: np.ndarray) -> np.ndarray:
        if self._lengths is None:
            self._lengths = self.weights()
        lengths = self._lengths[numbers]
        version = np.where(lengths < 0, UNSURE, self._version)  # a file that a row names may change by itself
        return np.stack([np.maximum(lengths, 0), version, numbers], 1)

    def state(self, numbers: np.ndarray) -> str:
        return fingerprint_of(_content_key(self.files), self.image, numbers)

    def _beside(self, path: str, i: int) -> Path:
        """An image file that a row names: one of the set's own folder, and no other file of this machine."""
        if self.root is None or not isinstance(first := self.files[0], Path):
            raise BadImage(self.identify(i), f"its row names {path}, a file, where only images in the rows are read")
        try:
            file = (first.parent / path).resolve()
        except (OSError, ValueError) as error:  # no name that a file could have
            raise BadImage(self.identify(i), error) from error
        if not file.is_relative_to(self.root.resolve()):
            raise BadImage(self.identify(i), f"its path {path} leads out of the folder {self.root}")
        return file

    def _open(self) -> None:
        columns: Iterable[pa.Array]
        if self.root is None:
            columns = _cached(self.files, self.image)
        else:
            size = sum(_column_bytes(file, self.image) for file in self.files)
            spills = size > _SPILL_SHARE * memory()
            columns = _spilled(self.files, self.image) if spills else _rows(self.files, self.image)
        self._chunks = [_bytes_and_paths(column) for column in columns]
        self._starts = np.cumsum([0] + [len(data) for data, _ in self._chunks])
        self._lengths = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_chunks", "_starts", "_lengths")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def load_parquet(path: str, *, image: str | None = None, label: str | None = None, name: str | None = None) -> Splits:
    """A parquet file or a folder of them; names tell the splits (`train-*`, `test-*`, `valid*-*`)."""
    groups: dict[str, list[File]] = {}
    if remote.is_url(path):
        known, found = remote.as_set(remote.find(path, [path], ".parquet"), unpacked=True)
        for far in found:
            groups.setdefault(split_of(far.name), []).append(far)
        return _load_groups(name or known, None, groups, image, label)
    base = Path(path).expanduser()
    if not base.exists():
        raise DataError(f"parquet:{path}: {base} does not exist; give a .parquet file or a folder of them")
    files = [base] if base.is_file() else sorted(base.rglob("*.parquet"))
    if not files:
        raise DataError(f"parquet:{path}: no .parquet files in {base}")
    root = base.parent if base.is_file() else base
    for file in files:
        groups.setdefault(split_of(file.relative_to(root).as_posix()), []).append(file)
    name = name or (base.stem if base.is_file() else base.resolve().name)
    return _load_groups(name, root, groups, image, label)


def load_hub(
    name: str,
    *,
    image: str | None = None,
    label: str | None = None,
    config: str | None = None,
    revision: str | None = None,
) -> Splits:
    """A data set of the Hugging Face Hub: its parquet files, or those that the Hub converted it to."""
    import huggingface_hub as hub

    revisions = [revision] if revision else [None, "refs/convert/parquet"]
    files: list[str] = []
    try:
        for at in revisions:
            listed = hub.HfApi().list_repo_files(name, repo_type="dataset", revision=at)
            files = sorted(file for file in listed if file.endswith(".parquet"))
            if files:
                break
        files = _one_config(name, files, config)
        local = {file: hub.hf_hub_download(name, file, repo_type="dataset", revision=at) for file in files}
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"hf:{name}: the Hub answered {type(error).__name__}: {error}; "
            "check the name (owner/data-set), the network, and your login if it is gated"
        ) from error
    groups: dict[str, list[File]] = {}
    for file in files:
        groups.setdefault(split_of(file), []).append(Path(local[file]))
    root = Path(os.path.commonpath([Path(file).parent for file in local.values()]))
    return _load_groups(name, root, groups, image, label)


def split_of(file: str) -> str:
    """`data/test-00000-of-00002.parquet`, `default/test/0000.parquet` -> `test`; else `train`."""
    for part in reversed(Path(file).with_suffix("").parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def _one_config(name: str, files: list[str], config: str | None) -> list[str]:
    """The files of one configuration; top-level folders other than `data` name them."""
    if not files:
        raise DataError(f"hf:{name}: no parquet files; download it and use folder:PATH or parquet:PATH")
    named = {file: Path(file).parts[0] if len(Path(file).parts) > 1 else "data" for file in files}
    configs = sorted(set(named.values()) - set(_SPLIT_WORDS))
    if config is None and len(configs) <= 1:
        return files
    if config is None and "default" in configs:
        config = "default"
    if config not in configs:
        given = f"no configuration {config!r}" if config else "several configurations"
        raise DataError(f"hf:{name}: {given}; choose with hf:{name}?config=NAME from {', '.join(configs)}")
    return [file for file in files if named[file] == config]


def _load_groups(
    name: str, root: Path | None, groups: dict[str, list[File]], image: str | None, label: str | None
) -> Splits:
    if "train" in groups:
        image, label, classes = _columns(name, groups["train"][0], image, label)
        for file in (file for files in groups.values() for file in files):
            if image not in _schema(file).names:
                raise DataError(f"{name}: {file} has no column {image!r}, which {groups['train'][0]} has")
        if root is None:
            groups = _kept_together(groups, image)

    def part(split: str, files: list[File], like: Source | None) -> tuple[Source, str | None]:
        assert image is not None
        labels, known, why = _labels(name, files, label, classes if like is None else like.classes)
        source = ParquetSource(name, split, files, root=root, image=image, classes=known, labels=labels, like=like)
        return source, why

    return by_name(name, groups, part, "parquet")


def by_name(
    name: str,
    groups: dict[str, list[F]],
    part: Callable[[str, list[F], Source | None], tuple[Source, str | None]],
    suffix: str,
) -> Splits:
    """Splits of files grouped by `split_of`; `part` opens one, and says why its labels cannot be used if so."""
    if "train" not in groups:
        raise DataError(f"{name}: no training files among {', '.join(sorted(groups))}; name them train-*.{suffix}")
    train, why = part("train", groups["train"], None)
    _tell_unlabelled(name, "train", why)
    fallback: Source | None = None
    reason: str | None = None
    for split in ("test", "valid"):
        if split not in groups:
            continue
        test, why = part(split, groups[split], train)
        if test.labels is not None or train.labels is None:
            _tell_unlabelled(name, split, why)
            return Splits(name, train, test)
        if fallback is None:  # a test split without labels is used only if there is no better
            fallback, reason = test, why
    if fallback is not None:
        _tell_unlabelled(name, fallback.split, reason)
    return Splits(name, train, fallback)


def _tell_unlabelled(name: str, split: str, why: str | None) -> None:
    if why is not None:
        tell(f"{name}: the {split} split has no labels, because {why}")


def _columns(name: str, file: File, image: str | None, label: str | None) -> tuple[str, str | None, list[str] | None]:
    """Image column, label column (None if there is none) and class names (None if they are not given)."""
    schema = _schema(file)
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        features = dict(features)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} describes its columns in a way that cannot be read: {error}") from error
    for given, what in ((image, "image"), (label, "label")):
        if given is not None and given not in schema.names:
            raise DataError(f"{name}: no column {given!r} for {what}; {did_you_mean(given, schema.names)}")
    if image is not None and not _holds_images(schema.field(image).type):
        kind = schema.field(image).type
        raise DataError(f"{name}: column {image!r} holds {kind}, expected images ({{bytes, path}}, or bytes)")
    if image is None:
        declared = [key for key, value in features.items() if _type(value) == "Image" and key in schema.names]
        found = declared or [field.name for field in schema if _holds_images(field.type)]
        if not found:
            raise DataError(
                f"{name}: no column of images ({{bytes, path}}) among {', '.join(schema.names)}; "
                "choose with ?image=NAME"
            )
        image = found[0]
    if label is None:
        declared = [key for key, value in features.items() if _type(value) == "ClassLabel" and key in schema.names]
        named = [key for key in LABEL_NAMES if key in schema.names]
        usable = [key for key in named if _tells_classes(schema.field(key).type)]
        choices = [key for key in named if key in declared] + declared + usable
        label = choices[0] if choices else None
        if label is None and named:
            kind = schema.field(named[0]).type
            tell(f"{name}: no labels, because column {named[0]!r} holds {kind}, expected class numbers or names")
    classes = features.get(label, {}).get("names") if label and isinstance(features.get(label), dict) else None
    return image, label, list(classes) if classes else None


def _labels(
    name: str, files: list[File], label: str | None, classes: list[str] | None
) -> tuple[np.ndarray | None, list[str] | None, str | None]:
    """Class numbers, class names and, where there is a column of labels that cannot be used, why."""
    if label is None:
        return None, None, None
    if any(label not in _schema(file).names for file in files):
        return None, classes, f"its files lack the column {label!r}"
    return number_labels(name, label, [_label_column(name, file, label) for file in files], classes)


def number_labels(
    name: str, label: str, columns: Sequence[pa.ChunkedArray], classes: list[str] | None
) -> tuple[np.ndarray | None, list[str] | None, str | None]:
    """Labels (numbers, words or truth values) as class numbers, class names and, where they cannot be used, why."""
    count, missing = sum(map(len, columns)), sum(column.null_count for column in columns)
    if missing:
        return None, classes, f"{missing:,} of its {count:,} labels are missing"
    values = np.concatenate([column.to_numpy() for column in columns])
    if values.dtype.kind == "O":
        return *_numbered(name, label, values.astype(str).tolist(), classes), None
    if values.dtype == bool:
        values, classes = values.astype(np.int64), classes or ["False", "True"]
    if count == 0:
        return None, classes, None
    unknown = int((values < 0).sum())
    if unknown:
        return None, classes, f"{unknown:,} of its {count:,} labels are negative, which marks unknown ones"
    top = int(values.max())
    if classes is None and top >= max(_MOST_CLASSES, count):
        raise DataError(
            f"{name}: {label} {top} would make {top + 1:,} classes of {count:,} images; expected numbers from 0 on, "
            "choose another column or field with ?label=NAME"
        )
    if classes is None:
        classes = [str(k) for k in range(top + 1)]
    if top >= len(classes):
        raise DataError(f"{name}: {label} {top} where there are {len(classes)} classes")
    return values.astype(np.int64), classes, None


def _label_column(name: str, file: File, label: str) -> pa.ChunkedArray:
    """The column as numbers, booleans or words."""
    with _reading(file), _source(file) as source:
        column = pq.read_table(source, columns=[label])[label]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (_tells_classes(column.type) or pa.types.is_binary(column.type)):
        raise DataError(
            f"{name}: column {label!r} holds {column.type}, expected class numbers or names; choose with ?label=NAME"
        )
    return column


def _numbered(name: str, label: str, words: list[str], classes: list[str] | None) -> tuple[np.ndarray, list[str]]:
    """Words as numbers of classes, which they make themselves unless given."""
    classes = sorted(set(words)) if classes is None else classes
    number = {word: k for k, word in enumerate(classes)}
    unknown = sorted(set(words) - set(number))
    if unknown:
        raise DataError(f"{name}: {label} {unknown[0]!r} does not occur in the training set")
    return np.array([number[word] for word in words], np.int64), classes


def _tells_classes(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_word = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_word or pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _type(feature: object) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in [kind.field(k).name for k in range(kind.num_fields)]
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


@contextmanager
def _reading(file: File) -> Iterator[None]:
    """What damage a file has, told with its name."""
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError) as error:
        told = str(error).strip().partition("\n")[0]
        raise DataError(f"{file} is not a readable parquet file: {told}") from error


@contextmanager
def _source(file: File) -> Iterator[Path | BinaryIO]:
    """What pyarrow reads."""
    if isinstance(file, Path):
        yield file
    else:
        with file.seekable() as far:
            yield far


def _schema(file: File) -> pa.Schema:
    with _reading(file), _source(file) as source:
        return pq.read_schema(source)


def _column_bytes(file: File, image: str) -> int:
    with _reading(file), _source(file) as source:
        meta = pq.read_metadata(source)
    total = 0
    for g in range(meta.num_row_groups):
        columns = (meta.row_group(g).column(c) for c in range(meta.num_columns))
        total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == image)
    return total


def _rows(files: list[File], image: str) -> Iterable[pa.Array]:
    """The image column, one array per row group."""
    for file in files:
        with _source(file) as source:
            with _reading(file):
                parquet = pq.ParquetFile(source, memory_map=isinstance(file, Path))
            for g in range(parquet.num_row_groups):
                with _reading(file):
                    column = parquet.read_row_group(g, columns=[image])[image]
                yield from column.chunks


def _spilled(files: list[File], image: str) -> Iterable[pa.Array]:
    """The image column from an uncompressed Arrow file in the cache (written once), memory-mapped."""
    target = cache_dir() / "arrow" / f"{fingerprint_of(_content_key(files), image)}.arrow"
    if not target.exists():
        schema = pa.schema([_schema(files[0]).field(image)])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                replacing(target) as part, pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer
            ):  # fmt: skip
                for column in _rows(files, image):
                    writer.write_batch(pa.record_batch([column], schema=schema))
        except OSError as error:
            raise DataError(
                f"{files[0]}: images that do not fit into memory are unpacked into {target.parent}, where they "
                f"cannot be put ({error}); set RESIDUA_DATA to a folder with room for them"
            ) from error
    reader = pa.ipc.open_file(pa.memory_map(str(target)))
    return [reader.get_batch(k).column(0) for k in range(reader.num_record_batches)]


def _column_of(file: RemoteFile, image: str) -> RemoteFile:
    """The image column as the cache keeps it, and about how many bytes it takes there."""
    size = _column_bytes(file, image)
    return replace(file, url=f"{file.url}#{image}", size=size + size // 64 + (1 << 16))


def _kept_together(groups: dict[str, list[File]], image: str) -> dict[str, list[File]]:
    """None of whose columns makes room for another."""
    far = [file for files in groups.values() for file in files if isinstance(file, RemoteFile)]
    keep = frozenset(_column_of(file, image).copy.name for file in far)
    return {
        split: [replace(file, keep=keep) for file in files if isinstance(file, RemoteFile)]
        for split, files in groups.items()
    }


def _cached(files: list[File], image: str) -> Iterable[pa.Array]:
    """The image column of remote files, unpacked into the cache and memory-mapped."""

    def mapped(file: File) -> list[pa.Array]:
        assert isinstance(file, RemoteFile)
        column = _column_of(file, image)
        copy = remote.fetch(column, lambda _, handle: _unpack(file, image, handle))
        if copy is None:
            raise DataError(
                f"{file}: its images take about {column.size:,} bytes, for which {remote.folder()} has no room beside "
                f"the rest of the set: it holds up to {remote.bound():,}; let it hold more ({remote.VARIABLE}, in GiB)"
            )
        reader = pa.ipc.open_file(pa.memory_map(str(copy)))
        return [reader.get_batch(k).column(0) for k in range(reader.num_record_batches)]

    with ThreadPoolExecutor(4) as pool:
        return [column for columns in pool.map(mapped, files) for column in columns]


def _unpack(file: RemoteFile, image: str, handle: BinaryIO) -> None:
    schema = pa.schema([_schema(file).field(image)])
    handle.seek(0)
    with pa.ipc.new_file(handle, schema) as writer:
        for column in _rows([file], image):
            with remote.on_disk(file):
                writer.write_batch(pa.record_batch([column], schema=schema))
    with remote.on_disk(file):
        handle.truncate()
        handle.flush()


def _bytes_and_paths(column: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    if not pa.types.is_struct(column.type):
        return column, None
    names = [column.type.field(k).name for k in range(column.type.num_fields)]
    return column.field("bytes"), column.field("path") if "path" in names else None


def _version_of(files: list[File]) -> int:
    """A number that changes when one of the files does; `UNSURE` where one may without that."""
    asked = time.time()
    near = settled(file_stamps([os.fsencode(file) for file in files if isinstance(file, Path)]), asked)
    far = [(file.size, file.tag) for file in files if isinstance(file, RemoteFile)]
    return UNSURE if (near[:, 1] == UNSURE).any() else int(fingerprint_of(near, far)[:15], 16)


def _content_key(files: list[File]) -> list[tuple[str, int, str]]:
    """Name, size and footer (which holds per-column sizes and statistics) of every file."""
    key = []
    for file in files:
        if isinstance(file, RemoteFile):
            key.append((file.name, file.size, file.tag))
            continue
        size = file.stat().st_size
        with file.open("rb") as handle:
            handle.seek(max(0, size - (1 << 16)))
            key.append((file.name, size, hashlib.blake2b(handle.read(), digest_size=16).hexdigest()))
    return key
