"""What a user types, and what they are told when it is wrong."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import residua
from residua import cli
from residua.commands.console import typed

TINY = """
--data shapes?n=48&size=16&test=16 --size nano --depth 2 --embed-dim 32 --num-heads 2 --decoder-embed-dim 32
--decoder-depth 1 --patch-size 4 --batch-size 16 --steps 6 --cpu
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        (["--base-lr", "1e-4"], {"base_lr": 1e-4, "lr": "auto"}), (["--alpha-eff=0.01"], {"alpha_min": "auto"}),
        (["--epochs", "3"], {"epochs": 3.0, "steps": None}), (["--steps", "7"], {"steps": 7}),
    ],
)  # fmt: skip
def test_a_setting_takes_the_place_of_a_recipes_other(args: list[str], settings: dict[str, Any]) -> None:
    from residua.recipes.arguments import settings as parse
    from residua.train import Pretrain

    found = parse(Pretrain, ["mae-shapes", *args], "pretrain", "").settings()
    assert settings.items() <= found.items()
    with pytest.raises(ValueError, match="give --base-lr or --lr, not both"):
        parse(Pretrain, ["--lr", "1e-3", "--base-lr", "1e-4"], "pretrain", "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert cli.main(["pretrain", *TINY, "--eval-every", "1", "--out", str(folder)]) == 0
    return folder


def fails(capsys, *args: str) -> str:
    assert cli.main(list(args)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_usage_lists_exactly_the_commands_there_are():
    named = {line.split()[1] for line in cli.USAGE.splitlines() if line.startswith("  residua ")}
    assert named == set(cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == residua.__version__


def test_pretrain_leaves_a_whole_run(run):
    names = {path.name for path in run.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "evaluation.json",
        "report.html",
        "checkpoints",
    } <= names
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert "eval/kNN" in records[2]
    assert residua.load(run).config["depth"] == 2


def test_pretrain_says_what_it_chose_and_what_it_is_worth(tmp_path, capsys):
    assert cli.main(["pretrain", *TINY, "--out", str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out
    for word in (
        "data",
        "model",
        "steps",
        "device",
        "run",
        "alpha_min 1 ",
        "entropy rank",
        "residua.load(",
        "random init",
    ):
        assert word in out


def test_resume_of_a_finished_run_changes_nothing(run):
    before = (run / "checkpoints" / "step-0000006" / "model.safetensors").read_bytes()
    assert cli.main(["pretrain", "--out", str(run), "--resume", "--cpu"]) == 0
    assert (run / "checkpoints" / "step-0000006" / "model.safetensors").read_bytes() == before


def test_dry_run_trains_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pretrain", *TINY, "--dry-run"]) == 0
    assert "GiB" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_settings_file(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("alpha_min: 0.5\nsteps: 2\n")
    assert cli.main(["pretrain", str(tmp_path / "mine.yaml"), *TINY[:-3], "--cpu", "--dry-run"]) == 0
    assert "alpha_min 0.5" in capsys.readouterr().out


def test_evaluate_at_another_size_writes_json(run, tmp_path):
    out = tmp_path / "scores.json"
    args = ["--img-size", "24", "16", "--probe", "lbfgs", "--k", "5", "10", "--layers", "0", "1", "--out", str(out)]
    assert cli.main(["evaluate", str(run), *args]) == 0
    scores = json.loads(out.read_text())
    assert scores["img_size"] == [24, 16]
    assert {s["settings"]["k"] for s in scores["scores"] if s["metric"] == "kNN"} == {5, 10}
    assert {s["subject"] for s in scores["scores"]} == {"model", "random init", "pixels"}


def test_data_info_and_preview(tmp_path, capsys):
    assert cli.main(["data", "info", "digits"]) == 0
    assert "1442" in capsys.readouterr().out
    assert cli.main(["data", "preview", "digits", "--out", str(tmp_path / "p.png"), "--n", "9"]) == 0
    assert Image.open(tmp_path / "p.png").size[0] >= 24


def test_recipes_are_complete_configurations(capsys):
    from residua.recipes import RECIPES

    assert cli.main(["recipes"]) == 0
    out = capsys.readouterr().out
    for name, recipe in RECIPES.items():
        assert name in out
        assert recipe.config.settings()["alpha_min"] == recipe.settings["alpha_min"]


def test_unknown_command_and_recipe_name_the_nearest(capsys):
    assert "pretrain" in fails(capsys, "pretrian")
    assert "mae-shapes" in fails(capsys, "pretrain", "mae-shape")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "folder:/no/such/place"], "/no/such/place"),
        (["--alpha-min", "1.5"], "alpha_min is 1.5"),
        (["--alpha-min", "0.5", "--alpha-eff", "0.1"], "not both"),
        (["--img-size", "30"], "not divisible"),
        (["--patch-size", "64"], "smaller than one patch"),
        (["--mask-ratio", "1.0"], "mask_ratio"),
        (["--anneal", "2"], "anneal"),
        (["--init", "/no/such/weights.pth"], "/no/such/weights.pth"),
        (["--resume"], "--out"),
    ],
)
def test_wrong_settings_are_refused_before_work(capsys, monkeypatch, tmp_path, args, words):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, "pretrain", *TINY, *args)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_empty_folder(capsys, tmp_path):
    assert "no images" in fails(capsys, "pretrain", "--data", f"folder:{tmp_path}").lower()


def test_labels_missing_where_needed_is_no_score_but_a_rank(tmp_path, run, capsys):
    for i in range(12):
        Image.fromarray(np.full((16, 16, 3), 20 * i, np.uint8)).save(tmp_path / f"{i}.png")
    assert cli.main(["evaluate", str(run), "--data", f"folder:{tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "entropy rank" in out
    assert "kNN" not in out


def test_a_start_from_another_architecture_says_what_differs(run, capsys, tmp_path):
    for options, words in {
        ("--embed-dim", "48"): "different architecture: embed_dim 32 there, 48 here. Leave such settings out",
        ("--patch-size", "2"): "different architecture: patch_size 4 there, 2 here",
    }.items():
        said = fails(capsys, "pretrain", *TINY, *options, "--init", str(run), "--out", str(tmp_path / "x"))
        assert words in said


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of two classes, some of them cut short, in both splits."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    source = residua.data.load("shapes?n=24&size=16&test=4").train
    for i in range(24):
        path = folder / ("train" if i < 16 else "test") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(source.read(i)).save(path)
        if i in (0, 16):
            path.write_bytes(path.read_bytes()[:150])
    return folder


def test_unreadable_images_are_skipped_to_the_end_of_a_run_and_after_it(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(photos.parent)
    run, own = str(tmp_path / "run"), ["--data", "folder:photos", "--cpu", "--batch-size", "8"]
    args = ["pretrain", *TINY, *own, "--eval-every", "1"]
    assert cli.main([*args, "--on-bad-image", "skip", "--out", run]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["n_train"] == 15
    assert any("eval/kNN" in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Not drawn" not in page
    assert "Reconstructions" in page
    quick = ["--device", "cpu", "--no-cache", "--no-baselines", "--k", "3"]
    assert cli.main(["evaluate", run, *quick]) == 0  # as the run did
    for options in (["--on-bad-image", "error"], ["--data", f"folder:{photos}"]):  # unless told; other images
        assert "cannot read image" in fails(capsys, "evaluate", run, *quick, *options)
    anatomy = ["anatomy", run, "--images", "2", "--top", "1", "--token", "0", "--device", "cpu"]
    assert cli.main(anatomy) == 0
    assert "1 of 16 train images cannot be read and are skipped" in capsys.readouterr().out
    assert "cannot read image" in fails(capsys, *anatomy, "--on-bad-image", "error")
    assert cli.main(["data", "preview", own[1], "--on-bad-image", "skip", "--out", str(tmp_path / "page.png")]) == 0
    finetune = ["finetune", run, *own, "--steps", "2", "--out", str(tmp_path / "classes")]
    assert cli.main([*finetune, "--on-bad-image", "skip"]) == 0, capsys.readouterr().err


def test_a_run_whose_images_are_elsewhere_says_from_where_they_are_named(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(photos.parent)
    run = str(tmp_path / "run")
    args = [*TINY, "--data", "folder:photos", "--steps", "1", "--batch-size", "8", "--on-bad-image", "skip"]
    assert cli.main(["pretrain", *args, "--no-evaluate", "--out", run]) == 0, capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for command in (["evaluate", run], ["finetune", run], ["pretrain", "--resume", "--out", run, "--cpu"]):
        said = fails(capsys, *command)
        assert f"relative to {photos.parent}, where the run was started" in said
        assert ("give --data" in said) == (command[0] != "pretrain")


def test_evaluate_probes_as_pretrain_does(run, tmp_path, capsys):
    def protocol(path: Path) -> str:
        scores = json.loads(path.read_text())["scores"]
        return next(s["settings"]["protocol"] for s in scores if s["metric"] == "linear probe")

    out = tmp_path / "scores.json"
    args = ["evaluate", str(run), "--device", "cpu", "--no-cache", "--no-baselines", "--out", str(out)]
    for options, chosen in (([], protocol(run / "evaluation.json")), (["--epochs", "2"], "simple")):
        assert cli.main([*args, *options]) == 0
        assert protocol(out) == chosen


def test_a_model_by_name_says_that_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["--weights", "random", "--data", "shapes?n=16&size=32&test=8&classes=2", "--img-size", "32", "--device"]
    args = ["evaluate", "timm:test_vit", *args, "cpu", "--probe", "none", "--no-cache", "--no-baselines", "--k", "3"]
    assert cli.main(args) == 0
    assert "not kept: --out FILE keeps it, for residua compare" in capsys.readouterr().out
    assert cli.main([*args, "--out", "scores.json"]) == 0
    assert "not kept" not in capsys.readouterr().out


def test_evaluate_needs_a_model(capsys, tmp_path):
    assert "nothing at" in fails(capsys, "evaluate", str(tmp_path / "none"))
    assert "no run and no weights" in fails(capsys, "evaluate", str(tmp_path))


def test_help_of_every_command():
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as left:
            cli.main([name, "--help"])
        assert left.value.code == 0


@pytest.mark.parametrize("args", [["recipes"], ["evaluate", "--help"], ["--help"]])
def test_it_ends_quietly_where_nobody_reads_on(args: list[str]):
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-m", "residua.cli", *args]
    done = subprocess.run(call, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_hubs_library_does_not_tell_of_every_try():
    code = "import residua.cli, huggingface_hub.utils.logging as log; print(log.get_verbosity() == log.ERROR)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_settings_count_as_given_where_they_are_typed_or_in_a_file(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("shortcut:\n  schedule: linear\nseed: 3\n")
    assert typed([str(file), "--alpha-min", "0.7", "--no-flip", "--lr=1e-3"]) == {
        "schedule", "seed", "alpha_min", "flip", "lr"
    }  # fmt: skip
    assert typed(["mae-shapes", "--steps", "3"]) == {"steps"}
    assert typed([]) == set()


def test_output_that_the_shell_closed_is_no_error():
    call = f"{shlex.quote(sys.executable)} -m residua.cli --version >&-"
    assert subprocess.run(["sh", "-c", call], check=False, stderr=subprocess.PIPE).returncode == 0


def test_another_broken_pipe_is_an_error(capfd, monkeypatch):
    def breaks(args: list[str]) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("residua.cli.recipes.recipes", breaks)
    assert cli.main(["recipes"]) == 2
    assert "Broken pipe" in capfd.readouterr().err


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(
    ("command", "work"),
    [
        ("evaluate RUN --no-cache --out OUT", "residua.evaluate.suite.evaluate"),
        ("embed RUN --data shapes --out OUT", "residua.evaluate.table.write_table"),
        ("segment RUN --out OUT", "residua.evaluate.clusters.segment"),
        ("data preview shapes --out OUT", "residua.data.preview"),
        ("compare RUN RUN --out OUT", "residua.report.compare"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_work(
    run, tmp_path, monkeypatch, capsys, command, work, readonly
):
    place = tmp_path / "place"
    place.mkdir() if readonly else place.write_text("a file")
    monkeypatch.setattr(work, lambda *_, **__: pytest.fail("it works"))
    if readonly:  # to this process, which may be root's
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != place)
    assert cli.main(command.replace("RUN", str(run)).replace("OUT", str(place / "x.png")).split()) == 2
    assert f": {place} is no folder, or read-only; choose another --out" in capsys.readouterr().err


def test_a_full_disk_is_told_in_a_sentence(capsys, monkeypatch):
    def fails(args: list[str]) -> None:
        raise OSError(28, "Error writing bytes to file", "out/features.parquet")  # the words of some library

    monkeypatch.setattr("residua.cli.recipes.recipes", fails)
    assert cli.main(["recipes"]) == 2
    told = capsys.readouterr().err
    assert "cannot write out/features.parquet: No space left on device. Free some space" in told
    assert "RESIDUA_DEBUG" not in told


def test_wheel_holds_all_that_the_demo_needs(tmp_path):
    root = Path(__file__).parent.parent
    call = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(root)]
    subprocess.run(call, check=True)
    (wheel,) = tmp_path.glob("residua_torch-*.whl")
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    code = (
        "from importlib.metadata import version; from residua import __version__, cli, missing; print(cli.__file__); "
        "assert version(missing.DISTRIBUTION) == __version__; print(missing.pip_install('onnx', 'diffusers')); "
        "exit(cli.main('demo --quick --out d'.split()))"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert re.search(r"pip install 'onnx>=[\d.]+' 'diffusers>=[\d.]+'", done.stdout)
    assert (tmp_path / "d" / "report.html").stat().st_size > 10_000


def test_long_work_is_counted_on_a_terminal_by_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    console = sys.modules["residua.commands.console"]

    def shown(**options: Any) -> Any:
        monkeypatch.setattr(console, "console", Console(file=io.StringIO(), **options))
        for done in (256, 300):
            console.counting("reading images", done, 1024)
        line = console._status and console._status.status
        console.counting("reading images", 1024, 1024)
        assert console._status is None
        return line

    assert shown(force_terminal=True) == "reading images: 300 of 1,024"
    assert shown(force_terminal=False) is None
    monkeypatch.setenv("RANK", "1")
    assert shown(force_terminal=True) is None


def test_where_there_is_no_terminal_a_line_a_minute_says_how_far_work_has_come(monkeypatch, capsys):
    from residua.commands import console

    times = iter([0.0, 59.0, 61.0, 61.0, 100.0, 125.0, 125.0])
    monkeypatch.setattr(console, "_spoke", 0.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    for done in (1, 2, 3, 4, 5):
        console.counting("decoding images", done, 1000)
    assert capsys.readouterr().out == "decoding images: 3 of 1,000\ndecoding images: 5 of 1,000\n"
