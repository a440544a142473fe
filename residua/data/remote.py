"""Files of object stores and web servers (s3, gs, http, ...: whatever fsspec opens), and a cache of them on disk.

The cache has a bound: what was used longest ago makes room. Several processes share it.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from residua import disk
from residua.data.errors import DataError, tell
from residua.data.index import Folder, Listing, cache_dir, fingerprint_of, is_image, list_elsewhere
from residua.disk import set_aside
from residua.missing import pip_install
from residua.progress import counted

VARIABLE = "RESIDUA_REMOTE_CACHE"
"""Environment variable: what the cache may hold, in GiB."""
_MOST = 50.0  # GiB, unless told; and no more than half of what is free beside what the cache holds
_BLOCK = 8 << 20  # bytes asked for at once
_TRIES = 3
_AT_ONCE = 8  # files
_PACK = 32 << 20  # bytes of images that are kept together
_PACKS_AT_ONCE = 4
_MANY = 1 << 30  # bytes that are not fetched silently
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_VERSIONS = (  # what fsspec's file systems tell of a file that changes when it does, the surest first
    *("ETag", "etag", "md5Hash", "generation", "Content-MD5", "content_md5"),
    *("LastModified", "last_modified", "Last-Modified", "created", "mtime"),
)


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere, as it was when it was looked up."""

    url: str
    name: str
    """Relative to the folder that holds all files of the set."""
    size: int
    tag: str
    keep: frozenset[str] = frozenset()
    """Names of the copies of the whole set, of which none makes room for another."""

    def __str__(self) -> str:
        return self.url

    def stamp(self) -> tuple[int, str]:
        return self.size, self.tag

    def place(self) -> str:
        return self.url

    @property
    def copy(self) -> Path:
        """Where the cache keeps it."""
        end = re.sub(r"[^\w.-]", "_", self.url.rpartition("/")[2])[-60:]
        return folder() / f"{fingerprint_of(self.url, self.size, self.tag)}-{end}"

    def prepare(self) -> None:
        """Fetch it, if the cache has room."""
        fetch(self)

    def open(self) -> BinaryIO:
        """The copy, or where there is none the file itself, to be read from its beginning to its end."""
        try:
            return self.copy.open("rb")
        except FileNotFoundError:
            return _open(self)

    def seekable(self) -> BinaryIO:
        """The file itself, to be read in any order."""
        return _open(self)

    def read(self, start: int, size: int) -> bytes:
        """Some of its bytes, asked for one by one where there is no copy."""
        try:
            with self.copy.open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            pass

        def ask() -> bytes:
            fs, path = filesystem(self.url)
            return fs.cat_file(path, start=start, end=start + size)

        data = _tried(self.url, ask)
        if len(data) > size:
            raise DataError(
                f"{self.url}: asked for {size:,} bytes, its server sent {len(data):,}; it gives files only as a whole: "
                f"let the cache hold the set ({VARIABLE}, in GiB)"
            )
        return data


def is_url(path: str) -> bool:
    """Whether it names something by a protocol: `s3://bucket/key`."""
    return _URL.match(path) is not None


def folder() -> Path:
    """Of the cache."""
    return cache_dir() / "remote"


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's for this URL, and the path in it. Made anew in every process; fsspec keeps it there."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url}: {url.partition('://')[0]} needs a library that is not installed ({error}): "
            f"{pip_install('fsspec', 's3fs')}, for gs:// gcsfs instead, for https:// aiohttp"
        ) from error
    except ValueError as error:
        raise DataError(f"{url}: {error}; expected s3://, gs://, https:// or another protocol of fsspec") from error


