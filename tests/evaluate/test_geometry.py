import inspect
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from sklearn.metrics.pairwise import cosine_distances

from residua.data import Splits
from residua.evaluate import (
    CollapsedError,
    FeatureSet,
    class_separation,
    entropy_rank,
    extract,
    layer_geometry,
    lidar,
    model_lidar,
    rankme,
    silhouette,
    variance_ratio,
)
from residua.evaluate.geometry import UNITS
from residua.evaluate.scoring import LIDAR_IMAGES, LIDAR_VIEWS
from residua.nn import ViT


def blobs(seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Classes 0, 1, 3 and 7 of unequal sizes, the last with a single member."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat([0, 1, 3, 7], [40, 25, 9, 1]))
    return rng.normal(size=(8, 5))[y] + spread * rng.normal(size=(75, 5)), y


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_silhouette_is_scikit_learns(seed: int, metric) -> None:
    x, y = blobs(seed)
    assert silhouette((x, y), metric, chunk=13) == pytest.approx(silhouette_score(x, y, metric=metric), abs=1e-9)
    far = x + 1e4  # an offset moves no Euclidean distance
    if metric == "euclidean":
        assert silhouette((far, y)) == pytest.approx(silhouette((x, y)), abs=1e-7)


def test_silhouette_of_a_feature_that_is_zero() -> None:
    x, y = blobs(0)
    x[3] = 0
    assert silhouette((x, y), "cosine") == pytest.approx(silhouette_score(x, y, metric="cosine"), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_class_separation_is_a_ratio_of_mean_pairwise_distances(seed: int) -> None:
    x, y = blobs(seed)
    distance = cosine_distances(x)
    classes = np.unique(y)
    means = np.array([[distance[np.ix_(y == a, y == b)].mean() for b in classes] for a in classes])
    assert class_separation((x, y)) == pytest.approx(1 - np.diag(means).mean() / means.mean(), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_variance_ratio_is_its_definition(seed: int) -> None:
    x, y = blobs(seed)
    within = sum(((x[y == c] - x[y == c].mean(0)) ** 2).sum() for c in np.unique(y))
    between = sum((y == c).sum() * ((x[y == c].mean(0) - x.mean(0)) ** 2).sum() for c in np.unique(y))
    assert variance_ratio((x, y)) == pytest.approx(between / within, rel=1e-9)


def test_classes_that_are_points_and_classes_that_are_chance() -> None:
    y = np.repeat(np.arange(4), 10)
    points = np.eye(4)[y]
    assert class_separation((points, y)) == pytest.approx(1)
    assert variance_ratio((points, y)) == math.inf
    assert silhouette((points, y)) == pytest.approx(1)
    scattered = np.random.default_rng(0).normal(size=(4, 7))[y]  # whose means are rounded
    assert variance_ratio((scattered, y)) == math.inf
    x = np.random.default_rng(0).normal(size=(4000, 6))
    labels = np.random.default_rng(1).integers(0, 4, 4000)
    assert class_separation((x, labels)) == pytest.approx(0, abs=0.01)
    assert variance_ratio((x, labels)) == pytest.approx(0, abs=0.01)
    assert abs(silhouette((x, labels), "cosine")) < 0.02


def test_separation_grows_as_classes_tighten() -> None:
    scores = [
        [f(blobs(0, spread)) for spread in (3.0, 1.0, 0.3)] for f in (class_separation, variance_ratio, silhouette)
    ]
    assert all(row == sorted(row) for row in scores)


def test_one_layer_whole(vit: ViT, noise: Splits) -> None:
    feats = extract(vit, noise, layers="all", views=2).train
    found = layer_geometry(feats, 1)
    assert set(found) == set(UNITS)
    x = feats.layer(1)
    assert found["entropy rank"] == pytest.approx(entropy_rank(x), abs=1e-9)
    assert found["RankMe"] == pytest.approx(rankme(x), rel=1e-9)
    assert found["LiDAR"] == pytest.approx(lidar(feats.only(1)))
    assert found["silhouette"] == pytest.approx(silhouette_score(x, feats.labels, metric="cosine"), abs=1e-6)
    assert found != layer_geometry(feats) == layer_geometry(feats, 2)
    assert layer_geometry(feats, 0)["RankMe"] == pytest.approx(rankme(feats.layer(0)), rel=1e-9)
    assert "silhouette" in layer_geometry((x, torch.arange(50) % 2))
    plain = layer_geometry((x, None))
    assert set(plain) == set(UNITS) - {"LiDAR", "class separation", "variance ratio", "silhouette"}
    assert set(layer_geometry((x, torch.zeros(50)))) == set(plain)
    assert math.isnan(layer_geometry((x, torch.arange(50)))["silhouette"])


def test_lidar_of_a_model_is_that_of_its_views(vit: ViT, noise: Splits) -> None:
    found = model_lidar(vit, noise, images=30, views=4, layers=[0, 2], seed=5)
    feats = extract(vit, noise, layers=[0, 2], limit=30, views=3, seed=5).train
    assert found == {i: lidar(feats.only(i)) for i in (0, 2)}
    wider = model_lidar(vit, noise, images=30, views=4, layers=[0, 2], seed=5, delta=0.1)
    assert wider == {i: lidar(feats.only(i), 0.1) for i in (0, 2)} != found
    pooled = model_lidar(vit, noise, images=30, views=4, readout="cls", batch_size=7, img_size=24)
    feats = extract(vit, noise, limit=30, views=3, readout="cls", img_size=24).train
    assert pooled == {2: pytest.approx(lidar(feats), rel=1e-4)}
    usual = inspect.signature(model_lidar).parameters
    assert (usual["images"].default, usual["views"].default) == (1000, 10) == (LIDAR_IMAGES, LIDAR_VIEWS)
    with pytest.raises(ValueError, match="at least 2 views"):
        model_lidar(vit, noise, views=1)


def test_silhouette_of_features_that_all_point_the_same_way() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 7)) * rng.uniform(1, 3, (40, 1))
    assert silhouette((x, np.arange(40) % 4), "cosine") == 0


def test_silhouette_needs_but_one_class_of_two_images() -> None:
    x = np.random.default_rng(0).normal(size=(6, 3))
    for y in ([0, 0, 1, 2, 3, 4], [0, 1, 1, 1, 1, 1]):
        assert silhouette((x, y)) == pytest.approx(silhouette_score(x, y), abs=1e-9)


def test_silhouette_of_equal_images_of_two_classes() -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(2, 5)), 4, 0)
    y = np.array([0, 0, 1, 1, 2, 2, 2, 2])  # of the first two both distances are 0
    assert silhouette((x, y)) == pytest.approx(silhouette_score(x, y), abs=1e-9)


