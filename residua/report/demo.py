"""Three minutes on a CPU: an encoder trained without labels, what its layers are made of, what residual blocks do.

What the page says of these numbers are `CLAIMS`: comparisons whose sign was the same in every run of
`benchmarks/demo_noise.py`. Differences that chance decides are not shown.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from residua.anatomy import counterfactual
from residua.anatomy.mixing import Mixing, mixing
from residua.anatomy.study import Anatomy, Look, study
from residua.data import Splits
from residua.data import load as load_data
from residua.disk import write_text
from residua.evaluate import Report
from residua.evaluate.maps import sample_images
from residua.evaluate.report import PIXELS, RANDOM
from residua.nn import MAE
from residua.report import gallery
from residua.report.anatomy import alignment_grid, share_bars
from residua.report.page import Cell, Page
from residua.report.parts import neighbors
from residua.train.checkpoint import load
from residua.train.config import Pretrain
from residua.train.metrics import read_metrics
from residua.train.processes import program

FADING, PLAIN = "fading", "plain"
ALPHAS = {FADING: 0.6, PLAIN: 1.0}
SHORTCUTS, NONE = "shortcuts", "no shortcuts"
EMBEDDING, ECHO = "embedding in the last layer", "echo in the last layer"

SETTINGS: dict[str, Any] = {
    "data": "shapes?n=8192&test=1024",
    "size": "nano", "embed_dim": 64, "depth": 4, "num_heads": 2, "mask_ratio": 0.6,
    "decoder_embed_dim": 32, "decoder_depth": 2, "decoder_num_heads": 1,
    "batch_size": 64, "steps": 1600, "lr": 4e-3,
    "cpu": True, "precision": "fp32", "compile": False, "trackers": (), "keep": 1,
}  # fmt: skip
BLOCKS: dict[str, Any] = {"depths": (8,), "epochs": 40.0}
"""Of the fully connected networks."""
LOOK = Look(k=10)
QUICK: dict[str, Any] = {
    "data": "shapes?n=128&test=64", "steps": 8,
    "embed_dim": 32, "depth": 4, "decoder_embed_dim": 16, "decoder_depth": 2,
}  # fmt: skip
QUICK_BLOCKS: dict[str, Any] = {"depths": (3,), "epochs": 1.0, "width": 16}
_SHARES = (0.75, 0.83, 0.97)
"""Where training, measuring and the fully connected networks end, as shares of the whole time."""

Numbers = dict[str, dict[str, float]]
"""Score -> subject -> value."""


class Claim(NamedTuple):
    """A comparison that the page makes: `more` has a higher score than `less`."""

    score: str
    more: str
    less: str

    def margin(self, numbers: Numbers) -> float:
        """Positive where it holds."""
        return numbers[self.score][self.more] - numbers[self.score][self.less]


ENCODER = (
    Claim("linear probe", FADING, RANDOM), Claim("linear probe", FADING, PIXELS), Claim("kNN", FADING, RANDOM),
)  # fmt: skip
LAST_LAYER = Claim(EMBEDDING, PLAIN, FADING), Claim(ECHO, PLAIN, FADING)
ALIGNMENT = Claim("RA1 line shape", NONE, SHORTCUTS), Claim("RA2 diagonal share", SHORTCUTS, NONE)
CLAIMS = (*ENCODER, *LAST_LAYER, *ALIGNMENT)


@dataclass(frozen=True)
class Found:
    """All that the page shows."""

    models: dict[str, MAE]
    reports: dict[str, Report]
    mixes: dict[str, Mixing]
    accuracy: dict[str, float]
    anatomy: dict[str, Anatomy]

    def numbers(self) -> Numbers:
        own = self.reports[FADING]
        scores: Numbers = {}
        for metric in ("linear probe", "kNN", "entropy rank"):
            scores[metric] = {name: report.value(metric) for name, report in self.reports.items()}
            scores[metric] |= {subject: own.value(metric, subject) for subject in (RANDOM, PIXELS)}
        scores[EMBEDDING] = {name: 100 * mix.embedding for name, mix in self.mixes.items()}
        scores[ECHO] = {name: 100 * mix.echo for name, mix in self.mixes.items()}
        scores["accuracy"] = dict(self.accuracy)
        for law in ("RA1 line shape", "RA2 diagonal share"):
            scores[law] = {name: found.parts[0].laws.scalars()[law][0] for name, found in self.anatomy.items()}
        return scores


def demo(
    out: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    on_message: Callable[[str], None] = print,
    on_progress: Callable[[float, str], None] = lambda share, text: None,
) -> tuple[Path, Table]:
    """Train, measure, and write OUT/report.html and OUT/numbers.json: the page and a table.

    Two masked autoencoders, with and without fading, train side by side as `residua pretrain`, one thread each; then
    two fully connected networks, with and without shortcuts. Their run folders are left in OUT; those of an earlier
    demo are replaced. `quick` takes seconds and shows the way, not the numbers. `on_progress` gets the share of the
    whole time that is over, and what is being done.

    >>> page, table = demo(Path("demo"))
    """
    started = time.perf_counter()
    out = Path(out).expanduser()
    settings = SETTINGS | (QUICK if quick else {}) | {"seed": seed}
    for run in (out / name for name in ALPHAS):
        if (run / "config.yaml").exists() and not (run / "settings.yaml").exists():
            raise ValueError(f"{run} holds a run that no demo made: give another folder (--out)")
    on_message(f"training two small autoencoders, {settings['steps']:,} steps each, alpha_min 1 and {ALPHAS[FADING]:g}")
    children = {name: _start(out / name, settings | {"alpha_min": alpha}) for name, alpha in ALPHAS.items()}
    try:
        _watch(out, children, settings["steps"], on_progress)
    finally:
        for child in children.values():
            child.kill()
    splits = load_data(settings["data"])
    models = {name: _autoencoder(out / name) for name in ALPHAS}
    on_message("training two small fully connected networks, with and without shortcuts")
    on_progress(_SHARES[1], "fully connected networks")
    accuracy, anatomy = _blocks(out / "blocks", seed, quick)
    on_progress(_SHARES[2], "drawing the page")
    found = Found(
        models,
        {name: Report.from_dict(json.loads((out / name / "evaluation.json").read_text("utf-8"))) for name in ALPHAS},
        {name: mixing(model, sample_images(model, splits, 512)) for name, model in reversed(models.items())},
        accuracy,
        anatomy,
    )
    numbers = found.numbers()
    last = {name: mix.shares[-1].tolist() for name, mix in found.mixes.items()}
    write_text(out / "numbers.json", json.dumps({"numbers": numbers, "last layer": last}, indent=1))
    page = _page(out, found, numbers, splits, quick)
    page.paragraph(f"All of it took {time.perf_counter() - started:.0f} seconds on this machine.")
    path = page.save(out / "report.html")
    on_progress(1.0, "done")
    return path, _table(numbers)


def _start(run: Path, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """`residua pretrain` as a process of its own, into an empty folder."""
    if (run / "config.yaml").exists():
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)
    config = Pretrain().override(**settings, checkpoint_every=settings["steps"])
    config.save(run / "settings.yaml")
    call = [*program(), "pretrain", str(run / "settings.yaml"), "--out", str(run)]
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.Popen(call, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _watch(
    out: Path, children: dict[str, subprocess.Popen[str]], steps: int, on_progress: Callable[[float, str], None]
) -> None:
    """Report how far the slower run is until both have ended."""
    while True:
        running = [child for child in children.values() if child.poll() is None]
        done = min((read_metrics(out / name) or [{"step": 0}])[-1]["step"] for name in children)
        on_progress(_SHARES[0] * done / steps, f"step {done:,}/{steps:,}" if done < steps else "measuring every block")
        for name, child in children.items():
            if child.poll():
                said = child.stderr.read() if child.stderr else ""
                raise RuntimeError(f"the run {name} failed: {said.strip() or f'exit status {child.returncode}'}")
        if not running:
            return
        time.sleep(0.5)


def _autoencoder(run: Path) -> MAE:
    model = load(run)
    assert isinstance(model, MAE)
    return model


def _blocks(folder: Path, seed: int, quick: bool) -> tuple[dict[str, float], dict[str, Anatomy]]:
    """Test accuracy and anatomy of both fully connected networks."""
    cases = counterfactual.plan("shortcut", seed=seed, **BLOCKS | (QUICK_BLOCKS if quick else {}))
    for earlier in (folder / case.name for case in cases):
        if (earlier / "case.json").exists():
            shutil.rmtree(earlier)
    outcomes = counterfactual.run(cases, folder, LOOK)
    digits = load_data("digits")
    return (
        {o.case.series: o.accuracy for o in outcomes},
        {o.case.series: study(load(folder / o.case.name), digits, "train", LOOK) for o in outcomes},
    )


# ---------------------------------------------------------------- what is shown

_COLUMNS = (FADING, RANDOM, PIXELS)
_UNITS = {"linear probe": " %", "kNN": " %", "entropy rank": " nats"}


def _rows(numbers: Numbers) -> list[list[str | Cell]]:
    """score, encoder, random weights, raw pixels."""
    rows: list[list[str | Cell]] = []
    for metric, unit in _UNITS.items():
        values = [numbers[metric][subject] for subject in _COLUMNS]
        digits = 2 if "nats" in unit else 1
        rows.append([metric, *(Cell(f"{value:.{digits}f}{unit}", value) for value in values)])
    return rows


_HEADER = ["frozen features", "encoder", "random weights", "raw pixels"]


def _table(numbers: Numbers) -> Table:
    table = Table(title="shapes: what two minutes without labels are worth", title_justify="left")
    for i, heading in enumerate(_HEADER):
        table.add_column(heading, justify="right" if i else "left")
    for row in _rows(numbers):
        table.add_row(*(cell.text if isinstance(cell, Cell) else cell for cell in row))
    return table


def _page(out: Path, found: Found, numbers: Numbers, splits: Splits, quick: bool) -> Page:
    page = Page("What a layer is made of")
    page.paragraph(
        "A residual network adds what each sublayer computes to a stream, x <- x + f(x), so its last layer is a sum "
        "with one term for every layer before it. The bars measure that sum in two small masked autoencoders: one with "
        f"ordinary shortcuts, and one whose shortcuts fade, x <- alpha x + f(x), with alpha from 1 to {ALPHAS[FADING]}."
    )
    bars = {name: found.mixes[key] for name, key in (("ordinary", PLAIN), ("fading", FADING))}
    how = (
        "Each segment is a sublayer's share of the last layer (differences between 512 test images, patch tokens). "
        "Grey: the embedding, which is the pixels after one linear layer. Bracket: the echo, which is the embedding "
        "and the first third of the sublayers. A sublayer that erases has a share below zero, at the left."
    )
    page.figures((share_bars(bars), how))
    if quick:
        page.paragraph("This is the quick version: a handful of steps, numbers without meaning.", note=True)
    page.paragraph(_said(numbers, LAST_LAYER))
    page.code("from residua.evaluate.maps import sample_images")
    page.code(f'model = residua.load("{out / FADING}")')
    page.code('residua.mixing(model, sample_images(model, residua.data.load("shapes"), 512)).figure()')
    _encoder(page, out, found, numbers, splits)
    _alignment(page, found, numbers)
    page.heading("Your own photos")
    page.code("residua pretrain --data folder:my_photos --out runs/photos")
    page.code("residua evaluate runs/photos --layers all")
    page.code("residua export runs/photos --to timm --out photos-timm")
    page.heading("Your own model")
    page.code("residua evaluate timm:vit_small_patch16_224 --data folder:my_photos --knn")
    page.code("residua anatomy torchvision:resnet18 --data folder:my_photos")
    page.code("residua.fade(model, alpha_min=0.8)    # in Python: any residual model, in place, before it is trained")
    page.heading("What this shows, and what it does not")
    page.paragraph(
        "The comparisons in words above had the same sign in all recorded runs (benchmarks/demo_noise.py: several "
        "seeds, one and two threads). Whether fading makes better features is not among them: so early, chance decides "
        "that. After 50,000 steps on photographs it does; docs/results.md says how much and how sure."
    )
    return page


def _encoder(page: Page, out: Path, found: Found, numbers: Numbers, splits: Splits) -> None:
    page.heading("An encoder from images without labels")
    page.paragraph(
        f"The fading one, after {read_metrics(out / FADING)[-1]['step']:,} steps on {len(splits.train):,} drawings of "
        "shapes. Its features are frozen and read in two ways: by a linear classifier (probe) and by a vote of nearest "
        "neighbours (kNN). Beside it stands what costs nothing: the same network with random weights, and the pixels."
    )
    report = found.reports[FADING]
    caption = (
        f"{report.n_train:,} training and {report.n_test:,} test images, ten classes; mean of all tokens of the last "
        "block, for the probe of the block that held-out training images chose."
    )
    page.table(_HEADER, _rows(numbers), caption=caption)
    page.paragraph(_said(numbers, ENCODER))
    page.code(f"residua evaluate {out / FADING} --layers all")
    model = found.models[FADING]
    hidden = (
        f"{100 * model.mask_ratio:.0f} % of the patches are hidden (grey), and the network fills them in. Mean and "
        "contrast of each patch are borrowed from the truth."
    )
    page.figures((gallery.reconstructions({"filled in": model}, splits), hidden))
    page.code(f'residua.report.gallery.reconstructions("{out / FADING}", "shapes")')
    neighbors(page, {FADING: report}, splits)
    page.code(f'residua.report.gallery.neighbors("{out / FADING}", "shapes", [0, 1, 2])')


def _alignment(page: Page, found: Found, numbers: Numbers) -> None:
    page.heading("What the blocks do")
    laws = {name: anatomy.parts[0].laws for name, anatomy in found.anatomy.items()}
    page.paragraph(
        f"Two fully connected networks of {len(laws[NONE].names)} blocks that read digits, trained alike, with and "
        "without shortcuts. Each block is seen through the singular vectors of its Jacobian: does block i act along "
        "the directions of block j?"
    )
    how = "the Jacobian of block i in the singular vectors of block j. Where all are diagonal, all share directions."
    page.figures(*((alignment_grid(law.grid, law.names, name), f"{name}: {how}") for name, law in laws.items()))
    digits = {"accuracy": 1, "RA1 line shape": 2, "RA2 diagonal share": 2}
    rows: list[list[str | Cell]] = [
        [name, *(Cell(f"{numbers[score][name]:.{n}f}", numbers[score][name]) for score, n in digits.items())]
        for name in laws
    ]
    caption = (
        "Line shape: how straight the path of an input through the blocks is; 1 is a straight line. Diagonal share: 1 "
        "where all blocks share their singular vectors. Means over 8 training images."
    )
    page.table(["network", "test accuracy, %", "line shape", "diagonal share"], rows, caption=caption)
    page.paragraph(_said(numbers, ALIGNMENT))
    page.code("residua counterfactual shortcut --depth 8 --epochs 40 --top 10")
    page.code("residua anatomy counterfactuals/shortcut/shortcuts-8-seed-0 --top 10")


_WORDS = {
    ENCODER[0]: "The probe reads {more:.1f} % from the encoder, {gap:.1f} points more than from random weights.",
    ENCODER[1]: "From raw pixels the probe reads {less:.1f} %, {gap:.1f} points less.",
    ENCODER[2]: "kNN gets {more:.1f} %, {gap:.1f} points more than from random weights.",
    LAST_LAYER[
        0
    ]: "The embedding makes up {more:.0f} % of the ordinary network's last layer, {less:.0f} % of the other's.",
    LAST_LAYER[1]: "The echo is {more:.0f} % and {less:.0f} %: where shortcuts fade, more of it comes from later ones.",
    ALIGNMENT[0]: "With shortcuts an input moves along nearly a straight line ({less:.2f}; without {more:.2f}).",
    ALIGNMENT[1]: "With them all blocks act along the same directions ({more:.2f}; without {less:.2f}).",
}


def _said(numbers: Numbers, claims: tuple[Claim, ...]) -> str:
    """Claims in words, each as this very run has it."""
    texts = []
    for claim in claims:
        more, less = (numbers[claim.score][subject] for subject in (claim.more, claim.less))
        words = f"{claim.score}: {{more:.1f}} of {claim.more}, not above {{less:.1f}} of {claim.less}."
        texts.append((_WORDS[claim] if more > less else words).format(more=more, less=less, gap=more - less))
    return " ".join(texts)
