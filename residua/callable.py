"""Packages that are commands, too: `residua.evaluate("runs/a")` beside `residua.evaluate.knn(a, b)`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


def command(name: str) -> Any:
    """The function that does what a command does."""
    return getattr(import_module(f"residua.commands.{name}"), name)


class Command(ModuleType):
    """The class of such a package, `sys.modules[__name__].__class__ = Command` in its `__init__.py`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return command(self.__name__.rpartition(".")[2])(*args, **options)
