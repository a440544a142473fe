import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.neighbors import KNeighborsClassifier

from residua.evaluate import CollapsedError, FeatureSet, few_shot_knn, knn, knn_by_layer
from residua.evaluate.knn import NEIGHBOURS, draw_shots, tile, top, top_similar


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


@pytest.mark.parametrize(
    ("n", "k"), [(2560, 5), (2577, 5), (2577, 1), (20_000, 20), (20_011, 200), (100, 5), (3, 5), (5, 5)]
)
def test_blockwise_selection_is_topk(n: int, k: int) -> None:
    x = torch.rand(33, n)
    x[:, -1] = 2  # the maximum sits in the remainder
    value, index = top(x, k)
    assert torch.equal(value, x.topk(min(k, n)).values)
    assert torch.equal(x.gather(1, index), value)


def test_selection_among_ties_and_with_all_of_the_best_in_one_block() -> None:
    x = torch.zeros(4, 5000)
    value, index = top(x, 10)
    assert not value.any()
    assert all(len(set(row)) == 10 for row in index.tolist())
    x[:, 64:84] = torch.arange(1.0, 21)
    assert top(x, 20)[1].sort().values.tolist() == [list(range(64, 84))] * 4


def test_the_usual_k_against_brute_force() -> None:
    train, test = blobs(1500, 0), blobs(120, 1)
    found = knn(train, test, k=NEIGHBOURS)
    assert {k: r.accuracy for k, r in found.items()} == {k: brute_force(train, test, k, 0.07) for k in NEIGHBOURS}


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


def test_every_layer_at_once() -> None:
    (x, y), (q, truth) = blobs(200, 0), blobs(80, 1)
    train, test = FeatureSet({0: x.flip(0), 3: x}, y), FeatureSet({0: q, 3: q}, truth)
    found = knn_by_layer(train, test, k=(1, 5))
    assert found == {i: knn(train.only(i), test.only(i), k=(1, 5)) for i in (0, 3)}
    assert found[0][5].accuracy < found[3][5].accuracy
    with pytest.raises(ValueError, match="layers"):
        knn_by_layer(train, test.only(3))


def test_few_shots_are_of_the_last_layer() -> None:
    (x, y), (q, truth) = blobs(200, 0), blobs(80, 1)
    train, test = FeatureSet({0: x.flip(0), 3: x}, y), FeatureSet({0: q, 3: q}, truth)
    found = few_shot_knn(train, test, draws=3)
    assert found.layer == 3
    assert found.accuracies == few_shot_knn((x, y), (q, truth), draws=3).accuracies


def test_half_precision_features_are_searched_in_float32() -> None:
    (x, y), (q, truth) = ((20_000 * x.half().div(x.abs().max()), y) for x, y in (blobs(2000, 0), blobs(500, 1)))
    found = knn((x, y), (q, truth), k=20)
    assert found.accuracy == brute_force((x, y), (q, truth), 20, 0.07)


def test_a_draw_takes_so_many_of_every_class_and_fewer_are_among_more() -> None:
    labels = torch.tensor([0] * 5 + [2] * 9 + [3] * 3)[torch.randperm(17)]
    for seed in range(20):
        rows = {n: draw_shots(labels, n, (7, seed)) for n in (1, 2, 3)}
        for n, own in rows.items():
            assert labels[own].bincount().tolist() == [n, 0, n, n]
            assert len(own.unique()) == len(own)
        assert set(rows[1].tolist()) < set(rows[2].tolist()) < set(rows[3].tolist())
    draws = torch.cat([draw_shots(labels, 1, (0, r)) for r in range(400)]).bincount(minlength=17)
    share = draws / draws.sum()
    expected = torch.tensor([1 / 3 / int((labels == c).sum()) for c in labels.tolist()])
    assert (share - expected).abs().max() < 0.04  # every image of a class has its chance


