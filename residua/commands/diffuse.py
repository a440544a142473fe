"""Train a diffusion model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from residua.commands.calling import trained
from residua.commands.console import Bar, announce, console, counting, dry_run, note, say

if TYPE_CHECKING:
    from residua.commands.run import Run
    from residua.train.diffuse import Diffusion


def diffuse(start: str | Path | None = None, *, progress: bool = False, **settings: Any) -> Run:
    """Train a diffusion model on images, as `residua diffuse` does, with pictures of samples and FIDs on the way.

    `start` is a recipe or a settings file, `settings` are the options of `residua diffuse --help` by their plain names;
    all else is as in `residua.pretrain`.

    >>> run = residua.diffuse("uvit-cifar100", data="folder:photos", alpha_min=0.7, steps=20_000)
    >>> images = residua.sample(run.model, 16)
    """
    found: Run = trained("diffuse", start, settings, progress, train)
    return found


def train(config: Any, given: set[str]) -> Any:
    """What the command does: (folder, model), or of a dry run what it would take."""
    from residua.train import fit
    from residua.train.diffuse import prepare
    from residua.train.metrics import replace_metrics
    from residua.train.processes import agreed

    session = prepare(config, counting, given)
    with agreed():
        main = announce(session)
    if session.config.machine.dry_run:
        return dry_run(session)
    measure = FidMonitor(session) if session.config.machine.fid_every else None
    with Bar(session.settings.steps, session.settings.batch_size, show=main) as bar:
        hooks = session.hooks(
            on_record=bar.update, on_message=note if main else (lambda text: None), on_interval=measure
        )
        model = fit(session, hooks)
    picture = session.write_grid(session.settings.steps, model)
    if measure is not None:
        last = measure(session.settings.steps, model) or {}
        for name, value in last.items():
            say(f"{name.removeprefix('eval/')} {value:.2f} of {measure.how}")
        if session.run is not None:
            record = {"step": session.settings.steps, "epoch": session.config.optim.epochs, **last}
            replace_metrics(session.run, record)  # of a run that was finished before, it is there already
    if main:
        _closing_words(session.run, picture)
    return session.run, model


class FidMonitor:
    """A FID every so many pictures of samples and at the end of training.

    What it depends on is said once, at the start, and stands with each score in RUN/samples/step-0001000-fid.json.
    """

    def __init__(self, session: Diffusion) -> None:
        """Whatever may be wrong with extractor and reference shows here, not after hours of training."""
        from residua.data.arrays import cache_dir
        from residua.evaluate import FeatureCache
        from residua.evaluate.extractor import open_extractor
        from residua.evaluate.summary import keep_reference
        from residua.train.diffuse import GRID
        from residua.train.sample import check_sampling
        from residua.train.samplefiles import describe

        self.session, self.machine, self.told = session, session.config.machine, set[str]()
        device, train = session.accelerator.device, session.splits.train
        assert session.steps_per_grid
        assert self.machine.fid_every
        assert self.machine.sample_every
        self.steps = session.steps_per_grid * max(1, round(self.machine.fid_every / self.machine.sample_every))
        chosen = check_sampling(session.model, GRID, device)
        self.extractor = open_extractor(self.machine.fid_extractor, self.machine.fid_weights)
        self.about = describe(session.model, chosen, self.machine.fid_samples)
        guidance = f"guidance {chosen.guidance:g}" if chosen.classes else "no guidance"
        self.how = (
            f"{self.machine.fid_samples:,} samples ({chosen.sampler}, {chosen.steps} steps, {guidance}) "
            f"against {len(train):,} training images, extractor {self.extractor.name}"
        )
        console.print(f"[bold]fid[/]      every {self.steps:,} steps: {escape(self.how)}")
        self.options: dict[str, Any] = {
            "img_size": session.preprocessing.img_size, "device": device, "on_bad_image": self.machine.on_bad_image,
            "cache": FeatureCache(cache_dir() / "references", note),
        }  # fmt: skip
        keep_reference(train, self.extractor, **self.options, progress=counting)

    def __call__(self, step: int, model: Any) -> dict[str, float] | None:
        from residua.evaluate.generative import score
        from residua.train.diffuse import GRID
        from residua.train.sample import sample

        if step != self.session.settings.steps and step % self.steps:
            return None
        n = self.machine.fid_samples
        made = (sample(model, min(1000, n - i), settings=GRID, first=i) for i in range(0, n, 1000))
        colour = (part.expand(-1, 3, -1, -1) for part in made)  # grey is repeated
        found = score(
            colour, self.session.splits.train, extractor=self.extractor, about=self.about | {"training_steps": step},
            **self.options,
        )  # fmt: skip
        for text in found.notes:
            if text not in self.told:
                note(text)
        self.told.update(found.notes)
        if self.session.run is not None:
            found.save(self.session.run / "samples" / f"step-{step:07d}-fid.json")
        return {"eval/fid" if self.extractor.inception else "eval/frechet": found.scores[0].value}


def _closing_words(run: Path | None, picture: Path | None) -> None:
    if picture is not None:
        say(f"samples:  {picture}")
    where = shlex.quote(str(run))
    say(f"more:     residua sample {where} -n 10000")
    say(f"features: residua evaluate {where}")
    say(f'load it:  model = residua.load("{run}"); images = residua.sample(model, 16)')
