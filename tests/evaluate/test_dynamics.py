"""Checkpoints measured along training: kept between calls, and correlations that scipy agrees with."""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import pearsonr

from residua.data import load
from residua.evaluate.dynamics import KNN, NORM, PROBE, RANK, Dynamics, Point, dynamics, norm_history, pearson
from residua.evaluate.maps import feature_norms, sample_images
from residua.evaluate.suite import evaluate
from residua.nn import create_model
from residua.train.checkpoint import load as load_model
from residua.train.checkpoint import write_checkpoint
from residua.train.config import Pretrain

DATA = "shapes?n=48&size=16&test=24&classes=3"
STEPS = (10, 20, 30)


def make_run(folder: Path, alpha: float, steps: tuple[int, ...] = STEPS) -> Path:
    """A run of checkpoints with random weights; step s of 40 is epoch s / 10."""
    folder.mkdir()
    config = Pretrain().override(data=DATA, steps=40, epochs=4.0, batch_size=12, alpha_min=alpha, img_size=16)
    config.save(folder / "config.yaml")
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 1, "decoder_embed_dim": 16, "decoder_depth": 1}
    for step in steps:
        torch.manual_seed(step + int(100 * alpha))
        model = create_model("mae_vit", img_size=16, patch_size=4, decoder_num_heads=1, alpha_min=alpha,
                             zero_init=False, **sizes)  # fmt: skip
        write_checkpoint(folder, step, model, {}, keep=0)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / f"alpha-{alpha}", alpha) for alpha in (0.7, 0.85, 1.0)]


@pytest.fixture(scope="module")
def found(runs: list[Path]) -> Dynamics:
    return dynamics(runs)


def test_every_checkpoint_is_measured_as_evaluate_measures(runs: list[Path], found: Dynamics) -> None:
    assert found.runs == ["alpha-0.7", "alpha-0.85", "alpha-1.0"]
    assert found.notes == []
    model = load_model(runs[1] / "checkpoints/step-0000020")
    splits = load(DATA)
    report = evaluate(model, splits, probe="lbfgs", baselines=False, neighbors=0)
    for metric in (PROBE, KNN, RANK, "RankMe"):
        curve = found.curve(metric, "alpha-0.85")
        assert list(curve) == pytest.approx([1.0, 2.0, 3.0])
        assert curve[2.0] == pytest.approx(report.value(metric))
    norms = {layer: curve[2.0] for layer, curve in found.by_layer(NORM, "alpha-0.85").items()}
    assert norms == pytest.approx(feature_norms(model, sample_images(model, splits, 64)))
    row = found.rows()[0]
    assert list(row) == ["run", "step", "epoch", "metric", "layer", "value"]


def test_a_curve_is_of_the_deepest_layer_in_the_order_of_training() -> None:
    steps = [(30, 3, 0.3), (10, 3, 0.1), (10, 0, 7.0), (20, 3, 0.2), (20, 0, 8.0), (40, 3, math.nan)]
    points = [Point("a", step, step / 10, RANK, layer, value) for step, layer, value in steps]
    found = Dynamics([*points, Point("b", 10, 1.0, RANK, 5, 9.0)])
    assert list(found.curve(RANK, "a").items()) == [(1.0, 0.1), (2.0, 0.2), (3.0, 0.3)]
    assert list(found.by_layer(RANK, "a")) == [0, 3]
    assert found.by_layer(RANK, "a")[0] == {1.0: 7.0, 2.0: 8.0}


