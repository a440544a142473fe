import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from residua.data import Feed, Splits
from residua.evaluate import (
    entropy_rank,
    extract,
    few_shot_knn,
    knn,
    layer_geometry,
    linear_probe,
    model_lidar,
    pixel_features,
    rankme,
    spectrum,
)
from residua.evaluate.features import preprocessing_of
from residua.evaluate.featureset import FeatureSet
from residua.evaluate.finetune import labelled
from residua.evaluate.geometry import UNITS
from residua.evaluate.protocols import split
from residua.evaluate.reading import PixelReader
from residua.evaluate.report import Report
from residua.evaluate.scoring import add_knn
from residua.evaluate.suite import evaluate, probe_features, untrained
from residua.nn import MAE, ViT

FAST = {"probe": None, "rank": False, "neighbors": 0}


def test_every_score_is_the_one_of_its_own_function_beside_both_baselines(mae: MAE, digits: Splits) -> None:
    report = evaluate(mae, digits, probe="lbfgs", limit=400, seed=1)
    feats = extract(mae, digits, limit=400, seed=1)
    assert feats.test is not None
    assert report.value("kNN") == knn(feats.train, feats.test, k=20, temperature=0.07).accuracy
    probe = linear_probe(feats.train, feats.test, protocol="lbfgs", seed=1)
    assert report.value("linear probe") == probe.accuracy
    assert report.value("entropy rank") == entropy_rank(feats.test.last)
    assert report.value("RankMe") == rankme(feats.test.last)
    random = extract(untrained(mae.encoder, seed=1), digits, limit=400, seed=1)
    assert random.test is not None
    assert report.value("kNN", "random init") == knn(random.train, random.test).accuracy
    pixels = pixel_features(digits, limit=400, seed=1)
    assert pixels.test is not None
    assert report.value("kNN", "pixels") == pytest.approx(knn(pixels.train, pixels.test).accuracy, abs=0.6)
    assert report.value("kNN", "pixels") > 80


def test_geometry_and_few_shots_are_those_of_their_own_functions(mae: MAE, digits: Splits) -> None:
    report = evaluate(mae, digits, layers="all", geometry=True, shots=(2, 5), limit=300, seed=1, **FAST)
    feats = extract(mae, digits, layers="all", limit=300, seed=1)
    assert feats.test is not None
    views = model_lidar(mae, digits, layers="all", images=300, seed=1)
    for layer in (0, 1):
        expected = layer_geometry(feats.test, layer) | {"LiDAR": views[layer]}
        assert set(expected) == set(UNITS)
        for metric, value in expected.items():
            assert report.value(metric, layer=layer) == pytest.approx(value, rel=1e-6, nan_ok=True), metric
        for shots in (2, 5):
            own = few_shot_knn(feats.train.only(layer), feats.test.only(layer), shots=shots, seed=1)
            assert report.value("few-shot kNN", layer=layer, shots=shots) == own.mean
        (row,) = [row for row in report.spectra if row["layer"] == layer]
        assert row["values"] == spectrum(feats.test.layer(layer)).tolist()
    assert math.isfinite(report.value("LiDAR", "random init"))
    table = report.geometry_table()
    assert table is not None
    assert {"LiDAR", "silhouette", "alpha-ReQ"} <= {str(column.header) for column in table.columns}
    again = type(report).from_dict(json.loads(report.to_json()))
    assert again.spectra == report.spectra
    assert evaluate(mae, digits, limit=100, **FAST).geometry_table() is None


def test_settings_reach_what_they_are_for(vit: ViT, noise: Splits) -> None:
    """Temperature, seed, size of the pixels; and intervals are over the test images, which are fewer."""
    options = {"k": 40, "temperature": 0.5, "shots": (9,), "probe": "simple", "epochs": 2, "pixel_size": 4, "seed": 3}
    report, feats = evaluate(vit, noise, neighbors=0, **options), extract(vit, noise, seed=3)
    assert feats.test is not None
    sharp, flat = (knn(*feats.splits.values(), k=40, temperature=t).accuracy for t in (0.07, 0.5))
    assert report.value("kNN") == flat != sharp
    sharp, flat = (few_shot_knn(*feats.splits.values(), shots=9, temperature=t, seed=3).mean for t in (0.07, 0.5))
    assert report.value("few-shot kNN") == flat != sharp
    probe = linear_probe(feats.train, feats.test, epochs=2, seed=3)
    assert [head["held_out_loss"] for head in report.probes["model"]["grid"]] == [h.held_out_loss for h in probe.grid]
    batch = Feed(noise.test, "cpu", img_size=16).gather(torch.arange(21))
    seen = preprocessing_of(vit, noise.train).view(batch)
    assert report.value("RankMe", "pixels") == pytest.approx(rankme(PixelReader(4)(seen)[-1]), rel=1e-4)
    (score,) = [s for s in report.scores if (s.metric, s.subject) == ("kNN", "model")]
    expected = binomtest(round(21 * score.value / 100), 21).proportion_ci(0.95, method="wilson")
    assert score.settings["interval"] == pytest.approx([100 * expected.low, 100 * expected.high])


