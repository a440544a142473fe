"""`residua finetune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residua.commands.console import Bar, announce, counting, dry_run, note, say, typed, warn_shared
from residua.recipes.arguments import finetune_settings

if TYPE_CHECKING:
    from residua.evaluate.finetune import FinetuneResult


def finetune(args: list[str]) -> None:
    """Train a classifier end to end: `residua finetune RUN|CHECKPOINT|timm:NAME|NETWORK|SETTINGS.yaml [options]`."""
    from residua.data import load
    from residua.evaluate.finetune import labelled, train_and_test
    from residua.train import Hooks
    from residua.train.classify import prepare
    from residua.train.processes import agreed

    given = typed(args)  # before a settings file is taken from them
    config = finetune_settings(args)
    session = prepare(config, load=lambda spec: labelled(load(spec)), progress=counting, given=given)
    with agreed():
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
