"""One loop for everything trained here; configurations, checkpoints, runs on disk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residua.train.checkpoint import checkpoints, load
    from residua.train.config import Pretrain
    from residua.train.diffuse_config import Diffuse
    from residua.train.finetune_config import Finetune
    from residua.train.loop import Hooks, Loop
    from residua.train.metrics import read_metrics
    from residua.train.pretrain import prepare
    from residua.train.processes import TrainingStopped
    from residua.train.session import Session, estimate, fit

_HOME = {
    "checkpoints": "checkpoint", "load": "checkpoint", "Pretrain": "config", "Diffuse": "diffuse_config",
    "Finetune": "finetune_config", "Hooks": "loop", "Loop": "loop", "TrainingStopped": "processes",
    "read_metrics": "metrics", "Session": "session", "estimate": "session", "fit": "session", "prepare": "pretrain",
}  # fmt: skip
__all__ = [
    "Diffuse", "Finetune", "Hooks", "Loop", "Pretrain", "Session", "TrainingStopped", "checkpoints", "estimate", "fit",
    "load", "prepare", "read_metrics",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when used: reading a checkpoint needs no accelerate."""
    if name not in _HOME:
        raise AttributeError(f"module 'residua.train' has no attribute {name!r}")
    return getattr(import_module(f"residua.train.{_HOME[name]}"), name)
