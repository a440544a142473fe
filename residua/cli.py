"""The `residua` command: parses, calls, prints."""

from __future__ import annotations

import difflib
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from tyro.conf import OmitArgPrefixes, Positional

if TYPE_CHECKING:
    from residua.data import Splits
    from residua.train import Session

# Threads that spin while they wait slow each other down a hundredfold where another program wants the cores too.
# Read when torch is imported, which happens inside the commands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

USAGE = """\
Residua trains, measures and explains residual networks whose shortcuts fade with depth.

  residua demo                                   see it work: two small runs, one page
  residua pretrain --data folder:my_photos       images in, encoder out
  residua evaluate RUN                           what its frozen features are worth
  residua compare RUN RUN                        runs side by side on one page
  residua embed RUN --data folder:my_photos      features of your images, as a table
  residua data info|preview SOURCE               what a source of images holds
  residua recipes [NAME]                         rows of the paper, runnable

Add --help to a command for its options."""


def pretrain(args: list[str]) -> None:
    """Pretrain an encoder: `residua pretrain [RECIPE or SETTINGS.yaml] [options]`."""
    from residua import recipes
    from residua.train import Hooks, Pretrain, fit, prepare

    default = Pretrain()
    if args and not args[0].startswith("-"):
        given = args.pop(0)
        default = Pretrain.read(_existing(given)) if given.endswith((".yaml", ".yml")) else recipes.get(given).config
    config = tyro.cli(
        Pretrain, args=args, default=default, prog="residua pretrain [RECIPE|SETTINGS.yaml]", config=(OmitArgPrefixes,),
        description="Pretrain a masked autoencoder whose identity shortcuts fade with depth. Every setting left at "
        "'auto' is chosen from the images and the machine, and printed.",
    )  # fmt: skip
    session = prepare(config, _decoding)
    main = session.accelerator.is_main_process
    if main:
        for heading, text in session.lines():
            console.print(f"[bold]{heading:8}[/] {escape(text)}")
        _warn_shared(session.splits)
    if session.config.machine.dry_run:
        return _dry_run(session)
    every = session.config.machine.eval_every
    with _Bar(session.settings.steps, session.settings.batch_size, show=main) as bar:
        hooks = Hooks(
            on_record=bar.update, on_message=_note if main else (lambda text: None),
            every=max(1, round(every * session.steps_per_epoch)) if every else None,
            on_interval=lambda step, model: _scores_while_training(model, session),
        )  # fmt: skip
        model = fit(session, hooks)
    if session.config.machine.evaluate:
        _closing_words(model, session)


def _dry_run(session: Session) -> None:
    from residua.train import estimate
    from residua.train.pretrain import hours

    guess = estimate(session)
    console.print(f"[bold]memory[/]   about {guess['memory_gib']:.2g} GiB for the network and one micro-batch")
    console.print(
        f"[bold]time[/]     about {hours(guess['seconds'])}, from three steps; nothing was trained or written"
    )


def _scores_while_training(model: Any, session: Session) -> dict[str, float]:
    from residua.evaluate import evaluate
    from residua.train.health import Health

    report = evaluate(
        model,
        session.splits,
        probe="lbfgs",
        baselines=False,
        neighbors=0,
        limit=10_000,
        accelerator=session.accelerator,
    )
    for text in Health(session.settings.steps).check_rank(report.value("entropy rank"), model.encoder.embed_dim):
        _note(text)
    return {f"eval/{s.metric.replace(' ', '_')}": s.value for s in report.scores if s.layer in (-1, report.layers[-1])}


def _quickest_probe(session: Session) -> Literal["simple", "lbfgs"]:
    """One layer after the other to its optimum suits a CPU; many small steps for all layers at once, a GPU."""
    return "lbfgs" if session.accelerator.device.type == "cpu" else "simple"


