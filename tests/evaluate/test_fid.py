import math

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
from torch import Tensor

from residua.evaluate import (
    Statistics,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
    statistics,
)
from residua.evaluate import fid as module
from residua.evaluate.fid import Moments, exact_float32


def gaussian(n: int, d: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=g) / math.sqrt(d)
    return scale * torch.randn(n, d, generator=g) @ mixing + shift


def by_sqrtm(a: Statistics, b: Statistics) -> float:
    root = scipy.linalg.sqrtm(a.cov.numpy() @ b.cov.numpy())
    means = np.square(a.mean.numpy() - b.mean.numpy()).sum()
    return float(means + np.trace(a.cov.numpy()) + np.trace(b.cov.numpy()) - 2 * np.trace(root).real)


def test_statistics_are_numpys() -> None:
    x = gaussian(500, 12, 0, shift=30.0)
    found = statistics(x)
    assert found.count == 500
    np.testing.assert_allclose(found.mean, x.double().numpy().mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.cov, np.cov(x.double().numpy(), rowvar=False), rtol=1e-9, atol=1e-12)
    moments = Moments()
    for part in x.split(7):
        moments.add(part)
    torch.testing.assert_close(moments.statistics().cov, found.cov, rtol=1e-9, atol=1e-12)


def test_distance_of_gaussians_with_commuting_covariances() -> None:
    """`|m - n|^2 + sum (sqrt(a_i) - sqrt(b_i))^2`, also in one dimension."""
    g = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64)).Q
    a, b = torch.rand(2, 6, generator=g, dtype=torch.float64)
    b[4:] = 0
    mean = torch.randn(6, generator=g, dtype=torch.float64)
    one = Statistics(100, torch.zeros(6).double(), (rotation * a) @ rotation.T)
    two = Statistics(100, mean, (rotation * b) @ rotation.T)
    expected = float(mean.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    assert frechet_distance(one, two) == pytest.approx(expected, rel=1e-12)
    line = [
        Statistics(9, torch.tensor([m]).double(), torch.tensor([[v]]).double()) for m, v in ((1.0, 4.0), (3.0, 9.0))
    ]
    assert frechet_distance(*line) == pytest.approx(4 + 1)


def test_distance_against_scipys_root() -> None:
    a, b = statistics(gaussian(400, 24, 1)), statistics(gaussian(300, 24, 2, scale=1.5, shift=0.2))
    assert frechet_distance(a, b) == pytest.approx(by_sqrtm(a, b), rel=1e-9)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)


@pytest.mark.parametrize("n", [500, 20])
def test_a_set_is_at_no_distance_from_itself(n: int) -> None:
    """With fewer samples than dimensions too, where roots of a product go wrong."""
    a = statistics(1000 * gaussian(n, 64, 0))
    assert frechet_distance(a, a) < 1e-9 * float(a.cov.trace())
    shuffled = statistics(1000 * gaussian(n, 64, 0)[torch.randperm(n)])
    assert frechet_distance(a, shuffled) < 1e-9 * float(a.cov.trace())


def test_rank_deficient_sets_have_the_distance_of_their_factors() -> None:
    """tr (A B)^(1/2) is the nuclear norm of X Y^T / (n - 1) for centred features X, Y, whatever the rank."""
    x, y = gaussian(15, 64, 1).double(), gaussian(11, 64, 2).double()
    a, b = statistics(x), statistics(y)
    assert a.rank_deficient
    cx, cy = (x - x.mean(0)) / math.sqrt(14), (y - y.mean(0)) / math.sqrt(10)
    root = torch.linalg.svdvals(cx @ cy.T).sum()
    expected = (a.mean - b.mean).square().sum() + cx.square().sum() + cy.square().sum() - 2 * root
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-9)


def test_kernel_distance_by_its_definition() -> None:
    x, y = gaussian(9, 5, 0).double().numpy(), gaussian(9, 5, 1, shift=0.3).double().numpy()

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return (float(a @ b) / 5 + 1) ** 3

    pairs = [(i, j) for i in range(9) for j in range(9)]
    within = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs if i != j) / (9 * 8)
    expected = within - 2 * sum(kernel(x[i], y[j]) for i, j in pairs) / 81
    mean, std = kernel_distance(x, y, subsets=3, subset_size=9)
    assert mean == pytest.approx(expected, rel=1e-12)
    assert std == pytest.approx(0, abs=1e-14)


def test_kernel_distance_is_seeded_unbiased_and_sees_a_difference() -> None:
    x, y = gaussian(2000, 8, 0)[:1000], gaussian(2000, 8, 0)[1000:]
    options = {"subsets": 50, "subset_size": 100}
    same = kernel_distance(x, y, **options)
    assert same == kernel_distance(x, y, **options)
    assert same != kernel_distance(x, y, **options, seed=1)
    assert abs(same.mean) < same.std
    other = kernel_distance(x, y + 0.5, **options)
    assert other.mean > 3 * other.std


def test_precision_and_recall_of_clouds_made_by_hand() -> None:
    """Reference: points 0, 1, 2, 3 on a line. With k = 1 every ball has radius 1, and they cover -1 to 4."""
    reference = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    samples = torch.tensor([[-1.0], [3.5], [4.5], [20.0]])
    # balls of the samples: radii 4.5, 1, 1, 15.5 -> they cover -5.5 to 3.5, 2.5 to 4.5, 3.5 to 5.5, 4.5 to 35.5
    assert precision_recall(samples, reference, k=1) == (0.5, 1.0)
    far = samples + 100
    assert precision_recall(far, reference, k=1) == (0.0, 0.0)
    narrow = torch.tensor([[1.0], [1.1], [0.9], [1.05]])
    assert precision_recall(narrow, reference, k=1) == (1.0, 0.25)
    assert precision_recall(reference, reference, k=3) == (1.0, 1.0)


