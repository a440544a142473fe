"""Residua trains, measures and explains residual networks whose shortcuts fade with depth."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residua import adapt, anatomy, data, evaluate, export, nn, recipes, report, train
    from residua.adapt import fade, stream, unfade
    from residua.adapt.encoder import create_model
    from residua.anatomy.mixing import mixing
    from residua.commands.diffuse import diffuse
    from residua.commands.finetune import finetune
    from residua.commands.pretrain import pretrain
    from residua.commands.run import Run
    from residua.nn import alphas
    from residua.train.checkpoint import load
    from residua.train.sample import sample

__version__ = "0.1.0"
__all__ = [
    "Run", "adapt", "alphas", "anatomy", "create_model", "data", "diffuse", "evaluate", "export", "fade", "finetune",
    "load", "mixing", "nn", "pretrain", "recipes", "report", "sample", "stream", "train", "unfade",
]  # fmt: skip
_HOME = {"alphas": "residua.nn", "create_model": "residua.adapt.encoder"}
_HOME |= {name: "residua.adapt" for name in ("fade", "stream", "unfade")}
_HOME["mixing"] = "residua.anatomy.mixing"
_HOME |= {name: f"residua.commands.{name}" for name in ("pretrain", "diffuse", "finetune")}
_HOME["Run"] = "residua.commands.run"
_HOME["load"] = "residua.train.checkpoint"
_HOME["sample"] = "residua.train.sample"


def __getattr__(name: str) -> Any:
    """Imported when first used: `import residua` and `residua --help` stay quick."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"residua.{name}")
    raise AttributeError(f"module 'residua' has no attribute {name!r}")
