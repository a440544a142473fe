"""The proof of an export: its loading snippet, run on real images by a process that never heard of this package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residua.data import DataError, Preprocessing, load
from residua.export.fold import ExportError
from residua.train.options import trained_on

IMAGES = 14  # looked at by every check: one alone, seven, and all
BATCHES = (1, 7, IMAGES)
LIMIT = 1e-3  # a larger difference is no rounding and no eps: the export is withdrawn

# Runs on its own: `python -P -c CHECKER job.json`. Prints what it used, on the last line.
CHECKER = """
import json, sys
import numpy as np
job = json.load(open(sys.argv[1]))
given = dict(np.load(job["given"]))
if job["torch"]:
    import torch
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    given = {name: torch.from_numpy(value) for name, value in given.items()}
scope, found = {}, {}
exec(job["prelude"], scope)
exec(job["loading"], scope)
for size in job["batches"]:
    scope.update({name: value[:size] for name, value in given.items()})
    exec(job["computing"], scope)
    for name, expression in job["wanted"].items():
        value = eval(expression, scope)
        found[f"{name}/{size}"] = value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)
np.savez(job["found"], **found)
assert "residua" not in sys.modules, "residua was imported"
import importlib.metadata
print(json.dumps({name: importlib.metadata.version(name) for name in job["libraries"]}))
"""


@dataclass(frozen=True)
class Export:
    """What was written, how it is loaded, and what it must compute."""

    target: str
    folder: Path
    files: list[str]
    loading: str
    """Two lines of Python."""
    computing: str
    """The third; the names of `given` are free in it."""
    given: dict[str, Tensor] = field(repr=False)
    """Inputs, `IMAGES` rows each."""
    wanted: dict[str, tuple[str, Tensor]] = field(repr=False)
    """Output -> its expression after the snippet, and its value here."""
    libraries: tuple[str, ...]
    """Distributions that the snippet needs."""
    notes: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES
    prelude: str = ""
    """Python that defines what `wanted` calls."""

    @property
    def ran(self) -> bool:
        """Whether the check computes something, beyond comparing weights."""
        return self.target != "safetensors" or bool(self.prelude)

    @property
    def snippet(self) -> str:
        return f"{self.loading}\n{self.computing}"


@dataclass(frozen=True)
class Checked:
    """The largest difference over the images, relative to the largest value of each, by output and batch size."""

    differences: dict[str, dict[int, float]]
    versions: dict[str, str]

    @property
    def largest(self) -> float:
        return max(value for sizes in self.differences.values() for value in sizes.values())

    def summary(self, most: int = 4) -> dict[str, str]:
        """One line an output; where every tensor of the weights is compared, one for all of them."""
        found = dict(self.differences)
        shown = {}
        if len(found) > most:
            tensors = [found.pop(name) for name in list(found) if name != "tokens"]
            shown = {f"{len(tensors)} tensors of weights": f"{max(max(sizes.values()) for sizes in tensors):.1e}"}
        return shown | {
            name: ", ".join(f"{value:.1e} (batch of {size})" for size, value in sizes.items())
            for name, sizes in found.items()
        }


def check(export: Export) -> Checked:
    """Run the snippet of an export in a clean process and compare."""
    with tempfile.TemporaryDirectory() as place:
        job: dict[str, Any] = {
            "loading": export.loading, "computing": export.computing,
            "prelude": export.prelude, "batches": export.batches,
            "libraries": export.libraries, "torch": export.target != "onnx", "given": f"{place}/given.npz",
            "found": f"{place}/found.npz", "wanted": {name: text for name, (text, _) in export.wanted.items()},
        }  # fmt: skip
        given: dict[str, Any] = {name: value.numpy() for name, value in export.given.items()}
        np.savez(job["given"], **given)
        (Path(place) / "job.json").write_text(json.dumps(job))
        settings = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHECKER, f"{place}/job.json"],
            env=os.environ | settings, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Argument|Graph|Fail)\b", line)]
            raise ExportError(f"the export does not load in a process of its own: {(named or lines)[-1]}")
        found = dict(np.load(job["found"]))
    differences = {
        name: {size: relative(ours[:size], torch.from_numpy(found[f"{name}/{size}"])) for size in export.batches}
        for name, (_, ours) in export.wanted.items()
    }
    checked = Checked(differences, json.loads(done.stdout.strip().splitlines()[-1]))
    if checked.largest > LIMIT:
        raise ExportError(f"what {export.target} loads differs from the model by {checked.largest:.1e}: withdrawn")
    return checked


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference within an image over its largest value; the worst image's, infinite where one is NaN."""
    if ours.shape != theirs.shape:
        raise ExportError(f"the export computes {tuple(theirs.shape)}, expected {tuple(ours.shape)}")
    ours, theirs = ours.double().flatten(1), theirs.double().flatten(1)
    gap, size = (ours - theirs).abs().amax(1), ours.abs().amax(1)
    return float((gap / size.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(nan=torch.inf).max())


def real_images(run: Path | None, preprocessing: Preprocessing) -> tuple[Tensor, str]:
    """`IMAGES` images as the model sees them, and their origin: the run's own, test images where it has them."""
    spec = None if run is None else trained_on(run)
    side = max(preprocessing.img_size)
    for source in (spec, f"shapes?n=64&size={max(side, 16)}" if preprocessing.in_chans == 3 else "digits"):
        if source is None:
            continue
        try:
            splits = load(source, img_size=side)
            part = splits.test or splits.train
            picked = np.linspace(0, len(part) - 1, IMAGES).astype(int)
            images = preprocessing([part.read(int(i), side) for i in picked])
        except (DataError, OSError, ImportError, RuntimeError):
            continue
        return images, f"{IMAGES} {'test' if part is splits.test else 'training'} images of {source}"
    rgb = Preprocessing(preprocessing.img_size, (0.5,) * 3, (0.5,) * 3)
    shapes = load("shapes?n=16", img_size=max(side, 16)).train
    images = rgb([shapes.read(i) for i in range(IMAGES)])
    channels = torch.arange(preprocessing.in_chans) % 3
    return images[:, channels].contiguous(), f"{IMAGES} images of shapes, their channels repeated"
