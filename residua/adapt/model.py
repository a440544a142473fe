"""A model of any library as a residual stream: its blocks found, described, faded and tapped, never rebuilt."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residua.nn.shortcut import Decay
from residua.nn.shortcut import Shortcuts as OwnShortcuts
from residua.nn.stream import Step, Stream, Tap, residual_part
from residua.nn.stream import fade as own_fade
from residua.nn.stream import stream as own_stream
from residua.nn.stream import unfade as own_unfade

from .block import (
    ALPHA,
    INDEX,
    SCALE,
    Faded,
    Kind,
    check_fades,
    computed_by,
    install,
    plain_class,
    split,
    steps_of,
    uninstall,
)
from .diffusers_blocks import KINDS as DIFFUSERS
from .diffusers_blocks import UNET
from .example import NoExample, arguments, eager, evaluating, uncached
from .generic import find_generic, strangers
from .timm_blocks import KINDS as TIMM
from .torchvision_blocks import KINDS as TORCHVISION
from .transformers_blocks import ASIDE
from .transformers_blocks import KINDS as TRANSFORMERS

KINDS: dict[str, Kind] = {**TIMM, **TORCHVISION, **TRANSFORMERS, **DIFFUSERS}
DECAY = "residua_decay"
"""Attribute of a faded foreign model: the `Decay` it was given."""


class Located(NamedTuple):
    """A block and where it lives."""

    name: str
    block: nn.Module
    kind: Kind


_Call = tuple[Located, tuple[Any, ...], dict[str, Any]]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel or torch.compile: these change how it runs alone."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def is_own(model: nn.Module) -> bool:
    """Does the model describe its steps itself, as all of ours do?"""
    model = unwrapped(model)
    part = getattr(model, "encoder", model)
    return all(hasattr(part, name) for name in ("steps", "embed", "shortcut"))


def blocks_of(model: nn.Module, example: Any = None) -> list[Located]:
    """The residual blocks of a foreign model in order: of known kinds, or else found by their structure.

    The second needs to run the model: on `example`, one batch or a tuple of arguments; by default on noise of the size
    that the model says it takes.
    """
    known = _known(model)
    if known:
        refused = [at for at in known if at.kind.reason]
        if refused:
            name, block, kind = refused[0]
            raise ValueError(f"{name}, a {plain_class(block).__name__}, cannot be read as x + F(x): {kind.reason}")
        if _faded_as_one(known):
            known = _in_order(known)
            # blocks found by structure, and only a part of the model was faded: others may be found beside them
            partly = not hasattr(model, DECAY) and any(at.kind.whole for at in known)
            return _with_unknown(model, known, example) if partly else known
        is_whole = _is_whole(model, known)
        if any(_in_unet(at) for at in known):  # its modules are not listed as they are called
            return [Located(*found) for found in find_generic(model, example, known)]
        if is_whole or isinstance(known[0].block, Faded):
            return known
        return _with_unknown(model, known, example)
    return [Located(*found) for found in find_generic(model, example)]


def _faded_as_one(known: Sequence[Located]) -> bool:
    """Did one `fade` reach all of these blocks? Then they are one stream; of two towers, each faded, numbers repeat."""
    return len({getattr(at.block, INDEX, None) for at in known} - {None}) == len(known)


def _in_order(faded: list[Located]) -> list[Located]:
    """Blocks of one `fade` as the model computes them, which need not be as its modules are listed."""
    return sorted(faded, key=lambda at: int(getattr(at.block, INDEX)))


def _with_unknown(model: nn.Module, known: list[Located], example: Any) -> list[Located]:
    """Known blocks, and between them those of unknown kinds, where the model has modules that could be such."""
    others = strangers(model, [at.name for at in known])
    if not others:
        return known
    try:
        return [Located(*found) for found in find_generic(model, example, known)]
    except NoExample as error:
        warnings.warn(f"only known blocks fade; {', '.join(others)} were not looked into: {error}", stacklevel=3)
        return known


def _known(model: nn.Module) -> list[Located]:
    found: list[Located] = []
    seen: set[nn.Module] = set()  # a block that several parents share is one block

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, Faded):
            found.append(Located(name, module, module.residua_kind))
            return
        kind = KINDS.get(computed_by(module))
        if name and computed_by(module) in ASIDE:
            return
        if kind is not None and (kind.reason or kind.parts(module)):  # without parts: this one has no shortcut
            found.append(Located(name, module, kind))
        else:
            look_into(name, module)

    def look_into(name: str, module: nn.Module) -> None:
        for child, inner in module.named_children():
            visit(f"{name}.{child}" if name else child, inner)

    visit("", model)
    if len(found) == 1 and found[0].kind.whole and not isinstance(found[0].block, Faded):
        look_into(*found[0][:2])  # a transformer alone, not as a branch of others: its own stream is the model's
        return found[1:] or found
    return found


def _is_whole(model: nn.Module, known: Sequence[Located]) -> bool:
    """Are these layers of transformers or diffusers, which come as one list, or one in each stage, and are the whole
    stream?

    Two towers, or an encoder with a decoder, are refused: no schedule runs through all of it. The two halves of a U-Net
    are one stream, as those of a U-ViT are: long skips join it, and it goes on.
    """
    lists: dict[str, str] = {}
    for at in known:
        if plain_class(at.block).__module__.startswith(("transformers.", "diffusers.")):
            unet = _in_unet(at)
            name = at.name[: unet.end(1)] if unet else at.name.rpartition(".")[0]
            whose = name.rpartition(".")[0] if unet else re.sub(r"\bstages\.\d+", "stages", name)
            lists.setdefault(whose, name)
    if len(lists) > 1:
        some = ", ".join([*lists.values()][:4]) + (", ..." if len(lists) > 4 else "")
        raise ValueError(
            f"{type(model).__name__} has several residual streams ({some}): take one by itself, "
            f"model.get_submodule({next(iter(lists.values())).rpartition('.')[0]!r})"
        )
    return bool(lists)


def _in_unet(at: Located) -> re.Match[str] | None:
    """Where in its name a block of diffusers lies in a list of a U-Net."""
    theirs = plain_class(at.block).__module__.startswith("diffusers.")
    return re.search(rf"(?:^|\.)({'|'.join(UNET)})\b", at.name) if theirs else None


def stream(model: nn.Module, images: Any = None, *context: Any, **named: Any) -> Stream:
    """The residual steps of a model, ours or foreign; the model is left as it is.

    >>> for step in residua.stream(timm.create_model("vit_small_patch16_224")):
    ...     print(step.name, float(step.alpha))

    With images (B, C, H, W), or whatever else the model takes, by name too, every step also carries its input and is
    bound to what its block was called with: masks, positions, conditioning.
    """
    model = unwrapped(model)
    if is_own(model):
        with _buffers_kept(model):
            return own_stream(model, images, *context)
    if images is None and not named:
        return Stream([step for at in blocks_of(model) for step in steps_of(at.block, at.kind, at.name)])
    given = () if images is None else (images, *context)
    located = blocks_of(model, given or named)
    bound: list[Step] = []
    with _buffers_kept(model):
        for at, args, kwargs in _calls(located, lambda: model(*given, **uncached(model) | named)):
            x, args, kwargs = split(at.kind, args, kwargs)
            for step in steps_of(at.block, at.kind, at.name, args, kwargs):
                bound.append(replace(step, input=x))
                x = step(x)
    return Stream(bound)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """While open, modules in training have copies of their buffers: running statistics move in those."""
    moving = (m for m in model.modules() if m.training and not isinstance(m, OwnShortcuts))
    kept = [(module, dict(module._buffers)) for module in moving]
    for module, buffers in kept:
        copies = {name: x.clone() for name, x in buffers.items() if x is not None and name != ALPHA}
        module._buffers.update(copies)
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)


def _calls(located: Sequence[Located], run: Callable[[], Any]) -> list[_Call]:
    """What `run` calls each block with, in the order of the calls."""
    calls: list[_Call] = []
    handles = [
        at.block.register_forward_pre_hook(lambda _, a, k, at=at: calls.append((at, a, k)), with_kwargs=True)
        for at in located
    ]
    try:
        with eager():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def as_called(model: nn.Module, located: Sequence[Located], run: Callable[[], Any]) -> list[Located]:
    """The blocks that `run` calls, in the order of their first calls, which need not be that of the modules."""
    with evaluating(model), torch.no_grad():
        calls = _calls(located, run)
    return list({at.name: at for at, *_ in calls}.values())


@contextmanager
def tapped(model: nn.Module, tap: Tap, located: Sequence[Located] | None = None) -> Iterator[list[str]]:
    """While open, every forward pass calls `tap(name, stream)` after each block; yields the blocks' names in order."""
    located = blocks_of(unwrapped(model)) if located is None else located

    def hook(name: str) -> Any:
        return lambda _, __, out: tap(name, out if isinstance(out, Tensor) else out[0])

    handles = [at.block.register_forward_hook(hook(at.name)) for at in located]
    try:
        with eager():
            yield [at.name for at in located]
    finally:
        for handle in handles:
            handle.remove()


