"""A residual network as what it is: a sequence of steps `x <- alpha * x + f(x)`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from residua.nn.shortcut import Decay, Shortcuts, scaled_add

Tap = Callable[[str, Tensor], None]
"""Called with a name and the stream after each step: `taps = {}; model.forward_features(x, tap=taps.__setitem__)`."""


@dataclass(frozen=True, eq=False)
class Step:
    """One residual step. Calling it gives `alpha * x + branch(x)`."""

    name: str
    """Where its branch lives, as in `blocks.3.attn`."""
    branch: Callable[[Tensor], Tensor]
    alpha: Tensor
    input: Tensor | None = None
    """The stream before the step, where the stream was bound to images."""

    def __call__(self, x: Tensor) -> Tensor:
        return scaled_add(x, self.branch(x), self.alpha)


class Residual(Protocol):
    """What a network offers to be walked, tapped and faded."""

    shortcut: Shortcuts

    def embed(self, images: Tensor) -> Tensor: ...

    def steps(self) -> list[Step]: ...


class Stream(Sequence[Step]):
    """The steps of a network in order; bound to images, each step also knows its input."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)

    @overload
    def __getitem__(self, item: int) -> Step: ...
    @overload
    def __getitem__(self, item: slice) -> "Stream": ...
    def __getitem__(self, item: int | slice) -> "Step | Stream":
        return Stream(self._steps[item]) if isinstance(item, slice) else self._steps[item]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @property
    def alphas(self) -> Tensor:
        return torch.stack([step.alpha for step in self])

    @property
    def alpha_eff(self) -> float:
        """What survives of the input at the end: the product of all alphas."""
        return float(self.alphas.detach().double().prod())

    def __repr__(self) -> str:
        return f"Stream({len(self)} steps, alpha_eff={self.alpha_eff:.2g})"


def residual_part(model: nn.Module) -> Residual:
    """The network that carries the residual stream: the model itself or its encoder."""
    part = getattr(model, "encoder", model)
    # not isinstance: since Python 3.12 it does not see what a torch module keeps as its child or buffer
    if not all(hasattr(part, name) for name in ("steps", "embed", "shortcut")):
        raise TypeError(f"{type(model).__name__} does not describe its residual steps (needs steps, embed, shortcut)")
    return part  # type: ignore[return-value]


def stream(model: nn.Module, images: Tensor | None = None) -> Stream:
    """The residual steps of a model (an autoencoder's are its encoder's).

    >>> for step in residua.stream(model):
    ...     print(step.name, float(step.alpha))

    With images (B, C, H, W) every step also carries its input for them.
    """
    part = residual_part(model)
    steps = part.steps()
    if images is None:
        return Stream(steps)
    bound: list[Step] = []
    x = part.embed(images)
    for step in steps:
        bound.append(replace(step, input=x))
        x = step(x)
    return Stream(bound)


def fade(model: nn.Module, alpha_min: float = 1.0, **decay: Any) -> nn.Module:
    """Let the model's shortcuts fade, in place; `unfade` undoes it. Keywords: those of `Decay`.

    >>> residua.fade(model, alpha_min=0.6, schedule="cosine")
    """
    residual_part(model).shortcut.set_decay(Decay(alpha_min=alpha_min, **decay))
    return model


def unfade(model: nn.Module) -> nn.Module:
    """Back to ordinary shortcuts, `alpha = 1` at every step."""
    residual_part(model).shortcut.unset()
    return model
