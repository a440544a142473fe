"""Features on disk, so that they are computed once.

FOLDER/MODEL-DATA-TRANSFORM/PASS/
  about.json         what the features are of, and a checksum of every file; for people too
  index.npy          (n,) numbers of the images in their source
  tokens.11.npy      (1 + views, N, D) float32, n <= N rows filled: read-out `tokens` of layer 11

MODEL is a hash of the encoder's weights, DATA the source's fingerprint, TRANSFORM a hash of what happens between them:
preprocessing, seed of the views, precision. One pass over the images makes one PASS, renamed into place when it is
complete: there is never half of one. A request is served from all passes together, so fewer layers, read-outs or views
than were computed cost nothing, and more cost only what is missing. Any of it may be deleted at any time.

Features stay float32: half of that would save disk, but a cached feature would no longer be the computed one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from residua.data import Source
from residua.disk import set_aside

from .distributed import is_main
from .reading import Column, View

_FORMAT = 2
_BLOCK = 2**19  # 64-bit words summed into one number of a checksum
_LACK = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of memory or files to open, which says nothing of the features


class CacheError(ValueError):
    """Features cannot be written where they were to go, or not be opened."""


class FeatureCache:
    """A folder of features.

    `note` is told when something was found broken, and why; by default it warns. `read` and `computed` count the
    columns (read-out of a layer) that came from disk and that had to be computed.
    """

    def __init__(self, folder: str | Path, note: Callable[[str], None] | None = None) -> None:
        self.folder = Path(folder).expanduser()
        self.note = note or (lambda text: warnings.warn(text, stacklevel=2))
        self.read = self.computed = 0

    def entry(self, of: dict[str, Any], data: str, source: Source, view: View, on_bad_image: str) -> Entry:
        """Where features of one split under one reader and transform lie; `data` is the source's fingerprint."""
        precision = "bf16" if view.bf16 else f"float32, products {torch.get_float32_matmul_precision()}"
        transform = {"preprocessing": view.preprocessing.to_dict(), "seed": view.seed, "precision": precision}
        about = {
            "of": of,
            "data": {"fingerprint": data, "name": source.name, "split": source.split, "images": len(source)},
            "transform": transform | {"on_bad_image": on_bad_image},
        }
        names = [_short(of | {"format": _FORMAT}), _short(data), _short(about["transform"])]
        return Entry(self, self.folder / "-".join(names), about)


class Entry:
    """The passes over one split under one reader and transform."""

    def __init__(self, cache: FeatureCache, folder: Path, about: dict[str, Any]) -> None:
        self.cache, self.folder, self.about = cache, folder, about

    def load(self, columns: Sequence[Column], views: int) -> tuple[Tensor | None, dict[Column, Tensor]]:
        """Numbers (n,) and memory-mapped features (1 + views, n, D) of those columns that are there and whole."""
        index: Tensor | None = None
        found: dict[Column, Tensor] = {}
        for folder in self.passes():
            wanted = [c for c in columns if c not in found]
            try:
                numbers, features = _load_pass(folder, wanted, views)
            except Exception as error:  # damage has many names: EOFError of an empty file, BadZipFile, KeyError, ...
                if getattr(error, "errno", None) in _LACK:
                    raise CacheError(
                        f"cached features in {folder} cannot be opened here: {error}. They are untouched; read fewer "
                        "images, layers or views, or do without (--no-cache)"
                    ) from error
                self._discard(folder, error)
                continue
            if features and (index is None or torch.equal(index, numbers)):
                index, found = numbers, found | features
        return index, found

    def writer(self) -> Writer:
        return Writer(self)

    def clear(self) -> None:
        """Forget everything about this split."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def passes(self) -> list[Path]:
        """Complete passes, newest first."""
        done = [p for p in self.folder.glob("*") if not p.name.startswith(".") and (p / "about.json").exists()]
        return sorted(done, key=lambda p: p.name, reverse=True)

    def _discard(self, folder: Path, error: Exception) -> None:
        if is_main() and folder.exists():  # not removed meanwhile by another process that has something better
            self.cache.note(f"cached features in {folder} are damaged ({error}); computing them again")
            shutil.rmtree(folder, ignore_errors=True)


class Writer:
    """A pass being written, as it is read. `finish` puts it in place; before that nobody sees it.

    Space for everything is taken when the first rows come, so a full disk is noticed before the work is done.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry, self.filled, self.count = entry, 0, 0
        self.folder = entry.folder / f".part-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.columns: dict[Column, _ColumnFile] = {}

    def begin(self, count: int) -> Writer:
        """Expect up to `count` images."""
        self.count = count
        try:
            _sweep(self.entry.cache.folder)
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise self._failed(error) from error
        return self

    def add(self, rows: dict[Column, Tensor]) -> None:
        """Features (1 + views, b, D) of the next b images."""
        length = 0
        try:
            if not self.columns:
                self._open(rows)
            for column, x in rows.items():
                length = x.shape[1]
                self.columns[column].write(x, self.filled)
        except OSError as error:
            raise self._failed(error) from error
        self.filled += length

    def finish(self, index: Tensor) -> dict[Column, Tensor]:
        """Put the pass in place, and drop older ones that it makes superfluous; the features, memory-mapped."""
        try:
            np.save(self.folder / "index.npy", index.numpy())
            files = {_name(column): file.close() for column, file in self.columns.items()}
            sums = {name: checksum(np.load(self.folder / f"{name}.npy", mmap_mode="r")) for name in files}
            about = self.entry.about | {"format": _FORMAT, "rows": len(index), "columns": files, "checksums": sums}
            about["checksums"]["index"] = checksum(index.numpy())
            about["written"] = time.strftime("%Y-%m-%d %H:%M:%S")
            (self.folder / "about.json").write_text(json.dumps(about, indent=1, default=str) + "\n")
            final = self.folder.with_name(f"{time.time_ns():020d}-{secrets.token_hex(2)}")
            # mapped before others see it: a process that finishes the same later removes it, and the map stays
            columns = {c: np.load(self.folder / f"{_name(c)}.npy", mmap_mode="c") for c in self.columns}
            self.folder.rename(final)
        except OSError as error:
            raise self._failed(error) from error
        for old in self.entry.passes():
            if old.name < final.name and _covered(old, files):
                shutil.rmtree(old, ignore_errors=True)
        return {column: torch.from_numpy(x)[:, : len(index)] for column, x in columns.items()}

    def abandon(self) -> None:
        for file in self.columns.values():
            file.drop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, rows: dict[Column, Tensor]) -> None:
        need = sum(4 * x.shape[0] * self.count * x.shape[2] for x in rows.values())
        if need > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for column, x in rows.items():
            shape = (x.shape[0], self.count, x.shape[2])
            self.columns[column] = _ColumnFile(self.folder / f"{_name(column)}.npy", shape)

    def _failed(self, error: OSError) -> CacheError:
        need = sum(file.bytes for file in self.columns.values())
        self.abandon()
        where = self.entry.cache.folder
        size = f" ({need / 2**30:.1f} GiB needed)" if need else ""
        return CacheError(
            f"cannot write features to {where}: {error.strerror or error}{size}. Free some space, choose another "
            "folder (--cache-dir) or do without (--no-cache); features cached before are untouched"
        )


