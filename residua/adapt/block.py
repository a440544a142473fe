"""Blocks of other libraries as residual steps, and how such a block is made to fade.

A `Kind` rewrites one class of blocks as steps `x <- after(alpha * shortcut(x) + branch(x))` in terms of the block's own
modules. A block fades by changing its class to a subclass whose forward walks those steps with alphas from a buffer
that no state dict holds: modules, parameters, their names and hooks stay as they are, and changing the class back
undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residua.nn.shortcut import scaled_add
from residua.nn.stream import Step, scaled

Map = Callable[[Tensor], Tensor]
ALPHA = "residua_alpha"
"""Buffer (parts,) of a faded block."""
SCALE = "residua_scale"
"""Number that scales the branches of a faded block: 1 but for controls."""
INDEX = "residua_index"
"""Place of a faded block in the order in which the model computes."""


class Part(NamedTuple):
    """One residual step of a block: `after(alpha * shortcut(x) + branch(x))`."""

    name: str
    """Of its branch inside the block, as in `attn`; empty where the block is one step."""
    branch: Map
    shortcut: Map | None = None
    after: Map | None = None
    branch_first: bool = False
    """Does the block add its stream to the branch, not the branch to the stream? The sum has the first one's layout in
    memory, on which the last bits of what follows depend."""


@dataclass(frozen=True)
class Kind:
    """How a class of blocks computes."""

    parts: Callable[..., list[Part]]
    """`parts(block, *args, **kwargs)`: its steps in order, where args and kwargs are what its forward takes beside the
    stream. Called without them it still lists the parts, whose branches then may need what was left out."""
    stream: str = "x"
    """What forward calls the stream, which is its first argument."""
    wrap: Callable[[nn.Module, Tensor], Any] | None = None
    """From the stream to what forward returns, where that is not the stream itself."""
    whole: bool = False
    """Is the block one step of which only `block(x) - x` is known? Its own forward then runs, untouched."""
    divisor: str = ""
    """Attribute of the block by which it divides its sum, `(alpha * shortcut(x) + branch(x)) / divisor`, if any."""
    reason: str | None = None
    """Why such blocks cannot fade, where they are known and cannot."""


def refused(reason: str) -> Kind:
    """A kind that is recognised and cannot fade."""
    return Kind(lambda block, *args, **kwargs: [], reason=reason)


@dataclass(frozen=True)
class Whole:
    """The one part of a block of which only `block(x) - x` is known."""

    named: str | None = None
    """What forward calls the stream where it takes it by name only."""
    divisor: str = ""
    """As in `Kind`."""
    where: Callable[[Any], bool] | None = None
    """Which blocks of the class have the shortcut; None: all."""

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> list[Part]:
        if self.where is not None and not self.where(block):
            return []

        def branch(x: Tensor) -> Tensor:
            given = (args, {self.named: x, **kwargs}) if self.named else ((x, *args), kwargs)
            out = plain_class(block).forward(block, *given[0], **given[1])
            y = out if isinstance(out, Tensor) else out[0]
            return (y * getattr(block, self.divisor) if self.divisor else y) - x

        return [Part("", branch)]


def whole(
    stream: str = "x", named: bool = False, divisor: str = "", where: Callable[[Any], bool] | None = None
) -> Kind:
    """The kind of blocks that map x to x + F(x), or to (x + F(x)) / divisor, whatever F is."""
    return Kind(Whole(stream if named else None, divisor, where), stream=stream, whole=True, divisor=divisor)


def divided_by(block: nn.Module, kind: Kind) -> float:
    """What the block divides its sum by: 1 for nearly all."""
    return float(getattr(block, kind.divisor)) if kind.divisor else 1.0


def plain_class(block: nn.Module) -> type[nn.Module]:
    """The block's class as its library has it."""
    return getattr(type(block), "residua_plain", type(block))


def computed_by(block: nn.Module) -> str:
    """Qualified name of the class whose forward a block runs: a subclass that has a forward of its own is another."""
    owner = next(c for c in plain_class(block).__mro__ if "forward" in vars(c))
    return f"{owner.__module__}.{owner.__qualname__}"


