import json

import numpy as np
import pytest

from residua import cli
from residua.data import describe, load
from residua.data.errors import DataWarning
from residua.data.folder import FolderSource


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


def test_images_in_both_parts_are_looked_for_once_and_thoroughly(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    for file in ("train/a/1", "train/b/2", "test/a/3", "test/b/4"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / f"{file}.npy", rng.random((8, 8), np.float32))
    (tmp_path / "test/b/4.npy").write_bytes((tmp_path / "train/b/2.npy").read_bytes())
    calls, real = [], FolderSource.weights
    monkeypatch.setattr(FolderSource, "weights", lambda self: calls.append(self.split) or real(self))
    assert cli.main(["data", "info", f"folder:{tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "test images that also occur in the training part: 1" in out
    assert calls == ["train", "test"]


def test_unreadable_images_and_notes_are_told(tmp_path, capsys):
    for k in range(8):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        np.save(tmp_path / "ab"[k % 2] / f"{k}.npy", np.full((8, 8), k, np.float32))
    assert describe(load(f"folder:{tmp_path}"))["train"]["unreadable"] == 0
    (tmp_path / "cover.png").write_bytes(b"no image")
    np.save(tmp_path / "a" / "nan.npy", np.full((8, 8), np.nan))  # its header is in order
    with pytest.warns(DataWarning, match=r"cover\.png"):
        splits = load(f"folder:{tmp_path}")
    found = describe(splits)["train"]
    assert (found["count"], found["opened"], found["unreadable"]) == (10, 10, 2)
    assert cli.main(["data", "info", f"folder:{tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert out.count("2 of 10 images opened in train cannot be read: a/nan.npy, cover.png") == 1
    assert out.count("note     folder:") == 1
    assert "cover.png" in out


def test_many_classes_are_cut_short(tmp_path, capsys):
    for k in range(30):
        (tmp_path / f"kind{k:02d}").mkdir()
        np.save(tmp_path / f"kind{k:02d}" / "1.npy", np.full((8, 8), k / 30, np.float32))
    assert cli.main(["data", "info", f"folder:{tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 20
    assert "30: kind00, kind01," in out
    assert "kind09 1, ...\n" in out
    assert "kind10" not in out
    assert "mean         0.4833\n" in out


def test_each_action_has_its_own_help(capsys):
    for action, own in (("info", False), ("preview", True)):
        with pytest.raises(SystemExit):
            cli.main(["data", action, "--help"])
        assert ("--augmented" in capsys.readouterr().out) == own
