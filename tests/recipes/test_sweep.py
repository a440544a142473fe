"""Sweeps: the grid, what is run again, and what a failure or a kill costs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from residua import cli
from residua.recipes import sweep
from residua.recipes.summary import summarise
from residua.recipes.sweep import Sweep, Trial, plan, run
from residua.train.metrics import read_metrics

CLASSIFIER = """
resmlp --depth 2 --width 8 --data shapes?n=48&size=16&test=16 --batch-size 16 --cpu --trackers
""".split()  # noqa: SIM905
START = """
import pathlib, sys
from residua.recipes.sweep import plan, run
run(plan(pathlib.Path(sys.argv[1]), sys.argv[2:], {"seed": ["0", "1"]}, kind="finetune"))
"""


def test_the_grid_is_every_combination_with_names_to_find_them_by(tmp_path: Path) -> None:
    found = plan(tmp_path, ["mae-shapes"], {"alpha_min": ["1.0", "0.9"], "seed": ["0", "1", "2"]})
    assert len(found.trials) == 6
    assert found.trials[4].name == "alpha_min=0.9,seed=1"
    assert found.trials[4].group == (("alpha_min", "0.9"),)
    (stage,) = sweep.stages(found, found.trials[4])
    assert stage.args == [
        "pretrain", "mae-shapes", "--alpha-min", "0.9", "--seed", "1",
        "--out", str(tmp_path / "runs/alpha_min=0.9,seed=1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("jobs", "given", "expected"), [(1, None, "None"), (2, None, "3"), (8, None, "1"), (2, "5", "5")]
)
def test_runs_at_once_share_the_cores(
    pretend: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, given: str | None, expected: str
) -> None:
    monkeypatch.setattr(sweep, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    run(plan(tmp_path / "s", [], {"alpha_min": ["1.0"]}), jobs=jobs)
    assert (tmp_path / "s/logs/alpha_min=1.0,seed=0.txt").read_text().strip() == f"working, threads: {expected}"


def test_each_kind_has_its_commands(tmp_path: Path) -> None:
    trial = Trial({"stages": "2,2,6,2", "data": "folder:a,b"})
    stages = sweep.stages(Sweep(tmp_path, ["resnet18"], kind="finetune", lists=["stages"]), trial)
    assert [s.args[:9] for s in stages] == [
        ["finetune", "resnet18", "--stages", "2", "2", "6", "2", "--data", "folder:a,b"]
    ]
    assert stages[0].product == tmp_path / "runs" / trial.name / "finetune.json"
    assert trial.name.startswith("stages=2-2-6-2,data=folder-a-b-")
    for value, flag in (("True", "--zero-init-all"), ("False", "--no-zero-init-all")):
        (stage,) = sweep.stages(Sweep(tmp_path, [], switches=["zero_init_all"]), Trial({"zero_init_all": value}))
        assert stage.args[1] == flag
    diffuse = Sweep(tmp_path, ["uvit-shapes"], kind="diffuse", evaluate=["--times", "0.1"], score=["--n", "8"])
    folder = str(diffuse.run_folder(Trial({"seed": "0"})))
    assert [s.args for s in sweep.stages(diffuse, Trial({"seed": "0"}))] == [
        ["diffuse", "uvit-shapes", "--seed", "0", "--out", folder],
        ["evaluate", folder, "--times", "0.1"],
        ["score", folder, "--n", "8", "--out", f"{folder}/score.json"],
    ]


def test_a_failure_is_listed_and_costs_the_others_nothing(tmp_path: Path, pretend) -> None:
    ended: list[str] = []
    found = plan(tmp_path, [], {"alpha_min": ["1.0", "0", "0.8"]})
    run(found, jobs=2, on_end=lambda trial: ended.append(trial.name))
    assert sorted(ended) == ["alpha_min=0,seed=0", "alpha_min=0.8,seed=0", "alpha_min=1.0,seed=0"]
    assert {t.settings["alpha_min"]: t.status for t in found.trials} == {"1.0": "done", "0": "failed", "0.8": "done"}
    assert found.trials[1].error == "error: no shortcut left"
    assert json.loads((tmp_path / "sweep.json").read_text())["trials"][1]["status"] == "failed"
    assert {s.settings["alpha_min"] for s in summarise(found)} == {"1.0", "0.8"}


def test_what_is_done_is_not_done_again_and_a_sweep_can_grow(tmp_path: Path, pretend) -> None:
    run(plan(tmp_path, ["mae-shapes"], {"alpha_min": ["1.0"], "seed": ["0"]}))
    run(plan(tmp_path, ["mae-shapes"], {"alpha_min": ["1.0"], "seed": ["0"]}))
    assert pretend.names == ["alpha_min=1.0,seed=0"]
    grown = plan(tmp_path, ["mae-shapes"], {"alpha_min": ["0.9"], "seed": ["0", "1"]})
    run(grown)
    assert pretend.names[1:] == ["alpha_min=0.9,seed=0", "alpha_min=0.9,seed=1"]
    assert len(summarise(grown)) == 4  # two scores of two settings: the earlier run still counts
    for other in ({"fixed": ["mae-cifar100"]}, {"kind": "finetune"}, {"evaluate": ["--k", "5"]}):
        with pytest.raises(ValueError, match="holds another sweep"):
            plan(tmp_path, **{"fixed": ["mae-shapes"], "grid": {"alpha_min": ["1.0"]}} | other)


def test_a_run_without_a_seed_is_the_first_of_more_seeds(tmp_path: Path, pretend) -> None:
    first = plan(tmp_path, ["--steps", "4"], {"alpha_min": ["1.0", "0.5"]})
    run(first)
    grown = plan(tmp_path, ["--steps", "4"], {"alpha_min": ["1.0", "0.5"], "seed": ["0", "1"]})
    run(grown)
    assert pretend.names == [f"alpha_min={a},seed={s}" for s in (0, 1) for a in ("1.0", "0.5")]
    assert [list(s.by_seed) for s in summarise(grown)] == [["0", "1"]] * 4
    (tmp_path / "own.yaml").write_text("seed: 5")
    own = plan(tmp_path / "own", [str(tmp_path / "own.yaml")], {"alpha_min": ["1.0"]})
    assert own.trials[0].settings == {"alpha_min": "1.0", "seed": "5"}


def test_a_cell_is_the_same_however_it_is_typed(tmp_path: Path, pretend) -> None:
    run(plan(tmp_path, ["--steps", "4", "--lr", "1e-3"], {"alpha_min": ["1.0", "0.9"], "seed": ["0"]}))
    begun = pretend.names
    assert len(begun) == 2
    again = plan(tmp_path, ["--lr", "0.001", "--steps", "4"], {"seed": ["0"], "alpha_min": ["1", "0.90", "1.00"]})
    assert [t.name for t in again.trials] == begun
    assert [t.settings["alpha_min"] for t in again.trials] == ["1.0", "0.9"]
    wider = plan(tmp_path, ["--steps", "4"], {"lr": ["1e-3", "3e-3"], "alpha_min": ["1", "0.9"]})
    assert [t.name for t in wider.trials if t.status == "done"] == begun
    assert wider.trials[0].settings == {"alpha_min": "1.0", "lr": "1e-3", "seed": "0"}
    assert wider.fixed == ["--steps", "4"]
    run(wider)
    assert pretend.names[2:] == ["alpha_min=1.0,lr=3e-3,seed=0", "alpha_min=0.9,lr=3e-3,seed=0"]
    narrow = plan(tmp_path, ["--steps", "4", "--lr", "3e-3"], {"alpha_min": ["0.9"], "seed": ["0", "1"]})
    assert [t.status for t in narrow.trials] == ["done", "waiting", "done", "done", "done"]
    assert narrow.trials[1].settings == {"alpha_min": "0.9", "lr": "3e-3", "seed": "1"}
    run(narrow)
    knn = [s for s in summarise(narrow) if s.score.startswith("kNN")]
    assert {tuple(s.settings.values()): s.seeds for s in knn} == {
        ("0.9", "3e-3"): 2, ("1.0", "1e-3"): 1, ("0.9", "1e-3"): 1, ("1.0", "3e-3"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("finished", ["1", "1.0"])
def test_of_two_earlier_runs_of_one_cell_it_comes_to_the_finished_one(tmp_path: Path, pretend, finished: str) -> None:
    before = Sweep(tmp_path, [], [Trial({"alpha_min": text, "seed": "0"}) for text in ("1", "1.0")])
    before.save()
    (done,) = (trial for trial in before.trials if trial.settings["alpha_min"] == finished)
    assert sweep.carry_out(before, done) == ""
    assert [(t.name, t.status) for t in plan(tmp_path, [], {"alpha_min": ["1.00"]}).trials] == [(done.name, "done")]


def test_lists_and_switches_of_an_earlier_call_are_typed_as_such_in_this_one(tmp_path: Path) -> None:
    grid = {"scale": ["0.2,1.0", "0.5,1.0"], "flip": ["True", "False"]}
    before = plan(tmp_path, [], grid, lists=["scale"], switches=["flip"])
    now = plan(tmp_path, ["--scale", "0.5", "1.0", "--no-flip"], {"alpha_min": ["auto", "1.0"]})
    (stage,) = sweep.stages(now, now.trials[1])
    assert stage.args[:9] == ["pretrain", "--scale", "0.5", "1.0", "--no-flip", "--alpha-min", "1.0", "--seed", "0"]
    assert now.trials[0].name == before.trials[-1].name


def test_settings_that_take_each_others_place_can_follow_each_other(tmp_path: Path, pretend) -> None:
    run(plan(tmp_path, [], {"alpha_min": ["1.0"]}))
    later = plan(tmp_path, [], {"alpha_eff": ["0.01"]})
    assert later.trials[0].settings == {"alpha_min": "auto", "alpha_eff": "0.01", "seed": "0"}
    assert [sweep.stages(later, t)[0].args[1:3] for t in later.trials] == [
        ["--alpha-eff", "0.01"], ["--alpha-min", "1.0"],
    ]  # fmt: skip


def test_a_sweep_of_before_is_found_with_its_folders(tmp_path: Path, pretend) -> None:
    old = [{"alpha_min": "1.0", "data": data} for data in ("folder:a,b", "folder:a-b")]
    name = sweep.name_before(old[0])
    assert name == sweep.name_before(old[1])
    rows = [{"settings": settings, "status": "done", "error": ""} for settings in old]
    (tmp_path / "sweep.json").write_text(json.dumps({"fixed": ["--steps", "4"], "trials": rows}))
    (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / name / "evaluation.json").write_text("{}")
    grid = {"alpha_min": ["1.0"], "data": [settings["data"] for settings in old], "seed": ["0", "1"]}
    found = plan(tmp_path, ["--steps", "4"], grid)
    assert [t.status for t in found.trials] == ["done", "waiting", "waiting", "waiting"]
    assert found.trials[0].name == name
    assert len({t.name for t in found.trials}) == 4


def test_an_edited_settings_file_is_another_sweep(tmp_path: Path, pretend) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("lr: 1e-3")
    run(plan(tmp_path / "s", [str(file)], {"alpha_min": ["1.0"]}))
    file.write_text("lr: 1e-3\nworkers: 2")  # which changes nothing that is learned
    plan(tmp_path / "s", [str(file)], {"alpha_min": ["1.0"]})
    file.write_text("lr: 2e-3")
    with pytest.raises(ValueError, match=r"holds another sweep: lr is 0.001 there, 0.002 here"):
        plan(tmp_path / "s", [str(file)], {"alpha_min": ["1.0", "0.9"]})


def test_a_product_that_cannot_be_read_is_made_again(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0", "0.9"]})
    run(found)
    product = found.run_folder(found.trials[0]) / "evaluation.json"
    product.write_text(product.read_text()[:40])
    assert [t.status for t in plan(tmp_path, [], {"alpha_min": ["1.0", "0.9"]}).trials] == ["waiting", "done"]


def test_a_run_that_was_evaluated_half_way_is_trained_to_the_end(tmp_path: Path) -> None:
    found = plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse", score=["--n", "8"])
    folder = found.run_folder(found.trials[0])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("optim: {steps: 4}")
    for name in ("evaluation.json", "score.json"):
        (folder / name).write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n{"st')
    assert not found.done(found.trials[0])
    (folder / "metrics.jsonl").write_text('{"step": 2}\n{"step": 4}\n')
    assert found.done(found.trials[0])


def test_what_was_measured_half_way_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import pathlib, sys
run = pathlib.Path(sys.argv[2] if sys.argv[1] != "diffuse" else sys.argv[sys.argv.index("--out") + 1])
if sys.argv[1] == "diffuse":
    (run / "metrics.jsonl").write_text('{"step": 4}')
else:
    (run / {"evaluate": "evaluation.json", "score": "score.json"}[sys.argv[1]]).write_text('{"at": 4}')
"""
    (tmp_path / "fake.py").write_text(script)
    monkeypatch.setattr(sweep, "program", lambda: [sys.executable, str(tmp_path / "fake.py")])
    found = plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse", score=["--n", "8"])
    folder = found.run_folder(found.trials[0])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("optim: {steps: 4}")
    (folder / "metrics.jsonl").write_text('{"step": 2}')
    for name in ("evaluation.json", "score.json"):
        (folder / name).write_text('{"at": 2}')
    run(found)
    assert found.trials[0].status == "done"
    assert {name: json.loads((folder / name).read_text()) for name in ("evaluation.json", "score.json")} == {
        "evaluation.json": {"at": 4}, "score.json": {"at": 4},
    }  # fmt: skip