def fade(model: nn.Module, alpha_min: float = 1.0, *, example: Any = None, **decay: Any) -> nn.Module:
    """Let a model's shortcuts fade, in place; `unfade` undoes it. Keywords: those of `residua.nn.Decay`.

    Ours, and models of timm, torchvision, transformers and diffusers fade at every sublayer; of other models the blocks
    that map x to x + F(x) are found by structure and fade as wholes. Parameters and their names do not change: a faded
    model loads the plain one's weights and the other way round. `example` is what to call such a model with, where it
    does not say which size of images it takes: a batch, a tuple of arguments or a dict of named ones. Given, it also
    tells in which order blocks are called; without, those of known kinds fade in the order of the modules.

    >>> residua.fade(timm.create_model("vit_small_patch16_224"), alpha_min=0.6)
    """
    inner = unwrapped(model)
    if is_own(inner):
        own_fade(inner, alpha_min, **decay)
        return model
    spec = Decay(alpha_min=alpha_min, **decay)
    if spec.schedule == "learned":
        raise ValueError("a learned alpha is a parameter, and fading adds none to a foreign model: choose a schedule")
    located = blocks_of(inner, example)
    for at in located:
        check_fades(at.block, at.kind)
    if example is not None and not any(p.is_meta for p in inner.parameters()):
        args, kwargs = arguments(inner, example)
        called = as_called(inner, located, lambda: inner(*args, **kwargs))
        located = called + [at for at in located if at not in called]
    counts = [len(at.kind.parts(at.block)) for at in located]
    for index, (at, alphas) in enumerate(zip(located, spread(spec, counts).split(counts))):
        install(at.block, at.kind, alphas, spec.branch_scale, index)
    setattr(inner, DECAY, spec)
    return model


