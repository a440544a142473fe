"""Scores of generated images against real ones: FID, KID, precision and recall, in any network's features; and the
Inception score, of the generated ones alone.

result = score("folder:samples", "cifar100", metrics=("fid", "kid", "prc"))
result = score(residua.sample(model, 5000), "cifar100")
result = score(batches, "cifar100", about={"sampler": "DPM-Solver", "steps": 50})   # uint8 (B, 3, H, W), as made
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from residua.data import DataError, Source, Splits
from residua.data.arrays import ArraySource
from residua.data.augment import ImgSize
from residua.data.feed import OnBadImage, Progress
from residua.disk import write_text

from .distributed import world
from .extractor import Extractor, open_extractor
from .features import Cache, open_cache, pick_split
from .featureset import Readout
from .fid import Statistics, check_neighbors, frechet_distance, inception_score, kernel_distance, precision_recall
from .pictures import Pictures, Split, made_by, open_images, open_samples
from .summary import Settings, Summary, exactly, published_statistics, summarize, summarize_batches

Metric = Literal["fid", "kid", "prc", "isc"]
METRICS = ("fid", "kid", "prc", "isc")
PARTS = 10  # of the samples, for the Inception score


@dataclass(frozen=True)
class Planned:
    """Samples that are made when all else is found in order: images 0 to `count` - 1 of a folder."""

    folder: Path
    count: int
    make: Callable[[], object]


@dataclass(frozen=True)
class GenerativeScore:
    """One number with what it depends on."""

    name: str
    value: float
    std: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        digits = 5 if self.name in ("KID", "kernel distance") else 3 if self.name in ("precision", "recall") else 2
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.value:.{digits}f}{spread}"


@dataclass
class GenerativeReport:
    """What `score` found."""

    samples: dict[str, Any]
    """Name, number of images, size, and `made_by`: sampler, steps, guidance and whatever else is known."""
    reference: dict[str, Any]
    """Name, number and size of the images; empty where no score needs them."""
    extractor: dict[str, Any]
    scores: list[GenerativeScore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers should know."""

    def value(self, name: str) -> float:
        """One number: `value("FID")`."""
        found = {score.name: score.value for score in self.scores}
        if name not in found:
            raise KeyError(f"no {name!r}; there are {', '.join(found)}")
        return found[name]

    def table(self) -> Table:
        """The scores with everything that they depend on."""
        made = ", ".join(f"{key} {value}" for key, value in self.samples["made_by"].items())
        lines = [
            f"samples    {_describe(self.samples)}" + (f" ({made})" if made else ""),
            *([f"reference  {_describe(self.reference)}"] if self.reference else []),
            f"extractor  {self.extractor['name']}, {self.extractor['dimensions']} dimensions, "
            f"{self.extractor['precision']}",
        ]
        table = Table(title="\n".join(lines), title_justify="left", title_style="", show_header=False)
        for score in self.scores:
            settings = ", ".join(f"{key} {value:,}" for key, value in score.settings.items())
            table.add_row(score.name, str(score), settings)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        from residua import __version__

        scores = {
            s.name: {"value": s.value} | ({} if s.std is None else {"std": s.std}) | s.settings for s in self.scores
        }
        made = {"residua": __version__, "torch": torch.__version__, "date": str(date.today())}
        return {**vars(self), "scores": scores, "made_with": made}

    def save(self, path: str | Path) -> Path:
        """Write the JSON; the file is whole or not there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_dict(), indent=2, default=str) + "\n")
        return path


def score(
    samples: str | Path | Source | Tensor | Planned | Iterable[Tensor],
    reference: str | Path | Source | None = None,
    *,
    metrics: Metric | Sequence[Metric] = ("fid",),
    extractor: str | Extractor = "inception",
    weights: str | Path | None = None,
    readout: Readout = "tokens",
    layer: int = -1,
    img_size: ImgSize | None = None,
    split: Split | None = None,
    reference_split: Split | None = None,
    limit: int | None = None,
    reference_limit: int | None = None,
    k: int = 3,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    batch_size: int = 128,
    bf16: bool = False,
    device: str | torch.device | None = None,
    cache: Cache = None,
    about: Mapping[str, Any] | None = None,
    on_bad_image: OnBadImage = "error",
    progress: Progress = lambda what, done, total: None,
) -> GenerativeReport:
    """How far samples lie from real images, in the features of `extractor` (see `residua.evaluate.extractor`).

    `samples` are a folder, a `.npz` or `.npy` file, a data source, what `residua.sample` returns, or batches of uint8
    (B, 3, H, W) as a model makes them; `reference` is any of the first three, or a `.npz` file of statistics (`mu`,
    `sigma`) where FID alone is asked for. Images are compared at the size they have; `img_size` brings all but batches
    to another (see `Pictures`).

    `metrics`: "fid", "kid" (over `subsets` of `subset_size` images, drawn by `seed`), "prc", precision and recall
    with `k` neighbours, and "isc", the Inception score, which alone needs no reference. `limit` takes so many images,
    chosen by `seed`, of batches the first. `cache` is a folder that keeps what was computed of the reference. `about`
    says how the samples came about and is printed beside the scores.

    Convolutions and products are float32 proper unless `bf16`, sums float64. One process only.
    """
    protocol = _Protocol(frozenset([metrics] if isinstance(metrics, str) else metrics), k, subsets, subset_size, seed)
    protocol.check(reference is not None)
    for name, given in (("batch_size", batch_size), ("limit", limit)):
        if given is not None and given < 1:
            raise ValueError(f"{name} must be at least 1 image, got {given}")
    if world()[1] > 1:
        raise RuntimeError("score runs in one process; start it without a launcher")
    samples = str(samples) if isinstance(samples, Path) else samples
    reference = str(reference) if isinstance(reference, Path) else reference
    _told(samples)  # a damaged description is refused now
    pictures = partial(_pictures, seed=seed, img_size=img_size)
    ours = pictures(samples, split, limit) if isinstance(samples, str | Source | Tensor) else samples
    theirs = None
    if reference is not None and protocol.compares:
        theirs = published_statistics(reference) or pictures(reference, reference_split, reference_limit)
    net = extractor
    if isinstance(net, str):
        net = open_extractor(net, weights, readout=readout, layer=layer)
    protocol.check_classes(net)
    protocol.check_counts(_count(ours, limit), _count(theirs))
    if isinstance(theirs, Statistics):
        _check_statistics(theirs, net, protocol, str(reference))

    computing = partial(exactly, net, device)
    settings = partial(Settings, batch_size=batch_size, bf16=bf16, on_bad_image=on_bad_image, progress=progress)
    with computing() as where:
        if isinstance(theirs, Pictures):  # first: it may be there already, and samples may take long to make
            real = summarize(theirs, net, settings(where), features=protocol.both, cache=open_cache(cache))
        elif theirs is None:
            real = None
        else:
            real = Summary(Path(str(reference)).name, "", None, theirs)
    if isinstance(ours, Planned):
        ours.make()
        ours = pictures(open_samples(ours.folder, ours.count), None, limit)
    with computing() as where:
        if isinstance(ours, Pictures):
            fake = summarize(ours, net, settings(where), features=protocol.features)
        else:
            fake = summarize_batches(_first(ours, limit), net, settings(where), features=protocol.features)
        scores = protocol.scores(fake, real, net, where)
    told = _told(samples) | dict(about or {})
    told |= {"n": fake.count} if "n" in told else {}  # which may be fewer than were made
    extracted = {"name": net.name, "dimensions": len(fake.statistics.mean), "precision": "bf16" if bf16 else "float32"}
    notes = [*net.notes, *_notes(fake, real, protocol), *_grey(ours), *_grey(theirs)]
    compared = {} if real is None else _about(real)
    return GenerativeReport({**_about(fake), "made_by": told}, compared, extracted | net.identity, scores, notes)


@dataclass(frozen=True)
class _Protocol:
    """Which scores, and how."""

    metrics: frozenset[str]
    k: int
    subsets: int
    subset_size: int
    seed: int

    @property
    def compares(self) -> bool:
        """Whether there is a reference to compare with."""
        return self.metrics != {"isc"}

    @property
    def both(self) -> bool:
        """Whether means and covariances of either side are not enough."""
        return bool(self.metrics & {"kid", "prc"})

    @property
    def features(self) -> bool:
        """Whether those of the samples are not."""
        return self.both or "isc" in self.metrics

    def check(self, reference: bool) -> None:
        unknown = sorted(self.metrics - set(METRICS))
        if unknown or not self.metrics:
            raise ValueError(f"unknown metrics {', '.join(unknown) or 'none'}; there are {', '.join(METRICS)}")
        if self.subsets < 1 or self.subset_size < 2:
            raise ValueError(f"KID needs subsets of at least 2 images, got {self.subsets} of {self.subset_size}")
        if self.compares and not reference:
            raise ValueError(f"{', '.join(sorted(self.metrics - {'isc'}))}: give a reference, the real images")

    def check_classes(self, net: Extractor) -> None:
        """Whether there are classes to tell samples apart by."""
        if "isc" not in self.metrics:
            return
        if not net.inception:
            raise ValueError(f"the Inception score is of Inception's classes; {net.name} is another extractor")
        if getattr(net.module, "classifier", None) is None:
            raise ValueError(
                "the Inception score needs Inception's classifier, which this file of weights does not hold: "
                "that of torch-fidelity or pytorch-fid does (--weights FILE, or none to download it)"
            )

    def check_counts(self, fake: int | None, real: int | None) -> None:
        """Whether there are enough images, as far as their numbers are known."""
        for what, count in (("samples", fake), ("images of the reference", real)):
            if count is not None and count < 2:
                raise ValueError(f"{what}: a covariance needs at least 2 images, got {count}")
        if "prc" in self.metrics and fake is not None and real is not None:
            check_neighbors(self.k, fake, real)
        if "isc" in self.metrics and fake is not None and fake < PARTS:
            raise ValueError(f"the Inception score is a mean over {PARTS} parts of the samples, got {fake}")

    def drawn(self, fake: Summary, real: Summary) -> int:
        """Images in a subset: fewer where there are not as many."""
        return min(self.subset_size, fake.count, real.count)

    def scores(
        self, fake: Summary, real: Summary | None, net: Extractor, device: torch.device
    ) -> list[GenerativeScore]:
        found = []
        if "isc" in self.metrics:
            classifier: Any = net.module.classifier
            assert fake.features is not None
            logits = fake.features @ classifier.cpu().T
            mean, std = inception_score(logits, parts=PARTS, seed=self.seed)
            found.append(GenerativeScore("Inception score", mean, std, {"parts": PARTS, "seed": self.seed}))
        if real is None:
            return found
        if "fid" in self.metrics:
            distance = frechet_distance(fake.statistics, real.statistics)
            found.append(GenerativeScore(net.frechet, distance))
        if "kid" in self.metrics:
            drawn = {"subsets": self.subsets, "subset_size": self.drawn(fake, real), "seed": self.seed}
            mean, std = kernel_distance(fake.features, real.features, **drawn, device=device)
            found.append(GenerativeScore("KID" if net.inception else "kernel distance", mean, std, drawn))
        if "prc" in self.metrics:
            shares = precision_recall(fake.features, real.features, k=self.k, device=device)
            found += [GenerativeScore(name, share, settings={"k": self.k}) for name, share in shares._asdict().items()]
        return found


def _pictures(images: Any, split: Split | None, limit: int | None, *, seed: int, img_size: ImgSize | None) -> Pictures:
    source: Source = open_images(images, split) if isinstance(images, str) else images
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape:
            raise DataError(f"samples of {images.dtype}, {tuple(images.shape)}; expected uint8 (n, 3, H, W)")
        source = ArraySource("samples", "all", images.permute(0, 2, 3, 1).cpu().numpy(), None, None)
    some = pick_split(Splits(source.name, source), "train", limit, seed)
    assert some is not None
    return Pictures(some, img_size)


def _told(samples: object) -> dict[str, Any]:
    """What is known of how samples came about."""
    where = samples.folder if isinstance(samples, Planned) else samples
    return made_by(str(where)) if isinstance(where, str | Path) else {}


def _count(images: object, limit: int | None = None) -> int | None:
    """How many images there are or will be, where that is known."""
    if isinstance(images, Planned):
        return min(images.count, limit or images.count)
    return len(images) if isinstance(images, Pictures) else None


def _first(batches: Iterable[Tensor], limit: int | None) -> Iterator[Tensor]:
    """Batches up to so many images."""
    left = limit
    for images in batches:
        yield images[:left]
        if left is not None:
            left -= len(images)
            if left <= 0:
                return


def _check_statistics(stored: Statistics, net: Extractor, protocol: _Protocol, file: str) -> None:
    if protocol.both or not net.inception:
        raise DataError(f"{file} holds a mean and a covariance of Inception's features: good for FID, nothing else")
    given, expected = len(stored.mean), net.about.get("features", len(stored.mean))
    if given != expected:
        raise DataError(f"{file} holds statistics of {given} dimensions; Inception's features have {expected}")


def _notes(fake: Summary, real: Summary | None, protocol: _Protocol) -> list[str]:
    """What makes the numbers hard to compare."""
    notes, dim = [], len(fake.statistics.mean)
    if "isc" in protocol.metrics and fake.count < 10_000:
        notes.append(
            f"parts of {fake.count // PARTS:,} samples can show few of Inception's classes: the Inception score comes "
            "out too small; 50,000 samples are usual"
        )
    if real is None:
        return notes
    for what, side in (("samples", fake), ("images of the reference", real)):
        if "fid" in protocol.metrics and side.statistics.rank_deficient:
            notes.append(
                f"{side.count:,} {what} are fewer than the {dim + 1:,} that a covariance of {dim:,} dimensions needs "
                "for full rank: the Frechet distance comes out too large; 50,000 are usual"
            )
    if fake.size and real.size and fake.size != real.size:
        notes.append(
            f"samples are {_size(fake.size)}, the reference {_size(real.size)}: part of the distance may be the size; "
            "--img-size brings both to one"
        )
    if "kid" in protocol.metrics and (drawn := protocol.drawn(fake, real)) < protocol.subset_size:
        notes.append(f"KID over subsets of {drawn:,} images instead of {protocol.subset_size:,}: there are no more")
    return notes


def _grey(images: object) -> list[str]:
    if isinstance(images, Pictures) and images.source.channels == 1:
        return [f"{images.name} is grey: its channel was repeated to three"]
    return []


def _about(side: Summary) -> dict[str, Any]:
    return {"name": side.name, "split": side.split, "images": side.count or None, "size": side.size}


def _describe(about: dict[str, Any]) -> str:
    count = f"{about['images']:,} images" if about["images"] else "statistics of an unknown number of images"
    split = f" {about['split']}" if about["split"] not in ("", "all") else ""
    return f"{about['name']}{split}, {count}" + (f" of {_size(about['size'])}" if about["size"] else "")


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} px"
