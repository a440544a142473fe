import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.neighbors import KNeighborsClassifier

from residua.data import DataError, load
from residua.data.shapes import CLASSES, _distance


@pytest.fixture(scope="module")
def shapes():
    return load("shapes")


def test_defaults(shapes):
    assert (len(shapes.train), len(shapes.test)) == (4096, 1024)
    assert shapes.train.read(0).shape == (32, 32, 3)
    assert len(shapes.train.classes) == 8
    counts = np.bincount(shapes.train.labels)
    assert counts.min() > 400


def test_image_is_a_pure_function_of_seed_split_and_number(shapes):
    few = load("shapes?n=300")
    assert np.array_equal(few.train.array(), shapes.train.array()[:300])
    assert np.array_equal(few.train.labels, shapes.train.labels[:300])
    assert np.array_equal(few.train.read(299), shapes.train.read(299))
    assert not np.array_equal(few.test.read(0), few.train.read(0))
    assert not np.array_equal(load("shapes?n=300", seed=1).train.read(0), few.train.read(0))
    assert load("shapes?n=300", seed=1).train.fingerprint() != few.train.fingerprint()


def test_mask_marks_the_class_and_only_it(shapes):
    for i in range(64):
        mask = shapes.train.mask(i)
        assert mask.shape == (32, 32)
        assert set(np.unique(mask)) == {0, shapes.train.labels[i] + 1}


def test_mask_lies_where_the_colour_changes(shapes):
    """Mean colour differs far more across the outline than two random halves of the picture do."""
    across = []
    for i in range(200):
        image, inside = shapes.train.read(i) / 255, shapes.train.mask(i) > 0
        across.append(np.abs(image[inside].mean(0) - image[~inside].mean(0)).mean())
    assert np.mean(across) > 0.25


def test_all_shapes_have_the_same_area():
    axis = np.linspace(-2, 2, 400)
    x, y = np.meshgrid(axis, axis)
    areas = [(_distance(name, x, y) > 0).mean() * 16 for name in CLASSES]
    assert max(areas) / min(areas) < 1.12


def test_raw_pixels_are_poor_neighbours_though_the_shape_tells_all(shapes):
    train, test = shapes.train, shapes.test
    knn = KNeighborsClassifier(20, metric="cosine")
    knn.fit(train.array().reshape(4096, -1) / 255.0, train.labels)
    assert knn.score(test.array().reshape(1024, -1) / 255.0, test.labels) < 0.3

    def moments(source, count):
        """Rotation- and scale-invariant moments of the mask."""
        rows = []
        for i in range(count):
            y, x = np.nonzero(source.mask(i))
            z = ((x - x.mean()) + 1j * (y - y.mean())) / np.sqrt(len(x))
            powers = [np.abs(np.mean(z**k)) for k in (2, 3, 4, 5)]
            rows.append([*powers, np.mean(np.abs(z) ** 2), np.mean(np.abs(z) ** 4), np.abs(z).max()])
        return np.array(rows)

    forest = RandomForestClassifier(100, random_state=0).fit(moments(train, 1000), train.labels[:1000])
    assert forest.score(moments(test, 300), test.labels[:300]) > 0.9


def test_options_and_their_limits():
    splits = load("shapes?n=20&size=48&classes=10&test=7", img_size=96)
    assert (len(splits.train), len(splits.test), len(splits.train.classes)) == (20, 7, 10)
    assert splits.train.read(0).shape == (48, 48, 3)
    assert load("shapes?n=4", img_size=96).train.typical_size() == (96, 96)
    for wrong in ("n=0", "size=4", "classes=11", "classes=1"):
        with pytest.raises(DataError, match=wrong):
            load(f"shapes?{wrong}")