def _closing_words(model: Any, session: Session) -> None:
    from residua.evaluate import evaluate
    from residua.report import run_report

    probe = _quickest_probe(session)
    report = evaluate(model, session.splits, probe=probe, layers="all", accelerator=session.accelerator)
    if not session.accelerator.is_main_process:
        return
    run = session.run
    assert run is not None
    report.save(run / "evaluation.json")
    page = run_report(run, model=model, splits=session.splits, evaluation=report)
    console.print(report.table())
    rank, fresh, pixels = (report.value("entropy rank", who) for who in ("model", "random init", "pixels"))
    console.print(f"entropy rank {rank:.1f} nats (random init {fresh:.1f}, pixels {pixels:.1f}); pictures: {page}")
    console.print(f'load it:  model = residua.load("{run}")', markup=False)
    console.print(
        f"use it:   residua embed {run} --data {session.config.data.data} --out features.parquet",
        markup=False,
    )


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
    spec = o.data or _data_of(o.model)
    splits = residua.data.load(spec)
    accelerator = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=o.device == "cpu")
    report = evaluate(
        model, splits, knn=o.knn, probe=None if o.probe == "none" else o.probe, rank=o.rank, layers=_layers(o.layers),
        readout=o.readout, k=o.k, temperature=o.temperature, img_size=_img_size(o.img_size), batch_size=o.batch_size,
        limit=o.limit, seed=o.seed, baselines=o.baselines, on_bad_image=o.on_bad_image, device=o.device,
        accelerator=accelerator,
    )  # fmt: skip
    if accelerator is not None and not accelerator.is_main_process:
        return
    _warn_shared(splits)
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
        residua.load(o.model), o.data, o.out, layers=_layers(o.layers), readout=o.readout,
        img_size=_img_size(o.img_size), batch_size=o.batch_size, on_bad_image=o.on_bad_image, device=o.device,
    )  # fmt: skip
    console.print(f"written: {path}", markup=False)


@dataclass(frozen=True)
class CompareOptions:
    """Runs side by side: what differs between their settings, their scores, curves and reconstructions."""

    runs: Positional[tuple[str, ...]]
    """Two run folders or more."""
    out: str = "comparison.html"
    """Page to write."""
    open: bool = False
    """Open it in the browser."""


def compare(args: list[str]) -> None:
    """Runs side by side."""
    from residua.report import compare, comparison_table

    o = tyro.cli(CompareOptions, args=args, prog="residua compare")
    runs = [Path(run).expanduser() for run in o.runs]
    page = compare(runs, Path(o.out))
    console.print(comparison_table(runs))
    _show(page, o.open)


@dataclass(frozen=True)
class DataOptions:
    """What a source of images holds."""

    action: Positional[Literal["info", "preview"]]
    """info: counts, sizes, classes, statistics; preview: a grid of images as PNG."""
    data: Positional[str] = "shapes"
    """shapes, digits, cifar10, cifar100, stl10, fashion-mnist, folder:PATH, parquet:PATH, hf:NAME, imagenet:PATH."""
    out: str = "preview.png"
    """preview: file to write."""
    n: int = 64
    """preview: number of images."""
    img_size: int | None = None
    """preview: side of an image."""
    augmented: bool = False
    """preview: random crops and flips, as in training."""


def data(args: list[str]) -> None:
    """What a source of images holds."""
    from residua import data

    o = tyro.cli(DataOptions, args=args, prog="residua data")
    splits = data.load(o.data)
    if o.action == "preview":
        path = data.preview(splits, Path(o.out), n=o.n, img_size=o.img_size, augmented=o.augmented)
        return console.print(f"written: {path}", markup=False)
    _print_nested(data.describe(splits))
    _warn_shared(splits)


def recipes(args: list[str]) -> None:
    """Rows of the paper, runnable."""
    from rich.table import Table

    from residua.recipes import RECIPES, get

    @dataclass(frozen=True)
    class RecipeOptions:
        """Settings with a name, their cost and the numbers to expect; `residua pretrain NAME` runs one."""

        name: Annotated[str | None, tyro.conf.arg(metavar="[NAME]")] = None

    o = tyro.cli(RecipeOptions, args=args, prog="residua recipes", config=(tyro.conf.Positional,))
    if o.name is None:
        table = Table("recipe", "what", "cost", "expect")
        for recipe in RECIPES.values():
            table.add_row(recipe.name, recipe.summary, recipe.cost, recipe.expect)
        return console.print(table)
    recipe = get(o.name)
    _print_nested({"what": recipe.summary, "cost": recipe.cost, "expect": recipe.expect, "settings": recipe.settings})
    console.print(f"\nrun it:  residua pretrain {recipe.name}", markup=False)


@dataclass(frozen=True)
class DemoOptions:
    """Pretrain with and without fading shortcuts on embedded images, evaluate both, write one page."""

    out: str = "demo"
    """Folder for the two runs and report.html."""
    quick: bool = False
    """Seconds instead of minutes: shows the way, not the numbers."""
    open: bool = False
    """Open the page in the browser."""


def demo(args: list[str]) -> None:
    """Two small runs, one page."""
    from residua.report.demo import demo

    o = tyro.cli(DemoOptions, args=args, prog="residua demo")
    page, table = demo(Path(o.out).expanduser(), quick=o.quick, on_message=_say, on_record=_fifths())
    console.print(table)
    _show(page, o.open)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo, "pretrain": pretrain, "evaluate": evaluate, "compare": compare, "embed": embed, "data": data,
    "recipes": recipes,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        console.print(USAGE, markup=False)
        return 0
    if args[0] == "--version":
        from residua import __version__

        console.print(__version__)
        return 0
    name = args.pop(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2) or list(COMMANDS)
        return _fail(f"there is no command {name!r}; did you mean {' or '.join(near)}?")
    try:
        COMMANDS[name](args)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("RESIDUA_DEBUG"):
            raise
        stopped = type(error).__name__ == "TrainingStopped"
        hint = (
            ""
            if stopped or isinstance(error, ValueError)
            else f" ({type(error).__name__}; RESIDUA_DEBUG=1 shows where)"
        )
        return _fail(f"{error}{hint}", 1 if stopped else 2)
    return 0


