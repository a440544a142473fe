"""Comparisons: exactly the settings that differ, every number, and plain words about what is missing."""

import json
import re
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import residua
from residua import cli
from residua.evaluate import Report, Score
from residua.report import NotARun, Page, compare, comparison_table, curves, run_report
from residua.report.along import as_dynamics
from residua.report.compare import _by_size, score_rows
from residua.report.runs import Run, differing_settings, read_runs, while_training
from residua.train.checkpoint import write_checkpoint
from residua.train.finetune_config import Finetune

Make = Callable[..., Path]
Read = Callable[[Path], Any]


def printed(table: object) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_only_settings_that_differ_are_shown(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a", alpha_min=0.9, seed=1), make_run("b", knn=39.25, alpha_min=1.0, scale=(0.5, 1.0), seed=1)]
    differing = differing_settings(read_runs(runs))
    assert differing == {"scale": [(0.2, 1.0), (0.5, 1.0)], "alpha_min": [0.9, 1.0]}
    text = read_page(compare(runs, tmp_path / "c.html")).text
    shown, folded = text.split("All settings")
    assert "alpha_min" in shown
    assert "0.2, 1" in shown
    assert "weight_decay" not in shown
    assert "weight_decay" in folded
    assert "weight_decay" not in printed(comparison_table(runs))
    for number in ("41.5 %", "39.2 %", "21.5 %", "29.2 %", "39.5 %", "1.23 nats"):  # both runs, baselines, layers
        assert number in text
    assert "same seed" in text


def test_every_score_stands_below_its_run_and_beside_its_name(tmp_path: Path, make_run: Make) -> None:
    runs = [make_run("a"), make_run("b", knn=39.25, alpha_min=1.0)]
    spans = {"a": [40.0, 43.0], "b": [37.5, 41.0]}
    for run in runs:
        stored = json.loads((run / "evaluation.json").read_text())
        for score in stored["scores"]:
            if (score["metric"], score["subject"]) == ("kNN", "model"):
                score["settings"]["interval"] = spans[run.name]
        (run / "evaluation.json").write_text(json.dumps(stored))
    assert [[cell.text for cell in row] for row in score_rows(read_runs(runs))] == [
        ["kNN (k 20, T 0.07)", "41.5 %", "39.2 %"],
        ["kNN (k 20, T 0.07), 95 % interval", "40.0 to 43.0 %", "37.5 to 41.0 %"],
        ["kNN (k 20, T 0.07), random init", "21.5 %", "19.2 %"],
        ["kNN (k 20, T 0.07), pixels", "31.5 %", "29.2 %"],
        ["entropy rank", "1.23 nats", "1.23 nats"],
        ["entropy rank, random init", "1.23 nats", "1.23 nats"],
        ["entropy rank, pixels", "1.23 nats", "1.23 nats"],
    ]
    html = compare(runs, tmp_path / "c.html").read_text().partition("Every number")[2]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in re.findall(r"<tr>.*?</tr>", html)]
    assert ["score", "block", "of", "a", "b"] in rows
    assert ["kNN (k 20, T 0.07)", "1", "model", "40.5 %", "38.2 %"] in rows
    assert ["kNN (k 20, T 0.07)", "1", "random init", "20.5 %", "18.2 %"] in rows


def test_what_is_other_in_the_last_run_alone_differs(make_run: Make) -> None:
    runs = [make_run("a"), make_run("b"), make_run("c", mask_ratio=0.5)]
    assert differing_settings(read_runs(runs)) == {"mask_ratio": [0.75, 0.75, 0.5]}


