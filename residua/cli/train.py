"""`residua pretrain`, `finetune` and `diffuse`: what starts a run, read with its options."""

from __future__ import annotations

from residua.commands.console import typed
from residua.recipes.arguments import finetune_settings, settings


def pretrain(args: list[str]) -> None:
    """Pretrain an encoder: `residua pretrain [RECIPE or SETTINGS.yaml] [options]`."""
    from residua.commands.pretrain import train
    from residua.train import Pretrain

    given = typed(args)  # before a settings file is taken from them
    summary = "Pretrain a masked autoencoder whose identity shortcuts fade with depth."
    train(settings(Pretrain, args, "pretrain", summary), given)


def diffuse(args: list[str]) -> None:
    """Train a diffusion model: `residua diffuse [RECIPE or SETTINGS.yaml] [options]`."""
    from residua.commands.diffuse import train
    from residua.train import Diffuse

    given = typed(args)
    summary = "Train a diffusion model whose identity shortcuts fade with depth."
    train(settings(Diffuse, args, "diffuse", summary), given)


def finetune(args: list[str]) -> None:
    """Train a classifier end to end: `residua finetune RUN|CHECKPOINT|timm:NAME|NETWORK|SETTINGS.yaml [options]`."""
    from residua.commands.finetune import train

    given = typed(args)
    train(finetune_settings(args), given)
