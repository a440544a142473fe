"""A run made ready, and what making it ready has in common for everything that is trained."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn

from residua.adapt import is_name
from residua.data import Batch, Crops, Feed, Preprocessing, Source, Splits, rng, store
from residua.data.augment import normalize
from residua.data.errors import tell
from residua.data.feed import Progress, bytes_of, fits
from residua.disk import claim, held, named, release, write_text
from residua.nn.stream import residual_part
from residua.train.loop import Hooks, Loop, Objective
from residua.train.machine import activation_bytes, count_parameters, device_name, environment, now
from residua.train.optim import Groups, Settings
from residua.train.options import Config, DataConfig, MachineConfig, check_place, steps_of
from residua.train.processes import PATIENCE, agreed, in_turn
from residua.train.recorded import WARM_UP

C = TypeVar("C", bound=Config)
M = TypeVar("M", bound=nn.Module)
Lines = list[tuple[str, str]]
LOCK = ".lock"
"""File of a run folder that its process holds."""


@dataclass
class Session(Generic[C, M]):
    """A run made ready: everything is checked and chosen, nothing is trained yet."""

    config: C
    splits: Splits
    model: M
    feed: Feed
    accelerator: Accelerator
    settings: Settings
    run: Path | None
    preprocessing: Preprocessing

    @property
    def machine(self) -> MachineConfig:
        return self.config.machine  # type: ignore[attr-defined, no-any-return]

    @property
    def steps_per_epoch(self) -> float:
        return len(self.feed) / self.settings.batch_size

    def objective(self) -> Objective:
        raise NotImplementedError

    def groups(self) -> Groups | None:
        """Parameters with learning rates and weight decays of their own; None: the loop's."""
        return None

    def example(self) -> tuple[Tensor, ...]:
        """What the model is called with, for one image."""
        raise NotImplementedError

    def loop(self, hooks: Hooks | None = None) -> Loop:
        return Loop(
            self.model, self.objective(), self.feed, self.settings, self.accelerator, self.run, hooks, self.groups()
        )  # fmt: skip

    def lines(self) -> Lines:
        """What will be trained, on what, where: (heading, text)."""
        raise NotImplementedError

    def _data_line(self, then: str) -> str:
        source = self.splits.train
        labels = "no labels"
        if source.labels is not None:
            labels = f"{len(source.classes) if source.classes else int(source.labels.max()) + 1} classes"
        channels = f"{source.channels} channel{'s' * (source.channels > 1)}"
        return f"{source.name}: {len(self.feed):,} images, {channels}, {labels} -> {then}"

    def _fading(self) -> str:
        fading, anneal = residual_part(self.model).shortcut.words(), self.config.shortcut.anneal  # type: ignore[attr-defined]
        return fading + (f", annealed over {100 * anneal:.0f} % of the steps" if anneal else "")

    def close(self) -> None:
        """Let go of images and run folder; `fit` does."""
        self.feed.close()
        if self.run is not None:
            release(self.run / LOCK)

    def _closing_lines(self) -> Lines:
        """The device, unreadable images and the run folder."""
        m, world = self.machine, self.accelerator.num_processes
        workers = self.feed.workers
        where = f"streamed by {workers} worker{'s' * (workers != 1)}" if workers else "streamed by this process"
        if self.feed.to_be:
            side = f", its images no larger than {m.resident_side} px on the shorter side" if m.resident_side else ""
            where = f"whole data set on the device{side}"
        compiled = ", compiled" if m.compile else ""
        lines = [("device", f"{world} x {device_name(self.accelerator.device)}, {m.precision}{compiled}; {where}")]
        if (known := store.store_of(self.feed.source)) is not None:
            lines.append(("store", f"decoded once, at {known.side} px on the shorter side: {known.folder}"))
        elif m.dry_run and m.cache_images is not None:
            lines.append(("store", self._store_to_be(m.cache_images)))
        if self.feed.skipped:
            lines.append(("skipped", f"{self.feed.skipped} unreadable images"))
        return lines if self.run is None else [*lines, ("run", str(self.run))]

    def _store_to_be(self, where: str) -> str:
        """What a store of the images would take, where there is none yet to be opened."""
        side = store.side_for(self.config.data.img_size)  # type: ignore[attr-defined]
        need, free = store.estimate(self.splits.train, side), store.free_in(where)
        return (
            f"about {need / 2**30:,.2f} GiB at {side} px on the shorter side, in {store.place_of(where)} "
            f"({free / 2**30:,.1f} GiB free)"
        )


