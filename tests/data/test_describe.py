import json

import numpy as np

from residua.data import describe, load


def test_figures_of_digits():
    splits = load("digits")
    found = json.loads(json.dumps(describe(splits)))
    assert found["train"]["count"] + found["test"]["count"] == 1797
    assert found["train"]["typical_size"] == [8, 8]
    assert found["train"]["per_class"]["3"] == int((splits.train.labels == 3).sum())
    assert found["channels"] == 1
    np.testing.assert_allclose(found["mean"], (splits.train.images / 255).mean(), atol=1e-6)
    assert found["shared"] == 0


def test_without_labels_or_test(tmp_path):
    for k, size in enumerate([(8, 9), (12, 7)]):
        np.save(tmp_path / f"{k}.npy", np.full(size, k, np.float32))
    found = describe(load(f"folder:{tmp_path}"))
    assert found["test"] is None
    assert found["shared"] is None
    assert found["classes"] is None
    assert found["train"]["smallest"] == [8, 7]
    assert found["train"]["largest"] == [12, 9]
