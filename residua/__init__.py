"""Residua trains, measures and explains residual networks whose shortcuts fade with depth."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from residua.nn import alphas, create_model, fade, stream, unfade

if TYPE_CHECKING:
    from residua import data, evaluate, nn, recipes, report, train
    from residua.train.checkpoint import load

__version__ = "0.1.0"
__all__ = [
    "alphas", "create_model", "data", "evaluate", "fade", "load", "nn", "recipes", "report",
    "stream", "train", "unfade",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Packages are imported when first used: `import residua` stays quick."""
    if name == "load":
        return import_module("residua.train.checkpoint").load
    if name in __all__:
        return import_module(f"residua.{name}")
    raise AttributeError(f"module 'residua' has no attribute {name!r}")