def test_precision_and_recall_with_copies_and_in_tiles(monkeypatch) -> None:
    """Copies of a point make balls of radius 0, in which the point still lies."""
    reference = gaussian(1, 32, 0).repeat(6, 1) * 100
    assert precision_recall(reference, reference) == (1.0, 1.0)
    assert precision_recall(reference + 1e-3, reference) == (0.0, 0.0)
    x, y = gaussian(60, 6, 1), gaussian(50, 6, 2)
    distance = torch.cdist(x.double(), y.double())
    radii = [torch.cdist(p.double(), p.double()).sort(1).values[:, 3] for p in (x, y)]
    inside = [distance <= radii[1], radii[0] >= distance.T]
    expected = [share.any(1).double().mean() for share in inside]
    whole = precision_recall(x, y)
    assert whole == tuple(map(float, expected))
    monkeypatch.setattr(module, "_DISTANCES", 130)
    assert precision_recall(x, y) == whole


def test_inception_score_of_known_classes() -> None:
    """Sure of one class each: as many as there are classes. Undecided or all alike: 1."""
    sure = 1e4 * torch.eye(5).repeat(8, 1)
    assert inception_score(sure, parts=1) == pytest.approx((5, 0))
    assert inception_score(torch.zeros(40, 5)) == pytest.approx((1, 0))
    assert inception_score(sure[:1].repeat(40, 1)) == pytest.approx((1, 0))
    # two samples of two classes, each with p and 1 - p: exp(log 2 - entropy)
    p = torch.tensor([0.9, 0.1], dtype=torch.float64)
    entropy = -float((p * p.log()).sum())
    assert inception_score(torch.stack([p, p.flip(0)]).log(), parts=1).mean == pytest.approx(2 / math.exp(entropy))


def test_inception_score_by_its_definition() -> None:
    logits = 3 * torch.randn(53, 7, generator=torch.Generator().manual_seed(0))
    found = inception_score(logits, parts=4, seed=5)
    p = scipy.special.softmax(logits.double().numpy(), axis=1)[np.random.default_rng(5).permutation(53)]
    parts = np.array_split(p, 4)
    values = [np.exp(scipy.special.rel_entr(part, part.mean(0)).sum(1).mean()) for part in parts]
    assert found == pytest.approx((np.mean(values), np.std(values)))
    assert found != inception_score(logits, parts=4, seed=6)
    with pytest.raises(ValueError, match="54 parts of 53 samples: every part needs one"):
        inception_score(logits, parts=54)


def test_what_is_wrong_is_said() -> None:
    x, y = gaussian(10, 4, 0), gaussian(10, 5, 0)
    with pytest.raises(ValueError, match="4 and of 5 dimensions: use one extractor"):
        frechet_distance(statistics(x), statistics(y))
    with pytest.raises(ValueError, match="use one extractor"):
        precision_recall(x, y)
    with pytest.raises(ValueError, match=r"subsets of 1000: from 2 to 10 rows"):
        kernel_distance(x, x)
    with pytest.raises(ValueError, match=r"subsets of 1: from 2 to 10 rows"):
        kernel_distance(x, x, subset_size=1)
    with pytest.raises(ValueError, match="subsets must be at least 1, got 0"):
        kernel_distance(x, x, subsets=0, subset_size=5)
    with pytest.raises(ValueError, match="with 0 neighbours"):
        precision_recall(x, x, k=0)
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        statistics(x[:1])
    with pytest.raises(ValueError, match="3 neighbours need more than 3 images on either side, got 3 samples and 10"):
        precision_recall(x[:3], x)
    bad = x.clone()
    bad[2, 1] = torch.nan
    for call in (lambda: statistics(bad), lambda: kernel_distance(bad, x), lambda: precision_recall(x, bad)):
        with pytest.raises(ValueError, match="1 of 10 rows hold NaN"):
            call()
    moments = Moments()
    moments.add(bad)
    with pytest.raises(ValueError, match="photos: some features are NaN"):
        moments.statistics("photos")
    broken = Statistics(10, torch.full((2,), torch.nan).double(), torch.eye(2).double())
    with pytest.raises(ValueError, match="NaN or infinity"):
        frechet_distance(broken, broken)


def test_exact_products_leave_the_settings_as_they_were() -> None:
    before = torch.backends.cudnn.allow_tf32
    with exact_float32():
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 == before


def test_a_covariance_of_full_rank_needs_one_image_more_than_dimensions() -> None:
    for count, deficient in ((11, True), (12, True), (13, False)):
        found = statistics(gaussian(count, 12, 0).double())
        assert found.rank_deficient is deficient
        assert (torch.linalg.matrix_rank(found.cov) < 12) == deficient


def test_no_distance_is_negative() -> None:
    for seed in range(20):
        same = statistics(gaussian(50, 8, seed, scale=100.0))
        assert 0 <= frechet_distance(same, same) < 1e-8


def test_the_spread_of_the_kernel_distance_is_that_of_its_subsets() -> None:
    x, y = gaussian(300, 6, 0), gaussian(300, 6, 1)
    few, many = (kernel_distance(x, y, subsets=n, subset_size=30).std for n in (25, 400))
    assert many == pytest.approx(few, rel=0.5)  # a standard error would be a quarter
    assert kernel_distance(x, y, subsets=1, subset_size=30).std == 0


def test_precision_and_recall_far_from_the_origin() -> None:
    x, y = gaussian(60, 5, 0).double(), gaussian(70, 5, 1, scale=1.3).double()
    assert precision_recall(x + 1e8, y + 1e8) == precision_recall(x, y)
    assert 0 < precision_recall(x, y).recall < 1