def test_a_damaged_record_is_named_in_one_line(tmp_path: Path) -> None:
    for text in ('{"fixed": [', "[]", '{"fixed": []}', '{"fixed": [], "trials": [{}]}', '{"trials": [], "x": 1}'):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(ValueError, match=r"sweep.json cannot be read"):
            plan(tmp_path, [], {"alpha_min": ["1.0"]})


def test_a_folder_is_swept_by_one_process(tmp_path: Path) -> None:
    holder = "import sys; from residua.disk import claim; from pathlib import Path; claim(Path(sys.argv[1])); input()"
    other = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path / sweep.LOCK)], stdin=subprocess.PIPE)
    try:
        _wait((tmp_path / sweep.LOCK).exists)
        _wait(lambda: not _free(tmp_path / sweep.LOCK))
        with pytest.raises(ValueError, match="is being swept by another process"):
            plan(tmp_path, [], {"alpha_min": ["1.0"]})
    finally:
        other.communicate(b"\n")
    plan(tmp_path, [], {"alpha_min": ["1.0"]})


def _free(path: Path) -> bool:
    with path.open("ab") as file:
        return sweep.hold(file)


def test_sigterm_ends_the_runs_too(tmp_path: Path) -> None:
    script = """
import pathlib, sys
from residua.recipes import sweep
sweep.program = lambda: [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
sweep.run(sweep.plan(pathlib.Path(sys.argv[1]), [], {"seed": ["0", "1"]}))
"""
    going = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE)
    log = tmp_path / "logs" / "seed=0.txt"
    _wait(lambda: log.exists() and log.read_text().endswith("\n"))
    going.terminate()
    going.communicate(timeout=60)
    assert going.returncode not in (0, -signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert not (tmp_path / "logs" / "seed=1.txt").exists() or not (tmp_path / "logs" / "seed=1.txt").read_text()
    assert {t["status"] for t in json.loads((tmp_path / "sweep.json").read_text())["trials"]} == {"waiting"}


def test_scores_of_samples_can_be_added_later(tmp_path: Path) -> None:
    first = plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse")
    folder = first.run_folder(first.trials[0])
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text("{}")
    assert plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse").trials[0].status == "done"
    more = plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse", score=["--n", "8"])
    assert more.trials[0].status == "waiting"
    assert [s.args[0] for s in sweep.stages(more, more.trials[0]) if not s.product.exists()] == ["score"]
    assert plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse").score == ["--n", "8"]
    with pytest.raises(ValueError, match="holds another sweep"):
        plan(tmp_path, [], {"seed": ["0"]}, kind="diffuse", score=["--n", "9"])


def test_a_run_that_was_begun_is_continued(tmp_path: Path) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0"]})
    folder = found.run_folder(found.trials[0])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    assert sweep.stages(found, found.trials[0])[0].args[-1] == "--resume"


def test_a_run_that_is_still_going_is_waited_for(tmp_path: Path, pretend) -> None:
    found = plan(tmp_path, [], {"alpha_min": ["1.0"]})
    log, target = tmp_path / "logs" / "alpha_min=1.0,seed=0.txt", found.run_folder(found.trials[0]) / "evaluation.json"
    log.parent.mkdir()
    target.parent.mkdir(parents=True)
    with log.open("ab") as file:
        sweep.hold(file)
        left = subprocess.Popen(
            ["sh", "-c", f"sleep 1; echo '{{}}' > '{target}'"], stdout=file
        )  # an orphan, as it were
    told: list[str] = []
    run(found, on_wait=lambda trial: told.append(trial.name))
    left.wait()
    assert told == ["alpha_min=1.0,seed=0"]
    assert found.trials[0].status == "done"
    assert pretend.names == []


def test_a_sweep_killed_half_way_continues_and_agrees_with_one_that_was_not(tmp_path: Path) -> None:
    fixed = [*CLASSIFIER, "--steps", "90", "--checkpoint-every", "10", "--eval-every", "10"]
    out = tmp_path / "killed"
    args = ["sweep", "finetune", *fixed, "--seeds", "2", "--out", str(out)]
    going = subprocess.Popen([sys.executable, "-c", START, str(out), *fixed], start_new_session=True)
    try:
        _wait(lambda: list((out / "runs" / "seed=1" / "checkpoints").glob("step-*")))
    finally:
        os.killpg(going.pid, signal.SIGKILL)
        going.wait()
    first, second = out / "runs" / "seed=0", out / "runs" / "seed=1"
    assert not (second / "finetune.json").exists(), "it was to be killed before the end"
    before = (first / "finetune.json").stat().st_mtime_ns
    assert cli.main(args) == 0
    assert (first / "finetune.json").stat().st_mtime_ns == before
    assert {t["status"] for t in json.loads((out / "sweep.json").read_text())["trials"]} == {"done"}

    other = plan(tmp_path / "whole", fixed, {"seed": ["1"]}, kind="finetune")
    run(other)
    whole = other.run_folder(other.trials[0])
    mine, theirs = (load_file(max(p.glob("checkpoints/step-*")) / "model.safetensors") for p in (second, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    losses = [[(r["step"], r["loss"]) for r in read_metrics(p)] for p in (second, whole)]
    assert losses[0] == losses[1]
    page = (out / "sweep.html").read_text()
    assert "top-5 accuracy" in page
    assert "cross entropy: mean over seeds, band" in page


def _wait(ready, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_cells_that_failed_and_are_asked_for_no_more_are_gone(pretend: object, tmp_path: Path) -> None:
    run(plan(tmp_path, [], {"alpha_min": ["1.0", "0"]}))
    found = plan(tmp_path, [], {"alpha_min": ["0.9"]})
    assert [t.name for t in found.trials] == ["alpha_min=0.9,seed=0", "alpha_min=1.0,seed=0"]


def test_runs_that_were_begun_and_are_asked_for_no_more_are_left_and_found_again(tmp_path: Path, pretend) -> None:
    before = plan(tmp_path, ["--steps", "4"], {"alpha_min": ["1.0", "0.8", "0.7"]})
    half = before.run_folder(before.trials[1])
    half.mkdir(parents=True)
    (half / "config.yaml").write_text("{}")
    narrow = plan(tmp_path, ["--steps", "4"], {"alpha_min": ["1.0"]})
    assert [(t.settings["alpha_min"], t.status) for t in narrow.trials] == [("1.0", "waiting"), ("0.8", "left")]
    run(narrow)
    assert pretend.names == ["alpha_min=1.0,seed=0"]
    again = plan(tmp_path, ["--steps", "4"], {"lr": ["auto"], "alpha_min": ["0.8"]})
    assert [(t.name, t.status) for t in again.trials] == [
        ("alpha_min=0.8,seed=0", "waiting"), ("alpha_min=1.0,seed=0", "done"),
    ]  # fmt: skip
    assert sweep.stages(again, again.trials[0])[0].args[-1] == "--resume"


def test_runs_of_earlier_calls_are_scored_with_those_of_the_call_that_asks_for_it(tmp_path: Path) -> None:
    before = plan(tmp_path, ["uvit-shapes"], {"alpha_min": ["1.0"]}, kind="diffuse")
    (run := before.run_folder(before.trials[0])).mkdir(parents=True)
    (run / "evaluation.json").write_text("{}")
    now = plan(tmp_path, ["uvit-shapes"], {"alpha_min": ["0.9"]}, kind="diffuse", score=["--n", "8"])
    assert [(t.name, t.status) for t in now.trials] == [
        ("alpha_min=0.9,seed=0", "waiting"), ("alpha_min=1.0,seed=0", "waiting"),
    ]  # fmt: skip
    assert [stage.done for stage in sweep.stages(now, now.trials[1])] == [True, True, False]


def test_options_of_the_evaluation_have_no_order_and_the_device_is_free(tmp_path: Path) -> None:
    def planned(*evaluate: str) -> Sweep:
        return plan(tmp_path, ["uvit-shapes"], {"alpha_min": ["1.0"]}, kind="diffuse", evaluate=list(evaluate))

    planned("--times", "0.1", "0.4", "--k", "5", "--no-cache", "--device", "cpu")
    planned("--k", "5", "--times", "0.1", "0.4", "--no-cache")
    with pytest.raises(ValueError, match=r"evaluate is k 5, no-cache, times 0.1 0.4 there, k 6"):
        planned("--k", "6")


def test_a_boxed_error_is_told_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("begun\n╭─ Parsing error ─╮\n│ --flip: no True │\n╰─────╯\n")
    assert sweep._last_line(tmp_path / "log") == "--flip: no True"