def test_three_runs_one_without_evaluation(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a"), make_run("b", knn=None, seed=3), make_run("c", knn=50.0)]
    text = read_page(compare(runs, tmp_path)).text
    assert (tmp_path / "comparison.html").exists()
    assert "b has not been evaluated" in text
    assert "50.0 %" in text
    table = printed(comparison_table(runs))
    assert "50.0 %" in table
    assert "not evaluated" in table


def test_scores_of_different_images_are_told_where_they_are_shown(
    tmp_path: Path, make_run: Make, read_page: Read
) -> None:
    runs = [make_run("a"), make_run("b")]
    said = "differ in data or protocol"
    assert said not in printed(comparison_table(runs))
    file = runs[1] / "evaluation.json"
    file.write_text(file.read_text().replace('"shapes"', '"digits"'))
    assert said in printed(comparison_table(runs))
    assert said in read_page(compare(runs, tmp_path)).text


def test_a_model_from_elsewhere_stands_beside_runs(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a", alpha_min=0.9), make_run("b", alpha_min=1.0)]
    other = shutil.copy(make_run("c", knn=55.5) / "evaluation.json", tmp_path / "their-vit.json")
    given = [*runs, Path(other)]
    assert differing_settings(read_runs(given)) == {"alpha_min": [0.9, 1.0, None]}
    text = read_page(compare(given, tmp_path / "page.html")).text
    assert "their-vit" in text
    assert "55.5 %" in text
    table = printed(comparison_table(given))
    assert "55.5 %" in table
    with pytest.raises(NotARun, match=r"their-vit\.json is none"):
        compare(given, tmp_path / "page.html", along=True)
    Path(other).write_text("[1]")
    with pytest.raises(NotARun, match="neither a run's folder nor scores that residua evaluate --out wrote"):
        read_runs(given)


def test_equal_runs_say_so(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a", knn=None), make_run("b", knn=None)]
    assert "No setting differs" in read_page(compare(runs, tmp_path / "c.html")).text


def test_hostile_and_equal_folder_names(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("x/<b>[red]$_"), make_run("y/<b>[red]$_", seed=4)]
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert "x/<b>[red]$_" in found.text
    assert "b" not in found.tags
    assert "y/<b>[red]$_" in printed(comparison_table(runs))


def test_no_runs(tmp_path: Path, make_run: Make) -> None:
    run, out = make_run("a"), tmp_path / "c.html"
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARun, match="1 run given: a comparison needs two or more"):
        compare([run], out)
    with pytest.raises(NotARun, match="no run given"):
        compare([], out, along=True)
    with pytest.raises(NotARun, match="no such folder"):
        compare([run, tmp_path / "nowhere"], out)
    with pytest.raises(NotARun, match=r"no config\.yaml"):
        compare([run, tmp_path / "empty"], out)
    with pytest.raises(NotARun, match="twice"):
        compare([run, run], out)
    (run / "evaluation.json").write_text("{ broken")
    with pytest.raises(NotARun, match="cannot be read"):
        compare([run, make_run("b")], out)
    assert not out.exists()


def test_real_runs_side_by_side(tmp_path: Path, quick_demo: Any, read_page: Read) -> None:
    runs = [quick_demo[0].parent / name for name in ("fading", "plain")]
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert list(differing_settings(read_runs(runs))) == ["alpha_min"]
    assert "Reconstructions" in found.text
    assert "principal components" in found.text
    for part in ("Attention", "Classes in the plane", "Nearest neighbours", "Feature norms"):
        assert part in found.text
    assert sum(r.startswith("data:image/png") for r in found.refers) == 4
    assert found.tags.count("details") == 1


def test_runs_of_other_data_patches_and_depths(
    tmp_path: Path, quick_demo: Any, make_run: Make, read_page: Read
) -> None:
    """One real run, one of other data without weights: each number once, and words about the rest."""
    real, other = quick_demo[0].parent / "plain", make_run("other", data="folder:/nowhere/at/all", depth=3)
    found = read_page(compare([real, other], tmp_path / "c.html"))
    assert "trained on different data" in found.text
    assert "differ in data or protocol" in found.text
    assert "No pictures of other" in found.text
    assert "Reconstructions" in found.text


def test_every_run_in_a_row_where_there_are_several(tmp_path: Path, make_run: Make) -> None:
    runs = [make_run(f"r{i}", knn=40.0 + i, alpha_min=1 - i / 10) for i in range(3)]
    html = compare(runs, tmp_path / "c.html").read_text()
    row = html[html.index('<td class="long">r1</td>') :]
    values = re.findall(r'data-value="([^"]*)"', row[: row.index("</tr>")])
    assert values == ["0.9", "41.0", "1.23"], "alpha_min, kNN, rank, with all their digits"


def test_broken_metrics_are_said_and_the_rest_is_drawn(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a"), make_run("b", seed=2)]
    metrics = runs[1] / "metrics.jsonl"
    metrics.write_text("{ broken\n[1]\n" + metrics.read_text() + '{"step": 30, "lo')
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert "b: 3 lines of metrics.jsonl cannot be read and are left out" in found.text
    assert [record["step"] for record in read_runs(runs)[1].metrics] == [1, 10, 20]


def test_scores_while_training_are_drawn_for_nothing(tmp_path: Path, make_run: Make, read_page: Read) -> None:
    runs = [make_run("a"), make_run("b", alpha_min=1.0)]
    for run in runs:
        lines = [{"step": s, "epoch": s / 10, "loss": 1.0, "eval/linear_probe": 10.0 + s} for s in (10, 20)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert "While training" in found.text
    assert "alpha_min 0.9" in found.text


def test_rank_and_accuracy_while_training_are_correlated_over_three_runs(
    tmp_path: Path, make_run: Make, read_page: Read
) -> None:
    runs = [make_run(name, alpha_min=alpha) for name, alpha in (("a", 1.0), ("b", 0.9), ("c", 0.8))]
    for i, run in enumerate(runs):
        scores = {"eval/linear_probe": 30.0 - i, "eval/entropy_rank": 2.0 + i}
        (run / "metrics.jsonl").write_text(json.dumps({"step": 10, "epoch": 1.0, "loss": 1.0} | scores) + "\n")
    found = read_page(compare(runs[:2], tmp_path / "two.html"))
    assert "Rank and accuracy" not in found.text
    found = read_page(compare(runs, tmp_path / "three.html"))
    assert "Rank and accuracy" in found.text
    (pair,) = as_dynamics({run.name: while_training(run) for run in read_runs(runs)}).correlation()
    assert (pair.epoch, pair.n) == (1.0, 3)
    assert pair.r == pytest.approx(-1)


def test_at_the_terminal(
    tmp_path: Path, quick_demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(quick_demo[0].parent / name) for name in ("fading", "plain")]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *runs, "--dynamics", "--limit", "50", "--colors", "spectral", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "measuring fading: step 8" in said
    assert "page: comparison.html" in said
    assert "spectral eigenvectors" in (tmp_path / "comparison.html").read_text()
    assert cli.main(["compare", runs[0]]) == 2
    assert "two or more" in capsys.readouterr().err
    assert cli.main(["compare", *runs, "--limit", "-1"]) == 2
    assert "--limit -1" in " ".join(capsys.readouterr().err.split())


def test_a_diverged_model_costs_its_pictures_not_the_page(tmp_path: Path, quick_demo: Any, read_page: Read) -> None:
    runs = []
    for name in ("fading", "plain"):
        runs.append(tmp_path / name)
        shutil.copytree(quick_demo[0].parent / name, runs[-1])
    model = residua.load(runs[0])
    torch.nn.init.constant_(residua.nn.encoder_of(model).blocks[1].mlp.fc2.weight, float("nan"))  # type: ignore[union-attr, arg-type]
    write_checkpoint(runs[0], 9, model, {})
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert "Not drawn" in found.text
    assert "Every number" in found.text


def test_classifiers_compare_by_accuracy_rank_and_number_of_blocks(tmp_path: Path, read_page: Read) -> None:
    runs = []
    small = {"width": 4, "batch_size": 32, "steps": 4, "optimizer": "sgd", "eval_every": 1.0, "cpu": True}
    for alpha, third in ((1.0, 1), (1.0, 2), (0.7, 1), (0.7, 2)):
        runs.append(tmp_path / f"alpha-{alpha}-{third}")
        residua.evaluate.finetune(
            "resnet18",
            "shapes?n=64&size=16&test=32",
            stages=(1, 1, third, 1),
            alpha_min=alpha,
            out=str(runs[-1]),
            **small,
        )
    found = read_page(compare(runs, tmp_path / "c.html"))
    result = json.loads((runs[0] / "finetune.json").read_text())
    assert f"{result['accuracy']:.1f} %" in found.text
    assert "By number of blocks" in found.text
    assert "entropy rank on test images" in found.text
    assert "While training" in found.text
    assert "accuracy" in printed(comparison_table(runs))
    with pytest.raises(NotARun, match="is none"):
        compare(runs, tmp_path / "d.html", along=True)
    with pytest.raises(NotARun, match="no masked autoencoder"):
        run_report(runs[0])


def test_scores_stand_at_their_number_of_blocks_in_the_line_of_their_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, drawn = [], {}
    for alpha, third, accuracy in ((1.0, 1, 50.0), (0.7, 1, 55.0), (1.0, 3, 60.0)):
        report = Report("x", "pooled", [-1], (8, 8), 10, 10, "test split", 0)
        report.scores += [
            Score("accuracy", "model", -1, accuracy, "%"),
            Score("entropy rank", "model", -1, 2.0, "nats"),
        ]
        config = Finetune().override(model="resnet18", stages=(1, 1, third, 1), alpha_min=alpha)
        runs.append(Run(f"r{accuracy:g}", Path(), config, [], {}, report))
    real = curves.size_curves
    monkeypatch.setattr(
        curves, "size_curves", lambda metric, *rest: drawn.update({metric: rest}) or real(metric, *rest)
    )
    _by_size(Page("x"), runs)
    assert drawn == {
        "accuracy": ({"alpha_min 1": [(4, 50.0), (6, 60.0)], "alpha_min 0.7": [(4, 55.0)]}, "%"),
        "entropy rank": ({"alpha_min 1": [(4, 2.0), (6, 2.0)], "alpha_min 0.7": [(4, 2.0)]}, "nats"),
    }


def test_diffusion_models_compare_too(tmp_path: Path, read_page: Read) -> None:
    small = "--size nano --depth 2 --embed-dim 32 --num-heads 2 --steps 2 --batch-size 16 --cpu".split()  # noqa: SIM905
    runs = [tmp_path / "plain", tmp_path / "faded"]
    for run, alpha in zip(runs, ("1.0", "0.7")):
        args = ["--data", "shapes?n=32&size=16&test=16", "--alpha-min", alpha, "--out", str(run)]
        assert cli.main(["diffuse", *args, *small]) == 0
    assert differing_settings(read_runs(runs)) == {"alpha_min": [1.0, 0.7]}
    found = read_page(compare(runs, tmp_path / "c.html"))
    assert "Training loss" in found.text
    assert "process" in found.text.split("All settings")[1]
