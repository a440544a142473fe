"""Blocks of unknown models, found by structure and checked: those that map x to x + F(x).

The model runs once on an example. A module that gave back as much as it took is a candidate; one that, on a copy whose
parameters are all zero, returns its input is residual: what is left of the block without parameters is the shortcut. A
module whose residual blocks explain it (with those zero and the rest random it adds nothing that depends on its input)
is a row of blocks, and its blocks are taken; else it is one block, whatever lies inside. A candidate that keeps its
input in any other way, past all matrices (through an activation, a norm, a learned scale), has a shortcut that cannot
be scaled from outside: the model is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .block import Kind, whole
from .example import record, stream_name

Found = tuple[str, nn.Module, Kind]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
MATRICES = (nn.Linear, nn.modules.conv._ConvNd)
HARMLESS = ("PatchMerging", "PatchEmbed", "Downsample")
"""How classes are called that come between stages and have no shortcut: not worth a run of the model to see."""
ASIDE = ("ClassAttentionBlock", "LayerScaleBlockClassAttn", "ClassBlock")
"""Class attention (CaiT, XCiT, VOLO): it reads the stream into a class token, does not carry it on, stays as it is."""


def find_generic(model: nn.Module, example: Any = None, known: Sequence[Found] = ()) -> list[Found]:
    """Name, block and kind of every block that is residual as a whole, in the order of their calls, `known` ones among
    them; ValueError says why there are none, or which block is in the way."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on meta, and blocks of unknown kinds are found by running it: give it weights"
        )
    if not list(model.children()):
        raise ValueError(
            f"{type(model).__name__}: no residual blocks found; looked for modules inside it that map x to x + F(x)"
        )
    return Finder(model, example, known).find()


def strangers(model: nn.Module, known: Sequence[str]) -> list[str]:
    """Classes of which the model has several modules, with modules and parameters in them, outside its known blocks."""
    hidden = tuple(f"{name}." for name in known)
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        around = not name or any(at == name or at.startswith(f"{name}.") for at in known)
        if around or name.startswith(hidden) or type(module).__module__.startswith("torch.nn") or is_norm(module):
            continue
        if list(module.children()) and any(True for _ in module.parameters()):
            counts[type(module).__name__] += 1
    return [name for name, count in counts.items() if count > 1 and not name.startswith(HARMLESS + ASIDE)]