def test_only_new_checkpoints_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=(10, 20))
    told: list[str] = []
    first = dynamics([run], probe=None, on_message=told.append)
    assert told == ["run: step 10", "run: step 20"]
    again = dynamics([run], probe=None, on_message=told.append)
    assert len(told) == 2
    assert again.points == first.points
    extra = make_run(tmp_path / "extra", 0.8, steps=(30,))
    shutil.copytree(extra / "checkpoints/step-0000030", run / "checkpoints/step-0000030")
    shutil.rmtree(run / "checkpoints/step-0000010")  # as training drops the oldest
    grown = dynamics([run], probe=None, on_message=told.append)
    assert told[2:] == ["run: step 30"]
    assert sorted({p.step for p in grown.points}) == [10, 20, 30], "what was measured once stays"
    dynamics([run], probe=None, limit=20, on_message=told.append)
    assert told[3:] == ["run: step 20", "run: step 30"], "other settings start again"
    dynamics([run], probe=None, limit=20, seed=1, on_message=told.append)
    assert len(told) == 7, "as does another seed"
    config = Pretrain.read(run / "config.yaml")
    config.override(alpha_min=0.9).save(run / "config.yaml")
    dynamics([run], probe=None, limit=20, seed=1, on_message=told.append)
    assert len(told) == 9, "or a run with other settings"
    config.override(alpha_min=0.9, lr=1e-5).save(run / "config.yaml")
    dynamics([run], probe=None, limit=20, seed=1, on_message=told.append)
    assert len(told) == 11


def test_scores_that_are_no_numbers_stay_so_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=(10,))
    scores = [(KNN, 1, math.nan), (RANK, 1, 2.5)]
    monkeypatch.setattr(sys.modules[Dynamics.__module__], "measure", lambda *_, **__: scores)
    for _ in range(2):  # measured, then read
        found = dynamics([run])
        assert [p.metric for p in found.points] == [KNN, RANK]
        assert math.isnan(found.points[0].value)
        assert found.points[1].value == 2.5


def test_weights_written_again_are_measured_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=(10,))
    dynamics([run], probe=None, knn=False)
    os.utime(run / "checkpoints/step-0000010/model.safetensors", ns=(1, 1))
    told: list[str] = []
    dynamics([run], probe=None, knn=False, on_message=told.append)
    assert told == ["run: step 10"]


def test_other_images_of_the_same_name_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, pictures, source = make_run(tmp_path / "run", 0.8, steps=(10,)), tmp_path / "pictures", load(DATA).train
    for i in range(24):
        (pictures / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(source.read(i)).save(pictures / str(i % 2) / f"{i}.png")
    told: list[str] = []

    def measured(**settings: Any) -> Dynamics:
        quick: Any = {"data": f"folder:{pictures}", "probe": None, "knn": False, "on_message": told.append}
        return dynamics([run], **quick | settings)

    before = measured()
    for i in range(24):
        Image.fromarray(source.read(i)[::-1] // 2).save(pictures / str(i % 2) / f"{i}.png")
    after = measured()
    assert after.points == measured(cache=False).points != before.points
    told.clear()
    pictures.rename(tmp_path / "away")
    assert measured().points == after.points, "there is nothing to compare with, so what is known stands"
    others: Any = {"data": f"folder:{tmp_path / 'others'}", "on_message": lambda text: None}
    assert not measured(**others).points, "which says nothing of others"
    (tmp_path / "away").rename(pictures)
    assert measured().points == after.points
    assert told == []
    monkeypatch.setattr("residua.__version__", "0.0.0")
    measured()
    assert told == ["run: step 10"]


def test_other_test_images_are_measured_again(tmp_path: Path) -> None:
    run, source = make_run(tmp_path / "run", 0.8, steps=(10,)), load(DATA).train

    def measured(offset: int) -> list[str]:
        for i in range(24):
            place = tmp_path / "pictures" / ("test" if i < 8 else "train") / str(i % 2)
            place.mkdir(parents=True, exist_ok=True)
            if i < 8 or offset == 0:
                Image.fromarray(source.read(i + offset)).save(place / f"{i}.png")
        told: list[str] = []
        dynamics([run], data=f"folder:{tmp_path / 'pictures'}", probe=None, knn=False, on_message=told.append)
        return told

    assert measured(0) == ["run: step 10"]
    assert measured(24) == ["run: step 10"]


@pytest.mark.parametrize("content", ["{ broken", "[]", '{"settings": 1}', '{"settings": {}, "checkpoints": 3}'])
def test_a_broken_file_is_made_again(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=(10,))
    (run / "dynamics.json").write_text(content)
    assert dynamics([run], probe=None, knn=False).points
    json.loads((run / "dynamics.json").read_text())["checkpoints"]["10"]


def test_a_broken_checkpoint_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=(10, 20))
    (run / "checkpoints/step-0000010/model.safetensors").write_bytes(b"cut short")
    found = dynamics([run], probe=None, knn=False)
    assert {p.step for p in found.points} == {20}
    assert "step 10 could not be measured" in found.notes[0]


def test_a_run_without_checkpoints_or_epochs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=())
    assert dynamics([run]).notes == ["run has no checkpoint that could be measured"]
    unresolved = make_run(tmp_path / "unresolved", 0.8, steps=(10,))
    Pretrain().override(data=DATA).save(unresolved / "config.yaml")
    with pytest.raises(ValueError, match="how many epochs"):
        dynamics([unresolved], probe=None, knn=False)


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(tmp_path: Path, monkeypatch: Any) -> None:
    run = make_run(tmp_path / "run", 0.8, steps=(10,))

    def refuse(path: Path, text: str) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(sys.modules["residua.evaluate.dynamics"], "write_text", refuse)
    told: list[str] = []
    assert dynamics([run], probe=None, knn=False, on_message=told.append).points
    assert "cannot keep scores" in told[-1]


