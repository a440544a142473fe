"""`residua diffuse`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Bar, announce, decoding, dry_run, note, say
from .pretrain import settings

if TYPE_CHECKING:
    from residua.train.diffuse import Diffusion


def diffuse(args: list[str]) -> None:
    """Train a diffusion model: `residua diffuse [RECIPE or SETTINGS.yaml] [options]`."""
    from residua.train import fit
    from residua.train.diffuse import prepare
    from residua.train.diffuse_config import Diffuse
    from residua.train.loop import append_metrics

    config = settings(Diffuse, args, "diffuse", "Train a diffusion model whose identity shortcuts fade with depth.")
    session = prepare(config, decoding)
    main = announce(session)
    if session.config.machine.dry_run:
        return dry_run(session)
    measure = fid_monitor(session)
    with Bar(session.settings.steps, session.settings.batch_size, show=main) as bar:
        hooks = session.hooks(
            on_record=bar.update, on_message=note if main else (lambda text: None), on_interval=measure
        )
        model = fit(session, hooks)
    picture = session.write_grid(session.settings.steps, model)
    last = measure(session.settings.steps, model) or {}
    for name, value in last.items():
        say(f"{name.removeprefix('eval/')} {value:.2f} of {session.config.machine.fid_samples:,} samples")
    if last and session.run is not None:
        append_metrics(session.run, {"step": session.settings.steps, "epoch": session.config.optim.epochs, **last})
    if main:
        _closing_words(session.run, picture)


def fid_monitor(session: Diffusion) -> Callable[[int, Any], dict[str, float] | None]:
    """What is measured while training and at its end: a FID every so many pictures of samples, where asked for."""
    machine = session.config.machine
    if not machine.fid_every or not machine.sample_every:
        return lambda step, model: None
    from residua.data.arrays import cache_dir
    from residua.evaluate import FeatureCache
    from residua.evaluate.extractor import open_extractor
    from residua.evaluate.generative import score
    from residua.train.diffuse import GRID
    from residua.train.sample import sample

    # opened before training, not after hours of it
    extractor = open_extractor(machine.fid_extractor, machine.fid_weights)
    cache = FeatureCache(cache_dir() / "references", note)
    every = max(1, round(machine.fid_every / machine.sample_every))
    steps, size = session.steps_per_grid, session.preprocessing.img_size
    assert steps is not None

    def measure(step: int, model: Any) -> dict[str, float] | None:
        if step != session.settings.steps and step // steps % every:
            return None
        parts = range(0, machine.fid_samples, 1000)
        made = (sample(model, min(1000, machine.fid_samples - i), settings=GRID, first=i) for i in parts)
        colour = (part.expand(-1, 3, -1, -1) for part in made)  # grey is repeated
        found = score(
            colour, session.splits.train, extractor=extractor, img_size=size, device=session.accelerator.device,
            cache=cache,
        )  # fmt: skip
        return {"eval/fid" if extractor.inception else "eval/frechet": found.scores[0].value}

    return measure


def _closing_words(run: Path | None, picture: Path | None) -> None:
    if picture is not None:
        say(f"samples:  {picture}")
    say(f"more:     residua sample {run} -n 10000")
    say(f"features: residua evaluate {run}")
    say(f'load it:  model = residua.load("{run}"); images = residua.sample(model, 16)')
