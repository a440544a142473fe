"""Commands as several processes run them, from the first line to the last."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from drive import STEPS, command_rank, failing_rank, pretrain, small, stopped_rank, together

from residua import cli
from residua.commands.console import typed
from residua.train import Finetune, Pretrain, read_metrics
from residua.train.checkpoint import checkpoints

DATA = "shapes?n=48&size=16&test=300"
COMMON = ["--data", DATA, "--batch-size", "16", "--steps", "6", "--cpu"]
PRETRAIN = """
--size nano --patch-size 4 --embed-dim 32 --depth 2 --num-heads 2 --decoder-embed-dim 16 --decoder-depth 1
--decoder-num-heads 2 --eval-every 1
""".split()  # noqa: SIM905


def scores(path: Path) -> dict[Any, float]:
    """What a command measured in the end."""
    content = json.loads(path.read_text())
    if "scores" not in content:
        return {name: content[name] for name in ("accuracy", "top5", "entropy_rank", "cross_entropy", "n_test")}
    return {(s["metric"], s["subject"], s["layer"]): s["value"] for s in content["scores"]}


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_two_processes_share_a_command_to_its_end(
    encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    args = ["pretrain", *COMMON, *PRETRAIN] if command == "pretrain" else ["finetune", encoder, *COMMON]
    product = "evaluation.json" if command == "pretrain" else "finetune.json"
    assert cli.main([*args, "--out", str(tmp_path / "one")]) == 0, capsys.readouterr().err
    assert together(command_rank, [*args, "--out", str(tmp_path / "two")], tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [found["status"] for found in (first, second)] == [0, 0], first["wrong"] + second["wrong"]
    for rank, found in enumerate((first, second)):
        assert {tuple(place) for place in found["places"]} == {(rank, 2)}  # evaluation after training is shared, too
        assert not found["connected"]
    assert second["said"] == ""
    assert "load it:" in first["said"]
    assert first["loads"][1] < second["loads"][0]  # what one has downloaded, the other finds
    one, two = (scores(tmp_path / name / product) for name in ("one", "two"))
    assert two.keys() == one.keys()
    for name, value in one.items():
        assert two[name] == pytest.approx(value, rel=2e-2), name


@pytest.mark.parametrize("command", ["embed", "segment"])
def test_two_processes_share_what_is_measured(
    encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Into the same file, to the last bit."""
    args = {
        "embed": ["--data", "shapes?n=45&size=16", "--batch-size", "7"],
        "segment": ["--data", DATA, "--max-images", "9", "--batch-size", "2", "--intra", "5", "--inter", "5"],
    }[command]
    args = [command, encoder, *args, "--device", "cpu", "--out"]
    assert cli.main([*args, str(tmp_path / "one")]) == 0, capsys.readouterr().err
    assert together(command_rank, [*args, str(tmp_path / "two")], tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [found["status"] for found in (first, second)] == [0, 0], first["wrong"] + second["wrong"]
    assert "written:" in first["said"]
    assert second["said"] == ""
    if command == "embed":
        alone, shared = (pq.read_table(tmp_path / name) for name in ("one", "two"))
        assert len(alone) > 45  # of both splits
        assert shared.equals(alone)
    else:
        assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


def test_what_is_typed_next_can_be_typed_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", *COMMON, *PRETRAIN, "--steps", "1", "--out", str(tmp_path / "my run")]) == 0
    said = capsys.readouterr().out
    assert f"residua embed '{tmp_path}/my run' --data '{DATA}' --out" in said
    assert f"residua export '{tmp_path}/my run' --to timm" in said


# ---------------------------------------------------------------- a look at the model that fails


def test_a_look_that_fails_in_one_process_does_not_part_it_from_the_others(tmp_path: Path) -> None:
    alone = small(tmp_path / "one")
    pretrain(alone)
    assert together(failing_rank, small(tmp_path / "two"), False) == [0, 0]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["step"] for r in two if r["step"] not in (5, 10)] == [r["step"] for r in one if r["step"] != 10]
    assert two[-1]["step"] == STEPS
    assert two[-1]["loss"] == pytest.approx(one[-1]["loss"], rel=1e-4)


def test_processes_that_wait_for_one_that_failed_are_not_answered_by_its_training(tmp_path: Path) -> None:
    assert 0 not in together(failing_rank, small(tmp_path / "run"), True)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-0000003"]
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [2, 3, 4, 5]


# ---------------------------------------------------------------- one process that fails


@pytest.mark.parametrize(("part", "failing"), [("load", 0), ("load", 1), ("resume", 1), ("save", 0), ("record", 0)])
def test_where_one_process_fails_all_end_with_its_error(tmp_path: Path, part: str, failing: int) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    log.mkdir()
    if part == "resume":
        pretrain(small(run, steps=2))
    config = small(run, steps=2, resume=part == "resume")
    assert together(stopped_rank, config, part, failing, log) == [0, 0]
    assert (log / f"{failing}.txt").read_text() == f"CheckpointError: no {part} here"
    said = f"TrainingStopped: process {failing} failed: no {part} here (CheckpointError)"
    assert (log / f"{1 - failing}.txt").read_text() == said


# ---------------------------------------------------------------- resuming


def test_what_is_typed() -> None:
    args = ["mae-shapes", "--no-cpu", "--keep", "2", "--lr=1e-3", "--norm-pix", "--batch_size", "8"]
    assert typed(args) == {"cpu", "keep", "lr", "norm_pix", "batch_size"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose settings are not the defaults."""
    run = tmp_path_factory.mktemp("runs") / "begun"
    pretrain(small(run, steps=2, seed=3, clip=1.0, keep=0, on_bad_image="skip", evaluate=False, log_every=1))
    return run


def test_what_is_typed_counts_on_resume_even_if_it_is_the_default(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["pretrain", "--out", str(begun), "--resume"]
    assert cli.main([*resume, "--keep", "2", "--on-bad-image", "error"]) == 0, capsys.readouterr().err
    machine = Pretrain.read(begun / "config.yaml").machine
    assert (machine.keep, machine.on_bad_image) == (2, "error")
    assert (machine.cpu, machine.log_every, machine.evaluate) == (True, 1, False)  # not typed: as they were
    capsys.readouterr()
    for option, value, there in (("seed", "0", 3), ("clip", "None", 1.0)):
        assert cli.main([*resume, f"--{option}", value]) == 2
        assert f"{option} is {there} there, {value} was given" in " ".join(capsys.readouterr().err.split())
    # what was left open came to what is there
    assert cli.main([*resume, "--lr", "auto", "--img-size", "auto", "--seed", "3"]) == 0, capsys.readouterr().err


def test_the_same_from_python(encoder: str, tmp_path: Path) -> None:
    from residua.evaluate import finetune

    run = {"data": "shapes?n=40&size=16&test=20", "out": str(tmp_path / "run"), "cpu": True, "trackers": ()}
    finetune(encoder, **run, steps=2, batch_size=16, seed=3, keep=0)
    finetune(encoder, **run, resume=True, keep=2)
    assert Finetune.read(tmp_path / "run" / "config.yaml").machine.keep == 2
    with pytest.raises(ValueError, match="seed is 3 there, 0 was given"):
        finetune(encoder, **run, resume=True, seed=0)
