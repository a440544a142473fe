import math

import numpy as np
import pytest
import torch

from residua.evaluate import (
    CollapsedError,
    FeatureSet,
    alpha_req,
    entropy_rank,
    lidar,
    participation_ratio,
    rankme,
    ranks,
    spectrum,
    stable_rank,
)


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


def decaying(n: int, energies: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Centred features (n, d) whose covariance has exactly these eigenvalues (up to the factor n), rotated."""
    g = torch.Generator().manual_seed(seed)
    d = len(energies)
    columns = torch.randn(n, d + 1, generator=g, dtype=torch.float64)
    columns[:, 0] = 1
    u = torch.linalg.qr(columns).Q[:, 1:]  # orthogonal to the constant: each has mean 0
    v = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    return (u * energies.sqrt()) @ v


@pytest.mark.parametrize("seed", range(5))
def test_known_spectra_give_known_numbers(seed: int) -> None:
    energies = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).sort().values.flip(0)
    x = decaying(100, energies, seed) + 3
    p = (energies / energies.sum()).numpy()
    torch.testing.assert_close(spectrum(x), energies.sqrt(), rtol=1e-9, atol=1e-12)
    assert entropy_rank(x) == pytest.approx(entropy(p), abs=1e-9)
    assert participation_ratio(x) == pytest.approx(1 / (p**2).sum(), rel=1e-9)
    assert stable_rank(x) == pytest.approx(1 / p[0], rel=1e-9)


@pytest.mark.parametrize("d", [2, 7, 64])
def test_equal_directions_are_counted(d: int) -> None:
    x = torch.cat([torch.eye(d), -torch.eye(d)])
    assert participation_ratio(x) == pytest.approx(d, rel=1e-9)
    assert stable_rank(x) == pytest.approx(d, rel=1e-9)
    line = torch.outer(torch.arange(20.0), torch.ones(d))
    assert participation_ratio(line) == pytest.approx(1)
    assert stable_rank(line) == pytest.approx(1)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.3])
def test_alpha_req_finds_the_exponent_of_a_power_law(exponent: float) -> None:
    j = torch.arange(1, 101, dtype=torch.float64)
    energies = j**-exponent
    assert alpha_req(decaying(300, energies)) == pytest.approx(exponent, abs=1e-9)
    bent = torch.where(j <= 10, 50.0, energies)  # the head does not count
    assert alpha_req(decaying(300, bent)) == pytest.approx(exponent, abs=1e-9)
    assert alpha_req(decaying(300, bent), fit=(1, 100)) > exponent + 0.1


def test_alpha_req_leaves_out_the_tail() -> None:
    j = torch.arange(1, 101, dtype=torch.float64)
    noisy = torch.where(j <= 50, j**-1.0, 50.0**3 * j**-4.0)
    assert alpha_req(decaying(300, noisy)) == pytest.approx(1, abs=1e-9)
    assert alpha_req(decaying(300, noisy), fit=(11, 100)) > 1.5


def test_alpha_req_of_a_steep_spectrum() -> None:
    steep = torch.where(torch.arange(1, 61) <= 50, torch.arange(1, 61).double() ** -6.0, 0.0)
    assert alpha_req(decaying(200, steep)) == pytest.approx(6, rel=1e-3)


def test_alpha_req_is_a_least_squares_line() -> None:
    x = np.random.default_rng(3).normal(size=(200, 40)) * np.linspace(2, 0.1, 40)
    values = np.sort(np.linalg.eigvalsh(np.cov(x.T)))[::-1]
    slope = np.polyfit(np.log(np.arange(11, 41)), np.log(values[10:40]), 1)[0]
    assert alpha_req(x) == pytest.approx(-slope, rel=1e-9)
    for few in (8, 12):  # of which two lie in the range
        with pytest.raises(ValueError, match=f"only {few} are positive"):
            alpha_req(x[:, :few])
    with pytest.raises(ValueError, match="first < last"):
        alpha_req(x, fit=(5, 5))


def lidar_by_definition(x: np.ndarray, delta: float, eps: float) -> float:
    """As the paper writes it, with an explicit inverse root and one outer product at a time."""
    n, v, d = x.shape
    overall = x.reshape(-1, d).mean(0)
    s_b, s_w = np.zeros((d, d)), delta * np.eye(d)
    for views in x:
        m = views.mean(0)
        s_b += np.outer(m - overall, m - overall) / n
        for view in views:
            s_w += np.outer(view - m, view - m) / (n * v)
    values, vectors = np.linalg.eigh(s_w)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    spectrum = np.linalg.eigvalsh(root @ s_b @ root).clip(0)
    p = spectrum / spectrum.sum() + eps
    return float(np.exp(-np.sum(p * np.log(p))))


@pytest.mark.parametrize("shape", [(40, 5, 8), (6, 3, 12), (2, 2, 3)])
@pytest.mark.parametrize("delta", [1e-4, 0.5])
def test_lidar_is_its_definition(shape: tuple[int, int, int], delta: float) -> None:
    rng = np.random.default_rng(0)
    x = 2 * rng.normal(size=(shape[0], 1, shape[2])) + rng.normal(size=shape) * np.arange(1, shape[2] + 1) + 1
    assert lidar(x, delta) == pytest.approx(lidar_by_definition(x, delta, 1e-7), rel=1e-8)


def test_lidar_has_its_papers_delta() -> None:
    x = 0.01 * np.random.default_rng(0).normal(size=(50, 6, 8)) * np.arange(1, 9)
    assert lidar(x) == pytest.approx(lidar_by_definition(x, 1e-4, 1e-7), rel=1e-8)


def test_lidar_counts_what_tells_images_apart_and_not_what_views_change() -> None:
    g = torch.Generator().manual_seed(0)
    images = torch.zeros(1000, 1, 20).double()
    images[..., :4] = torch.randn(1000, 1, 4, generator=g).double()
    views = torch.zeros(1000, 10, 20).double()
    views[..., 4:] = torch.randn(1000, 10, 16, generator=g).double()
    assert lidar(images + 0.01 * views) == pytest.approx(4, rel=0.02)
    assert rankme((images + views).flatten(0, 1)) > 15
    assert lidar(views) > 10


def test_lidar_reads_the_views_of_a_feature_set() -> None:
    x = torch.randn(30, 4, 6)
    own = FeatureSet({2: x[:, 0]}, views={2: x[:, 1:].transpose(0, 1)})
    assert lidar(own) == pytest.approx(lidar(x), rel=1e-12)
    with pytest.raises(ValueError, match="views=9"):
        lidar(FeatureSet({2: x[:, 0]}))


@pytest.mark.parametrize("shape", [(50, 12), (12, 50), (30, 30), (31, 30), (2, 5)])
def test_all_at_once_are_the_same_as_one_by_one(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1) + 2
    together = ranks(x)
    assert together["entropy rank"] == pytest.approx(entropy_rank(x), abs=1e-10)
    assert together["RankMe"] == pytest.approx(rankme(x), rel=1e-10)
    assert together["participation ratio"] == pytest.approx(participation_ratio(x), rel=1e-10)
    assert together["stable rank"] == pytest.approx(stable_rank(x), rel=1e-10)
    if min(shape) >= 30:
        assert together["alpha-ReQ"] == pytest.approx(alpha_req(x), rel=1e-8)
    else:
        assert math.isnan(together["alpha-ReQ"])


@pytest.mark.parametrize("seed", range(10))
def test_every_rank_ignores_rotation_and_scale_and_most_ignore_an_offset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, d = rng.integers(15, 60, 2)
    x = rng.normal(size=(n, d)) * rng.uniform(0.1, 3, d)
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    scale = 10.0 ** rng.uniform(-3, 3)
    before, turned = ranks(x), ranks(scale * x @ rotation)
    assert turned == pytest.approx(before, rel=1e-7)
    moved = ranks(x + rng.normal(size=d))
    assert moved["RankMe"] != pytest.approx(before["RankMe"], rel=1e-3)
    assert moved | {"RankMe": 0} == pytest.approx(before | {"RankMe": 0}, rel=1e-7)
    assert 1 <= before["participation ratio"] <= math.exp(before["entropy rank"]) <= min(n, d)
    assert before["stable rank"] <= before["participation ratio"] <= before["stable rank"] ** 2


@pytest.mark.parametrize("seed", range(5))
def test_lidar_ignores_rotation_and_offset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 1, 9)) + 0.5 * rng.normal(size=(40, 6, 9)) * rng.uniform(0.1, 3, 9)
    rotation = np.linalg.qr(rng.normal(size=(9, 9)))[0]
    assert lidar(x @ rotation + rng.normal(size=9)) == pytest.approx(lidar(x), rel=1e-7)


@pytest.mark.parametrize("score", [spectrum, entropy_rank, participation_ratio, stable_rank, alpha_req, ranks])
def test_collapse_and_single_images_are_named(score) -> None:
    with pytest.raises(CollapsedError, match="collapsed"):
        score(torch.randn(1, 20).expand(30, 20))
    with pytest.raises(CollapsedError, match="at least two"):
        score(torch.randn(1, 20))
    with pytest.raises(ValueError, match="1 of 30 rows hold NaN"):
        score(torch.randn(30, 20).index_fill(0, torch.tensor([4]), torch.nan))


def test_lidar_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(CollapsedError, match="collapsed"):
        lidar(torch.randn(1, 5, 4).expand(20, 5, 4))
    with pytest.raises(ValueError, match="at least 2 images with 2 views"):
        lidar(torch.randn(10, 1, 4))
    with pytest.raises(ValueError, match="images, views, dimensions"):
        lidar(torch.randn(10, 4))
    with pytest.raises(ValueError, match="NaN"):
        lidar(torch.full((3, 3, 3), torch.nan))


@pytest.mark.parametrize("n", [2048, 5000, 16385])
def test_many_rows_are_never_in_float64_together(n: int, monkeypatch) -> None:
    x = torch.randn(n, 40) @ torch.randn(40, 40) + 3
    energies = np.linalg.svd((x - x.double().mean(0)).numpy(), compute_uv=False) ** 2
    own = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p, q = energies / energies.sum(), own / own.sum() + 1e-7
    real, rows = torch.Tensor.double, []

    def double(self: torch.Tensor) -> torch.Tensor:
        rows.append(len(self))
        return real(self)

    monkeypatch.setattr(torch.Tensor, "double", double)
    found = ranks(x)
    assert max(rows) < n
    assert found["entropy rank"] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
    assert found["RankMe"] == pytest.approx(np.exp(-(q * np.log(q)).sum()), rel=1e-12)
    assert entropy_rank(x) == pytest.approx(found["entropy rank"], rel=1e-12)
    assert rankme(x) == pytest.approx(found["RankMe"], rel=1e-12)
    np.testing.assert_allclose(spectrum(x).numpy() ** 2, energies, rtol=1e-10)
    assert max(rows) < n
