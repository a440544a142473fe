"""`residua evaluate` and `residua embed`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from .console import console, data_of, img_size, layers, warn_shared


@dataclass(frozen=True)
class EvaluateOptions:
    """What frozen features are worth: kNN, linear probe and rank, beside the untrained encoder and raw pixels."""

    model: Positional[str]
    """A run, a checkpoint, or published MAE weights."""
    data: str | None = None
    """Source of images; default: what the run was trained on."""
    knn: bool = True
    """Weighted nearest neighbours."""
    probe: Literal["lbfgs", "simple", "cached", "none"] = "simple"
    """Linear probe: lbfgs (the optimum, fast), simple (200 epochs, one view), cached (the paper's: 3 + 1 views)."""
    rank: bool = True
    """Entropy rank and RankMe."""
    layers: tuple[str, ...] = ("last",)
    """last, all, or block numbers."""
    readout: Literal["tokens", "patches", "cls"] = "tokens"
    """tokens: mean of all tokens; patches: mean of patches; cls: the class token."""
    k: tuple[int, ...] = (20,)
    """Neighbours that vote."""
    temperature: float = 0.07
    """Of the votes."""
    img_size: tuple[int, ...] = ()
    """Another image size, SIDE or HEIGHT WIDTH; positions are interpolated."""
    batch_size: int = 256
    """Images at once."""
    limit: int | None = None
    """Use at most so many images of each split."""
    seed: int = 0
    """Of the held-out part, the subsets and the random encoder."""
    baselines: bool = True
    """Score the untrained encoder and raw pixels too."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do about an unreadable image."""
    out: str | None = None
    """JSON file; default: evaluation.json in the run."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


def evaluate(args: list[str]) -> None:
    """Score a frozen encoder."""
    import residua
    from residua.evaluate import evaluate

    o = tyro.cli(EvaluateOptions, args=args, prog="residua evaluate")
    model = residua.load(o.model)
    spec = o.data or data_of(o.model)
    splits = residua.data.load(spec)
    accelerator = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=o.device == "cpu")
    report = evaluate(
        model, splits, knn=o.knn, probe=None if o.probe == "none" else o.probe, rank=o.rank, layers=layers(o.layers),
        readout=o.readout, k=o.k, temperature=o.temperature, img_size=img_size(o.img_size), batch_size=o.batch_size,
        limit=o.limit, seed=o.seed, baselines=o.baselines, on_bad_image=o.on_bad_image, device=o.device,
        accelerator=accelerator,
    )  # fmt: skip
    if accelerator is not None and not accelerator.is_main_process:
        return
    warn_shared(splits)
    console.print(report.table())
    run = Path(o.model).expanduser()
    where = Path(o.out) if o.out else run / "evaluation.json" if (run / "checkpoints").is_dir() else None
    if where is not None:
        console.print(f"written: {report.save(where)}", markup=False)


@dataclass(frozen=True)
class EmbedOptions:
    """Write frozen features with image paths to a parquet file: search, de-duplicate, plot elsewhere."""

    model: Positional[str]
    """A run, a checkpoint, or published MAE weights."""
    data: str
    """Source of images."""
    out: str = "features.parquet"
    """File to write."""
    layers: tuple[str, ...] = ("last",)
    """last, all, or block numbers."""
    readout: Literal["tokens", "patches", "cls"] = "tokens"
    """tokens: mean of all tokens; patches: mean of patches; cls: the class token."""
    img_size: tuple[int, ...] = ()
    """Another image size, SIDE or HEIGHT WIDTH; positions are interpolated."""
    batch_size: int = 256
    """Images at once."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do about an unreadable image."""
    device: str | None = None
    """cuda, cpu, ...; default: the best there is."""


def embed(args: list[str]) -> None:
    """Features as a table."""
    import residua

    o = tyro.cli(EmbedOptions, args=args, prog="residua embed")
    path = residua.evaluate.embed(
        residua.load(o.model), o.data, o.out, layers=layers(o.layers), readout=o.readout,
        img_size=img_size(o.img_size), batch_size=o.batch_size, on_bad_image=o.on_bad_image, device=o.device,
    )  # fmt: skip
    console.print(f"written: {path}", markup=False)
