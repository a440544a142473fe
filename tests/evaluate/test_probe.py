import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from residua.evaluate import CollapsedError, FeatureSet, linear_probe, probe
from residua.evaluate.heads import fit_adamw, logits
from residua.evaluate.probe import Head, choose, split
from residua.evaluate.protocols import Outcome, conclude, resolve_recipe, summarise

Pair = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Pair, Pair]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y))
    x, y = torch.from_numpy(x).float()[order], torch.from_numpy(y)[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def overlapping_blobs(n: int = 6000, classes: int = 8, d: int = 24) -> tuple[Pair, Pair]:
    means, mixing = torch.randn(classes, d), torch.randn(d, d)
    y = torch.randint(classes, (n,))
    x = (0.5 * means[y] + torch.randn(n, d)) @ mixing + 3
    return (x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])


def scikit_learn(train: Pair, test: Pair) -> float:
    scale = StandardScaler().fit(train[0].numpy())
    model = LogisticRegression(max_iter=2000).fit(scale.transform(train[0].numpy()), train[1].numpy())
    return 100 * float(model.score(scale.transform(test[0].numpy()), test[1].numpy()))


def with_views(data: Pair, noise: float = 0.0, views: int = 3) -> FeatureSet:
    x, y = data
    return FeatureSet({-1: x}, y, views={-1: x + noise * torch.randn(views, *x.shape)})


@pytest.mark.parametrize("make", [digits, overlapping_blobs])
def test_simple_is_within_half_a_point_of_scikit_learn(make) -> None:
    differences = []
    for _ in range(2):
        train, test = make()
        result = linear_probe(train, test)
        differences.append(result.accuracy - scikit_learn(train, test))
        assert 50 < result.accuracy < result.top5 <= 100
    assert np.mean(differences) == pytest.approx(0, abs=0.5)


@pytest.mark.parametrize("make", [digits, overlapping_blobs])
def test_lbfgs_is_scikit_learn_and_its_choice_of_penalty_no_worse(make) -> None:
    train, test = make()
    expected = scikit_learn(train, test)
    same = linear_probe(train, test, protocol="lbfgs", weight_decays=(1 / len(train[1]),))
    assert same.accuracy == pytest.approx(expected, abs=0.2)
    assert linear_probe(train, test, protocol="lbfgs").accuracy > expected - 0.5


def test_cached_learns_from_views_and_is_scored_on_the_centre() -> None:
    train, test = overlapping_blobs(2000)
    plain = linear_probe(with_views(train), test, protocol="cached")
    assert plain.accuracy == pytest.approx(scikit_learn(train, test), abs=1.5)
    assert (plain.epochs, plain.batch_size) == (200, 32)
    drowned = linear_probe(with_views(train, noise=300.0, views=9), test, protocol="cached", epochs=20)
    assert drowned.accuracy < plain.accuracy - 5


def test_the_right_layer_and_rate_are_chosen_and_every_layer_is_scored() -> None:
    (x, y), (q, truth) = overlapping_blobs(1500)
    train = FeatureSet({0: torch.randn(len(x), 24), 3: x, 5: torch.randn(len(x), 10)}, y)
    test = FeatureSet({0: torch.randn(len(q), 24), 3: q, 5: torch.randn(len(q), 10)}, truth)
    result = linear_probe(train, test, learning_rates=(1e-6, 1e-2), epochs=30)
    assert (result.best.layer, result.best.learning_rate) == (3, 1e-2)
    assert set(result.by_layer) == {0, 3, 5}
    assert result.by_layer[3] == result.accuracy > 2 * max(result.by_layer[0], result.by_layer[5])
    assert len(result.grid) == 6
    assert result.best.held_out == max(head.held_out for head in result.grid)


