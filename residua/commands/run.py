"""A run folder as an object."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residua.evaluate import Report
    from residua.train import Diffuse, Finetune, Pretrain


class Run:
    """A run: the folder that training wrote, and what lies in it.

        run = residua.pretrain(data="folder:photos", epochs=100)
        run.model, run.scores, run.history[-1]["loss"], run.page
        run.keep("runs/photos")
        residua.finetune(run, data="folder:classes")

        run = residua.Run.of("runs/photos")

    A run that was given no folder lies in a temporary one, which goes with the object or with the process; `keep`
    moves it.
    """

    def __init__(self, path: Path, model: Any = None, temporary: bool = False) -> None:
        self.path = path
        if model is not None:
            self.model = model
        self._gone = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True) if temporary else None

    @classmethod
    def of(cls, path: str | Path) -> Run:
        """The run in a folder, or the one that a checkpoint or another file in it belongs to."""
        given = Path(path).expanduser()
        for folder in (given, *given.parents):
            if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
                return cls(folder)
        raise ValueError(f"{path} is no run, nor part of one: give a folder that training wrote")

    @cached_property
    def model(self) -> Any:
        """The model of the last checkpoint, in evaluation mode; its moving average, where one is kept."""
        from residua.train.checkpoint import load

        return load(self.path)

    @property
    def config(self) -> Pretrain | Finetune | Diffuse:
        """Every setting, those chosen by themselves included."""
        from residua.report.runs import read_config

        return read_config(self.path / "config.yaml")

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records of training and of evaluations on the way, in order: step, epoch, loss, lr, images_per_s, ..."""
        from residua.train.metrics import read_metrics

        return read_metrics(self.path)

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of everything that the history records."""
        return {name: value for record in self.history for name, value in record.items()}

    @property
    def scores(self) -> Report | None:
        """What the evaluation, or a classifier's test, found in the end; None where there was none."""
        from residua.report.runs import read_run

        return read_run(self.path).evaluation

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        from residua.train.checkpoint import checkpoints

        return checkpoints(self.path)

    @property
    def page(self) -> Path | None:
        """The report page; None where none was written."""
        page = self.path / "report.html"
        return page if page.is_file() else None

    def keep(self, path: str | Path) -> Run:
        """Move the run to a folder that is not there yet; what was temporary stays from then on."""
        goal = Path(path).expanduser()
        if goal.exists():
            raise ValueError(f"{goal} is there already: choose another folder")
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.path, goal)
        if self._gone is not None:
            self._gone.detach()
            self._gone = None
        self.path = goal
        return self

    def __fspath__(self) -> str:
        """Its folder: `residua.evaluate(run)`, `residua.finetune(run)`."""
        return str(self.path)

    def __repr__(self) -> str:
        step, steps = self.metrics.get("step", 0), self.config.settings()["steps"]
        return f"Run({str(self.path)!r}: {type(self.config).__name__.lower()}, step {step:,} of {steps:,})"


def temporary_folder() -> Path:
    """A folder for a run that is given none."""
    return Path(tempfile.mkdtemp(prefix="residua-"))
