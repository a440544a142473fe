"""Learning rates, parameter groups, the optimiser and the moving average of weights."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]
Optimizer = Literal["adamw", "sgd"]
LrSchedule = Literal["cosine", "constant"]
UNDECAYED = ("token", "pos_embed")
"""How the names of matrices end that have no weight decay."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know."""

    steps: int
    batch_size: int
    lr: float
    optimizer: Optimizer = "adamw"
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    warmup: float = 0.05
    warmup_steps: int | None = None
    lr_schedule: LrSchedule = "cosine"
    clip: float | None = None
    ema: float | None = None
    anneal: float = 0.0
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False
    micro_batch: int | None = None
    checkpoint_every: int = 1000
    keep: int = 2
    log_every: int = 50
    flops_per_image: float | None = None


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up to the peak, then a cosine to zero, or the peak throughout; `step` counts from 0.

    The warm-up takes the share `warmup` of the steps, and no more than `warmup_steps` where those are given.
    """
    warm = settings.warmup * settings.steps
    if settings.warmup_steps is not None:
        warm = min(warm, settings.warmup_steps)
    if step < warm:
        return settings.lr * (step + 1) / max(warm, 1.0) if step + 1 < warm else settings.lr
    if settings.lr_schedule == "constant":
        return settings.lr
    progress = (step - warm) / max(settings.steps - warm, 1)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def decay_strength(step: int, settings: Settings) -> float:
    """Share of the full decay in force at a step: 0 to 1 over the first `anneal` of the run, 1 at the last step."""
    span = min(settings.anneal * settings.steps, settings.steps - 1)
    return 1.0 if step >= span else step / span


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Weight decay on matrices (and convolutions) alone: biases, norms, tokens, positions and alphas have none."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and not name.endswith(UNDECAYED)
            (decayed if matrix else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def make_optimizer(groups: Groups, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """Fused AdamW, or SGD with Nesterov's momentum; on CUDA such that their step can be part of a recorded graph."""
    cuda = device.type == "cuda"
    rate = torch.tensor(settings.lr, device=device) if cuda else settings.lr
    fused = cuda or device.type == "cpu"
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, nesterov=True, fused=fused)
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=fused, capturable=cuda)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what a saved state has of every parameter; rates, decays and how steps are computed are this run's own."""
    groups = optimizer.state_dict()["param_groups"]
    saved, own = ([len(group["params"]) for group in part] for part in (state["param_groups"], groups))
    if saved != own:
        raise ValueError(f"its optimiser has groups of {saved} parameters, expected {own}")
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape not in ((), parameter.shape):
                raise ValueError(f"{name} of its optimiser does not fit a parameter of shape {tuple(parameter.shape)}")


class Average:
    """Exponential moving average of a model's weights: `average <- d * average + (1 - d) * weights`.

    `d = min(decay, (1 + step) / (10 + step))`: a decay of 0.9999 looks back 10,000 steps, and early on would hold
    little but the first weights; so at step t it looks back t / 9 at most. Buffers are copied. One fused operation a
    step, no copy to the host.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self._weights: list[Tensor] = list(model.parameters())
        self._averages: list[Tensor] = list(self.model.parameters())
        self._buffers, self._copies = list(model.buffers()), list(self.model.buffers())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step)) if step else 0.0
        torch._foreach_lerp_(self._averages, self._weights, 1.0 - decay)
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)
