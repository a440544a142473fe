"""Processes and samplers against data whose score is known: a mixture of Gaussians."""

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from residua.nn.diffusion import (
    SAMPLERS,
    VP,
    Flow,
    Process,
    Steps,
    ddim,
    dpm_solver,
    euler_maruyama,
    guided,
    heun,
    noised,
    split,
    target,
    times,
)

WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MEANS = torch.tensor([[1.5, 0.0], [-1.0, 1.0], [0.0, -1.5]], dtype=torch.float64)
WIDTH = 0.4


class Mixture:
    """The exact denoiser of a mixture of Gaussians under a process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        a, s = (f(t.double())[:, None] for f in (self.process.a, self.process.s))
        variance = (a * WIDTH) ** 2 + s**2
        away = x[:, None] - a[..., None] * MEANS  # (B, K, 2)
        logits = WEIGHTS.log() - away.square().sum(-1) / (2 * variance)
        score = -(logits.softmax(-1)[..., None] * away).sum(1) / variance
        # E[x_0 | x_t] from the posterior of each component: no division by a or s, which vanish at the ends
        x_0 = (logits.softmax(-1)[..., None] * (MEANS + (a * WIDTH**2 / variance)[..., None] * away)).sum(1)
        return target(self.process, x_0, -s * score, t.double())


PROCESSES = pytest.mark.parametrize("process", [VP(), Flow()], ids=["vp", "flow"])


@PROCESSES
def test_derivatives_are_those_of_the_path(process: Process) -> None:
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64, requires_grad=True)
    for f, df in ((process.a, process.da), (process.s, process.ds)):
        (slope,) = torch.autograd.grad(f(t).sum(), t)
        torch.testing.assert_close(df(t), slope)


def test_vp_is_the_integral_of_its_beta() -> None:
    t = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    integral = torch.trapezoid(VP().beta(t), t)
    assert float(VP().a(torch.tensor(1.0, dtype=torch.float64))) == pytest.approx(math.exp(-0.5 * float(integral)))
    torch.testing.assert_close(VP().a(t) ** 2 + VP().s(t) ** 2, torch.ones_like(t))


def test_the_constants_are_the_papers() -> None:
    """U-ViT's: beta from 0.1 to 20, times of the network up to 999; SiT's: w = t, and 1 - t in the published models."""
    t = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    torch.testing.assert_close(VP().beta(t), torch.tensor([0.1, 5.075, 20.0], dtype=torch.float64))
    for process in (VP(), Flow()):
        assert process.time_input(t).tolist() == [0, 249.75, 999]
    assert Flow(backwards=True).time_input(t).tolist() == [1, 0.75, 0]
    assert torch.equal(VP().w(t), VP().beta(t))
    assert torch.equal(Flow().w(t), t)
    assert (VP().ends(), Flow().ends()) == ((1.0, 1e-4), (1.0, 0.0))


@PROCESSES
def test_a_perfect_prediction_gives_back_data_and_noise(process: Process) -> None:
    x_0, eps = torch.randn(2, 6, 3, 4, 4, dtype=torch.float64)
    t = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)
    x_t = noised(process, x_0, eps, t)
    found = split(process, target(process, x_0, eps, t), x_t, t)
    torch.testing.assert_close(found[0], x_0)
    torch.testing.assert_close(found[1], eps)


def start(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@PROCESSES
@pytest.mark.parametrize(("sampler", "order"), [(ddim, 1), (heun, 2), (dpm_solver, 2)])
def test_deterministic_samplers_converge_at_their_order(process: Process, sampler, order: int) -> None:
    """Halving the steps of the same path divides the error by 2^order."""
    x, denoise = start(64), Mixture(process)

    def middle(steps: int, sampler=sampler) -> Tensor:
        # between the ends, where VP's s' is unbounded; the last step, of first order, is one of length zero
        grid = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
        return sampler(denoise, process, x, torch.cat([grid, grid[-1:] * (1 - 1e-12)]))

    best = middle(1024, heun)
    errors = [float((middle(n) - best).abs().mean()) for n in (24, 48, 96)]
    slopes = [math.log2(errors[i] / errors[i + 1]) for i in range(2)]
    assert slopes == pytest.approx([order, order], abs=0.25)


@PROCESSES
@pytest.mark.parametrize(("name", "steps", "spacing", "tolerance"), [
    ("ddim", 200, "uniform", 0.03), ("heun", 50, "uniform", 0.03), ("dpm-solver", 50, "uniform", 0.03),
    ("euler-maruyama", 500, "uniform", 0.04), ("dpm-solver", 50, "logsnr", 0.03), ("dpm-solver", 250, "logsnr", 0.03),
    ("ddim", 250, "logsnr", 0.03), ("heun", 250, "logsnr", 0.03),
])  # fmt: skip
def test_samples_have_the_moments_of_the_data(
    process: Process, name: str, steps: int, spacing: Steps, tolerance: float
) -> None:
    n = 20_000
    torch.manual_seed(1)
    samples = SAMPLERS[name](Mixture(process), process, start(n), times(process, steps, spacing))
    mean = WEIGHTS @ MEANS
    spread = MEANS - mean
    covariance = (WEIGHTS[:, None] * spread).T @ spread + WIDTH**2 * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(samples.mean(0), mean, rtol=0, atol=tolerance)
    torch.testing.assert_close(samples.T.cov(), covariance, rtol=0, atol=2 * tolerance)
    nearest = (samples[:, None] - MEANS).norm(dim=-1).argmin(1)
    torch.testing.assert_close(nearest.bincount().double() / n, WEIGHTS, rtol=0, atol=0.03)


@PROCESSES
@pytest.mark.parametrize("steps", [50, 1000])
def test_the_stochastic_sampler_keeps_to_the_path(process: Process, steps: int) -> None:
    """What the network is shown has the spread of what it was trained on, from the first step on."""
    n, seen = 4000, []
    exact, spread = Mixture(process), (WEIGHTS[:, None] * (MEANS - WEIGHTS @ MEANS) ** 2).sum() / 2 + WIDTH**2

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        wanted = (process.a(t[0]) ** 2 * spread + process.s(t[0]) ** 2).sqrt()
        seen.append(float((x - x.mean(0)).square().mean().sqrt() / wanted))
        return exact(x, t)

    torch.manual_seed(2)
    euler_maruyama(denoise, process, start(n), times(process, steps))
    assert len(seen) == steps
    assert 0.85 < min(seen) < max(seen) < 1.15


def test_given_noise_makes_the_stochastic_sampler_a_function() -> None:
    process, x = VP(), start(8)
    noise = torch.randn(50, 8, 2, dtype=torch.float64)
    runs = [euler_maruyama(Mixture(process), process, x, times(process, 50), noise=noise.__getitem__) for _ in "ab"]
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], euler_maruyama(Mixture(process), process, x, times(process, 50)))


def test_guidance_is_an_extrapolation() -> None:
    up, down = (lambda x, t: x + 1), (lambda x, t: x - 1)
    x, t = torch.zeros(2, 1), torch.zeros(2)
    for scale, value in ((1.0, 1.0), (0.0, -1.0), (0.5, 0.0), (2.0, 3.0)):
        assert float(guided(up, down, scale)(x, t)[0, 0]) == value
    assert guided(up, down, 1.0) is up  # no second evaluation


@PROCESSES
def test_times_fall_between_the_ends(process: Process) -> None:
    for steps, spacing in itertools.product((1, 20, 100, 1000, 5000), get_args(Steps)):
        grid = times(process, steps, spacing)
        assert (grid[0], grid[-1]) == process.ends()
        assert (grid.diff() < 0).all()
        assert len(grid) == steps + 1
    with pytest.raises(ValueError, match="at least one step"):
        times(process, 0)


@PROCESSES
def test_the_time_of_a_ratio_of_signal_to_noise(process: Process) -> None:
    t = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    torch.testing.assert_close(process.when((process.a(t) / process.s(t)).log()), t, rtol=1e-9, atol=0)


def test_progress_is_told_at_every_step() -> None:
    told: list[tuple[int, int]] = []
    ddim(Mixture(VP()), VP(), start(2), times(VP(), 3), lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
