"""Diffusion processes and their samplers, as functions of the papers' symbols.

A process is a path of Gaussians from data to noise, `x_t = a(t) x_0 + s(t) eps` with `eps` standard normal, t from 0
(data) to 1 (noise). A network predicts `eps` or the velocity `a'(t) x_0 + s'(t) eps`; either says what `x_0` and `eps`
are, and that is all a sampler asks for.

| | a(t) | s(t) | predicted |
|---|---|---|---|
| `VP`, Song et al. 2021 | `exp(-1/2 int_0^t b)`, `b(t) = b_0 + (b_1 - b_0) t` | `sqrt(1 - a^2)` | noise |
| `Flow`, Lipman et al. 2023 | `1 - t` | `t` | velocity |

Both follow the same reverse equations: with the score `-eps / s` and any `w(t) >= 0`,

    dx = (a' x_0 + s' eps) dt        dx = (a' x_0 + s' eps - 1/2 w score) dt + sqrt(w) dw

from t = 1 to 0 give samples of the data; the first is deterministic. For VP, `w = b` makes the second Song et al.'s;
what corresponds to it for Flow, `2 t / (1 - t)`, has no end at t = 1, and `w = t` is SiT's (Ma et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(x_t (B, ...), t (B,)) -> prediction (B, ...), of what the process predicts."""
Progress = Callable[[int, int], None]
Steps = Literal["uniform", "logsnr"]


class Process(Protocol):
    """A Gaussian path. `t` is any tensor; everything is elementwise in float32 or better."""

    predicts: Literal["noise", "velocity"]

    def a(self, t: Tensor) -> Tensor: ...

    def s(self, t: Tensor) -> Tensor: ...

    def da(self, t: Tensor) -> Tensor: ...

    def ds(self, t: Tensor) -> Tensor: ...

    def w(self, t: Tensor) -> Tensor:
        """How much noise the stochastic equation puts in again."""
        ...

    def when(self, ratio: Tensor) -> Tensor:
        """The t where `log(a / s)` is `ratio`."""
        ...

    def time_input(self, t: Tensor) -> Tensor:
        """What the network is told of t."""
        ...

    def ends(self) -> tuple[float, float]:
        """Where samplers start and stop: the equations are singular at one end."""
        ...


@dataclass(frozen=True)
class VP:
    """Variance preserving, linear beta; noise prediction (the paper's)."""

    beta_0: float = 0.1
    beta_1: float = 20.0
    predicts: Literal["noise", "velocity"] = "noise"

    def log_a(self, t: Tensor) -> Tensor:
        return -0.25 * t**2 * (self.beta_1 - self.beta_0) - 0.5 * t * self.beta_0

    def a(self, t: Tensor) -> Tensor:
        return self.log_a(t).exp()

    def s(self, t: Tensor) -> Tensor:
        return (-torch.expm1(2 * self.log_a(t))).sqrt()

    def beta(self, t: Tensor) -> Tensor:
        return self.beta_0 + (self.beta_1 - self.beta_0) * t

    def da(self, t: Tensor) -> Tensor:
        return -0.5 * self.beta(t) * self.a(t)

    def ds(self, t: Tensor) -> Tensor:
        return 0.5 * self.beta(t) * self.a(t) ** 2 / self.s(t)  # s s' = -a a'

    def w(self, t: Tensor) -> Tensor:
        return self.beta(t)

    def when(self, ratio: Tensor) -> Tensor:
        fallen = 0.5 * F.softplus(-2 * ratio)  # -log a, a quadratic in t
        half = 0.5 * self.beta_0
        return 2 * fallen / (half + (half**2 + (self.beta_1 - self.beta_0) * fallen).sqrt())

    def time_input(self, t: Tensor) -> Tensor:
        return 999.0 * t

    def ends(self) -> tuple[float, float]:
        return 1.0, 1e-4


