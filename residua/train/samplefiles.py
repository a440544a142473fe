"""Samples on disk: a folder of PNG files, one .npz file, or one picture.

A folder that was stopped anywhere is gone on with, and grows; a .npz file is there whole or not at all.

How samples came about is kept with them: OUT/samples.json, `about` in OUT.npz, or OUT.png.json (`described`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from residua.data import DataError
from residua.data.arrays import read_npz
from residua.data.latents import new_array
from residua.disk import FULL, replacing, write_text
from residua.train.sample import (
    Progress,
    Sampling,
    check_numbers,
    check_sampling,
    default_batch,
    evaluating,
    filled,
    generate,
    grid_image,
    labels_of,
    sample,
    save_png,
    within,
)

_OTHER = (".npy", ".jpg", ".jpeg", ".webp", ".gif", ".zip", ".tar", ".pt")  # what is no folder, and not written
_ABOUT = 16 << 20  # bytes of a description, at most
_FREE = {"n", "checkpoint", "autoencoder"}  # may change as a set grows: how many, and where things lie


class Place(Protocol):
    """Where samples go, one by one."""

    def missing(self) -> np.ndarray:
        """Numbers of the images that are not there yet."""

    def put(self, index: np.ndarray, images: Tensor) -> None:
        """Images (B, C, H, W) of these numbers."""


class Folder:
    """OUT/000000.png, ...; each file is whole or not there."""

    def __init__(self, path: Path, n: int) -> None:
        self.path, self.n = path, n

    def file(self, i: int) -> Path:
        return self.path / f"{i:06d}.png"

    def missing(self) -> np.ndarray:
        there = {entry.name for entry in os.scandir(self.path)}
        return np.array([i for i in range(self.n) if self.file(i).name not in there], np.int64)

    def put(self, index: np.ndarray, images: Tensor) -> None:
        for i, image in zip(index.tolist(), images):
            save_png(image, self.file(i))


class Rows:
    """Rows of an array (n, H, W, C) in a file that several processes write to."""

    def __init__(self, file: Path) -> None:
        self.images = np.lib.format.open_memmap(file, mode="r+")

    def missing(self) -> np.ndarray:
        return np.arange(len(self.images))

    def put(self, index: np.ndarray, images: Tensor) -> None:
        self.images[index] = images.permute(0, 2, 3, 1).numpy()
        self.images.flush()


def write_samples(
    model: nn.Module,
    out: str | Path,
    n: int,
    settings: Sampling | None = None,
    *,
    about: dict[str, Any] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    accelerator: Any = None,
    progress: Progress | None = None,
) -> Path:
    """`n` samples as a folder of PNGs, as `OUT.npz` (`arr_0` uint8 (n, H, W, C), `labels` where images have one), or
    as one picture `OUT.png`. Several processes share the work.

    What is there already is not made again: a folder gets what it lacks, a `.npz` of fewer samples is refused. How the
    samples came about is kept with them (see `described`), with whatever `about` adds; samples of other weights or
    settings are never mixed in.
    """
    path = Path(out).expanduser()
    check_numbers(n, 0, batch_size)
    where = accelerator.device if device is None and accelerator is not None else device
    chosen = check_sampling(model, settings or Sampling(), where)
    check_place(path, model)
    made = describe(model, chosen, n) | (about or {})
    if "weights" not in made:
        made["weights"] = hash_weights(model)
    if path.suffix.lower() == ".png":
        return _picture(model, path, n, chosen, made, batch_size, where, accelerator, progress)
    main = accelerator is None or accelerator.is_main_process
    wait: Callable[[], None] = (lambda: None) if accelerator is None else accelerator.wait_for_everyone

    def fill(place: Place) -> None:
        todo = place.missing()
        wait()  # before anyone writes: all have counted
        _fill(model, place, todo, n, chosen, batch_size, where, accelerator, progress if main else None)
        wait()

    try:
        if path.suffix.lower() == ".npz":
            _write_array(model, path, n, chosen, made, fill, main, wait)
        else:
            _write_folder(path, n, made, fill, main, wait)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ValueError(
            f"{path}: there is no room for {n:,} samples ({error.strerror}): free some space and run the same again, "
            "or choose another place (residua sample --out)"
        ) from error
    return path


def check_place(path: Path, model: Any) -> None:
    """Refuse, before anything is made, a place where the samples of a model cannot be written."""
    kind, places = path.suffix.lower(), "samples are written to a folder, a .npz file or a .png picture"
    above = next((folder for folder in path.absolute().parents if folder.exists()), path)
    if kind in _OTHER:
        raise ValueError(f"{path}: {places}")
    if kind in (".png", ".npz") and path.is_dir():
        raise ValueError(f"{path} is a folder, and a {kind} file was asked for: choose another --out")
    if kind not in (".png", ".npz") and path.is_file():
        raise ValueError(f"{path} is a file, and {places}: choose another --out")
    if not above.is_dir() or not (path.exists() or os.access(above, os.W_OK)):
        raise ValueError(f"{path} cannot be written: {above} is no folder, or read-only: residua sample --out FOLDER")
    channels = model.preprocessing.in_chans
    if kind != ".npz" and channels not in (1, 3):
        raise ValueError(f"images of {channels} channels are no PNGs: give --out NAME.npz")


def describe(model: Any, settings: Sampling, n: int) -> dict[str, Any]:
    """How samples are made, as `residua score` prints it."""
    made: dict[str, Any] = {"sampler": settings.sampler, "steps": settings.steps, "spacing": settings.spacing}
    made |= {"clip": settings.clip, "seed": settings.seed, "n": n}
    if settings.classes:
        every = settings.classes == tuple(range(model.num_classes))
        made |= {"guidance": settings.guidance, "classes": "all" if every else list(settings.classes)}
    if (space := getattr(model, "autoencoder", None)) is not None:
        made |= {"autoencoder": space.name, "autoencoder_weights": space.weights}
    return made | {"precision": settings.precision}


def hash_weights(model: nn.Module) -> str:
    """Of everything in the state of a model: the same wherever its file lies."""
    state = hashlib.blake2b(digest_size=8)
    for name, value in sorted(model.state_dict().items()):
        state.update(name.encode())
        state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def hash_settings(made: dict[str, Any]) -> str:
    """Short, of weights and settings: two sets of samples that must not be mixed differ in it."""
    fixed = {key: value for key, value in made.items() if key not in _FREE}
    return hashlib.blake2b(json.dumps(fixed, sort_keys=True).encode(), digest_size=3).hexdigest()


def described(path: Path) -> dict[str, Any]:
    """How the samples in a folder, a `.npz` or a picture came about, as far as is known."""
    file = _description_file(path)
    if file == path:
        try:
            about = read_npz(path, "about", _ABOUT)
        except Exception as error:  # damage has many names
            raise ValueError(f"{path} cannot be read, it may be damaged: {error}") from error
        return {} if about is None else _parsed(str(about), path)
    return _parsed(file.read_text("utf-8", errors="replace"), file) if file.is_file() else {}


def _parsed(text: str, file: Path) -> dict[str, Any]:
    """What was written into a file about samples, or an error that names the file."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _damaged(file)
    return found


