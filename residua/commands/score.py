"""Compare two sets of images."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from residua.commands import sample
from residua.commands.calling import measured, options_of
from residua.commands.console import console, counting, device_of, img_size, note, out_file, run_folder, say

if TYPE_CHECKING:
    from torch import Tensor

    from residua.data import Source
    from residua.evaluate.generative import GenerativeReport, Planned


@dataclass(frozen=True)
class Options:
    """How far generated images lie from real ones: FID, KID, precision and recall; and their Inception score."""

    samples: Positional[str]
    """A folder of images, a .npz or .npy file (uint8, images x height x width x 3), a source of images, or a run of a
    diffusion model, whose samples are made first where they are not there (residua sample has more settings)."""
    reference: str | None = None
    """The same of real images; or a .npz file of statistics (mu, sigma), for FID alone. Default for a run: the
    images that it was trained on."""
    n: Annotated[int | None, arg(aliases=["-n"])] = None
    """Samples of a run: images 0 to n - 1; default: 10,000."""
    latents: str | None = None
    """Of a run in latents: where its autoencoder lies now, by name or folder; default: where it was."""
    fid: bool = False
    """Frechet distance; what is computed where nothing is asked for."""
    kid: bool = False
    """Kernel distance, mean and deviation over subsets."""
    prc: bool = False
    """Precision and recall by nearest neighbours."""
    isc: bool = False
    """Inception score, mean and deviation over ten parts of the samples; alone it needs no reference."""
    extractor: str = "inception"
    """inception (the one of FID), timm:NAME, or a run."""
    weights: str | None = None
    """File of weights for inception or timm:NAME; default: downloaded."""
    readout: Literal["tokens", "patches", "cls"] = "tokens"
    """Of a run as extractor."""
    layer: int = -1
    """Of a run as extractor; negative from the end."""
    split: Literal["train", "test"] | None = None
    """Which samples; default: all of a folder, else train."""
    reference_split: Literal["train", "test"] | None = None
    """Which images of the reference; default: all of a folder that is named and has no train folder, else train."""
    img_size: tuple[int, ...] = ()
    """Bring all images to SIDE, or HEIGHT WIDTH, first: central part, antialiased; default: as they are, for a run the
    size of its samples."""
    limit: int | None = None
    """Use at most so many samples."""
    reference_limit: int | None = None
    """Use at most so many images of the reference."""
    k: int = 3
    """Neighbours, for precision and recall."""
    subsets: int = 100
    """Of KID."""
    subset_size: int = 1000
    """Images in a subset."""
    seed: int = 0
    """Of the subsets and limits."""
    batch_size: int = 128
    """Images at once."""
    bf16: bool = False
    """Run the extractor in bfloat16: faster on a GPU, not the numbers that others report."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do about an unreadable image."""
    cache: bool = True
    """Keep what was computed of the reference, so that the next score against it starts at once."""
    cache_dir: str | None = None
    """Where; default: references in the user's cache directory."""
    out: str | None = None
    """JSON file; default: score.json in a folder of samples, or beside a .npz or .npy file."""
    device: str | None = None
    """cuda, cpu, ...; default: cuda where there is one."""


COMMON = (
    "extractor", "weights", "readout", "layer", "split", "limit", "reference_limit", "k", "subsets", "subset_size",
    "seed", "batch_size", "bf16", "on_bad_image",
)  # fmt: skip
"""Options that arrive as they are."""


def score(
    samples: str | Path | Source | Tensor | Iterable[Tensor],
    reference: str | Path | Source | None = None,
    *,
    progress: bool = False,
    **options: Any,
) -> GenerativeReport:
    """How far generated images lie from real ones, as `residua score` says: FID, KID, precision and recall; and their
    Inception score.

    `samples` are a folder, a `.npz` or `.npy` file, a source of images, a run of a diffusion model, what
    `residua.sample` returns, or batches of uint8 (B, 3, H, W) as a model makes them; `reference` is a folder, file or
    source of real images, or a `.npz` file of statistics (`mu`, `sigma`), for FID alone; of a run it is by default what
    it was trained on. `options` are those of `residua score --help` by their plain names: `kid=True`, `prc=True`, ...;
    FID is computed where nothing is asked for. Images are compared at the size they have, or at `img_size`.

    >>> residua.score(residua.sample(model, 5000), "cifar100", kid=True).value("KID")
    """
    return measured(progress, work, options_of(Options, options, samples=samples, reference=reference))


