"""`residua sweep` from what was typed to the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from residua import cli
from residua.cli.sweep import _open_data, _start, _waited_for
from residua.cli.sweep_options import kind_of, split
from residua.disk import release
from residua.recipes.sweep import LOCK, Sweep, Trial, plan

TINY = """
--data shapes?n=48&size=16&test=16 --size nano --depth 2 --embed-dim 32 --num-heads 2 --decoder-embed-dim 32
--decoder-depth 1 --patch-size 4 --batch-size 16 --steps 4 --cpu
""".split()  # noqa: SIM905
UVIT = """
uvit-shapes --data shapes?n=48&size=16&test=16 --depth 2 --embed-dim 32 --num-heads 2 --batch-size 16 --steps 4
--sample-every 0 --trackers --cpu
""".split()  # noqa: SIM905


def test_the_command_from_grid_to_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    args = ["sweep", *TINY, "--seeds", "1", "--out", str(out), "--eval-every", "1"]
    assert cli.main(args) == 0
    printed = capsys.readouterr().out
    assert "1 runs" in printed
    assert "linear" in printed
    page = (out / "sweep.html").read_text()
    assert "Along training" in page
    assert "linear probe: one seed." in page
    assert (out / "runs" / "seed=0" / "report.html").exists()
    assert cli.main(args) == 0
    assert "1 of them finished before" in capsys.readouterr().out


def test_the_command_compares_with_a_baseline(tmp_path: Path, pretend, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["sweep", "--alpha-min", "1.0", "0.5", "--seeds", "3", "--jobs", "3", "--baseline", "alpha-min=1"]
    assert cli.main([*args, "--out", str(tmp_path / "sweep")]) == 0
    printed = capsys.readouterr().out
    assert "difference to alpha_min 1.0" in printed
    assert "-3.0 ± 6.6" in " ".join(printed.split())
    page = (tmp_path / "sweep" / "sweep.html").read_text()
    assert "Against the baseline" in page
    assert "-3.0 ± 6.6" in page


def test_a_baseline_of_an_earlier_call(tmp_path: Path, pretend, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--seeds", "2", "--out", str(tmp_path / "sweep")]
    assert cli.main(["sweep", "--alpha-min", "1.0", "0.5", *out]) == 0
    later = ["sweep", "--alpha-min", "0.5", "--until", "None", "0.75", *out, "--baseline"]
    assert cli.main([*later, "alpha_min=1", "until=0.5"]) == 2
    swept = "alpha_min=0.5, until=None, until=0.75, alpha_min=1.0"
    assert f"--baseline until=0.5 is none of the settings that are swept: {swept}" in " ".join(
        capsys.readouterr().err.split()
    )
    assert cli.main([*later, "alpha_min=1", "until=None"]) == 0
    assert "difference to alpha_min 1.0, until None" in " ".join(capsys.readouterr().out.split())
    rows = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    compared = {tuple(row["settings"].values()) for row in rows if "difference" in row}
    assert compared == {("0.5", "0.75"), ("0.5", "None")}


def test_of_one_seed_no_interval_is_spoken_of(tmp_path: Path, pretend, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["sweep", "--alpha-min", "1.0", "0.5", "--baseline", "alpha_min=1.0", "--out", str(tmp_path / "sweep")]
    assert cli.main(args) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "one seed each" in printed
    assert "paired by seed: one seed each" in printed
    assert "±" not in printed
    assert cli.main([*args, "--seeds", "2"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("mean ± 95 % interval over seeds") == 2


def test_runs_that_are_left_unfinished_are_told(tmp_path: Path, pretend, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    begun = plan(out, [], {"alpha_min": ["1.0", "0.8"]})
    release(out / LOCK)
    folder = begun.run_folder(begun.trials[1])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    assert cli.main(["sweep", "--alpha-min", "1.0", "0.9", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "2 runs in" in said.out
    told = " ".join((said.out + said.err).split())
    assert "not finished and not asked for now: alpha_min=0.8,seed=0. Sweep their values again" in told


def test_a_diffusion_model_is_trained_and_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    assert cli.main(["sweep", *UVIT, "--seeds", "1", "--times", "0.1", "0.4", "--k", "5", "--out", str(out)]) == 0
    rows = json.loads((out / "summary.json").read_text())
    assert {"linear probe (lbfgs)", "kNN (k 5, T 0.07)", "training loss"} <= {row["score"] for row in rows}
    assert {row["images"] for row in rows} == {64}
    assert not (out / "runs" / "seed=0" / "features").exists()  # gigabytes, where there are many runs
    assert "loss: one seed." in (out / "sweep.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--alpha-min", "1.0"], "nothing is swept"),
        (["--alpha-mim", "1.0", "0.9"], "did you mean alpha_min"),
        (["--seeds", "0", "--alpha-min", "1.0", "0.9"], "one whole number"),
        (["--seeds", "2", "--seed", "1", "2"], "not both"),
        (["mae-shapes", "oops", "--seeds", "2"], "belongs to no setting"),
        (["--seeds", "2", "--resume"], "not for sweeps"),
        (["--seeds", "2", "--no-evaluate"], "not for sweeps"),
        (["--seeds", "2", "--evaluate", "False"], "evaluate False is not for sweeps"),
        (["--seeds", "2", "--evaluate", "True", "False"], "evaluate=False,seed=0: evaluate False is not for sweeps"),
        (["--seeds", "2", "--no-flip", "True", "False"], "--no-flip True: give --no-flip alone, or --flip True False"),
        (["--seeds", "2", "--no-lr"], "no setting of pretrain named 'no_lr'"),
        (["--lr", "1e-3", "abc"], "lr=abc: Error parsing --lr"),
        (["--clip", "None", "none"], "clip=none: Error parsing --clip"),
        (["--alpha-min", "0.9", "7"], "alpha_min=7: alpha_min is 7.0; it must lie in [0, 1]"),
        (["--lr", "1e-3", "-1"], "lr=-1: lr is -1.0; expected a positive number"),
        (["--lr", "1e-3", "2e-3", "--base-lr", "1e-4"], "give --base-lr or --lr, not both"),
        (["finetune", "resnet18", "--mixup", "0.1", "-2"], "mixup=-2: mixup is -2.0; expected 0 or more"),
        (["uvit-shapes", "--label-dropout", "0.1", "2"], "label_dropout=2: label_dropout is 2.0"),
        (["--seeds", "2", "--jobs", "0"], "one whole number"),
        (["mae-shape", "--seeds", "2"], "did you mean mae-shapes"),
        (["nowhere.yaml", "--seeds", "2"], "no settings file"),
        (["diffuse", "mae-shapes", "--seeds", "2"], "recipe of another command"),
        (["finetune", "--seeds", "2"], "say what to train"),
        (["finetune", "resnet1", "--seeds", "2"], "none of the networks"),
        (["finetune", "resnet18", "--stages", "2,2,2,2", "2", "--seeds", "2"], "join each list with commas"),
        (["resnet18", "--seeds", "2"], "residua sweep finetune resnet18"),
        (["finetune", "resnet18", "--times", "0.1", "--seeds", "2"], "no setting of finetune named 'times'"),
        (["--seeds", "2", "--score", "10"], "--score is for diffusion models"),
        (["uvit-shapes", "--seeds", "2", "--score", "10", "--fid-extractor", "nowhere"], "no extractor 'nowhere'"),
        (["uvit-shapes", "--seeds", "2", "--probe", "mae"], "lbfgs, simple and cached"),
        (["--alpha-min", "1.0", "0.9", "--baseline", "lr=1"], "none of the settings that are swept: alpha_min=1.0"),
        (
            ["--alpha-min", "1.0", "0.9", "--baseline", "alpha_min=0.5"],
            "--baseline alpha_min=0.5 is none of the settings",
        ),
        (["--alpha-min", "1.0", "0.9", "--baseline", "alpha_min"], "--baseline alpha_min= is none of the settings"),
        (["--alpha-min", "1.0", "0.9", "--seeds", "2", "--baseline", "seed=1"], "--baseline seed=1 is none of"),
        (["--alpha-min", "1", "0.9", "--baseline", "alpha_min=0.5", "--tune", "lr=1,2"], "alpha_min=0.5 is none of"),
        (["--alpha-min", "1.0", "0.9", "--baseline"], "--baseline needs a setting"),
        (["--alpha-min", "1.0", "0.9", "--tune", "lr=1e-3,2e-3"], "give --baseline a value of alpha_min too"),
        (["--seeds", "2", "--tune", "lr=1e-3"], "numbers to try"),
        (["--seeds", "2", "--tune", "lr=1e-3,fast"], "numbers to try"),
        (["--seeds", "2", "--tune"], "--tune : it takes one value"),
        (["--seeds", "2", "--tune", "lr=1,2", "clip=1,2"], "--tune lr=1,2 clip=1,2: it takes one value"),
        (["--alpha-min", "1", "7", "--baseline", "alpha_min=1", "--tune", "lr=1,2"], "alpha_min=7,lr=1: alpha_min is"),
        (["--alpha-min", "1.0", "0.9", "--seeds"], "--seeds : give one whole number"),
        (["--seeds", "2", "--tune", "speed=1,2"], "neither swept nor given"),
        (["--seeds", "2", "--lr", "1e-3", "--tune", "lr=1e-3,2e-3"], "neither swept nor given"),
        (["finetune", "resnet18", "--seeds", "2", "--tune", "lr=1,2"], "which finetune has not"),
        (["--seeds", "2", "--gpus-per-run", "0.5"], "--jobs N runs several at once"),
        (["--seeds", "2", "--on", "slurm"], "give ray"),
    ],
)
def test_wrong_inputs(args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["sweep", *args, "--out", str(tmp_path / "x")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


def test_settings_that_are_lists_are_shared_or_swept_with_commas() -> None:
    fixed, grid = split({"scale": ["0.2", "1.0"], "alpha_min": ["1.0", "0.9"], "no_flip": [], "lr": ["1e-3"]})
    assert fixed == ["--scale", "0.2", "1.0", "--no-flip", "--lr", "1e-3"]
    assert grid == {"alpha_min": ["1.0", "0.9"]}
    fixed, grid = split({"stages": ["2,2,2,2", "2,2,6,2"], "betas": ["0.9,0.99"]}, "finetune")
    assert fixed == ["--betas", "0.9", "0.99"]
    assert grid == {"stages": ["2,2,2,2", "2,2,6,2"]}
    assert split({"scale": ["auto", "0.5,1.0"]})[1] == {"scale": ["auto", "0.5,1.0"]}


def test_what_is_on_or_off_is_swept_too() -> None:
    fixed, grid = split({"flip": ["True", "False"], "norm_pix": ["False"], "zero_init": ["True", "auto"]})
    assert fixed == ["--no-norm-pix"]
    assert grid == {"flip": ["True", "False"], "zero_init": ["True", "auto"]}
    with pytest.raises(ValueError, match="--flip maybe: it is on or off"):
        split({"flip": ["maybe"]})


def test_a_run_that_is_waited_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _waited_for(Trial({"seed": "0"}))
    assert capsys.readouterr().out == "waiting for seed=0, still running from an earlier call\n"


def test_a_settings_file_says_what_it_is_of(tmp_path: Path) -> None:
    for kind, text in (("pretrain", "mask_ratio: 0.5"), ("diffuse", "process: vp"), ("finetune", "mixup: 0.1")):
        (tmp_path / "own.yaml").write_text(text)
        assert kind_of(str(tmp_path / "own.yaml")) == kind


def test_images_that_are_not_there_are_told_once_and_before_any_run(
    tmp_path: Path, pretend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = ["sweep", "--alpha-min", "1.0", "0.5", "--out", "sweep", "--data"]
    for args in ([*sweep, "parquet:nowhere"], [*sweep, "shapes", "parquet:nowhere"]):
        assert cli.main(args) == 2
        said = capsys.readouterr()
        assert said.err.count("parquet:nowhere: nowhere does not exist") == 1
        assert "failed" not in said.out
        assert pretend.names == []
    assert cli.main([*sweep, "shapes?n=8&size=8&test=4"]) == 0  # the folder is still free
    assert len(pretend.names) == 2


def test_a_run_that_failed_is_told_at_the_end_beside_what_the_others_came_to(
    tmp_path: Path, pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "--alpha-min", "1.0", "0", "--out", str(tmp_path / "sweep")]) == 2
    assert "1 of 2 runs failed: alpha_min=0,seed=0; see" in " ".join(capsys.readouterr().err.split())
    rows = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    assert {row["settings"]["alpha_min"] for row in rows} == {"1.0"}
    assert "no shortcut left" in (tmp_path / "sweep" / "sweep.html").read_text()


def test_stopped_it_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("residua.recipes.sweep.run", stopped)
    assert cli.main(["sweep", "--alpha-min", "1.0", "0.5", "--out", str(tmp_path / "sweep")]) == 130
    assert "the same command goes on with the runs in" in " ".join(capsys.readouterr().out.split())


def test_images_of_a_run_that_is_trained_on_are_opened_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("residua.data.load", opened.append)
    (tmp_path / "config.yaml").write_text("data: {data: digits}")
    (tmp_path / "checkpoints").mkdir()
    trials = [Trial({"seed": "0"}), Trial({"seed": "1"}), Trial({"data": "shapes"})]
    _open_data(Sweep(tmp_path, [], trials, "finetune", shared={"model": str(tmp_path), "data": "auto"}))
    assert opened == ["digits", "shapes"]


def test_what_is_typed_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Exception):
        pass

    def plan(*args: Any, check: Any, **options: Any) -> None:
        raise Planned(args, options)

    def planned(*typed: str) -> Any:
        with pytest.raises(Planned) as caught:
            cli.main(["sweep", *typed])
        return caught.value.args

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("residua.recipes.sweep.plan", plan)
    monkeypatch.setattr("residua.evaluate.extractor.open_extractor", lambda *_: None)
    fid = ["--fid-extractor", "timm:test_vit", "--fid-weights", "w.pt"]
    after = ["--probe", "simple", "--times", "0.1", "0.4", "--layers", "0", "1", "--k", "5", "--limit", "9"]
    swept = ["--alpha-min", "1.0", "0.7", "--flip", "True", "False", "--seeds", "2"]
    args, options = planned("uvit-shapes", *swept, "--steps=7", "--cpu", *after, *fid, "--score", "50")
    assert args == (
        Path("sweeps/uvit-shapes"),
        ["uvit-shapes", "--steps", "7", "--cpu", *fid],
        {"alpha_min": ["1.0", "0.7"], "flip": ["True", "False"], "seed": ["0", "1"]},
    )
    assert options == {
        "kind": "diffuse", "lists": [], "switches": ["flip"], "evaluate": [*after, "--no-cache", "--device", "cpu"],
        "score": ["--n", "50", "--fid", "--extractor", "timm:test_vit", "--weights", "w.pt", "--device", "cpu"],
    }  # fmt: skip
    args, options = planned("finetune", "resnet18", "--stages", "2,2,2,2", "2,2,6,2", "--out", "there")
    assert args == (Path("there"), ["resnet18"], {"stages": ["2,2,2,2", "2,2,6,2"]})
    assert options == {"kind": "finetune", "lists": ["stages"], "switches": [], "evaluate": [], "score": []}


def test_how_many_runs_at_once_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    for function in ("cluster.open_ray", "cluster.run_on_ray", "sweep.run"):
        monkeypatch.setattr(f"residua.recipes.{function}", lambda *args, **options: called.append((args, options)))
    nothing = dict.fromkeys(("on", "jobs", "ray_address", "gpus_per_run"))
    _start({**nothing, "jobs": ["3"]})("plan", "ended")
    assert called.pop() == (("plan", 3, "ended", _waited_for), {})
    _start({"on": ["ray"], "jobs": ["3"], "ray_address": ["auto"], "gpus_per_run": ["0.5"]})("plan", "ended")
    assert called.pop() == (("plan",), {"address": "auto", "gpus": 0.5, "jobs": 3, "on_end": "ended"})