def test_layers_and_several_k(mae: MAE, digits: Splits) -> None:
    report = evaluate(mae, digits, layers="all", k=(1, 5), limit=100, **FAST)
    feats = extract(mae, digits, layers="all", limit=100)
    assert feats.test is not None
    for layer in (0, 1):
        own = knn(feats.train.only(layer), feats.test.only(layer), k=(1, 5))
        assert {k: report.value("kNN", layer=layer, k=k) for k in (1, 5)} == {k: r.accuracy for k, r in own.items()}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"k": (5, -1)}, "k must be at least 1"),
        ({"k": ()}, "k must be at least 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"shots": (1, 0)}, "at least one image a class"),
        ({"shots": (17,)}, "class 2 has only 16 training images; ask for at most 16"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_images_are_read(
    vit: ViT, noise: Splits, monkeypatch, options: dict, problem: str
) -> None:
    def read(*_, **__):
        raise AssertionError("images were read")

    monkeypatch.setattr("residua.evaluate.suite.read_features", read)
    with pytest.raises(ValueError, match=problem):
        evaluate(vit, noise, **options)


def test_shots_are_counted_where_a_fifth_is_held_out_and_not_without_labels(vit: ViT, noise: Splits) -> None:
    alone = Splits("noise", noise.train)
    assert evaluate(vit, alone, shots=(13,), k=5, baselines=False, **FAST).value("few-shot kNN") >= 0
    with pytest.raises(ValueError, match="only 13 training images"):
        evaluate(vit, alone, shots=(14,), **FAST)
    with pytest.raises(ValueError, match="ask for at most"):
        evaluate(vit, noise, shots=(10,), limit=20, **FAST)
    noise.train.labels = None
    assert not evaluate(vit, alone, knn=False, k=(), shots=(100,), **FAST).scores


def test_the_untrained_encoder_is_random_not_an_identity_and_repeatable(mae: MAE) -> None:
    assert not mae.encoder.blocks[0].mlp.fc2.weight.any()
    state = torch.get_rng_state()
    twin = untrained(mae.encoder, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert twin.blocks[0].mlp.fc2.weight.any()
    assert twin.shortcut.alpha.tolist() == mae.encoder.shortcut.alpha.tolist()
    again, other = untrained(mae.encoder, seed=3), untrained(mae.encoder, seed=4)
    weight = "blocks.1.attn.qkv.weight"
    assert torch.equal(twin.state_dict()[weight], again.state_dict()[weight])
    assert not torch.equal(twin.state_dict()[weight], other.state_dict()[weight])


def test_evaluation_leaves_training_alone(mae: MAE, digits: Splits) -> None:
    mae.train()
    state = torch.get_rng_state()
    evaluate(mae, digits, probe="cached", epochs=2, limit=60)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in mae.modules())


def test_without_labels_there_are_ranks_and_neighbours(vit: ViT, noise: Splits) -> None:
    noise.train.labels = None
    report = evaluate(vit, Splits("noise", noise.train), neighbors=3)
    assert {s.metric for s in report.scores} == {"entropy rank", "RankMe"}
    assert (report.n_train, report.n_test, report.test) == (50, 0, "none")
    stored = json.loads(report.to_json())["named_neighbors"]
    assert len(stored) == 3
    assert all(len(row["neighbors"]) == 3 and row["query"] not in row["neighbors"] for row in stored)


def test_without_a_test_split_part_of_the_training_images_is_one(mae: MAE, digits: Splits) -> None:
    report = evaluate(mae, Splits("digits", digits.train), limit=250, **FAST)
    assert (report.n_train, report.n_test) == (250, 250)
    assert report.test == "20% of the training images"


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"limit": 9}])
def test_what_fine_tuning_learnt_from_is_never_the_test_set(vit: ViT, noise: Splits, options: dict) -> None:
    alone = Splits("noise", noise.train)
    report = evaluate(vit, alone, baselines=False, k=1, **FAST | {"neighbors": 2} | options)
    learnt = labelled(alone).train
    assert len(report.neighbor_ids) == report.n_test
    assert not {learnt.identify(i) for i in range(len(learnt))} & set(report.neighbor_ids)


