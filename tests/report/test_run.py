"""The page of one run: from its folder, from memory, and from what is left of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from residua.data import Splits, load
from residua.data.arrays import ArraySource
from residua.evaluate.suite import evaluate
from residua.report import run_report
from residua.report.run import _summary
from residua.report.runs import by_depth, headline, read_run
from residua.train import Hooks, Pretrain, fit, prepare

Read = Callable[[Path], Any]
SMALL = {
    "size": "nano", "embed_dim": 16, "depth": 2, "num_heads": 1, "decoder_embed_dim": 16, "decoder_depth": 1,
    "decoder_num_heads": 1, "steps": 2, "batch_size": 8, "cpu": True, "trackers": (), "patch_size": 2,
}  # fmt: skip


def test_a_run_from_its_folder(quick_demo: Any, read_page: Read) -> None:
    run = quick_demo[0].parent / "fading"
    found = read_page(run_report(run))
    scores = headline(read_run(run).evaluation)  # type: ignore[arg-type]
    for own in scores.values():
        assert str(own["model"]) in found.text
        assert f"{own['pixels'].value:.1f}" in found.text or own["model"].unit == "nats"
    for part in ("Training", "Reconstructions", "principal components", "Nearest neighbours", "alpha_min"):
        assert part in found.text
    for part in ("Attention", "Classes in the plane", "silhouette", "Feature norms"):
        assert part in found.text
    assert sum(r.startswith("data:image/png") for r in found.refers) == 4


def test_the_summary_says_how_a_run_ended_and_what_it_is_above(make_run: Callable[..., Path]) -> None:
    run = make_run("a", knn=41.5)
    text = _summary(read_run(run), read_run(run).evaluation)
    assert "The loss ended at 0.0500." in text
    assert "kNN 41.5 %, above random init (21.5 %) and pixels (31.5 %)." in text
    stored = json.loads((run / "evaluation.json").read_text())
    for score in stored["scores"]:
        score["value"] += 20.0 * ((score["metric"], score["subject"]) == ("kNN", "pixels"))
    (run / "evaluation.json").write_text(json.dumps(stored))
    text = _summary(read_run(run), read_run(run).evaluation)
    assert "kNN 41.5 %, not above random init (21.5 %) and pixels (51.5 %)." in text  # above one of the two


def test_a_run_without_weights_data_or_evaluation(make_run: Callable[..., Path], read_page: Read) -> None:
    run = make_run("gone", knn=None, data="folder:/nowhere/at/all")
    text = read_page(run_report(run)).text
    assert "has not been evaluated" in text
    assert text.count("No pictures") == 2
    assert "/nowhere/at/all" in text
    assert "Settings" in text


def arrays(channels: int, dtype: type, labels: bool) -> Splits:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 250, (24, 8, 8, channels)).astype(dtype)
    return Splits("<i>noise</i>", ArraySource("<i>noise</i>", "train", pixels, classes=["<b>", "&"] if labels else None,
                                              labels=np.arange(24) % 2 if labels else None))  # fmt: skip


@pytest.mark.parametrize(("channels", "dtype", "labels"), [(1, np.uint8, True), (5, np.uint16, False)])
def test_from_memory_any_channels_without_labels(
    channels: int, dtype: type, labels: bool, tmp_path: Path, read_page: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = arrays(channels, dtype, labels)
    monkeypatch.setattr("residua.data.load", lambda spec, **_: splits)
    session = prepare(Pretrain().override(**SMALL, data="folder:x", out=str(tmp_path / "run")))
    model = fit(session, Hooks(on_message=lambda _: None))
    report = evaluate(model, splits, probe=None, layers="all")
    found = read_page(run_report(tmp_path / "run", model=model, splits=splits, evaluation=report))
    assert ("kNN" in found.text.split("Settings")[0].split("A score above")[0]) == labels
    assert "entropy rank" in found.text
    assert ("channels 1 to 3 of 5" in found.text) == (channels == 5)
    assert ("Classes in the plane" in found.text) == labels
    assert sum(r.startswith("data:image/png") for r in found.refers) == 4


def test_a_stored_evaluation_comes_back_as_it_was(quick_demo: Any) -> None:
    run = quick_demo[0].parent / "plain"
    stored = json.loads((run / "evaluation.json").read_text())
    read = read_run(run).evaluation
    assert read is not None
    assert json.loads(read.to_json()) == stored


def test_depth_curves_take_one_k_and_drop_what_is_not_finite(make_run: Callable[..., Path]) -> None:
    run = make_run("a")
    stored = json.loads((run / "evaluation.json").read_text())
    first = next(s for s in stored["scores"] if s["metric"] == "kNN" and s["subject"] == "model")
    stored["scores"].append({**first, "value": 99.0, "settings": {"k": 100, "T": 0.07}})
    stored["scores"] = [{**s, "value": None} if s["metric"] == "entropy rank" else s for s in stored["scores"]]
    (run / "evaluation.json").write_text(json.dumps(stored))
    report = read_run(run).evaluation
    assert report is not None
    assert by_depth(report, "kNN") == {0: 39.5, 1: 40.5, 2: 41.5}
    assert by_depth(report, "entropy rank") == {}
    assert run_report(run).exists()


def test_neighbours_are_found_by_name(quick_demo: Any) -> None:
    from residua.report.pictures import neighbor_pictures

    report = read_run(quick_demo[0].parent / "fading").evaluation
    assert report is not None
    splits = load("shapes?n=128&test=64")
    assert splits.test is not None
    found = neighbor_pictures(report, splits)
    assert found is not None
    row = report.to_dict()["named_neighbors"][0]
    number = int(row["neighbors"][0].split("/")[-1])
    np.testing.assert_allclose(found[0, 1], splits.test.read(number) / 255, atol=1e-6)