def test_ties_within_the_standard_error_go_to_the_lower_loss() -> None:
    heads = [Head(0, 1.0, 0.0, 80.0, 0.9), Head(0, 2.0, 0.0, 79.0, 0.5), Head(0, 3.0, 0.0, 60.0, 0.1)]
    assert choose(heads, 100) is heads[1]  # standard error 4 points
    assert choose(heads, 10_000) is heads[0]  # 0.4 points


def test_what_is_quoted_goes_by_held_out_images() -> None:
    """Also where another read-out of the layer, or another layer, does better on the test images."""
    columns = [("tokens", 3), ("cls", 3), ("tokens", 5)]
    held = Outcome([[60.0], [80.0], [50.0]], [[math.nan]] * 3, [[0.9], [0.5], [1.0]], 1000)
    test = Outcome([[70.0], [40.0], [90.0]], [[math.nan]] * 3, [[0.5], [0.5], [0.1]], 1000)
    grid, best, chosen = conclude(columns, [(0.1, 0.0)], held)
    shared = {"protocol": "simple", "epochs": 1, "batch_size": 1, "holdout": 0.1, "seed": 0, "n_train": 10_000}
    result = summarise(best, chosen, grid, held, test, **shared)
    assert (result.accuracy, result.readout, result.best.layer) == (40.0, "cls", 3)
    assert result.by_layer == {3: 40.0, 5: 90.0}
    diverged = replace(test, loss=[[0.5], [math.nan], [0.1]])
    with pytest.raises(ValueError, match=r"layer 3 diverged at learning rate 0\.1"):
        summarise(best, chosen, grid, held, diverged, **shared)


def test_five_guesses_say_something_from_six_classes_on() -> None:
    sums = torch.tensor([[[3.0]], [[9.0]], [[20.0]]])
    assert math.isnan(Outcome.of(sums, 10, classes=5).top5[0][0])
    assert Outcome.of(sums, 10, classes=6).top5 == [[pytest.approx(90)]]


@pytest.mark.parametrize("protocol", ["simple", "lbfgs"])
def test_the_test_set_chooses_nothing(protocol: str) -> None:
    (x, y), (q, truth) = overlapping_blobs(800)
    train = FeatureSet({0: x[:, :20], 1: x}, y)
    options = {"protocol": protocol, "weight_decays": (1e-4, 1e-1)}
    if protocol == "simple":
        options["epochs"] = 10
    honest = linear_probe(train, FeatureSet({0: q[:, :20], 1: q}, truth), **options)
    shuffled = truth[torch.randperm(len(truth))]
    other = linear_probe(train, FeatureSet({0: -q[:, :20], 1: q * 7}, shuffled), **options)
    assert (honest.best, honest.grid) == (other.best, other.grid)
    assert honest.accuracy != other.accuracy


@pytest.mark.parametrize(
    ("protocol", "epochs", "batch_size", "warmup_epochs", "rate"),
    [("simple", 200, 1024, 0, 1e-2), ("cached", 200, 5120, 20, 1e-2), ("mae", 90, 16384, 10, 0.1)],
)
def test_protocols_are_those_of_the_papers(protocol, epochs, batch_size, warmup_epochs, rate) -> None:
    recipe = resolve_recipe(protocol, 1_281_167)
    assert (recipe.epochs, recipe.batch_size) == (epochs, batch_size)
    assert recipe.warmup * epochs == pytest.approx(warmup_epochs)
    assert rate in recipe.learning_rates
    assert recipe.weight_decays == (0.0,)
    assert [resolve_recipe(protocol, n).batch_size for n in (100, 40_000)] == [32, 800]


