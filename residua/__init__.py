"""Residua trains, measures and explains residual networks whose shortcuts fade with depth."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_HOME = {"alphas": "residua.nn", "create_model": "residua.adapt.encoder"}
_HOME |= {name: "residua.adapt" for name in ("fade", "stream", "unfade")}
_HOME["mixing"] = "residua.anatomy.mixing"
_COMMANDS = (
    "compare", "counterfactual", "demo", "diffuse", "embed", "finetune", "pretrain", "sample", "score", "segment", "ujm"
)  # fmt: skip
_HOME |= {name: f"residua.commands.{name}" for name in _COMMANDS}
_HOME["Run"] = "residua.commands.run"
_HOME["load"] = "residua.train.checkpoint"
_PACKAGES = ("adapt", "anatomy", "data", "evaluate", "export", "nn", "recipes", "report", "train")
__all__ = sorted((*_HOME, *_PACKAGES))  # their types: __init__.pyi


def __getattr__(name: str) -> Any:
    """Imported when first used: `import residua` and `residua --help` stay quick."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return import_module(f"residua.{name}")
    raise AttributeError(f"module 'residua' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *__all__]
