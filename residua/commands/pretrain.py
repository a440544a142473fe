"""Images in, encoder out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.commands.calling import trained
from residua.commands.console import Bar, announce, console, counting, dry_run, note, quickest_probe, say, warn_shared

if TYPE_CHECKING:
    from residua.commands.run import Run
    from residua.train.health import Health
    from residua.train.pretrain import Pretraining


def pretrain(start: str | Path | None = None, *, progress: bool = False, **settings: Any) -> Run:
    """Pretrain an encoder on images without labels, as `residua pretrain` does: train, evaluate, write the page.

    `start` is a recipe or a settings file. `settings` are the options of `residua pretrain --help` by their plain
    names: `data="folder:photos"`, `alpha_min=0.8`, `steps=5000`, `seed=3`, `out="runs/a"`. What is left out is chosen
    from the images and the machine. Without `out` the run lies in a temporary folder that goes with the `Run`;
    `run.keep(path)` moves it. `progress` shows what the terminal shows. With `dry_run=True` nothing is trained, and
    what the run would take is returned (`residua.train.session.Estimate`).

    >>> run = residua.pretrain("mae-tiny-imagenet", data="folder:photos", alpha_min=0.8, seed=3)
    >>> run.model, run.scores.table(), run.page
    """
    found: Run = trained("pretrain", start, settings, progress, train)
    return found


def train(config: Any, given: set[str]) -> Any:
    """What the command does: (folder, model), or of a dry run what it would take."""
    from residua.train import Hooks, fit, prepare
    from residua.train.health import Health
    from residua.train.processes import agreed

    session = prepare(config, counting, given)
    with agreed():
        main = announce(session)
        if main:
            warn_shared(session.splits)
    if session.config.machine.dry_run:
        return dry_run(session)
    every = session.config.machine.eval_every
    health = Health(session.settings.steps)
    with Bar(session.settings.steps, session.settings.batch_size, show=main) as bar:
        hooks = Hooks(
            on_record=bar.update, on_message=note if main else (lambda text: None),
            every=max(1, round(every * session.steps_per_epoch)) if every else None,
            on_interval=lambda step, model: _scores_while_training(model, session, health), averaged=True,
        )  # fmt: skip
        model = fit(session, hooks)
    if session.config.machine.evaluate:
        _closing_words(model, session)
    return session.run, model


def _scores_while_training(model: Any, session: Pretraining, health: Health) -> dict[str, float]:
    from residua.evaluate.suite import evaluate

    report = evaluate(
        model,
        session.splits,
        probe=quickest_probe(session.accelerator.device.type),
        baselines=False,
        neighbors=0,
        limit=10_000,
        on_bad_image=session.machine.on_bad_image,
        accelerator=session.accelerator,
    )
    for text in health.check_rank(report.value("entropy rank"), model.encoder.embed_dim):
        if session.accelerator.is_main_process:
            note(text)
    return {f"eval/{s.metric.replace(' ', '_')}": s.value for s in report.scores if s.layer in (-1, report.layers[-1])}


def _closing_words(model: Any, session: Pretraining) -> None:
    from residua.evaluate.suite import evaluate
    from residua.report import run_report

    report = evaluate(
        model, session.splits, probe=quickest_probe(session.accelerator.device.type), layers="all",
        on_bad_image=session.machine.on_bad_image, accelerator=session.accelerator, progress=counting,
    )  # fmt: skip
    if not session.accelerator.is_main_process:
        return
    run = session.run
    assert run is not None
    report.save(run / "evaluation.json")
    page = run_report(run, model=model, splits=session.splits, evaluation=report)
    console.print(report.table())
    rank, fresh, pixels = (report.value("entropy rank", who) for who in ("model", "random init", "pixels"))
    say(f"entropy rank {rank:.1f} nats (random init {fresh:.1f}, pixels {pixels:.1f}); pictures: {page}")
    say(f'load it:  model = residua.load("{run}")')
    where, images = (shlex.quote(text) for text in (str(run), session.config.data.data))
    say(f"use it:   residua embed {where} --data {images} --out features.parquet")
    say(f"take it:  residua export {where} --to timm")