def test_candidates_learn_from_what_the_seed_keeps_and_are_judged_on_the_rest() -> None:
    """By hand: the split, the standardised views, the heads with the protocol's warm-up and the seed's batches."""
    (x, y), (q, truth) = overlapping_blobs(400)
    train, rates = with_views((x, y), noise=2.0), (1e-3, 1e-1)
    options = {"epochs": 3, "batch_size": 32, "seed": 7}
    result = linear_probe(train, (q, truth), protocol="cached", holdout=0.3, learning_rates=rates, **options)
    views = (torch.cat([x[None], train.views[-1]]) - x.mean(0)) / x.std(0, correction=0)
    kept, held = split(y, 0.3, seed=7)
    lr = torch.tensor([rates])
    heads = fit_adamw(views[None, :, kept], y[kept], 8, lr, 0 * lr, warmup=0.1, **options)
    scores = logits(heads, views[:1, held])[0]
    for r, head in enumerate(result.grid):
        assert head.held_out_loss == pytest.approx(float(F.cross_entropy(scores[:, r], y[held])), rel=1e-4)
        assert head.held_out == pytest.approx(100 * float((scores[:, r].argmax(1) == y[held]).float().mean()))
    best = torch.tensor([[result.best.learning_rate]])
    heads = fit_adamw(views[None], y, 8, best, 0 * best, warmup=0.1, **options)
    guess = logits(heads, ((q - x.mean(0)) / x.std(0, correction=0))[None])[0, :, 0].argmax(1)
    assert result.accuracy == pytest.approx(100 * float((guess == truth).float().mean()), abs=0.51)


def test_many_test_images_count_alike() -> None:
    (x, y), (q, truth) = overlapping_blobs(10_000)
    parts = [slice(0, 2500), slice(2500, 5000), slice(0, 5000)]
    options = {"protocol": "lbfgs", "weight_decays": (1e-2,)}
    first, second, whole = (linear_probe((x[:200], y[:200]), (q[part], truth[part]), **options) for part in parts)
    assert whole.accuracy == pytest.approx((first.accuracy + second.accuracy) / 2)
    assert whole.top5 == pytest.approx((first.top5 + second.top5) / 2)


def test_one_head_among_many_is_the_head_alone() -> None:
    (x, y), test = overlapping_blobs(800)
    alone = linear_probe((x, y), test, learning_rates=(1e-2,), epochs=10)
    assert alone.grid == []
    layers = FeatureSet({0: torch.randn_like(x), 1: x}, y)
    both = linear_probe(
        layers,
        FeatureSet({0: torch.randn_like(test[0]), 1: test[0]}, test[1]),
        learning_rates=(1e-2,),
        epochs=10,
    )
    assert both.by_layer[1] == pytest.approx(alone.accuracy, abs=0.3)


def test_scale_and_offset_of_features_do_not_matter() -> None:
    (x, y), (q, truth) = overlapping_blobs(800)
    one = linear_probe((x, y), (q, truth), epochs=5)
    far = linear_probe((1e3 * x + 50, y), (1e3 * q + 50, truth), epochs=5)
    assert far.accuracy == pytest.approx(one.accuracy, abs=0.6)
    constant = torch.full((len(x), 2), 1e4)
    padded = linear_probe(
        (torch.cat([x, constant], 1), y), (torch.cat([q, constant[: len(q)] + 1], 1), truth), epochs=5
    )
    assert padded.accuracy == pytest.approx(one.accuracy, abs=0.3)


def test_small_deviations_count_and_those_of_rounding_do_not(monkeypatch) -> None:
    x = torch.randn(1000, 4) * torch.tensor([1.0, 1e-3, 1e-3, 0.0]) + torch.tensor([0.0, 0.0, 1e4, 3.0])
    mean, std = probe.moments(x, x.device, "")
    torch.testing.assert_close(mean, x.double().mean(0).float())
    torch.testing.assert_close(std[:2], x[:, :2].std(0, correction=0))
    assert std[2:].tolist() == [math.inf, math.inf]
    monkeypatch.setattr(probe, "_CHUNK", 300)  # four parts, the last of them smaller
    for whole, parts in zip((mean, std), probe.moments(x, x.device, "")):
        torch.testing.assert_close(whole, parts)
    (x, y), (q, truth) = overlapping_blobs(800)
    alone = linear_probe((x, y), (q, truth), protocol="lbfgs").accuracy
    loud = [torch.cat([1e-3 * features, torch.randn(len(features), 1)], 1) for features in (x, q)]
    assert linear_probe((loud[0], y), (loud[1], truth), protocol="lbfgs").accuracy == pytest.approx(alone, abs=5)


