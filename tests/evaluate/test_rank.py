import math

import numpy as np
import pytest
import torch

from residua.evaluate import CollapsedError, entropy_rank, rankme


def entropy(p: np.ndarray) -> float:
    p = p[p > 1e-300]
    return float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("d", [2, 7, 64])
def test_plus_and_minus_identity_give_log_d(d: int) -> None:
    assert entropy_rank(torch.cat([torch.eye(d), -torch.eye(d)])) == pytest.approx(math.log(d), abs=1e-12)


@pytest.mark.parametrize("center", ["samples", "dims", None])
def test_a_single_direction_has_entropy_zero(center) -> None:
    x = torch.outer(torch.randn(50), torch.randn(8))
    assert entropy_rank(x.double(), center) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (15, 15)])
def test_is_the_entropy_of_the_covariance_between_samples(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1) + 3

    def of(covariance: np.ndarray) -> float:
        s = np.linalg.svd(covariance, compute_uv=False)
        return entropy(s / s.sum())

    n = len(x)
    centring = np.eye(n) - 1 / n
    assert entropy_rank(x, "samples") == pytest.approx(of(centring @ x @ x.T @ centring), abs=1e-9)
    assert entropy_rank(x, "dims") == pytest.approx(of(np.cov(x)), abs=1e-9)
    assert entropy_rank(x, None) == pytest.approx(of(x @ x.T), abs=1e-9)


def test_ignores_rotation_scale_and_offset() -> None:
    x = torch.randn(60, 10, dtype=torch.float64) * torch.linspace(0.1, 2, 10)
    rotation = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64)).Q
    assert entropy_rank(7 * x @ rotation + 5) == pytest.approx(entropy_rank(x), abs=1e-9)
    assert rankme(7 * x @ rotation) == pytest.approx(rankme(x), abs=1e-9)
    assert abs(entropy_rank(x @ rotation, "dims") - entropy_rank(x, "dims")) > 1e-4


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_rankme_is_the_exponential_over_the_features_own_singular_values(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).normal(size=shape) + 1
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum()
    assert rankme(x, eps=0) == pytest.approx(math.exp(entropy(p)), rel=1e-10)
    assert rankme(x) == pytest.approx(math.exp(entropy(p + 1e-7)), rel=1e-10)


def test_the_two_are_different_numbers() -> None:
    assert rankme(torch.eye(9)) == pytest.approx(9, rel=1e-4)
    x = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    energy = torch.tensor([1.0, 4.0, 16.0]) / 21
    assert entropy_rank(x, None) == pytest.approx(float(torch.special.entr(energy).sum()), abs=1e-6)
    assert rankme(x) != pytest.approx(math.exp(entropy_rank(x, None)), rel=0.05)


def test_rank_deficiency_is_not_blurred_by_rounding() -> None:
    x = torch.randn(500, 3, dtype=torch.float64) @ torch.randn(3, 200, dtype=torch.float64)
    s = torch.linalg.svdvals(x)[:3]
    assert rankme(x, eps=0) == pytest.approx(float(torch.special.entr(s / s.sum()).sum().exp()), rel=1e-9)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.full((4, 3), torch.nan), "NaN"),
        (torch.empty(0, 3), "non-empty"),
        (torch.randn(5), "matrix"),
        (torch.randn(2, 3, 4), "matrix"),
    ],
)
def test_refuses_what_is_no_matrix_of_features(features: torch.Tensor, message: str) -> None:
    for score in (entropy_rank, rankme):
        with pytest.raises(ValueError, match=message):
            score(features)


def test_names_collapse() -> None:
    with pytest.raises(CollapsedError, match="collapsed"):
        entropy_rank(torch.randn(1, 6).expand(30, 6))
    with pytest.raises(CollapsedError):
        rankme(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="center"):
        entropy_rank(torch.randn(4, 4), "rows")  # type: ignore[arg-type]
