"""What the runs of a sweep come to: intervals over seeds, ranks and paired differences at equal budget."""

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from residua.evaluate import Report, Score
from residua.recipes.summary import (
    Difference,
    Summary,
    mean_and_interval,
    read_summary,
    scores_of,
    summarise,
    write_summary,
)
from residua.recipes.sweep import Kind, Sweep, Trial, plan, run
from residua.report.sweep import numeric_setting, ranking_note, setting_curves

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


def written(folder: Path, *records: dict[str, float]) -> None:
    """A finished run with these metrics."""
    folder.mkdir(parents=True)
    Report("shapes", "tokens", [1], (16, 16), 10, 0, "none", 0).save(folder / "evaluation.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(("kind", "ranks"), [("pretrain", [None, None]), ("finetune", [2, 1]), ("diffuse", [2, 1])])
def test_the_loss_ranks_what_it_measures_and_no_features(tmp_path: Path, kind: Kind, ranks: list[int | None]) -> None:
    found = Sweep(tmp_path, [], [Trial({"alpha_min": "1.0"}), Trial({"alpha_min": "0.5"})], kind)
    for trial, loss in zip(found.trials, (2.0, 1.0)):
        written(found.run_folder(trial), {"step": 1, "loss": loss})
        (found.run_folder(trial) / "finetune.json").write_text("{}")
    assert [(s.score, s.rank) for s in summarise(found)] == [("training loss", rank) for rank in ranks]


@pytest.mark.parametrize("key", ["eval/fid", "eval/frechet"])
def test_of_distances_the_least_is_best_and_equal_ones_share_a_rank(tmp_path: Path, key: str) -> None:
    found = Sweep(tmp_path, [], [Trial({"alpha_min": value}) for value in ("1.0", "0.8", "0.6")], "diffuse")
    for trial, distance in zip(found.trials, (3.0, 1.0, 1.0)):
        written(found.run_folder(trial), {"step": 1, key: distance})
    assert [s.rank for s in summarise(found)] == [3, 1, 1]


def test_ranks_are_of_one_data_set(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, [], {"data": ["shapes", "digits"], "alpha_min": ["1.0", "0.5"]})
    run(found)
    summaries = summarise(found)
    ranks = {tuple(s.settings.values()): s.rank for s in summaries if s.score == KNN}
    assert ranks == {
        ("shapes", "1.0"): 1, ("shapes", "0.5"): 2, ("digits", "1.0"): 1, ("digits", "0.5"): 2,
    }  # fmt: skip
    assert ranking_note(summaries) == "rank: by each score, among settings of the same data"


def test_a_difference_of_nothing_has_no_minus() -> None:
    nothing = Summary({}, KNN, "%", 12.5, math.nan, {"0": 12.5}, difference=Difference(-1e-15, 0.5, 2))
    assert nothing.difference_text() == "+0.0 ± 0.5"


def test_the_baseline_is_found_however_it_is_typed(tmp_path: Path, pretend) -> None:
    grid = {"scale": ["0.2,1.0", "0.5,1.0"], "alpha_min": ["1.0"]}
    found = plan(tmp_path, [], grid, lists=["scale"])
    run(found)
    assert [s.difference is None for s in summarise(found, {"scale": "0.20,1"})] == [True, True, False, False]


def test_a_seed_that_one_side_lacks_is_left_out_of_the_difference(tmp_path: Path, pretend) -> None:
    run(plan(tmp_path, [], {"alpha_min": ["1.0"], "seed": ["0", "1"]}))
    both = plan(tmp_path, [], {"alpha_min": ["0.5"], "seed": ["1", "2"]})
    run(both)
    d = next(s.difference for s in summarise(both, {"alpha_min": "1.0"}) if s.difference is not None)
    assert (d.mean, d.n) == (7.0 - 11.0, 1)
    assert math.isnan(d.ci95)


def test_a_score_that_some_seeds_lack_is_of_the_others_and_told(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0"], "seed": ["0", "1", "2"]})
    run(found)
    for trial, text in zip(found.trials, ('{"step": 4, "loss": 2.0}\n', "", '{"step": 4, "loss": 4.0}\n')):
        (found.run_folder(trial) / "metrics.jsonl").write_text(text)
    with pytest.warns(UserWarning, match="training loss is over 2 of 3 seeds of alpha_min 1.0: seed 1 has none"):
        loss = next(s for s in summarise(found) if s.score == "training loss")
    assert (loss.by_seed, loss.mean, loss.seeds) == ({"0": 2.0, "2": 4.0}, 3.0, 2)


@pytest.mark.parametrize(
    ("file", "text"), [("evaluation.json", '{"scores": 3}'), ("config.yaml", "optim: {steps"), ("config.yaml", "[1]")]
)
def test_a_run_that_cannot_be_read_has_failed_and_the_others_stand(
    tmp_path: Path, pretend, file: str, text: str
) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0", "0.5"]})
    run(found)
    (found.run_folder(found.trials[0]) / file).write_text(text)
    assert {s.settings["alpha_min"] for s in summarise(found)} == {"0.5"}
    assert [t.status for t in found.trials] == ["failed", "done"]
    assert "alpha_min=1.0,seed=0 cannot be read" in found.trials[0].error


def test_runs_of_other_images_or_settings_are_told_and_not_compared(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, ["--lr", "1e-3"], {"alpha_min": ["1.0", "0.5", "0.4"]})
    run(found)
    for trial, epochs, lr in zip(found.trials, (0.25, 0.25, 0.5), (1e-3, 2e-3, 1e-3)):
        settings = f"data: {{data: shapes}}\noptim: {{steps: 4, batch_size: 16, epochs: {epochs}, lr: {lr}}}"
        (found.run_folder(trial) / "config.yaml").write_text(settings)
    with pytest.warns(UserWarning, match="only like ones are compared") as told:
        knn = [s for s in summarise(found, {"alpha_min": "1.0"}) if s.score == KNN]
    assert [(s.made, s.rank, s.difference) for s in knn] == [
        ("256 images of shapes", 1, None),
        ("lr 0.002, 256 images of shapes", 1, None),
        ("128 images of shapes", 1, None),
    ]
    assert any("128 images of shapes" in str(w.message) and "alpha_min=0.4,seed=0" in str(w.message) for w in told)
    assert read_summary(write_summary(tmp_path, knn).with_name("summary.json")) == pytest.approx(knn, nan_ok=True)


def test_settings_that_came_to_what_was_asked_for_make_no_run_unlike(tmp_path: Path, pretend) -> None:
    """Choices left open, other ways to write a value, and the machine are no other settings; those of the grid are."""
    fixed = ["--lr", "1e-3", "--workers", "0", "--batch-size", "32"]
    found = plan(tmp_path, fixed, {"alpha_min": ["1.0", "0.5"], "scale": ["0.20,1"]}, lists=["scale"])
    run(found)
    for trial, alpha in zip(found.trials, (1, 0.4)):
        (found.run_folder(trial) / "config.yaml").write_text(
            "data: {data: shapes, scale: [0.2, 1.0], patch_size: 4}\noptim: {steps: 4, batch_size: 16, lr: 0.001}\n"
            f"machine: {{workers: 2}}\nshortcut: {{alpha_min: {alpha}, schedule: cosine}}"  # as --init takes it over
        )
    with pytest.warns(UserWarning, match=r"made with alpha_min 0.4: alpha_min=0.5,") as told:
        assert {s.settings["alpha_min"]: s.made for s in summarise(found)} == {"1.0": "", "0.5": "alpha_min 0.4"}
    assert len(told) == 1


def test_a_run_half_way_has_no_part_in_it(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0"], "seed": ["0", "1"]})
    run(found)
    (found.run_folder(found.trials[1]) / "metrics.jsonl").write_text('{"step": 3, "loss": 2.0}\n')  # of 4
    assert [(s.score, s.by_seed) for s in summarise(found)] == [(KNN, {"0": 10.0}), ("entropy rank", {"0": 2.5})]


def test_scores_of_a_diffusion_model_are_those_at_the_place_that_the_probe_chose(tmp_path: Path) -> None:
    report = Report("shapes", "t=0.1, t=0.4", [0, 1], (16, 16), 10, 10, "test split", 0)
    for i, (layer, level) in enumerate([(0, "t=0.1"), (0, "t=0.4"), (1, "t=0.1"), (1, "t=0.4")]):
        chosen = {"protocol": "lbfgs", "readout": level, "selected": i == 0}
        report.scores.append(Score("linear probe", "model", layer, 20.0 + i, "%", chosen))
        report.scores.append(Score("kNN", "model", layer, 10.0 + i, "%", {"k": 20, "T": 0.07, "readout": level}))
    report.save(tmp_path / "evaluation.json")
    records = [{"step": s, "loss": 1.0 / s, "eval/fid": 100.0 - s} for s in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert scores_of(tmp_path) == {
        "linear probe (lbfgs)": (20.0, "%"), KNN: (10.0, "%"), "FID while training": (80.0, ""),
        "training loss": (pytest.approx((1 / 19 + 1 / 20) / 2), ""),
    }  # fmt: skip
    scored = {"samples": {"images": 10_000}, "scores": {"FID": {"value": 7.5}}}
    (tmp_path / "score.json").write_text(json.dumps(scored))
    found = scores_of(tmp_path)
    assert found["FID (10,000 samples)"] == (7.5, "")
    assert "FID while training" not in found
