"""Mixing and erasing against timm's, image by image, and their chance against the distributions."""

import random

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data import mixup as timm_mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from residua.data import mixing
from residua.data.rng import uniform

SIZE = (12, 17)


def draws(n: int, lanes: int, stream: str = "test") -> Tensor:
    return uniform(0, 0, torch.arange(n), lanes, stream)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_strengths_are_beta_distributed(alpha: float) -> None:
    drawn = mixing.draw(mixing.beta_quantiles(alpha), draws(5000, 1)[:, 0])
    assert stats.kstest(drawn.double().numpy(), stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_quantiles_are_as_symmetric_as_their_distribution() -> None:
    table = mixing.beta_quantiles(0.8).double()
    torch.testing.assert_close(table + table.flip(0), torch.ones_like(table), atol=1e-6, rtol=0)


def test_normal_numbers_are_finite_and_normal() -> None:
    assert stats.kstest(mixing.normal(draws(5000, 1)[:, 0]).double().numpy(), stats.norm.cdf).pvalue > 0.01
    ends = mixing.normal(torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24]))
    assert ends.isfinite().all()
    assert -6 < float(ends[0]) < float(ends[1]) < -5


def test_partners_are_neighbours() -> None:
    assert mixing.partners(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]
    assert mixing.partners(torch.arange(5)).tolist() == [1, 0, 3, 2, 4]
    assert mixing.partners(torch.arange(1)).tolist() == [0]


class Given:
    """Stands in for numpy's random numbers in timm: hands out the numbers that ours were computed from."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = iter(numbers)

    def randint(self, low: int, high: int, size: None = None) -> int:
        number = next(self.numbers)
        assert low <= number < high
        return number


def timm_mixed(
    x: Tensor, labels: Tensor, u: Tensor, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """A pair of images mixed by timm, with the strengths, kinds and centres that `u` stands for."""
    cut = (u[:, 0] < 0.5).numpy()
    lam = torch.where(
        u[:, 0] < 0.5,
        mixing.draw(mixing.beta_quantiles(1.0), u[:, 1]),
        mixing.draw(mixing.beta_quantiles(0.8), u[:, 1]),
    )
    centres = [int(v) for i in range(2) if cut[i] for v in (u[i, 2] * SIZE[0], u[i, 3] * SIZE[1])]
    mixer = timm_mixup.Mixup(0.8, 1.0, mode="elem", label_smoothing=smoothing, num_classes=4)
    monkeypatch.setattr(mixer, "_params_per_elem", lambda n: (lam.numpy().copy(), cut))
    monkeypatch.setattr(np.random, "randint", Given(centres).randint)
    return mixer(x.clone(), labels)


def test_mixing_is_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    u = draws(40, mixing.MIX_LANES)
    x = torch.randn(40, 3, *SIZE)
    labels = torch.arange(40) % 4
    weights = mixing.mix_weights(u, SIZE, mixing.beta_quantiles(0.8), mixing.beta_quantiles(1.0))
    mixed, targets = mixing.mix(x, weights), mixing.soft_targets(labels, weights, 4, 0.1)
    kinds = set()
    for i in range(0, 40, 2):  # timm pairs the first with the last: of two images, each with the other
        pair = slice(i, i + 2)
        expected, expected_targets = timm_mixed(x[pair], labels[pair], u[pair], 0.1, monkeypatch)
        torch.testing.assert_close(mixed[pair], expected)
        torch.testing.assert_close(targets[pair], expected_targets)
        kinds |= set((u[pair, 0] < 0.5).tolist())
    assert kinds == {True, False}
    torch.testing.assert_close(targets.sum(1), torch.ones(40))


def test_labels_are_mixed_by_area() -> None:
    u = draws(200, mixing.MIX_LANES)
    weights = mixing.mix_weights(u, SIZE, None, mixing.beta_quantiles(1.0))
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    labels = torch.arange(200) % 2
    targets = mixing.soft_targets(labels, weights, 2)
    kept = weights.flatten(1).mean(1)
    torch.testing.assert_close(targets[torch.arange(200), labels], kept)
    assert 0.4 < float(kept.mean()) < 0.8  # boxes of area 1 - lam, cut off at the border


def test_one_kind_or_none() -> None:
    u = draws(50, mixing.MIX_LANES)
    blend = mixing.mix_weights(u, SIZE, mixing.beta_quantiles(0.8), None)
    assert torch.equal(blend, blend[:, :, :1, :1].expand_as(blend))
    plain = mixing.mix_weights(u, SIZE, None, None)
    assert torch.equal(plain, torch.ones(50, 1, *SIZE))
    targets = mixing.soft_targets(torch.tensor([2]), plain[:1], 4, 0.2)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.05, 0.85, 0.05]]))


class Replay:
    """Stands in for Python's random numbers in timm's erasing of one image."""

    def __init__(self, u: Tensor, size: tuple[int, int]) -> None:
        self.u, self.size = u, size
        self.floats = iter([v for k in range(10) for v in (u[3 + k], u[13 + k])])
        self.sides = iter([u[1], u[2]])

    def random(self) -> float:
        return float(self.u[0])

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(next(self.floats))

    def randint(self, low: int, high: int) -> int:
        return low + int(float(next(self.sides)) * (high - low + 1))


@pytest.mark.parametrize("size", [(12, 17), (32, 32), (6, 40)])
def test_erased_boxes_are_timms(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    u = draws(200, mixing.ERASE_LANES)
    x = torch.full((200, 3, *size), 7.0)
    ours = mixing.erase(x, mixing.erase_boxes(u, size, 0.5), torch.zeros_like(x))
    eraser = RandomErasing(probability=0.5, mode="const", device="cpu")
    differing = 0
    for i in range(200):
        chance = Replay(u[i], size)
        for name in ("random", "uniform", "randint"):
            monkeypatch.setattr(random, name, getattr(chance, name))
        differing += not torch.equal(ours[i], eraser(x[i].clone()))
    assert differing <= 1  # a side that rounds the other way in float32
    touched = (ours == 0).flatten(1).any(1).float().mean()
    assert 0.4 < float(touched) < 0.6


def test_noise_fills_the_box_alone() -> None:
    x, noise = torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)
    out = mixing.erase(x, torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]]), noise)
    assert float(out[0].sum()) == 3 * 3 * 4
    assert bool((out[0, :, 1:4, 2:6] == 1).all())
    assert float(out[1].sum()) == 0