def _damaged(file: Path) -> DataError:
    rest = "; what it describes can then be scored, but not added to" if file.suffix == ".json" else ""
    return DataError(f"{file} is damaged: remove it{rest}")


def _begun(path: Path) -> dict[str, Any]:
    """The description of samples that are to be added to."""
    before = described(path)
    if before and not isinstance(before.get("n"), int):
        raise _damaged(_description_file(path))
    return before


def _description_file(path: Path) -> Path:
    if path.suffix.lower() == ".npz" and path.is_file():
        return path
    return path / "samples.json" if path.is_dir() else _beside(path)


def _beside(picture: Path) -> Path:
    return picture.with_name(f"{picture.name}.json")


def _fill(
    model: Any, place: Place, todo: np.ndarray, n: int, settings: Sampling, batch_size: int | None,
    device: str | torch.device | None, accelerator: Any, progress: Progress | None,
) -> None:  # fmt: skip
    """Make what is missing, this process's share of it."""
    rank, world = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    # one batch is written while the next is made
    with evaluating(model, device, settings) as where, ThreadPoolExecutor(1) as writer:
        batches = np.array_split(todo, range(size := batch_size or default_batch(model, where), len(todo), size))
        done, writing = n - len(todo), writer.submit(lambda: None)
        for batch in batches[rank::world]:
            if len(batch):
                index = filled(torch.from_numpy(batch).to(where), size, settings)
                told = within(progress, done, min(len(batch) * world, n - done), n)
                images = generate(model, index, settings, told)[: len(batch)].cpu()
                writing.result()
                writing = writer.submit(place.put, batch, images)
                done = min(n, done + len(batch) * world)
        writing.result()


def _write_folder(
    path: Path, n: int, made: dict[str, Any], fill: Callable[[Place], None], main: bool, wait: Callable[[], None]
) -> None:
    if main:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.glob("*.png")):
            made = _joined(path, _begun(path), made)
        write_text(path / "samples.json", json.dumps(made, indent=1))
    wait()
    fill(Folder(path, n))


def _write_array(
    model: Any, path: Path, n: int, settings: Sampling, made: dict[str, Any], fill: Callable[[Place], None],
    main: bool, wait: Callable[[], None],
) -> None:  # fmt: skip
    if path.exists():
        before = _begun(path)
        _joined(path, before, made)
        if before["n"] < n:
            raise ValueError(
                f"{path} is there and holds {before['n']:,} samples, not {n:,}: remove it or choose another --out; a "
                "folder of PNG files can be added to"
            )
        return
    part = path.with_name(f".{path.name}.part")
    try:
        if main:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)  # left by a process that was killed
            new_array(part, np.uint8, (n, *model.preprocessing.img_size, model.preprocessing.in_chans)).flush()
        wait()
        rows = Rows(part)
        fill(rows)
        if main:
            labels = labels_of(torch.arange(n), settings)
            named: dict[str, Any] = {} if labels is None else {"labels": labels.numpy()}
            with replacing(path) as whole, whole.open("wb") as file:
                np.savez(file, arr_0=rows.images, about=np.array(json.dumps(made)), **named)
        wait()
    finally:
        if main:
            part.unlink(missing_ok=True)


def _joined(path: Path, before: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The description of a set of samples that gets more; an error where the new ones would be of another kind."""
    differ = sorted(key for key in (before | made).keys() - _FREE if before.get(key) != made.get(key))
    if differ:
        what = ", ".join(f"{key} {before.get(key)} there, {made.get(key)} asked for" for key in differ)
        raise ValueError(
            f"{path} holds samples of other settings ({what if before else 'unknown ones'}): choose another --out, or "
            "remove them"
        )
    return made | {"n": max(before["n"], made["n"])}


def _picture(
    model: Any, path: Path, n: int, settings: Sampling, made: dict[str, Any], batch_size: int | None,
    device: str | torch.device | None, accelerator: Any, progress: Progress | None,
) -> Path:  # fmt: skip
    if accelerator is None or accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        images = sample(model, n, settings=settings, batch_size=batch_size, device=device, progress=progress)
        _beside(path).unlink(missing_ok=True)  # of the picture before
        save_png(grid_image(images, len(settings.classes) if 1 < len(settings.classes) <= 20 else None), path)
        write_text(_beside(path), json.dumps(made, indent=1))
    return path