class _ColumnFile:
    """One .npy file, written view by view and row by row.

    Plain writes: a disk that fills up makes one fail, where memory-mapped writing would end the process.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.shape, self.bytes = shape, 4 * int(np.prod(shape))
        self.file = path.open("wb")
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)  # type: ignore[arg-type]
        self.start = self.file.tell()
        self.file.flush()
        set_aside(self.file.fileno(), self.start + self.bytes)

    def write(self, x: Tensor, row: int) -> None:
        _, count, dim = self.shape
        for view, part in enumerate(x):
            self.file.seek(self.start + 4 * dim * (view * count + row))
            self.file.write(memoryview(part.contiguous().numpy()).cast("B"))

    def close(self) -> list[int]:
        self.file.close()
        return list(self.shape)

    def drop(self) -> None:
        with suppress(OSError):  # what it still had to write does not fit either
            self.file.close()


def weights_hash(model: nn.Module) -> str:
    """A key that changes when any weight or buffer of a model does."""
    state = hashlib.blake2b(digest_size=16)
    for name, x in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        state.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        state.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def checksum(x: np.ndarray) -> str:
    """Of every byte: sums of 64-bit words in blocks of 4 MiB, hashed. As quick as memory."""
    data = x.reshape(-1).view(np.uint8)
    words = data[: len(data) // 8 * 8].view(np.uint64)
    sums = [int(words[i : i + _BLOCK].sum(dtype=np.uint64)) for i in range(0, len(words), _BLOCK)]
    rest = data[len(words) * 8 :].tobytes()
    return hashlib.blake2b(json.dumps([x.shape, sums]).encode() + rest, digest_size=16).hexdigest()


def _load_pass(folder: Path, columns: Sequence[Column], views: int) -> tuple[Tensor, dict[Column, Tensor]]:
    """What a pass has of the columns, checked; ValueError where it is not what was written."""
    about = json.loads((folder / "about.json").read_text("utf-8"))
    rows, shapes, sums = about["rows"], about["columns"], about["checksums"]
    there = [c for c in columns if _name(c) in shapes and shapes[_name(c)][0] > views]
    if not there:
        return torch.empty(0, dtype=torch.int64), {}
    index = _checked(folder / "index.npy", [rows], sums["index"], mapped=False)
    found = {}
    for column in there:
        name = _name(column)
        whole = _checked(folder / f"{name}.npy", shapes[name], sums[name])
        found[column] = torch.from_numpy(whole)[: 1 + views, :rows]
    return torch.from_numpy(index), found


def _checked(path: Path, shape: list[int], expected: str, mapped: bool = True) -> np.ndarray:
    # copy-on-write: PyTorch wants memory it may write to, the file stays as it is
    array = np.load(path, mmap_mode="c" if mapped else None)
    if list(array.shape) != shape or checksum(array) != expected:
        raise ValueError(f"{path.name} is not what was written")
    return array


def _covered(folder: Path, columns: dict[str, list[int]]) -> bool:
    """Whether a newer pass has all columns of this one, with as many views."""
    try:
        own = json.loads((folder / "about.json").read_text("utf-8"))["columns"]
    except (OSError, ValueError, KeyError):
        return False
    return all(name in columns and columns[name][0] >= shape[0] for name, shape in own.items())


def _sweep(folder: Path) -> None:
    """Remove what writers of this machine left behind when they were killed."""
    host = socket.gethostname()
    for part in folder.glob(f"*/.part-{host}-*"):
        pid = part.name.removeprefix(f".part-{host}-").partition("-")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(part, ignore_errors=True)


def _name(column: Column) -> str:
    return f"{column[0]}.{column[1]}"


def _short(value: Any) -> str:
    """Twelve hexadecimal digits for anything that JSON can hold."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()