def fade_like(model: nn.Module, other: nn.Module) -> None:
    """Let a model fade as a faded one of the same structure does, alpha by alpha."""
    for name, block, kind in blocks_of(other):
        if isinstance(block, Faded):
            alphas, *rest = (getattr(block, attribute) for attribute in (ALPHA, SCALE, INDEX))
            install(model.get_submodule(name), kind, alphas.clone(), *rest)
    setattr(model, DECAY, getattr(other, DECAY))


def unfade(model: nn.Module) -> nn.Module:
    """Back to ordinary shortcuts, `alpha = 1` at every step; a foreign model is as it was."""
    inner = unwrapped(model)
    if is_own(inner):
        own_unfade(inner)
        return model
    for module in list(inner.modules()):
        uninstall(module)
        vars(module).pop(DECAY, None)  # a part may have been faded by itself
    return model


def spread(decay: Decay, counts: Sequence[int], strength: float = 1.0) -> Tensor:
    """The alpha of every step of blocks that have `counts` steps each."""
    if len(set(counts)) == 1:
        return decay.alphas(len(counts), counts[0], strength)
    if decay.branches != "both":
        raise ValueError(f"branches={decay.branches!r} needs blocks of attention and MLP; here they differ")
    if decay.per == "block":
        per_block = decay.alphas(len(counts), 1, strength)
        return per_block.repeat_interleave(torch.tensor(counts))
    return decay.alphas(sum(counts), 1, strength)


class Shortcuts:
    """The alphas of a faded foreign model, as `residua.nn.shortcut.Shortcuts` offers those of ours."""

    def __init__(self, model: nn.Module) -> None:
        faded = [at for at in _known(model) if isinstance(at.block, Faded)]
        self.blocks = [at.block for at in (_in_order(faded) if _faded_as_one(faded) else faded)]
        self.decay: Decay = getattr(model, DECAY)

    @property
    def alpha(self) -> Tensor:
        return torch.cat([getattr(block, ALPHA) for block in self.blocks])

    @torch.no_grad()
    def set_strength(self, strength: float) -> None:
        """Annealing: 0 is an ordinary residual network, 1 the full decay."""
        if not 0.0 <= strength <= 1.0:
            raise ValueError(f"strength is {strength}; it must lie in [0, 1]")
        counts = [len(getattr(block, ALPHA)) for block in self.blocks]
        for block, alphas in zip(self.blocks, spread(self.decay, counts, strength).split(counts)):
            getattr(block, ALPHA).copy_(alphas)


def shortcuts(model: nn.Module) -> Any:
    """The alphas of a model, ours or faded: `.alpha`, `.decay`, `.set_strength(s)`; None where nothing fades."""
    model = unwrapped(model)
    if is_own(model):
        return residual_part(model).shortcut
    return Shortcuts(model) if hasattr(model, DECAY) else None