def find(url: str, patterns: list[str], suffix: str) -> list[RemoteFile]:
    """Files by URL, by pattern (`*`), or below a folder those that end in `suffix`, in this order."""
    fs, _ = filesystem(url)
    fs.invalidate_cache()

    def matching(pattern: str) -> list[str]:
        path = filesystem(pattern)[1]
        if any(sign in path for sign in "*["):
            return sorted(fs.glob(path))
        return [path] if path.endswith(suffix) else sorted(file for file in fs.find(path) if file.endswith(suffix))

    def known(path: str) -> RemoteFile:
        where = fs.unstrip_protocol(path)
        about = _tried(where, lambda: fs.info(path))
        if about.get("size") is None or about.get("type") == "directory":
            raise DataError(f"{where} is no file of known length; give a {suffix} file, a folder of them, or a pattern")
        return RemoteFile(where, where, int(about["size"]), _version(about))

    paths = []
    for pattern in patterns:
        found = _tried(pattern, lambda pattern=pattern: matching(pattern))  # type: ignore[misc]
        if not found:
            raise DataError(f"{pattern}: no {suffix} files there")
        paths += found
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(known, paths))


def _version(about: Mapping[str, Any]) -> str:
    """What tells of a file that it has changed."""
    return next((f"{key}={about[key]}" for key in _VERSIONS if about.get(key)), "")