def fit(session: Session[Any, M], hooks: Hooks | None = None) -> M:
    """Train, and return the model in evaluation mode. The run folder has it too.

    Several processes stay connected: what comes after can be shared by them as well.
    """
    try:
        loop = session.loop(hooks)
        if session.run is not None:
            with agreed():
                _begin(session, session.run, loop)
        loop.fit()
    finally:
        session.close()
        for tracker in session.accelerator.trackers:
            tracker.finish()
    return session.model.eval()


def _begin(session: Session[Any, Any], run: Path, loop: Loop) -> None:
    """Take up where the run was left, and write down what is trained."""
    if session.machine.resume:
        loop.resume()
    if session.accelerator.is_main_process:
        known = store.store_of(session.feed.source)
        ways = {"resident": session.feed.resident, "cache_images": None if known is None else str(known.folder)}
        session.config.override(**ways).save(run / "config.yaml")
        write_text(run / "environment.json", json.dumps(environment() | _times(run, session.machine.resume), indent=1))
    numbers = {k: v for k, v in session.config.settings().items() if isinstance(v, int | float | str | bool)}
    with named(run):
        session.accelerator.init_trackers("residua", config=numbers)


def _times(run: Path, resume: bool) -> dict[str, str | None]:
    """When training `began`, null where an older version did not say; of a run that goes on also when it was last
    `resumed`, which is when all else in the file was so."""
    if not resume:
        return {"began": now()}
    try:
        began = json.loads((run / "environment.json").read_text("utf-8"))["began"]
    except (OSError, ValueError, KeyError, TypeError):
        began = None
    return {"began": began, "resumed": now()}


@dataclass(frozen=True)
class Estimate:
    """What a whole run would take."""

    memory_gib: float
    seconds: float
    rates: dict[str, float]
    """Images a second of each process, of every stage that they pass, if it had the machine to itself."""
    decoding_first: float = 0.0
    """Seconds of decoding the whole set into memory, where it is to be there."""

    @property
    def limit(self) -> str:
        """The slowest stage."""
        return min(self.rates, key=lambda stage: self.rates[stage])


def estimate(session: Session[Any, Any], steps: int = 3) -> Estimate:
    """What a whole run would take, from a few real steps on throw-away weights, and from 64 images that are read.

    Images that are streamed have to be decoded: beside the computing on a GPU, instead of it on a CPU.
    """
    model, device = session.model, session.accelerator.device
    micro = min(session.machine.micro_batch or session.settings.batch_size, session.settings.batch_size)
    moments, averages = 1 if session.settings.optimizer == "sgd" else 2, 1 if session.settings.ema else 0
    weights = 4 * (2 + moments + averages) * count_parameters(model)  # float32; the two are weight and gradient
    half = 0.5 if session.settings.precision == "bf16" else 1.0
    kept = half * micro * activation_bytes(model, *session.example())
    loop = session.loop()
    if loop.recorded is not None:
        steps += WARM_UP  # only then are they replayed, as most steps of a run are
    times = []
    for images in loop.batches(0, steps):
        start = time.perf_counter()
        float(loop.advance(images)[0])
        times.append(time.perf_counter() - start)
    memory = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else weights + kept
    feed, share = session.feed, session.settings.batch_size / session.accelerator.num_processes
    stages, first = feed.seconds(loop.order.indices(steps)), 0.0
    if feed.to_be and not feed.resident:
        first, stages = sum(stages.values()) * len(feed) / share, {}
        memory += bytes_of(feed.source, session.config.data.img_size, session.machine.resident_side)
    stages["computing"] = min(times)
    beside = device.type != "cpu" and feed.workers > 0
    return Estimate(
        memory / 2**30, first + (max if beside else sum)(stages.values()) * session.settings.steps,
        {stage: share / seconds if seconds else math.inf for stage, seconds in stages.items()}, first,
    )  # fmt: skip


class Augmentation:
    """What objectives do to images. All chance depends on seed, epoch and image alone."""

    def __init__(self, images: DataConfig, preprocessing: Preprocessing, seed: int, device: torch.device) -> None:
        self.crops, self.img_size, self.seed = crops_of(images, seed), preprocessing.img_size, seed
        self.mean, self.std = (torch.tensor(v, device=device) for v in (preprocessing.mean, preprocessing.std))

    def uniform(self, batch: Batch, epochs: Tensor, n: int, stream: str) -> Tensor:
        """Numbers (B, n) in [0, 1), others for every stream."""
        return rng.uniform(self.seed, epochs, batch.index, n, stream)

    def cropped(self, batch: Batch, epochs: Tensor) -> Tensor:
        """Images (B, C, h, w), cropped and mirrored at random, normalised."""
        return normalize(self.crops(batch, epochs), self.mean, self.std)


