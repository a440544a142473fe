"""`residua pretrain`."""

from __future__ import annotations

from residua.commands.console import typed
from residua.recipes.arguments import settings


def pretrain(args: list[str]) -> None:
    """Pretrain an encoder: `residua pretrain [RECIPE or SETTINGS.yaml] [options]`."""
    from residua.commands.pretrain import train
    from residua.train import Pretrain

    given = typed(args)  # before a settings file is taken from them
    summary = "Pretrain a masked autoencoder whose identity shortcuts fade with depth."
    train(settings(Pretrain, args, "pretrain", summary), given)
