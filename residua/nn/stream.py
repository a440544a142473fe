"""A residual network as what it is: a sequence of steps `x <- alpha * x + f(x)`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from residua.nn.shortcut import Decay, Shortcuts, scaled_add

Tap = Callable[[str, Tensor], None]
"""Called with a name and the stream, before the first step and after each:
`taps = {}; model.forward_features(x, tap=taps.__setitem__)`."""


@dataclass(frozen=True, eq=False)
class Skip:
    """A long skip: before a step, `x <- join(x, y)` with y the stream after an earlier step."""

    source: str
    """Name of that earlier step."""
    join: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """One residual step: `alpha * x + branch(x)`, in full `after(alpha * shortcut(x) + branch(x))`."""

    name: str
    """Where its branch lives, as in `blocks.3.attn`."""
    branch: Callable[[Tensor], Tensor]
    alpha: Tensor
    input: Tensor | None = None
    """What the step is applied to, where the stream was bound to images; its long skip is joined already."""
    shortcut: Callable[[Tensor], Tensor] | None = None
    """What brings the stream to the branch's shape, where the step changes it; None: the identity."""
    after: Callable[[Tensor], Tensor] | None = None
    """What follows the addition: the activation of post-activation blocks; None: nothing."""
    skip: Skip | None = None
    """What joins the stream before the step. Not part of calling the step: `joined` does it, as `walk` calls it."""

    def __call__(self, x: Tensor) -> Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        out = scaled_add(kept, self.branch(x), self.alpha)
        return out if self.after is None else self.after(out)

    def joined(self, x: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The stream as this step takes it; `kept` holds the stream after earlier steps, by name."""
        return x if self.skip is None else self.skip.join(x, kept[self.skip.source])

    def scaled(self, scale: float | Tensor) -> "Step":
        """The step with its branch scaled: by a number, or image by image (B,), as drop path needs it."""
        return replace(self, branch=partial(_scaled, self.branch, scale))


def scaled(steps: list[Step], scale: float) -> list[Step]:
    """Steps with every branch scaled, as controls need it."""
    return steps if scale == 1.0 else [step.scaled(scale) for step in steps]


def _scaled(branch: Callable[[Tensor], Tensor], scale: float | Tensor, x: Tensor) -> Tensor:
    y = branch(x)
    if isinstance(scale, Tensor):
        scale = scale.to(y.dtype).reshape(-1, *(1,) * (y.ndim - 1))
    return y * scale


def walk(steps: Sequence[Step], x: Tensor, tap: Tap | None, keep: Tensor | None, recompute: bool = False) -> Tensor:
    """Carry a stream through steps. `keep` (B, steps) scales every branch of every image: 0 drops it.

    `tap` first sees the stream as it comes, under the name `embed`. `recompute` keeps nothing inside a step for the
    backward pass.
    """
    if tap is not None:
        tap("embed", x)
    sources = {step.skip.source for step in steps if step.skip is not None}
    kept: dict[str, Tensor] = {}
    for k, step in enumerate(steps):
        x = step.joined(x, kept)
        step = step if keep is None else step.scaled(keep[:, k])
        x = checkpoint(step, x, use_reentrant=False) if recompute and torch.is_grad_enabled() else step(x)
        if step.name in sources:
            kept[step.name] = x
        if tap is not None:
            tap(step.name, x)
    return x


class Residual(Protocol):
    """What a network offers to be walked, tapped and faded.

    `context` is what it takes beside images, a diffusion model's time and label; without it `steps` still lists
    names and alphas.
    """

    shortcut: Shortcuts

    def embed(self, images: Tensor, *context: Any) -> Tensor: ...

    def steps(self, *context: Any) -> list[Step]: ...


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


def stream(model: nn.Module, images: Tensor | None = None, *context: Any) -> Stream:
    """The residual steps of a model (an autoencoder's are its encoder's).

    >>> for step in residua.stream(model):
    ...     print(step.name, float(step.alpha))

    With images (B, C, H, W) every step also carries its input for them. A diffusion model is bound with all that
    it is called with: `stream(model, x_t, t, y)`.
    """
    part = residual_part(model)
    if images is None:
        return Stream(part.steps())
    bound: list[Step] = []
    kept: dict[str, Tensor] = {}
    x = part.embed(images, *context)
    for step in part.steps(*context):
        x = step.joined(x, kept)
        bound.append(replace(step, input=x))
        x = kept[step.name] = step(x)
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