def split(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """What forward was called with -> the stream, and the rest."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop(kind.stream), (), rest


def steps_of(
    block: nn.Module, kind: Kind, name: str = "", args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> list[Step]:
    """The steps of a block, with its alphas where it fades; `name` is where the block lives. One that divides its sum
    by s is the step `alpha / s * x + F(x) / s`: that much of x survives it."""
    parts = kind.parts(block, *args, **(kwargs or {}))
    alpha, s = getattr(block, ALPHA, None), divided_by(block, kind)
    alphas = [torch.ones(())] * len(parts) if alpha is None else alpha.unbind(0)
    alphas = alphas if s == 1.0 else [a / s for a in alphas]
    steps = [
        Step(".".join(filter(None, (name, part.name))), part.branch, a, shortcut=part.shortcut, after=part.after)
        for part, a in zip(parts, alphas, strict=True)
    ]
    return scaled(steps, getattr(block, SCALE, 1.0) / s)


def _add(x: Tensor, y: Tensor, alpha: Tensor, branch_first: bool) -> Tensor:
    """`alpha * x + y` in the layout of the block's own sum."""
    if branch_first or torch.compiler.is_compiling() or x.stride() == y.stride():
        return scaled_add(x, y, alpha)
    return x * alpha + y


def _with_first(out: Any, y: Tensor) -> Any:
    """What a block returns, with another stream: a tuple, or one of its library's outputs, which have names."""
    if isinstance(out, Mapping):
        return type(out)(**{**out, next(iter(out)): y})
    return type(out)((y, *out[1:]))


class Faded(nn.Module):
    """First base of the class that a faded block has."""

    residua_kind: Kind
    residua_plain: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind, scale, alphas = self.residua_kind, getattr(self, SCALE), self._buffers[ALPHA]
        assert alphas is not None
        s = divided_by(self, kind)
        x, rest, named = split(kind, args, kwargs)
        if kind.whole:
            out = super().forward(*args, **kwargs)
            y = out if isinstance(out, Tensor) else out[0]
            # (alpha x + scale (s y - x)) / s, so written that alpha = scale = 1 leaves y as it is, bit for bit
            y = scaled_add(x, y if scale == 1.0 else y * scale, (alphas[0] - scale) / s)
            return y if isinstance(out, Tensor) else _with_first(out, y)
        # what the steps of steps_of do, without building them: eager passes wait for Python
        quick = not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
        for (_, branch, shortcut, after, branch_first), alpha in zip(
            kind.parts(self, *rest, **named), alphas.unbind(0)
        ):
            kept = x if shortcut is None else shortcut(x)
            y = branch(x) if scale == 1.0 else branch(x) * scale
            if quick and (branch_first or kept.stride() == y.stride()):
                x = torch.addcmul(y, kept, alpha)
            else:
                x = _add(kept, y, alpha, branch_first)
            if s != 1.0:
                x = x / s
            if after is not None:
                x = after(x)
        return x if kind.wrap is None else kind.wrap(self, x)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Alphas follow the block to a device, and keep type and values whatever becomes of its weights: half
        precision, or nothing at all on `meta` and by `to_empty`."""
        before = getattr(self, ALPHA)
        super()._apply(fn, recurse)
        after = getattr(self, ALPHA)
        setattr(self, ALPHA, before if after.is_meta else before.to(after.device))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made at run time: copies and pickles make it again, without code compiled for this one."""
        return _rebuild, (self.residua_plain, self.residua_kind), self.__getstate__()


def _rebuild(plain: type[nn.Module], kind: Kind) -> nn.Module:
    cls = _faded_class(plain, kind)  # type: ignore[arg-type]
    return cls.__new__(cls)


@cache
def _faded_class(plain: type[nn.Module], kind: Kind) -> type[nn.Module]:
    made = type(plain.__name__, (Faded, plain), {"residua_kind": kind, "residua_plain": plain})
    made.__module__, made.__qualname__ = plain.__module__, plain.__qualname__
    return made


def check_fades(block: nn.Module, kind: Kind) -> None:
    """ValueError says why a block cannot fade."""
    name = plain_class(block).__name__
    if kind.reason:
        raise ValueError(f"a {name} cannot fade: {kind.reason}")
    if "forward" in vars(block):
        raise ValueError(f"a {name} cannot fade: its forward was replaced on the instance, so its class does not count")


def install(block: nn.Module, kind: Kind, alphas: Tensor, scale: float = 1.0, index: int = 0) -> None:
    """Let a block fade; where it does already, with these alphas from now on."""
    check_fades(block, kind)
    where = next((p.device for p in block.parameters() if not p.is_meta), torch.device("cpu"))
    if isinstance(block, Faded):
        getattr(block, ALPHA).copy_(alphas)
    else:
        block.__class__ = _faded_class(type(block), kind)  # type: ignore[arg-type]
        block.register_buffer(ALPHA, alphas.to(where, torch.float32), persistent=False)
    setattr(block, SCALE, scale)
    setattr(block, INDEX, index)


def uninstall(block: nn.Module) -> None:
    """Back to the class that the block had."""
    if isinstance(block, Faded):
        block.__class__ = block.residua_plain  # type: ignore[assignment]
        for name in (ALPHA, SCALE, INDEX):
            delattr(block, name)