def test_one_image_a_class_leaves_nothing_to_test_on(vit: ViT, noise: Splits) -> None:
    noise.train.labels = np.arange(len(noise.train))
    report = evaluate(vit, Splits("noise", noise.train), baselines=False, neighbors=0)
    assert {s.metric for s in report.scores} == {"entropy rank", "RankMe"}
    assert report.test == "none"


def test_test_images_that_are_none_or_unlabelled_are_replaced(vit: ViT, noise: Splits) -> None:
    assert noise.test is not None
    nothing = noise.test.subset([])
    noise.test.labels = None
    for test in (nothing, noise.test):
        report = evaluate(vit, Splits("noise", noise.train, test), probe="mae", epochs=1, baselines=False, k=1)
        assert (report.n_train, report.n_test) == (40, 10)
        assert report.test == "20% of the training images"


def test_few_images_mean_few_neighbours_and_one_class_no_accuracy(mae: MAE, digits: Splits) -> None:
    report = evaluate(mae, digits, limit=12, **FAST)
    assert {s.settings["k"] for s in report.scores} == {12}
    alike = digits.train.subset(np.flatnonzero(digits.train.labels == 3)[:20])
    assert {s.metric for s in evaluate(mae, Splits("threes", alike)).scores} == {"entropy rank", "RankMe"}


def test_collapse_is_reported_not_raised(mae: MAE, digits: Splits) -> None:
    for p in mae.parameters():
        torch.nn.init.zeros_(p)
    mae.encoder.pos_embed.fill_(1.0)
    report = evaluate(mae, digits, knn=False, probe=None, limit=50)
    assert report.value("entropy rank") == 0
    assert report.value("entropy rank", "random init") > 0.1
    assert "collapsed" in report.table().caption


def test_every_number_says_what_it_depends_on(mae: MAE, digits: Splits) -> None:
    report = evaluate(mae, digits, probe="lbfgs", limit=200, seed=1, readout=("tokens", "patches"), layers="all")
    assert report.readout == "tokens, patches"
    for s in report.scores:
        assert {"readout", "seed", "n_train", "n_test"} <= set(s.settings)
        if s.unit == "%":
            low, high = s.settings["interval"]
            assert low < s.value < high
    for readout in ("tokens", "patches"):
        feats = extract(mae, digits, limit=200, seed=1, readout=readout)
        assert feats.test is not None
        assert report.value("kNN", readout=readout) == knn(feats.train, feats.test).accuracy
        assert report.value("RankMe", readout=readout) == rankme(feats.test.last)
    probe = report.probes["model"]
    assert len(probe["grid"]) == 2 * 2 * 4
    assert report.value("linear probe") == probe["accuracy"]
    chosen = [s for s in report.scores if s.subject == "model" and s.settings.get("selected")]
    assert [(s.layer, s.settings["readout"]) for s in chosen] == [(probe["best"]["layer"], probe["readout"])]


def test_collapsed_features_have_no_accuracy(mae: MAE, digits: Splits) -> None:
    """A class token that no branch has written to yet is the same for every image."""
    report = evaluate(mae, digits, readout=("cls", "tokens"), probe="lbfgs", limit=100, neighbors=0)
    for metric in ("kNN", "linear probe"):
        assert math.isnan(report.value(metric, readout="cls"))
        assert report.value(metric, readout="tokens") > 10
    assert report.value("entropy rank", readout="cls") == 0
    assert "collapsed: all features alike in layer 1 cls" in report.table().caption
    online = evaluate(mae, digits, readout=("cls", "tokens"), probe="mae", epochs=1, limit=100, neighbors=0, knn=False)
    assert math.isnan(online.value("linear probe", readout="cls"))
    only = evaluate(mae, digits, readout="cls", probe="lbfgs", limit=100, neighbors=0, baselines=False)
    assert math.isnan(only.value("linear probe"))
    assert json.loads(only.to_json())["scores"][0]["value"] is None