class Finder:
    """One search; every check is made on one copy of the model."""

    def __init__(self, model: nn.Module, example: Any, known: Sequence[Found]) -> None:
        self.model, self.known = model, {at[0]: at for at in known}
        self.calls, self.sums = record(model, example)
        self.modules = dict(model.named_modules())
        hidden = tuple(f"{name}." for name in self.known)
        self.candidates = [
            name
            for name, call in self.calls.items()
            if name not in self.known and not name.startswith(hidden or "\0") and call.keeps and self.may_be_block(name)
        ]
        self.copied = dict(copy.deepcopy(model).requires_grad_(False).named_modules())

    def may_be_block(self, name: str) -> bool:
        module = self.modules[name]
        if any(at.startswith(f"{name}.") for at in self.known):
            return False
        bare = type(module).__module__.startswith("torch.nn") and not list(module.children())
        if bare or is_norm(module) or type(module).__name__ in ASIDE:
            return False
        return name != "" and any(True for _ in module.parameters())

    def find(self) -> list[Found]:
        fill(self.copied[""], 0.0)
        same = {name for name in self.candidates if self.is_identity(name)}
        residual = {name for name in same if self.is_identity(name, train=True)}
        randomise(self.copied[""])
        self.tables = {name for name in same if not self.has_branch(name)}
        residual -= self.tables
        self.careless = {name for name in residual if self.changes_input(name)}
        self.counts = Counter(type(self.modules[name]) for name in residual)
        names = self.outermost("", residual)
        inside = self.inside(names)
        names = [name for name in names if name not in inside]
        self.refuse(names, residual)
        if len(names) < 2:
            raise ValueError(
                f"{type(self.model).__name__}: no residual blocks found: of {len(self.calls)} modules fewer than two "
                f"map x to x + F(x); where a forward adds x to what a module gives, make the sum a module of its own"
            )
        self.warn(names)
        first = {name: self.calls[name].order for name in names if name in self.calls}
        names.sort(key=lambda name: first.get(name, len(self.calls)))
        return [self.known.get(name) or (name, self.modules[name], self.kind(name)) for name in names]

    def outermost(self, name: str, residual: set[str]) -> list[str]:
        """Blocks at or below a module; each of them is zero in the copy from then on."""
        if name in self.known:
            fill(self.copied[name], 0.0)
            return [name]
        children = [f"{name}.{child}" if name else child for child, _ in self.modules[name].named_children()]
        inner = [at for child in children if child in self.modules for at in self.outermost(child, residual)]
        single = self.counts[type(self.modules[name])] == 1  # what stands alone and has blocks inside surrounds them
        if name in residual and not (inner and (single or not self.has_branch(name))):
            fill(self.copied[name], 0.0)
            return [name]
        return inner

    def inside(self, names: Sequence[str]) -> set[str]:
        """Names of all that lies within these blocks, also of what they share and another module lists first."""
        within = {inner for name in names for child in self.modules[name].children() for inner in child.modules()}
        return {name for name, module in self.modules.items() if module in within}

    def run(self, name: str, seed: int = 0, train: bool = False) -> Tensor | None:
        """What the copy of a module gives for noise in its first call; None where it fails."""
        call, module = self.calls[name], self.copied[name]
        module.train(train)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                out = call.repeat(module, call.noise(seed))
        except Exception as error:  # foreign code, on noise: whatever it raises, it is no identity
            if "more than 1 value per channel" in str(error):  # batch norm in training
                raise ValueError(f"{type(self.model).__name__}: {name} needs an example of several samples") from error
            return None
        finally:
            module.eval()
        return out if isinstance(out, Tensor) else out[0]

    def is_identity(self, name: str, train: bool = False) -> bool:
        out = self.run(name, train=train)
        return out is not None and torch.equal(out, self.calls[name].noise(0))

    def has_branch(self, name: str) -> bool:
        """Does block(x) - x depend on x? That of a table of positions does not."""
        outs = [self.run(name, seed) for seed in (0, 1)]
        if outs[0] is None or outs[1] is None:
            return True
        branch = [
            out.float() - self.calls[name].noise(seed).float() for seed, out in enumerate(outs) if out is not None
        ]
        return not torch.allclose(branch[0], branch[1], rtol=1e-3, atol=1e-4)

    def kind(self, name: str) -> Kind:
        return whole(stream_name(self.modules[name]), named=self.calls[name].named is not None)

    def refuse(self, names: Sequence[str], residual: set[str]) -> None:
        """ValueError where a block has a shortcut that cannot be scaled from outside."""
        inside = self.inside(names)
        for name in names:
            if name not in self.known:
                self.refuse_block(name)
        for name, call in sorted(self.calls.items(), key=lambda item: item[1].order):  # outermost first
            around = any(at.startswith(f"{name}.") for at in self.known)
            empty = not any(True for _ in self.modules[name].parameters())
            aside = around or empty or name in inside or isinstance(self.modules[name], CONTAINERS)
            if call.streams > 1 and not aside:
                self.fail(name, f"it carries {call.streams} streams at once")
        keep_vectors(self.copied[""])
        blocks = {type(self.modules[name]) for name in names}
        free = [n for n in self.candidates if n not in residual and n not in self.tables and n not in inside]
        for name in sorted(free, key=lambda n: -n.count(".")):  # innermost first: what surrounds it inherits the fault
            module, around = self.modules[name], any(at.startswith(f"{name}.") for at in names)
            if type(module) in blocks:
                why = self.fault(name, gate=False)
                if why:
                    self.fail(name, f"others of its class map x to x + F(x), and this one does not: {why}")
            elif not around and list(module.children()) and not isinstance(module, CONTAINERS):
                why = self.fault(name, gate=True)
                if why:
                    self.fail(name, why)

    def warn(self, names: Sequence[str]) -> None:
        """Say which sums of two activations lie outside the blocks found: among them may be shortcuts that stay."""
        inside = self.inside(names)
        others = [name for name in dict.fromkeys(self.sums) if name not in names and name not in inside]
        if others:
            classes = ", ".join(f"{type(self.modules[n]).__name__} ({n or 'itself'})" for n in others[:3])
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            warnings.warn(
                f"{type(self.model).__name__}: {len(names)} blocks fade; {classes}{more} add activations too, "
                f"and stay as they are",
                stacklevel=5,
            )

    def refuse_block(self, name: str) -> None:
        call = self.calls[name]
        if call.streams > 1:
            self.fail(name, f"it carries {call.streams} streams at once")
        if name in self.careless:
            self.fail(name, "it changes its input in place")

    def changes_input(self, name: str) -> bool:
        call = self.calls[name]
        x = call.noise(0)
        with torch.no_grad():
            call.repeat(self.copied[name], x)
        return not torch.equal(x, call.noise(0))

    def fault(self, name: str, gate: bool) -> str | None:
        """How a module that is not x + F(x) keeps its input; None where it does not. A gate of one half is let pass on
        request: squeeze and excitation is x * sigmoid(0) without its weights."""
        outs = [self.run(name, seed) for seed in (0, 1)]
        if outs[0] is None or outs[1] is None or torch.equal(outs[0], outs[1]):
            return None
        x, y = self.calls[name].noise(0).float(), outs[0].float()
        if gate and torch.allclose(y, x / 2, atol=1e-6):
            return None
        if torch.equal(x, y):
            return "a parameter scales its shortcut, or training changes it"
        for act in (torch.relu, torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.relu6):
            if torch.allclose(y, act(x), atol=1e-4):
                return f"its shortcut passes through an activation (post-activation, {act.__name__})"
        slope = (x * y).sum() / (x * x).sum()
        if torch.allclose(y, slope * x, atol=1e-5):
            return f"its shortcut is scaled already: without its branch it returns {slope:.3g} x (gating)"
        if y.mean().abs() < 0.05 and 0.8 < y.std() < 1.2:
            return "its shortcut passes through a norm (post-norm)"
        return "its shortcut is not the identity: something changes x on the way (pooling, scaling, an activation)"

    def fail(self, name: str, why: str) -> None:
        cls = type(self.modules[name])
        raise ValueError(
            f"{type(self.model).__name__}: {name}, a {cls.__module__}.{cls.__qualname__}, cannot be read as x + F(x): "
            + why
        )