def test_is_repeatable_and_leaves_the_random_state_alone() -> None:
    train, test = overlapping_blobs(600)
    state = torch.get_rng_state()
    assert linear_probe(train, test, epochs=3, seed=1) == linear_probe(train, test, epochs=3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_split_takes_its_share_of_every_class() -> None:
    labels = torch.tensor([0] * 500 + [1] * 200 + [2] * 30)[torch.randperm(730)]
    kept, held = split(labels, 0.1, seed=4)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(730))
    np.testing.assert_allclose(labels[held].bincount().numpy(), [50, 20, 3], atol=1)
    assert len(held) == pytest.approx(73, abs=1)
    assert not torch.equal(split(labels, 0.1, seed=5)[1], held)
    assert len(split(labels[:4], 0.1)[1]) == 1
    assert len(set(split(torch.zeros(500), 0.1)[1].diff().tolist())) > 5  # drawn, not every tenth


def test_read_outs_are_candidates_like_layers() -> None:
    (x, y), (q, truth) = overlapping_blobs(1000)

    def features(good: torch.Tensor, labels: torch.Tensor) -> FeatureSet:
        ids = list(map(str, range(len(labels))))
        noise = {i: torch.randn(len(labels), 24) for i in (0, 1)}
        other = FeatureSet({0: torch.randn(len(labels), 24), 1: good}, labels, ids, "cls")
        return FeatureSet(noise, labels, ids, "tokens", others={"cls": other})

    result = linear_probe(features(x, y), features(q, truth), epochs=10, weight_decays=(0.0, 0.1))
    assert len(result.grid) == 2 * 2 * 2 * 2
    assert (result.best.readout, result.best.layer, result.readout) == ("cls", 1, "cls")
    assert {(t.readout, t.layer) for t in result.tested} == {(r, i) for r in ("tokens", "cls") for i in (0, 1)}
    best = next(t for t in result.tested if (t.readout, t.layer) == ("cls", 1))
    assert best.accuracy == result.accuracy == result.by_layer[1]
    plain = result.to_dict()
    assert len(plain["grid"]) == 16
    assert {"layer", "readout", "learning_rate", "weight_decay", "held_out", "held_out_top5"} <= set(plain["grid"][0])


def test_views_and_test_images_of_every_read_out_are_its_own() -> None:
    (x, y), (q, truth) = overlapping_blobs(1000)

    def features(good: torch.Tensor, labels: torch.Tensor) -> FeatureSet:
        """Two read-outs, of which the second tells the classes, in all views."""
        ids, noise = list(map(str, range(len(labels)))), torch.randn(2, len(labels), 24)
        other = FeatureSet({0: good}, labels, ids, "cls", views={0: good.repeat(3, 1, 1)})
        return FeatureSet(
            {0: noise[0]}, labels, ids, "tokens", views={0: noise[1:].repeat(3, 1, 1)}, others={"cls": other}
        )

    train, test = features(x, y), features(q, truth)
    options = {"protocol": "cached", "epochs": 10, "learning_rates": (1e-2,)}
    tested = {t.readout: t.accuracy for t in linear_probe(train, test, **options).tested}
    alone = linear_probe(train.of("cls"), test.of("cls"), **options).accuracy
    assert tested["cls"] == pytest.approx(alone, abs=0.5)
    assert tested["tokens"] < 25 < 40 < tested["cls"]