def test_wrong_inputs_are_refused_before_anything_is_read(mae: MAE, digits: Splits, monkeypatch) -> None:
    monkeypatch.setattr("residua.evaluate.suite.read_features", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(ValueError, match="unknown probe protocol"):
        evaluate(mae, digits, probe="svm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="readout"):
        evaluate(mae, digits, readout="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divisible"):
        evaluate(mae, digits, img_size=9)


def test_held_out_training_images_choose_the_layer_of_knn() -> None:
    def images(n: int, seed: int) -> FeatureSet:
        g = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % 5
        told, noise = torch.eye(5)[labels] + 0.1 * torch.randn(n, 5, generator=g), torch.randn(n, 5, generator=g)
        return FeatureSet({2: noise, 4: told, 7: noise.flip(1)}, labels)

    def scored(train: FeatureSet, layers: list[int]) -> Report:
        report = Report("x", "tokens", layers, (8, 8), len(train), 50, "test split", seed=0)
        add_knn(report, {"model": (train, images(50, 1))}, (1, 20), 0.07, torch.device("cpu"))
        return report

    report = scored(images(200, 0), [2, 4, 7])
    assert {(s.layer, s.settings["k"]) for s in report.scores if s.settings.get("chosen")} == {(4, 1), (4, 20)}
    assert "kNN: best for images held out of train: layer 4, 100.0 %" in str(report.table().caption)
    assert report.value("kNN", k=20) == report.value("kNN", layer=7, k=20)  # the score to quote stays the last layer's
    assert any(s.settings.get("chosen") for s in scored(images(12, 0).subset(torch.arange(11)), [2, 4, 7]).scores)
    alone = FeatureSet({2: torch.eye(5), 4: torch.eye(5), 7: torch.eye(5)}, torch.arange(5))  # nothing to hold out
    assert not any(s.settings.get("chosen") for s in scored(alone, [2, 4, 7]).scores)
    nearly = images(200, 0)  # one direction, though no two features are equal
    nearly.features[2] = torch.ones(200, 5) + 1e-7 * torch.randn(200, 5)
    assert {s.layer for s in scored(nearly, [2, 4, 7]).scores if s.settings.get("chosen")} == {4}


def test_a_layer_that_all_but_collapsed_leaves_the_others_their_probe() -> None:
    flat = torch.ones(400, 4)
    flat[0] += 3e-6  # rounding
    layers = {0: torch.randn(400, 4), 1: flat}
    features = FeatureSet(layers, torch.arange(400) % 2, ids=[str(i) for i in range(400)])
    result = probe_features({"model": (features, features)}, "lbfgs", {})["model"]
    assert result is not None
    assert list(result.by_layer) == [0]
    other = FeatureSet({0: torch.randn(30, 4), 1: torch.randn(30, 4)}, torch.arange(30) % 2, ids=list("x" * 30))
    result = probe_features({"model": (features, other)}, "lbfgs", {})["model"]  # whatever it is on test images
    assert result is not None
    assert list(result.by_layer) == [0]


def test_held_out_images_choose_the_layer_of_knn_with_one_layer_copied_at_a_time(monkeypatch) -> None:
    y = torch.arange(400) % 4
    x = torch.randn(400, 8)
    told = x + 4 * torch.eye(8)[y]
    train, test = (FeatureSet({0: x[rows], 1: told[rows], 2: x[rows]}, y[rows])
                   for rows in (slice(0, 300), slice(300, 400)))  # fmt: skip
    real, copied, parts = FeatureSet.subset, [], []

    def subset(self: FeatureSet, rows: torch.Tensor) -> FeatureSet:
        copied.append(self.layers)
        parts.append(rows.tolist())
        return real(self, rows)

    monkeypatch.setattr(FeatureSet, "subset", subset)
    report = Report("blobs", "tokens", [0, 1, 2], (8, 8), len(train), len(test), "test split", seed=3)
    add_knn(report, {"model": (train, test)}, 5, 0.07, torch.device("cpu"))
    assert parts == [rows.tolist() for rows in split(train.targets, 0.5, seed=3)] * 3  # half of few
    assert [score.layer for score in report.scores if score.settings.get("chosen")] == [1]
    assert copied == [[0], [0], [1], [1], [2], [2]]


@pytest.mark.parametrize("probe", ["lbfgs", "simple"])
def test_progress_is_told_of_images_and_of_the_probe(mae: MAE, digits: Splits, probe: Any) -> None:
    """Each count ends at its total: of the images of both splits, and of the epochs, or solutions, of two fits."""
    told: list[tuple[str, int, int]] = []
    epochs = {"epochs": 5} if probe == "simple" else {}
    evaluate(mae, digits, probe=probe, layers="all", baselines=False, batch_size=48, limit=100,
             progress=lambda *now: told.append(now), **epochs)  # fmt: skip
    images = [("reading images", done, 100) for done in (48, 96, 100)]
    total = 2 * (5 if probe == "simple" else mae.encoder.depth)
    assert [now for now in told if now[0] == "reading images"] == images * 2
    assert [now for now in told if now[0] == "probing"] == [("probing", i + 1, total) for i in range(total)]