def work(o: Options) -> GenerativeReport:
    """What the command does."""
    from residua.data.arrays import cache_dir
    from residua.evaluate import FeatureCache, generative

    reference, size = _reference(o), img_size(o.img_size)
    part = o.reference_split or (None if o.reference else "train")
    samples: Any = o.samples
    if run_folder(o.samples):
        samples, own = _planned(o)
        size = size or own
    elif o.n is not None or o.latents:
        raise ValueError(f"{_called(o)} is no run of residua diffuse: -n and --latents are for those, --limit for all")
    where = _out(o.out, samples)
    cache = FeatureCache(o.cache_dir or cache_dir() / "references", note) if o.cache else None
    result = generative.score(
        samples, reference, metrics=_asked(o), img_size=size, reference_split=part, cache=cache, progress=counting,
        device=device_of(o.device), **{name: getattr(o, name) for name in COMMON},
    )  # fmt: skip
    if cache is not None and cache.read + cache.computed:
        say(f"reference: {'kept in' if cache.computed else 'read from'} {cache.folder}")
    result.notes += _missing(samples)
    console.print(result.table())
    for text in result.notes:
        note(text)
    if where is not None:
        say(f"written: {result.save(where)}")
    return result


def _called(o: Options) -> str:
    return o.samples if isinstance(o.samples, str) else f"a {type(o.samples).__name__} in memory"


def _asked(o: Options) -> Any:
    asked = {"fid": o.fid, "kid": o.kid, "prc": o.prc, "isc": o.isc}
    return [metric for metric, on in asked.items() if on] or ["fid"]


def _reference(o: Options) -> str | None:
    """The one asked for, or what a run was trained on; None where no score needs one."""
    from residua.train.options import check_place, trained_on

    if o.reference is not None or _asked(o) == ["isc"]:
        return o.reference
    if not run_folder(o.samples):
        raise ValueError(
            f"{_called(o)} is no run of residua diffuse, so give --reference: the real images to compare with, such "
            "as --reference cifar10"
        )
    found = trained_on(o.samples)
    if found is None:
        raise ValueError(f"{o.samples} does not say what it was trained on: give --reference")
    check_place(o.samples, found, "give --reference, or call this from there")
    return found


def _planned(o: Options) -> tuple[Planned, tuple[int, int]]:
    """The samples of a run, to be made when all else is in order, and their size."""
    from residua.evaluate.generative import Planned
    from residua.train.sample import check_numbers
    from residua.train.samplefiles import check_place

    n = 10_000 if o.n is None else o.n
    options = sample.Options(o.samples, n=n, latents=o.latents, device=o.device)
    check_numbers(n, 0, None)
    planned = sample.plan(options)
    pre = planned.model.preprocessing
    if pre.in_chans not in (1, 3):
        raise ValueError(f"{o.samples} makes images of {pre.in_chans} channels; images to score have 1 or 3")
    check_place(planned.out, planned.model)
    return Planned(planned.out, n, lambda: sample.make(options, planned)), pre.img_size


def _missing(samples: Any) -> list[str]:
    """A note where a folder holds fewer samples than it was made for."""
    from residua.data.folder import list_images
    from residua.evaluate.pictures import made_by

    path = _place(samples)
    n = made_by(str(path)).get("n") if path is not None and path.is_dir() else None
    if path is None or not isinstance(n, int) or (there := len(list_images(path))) >= n:
        return []
    return [f"{path.name} was made for {n:,} images; {there:,} are there"]


def _place(samples: Any) -> Path | None:
    """Where samples lie, or will; None of those in memory."""
    from residua.evaluate.generative import Planned

    if isinstance(samples, Planned):
        return samples.folder
    return Path(samples.removeprefix("folder:")).expanduser() if isinstance(samples, str) else None


def _out(given: str | None, samples: Any) -> Path | None:
    """Where the JSON goes, looked at before the work starts."""
    if given:
        out = out_file(given, "score.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        return out
    path = _place(samples)
    if path is None:
        return None
    if not isinstance(samples, str) or (path.is_dir() and os.access(path, os.W_OK)):
        return path / "score.json"
    if path.suffix.lower() in (".npz", ".npy") and os.access(path.parent, os.W_OK):
        return path.with_suffix(".score.json")
    return None