def test_top5_counts_the_truth_among_five_and_means_nothing_for_five_classes() -> None:
    (x, y), (q, truth) = overlapping_blobs(1000)
    result = linear_probe((x, y), (q, truth), protocol="lbfgs", weight_decays=(1e-3,))
    scale = StandardScaler().fit(x.numpy())
    other = LogisticRegression(C=1 / (len(y) * 1e-3), max_iter=2000).fit(scale.transform(x.numpy()), y.numpy())
    best = other.decision_function(scale.transform(q.numpy())).argsort(1)[:, -5:]
    assert result.top5 == pytest.approx(100 * np.mean((best == truth.numpy()[:, None]).any(1)), abs=0.5)
    few = linear_probe((x, y % 5), (q, truth % 5), protocol="lbfgs", weight_decays=(1e-3,))
    assert math.isnan(few.top5)


def test_the_interval_is_wilsons() -> None:
    train, test = overlapping_blobs(600)
    result = linear_probe(train, test, protocol="lbfgs")
    hits = round(result.accuracy * len(test[1]) / 100)
    expected = binomtest(hits, len(test[1])).proportion_ci(0.95, method="wilson")
    assert result.interval == pytest.approx((100 * expected.low, 100 * expected.high))


def test_half_precision_finds_the_same() -> None:
    train, test = overlapping_blobs(3000)
    full, half = (linear_probe(train, test, epochs=10, precision=p) for p in ("float32", "half"))
    assert (full.precision, half.precision) == ("float32", "half")
    assert half.accuracy == pytest.approx(full.accuracy, abs=0.4)
    assert linear_probe(train, test, epochs=1).precision == "float32"
    with pytest.raises(ValueError, match="half precision"):
        linear_probe(train, test, protocol="lbfgs", precision="half")
    with pytest.raises(ValueError, match="precision must be"):
        linear_probe(train, test, precision="bf16")  # type: ignore[arg-type]


def test_the_only_image_of_a_class_is_learnt_from() -> None:
    labels = torch.tensor([0] * 50 + [1] * 50 + [2])
    for seed in range(20):
        kept, held = split(labels, 0.3, seed)
        assert 100 in kept
        assert len(kept) + len(held) == 101
    with pytest.raises(ValueError, match="single image"):
        split(torch.arange(5), 0.2)
    (x, y), test = overlapping_blobs(200)
    y[0] = 8
    assert linear_probe((x, y), test, protocol="lbfgs").accuracy > 30


def test_features_without_information_are_an_error_not_a_score() -> None:
    (x, y), test = overlapping_blobs(100)
    with pytest.raises(CollapsedError, match="all 50 feature vectors are the same"):
        linear_probe((torch.full_like(x, 3.0), y), test)
    with pytest.raises(ValueError, match=r"1 of 50 rows hold NaN"):
        linear_probe((x.index_fill(0, torch.tensor([4]), math.nan), y), test)
    views = FeatureSet({-1: x}, y, views={-1: torch.full((3, *x.shape), math.inf)})
    with pytest.raises(ValueError, match="random views"):
        linear_probe(views, test, protocol="cached", epochs=1)


def test_heads_that_diverged_are_never_chosen() -> None:
    heads = [Head(0, 1.0, 0.0, 99.0, math.nan), Head(0, 2.0, 0.0, 50.0, 1.0)]
    assert choose(heads, 100) is heads[1]
    with pytest.raises(ValueError, match="diverged at every learning rate"):
        choose(heads[:1], 100)


