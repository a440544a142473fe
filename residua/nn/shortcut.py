"""How strongly each residual step keeps its input: the schedule of `alpha` in `x <- alpha * x + f(x)`."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Schedule = Literal["linear", "literal", "cosine", "constant", "learned"]
Per = Literal["sublayer", "block"]
Branches = Literal["both", "attn", "mlp"]
Control = Literal["none", "branch", "both"]

SQRT_HALF = math.sqrt(0.5)
_PLAIN = {"schedule": "linear", "per": "sublayer", "branches": "both", "until": None}


@dataclass(frozen=True)
class Decay:
    """Which identity shortcuts fade, and how far. No field adds a parameter unless `schedule="learned"`."""

    alpha_min: float = 1.0
    """Strength of the last shortcut; 1 is an ordinary residual network."""
    alpha_eff: float | None = None
    """Product of all alphas, what survives of the input at the end; given instead of alpha_min."""
    schedule: Schedule = "linear"
    """linear: 1 to alpha_min inclusive; literal: 1 - (1 - alpha_min) l / L; cosine; constant; learned from 1."""
    per: Per = "sublayer"
    """An alpha for every sublayer, or one per block that its sublayers share."""
    branches: Branches = "both"
    """Which shortcuts fade; the others stay at 1 and the schedule's values do not move."""
    until: float | None = None
    """Decay only the first steps: a share of the depth (at most 1.0) or a step index (above 1); 1 after that."""
    control: Control = "none"
    """Ablation instead of decay: scale the branch alone, or branch and shortcut both, by sqrt(0.5)."""

    def __post_init__(self) -> None:
        for field, allowed in (
            ("schedule", Schedule),
            ("per", Per),
            ("branches", Branches),
            ("control", Control),
        ):
            if getattr(self, field) not in get_args(allowed):
                raise ValueError(f"{field} is {getattr(self, field)!r}; choose one of {', '.join(get_args(allowed))}")
        if not 0.0 <= self.alpha_min <= 1.0:
            raise ValueError(f"alpha_min is {self.alpha_min}; it must lie in [0, 1] (1 = ordinary residual network)")
        if self.alpha_eff is not None and not 0.0 < self.alpha_eff <= 1.0:
            raise ValueError(f"alpha_eff is {self.alpha_eff}; it must lie in (0, 1] (1 = ordinary residual network)")
        if self.alpha_eff is not None and self.alpha_min != 1.0:
            raise ValueError("give alpha_min or alpha_eff, not both: one determines the other")
        if self.until is not None and not (0 < self.until <= 1 or (1 < self.until < math.inf and self.until % 1 == 0)):
            raise ValueError(
                f"until is {self.until}; give a share of the depth in (0, 1] or a whole step index above 1"
            )
        if self.control != "none" or self.schedule == "learned":
            what = "control" if self.control != "none" else 'schedule="learned"'
            if self.alpha_min != 1.0 or self.alpha_eff not in (None, 1.0):
                raise ValueError(f"{what} sets the shortcuts itself: leave alpha_min and alpha_eff at 1")
            for name, plain in _PLAIN.items():
                if getattr(self, name) != plain and not (name == "schedule" and what != "control"):
                    raise ValueError(f"{what} treats all sublayers alike: leave {name} at {plain}")

    def profile(self, depth: int, sublayers: int = 2) -> Tensor:
        """`p_k` of `alpha_k = 1 - (1 - alpha_min) p_k`, in [0, 1], one per step (float64, depth * sublayers)."""
        steps = depth * sublayers if self.per == "sublayer" else depth
        active = _active_steps(self.until, steps)
        k = torch.arange(active, dtype=torch.float64)
        last = max(active - 1, 1)
        p = torch.zeros(steps, dtype=torch.float64)
        match self.schedule:
            case "linear":
                p[:active] = k / last
            case "literal":
                p[:active] = k / active
            case "cosine":
                p[:active] = (1 - torch.cos(math.pi * k / last)) / 2
            case "constant":
                p[:active] = 1.0
            case "learned":
                pass
        if self.per == "block":
            p = p.repeat_interleave(sublayers)
        if self.branches != "both":
            if sublayers != 2:
                raise ValueError(f"branches={self.branches!r} needs a network with attention and MLP sublayers")
            p[1 if self.branches == "attn" else 0 :: 2] = 0.0
        return p

    def target(self, depth: int, sublayers: int = 2) -> float:
        """alpha_min itself, or the one whose product of alphas is alpha_eff."""
        if self.alpha_eff is None:
            return self.alpha_min
        return _solve_alpha_min(self.profile(depth, sublayers), self.alpha_eff)

    def alphas(self, depth: int, sublayers: int = 2, strength: float = 1.0) -> Tensor:
        """The alpha of each step; `strength` in [0, 1] moves alpha_min from 1 to its target (annealing)."""
        if self.control == "both":
            return torch.full((depth * sublayers,), SQRT_HALF, dtype=torch.float64)
        alpha_min = 1 - strength + strength * self.target(depth, sublayers)
        p = self.profile(depth, sublayers)
        return torch.lerp(torch.ones_like(p), torch.full_like(p, alpha_min), p)  # exact at both ends

    @property
    def branch_scale(self) -> float:
        return 1.0 if self.control == "none" else SQRT_HALF


