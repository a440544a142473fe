"""The laws measured on a network: its residual stream bound to images, block by block."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from residua.adapt import is_own, stream, unwrapped
from residua.nn import Classifier, ResNet, SiT, UniformNet, UViT
from residua.nn.stream import Step

from .alignment import Alignment, Block, Gauge, measure
from .jacobian import Method, residual_branch

Precision = Literal["float64", "float32"]


@dataclass(frozen=True)
class Bound:
    """Blocks of one shape at a batch, ready to be compared, and the others."""

    blocks: list[Block]
    end: Tensor
    others: list[Block]
    """Blocks whose input or output has another shape: their Jacobians exist, but cannot be laid over those."""

    @property
    def left_out(self) -> list[str]:
        return [block.name for block in self.others]


def alignment(
    model: nn.Module,
    images: Tensor,
    *context: Any,
    k: int = 30,
    classes: int | None = None,
    gauge: Gauge = "J",
    token: int | None = None,
    precision: Precision = "float64",
    method: Method = "auto",
    budget: float = 2.0,
    progress: Callable[[int, int], None] | None = None,
) -> Alignment:
    """RA1 to RA4 of a residual network at some images, in evaluation mode; the model is left as it is.

    `classes` is the number of classes it was trained on, for RA3; classifiers of ours know it. `token` measures the
    Jacobian of one token by itself (the others fixed) instead of all tokens together. Post-activation blocks
    `relu(x + F(x))` count with the masked branch `F(x) * 1[x + F(x) > 0]`. Masked autoencoders see whole images.
    `context` is what a diffusion model, or another's, takes beside images; for other networks of ours it may be labels
    (B,), which tell the number of classes where the network does not.

    >>> laws = alignment(residua.load("runs/a"), images, labels, k=30)
    >>> laws.scalars()["RA2 coupling"], laws.verdicts()
    """
    model = unwrapped(model)
    if len(context) == 1 and is_own(model) and not isinstance(model, UViT | SiT):
        labels: Tensor = torch.as_tensor(context[0])
        context = ()
        if classes is None and trained_classes(model) is None:
            classes = int(labels.max()) + 1
    classes = trained_classes(model) if classes is None else classes
    twin, dtype = twin_of(model, precision), getattr(torch, precision)
    given = [value.to(dtype) if _real(value) else value for value in (images, *context)]  # not a text's numbers
    bound = bind(twin, *given, token=token)
    size = bound.blocks[0].x[0].numel()
    options: dict[str, Any] = {"classes": classes, "gauge": gauge, "method": method, "budget": budget}
    return measure(bound.blocks, bound.end, min(k, size), progress=progress, **options)


def twin_of(model: nn.Module, precision: Precision, device: torch.device | None = None) -> nn.Module:
    """A copy in evaluation mode and in the precision asked for; one of a masked autoencoder hides no patches."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(get_args(Precision))}")
    twin = copy.deepcopy(model).to(device=device, dtype=getattr(torch, precision)).eval().requires_grad_(False)
    config: Any = getattr(twin, "config", None)
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    return twin


def trained_classes(model: nn.Module) -> int | None:
    """How many classes a classifier of ours tells apart; None for other networks."""
    return model.num_classes if isinstance(model, Classifier | ResNet | UniformNet) else None


def bind(model: nn.Module, images: Tensor, *context: Any, token: int | None = None) -> Bound:
    """The residual steps of a model at images, as blocks. Of several shapes the one with most steps is taken."""
    if len(images) == 0:
        raise ValueError("no images were given")
    with torch.no_grad():
        steps = _steps(model, images, *context)
        ends = [step(_input(step)) for step in steps]
    if not steps:
        raise ValueError(f"{type(model).__name__}: no residual steps found; looked for `steps()` of it or its encoder")
    shapes = [(_input(step).shape, end.shape) for step, end in zip(steps, ends)]
    same = Counter(a for a, b in shapes if a == b)
    if not same:
        raise ValueError("every residual step changes the shape of the stream: there is nothing to align")
    common = same.most_common(1)[0][0]
    chosen = [i for i, pair in enumerate(shapes) if pair == (common, common)]
    blocks = [block_of(steps[i], token) for i in chosen]
    end = ends[chosen[-1]]
    others = [block_of(step, token) for i, step in enumerate(steps) if i not in chosen]
    return Bound(blocks, end if token is None else end[:, token], others)


def _steps(model: nn.Module, images: Tensor, *context: Any) -> list[Step]:
    try:
        return list(stream(model, images, *context, **_named(model, images)))
    except (TypeError, RuntimeError) as error:
        if is_own(model) or not context:
            raise
        raise ValueError(
            f"{type(model).__name__} cannot be called with what was given beside images ({error}): a number of "
            "classes is given as classes="
        ) from error


def _named(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """What models of transformers are told with images: that these are of another size, and to keep their patches in
    order, which a masked autoencoder shuffles even where it hides none."""
    config: Any = getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    side = getattr(config, "image_size", None)
    if side is not None and "interpolate_pos_encoding" in takes:
        native = tuple(side) if isinstance(side, list | tuple) else (side, side)
        found["interpolate_pos_encoding"] = tuple(images.shape[2:]) != native
    if hasattr(config, "mask_ratio") and "noise" in takes:
        patches = math.prod(n // config.patch_size for n in images.shape[2:])
        found["noise"] = torch.arange(patches, device=images.device, dtype=images.dtype).expand(len(images), -1)
    return found


def block_of(step: Step, token: int | None = None) -> Block:
    """A step that knows its input, as a block; of one token alone where that is asked for."""
    x, branch, alpha = _input(step), residual_branch(step), float(step.alpha.detach())
    if token is not None:
        if x.ndim != 3:
            raise ValueError(f"token {token} was asked for, but {step.name} has a stream of shape {tuple(x.shape[1:])}")
        if not 0 <= token < x.shape[1]:
            raise ValueError(f"token {token} was asked for; there are {x.shape[1]}, 0 to {x.shape[1] - 1}")
        return Block(step.name, _one_token(branch, x, token), x[:, token], alpha)
    return Block(step.name, branch, x, alpha)


def _one_token(branch: Callable[[Tensor], Tensor], x: Tensor, token: int) -> Callable[[Tensor], Tensor]:
    def own(z: Tensor) -> Tensor:
        whole = torch.cat([x[:, :token], z[:, None], x[:, token + 1 :]], 1)
        return branch(whole)[:, token]

    return own


def _input(step: Step) -> Tensor:
    assert step.input is not None
    return step.input


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