def test_wrong_inputs() -> None:
    (x, y), test = overlapping_blobs(100)
    with pytest.raises(ValueError, match="unknown probe protocol 'svm'; there are simple, cached, lbfgs, mae"):
        linear_probe((x, y), test, protocol="svm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mae_probe"):
        linear_probe((x, y), test, protocol="mae")
    with pytest.raises(ValueError, match="views=3"):
        linear_probe((x, y), test, protocol="cached")
    with pytest.raises(ValueError, match="do not apply"):
        linear_probe((x, y), test, protocol="lbfgs", epochs=3)
    with pytest.raises(ValueError, match="labels"):
        linear_probe((x, None), test)
    with pytest.raises(ValueError, match="two classes"):
        linear_probe((x, 0 * y), test)
    with pytest.raises(ValueError, match="dimensions"):
        linear_probe((x[:, :3], y), test)
    with pytest.raises(ValueError, match="layers"):
        linear_probe(FeatureSet({1: x}, y), FeatureSet({2: test[0]}, test[1]))
    with pytest.raises(ValueError, match="holdout"):
        linear_probe((x, y), test, holdout=1.0)
    with pytest.raises(ValueError, match="positive"):
        linear_probe((x, y), test, learning_rates=(0.0,))
    with pytest.raises(ValueError, match="negative"):
        linear_probe((x, y), test, weight_decays=(-1.0,))


@pytest.mark.parametrize("protocol", ["lbfgs", "simple"])
def test_classes_are_those_that_occur_whatever_their_labels(protocol: str) -> None:
    (x, y), (q, truth) = overlapping_blobs(400, classes=3)
    options = {"protocol": protocol, "epochs": None if protocol == "lbfgs" else 3}
    found = [linear_probe((x, s * y), (q, s * truth), **options) for s in (1, 1000)]
    assert found[0].accuracy == found[1].accuracy
    assert all(math.isnan(result.top5) for result in found)  # five guesses among three classes are always right


@pytest.mark.parametrize("protocol", ["simple", "cached", "lbfgs"])
def test_layers_that_do_not_fit_into_memory_together_give_the_same_scores(protocol: str, monkeypatch) -> None:
    (x, y), (x_test, y_test) = digits()
    scale = {0: 64, 1: 40, 2: 24}  # of differing width

    def features(x: torch.Tensor, y: torch.Tensor) -> FeatureSet:
        own = {i: x[:, :d].clone() for i, d in scale.items()}
        return FeatureSet(own, y, views={i: z[None].repeat(3, 1, 1) for i, z in own.items()})

    train, test = features(x, y), features(x_test, y_test)
    largest = []
    real = probe._prepare

    def prepare(*args):
        made = real(*args)
        largest.append(len(made[0]))
        return made

    monkeypatch.setattr(probe, "_prepare", prepare)
    options = {"protocol": protocol} | ({} if protocol == "lbfgs" else {"epochs": 3})
    whole = linear_probe(train, test, **options)
    assert largest == ([1, 1, 1] if protocol == "lbfgs" else [3]), "the optimum is sought layer by layer"
    largest.clear()
    views = 4 if protocol == "cached" else 1
    one = 4 * (65 * views * len(y) + 64 * len(y_test))
    monkeypatch.setattr(probe, "free_memory", lambda device: 2 * 2.5 * one)  # half of it may hold two layers
    parts = linear_probe(train, test, **options)
    assert largest == ([1, 1, 1] if protocol == "lbfgs" else [2, 1])
    assert parts.by_layer == pytest.approx(whole.by_layer, abs=0.2)
    assert [(h.layer, h.learning_rate, h.weight_decay) for h in parts.grid] == [
        (h.layer, h.learning_rate, h.weight_decay) for h in whole.grid
    ]
    for ours, theirs in zip(parts.grid, whole.grid):
        assert ours.held_out_loss == pytest.approx(theirs.held_out_loss, rel=1e-4)
    assert parts.best.layer == whole.best.layer


def test_a_collapsed_layer_is_told_before_any_is_trained(monkeypatch) -> None:
    (x, y), (x_test, y_test) = digits()
    sides = [FeatureSet({0: a, 1: torch.ones_like(a)}, b) for a, b in ((x, y), (x_test, y_test))]
    monkeypatch.setattr(probe, "_fit", lambda *args: pytest.fail("trained"))
    monkeypatch.setattr(probe, "free_memory", lambda device: 0)
    with pytest.raises(CollapsedError):
        linear_probe(*sides)