def crops_of(images: DataConfig, seed: int, central: bool = False) -> Crops:
    """The training views that settings ask for."""
    assert images.scale != "auto"
    assert images.img_size != "auto"
    return Crops((images.img_size, images.img_size), seed, images.scale, images.flip, central=central)


# ---------------------------------------------------------------- the parts of getting ready


def out_folder(machine: MachineConfig) -> Path | None:
    return Path(machine.out).expanduser() if machine.out else None


def open_accelerator(machine: MachineConfig) -> Accelerator:
    trackers = _trackers(machine)
    folder = out_folder(machine) or "runs"
    patience = InitProcessGroupKwargs(timeout=PATIENCE)
    return Accelerator(cpu=machine.cpu, log_with=trackers or None, project_dir=folder, kwargs_handlers=[patience])


def open_feed(
    machine: MachineConfig,
    source: Source,
    device: torch.device,
    side: int,
    progress: Progress | None,
    crops: Crops | None = None,
) -> Feed:
    """The images of a run; resident where they are in all of its processes."""
    resident = machine.resident
    if resident == "auto":
        with agreed():
            resident = fits(source, device, side, side=machine.resident_side)
        resident = all(gather_object([resident]))
    tried = machine.dry_run and not source.in_memory  # some images say what all would take
    with agreed():
        return Feed(
            source, device, img_size=side, workers=machine.workers, on_bad_image=machine.on_bad_image,
            resident=resident and not tried, resident_side=machine.resident_side, progress=progress, crops=crops,
            to_be=resident,
        )  # fmt: skip


def images_for(
    machine: MachineConfig, source: Source, side: int, progress: Progress | None, run: Path | None = None
) -> Source:
    """The images that training sees at this size: those of a store where that is asked for, in all processes or in
    none. Where there is no room for a store, training goes on without; a run that was begun with one does not."""
    where = machine.cache_images
    if where is None or machine.dry_run:
        return source

    def find() -> Source:
        try:
            return store.stored(
                source, where, store.side_for(side), on_bad_image=machine.on_bad_image, progress=progress
            )  # fmt: skip
        except store.NoStore as error:
            if store.is_store(where):
                raise
            tell(f"{error}. Training goes on without a store")
            return source

    with released_on_failure(run):
        found = in_turn(find)
        kept = gather_object([store.store_of(found) is not None])
    return found if all(kept) else source


def loop_settings(config: Config, flops: float) -> Settings:
    """What of a resolved configuration the loop needs to know."""
    values = config.settings()
    chosen = {f.name: values[f.name] for f in fields(Settings) if f.name in values}
    return Settings(**chosen, flops_per_image=flops)


def _trackers(machine: MachineConfig) -> list[str]:
    """The trackers asked for, or an error for one that is not installed."""
    from accelerate.tracking import get_available_trackers

    there = [str(name.value) for name in get_available_trackers()]
    for name in machine.trackers:
        if name not in there:
            raise ValueError(
                f"tracker {name!r} is unknown or not installed here; there are {', '.join(there) or 'none'}"
            )
    return [] if machine.dry_run else list(machine.trackers)


def check_batch(batch: int, accelerator: Accelerator, together: int = 1) -> None:
    """`together`: images that have to stay in one process."""
    world = accelerator.num_processes
    if world > 1 and batch % (world * together):
        shared = f"shared by {world} processes" + (" in pairs that are mixed" if together > 1 else "")
        raise ValueError(f"batch size {batch} cannot be {shared}: use a multiple of {world * together}")


def share_batch_norm(model: nn.Module, accelerator: Accelerator) -> None:
    """Have batch norm see the images of all processes. It can on GPUs alone: elsewhere, several are refused."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if accelerator.num_processes == 1 or not normed:
        return
    if accelerator.device.type != "cuda":
        raise ValueError(
            f"the network has batch norm, which {accelerator.num_processes} processes can share on GPUs alone: use one "
            "process"
        )
    nn.SyncBatchNorm.convert_sync_batchnorm(model)


def run_folder(machine: MachineConfig, name: str, accelerator: Accelerator) -> Path:
    """The folder of this run, made now so that a read-only disk shows before any work."""
    chosen: list[str | None] = [None]
    with agreed():
        if accelerator.is_main_process:
            chosen = [str(_own_folder(machine, name))]
    if accelerator.num_processes > 1:
        broadcast_object_list(chosen)
    assert chosen[0] is not None
    run = Path(chosen[0])
    accelerator.project_configuration.project_dir = accelerator.project_configuration.logging_dir = str(run)
    return run


def _own_folder(machine: MachineConfig, name: str) -> Path:
    given = out_folder(machine)
    base = given or Path("runs") / f"{date.today()}-{name}"
    path, number = base, 2
    while problem := _taken(path, machine.resume):
        if given:
            raise ValueError(f"{path} {problem}")
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    try:
        with released_on_failure(path):
            write_text(path / ".writable", "yes")
            (path / ".writable").unlink()
    except OSError as error:
        raise ValueError(f"cannot write to the run folder {path}: {error}; choose another with --out") from error
    return path


@contextmanager
def released_on_failure(run: Path | None) -> Iterator[None]:
    """Getting ready once the run folder is ours: others may have it if that fails."""
    try:
        yield
    except BaseException:
        if run is not None:
            release(run / LOCK)
        raise


def _taken(path: Path, resume: bool) -> str:
    """Why a folder cannot be this run's; else nothing, and it is."""
    there = "holds a run already: add --resume to continue it, or choose another --out"
    if not resume and (path / "config.yaml").exists():
        return there
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        if held(path / LOCK):
            return "belongs to a session that is ready here: fit or close that one first, or choose another --out"
        mine = claim(path / LOCK)
    except OSError as error:
        raise ValueError(f"cannot write to the run folder {path}: {error}; choose another with --out") from error
    if not mine:
        return "is being trained in by another process: wait for it, or choose another --out"
    if not resume and (path / "config.yaml").exists():  # of one that began and ended meanwhile
        release(path / LOCK)
        return there
    return ""


