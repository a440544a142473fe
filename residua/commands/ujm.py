"""The Unconstrained Jacobians Model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from residua.commands.calling import measured, options_of
from residua.commands.console import check_folder, console, say, show

if TYPE_CHECKING:
    from residua.anatomy import UJM, Alignment


@dataclass(frozen=True)
class Options:
    """The Unconstrained Jacobians Model: free matrices instead of a network, solved exactly and measured alike."""

    depth: int = 16
    """Number of Jacobians."""
    penalty: Literal["weights", "kinetic"] = "weights"
    """weights: squares of the Jacobians; kinetic: squares of the steps they make."""
    dim: int = 6
    """Dimensions."""
    samples: int = 40
    """Of the Gaussian clouds, over all classes."""
    classes: int = 2
    """Clouds: two at +-e_1, more at e_1, e_2, ..."""
    noise: float = 0.3
    """Of a cloud."""
    lam: float = 0.01
    """Strength of the penalty."""
    lam_w: float = 0.01
    """Strength of the classifier's weight decay."""
    seed: int = 0
    """Of the samples and of where the solver starts."""
    out: str | None = None
    """Folder for ujm.json and ujm.html; default: none are written."""
    open: bool = False
    """Open the page in the browser."""


class Solved(NamedTuple):
    """What `ujm` found."""

    model: UJM
    laws: Alignment


def ujm(*, progress: bool = False, **options: Any) -> Solved:
    """Solve and measure the Unconstrained Jacobians Model, as `residua ujm` does, by whose options' plain names.

    >>> model, laws = residua.ujm(depth=8, penalty="kinetic")
    >>> model.accuracy(), laws.scalars()
    """
    return measured(progress, work, options_of(Options, options))


def work(o: Options) -> Solved:
    """What the command does."""
    from residua.anatomy import blobs, measure, solve
    from residua.anatomy.alignment import ujm_blocks
    from residua.disk import write_text
    from residua.report.anatomy import ujm_page

    if o.open and o.out is None:
        raise ValueError("--open needs --out: the folder that the page is written to")
    if o.out is not None:
        check_folder(Path(o.out).expanduser())
    x, y = blobs(o.dim, o.samples, o.classes, o.noise, o.seed)
    model = solve(x, y, o.depth, penalty=o.penalty, lam=o.lam, lam_w=o.lam_w, seed=o.seed)
    rank = 1 if o.classes == 2 else o.classes  # two classes need one direction
    laws = measure(*ujm_blocks(model), k=min(o.dim, max(4, rank + 1)), classes=rank)
    console.print(laws.table(f"{o.depth} Jacobians of {o.dim} dimensions, {o.penalty} penalty, {o.classes} classes"))
    values = laws.S[0, :, 0]
    say(f"s_1 from {float(values[0]):.4f} (first) to {float(values[-1]):.4f} (last); sum {float(values.sum()):.3f}; "
        f"|<u, v>| {float(laws.left_right[0].mean()):.3f}; {model.accuracy():.1f} % classified right; "
        f"norm of the gradient {model.gradient:.1e}")  # fmt: skip
    if o.out is not None:
        folder = Path(o.out).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        summary = {"loss": model.loss, "gradient": model.gradient, "accuracy": model.accuracy()}
        write_text(folder / "ujm.json", json.dumps(summary | {"laws": laws.to_dict()}, indent=1))
        say(f"written: {folder / 'ujm.json'}")
        show(ujm_page(model, laws, folder / "ujm.html"), o.open)
    return Solved(model, laws)