@dataclass(frozen=True)
class Flow:
    """The straight path, with velocity prediction."""

    predicts: Literal["noise", "velocity"] = "velocity"
    backwards: bool = False
    """The network is told 1 - t, as the published SiT models are, instead of 999 t."""

    def a(self, t: Tensor) -> Tensor:
        return 1 - t

    def s(self, t: Tensor) -> Tensor:
        return t

    def da(self, t: Tensor) -> Tensor:
        return torch.full_like(t, -1.0)

    def ds(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def w(self, t: Tensor) -> Tensor:
        return t

    def when(self, ratio: Tensor) -> Tensor:
        return torch.sigmoid(-ratio)

    def time_input(self, t: Tensor) -> Tensor:
        return 1 - t if self.backwards else 999.0 * t

    def ends(self) -> tuple[float, float]:
        return 1.0, 0.0


PROCESSES: dict[str, type[VP] | type[Flow]] = {"vp": VP, "flow": Flow}


def process_config(process: VP | Flow) -> dict[str, Any]:
    """A process as plain values; `make_process(**config)` is the way back."""
    name = next(name for name, kind in PROCESSES.items() if isinstance(process, kind))
    return {"name": name, **asdict(process)}


def make_process(name: str, **values: Any) -> VP | Flow:
    """A process by name: "vp" or "flow"."""
    if name not in PROCESSES:
        raise ValueError(f"no diffusion process named {name!r}; there are {', '.join(PROCESSES)}")
    return PROCESSES[name](**values)


def _like(t: Tensor, x: Tensor) -> Tensor:
    """(B,) or () beside (B, ...)."""
    return t.reshape(-1, *[1] * (x.ndim - 1)) if t.ndim else t


def noised(process: Process, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """`x_t = a x_0 + s eps` for t (B,)."""
    t = _like(t, x_0)
    return process.a(t) * x_0 + process.s(t) * eps


def target(process: Process, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """What the network should predict at x_t."""
    if process.predicts == "noise":
        return eps
    t = _like(t, x_0)
    return process.da(t) * x_0 + process.ds(t) * eps


def split(process: Process, prediction: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """`(x_0, eps)` that a prediction at x_t amounts to: two linear equations."""
    t = _like(t, x_t)
    a, s = process.a(t), process.s(t)
    if process.predicts == "noise":
        return (x_t - s * prediction) / a, prediction
    da, ds = process.da(t), process.ds(t)
    det = a * ds - s * da
    return (ds * x_t - s * prediction) / det, (a * prediction - da * x_t) / det


def guided(conditional: Denoiser, unconditional: Denoiser, scale: float) -> Denoiser:
    """Classifier-free guidance (Ho and Salimans 2022): `u + scale (c - u)`; 1 is the conditional model itself."""

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        free = unconditional(x, t)
        return free + scale * (conditional(x, t) - free)

    return conditional if scale == 1.0 else denoise


def clipped(denoise: Denoiser, process: Process) -> Denoiser:
    """The same denoiser, its x_0 kept in [-1, 1], the range of the data (Ho et al. 2020); t > 0.

    At high noise a small error of the prediction is a large one of x_0, and would carry x away for good. What is not
    finite becomes NaN: clipped like the rest, an infinite prediction would pass for an image.
    """

    def kept(x: Tensor, t: Tensor) -> Tensor:
        x_0 = split(process, denoise(x, t), x, t)[0]
        x_0 = x_0.clamp(-1, 1).where(x_0.isfinite(), torch.nan)
        u = _like(t, x)
        eps = (x - process.a(u) * x_0) / process.s(u)
        return target(process, x_0, eps, t)

    return kept


def times(process: Process, steps: int, spacing: Steps = "uniform") -> Tensor:
    """The (steps + 1,) times that a sampler visits, falling, float64; uniform in t or in log(a / s)."""
    if steps < 1:
        raise ValueError(f"a sampler needs at least one step, got {steps}")
    start, stop = process.ends()
    grid = torch.linspace(start, stop, steps + 1, dtype=torch.float64)
    if spacing == "uniform":
        return grid
    if spacing != "logsnr":
        raise ValueError(f"spacing is {spacing!r}; choose 'uniform' or 'logsnr'")
    ends = grid[[0, -1]].clamp(1e-4, 1 - 1e-4)  # where log(a / s) is finite
    first, last = _log_ratio(process, ends).tolist()
    wanted = torch.linspace(first, last, steps + 1, dtype=torch.float64)
    grid[1:-1] = process.when(wanted[1:-1])
    return grid


def _log_ratio(process: Process, t: Tensor) -> Tensor:
    """lambda = log(a / s), half the log of the signal-to-noise ratio."""
    return process.a(t).log() - process.s(t).log()


class _Walk:
    """Along the times: `predict(x, i)` gives (x_0, eps) at the i-th one."""

    def __init__(self, denoise: Denoiser, process: Process, x: Tensor, grid: Tensor) -> None:
        self.denoise, self.process, self.grid = denoise, process, grid.to(device=x.device, dtype=torch.float64)
        scale = (process.a, process.s, process.da, process.ds)
        # computed once, in float64: differences of nearly equal times lose digits otherwise
        self.a, self.s, self.da, self.ds = ([v.to(x) for v in f(self.grid).unbind()] for f in scale)

    def predict(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        t = self.grid[i].to(x.dtype).expand(len(x))
        return split(self.process, self.denoise(x, t), x, t)


@torch.no_grad()
def ddim(denoise: Denoiser, process: Process, x: Tensor, grid: Tensor, progress: Progress | None = None) -> Tensor:
    """DDIM (Song, Meng, Ermon 2021), deterministic, first order: `x_u = a_u x_0 + s_u eps`."""
    walk, n = _Walk(denoise, process, x, grid), len(grid) - 1
    for i in range(n):
        x_0, eps = walk.predict(x, i)
        x = walk.a[i + 1] * x_0 + walk.s[i + 1] * eps
        if progress is not None:
            progress(i + 1, n)
    return x


@torch.no_grad()
def heun(denoise: Denoiser, process: Process, x: Tensor, grid: Tensor, progress: Progress | None = None) -> Tensor:
    """Heun's second-order method on the deterministic equation; two evaluations a step, the last step Euler's."""
    walk, n = _Walk(denoise, process, x, grid), len(grid) - 1
    dt = walk.grid.diff().to(x.dtype)
    for i in range(n):
        x_0, eps = walk.predict(x, i)
        d = walk.da[i] * x_0 + walk.ds[i] * eps
        ahead = x + dt[i] * d
        if i + 1 < n:
            x_0, eps = walk.predict(ahead, i + 1)
            ahead = x + dt[i] * (d + walk.da[i + 1] * x_0 + walk.ds[i + 1] * eps) / 2
        x = ahead
        if progress is not None:
            progress(i + 1, n)
    return x


@torch.no_grad()
def dpm_solver(
    denoise: Denoiser, process: Process, x: Tensor, grid: Tensor, progress: Progress | None = None
) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022): second order, one evaluation a step.

    In `l = log(a / s)` the solution is `x_u = (s_u / s_t) x_t + s_u int e^l x_0(l) dl`; x_0 is extrapolated
    linearly from the last two evaluations. The first and the last step are of first order.
    """
    walk, n = _Walk(denoise, process, x, grid), len(grid) - 1
    ratio = _log_ratio(process, walk.grid)
    before: Tensor | None = None
    for i in range(n):
        x_0, eps = walk.predict(x, i)
        h = ratio[i + 1] - ratio[i]
        if before is None or i + 1 == n or not torch.isfinite(h) or not torch.isfinite(ratio[i - 1]):
            x = walk.a[i + 1] * x_0 + walk.s[i + 1] * eps  # first order: DDIM
        else:
            r = (ratio[i] - ratio[i - 1]) / h
            guess = x_0 + (x_0 - before) / (2 * r).to(x)
            gain = (-process.a(walk.grid[i + 1]) * torch.expm1(-h)).to(x)
            x = walk.s[i + 1] / walk.s[i] * x + gain * guess
        before = x_0
        if progress is not None:
            progress(i + 1, n)
    return x


@torch.no_grad()
def euler_maruyama(
    denoise: Denoiser,
    process: Process,
    x: Tensor,
    grid: Tensor,
    progress: Progress | None = None,
    *,
    noise: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """The stochastic reverse equation with the process' own `w`, in Euler steps; the last step adds no noise.

    `noise(i)` gives the standard normal numbers of step i in the shape of x; drawn anew unless given.
    """
    walk, n = _Walk(denoise, process, x, grid), len(grid) - 1
    dt, w = walk.grid.diff(), process.w(walk.grid)
    for i in range(n):
        x_0, eps = walk.predict(x, i)
        drift = walk.da[i] * x_0 + (walk.ds[i] + (0.5 * w[i] / process.s(walk.grid[i])).to(x)) * eps
        x = x + dt[i].to(x) * drift
        if i + 1 < n:
            z = noise(i) if noise is not None else torch.randn_like(x)
            x = x + (-dt[i] * w[i]).sqrt().to(x) * z
        if progress is not None:
            progress(i + 1, n)
    return x


SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "euler-maruyama": euler_maruyama,
    "ddim": ddim,
    "dpm-solver": dpm_solver,
    "heun": heun,
}
