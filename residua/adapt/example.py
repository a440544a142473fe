"""A model run once on an example: what every module was called with, and where activations are added."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .block import plain_class

SMALL = 96
"""Pixels at which a model of images is tried first: a check costs little then."""


class NoExample(ValueError):
    """The model does not say what it takes."""


@dataclass
class Call:
    """The first call of a module in a run."""

    order: int
    x: Tensor
    """The stream's shape, type and device; one number, expanded."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keeps: bool
    """Did the output have the input's shape, in every call?"""
    named: str | None = None
    """What forward calls the stream, where it was given by name."""
    streams: int = 1
    """How many tensors the module maps to as many of the same shapes."""

    def repeat(self, module: nn.Module, x: Tensor) -> Any:
        """The same call of this module or its copy, with another stream."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return module(*args, **{self.named: x, **kwargs}) if self.named else module(x, *args, **kwargs)

    def noise(self, seed: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(self.x.shape, generator=rng).to(self.x.device, self.x.dtype)


class Sums(TorchDispatchMode):
    """Notes, while open, in which module two activations of one shape are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = [""]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            a, b = args[:2]
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.ndim > 2:
                self.found.append(self.stack[-1])
        return func(*args, **(kwargs or {}))


def record(model: nn.Module, example: Any = None) -> tuple[dict[str, Call], list[str]]:
    """Run a model in evaluation; the first call of each module, in order, and the modules that add activations."""
    calls: dict[str, Call] = {}
    sums = Sums()
    started: dict[str, int] = {}

    def forget() -> None:
        calls.clear()
        started.clear()
        sums.found.clear()
        sums.stack[:] = [""]

    def before(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            started.setdefault(name, len(started))
            sums.stack.append(name)

        return hook

    def after(name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            sums.stack.pop()
            x: Any = args[0] if args else kwargs.get(stream_name(module))
            first = out[0] if type(out) in (tuple, list) and out else out
            keeps = isinstance(x, Tensor) and isinstance(first, Tensor) and x.is_floating_point()
            keeps = keeps and x.shape == first.shape and x.dtype == first.dtype
            if name in calls:
                calls[name].keeps &= keeps
                return
            rest, named = dict(kwargs), None if args else stream_name(module)
            if named:
                rest.pop(named, None)
            like = x.new_empty(()).expand(x.shape) if isinstance(x, Tensor) else torch.empty(0)
            calls[name] = Call(started[name], like, args[1:], rest, keeps, named)
            calls[name].streams = count_streams((*args, *kwargs.values()), out)

        return hook

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(before(name)))
            handles.append(module.register_forward_hook(after(name, module), with_kwargs=True))
    try:
        with evaluating(model), torch.no_grad(), eager(), sums:
            run_on_example(model, example, forget)
    finally:
        for handle in handles:
            handle.remove()
    return calls, sums.found


def stream_name(block: nn.Module) -> str:
    """What a block's forward calls its first argument; empty where it takes none."""
    return next((p for p in inspect.signature(plain_class(block).forward).parameters if p != "self"), "")


def count_streams(args: tuple[Any, ...], out: Any) -> int:
    """How many tensors of a module's output have the shapes of as many of its inputs, in whichever order; what gives
    out more than it takes, such as a norm with scales and shifts for what follows, carries one."""
    taken = [t for a in args for t in (a if isinstance(a, tuple | list) else (a,)) if isinstance(t, Tensor)]
    taken = [t for t in taken if t.is_floating_point()]
    given = [t for t in out if isinstance(t, Tensor)] if isinstance(out, tuple | list) else []
    if len(given) > len(taken):
        return 1
    same: list[bool] = []
    for b in given:
        alike = [i for i, a in enumerate(taken) if a.shape == b.shape]
        if alike:
            found = next((i for i in alike if taken[i] is b), alike[0])
            same.append(taken.pop(found) is b)
    return len(same) if same.count(False) > 1 else 1  # what is only handed on, such as a bias, is no stream


@contextmanager
def eager() -> Iterator[None]:
    """While open, what was compiled runs as it was written: compiled code does not see hooks that came later."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation, and back to what each module was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def run_on_example(model: nn.Module, example: Any, reset: Callable[[], None]) -> None:
    """Call the model with the example, or with noise: of few pixels, or of as many as the model wants."""
    if example is not None:
        args, kwargs = arguments(model, example)
        model(*args, **uncached(model) | kwargs)
        return
    sizes = default_sizes(model)
    if not sizes:
        raise NoExample(
            f"{type(model).__name__} does not say which input it takes: pass example=, a batch, a tuple of "
            "arguments or a dict of named ones; to stream, the images"
        )
    like = next(model.parameters())
    failed: Exception | None = None
    for size in sizes:
        reset()
        try:
            rng = torch.Generator().manual_seed(0)
            model(torch.randn(2, *size, generator=rng).to(like.device, like.dtype))
            return
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            failed = error
    raise NoExample(f"{type(model).__name__} does not run on images {sizes[-1]}: pass example= ({failed})") from failed


def arguments(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call a model with: a batch, a tuple of arguments, or a dict of those that its forward has by name."""
    if isinstance(example, Mapping) and set(example) <= set(inspect.signature(model.forward).parameters):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def uncached(model: nn.Module) -> dict[str, Any]:
    """What a language model is called with to keep no keys and values: a step would add its own to those of the run."""
    caches = getattr(getattr(model, "config", None), "use_cache", False)
    takes = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return {"use_cache": False} if caches and ("use_cache" in takes or open_ended) else {}


def default_sizes(model: nn.Module) -> list[tuple[int, int, int]]:
    """(C, H, W) to try in turn, by what the model says of itself."""
    config = getattr(model, "config", None)
    timm = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = timm.get("input_size") if isinstance(timm, dict) else getattr(timm, "input_size", None)
    pixels = getattr(config, "image_size", None)
    if size is None and pixels:
        size = (getattr(config, "num_channels", 3), *(pixels if isinstance(pixels, tuple | list) else (pixels, pixels)))
    if size is None and type(model).__module__.startswith("torchvision.models"):
        size = (3, 224, 224)
    if size is None:
        return []
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    channels = size[0]
    sizes = [(channels, *built)] if isinstance(built, tuple) else [(channels, SMALL, SMALL)]
    return [*sizes, tuple(size)]
