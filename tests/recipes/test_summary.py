"""What the runs of a sweep come to: intervals over seeds, ranks and paired differences at equal budget."""

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from residua.evaluate import Report, Score
from residua.recipes.summary import mean_and_interval, read_summary, scores_of, summarise, write_summary
from residua.recipes.sweep import plan, run
from residua.report.sweep import numeric_setting, setting_curves

KNN = "kNN (k 20, T 0.07)"


def test_mean_and_interval_over_seeds(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0"], "seed": ["0", "1", "2"]})
    run(found, jobs=3)
    knn, rank = summarise(found)
    assert (knn.score, rank.score) == (KNN, "entropy rank")
    assert knn.by_seed == {"0": 10.0, "1": 11.0, "2": 12.0}
    assert knn.images == 64
    low, high = stats.t.interval(0.95, 2, loc=11.0, scale=stats.sem(knn.values))
    assert (knn.mean - knn.ci95, knn.mean + knn.ci95) == pytest.approx((low, high))
    assert str(knn) == "11.0 ± 2.5"
    assert math.isnan(mean_and_interval([3.0])[1])


def test_differences_are_paired_by_seed_and_ranks_are_of_one_budget(tmp_path: Path, pretend) -> None:
    grid = {"alpha_min": ["1.0", "0.5"], "steps": ["4", "8"], "seed": ["0", "1", "2"]}
    found = plan(tmp_path, [], grid)
    run(found, jobs=3)
    summaries = summarise(found, {"alpha_min": "1"})
    knn = {(s.settings["alpha_min"], s.settings["steps"]): s for s in summaries if s.score == KNN}
    assert knn["1.0", "4"].difference is None
    d = knn["0.5", "8"].difference
    assert d is not None
    # 5, 7, 12 against 10, 11, 12
    test = stats.ttest_rel([5.0, 7.0, 12.0], [10.0, 11.0, 12.0])
    low, high = test.confidence_interval(0.95)
    assert (d.mean - d.ci95, d.mean + d.ci95, d.n) == pytest.approx((low, high, 3))
    assert {key: s.rank for key, s in knn.items()} == {
        ("1.0", "4"): 1, ("1.0", "8"): 1, ("0.5", "4"): 2, ("0.5", "8"): 2,
    }  # fmt: skip
    assert all(s.rank is None for s in summaries if s.score == "entropy rank")
    assert knn["0.5", "8"].difference_text() == "-3.0 ± 6.6"
    # another budget is no baseline
    assert all(s.difference is None for s in summarise(found, {"steps": "4"}))

    write_summary(tmp_path, summaries)
    header, *rows = (tmp_path / "summary.csv").read_text().splitlines()
    assert header.startswith("alpha_min,steps,score,unit,mean,ci95,seeds,images,rank,difference")
    assert len(rows) == 8
    assert [str(s) for s in read_summary(tmp_path / "summary.json")] == [str(s) for s in summaries]
    assert read_summary(tmp_path / "summary.json")[-2].difference == d
    assert numeric_setting(summaries) == "steps"
    for of, lines in (("score", 2), ("difference", 1)):
        figure = setting_curves(summaries, KNN, "steps", of)
        assert figure is not None
        assert len(figure.axes[0].containers) == lines


def test_a_seed_that_one_side_lacks_is_left_out_of_the_difference(tmp_path: Path, pretend) -> None:
    run(plan(tmp_path, [], {"alpha_min": ["1.0"], "seed": ["0", "1"]}))
    both = plan(tmp_path, [], {"alpha_min": ["0.5"], "seed": ["1", "2"]})
    run(both)
    d = next(s.difference for s in summarise(both, {"alpha_min": "1.0"}) if s.difference is not None)
    assert (d.mean, d.n) == (7.0 - 11.0, 1)
    assert math.isnan(d.ci95)


def test_scores_of_a_diffusion_model_are_those_at_the_place_that_the_probe_chose(tmp_path: Path) -> None:
    report = Report("shapes", "t=0.1, t=0.4", [0, 1], (16, 16), 10, 10, "test split", 0)
    for i, (layer, level) in enumerate([(0, "t=0.1"), (0, "t=0.4"), (1, "t=0.1"), (1, "t=0.4")]):
        chosen = {"protocol": "lbfgs", "readout": level, "selected": i == 1}
        report.scores.append(Score("linear probe", "model", layer, 20.0 + i, "%", chosen))
        report.scores.append(Score("kNN", "model", layer, 10.0 + i, "%", {"k": 20, "T": 0.07, "readout": level}))
    report.save(tmp_path / "evaluation.json")
    records = [{"step": s, "loss": 1.0 / s, "eval/fid": 100.0 - s} for s in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert scores_of(tmp_path) == {
        "linear probe (lbfgs)": (21.0, "%"), KNN: (11.0, "%"), "FID while training": (80.0, ""),
        "training loss": (pytest.approx((1 / 19 + 1 / 20) / 2), ""),
    }  # fmt: skip
    scored = {"samples": {"images": 10_000}, "scores": {"FID": {"value": 7.5}}}
    (tmp_path / "score.json").write_text(json.dumps(scored))
    found = scores_of(tmp_path)
    assert found["FID (10,000 samples)"] == (7.5, "")
    assert "FID while training" not in found