# ---------------------------------------------------------------- small things


class _Bar:
    """The progress line: step, loss, images/s, share of the chip's peak, time left."""

    def __init__(self, steps: int, batch_size: int, show: bool) -> None:
        self.steps, self.batch_size, self.show, self.lines = steps, batch_size, show, 0
        text = "step {task.completed:,.0f}/{task.total:,.0f}  {task.fields[text]}"
        self.progress = Progress(
            TextColumn("{task.percentage:3.0f} %"), BarColumn(24), TextColumn(text), console=console,
            disable=not (show and console.is_terminal),
        )  # fmt: skip
        self.task = self.progress.add_task("", total=steps, text="starting")

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        from residua.train.pretrain import hours

        parts = [f"loss {record['loss']:.4f}", f"{record['images_per_s']:,.0f} img/s"]
        if "mfu" in record:
            parts.append(f"MFU {100 * record['mfu']:.0f} %")
        parts += [
            f"{key.removeprefix('eval/')} {value:.4g}" for key, value in record.items() if key.startswith("eval/")
        ]
        left = (self.steps - record["step"]) * self.batch_size / record["images_per_s"]
        text = "  ".join([*parts, f"{hours(left)} left"])
        self.progress.update(self.task, completed=record["step"], text=text)
        if self.show and not console.is_terminal and 10 * record["step"] // self.steps > self.lines:
            self.lines = 10 * record["step"] // self.steps
            console.print(f"step {record['step']:,}/{self.steps:,}  {text}", markup=False)


def _layers(given: tuple[str, ...]) -> Any:
    if given in (("last",), ("all",)):
        return given[0]
    try:
        return [int(item) for item in given]
    except ValueError:
        raise ValueError(f"--layers {' '.join(given)}: give last, all, or block numbers") from None


def _img_size(given: tuple[int, ...]) -> tuple[int, int] | None:
    if len(given) > 2:
        raise ValueError(f"--img-size {' '.join(map(str, given))}: give a side, or height and width")
    return (given[0], given[-1]) if given else None


def _data_of(model: str) -> str:
    """What a run was trained on."""
    from residua.train import Pretrain

    for folder in (Path(model).expanduser(), *Path(model).expanduser().parents):
        if (folder / "config.yaml").exists():
            return Pretrain.read(folder / "config.yaml").data.data
    raise ValueError(f"{model} does not say which images to use: add --data")


def _fifths() -> Callable[[dict[str, Any]], None]:
    """Prints a line for each fifth of a demo's run."""
    told: dict[str, int] = {}

    def record(r: dict[str, Any]) -> None:
        fifth = 5 * r["step"] // r["steps"]
        if fifth > told.get(r["run"], 0):
            told[r["run"]] = fifth
            rate = f"{r['images_per_s']:,.0f} img/s"
            _say(f"  {r['run']:8} step {r['step']:,}/{r['steps']:,}  loss {r['loss']:.4f}  {rate}")

    return record


def _existing(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"there is no settings file {file}")
    return file


def _warn_shared(splits: Splits) -> None:
    from residua.data import count_shared

    if splits.test is None:
        return
    shared = count_shared(splits.train, splits.test)
    if shared:
        _note(f"{shared:,} test image{'s' * (shared > 1)} also occur{'s' * (shared == 1)} in the training part")


def _decoding(done: int, total: int) -> None:
    if console.is_terminal:
        console.print(f"decoding {done:,} of {total:,} images", end="\n" if done >= total else "\r", markup=False)


def _note(text: str) -> None:
    console.print(f"[yellow]note[/]     {escape(text)}")


def _say(text: str) -> None:
    console.print(text, markup=False)


def _fail(text: str, status: int = 2) -> int:
    errors.print(f"[red]error[/]: {escape(text)}")
    return status


def _show(page: Path, open_it: bool) -> None:
    console.print(f"page: {page}", markup=False)
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def _print_nested(values: dict[str, Any], indent: int = 0) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            console.print(" " * indent + f"[bold]{escape(str(key))}[/]")
            _print_nested(value, indent + 2)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            console.print(" " * indent + f"{escape(str(key)):12} {escape(str(text))}")


if __name__ == "__main__":
    sys.exit(main())