def is_norm(module: nn.Module) -> bool:
    """Is a module a normalisation, perhaps with an activation? By its name, or because a norm has all its weights."""
    if any(isinstance(inner, MATRICES) for inner in module.modules()):
        return False
    own = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return "norm" in type(module).__name__.lower() or (len(own) == 1 and "norm" in type(own[0]).__name__.lower())


@torch.no_grad()
def fill(module: nn.Module, value: float) -> None:
    """Every parameter, and every running mean (a norm without weights would show it)."""
    for tensor in (*module.parameters(), *(b for n, b in module.named_buffers() if n.endswith("running_mean"))):
        tensor.fill_(value)


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    rng = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            std = 0.5 * max(parameter[0].numel(), 1) ** -0.5 if parameter.ndim > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * std)


@torch.no_grad()
def keep_vectors(module: nn.Module) -> None:
    """Zero but for weights that are vectors, which are 1: the stream passes norms and learned scales, and no matrix. A
    convolution is one whatever its kernel: what has one such layer and no sum (1x1, depthwise) is no shortcut."""
    fill(module, 0.0)
    for inner in module.modules():
        if isinstance(inner, MATRICES):
            continue
        for name, parameter in inner.named_parameters(recurse=False):
            if parameter.numel() == max(parameter.shape, default=1) and "bias" not in name and "beta" not in name:
                parameter.fill_(1.0)
