"""Runs as they lie on disk: read-outs, intervals and broken lines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from residua.evaluate import Report, Score
from residua.report import comparison_table
from residua.report.runs import NotARun, by_depth, headline, interval_cell, read_run, while_training
from residua.train.finetune_config import Finetune


@pytest.fixture
def report() -> Report:
    """Two read-outs and two layers; the probe chose layer 0 of cls."""
    report = Report("x", "tokens, cls", [0, 1], (8, 8), 10, 10, "test split", 0)
    for r, readout in enumerate(("tokens", "cls")):
        for layer in (0, 1):
            settings = {"k": 5, "T": 0.07, "readout": readout, "interval": [10.0 + layer, 30.0]}
            report.scores.append(Score("kNN", "model", layer, 10.0 * r + layer, "%", settings))
            chosen = {"protocol": "lbfgs", "selected": (readout, layer) == ("cls", 0), "readout": readout}
            report.scores.append(Score("linear probe", "model", layer, 50.0 + 10 * r + layer, "%", chosen))
    report.scores.append(Score("kNN", "pixels", -1, 7.0, "%", {"k": 5, "T": 0.07, "readout": "pixels"}))
    return report


def test_read_outs_stay_apart(report: Report) -> None:
    quoted = headline(report)
    assert {name: own["model"].value for name, own in quoted.items()} == {
        "kNN (k 5, T 0.07)": 1.0,
        "linear probe (lbfgs)": 51.0,
        "kNN (k 5, T 0.07), read-out cls": 11.0,
        "linear probe (lbfgs), read-out cls": 60.0,
    }
    assert quoted["kNN (k 5, T 0.07)"]["pixels"].value == 7.0
    assert by_depth(report, "kNN") == {0: 0.0, 1: 1.0}
    assert by_depth(report, "kNN", "pixels") == {-1: 7.0}


def test_intervals_in_words(report: Report) -> None:
    assert interval_cell(headline(report)["kNN (k 5, T 0.07)"]["model"]).text == "11.0 to 30.0 %"
    assert interval_cell(None).value is None


def test_lines_that_are_no_records_are_counted(make_run: Callable[..., Path]) -> None:
    run = make_run("a")
    assert read_run(run).notes == []
    lines = ["{ broken", "3", "{}", json.dumps({"step": 40, "loss": 0.1}), "", '{"step": 50, "lo']
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines))
    found = read_run(run)
    assert [record["step"] for record in found.metrics] == [1, 10, 20, 40]
    assert found.notes == ["a: 4 lines of metrics.jsonl cannot be read and are left out."]
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe")
    assert found.notes[0].startswith("a: ")
    assert "1 line of metrics.jsonl cannot be read and is left out" in read_run(run).notes[0]


def test_a_run_that_is_not_at_its_end_says_so(make_run: Callable[..., Path]) -> None:
    whole, half = make_run("whole"), make_run("half", steps=3000)
    assert read_run(whole).notes == []
    assert read_run(half).notes == ["half: trained for 20 of 3,000 steps."]
    assert str(comparison_table([whole, half]).caption) == "half: trained for 20 of 3,000 steps."


def test_scores_while_training(make_run: Callable[..., Path]) -> None:
    run = make_run("a")
    records = [{"step": s, "epoch": s / 2, "loss": 1.0, "eval/entropy_rank": 3.0 + s} for s in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert while_training(read_run(run)) == {"entropy rank": {0.5: 4.0, 1.0: 5.0}}


def test_a_classifiers_test_comes_as_scores(tmp_path: Path) -> None:
    Finetune().override(model="resnet18", data="digits", img_size=8, steps=3).save(tmp_path / "config.yaml")
    tested = {"accuracy": 50.0, "interval": [40.0, 60.0], "top5": 90.0, "entropy_rank": 2.5}
    on = {"n_train": 30, "n_test": 20, "seed": 1, "readout": None, "test": "test split"}
    (tmp_path / "finetune.json").write_text(json.dumps(tested | on))
    report = read_run(tmp_path).evaluation
    assert report is not None
    assert [(s.metric, s.value, s.unit) for s in report.scores] == [
        ("accuracy", 50.0, "%"), ("top-5 accuracy", 90.0, "%"), ("entropy rank", 2.5, "nats"),
    ]  # fmt: skip
    assert interval_cell(report.scores[0]).text == "40.0 to 60.0 %"
    assert (report.data, report.n_train, report.n_test, report.test) == ("digits", 30, 20, "test split")


@pytest.mark.parametrize(
    ("name", "value"),
    [("subject", 2.5), ("layer", "x"), ("unit", None), ("value", []), ("settings", {"interval": [[], 3]})],
)
def test_scores_of_another_kind_are_no_scores(report: Report, tmp_path: Path, name: str, value: object) -> None:
    content = report.to_dict()
    content["scores"][1][name] = value
    (tmp_path / "scores.json").write_text(json.dumps(content))
    with pytest.raises(NotARun, match=r"scores.json is neither"):
        read_run(tmp_path / "scores.json")
