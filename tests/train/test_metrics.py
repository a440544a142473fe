"""What a run writes down: a record a line, cut back where it is resumed, never twice the same."""

import math
from pathlib import Path

from residua.train.metrics import append_metrics, read_metrics, replace_metrics, scan_metrics, truncate_metrics


def write(run: Path, *records: dict[str, float]) -> None:
    for record in records:
        append_metrics(run, record)


def test_records_come_back_in_order_without_lines_that_hold_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    write(tmp_path, {"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan, "lr": 0.1})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "lr": 0.1}]  # JSON knows no NaN
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo\n{"step": 4}\n\n[5]\n{"step": "6"}\n{"loss": 7.0}\n\0\0\n')
    records, broken = scan_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 4]
    assert broken == 5
    assert read_metrics(tmp_path) == records


def test_what_comes_after_a_checkpoint_is_written_again(tmp_path: Path) -> None:
    truncate_metrics(tmp_path, 3)  # nothing there
    write(tmp_path, *({"step": step, "loss": 1 / step} for step in (1, 2, 3, 4)))
    truncate_metrics(tmp_path, 3)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_what_is_measured_again_takes_the_place_of_what_was(tmp_path: Path) -> None:
    loss, knn = {"step": 2, "epoch": 1.0, "loss": 0.5}, {"step": 2, "epoch": 1.0, "eval/kNN": 10.0}
    write(tmp_path, {"step": 1, "eval/kNN": 5.0}, loss, knn)
    again = {"step": 2, "epoch": 1.0, "eval/kNN": 11.0, "eval/probe": 20.0}
    replace_metrics(tmp_path, again)
    assert read_metrics(tmp_path) == [{"step": 1, "eval/kNN": 5.0}, loss, again]
    replace_metrics(tmp_path, knn)  # of which more is known
    assert read_metrics(tmp_path) == [{"step": 1, "eval/kNN": 5.0}, loss, knn]