def slug(spec: str) -> str:
    """A name for a run folder from a source of images or a model, which keeps the library that it is of."""
    tail = spec.split("?")[0].rstrip("/").split(":")[-1].split("/")[-1]
    library = spec.partition(":")[0] + "-" if is_name(spec) else ""
    return library + re.sub(r"[^A-Za-z0-9._-]+", "-", tail) or "run"


def resumed(given: C, names: Collection[str] = ()) -> C:
    """The configuration of the run that is continued: its own, with this call's orchestration.

    Settings count as given that are not the default, and those of these `names` in any case.
    """
    machine: MachineConfig = given.machine  # type: ignore[attr-defined]
    folder = out_folder(machine)
    if folder is None:
        raise ValueError("--resume needs --out: the folder of the run to continue")
    path = folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"there is no run to resume at {path.parent}: {path.name} is missing")
    saved = type(given).read(path)
    _check_whole(saved, path)
    fresh, before, now = type(given)().settings(), saved.settings(), given.settings()
    check_place(folder, before["data"], "call this from there")
    orchestration = {f.name for f in fields(machine)}
    if before["resident"] != "auto":  # the way in which images came is kept: another one gives other pixels
        orchestration -= {"resident", "resident_side"}
    if now["cache_images"] is not None or "cache_images" in names:
        now["cache_images"] = _store_kept(before["cache_images"], now["cache_images"])
    # what was asked for then is known as what it came to: whole steps, a batch no larger than the data
    images = round(before["steps"] * before["batch_size"] / before["epochs"])
    came_to = {
        "steps": lambda steps: steps or before["steps"],
        "batch_size": lambda batch: min(batch, images),
        "epochs": lambda epochs: steps_of(epochs, images, before["batch_size"]) * before["batch_size"] / images,
    }
    for name, value in now.items():
        left_out = name not in names and value == fresh[name]
        if name in orchestration or left_out or value in ("auto", before[name]):
            continue
        if came_to.get(name, lambda v: v)(value) != before[name]:
            raise ValueError(
                f"--resume continues the run as it was: {name} is {before[name]!r} there, {value!r} was given. "
                "Leave it out, or start a new run with another --out"
            )
    changed = {k: now[k] for k in orchestration if k in names or now[k] != fresh[k]}
    return saved.override(**changed)


def _store_kept(before: str | None, now: str | None) -> str | None:
    """The store that a run goes on with: the one that it was begun with, wherever that lies now."""
    if before is not None and now is not None:
        return store.moved(before, now)
    if before == now:
        return None
    begun = "the images themselves" if before is None else "a store of its images"
    if now != "auto":
        raise ValueError(
            f"--resume continues the run as it was: it was begun with {begun}. Leave --cache-images out, or start a "
            "new run with another --out"
        )
    tell(f"the run was begun with {begun}, and goes on with them")
    return None


def _check_whole(saved: Config, path: Path) -> None:
    """Refuse the settings of a run that are not all there: defaults would take their place."""
    there, settings = yaml.safe_load(path.read_text("utf-8")) or {}, saved.settings()
    missing = [part.name for part in fields(saved) if part.name not in there]
    missing += [name for name in ("steps", "batch_size", "epochs", "lr") if settings[name] in (None, "auto")]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it is cut short, or none that a run wrote")


def hours(seconds: float) -> str:
    """12 s, 3 min, 2 h 5 min."""
    minutes = math.ceil(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