def test_wrong_inputs() -> None:
    x, y = blobs(0)
    for score in (class_separation, variance_ratio, silhouette):
        with pytest.raises(ValueError, match="one class"):
            score((x, np.zeros(75, int)))
        with pytest.raises(ValueError, match="labels"):
            score((x, None))
        with pytest.raises(ValueError, match="drop unlabelled images"):
            score((x, y - 1))
        with pytest.raises(ValueError, match="NaN"):
            score((np.full_like(x, np.nan), y))
    for score in (class_separation, variance_ratio, layer_geometry):
        with pytest.raises(CollapsedError):
            score((np.ones((75, 5)), y))
        with pytest.raises(CollapsedError):
            score((np.full((75, 5), 0.1) + 1e-13 * x, y))
    with pytest.raises(ValueError, match="at least one class needs two"):
        silhouette((x, np.arange(75)))
    with pytest.raises(ValueError, match="metric"):
        silhouette((x, y), "manhattan")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="layer 9"):
        layer_geometry(FeatureSet({0: torch.randn(5, 3)}), 9)


@pytest.mark.parametrize("classes", [10, 100])
def test_what_features_that_know_nothing_have(classes: int) -> None:
    data = torch.randn(1000, 64), torch.arange(1000) % classes
    assert class_separation(data) == pytest.approx(classes / 1000, rel=0.3)
    assert variance_ratio(data) == pytest.approx((classes - 1) / (1000 - classes), rel=0.3)
