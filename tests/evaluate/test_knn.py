import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from residua.evaluate import FeatureSet, knn
from residua.evaluate.knn import _top, top_similar


def blobs(n: int, seed: int, classes: int = 10, d: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    means = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    return means[y] + 1.5 * torch.randn(n, d, generator=g), y


def brute_force(train, test, k: int, temperature: float) -> float:
    (x, y), (q, truth) = ((np.asarray(a, np.float64), np.asarray(b)) for a, b in (train, test))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    hits = 0
    for row, t in zip(q, truth):
        similarity = x @ row
        votes = np.zeros(y.max() + 1)
        for i in np.argsort(-similarity)[:k]:
            votes[y[i]] += np.exp(similarity[i] / temperature)
        hits += votes.argmax() == t
    return 100 * hits / len(q)


@pytest.mark.parametrize("k", [1, 7, 20])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_equals_brute_force_in_float64(k: int, temperature: float) -> None:
    train, test = blobs(700, 0), blobs(301, 1)
    assert float(knn(train, test, k=k, temperature=temperature)) == brute_force(train, test, k, temperature)


def test_equals_scikit_learn_where_rows_are_long_enough_for_blocks() -> None:
    train, test = blobs(6000, 0), blobs(500, 1)

    def weigh(distance):
        return np.exp((1 - distance) / 0.07)

    other = KNeighborsClassifier(20, metric="cosine", algorithm="brute", weights=weigh)
    other.fit(train[0].numpy(), train[1].numpy())
    expected = 100 * other.score(test[0].numpy(), test[1].numpy())
    assert knn(train, test, k=20, temperature=0.07).accuracy == pytest.approx(expected, abs=0.21)
    assert 30 < expected < 95


@pytest.mark.parametrize(("n", "k"), [(64 * 40, 5), (64 * 40 + 17, 5), (64 * 40 + 17, 1), (100, 5), (3, 5)])
def test_blockwise_selection_is_topk(n: int, k: int) -> None:
    x = torch.rand(33, n)
    x[:, -1] = 2  # the maximum sits in the remainder
    value, index = _top(x, k)
    assert torch.equal(value, x.topk(min(k, n)).values)
    assert torch.equal(x.gather(1, index), value)


def test_the_bank_may_come_in_pieces() -> None:
    queries, bank = torch.randn(20, 8), torch.randn(500, 8)
    value, index = top_similar(queries, bank, 30, chunk=70)
    expected = (queries @ bank.T).topk(30)
    torch.testing.assert_close(value, expected.values)
    assert torch.equal(index, expected.indices)


def test_chunks_do_not_change_the_score() -> None:
    train, test = blobs(300, 0), blobs(100, 1)
    assert knn(train, test, k=5, chunk=7) == knn(train, test, k=5, chunk=1000)


def test_several_k_are_the_same_as_one_by_one() -> None:
    train, test = blobs(300, 0), blobs(100, 1)
    together = knn(train, test, k=(1, 10, 50))
    assert together == {k: knn(train, test, k=k) for k in (1, 10, 50)}
    assert len({r.accuracy for r in together.values()}) > 1


def test_only_directions_count_and_small_temperatures_do_not_overflow() -> None:
    (x, y), test = blobs(300, 0), blobs(100, 1)
    scale = torch.rand(300, 1) * 100 + 0.01
    assert knn((x * scale, y), test) == knn((x, y), test)
    assert knn((x, y), test, k=10, temperature=1e-3).accuracy == knn((x, y), test, k=1).accuracy


def test_the_result_carries_its_settings() -> None:
    train, test = blobs(60, 0), blobs(30, 1)
    result = knn(FeatureSet({4: train[0]}, train[1], ids=["?"] * 60), FeatureSet({4: test[0]}, test[1]), k=3)
    assert (result.k, result.temperature, result.n_train, result.n_test) == (3, 0.07, 60, 30)
    assert (result.layer, result.readout) == (4, "tokens")
    assert result.to_dict()["accuracy"] == float(result)


def test_reduced_precision_is_switched_off_and_on_again() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        knn(blobs(60, 0), blobs(30, 1), k=3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_wrong_inputs() -> None:
    (x, y), test = blobs(50, 0), blobs(20, 1)
    with pytest.raises(ValueError, match="only 50 training images"):
        knn((x, y), test, k=51)
    with pytest.raises(ValueError, match="at least 1"):
        knn((x, y), test, k=0)
    with pytest.raises(ValueError, match="labels"):
        knn((x, None), test)
    with pytest.raises(ValueError, match="50 rows of features but 49 labels"):
        knn((x, y[:-1]), test)
    with pytest.raises(ValueError, match="8 dimensions"):
        knn((x[:, :8], y), test)
    with pytest.raises(ValueError, match="NaN"):
        knn((torch.where(x > 2, torch.nan, x), y), test)
    with pytest.raises(ValueError, match="temperature"):
        knn((x, y), test, temperature=0.0)
    with pytest.raises(ValueError, match="class indices"):
        knn((x, y - 1), test)
    with pytest.raises(TypeError, match="pair"):
        knn(x, test)  # type: ignore[call-overload]
