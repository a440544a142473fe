"""`residua diffuse`."""

from __future__ import annotations

from residua.commands.console import typed
from residua.recipes.arguments import settings


def diffuse(args: list[str]) -> None:
    """Train a diffusion model: `residua diffuse [RECIPE or SETTINGS.yaml] [options]`."""
    from residua.commands.diffuse import train
    from residua.train import Diffuse

    given = typed(args)  # before a settings file is taken from them
    train(
        settings(Diffuse, args, "diffuse", "Train a diffusion model whose identity shortcuts fade with depth."), given
    )