def test_few_shot_is_knn_on_the_drawn_images() -> None:
    (x, y), test = blobs(400, 0), blobs(150, 1)
    found = few_shot_knn((x, y), test, shots=4, draws=6, seed=11)
    expected = []
    for r in range(6):
        rows = draw_shots(y, 4, (11, r))
        expected.append(brute_force((x[rows], y[rows]), test, 4, 0.07))
    assert list(found.accuracies) == expected
    assert (found.shots, found.k, found.n_test, found.seed) == (4, 4, 150, 11)
    assert float(found) == found.mean == pytest.approx(np.mean(expected))
    assert found.std == pytest.approx(np.std(expected, ddof=1))
    low, high = stats.t.interval(0.95, 5, loc=np.mean(expected), scale=stats.sem(expected))
    assert found.ci95 == pytest.approx((high - low) / 2)
    assert found.to_dict()["ci95"] == found.ci95
    warm = few_shot_knn((x, y), test, shots=4, draws=1, k=30, temperature=2.0)
    rows = draw_shots(y, 4, (0, 0))
    assert warm.accuracies == (brute_force((x[rows], y[rows]), test, 30, 2.0),)
    assert warm.accuracies != few_shot_knn((x, y), test, shots=4, draws=1, k=30).accuracies


def test_few_shot_repeats_by_its_seed_and_gains_from_more_images() -> None:
    train, test = blobs(400, 0), blobs(150, 1)
    assert few_shot_knn(train, test, shots=2, draws=3) == few_shot_knn(train, test, shots=2, draws=3)
    longer = few_shot_knn(train, test, shots=2, draws=5).accuracies
    assert longer[:3] == few_shot_knn(train, test, shots=2, draws=3).accuracies
    assert longer != few_shot_knn(train, test, shots=2, draws=5, seed=1).accuracies
    assert few_shot_knn(train, test, shots=1).mean < few_shot_knn(train, test, shots=20).mean
    assert math.isnan(few_shot_knn(train, test, shots=1, draws=1).std)


def test_few_shot_wrong_inputs() -> None:
    x, test = torch.randn(13, 16), blobs(20, 1, classes=3)
    y = torch.tensor([0] * 6 + [1] * 5 + [2] * 2)
    with pytest.raises(ValueError, match=r"class 2 has only 2 .*1 of 3 classes.* at most 2"):
        few_shot_knn((x, y), test, shots=3)
    with pytest.raises(ValueError, match="only 6 training images"):
        few_shot_knn((x, y), test, shots=2, k=7)
    with pytest.raises(ValueError, match="at least one draw"):
        few_shot_knn((x, y), test, draws=0)
    with pytest.raises(ValueError, match="labels"):
        few_shot_knn((x, None), test)


def test_features_that_are_all_alike_are_refused() -> None:
    y = torch.arange(60) % 3
    with pytest.raises(CollapsedError, match="same way"):
        knn((torch.rand(60, 1) * torch.randn(1, 16), y), blobs(20, 1, classes=3), k=5)
    with pytest.raises(CollapsedError):
        few_shot_knn((torch.ones(60, 16), y), blobs(20, 1, classes=3), shots=2)


def test_tiles_suit_the_device() -> None:
    assert tile(torch.device("cpu")) == (256, 65_536)


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


@pytest.mark.parametrize("classes_first_to_last", [True, False])
def test_equally_similar_neighbours_are_not_all_of_one_class_where_images_are_sorted(
    classes_first_to_last: bool,
) -> None:
    y = torch.arange(2000) // 1000
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        told = torch.rand(2, 2000, generator=g) < 0.8
        x, q = (torch.where(right, y, 1 - y)[:, None] * 2.0 - 1 for right in told)
        order = torch.arange(2000) if classes_first_to_last else torch.arange(1999, -1, -1)
        expected = 100 * float(told[1].float().mean())
        assert float(knn((x[order], y[order]), (q, y), k=20)) == pytest.approx(expected)


def test_labels_may_be_any_whole_numbers() -> None:
    (x, y), (q, truth) = blobs(300, 0), blobs(100, 1)
    far = 10**12 * y + 7, 10**12 * truth + 7
    assert knn((x, far[0]), (q, far[1])) == knn((x, y), (q, truth))
    assert few_shot_knn((x, far[0]), (q, far[1]), draws=2) == few_shot_knn((x, y), (q, truth), draws=2)
    with pytest.raises(ValueError, match=r"class \d+7 has only|class 7 has only"):
        few_shot_knn((x, far[0]), (q, far[1]), shots=100)
    with pytest.raises(ValueError, match="train: labels must be whole numbers"):
        knn((x, y / 2), (q, truth))
    assert knn((x, y.double()), (q, truth)) == knn((x, y), (q, truth))
