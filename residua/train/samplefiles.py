"""Samples on disk: a folder of PNG files, one .npz file, or one picture. Stopped anywhere, the same call goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from residua.train.checkpoint import write_text
from residua.train.sample import (
    Progress,
    Sampling,
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
    """Rows of a memory-mapped array, and a flag for each that says it is there."""

    def __init__(self, path: Path, shape: tuple[int, ...], create: bool) -> None:
        images, done = path / "images.npy", path / "done.npy"
        if create and not done.exists():
            np.lib.format.open_memmap(images, mode="w+", dtype=np.uint8, shape=shape).flush()
            part = path / ".done.npy"
            np.save(part, np.zeros(shape[0], bool))
            os.replace(part, done)
        if done.exists():
            self.images, self.done = (np.lib.format.open_memmap(file, mode="r+") for file in (images, done))

    def missing(self) -> np.ndarray:
        return np.flatnonzero(~self.done)

    def put(self, index: np.ndarray, images: Tensor) -> None:
        self.images[index] = images.permute(0, 2, 3, 1).numpy()
        self.images.flush()
        self.done[index] = True
        self.done.flush()


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
    """`n` samples as a folder of PNGs, as `OUT.npz` (`arr_0` uint8 (n, H, W, C), `labels` where there are classes), or
    as one picture `OUT.png`. Several processes share the work.

    What is there already is not made again. How the samples came about is written beside them (`samples.json` in the
    folder, `OUT.json` beside a file), with whatever `about` adds; samples of other settings are never mixed in.
    """
    path = Path(out).expanduser()
    if n < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"{n} images, {batch_size} at once: expected positive numbers")
    where = accelerator.device if device is None and accelerator is not None else device
    chosen = check_sampling(model, settings or Sampling(), where)
    made = describe(model, chosen, n) | (about or {})
    if path.suffix == ".png":
        return _picture(model, path, n, chosen, made, batch_size, device, accelerator, progress)
    if path.suffix.lower() in _OTHER:
        raise ValueError(f"{path}: samples are written to a folder, a .npz file or a .png picture")
    write = _write_array if path.suffix == ".npz" else _write_folder
    main = accelerator is None or accelerator.is_main_process
    wait: Callable[[], None] = (lambda: None) if accelerator is None else accelerator.wait_for_everyone

    def fill(place: Place) -> None:
        todo = place.missing()
        wait()  # before anyone writes: all have counted
        _fill(model, place, todo, n, chosen, batch_size, where, accelerator, progress if main else None)
        wait()

    write(model, path, n, chosen, made, fill, main, wait)
    return path


def describe(model: Any, settings: Sampling, n: int) -> dict[str, Any]:
    """How samples are made, as `residua score` prints it."""
    made: dict[str, Any] = {"sampler": settings.sampler, "steps": settings.steps, "spacing": settings.spacing}
    made |= {"clip": settings.clip, "seed": settings.seed, "n": n}
    if settings.classes:
        every = settings.classes == tuple(range(model.num_classes))
        made |= {"guidance": settings.guidance, "classes": "all" if every else list(settings.classes)}
    return made | {"precision": settings.precision}


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
    model: Any, path: Path, n: int, settings: Sampling, made: dict[str, Any], fill: Callable[[Place], None],
    main: bool, wait: Callable[[], None],
) -> None:  # fmt: skip
    if model.preprocessing.in_chans not in (1, 3):
        raise ValueError(f"images of {model.preprocessing.in_chans} channels are no PNGs: give --out NAME.npz")
    if main:
        path.mkdir(parents=True, exist_ok=True)
        _settle(path / "samples.json", made, any(path.glob("*.png")))
    wait()
    fill(Folder(path, n))


def _write_array(
    model: Any, path: Path, n: int, settings: Sampling, made: dict[str, Any], fill: Callable[[Place], None],
    main: bool, wait: Callable[[], None],
) -> None:  # fmt: skip
    about, parts = path.with_suffix(".json"), path.with_name(f".{path.name}.parts")
    if path.exists():
        if main and not (about.exists() and json.loads(about.read_text()) == made):
            raise ValueError(f"{path} is there already, with other samples: choose another --out, or remove it")
        return
    size = model.preprocessing.img_size
    shape = (n, *size, model.preprocessing.in_chans)
    if main:
        parts.mkdir(parents=True, exist_ok=True)
        _settle(parts / "samples.json", made, (parts / "done.npy").exists(), growing=False)
        Rows(parts, shape, create=True)
    wait()
    rows = Rows(parts, shape, create=False)
    fill(rows)
    if main:
        labels = labels_of(torch.arange(n), settings)
        named: dict[str, Any] = {} if labels is None else {"labels": labels.numpy()}
        unfinished = parts / "whole.npz"
        np.savez(unfinished, arr_0=rows.images, **named)
        os.replace(unfinished, path)
        write_text(about, json.dumps(made, indent=1))
        shutil.rmtree(parts)
    wait()


def _settle(file: Path, made: dict[str, Any], begun: bool, growing: bool = True) -> None:
    """Note how the samples are made, or refuse to mix them with others; a `growing` set may get more."""
    if begun:
        before = json.loads(file.read_text()) if file.exists() else {}
        differ = {k for k in before | made if before.get(k) != made.get(k)} - ({"n"} if growing else set())
        if differ or not before:
            what = ", ".join(f"{k} {before.get(k)} there, {made.get(k)} asked for" for k in sorted(differ) if before)
            raise ValueError(
                f"{file.parent} holds samples of other settings ({what or 'unknown ones'}): choose another --out, "
                "or remove them"
            )
        made = made | {"n": max(before["n"], made["n"])}
    write_text(file, json.dumps(made, indent=1))


def _picture(
    model: Any, path: Path, n: int, settings: Sampling, made: dict[str, Any], batch_size: int | None,
    device: str | torch.device | None, accelerator: Any, progress: Progress | None,
) -> Path:  # fmt: skip
    if accelerator is None or accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        images = sample(model, n, settings=settings, batch_size=batch_size, device=device, progress=progress)
        save_png(grid_image(images, len(settings.classes) if 1 < len(settings.classes) <= 20 else None), path)
        write_text(path.with_suffix(".json"), json.dumps(made, indent=1))
    return path
