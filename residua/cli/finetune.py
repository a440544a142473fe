"""`residua finetune`."""

from __future__ import annotations

from residua.commands.console import typed
from residua.recipes.arguments import finetune_settings


def finetune(args: list[str]) -> None:
    """Train a classifier end to end: `residua finetune RUN|CHECKPOINT|timm:NAME|NETWORK|SETTINGS.yaml [options]`."""
    from residua.commands.finetune import train

    given = typed(args)  # before a settings file is taken from them
    train(finetune_settings(args), given)