def alphas(
    depth: int, alpha_min: float = 1.0, schedule: Schedule = "linear", per: Per = "sublayer", **decay: object
) -> Tensor:
    """The schedule as a float64 tensor: 2 * depth values, or depth with `per="block"`.

    >>> residua.alphas(12, 0.6).prod()
    tensor(0.0036, dtype=torch.float64)
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}; a network has at least one block")
    spec = Decay(alpha_min=alpha_min, schedule=schedule, per=per, **decay)  # type: ignore[arg-type]
    return spec.alphas(depth, sublayers=2 if per == "sublayer" else 1)


def _active_steps(until: float | None, steps: int) -> int:
    if until is None:
        return steps
    count = round(until * steps) if until <= 1 else int(until)
    if count > steps:
        raise ValueError(f"until={until} is beyond the last of {steps} steps")
    if count < 2:
        raise ValueError(f"until={until} leaves {count} of {steps} steps, too few to fade over: two or more are needed")
    return count


def _solve_alpha_min(profile: Tensor, alpha_eff: float) -> float:
    """alpha_min with `prod_k (1 - (1 - alpha_min) p_k) = alpha_eff`, by bisection (monotone in alpha_min)."""
    smallest = float((1 - profile).prod())
    if alpha_eff < smallest:
        raise ValueError(f"alpha_eff={alpha_eff:g} is out of reach: this schedule's least product is {smallest:.2g}")
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((1 - (1 - middle) * profile).prod()) < alpha_eff else (low, middle)
    return high


def scaled_add(x: Tensor, f: Tensor, alpha: Tensor) -> Tensor:
    """`alpha * x + f` for a 0-d alpha: one kernel, nothing kept for backward beyond what `x + f` keeps."""
    if torch.compiler.is_compiling() or alpha.requires_grad:
        return x * alpha + f  # the compiler fuses it
    if not torch.is_autocast_enabled(x.device.type):
        return torch.addcmul(f, x, alpha)
    with torch.autocast(x.device.type, enabled=False):  # autocast would widen the stream to alpha's float32
        return torch.addcmul(f, x, alpha)


class Shortcuts(nn.Module):
    """The alphas of one network, in a buffer so that they can move while it trains without recompiling it."""

    alpha: Tensor

    def __init__(self, decay: Decay, depth: int, sublayers: int = 2) -> None:
        super().__init__()
        self.depth, self.sublayers = depth, sublayers
        self.decay = decay
        values = decay.alphas(depth, sublayers).float()
        if decay.schedule == "learned":
            self.alpha = nn.Parameter(values)
        else:
            self.register_buffer("alpha", values)

    @property
    def alpha_eff(self) -> float:
        """What survives of the input at the end: the product of all alphas."""
        return float(self.alpha.detach().double().prod())

    def words(self) -> str:
        """How they fade, in a line; alpha_min is the schedule's, which not every schedule reaches."""
        if self.decay.control != "none":
            return f"control: {self.decay.control} scaled by sqrt(0.5)"
        kind = "learned shortcuts"
        if self.decay.schedule != "learned":
            kind = f"alpha_min {self.decay.target(self.depth, self.sublayers):.3g}"
        return f"{kind} (alpha_eff {self.alpha_eff:.2g})"

    @torch.no_grad()
    def set_strength(self, strength: float) -> None:
        """Annealing: 0 is an ordinary residual network, 1 the full decay."""
        if not 0.0 <= strength <= 1.0:
            raise ValueError(f"strength is {strength}; it must lie in [0, 1]")
        self.alpha.copy_(self.decay.alphas(self.depth, self.sublayers, strength))

    def set_decay(self, decay: Decay) -> None:
        """Replace the schedule in place."""
        if "learned" in (decay.schedule, self.decay.schedule) and decay.schedule != self.decay.schedule:
            raise ValueError("a learned alpha is a parameter: build the model with schedule='learned' instead")
        self.decay = decay
        self.set_strength(1.0)

    def unset(self) -> None:
        self.set_decay(replace(Decay(), schedule=self.decay.schedule))

    def extra_repr(self) -> str:
        return f"{self.decay}, alpha_eff={self.alpha_eff:.2g}"