class RemoteFolder:
    """A folder elsewhere, with as much of a path as reading a set of images takes."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def is_dir(self) -> bool:
        return bool(self.entries())

    def entries(self, inside: str = "") -> list[tuple[str, dict[str, Any]]]:
        """Names of what lies in it, or in a folder of it, and what is known of them; nothing where there is none."""
        where = f"{self.url}/{inside}".rstrip("/")
        fs, path = filesystem(where)

        def ask() -> list[dict[str, Any]]:
            try:
                return fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            finally:
                fs.invalidate_cache()  # which would hold all of them

        found = ((about["name"].rstrip("/").rpartition("/")[2], about) for about in _tried(where, ask))
        own = path.rstrip("/")
        return [(name, about) for name, about in found if name and about["name"].rstrip("/") != own]

    def subfolders(self) -> list[str]:
        return sorted(name for name, about in self.entries() if _is_visible_folder(name, about))

    def holds_images(self) -> bool:
        return any(_is_image(name) and about["type"] == "file" for name, about in self.entries())

    def list_images(self) -> Listing:
        """Of all folders below it, eight asked at a time."""

        def scan(path: str) -> Folder:
            number = int(fingerprint_of(path)[:15], 16)
            found, images = Folder((number, 0, 0, 0)), []
            for name, about in self.entries(path):
                if _is_visible_folder(name, about):
                    found.inside.append(name)
                elif about["type"] == "file" and _is_image(name):
                    if about.get("size") is None:
                        raise DataError(
                            f"{self.url}: its server does not tell the length of {path}/{name}, without which images "
                            "cannot be fetched together: pack them into tar files (tar:https://...), or copy them here"
                        )
                    images.append((name, int(about["size"]), int(fingerprint_of(_version(about))[:15], 16)))
            found.take(images)
            return found

        return list_elsewhere(self.url, scan)


def _is_visible_folder(name: str, about: Mapping[str, Any]) -> bool:
    return about["type"] == "directory" and not name.startswith(".")


def _is_image(name: str) -> bool:
    return is_image(name) and not name.lower().endswith(".npy")


class Packs:
    """Images of a folder elsewhere, in files of the cache that hold some 32 MiB of them each.

    An image begins a new pack where the hash of its name says so. Where one is added to the folder or taken from it,
    only its own pack is fetched again.
    """

    def __init__(self, folder: RemoteFolder, images: Listing) -> None:
        self.folder, self.images = folder, images
        sizes, versions = images.sizes, images.field("versions")
        assert sizes is not None
        many = 1 << max(0, round(np.log2(_PACK / max(1.0, float(sizes.mean())))))  # images of a pack, about
        begins = images.field("draws") % np.uint64(many) == 0
        begins[0] = True
        self.first = np.append(np.flatnonzero(begins), len(images))
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        packs = []
        for a, b in itertools.pairwise(self.first.tolist()):
            tag = fingerprint_of(images[a:b], sizes[a:b], versions[a:b])
            packs.append(RemoteFile(f"{folder.url}/images-{tag[:12]}", "", int(self.starts[b] - self.starts[a]), tag))
        _, self.packs = as_set(packs)
        done = 0
        with ThreadPoolExecutor(_PACKS_AT_ONCE) as pool:
            for pack, _ in zip(self.packs, pool.map(self._fetch, range(len(packs)))):
                done += pack.size
                counted("fetching MiB of images", done >> 20, int(self.starts[-1]) >> 20)

    def read(self, i: int) -> bytes:
        """The bytes of an image, asked for by itself where its pack is not in the cache."""
        k = int(np.searchsorted(self.first, i, side="right")) - 1
        start, end = (int(self.starts[j]) for j in (i, i + 1))
        try:
            with self.packs[k].copy.open("rb", buffering=0) as file:
                file.seek(start - int(self.starts[self.first[k]]))
                return file.read(end - start)
        except FileNotFoundError:
            return self._ask(i)

    def _ask(self, i: int) -> bytes:
        url = f"{self.folder.url}/{self.images[i]}"
        size = int(self.starts[i + 1] - self.starts[i])

        def ask() -> bytes:
            fs, path = filesystem(url)
            data: bytes = fs.cat_file(path)
            if len(data) != size:
                raise OSError(f"{len(data):,} bytes where it was listed with {size:,}: it has changed, start again")
            return data

        return _tried(url, ask)

    def _fetch(self, k: int) -> None:
        fetch(self.packs[k], lambda file, handle: self._fill(k, file, handle))

    def _fill(self, k: int, file: RemoteFile, handle: BinaryIO) -> None:
        handle.seek(0)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            numbers = range(*self.first[k : k + 2].tolist())
            for start in range(0, len(numbers), _AT_ONCE):
                for data in pool.map(self._ask, numbers[start : start + _AT_ONCE]):
                    with on_disk(file):
                        handle.write(data)
        with on_disk(file):
            handle.truncate()
            handle.flush()


def as_set(found: list[RemoteFile], *, unpacked: bool = False) -> tuple[str, list[RemoteFile]]:
    """The name of the folder of these files and themselves, named relative to it; says so where much is fetched.

    Of `unpacked` files something else is kept than the files themselves.
    """
    base = common_folder([file.url for file in found])
    keep = frozenset(file.copy.name for file in found)
    missing = sum(file.size for file in found if not file.copy.exists())
    if missing >= _MANY and not unpacked:
        tell(
            f"{base}: {missing / 2**30:,.1f} GiB of {len(found):,} files are fetched into {folder()}, which may hold "
            f"{bound() / 2**30:,.1f} GiB ({VARIABLE}); what has no room there is asked for image by image"
        )
    named = [replace(file, name=file.url[len(base) :], keep=keep) for file in found]
    return base.rstrip("/").rpartition("/")[2] or "remote", named


def common_folder(files: Sequence[str]) -> str:
    """Of all these paths, with its closing slash."""
    parts = [file.replace("\\", "/").split("/")[:-1] for file in files]
    shared = [words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*parts))]
    return "".join(f"{word}/" for word in shared)


def bound() -> int:
    """Bytes that the cache may hold."""
    told = os.environ.get(VARIABLE)
    try:
        most = float(told) if told else _MOST
        if not 0 <= most < float("inf"):
            raise ValueError
    except ValueError:
        raise DataError(f"{VARIABLE}={told!r}, expected how many GiB may be kept on disk, such as 50") from None
    if told:
        return int(most * 2**30)
    place = next(path for path in (folder(), *folder().parents) if path.exists())
    held = sum(status.st_size for _, status in _entries())
    return min(int(most * 2**30), (shutil.disk_usage(place).free + held) // 2)


def fetch(file: RemoteFile, fill: Callable[[RemoteFile, BinaryIO], None] | None = None) -> Path | None:
    """The file's copy, fetched if need be; None where the cache has no room for it beside the rest of its set.

    One process fetches a file, others wait for it. `fill` writes what is kept where that is not the file as it is.
    """
    target = file.copy
    part = target.with_name(f".{target.name}.part")
    while True:
        with suppress(FileNotFoundError):
            os.utime(target)  # used now
            return target
        with on_disk(file):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        with handle:
            _wait_for(handle)
            if target.exists() or not _same(handle, part):
                continue
            try:
                with on_disk(file):
                    if not _make_room(handle, part, file):
                        part.unlink()
                        return None
                _tried(file.url, partial(fill or _download, file, handle))
                part.replace(target)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise
            return target


def _download(file: RemoteFile, handle: BinaryIO) -> None:
    handle.seek(0)
    done = 0
    with _open(file) as far:
        while data := far.read(_BLOCK):
            done += len(data)
            if done > file.size:
                break
            with on_disk(file):
                handle.write(data)
    with on_disk(file):
        handle.flush()
    if done != file.size:
        raise OSError(f"{'more than ' * (done > file.size)}{min(done, file.size):,} of its {file.size:,} bytes came")


def _make_room(handle: BinaryIO, part: Path, file: RemoteFile) -> bool:
    """Set bytes aside for a file, at the cost of those used longest ago; False where that is not enough."""
    with (folder() / ".lock").open("ab") as gate:
        _wait_for(gate)
        used, old = 0, []
        for entry, status in _entries():
            if entry == part:
                continue
            if entry.suffix == ".part" and entry.name.startswith(".") and _abandoned(entry):
                continue
            used += status.st_size
            if entry.name not in file.keep and not entry.name.startswith("."):
                old.append((status.st_mtime_ns, status.st_size, entry))
        most = bound()
        if used + file.size - sum(size for _, size, _ in old) > most:
            return False
        for _, size, entry in sorted(old):
            if used + file.size <= most:
                break
            entry.unlink(missing_ok=True)
            used -= size
        set_aside(handle.fileno(), file.size)
    return True


def _entries() -> Iterator[tuple[Path, os.stat_result]]:
    """Copies, and what is on its way."""
    for entry in sorted(folder().glob("*")):
        with suppress(FileNotFoundError):  # gone since
            if entry.name != ".lock":
                yield entry, entry.stat()


def _abandoned(part: Path) -> bool:
    """Remove what a process that is gone began to fetch."""
    with suppress(OSError), part.open("r+b") as handle:
        if disk.hold(handle):
            part.unlink()
            return True
    return False


def _wait_for(handle: BinaryIO) -> None:
    while not disk.hold(handle):
        time.sleep(0.05)


def _same(handle: BinaryIO, path: Path) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open(file: RemoteFile) -> BinaryIO:
    fs, path = filesystem(file.url)
    return _tried(file.url, lambda: fs.open(path, "rb", block_size=_BLOCK))


@contextmanager
def on_disk(file: RemoteFile) -> Iterator[None]:
    """What the disk of the cache refuses."""
    try:
        yield
    except OSError as error:
        why = "the disk is full" if error.errno in disk.FULL else str(error)
        raise DataError(
            f"{file.url}: its {file.size:,} bytes cannot be kept in {folder()}: {why}; free some space, let the cache "
            f"hold less ({VARIABLE}, in GiB) or set RESIDUA_DATA to a folder on another disk"
        ) from error


def _tried(url: str, call: Callable[[], Any]) -> Any:
    """What a server answers, asked again where it fails."""
    for left in reversed(range(_TRIES)):
        try:
            return call()
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{url} does not exist ({error})") from error
        except PermissionError as error:
            raise DataError(f"{url} may not be read ({error}); check your credentials") from error
        except Exception as error:  # each library has its own
            if not left:
                raise DataError(
                    f"{url} cannot be read: {type(error).__name__}: {error}; check the address, the network and your "
                    "credentials"
                ) from error
            time.sleep(0.5 * (_TRIES - left))
    raise AssertionError
