"""Train a classifier end to end, and test it."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from residua.commands.calling import trained
from residua.commands.console import Bar, announce, counting, dry_run, note, say, warn_shared

if TYPE_CHECKING:
    from residua.commands.run import Run
    from residua.evaluate.finetune import FinetuneResult


def finetune(start: str | PathLike[str] | nn.Module | None = None, *, progress: bool = False, **settings: Any) -> Run:
    """Train an encoder and a new head end to end on labelled images and test it, as `residua finetune` does.

    `start` is a run, a checkpoint, a network in memory (which is left as it is), the name of a network to train from
    scratch ("resnet18", "timm:NAME") or a settings file; `settings` are the options of `residua finetune --help` by
    their plain names, by default MAE's recipe (He et al. 2022). Where labelled data has no test split, a fifth of the
    training images (stratified, always the same, also in `evaluate`) is held out. All else is as in `residua.pretrain`.

    >>> run = residua.finetune("runs/a", data="cifar100", epochs=20, mixup=0.0)
    >>> run.scores.value("accuracy"), run.model.classes
    """
    network, begin = (start, None) if isinstance(start, nn.Module) else (None, start)
    found: Run = trained("finetune", begin, settings, progress, partial(train, network=network))
    return found


def train(config: Any, given: set[str], network: nn.Module | None = None) -> Any:
    """What the command does: (folder, model), or of a dry run what it would take."""
    from residua.data import load
    from residua.evaluate.finetune import labelled, train_and_test
    from residua.train import Hooks
    from residua.train.classify import prepare
    from residua.train.processes import agreed

    session = prepare(config, start=network, load=lambda spec: labelled(load(spec)), progress=counting, given=given)
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
    return session.run, result.model


def _closing_words(result: FinetuneResult) -> None:
    from residua.train.classify import READOUTS

    say(str(result))
    if result.readout is not None:
        say(f"read-out: {READOUTS[result.readout]}")
    say(f'load it:  model = residua.load("{result.run}")')
    say('use it:   model.classes[model(model.preprocessing("photo.jpg")[None]).argmax()]')