def test_correlation_over_runs_at_each_epoch(found: Dynamics) -> None:
    rows = found.correlation()
    assert [c.epoch for c in rows] == pytest.approx([1.0, 2.0, 3.0])
    for c in rows:
        pairs = [(found.curve(RANK, run)[c.epoch], found.curve(PROBE, run)[c.epoch]) for run in found.runs]
        x, y = zip(*pairs)
        assert c.n == 3
        if len(set(y)) > 1:
            assert (c.r, c.p) == pytest.approx(tuple(pearsonr(x, y)))
            assert c.r == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_correlation_is_undefined_below_three_runs_or_for_a_constant() -> None:
    two = pearson(1.0, [1, 2], [3, 4])
    assert math.isnan(two.r)
    assert math.isnan(two.p)
    assert "three or more" in two.why
    assert "1 run:" in pearson(1.0, [1], [3]).why
    level = pearson(1.0, [1, 2, 3], [5, 5, 5])
    assert math.isnan(level.r)
    assert "same in all runs" in level.why
    line = pearson(1.0, [1, 2, 4], [-2, -4, -8])
    assert (line.r, line.why) == (pytest.approx(-1), "")


def test_correlation_pairs_runs_by_epoch_and_leaves_out_what_is_not_finite() -> None:
    points = [Point(f"r{i}", 1, 0.1 * 3, m, 0, float(i)) for i in range(3) for m in (RANK, PROBE)]
    points += [Point("r3", 7, 0.3, RANK, 0, math.nan), Point("r3", 7, 0.3, PROBE, 0, 5.0)]
    points += [Point("r4", 7, 0.9, m, 0, 1.0) for m in (RANK, PROBE)]
    rows = Dynamics(points).correlation()
    assert [(c.epoch, c.n) for c in rows] == [(0.3, 3), (0.9, 1)]
    assert rows[0].r == pytest.approx(1)


def test_runs_of_one_name_keep_apart(tmp_path: Path) -> None:
    folders = []
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        folders.append(make_run(tmp_path / parent / "run", 0.8, steps=(10,)))
    assert dynamics(folders, probe=None, knn=False).runs == [str(folder) for folder in folders]
    assert dynamics({"a": folders[0]}, probe=None, knn=False).runs == ["a"]


def test_norms_alone_are_those_of_the_whole_table(runs: list[Path]) -> None:
    splits = load(DATA)
    found = norm_history(runs[:1], splits, images=8, most=2)
    assert sorted({p.step for p in found.points}) == [10, 30], "evenly chosen, first and last included"
    model = load_model(runs[0] / "checkpoints/step-0000030")
    last = {p.layer: p.value for p in found.points if p.step == 30}
    assert last == pytest.approx(feature_norms(model, sample_images(model, splits, 8)))
