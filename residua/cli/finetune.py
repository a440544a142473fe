"""`residua finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from tyro.conf import OmitArgPrefixes

from .console import Bar, announce, decoding, dry_run, note, say, warn_shared

if TYPE_CHECKING:
    from residua.evaluate.finetune import FinetuneResult


def finetune(args: list[str]) -> None:
    """Train a classifier end to end: `residua finetune RUN|CHECKPOINT|timm:NAME|NETWORK|SETTINGS.yaml [options]`."""
    from residua.data import load
    from residua.evaluate.finetune import labelled, train_and_test
    from residua.train import Finetune, Hooks
    from residua.train.classify import prepare

    default = Finetune()
    if args and not args[0].startswith("-"):
        given = args.pop(0)
        is_file = given.endswith((".yaml", ".yml")) and Path(given).expanduser().is_file()
        default = Finetune.read(Path(given).expanduser()) if is_file else default.override(model=given)
    config = tyro.cli(
        Finetune, args=args, default=default, prog="residua finetune RUN|CHECKPOINT|timm:NAME|NETWORK|SETTINGS.yaml",
        config=(OmitArgPrefixes,),
        description="Train an encoder with a new head end to end on labelled images, or a network from scratch, and "
        "test it. Every setting left at 'auto' is chosen from the network, the images and the machine, and printed.",
    )  # fmt: skip
    session = prepare(config, load=lambda spec, seed: labelled(load(spec), seed), progress=decoding)
    main = announce(session)
    if main:
        warn_shared(session.splits)
    if session.config.machine.dry_run:
        return dry_run(session)
    with Bar(session.settings.steps, session.settings.batch_size, show=main) as bar:
        result = train_and_test(
            session, Hooks(on_record=bar.update, on_message=note if main else (lambda text: None))
        )  # fmt: skip
    if main:
        _closing_words(result)


def _closing_words(result: FinetuneResult) -> None:
    from residua.train.classify import READOUTS

    say(str(result))
    if result.readout is not None:
        say(f"read-out: {READOUTS[result.readout]}")
    say(f'load it:  model = residua.load("{result.run}")')
    say('use it:   model.classes[model(model.preprocessing("photo.jpg")[None]).argmax()]')
