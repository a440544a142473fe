"""Whole runs: killed at any moment and resumed, shared by processes, and refused before work starts."""

import json
import random
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import STAGES, STEPS, differences, kill_at_random, pretrain, small, start, together, train, train_rank
from torch import Tensor

import residua
from residua.data import Batch
from residua.disk import held, release
from residua.nn import MAE
from residua.train import Hooks, Pretrain, Session, fit, prepare, read_metrics
from residua.train.checkpoint import CheckpointError, checkpoints
from residua.train.pretrain import Reconstruction
from residua.train.session import LOCK


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    pretrain(small(run))
    return run


# ---------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("stage", STAGES)
def test_killed_while_writing_and_resumed_it_ends_the_same(finished: Path, tmp_path: Path, stage: str) -> None:
    run = tmp_path / "run"
    first = stage == "in the configuration"
    if first:  # a kill there matters most when the run is continued
        with pytest.raises(KeyboardInterrupt):
            pretrain(small(run), Hooks(on_record=leave_at(4)))
    # the weights are written twice a checkpoint: the third time is the second checkpoint's
    nth = {"in the weights": 3, "in a record": 4}.get(stage, 1 if first or "removing" in stage else 2)
    process = start(train, small(run, resume=first), stage, nth)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert int(checkpoints(run)[-1].name[5:]) < STEPS
    pretrain(small(run, resume=True))
    assert differences(run, finished) == []
    assert not list((run / "checkpoints").glob(".unfinished*"))


def test_killed_in_the_first_checkpoint_it_starts_over(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(train, small(run), "in the training state", 1)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert checkpoints(run) == []
    pretrain(small(run, resume=True))
    assert differences(run, finished) == []


def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path) -> None:
    changes = {"steps": 100, "checkpoint_every": 2, "log_every": 3}
    calm, run = tmp_path / "calm", tmp_path / "run"
    pretrain(small(calm, **changes))
    chance = random.Random()
    saved: list[int | None] = []
    for _ in range(4):
        config = small(run, **changes, resume=(run / "config.yaml").exists())
        saved.append(kill_at_random(config, run, chance, last=50))
    assert any(step is not None and step < 100 for step in saved), saved  # some kill came in the middle
    pretrain(small(run, **changes, resume=True))
    assert differences(run, calm) == [], saved


def leave_at(step: int) -> Any:
    def leave(record: dict[str, Any]) -> None:
        if record["step"] >= step:
            raise KeyboardInterrupt

    return leave


def test_resuming_a_finished_run_changes_nothing(finished: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*.safetensors")}
    model = pretrain(small(finished, resume=True))
    assert {p: p.read_bytes() for p in finished.rglob("*.safetensors")} == before
    loaded = residua.load(finished)
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in model.state_dict().items())


# ---------------------------------------------------------------- several processes


def test_two_processes_follow_one(tmp_path: Path) -> None:
    changes = {"log_every": 1, "steps": 8}
    pretrain(small(tmp_path / "one", **changes))
    assert together(train_rank, small(tmp_path / "two", **changes)) == [0, 0]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [r["step"] for r in two] == [r["step"] for r in one] == list(range(1, 9))
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-3)
    # one process goes on from two's checkpoint: nothing in it depends on their number
    assert residua.load(tmp_path / "two").config == residua.load(tmp_path / "one").config


# ---------------------------------------------------------------- chance


def test_views_depend_on_seed_epoch_and_image_alone() -> None:
    session = prepare(small())
    batch = next(session.feed.iterate([torch.arange(12)]))
    objective = session.loop().objective
    assert isinstance(objective, Reconstruction)
    epochs = torch.tensor([0] * 6 + [1] * 6)
    images, noise = objective.view(batch, epochs)
    assert images.shape == (12, 3, 16, 16)
    assert noise.shape == (12, 16)

    def alone(i: int, epoch: int) -> tuple[Tensor, Tensor]:
        part = Batch(batch.pixels[i : i + 1], batch.sizes[i : i + 1], batch.index[i : i + 1])
        return objective.view(part, torch.tensor([epoch]))

    torch.manual_seed(123)  # the global state has no part in it
    for i in (0, 5, 11):
        image, own = alone(i, int(epochs[i]))
        torch.testing.assert_close(image[0], images[i], rtol=1e-5, atol=1e-5)
        assert torch.equal(own[0], noise[i])
        image, own = alone(i, int(epochs[i]) + 1)
        assert not torch.allclose(image[0], images[i], atol=1e-2)
        assert not torch.equal(own[0], noise[i])
    other = prepare(small(seed=1)).loop().objective
    assert not torch.equal(other.view(batch, epochs)[1], noise)


def test_the_seed_decides_everything() -> None:
    def end(**changes: Any) -> Tensor:
        return prepare(small(**changes, ema=None)).loop().fit().decoder.pred.weight.detach().clone()

    one = end()
    torch.rand(7)
    assert torch.equal(one, end())
    assert not torch.equal(one, end(seed=1))


# ---------------------------------------------------------------- refused before work


def test_a_changed_science_setting_is_refused(finished: Path) -> None:
    for name, value in (("lr", 1e-3), ("alpha_min", 0.5), ("seed", 3), ("batch_size", 8), ("steps", 20)):
        with pytest.raises(ValueError, match=rf"{name} is .* there, {value!r} was given"):
            prepare(small(finished, **{name: value}, resume=True))


def test_the_same_command_resumes(tmp_path: Path) -> None:
    """Asked for as at first, in epochs and with a batch beyond the data."""
    run = tmp_path / "run"
    config = small(run, steps=None, epochs=1.5, batch_size=16)
    with pytest.raises(KeyboardInterrupt):
        pretrain(config, Hooks(on_record=leave_at(2)))
    assert prepare(config.override(resume=True)).settings.steps == 4  # 60 images make 4 batches
    with pytest.raises(ValueError, match=r"epochs is 1.6 there, 3.0 was given"):
        prepare(config.override(resume=True, epochs=3.0))
    big = small(tmp_path / "big", steps=2, batch_size=100)
    pretrain(big)
    assert prepare(big.override(resume=True)).settings.batch_size == 40


def test_orchestration_may_change_on_resume(finished: Path) -> None:
    session = prepare(small(finished, resume=True, micro_batch=4, log_every=7))
    assert (session.settings.micro_batch, session.settings.log_every) == (4, 7)
    assert session.settings.lr == 2e-3


@pytest.mark.parametrize("resident", [True, False])
def test_a_run_goes_on_in_the_way_that_its_images_came(tmp_path: Path, resident: bool) -> None:
    """Also where that was left to the machine; another way may round pixels otherwise."""
    run = tmp_path / "run"
    pretrain(small(run, steps=2, resident=resident, workers=0))
    again = small(run, steps=2, resume=True, workers=0)
    session = prepare(again.override(resident="auto"))
    session.close()
    assert session.feed.resident == resident
    with pytest.raises(ValueError, match=f"resident is {resident} there, {not resident} was given"):
        prepare(again.override(resident=not resident))


def test_the_way_images_come_is_kept_where_the_machine_chose_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pretrain(small(run, steps=2, resident="auto"))
    assert Pretrain.read(run / "config.yaml").machine.resident is True


@pytest.mark.parametrize("resident", [True, False])
def test_views_are_what_pretraining_sees(monkeypatch: pytest.MonkeyPatch, resident: bool) -> None:
    """Pixel for pixel, over three epochs, of images that are cropped out of larger ones."""
    data = "shapes?n=40&size=40"
    seen: list[Tensor] = []
    cropped = Reconstruction.cropped

    def spy(self: Reconstruction, batch: Batch, epochs: Tensor) -> Tensor:
        seen.append(cropped(self, batch, epochs))
        return seen[-1]

    session = prepare(small(data=data, img_size=16, seed=5, resident=resident, workers=0))
    monkeypatch.setattr(Reconstruction, "cropped", spy)
    fit(session)
    ours = residua.data.views(data, 16, 16, workers=0, device="cpu", seed=5, resident=not resident)
    found = [next(ours) for _ in range(STEPS)]
    assert torch.equal(torch.cat([images for images, *_ in found]), torch.cat(seen))
    assert torch.equal(torch.cat([epoch for *_, epoch in found]), torch.arange(STEPS * 16) // 40)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--resume needs --out"):
        prepare(Pretrain().override(resume=True))
    with pytest.raises(ValueError, match=r"no run to resume at .*nowhere: config.yaml is missing"):
        prepare(Pretrain().override(resume=True, out=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(("part", "lacking"), [("machine:", "machine"), ("optim:", "optim, machine, steps"),
                                               ("data:", "data, model, shortcut, optim, machine")])  # fmt: skip
def test_settings_that_are_cut_short_are_no_run(finished: Path, tmp_path: Path, part: str, lacking: str) -> None:
    (tmp_path / "config.yaml").write_text((finished / "config.yaml").read_text().partition(part)[0])
    with pytest.raises(ValueError, match=rf"config.yaml lacks {lacking}.*cut short"):
        prepare(Pretrain().override(resume=True, out=str(tmp_path)))


def test_a_folder_that_holds_a_run_is_refused(finished: Path) -> None:
    with pytest.raises(ValueError, match=r"finished holds a run already: add --resume .* or choose another --out"):
        prepare(small(finished))


def test_sessions_of_one_process_do_not_share_a_folder(tmp_path: Path) -> None:
    config = small().override(dry_run=False)
    one, other = prepare(config), prepare(config)
    assert one.run is not None
    assert other.run == one.run.with_name(f"{one.run.name}-2")
    with pytest.raises(ValueError, match="belongs to a session that is ready here"):
        prepare(small(one.run))
    one.close()
    again = prepare(small(one.run))
    for session in (other, again):
        session.close()
    assert not held(one.run / LOCK)


def test_what_fails_leaves_a_run_as_it_was_and_free(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no more")

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = (run / "environment.json").read_text()
    for module, name in ((residua.train.pretrain, "open_feed"), (Session, "loop")):
        monkeypatch.setattr(module, name, fail)
        with pytest.raises(RuntimeError, match="no more"):
            fit(prepare(small(run, resume=True)))
        monkeypatch.undo()
        assert not held(run / LOCK)
        assert (run / "environment.json").read_text() == before
        assert not list(run.glob(".writable*"))
    monkeypatch.setattr("residua.train.session.write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ValueError, match="cannot write to the run folder"):
        prepare(small(run, resume=True))
    assert not held(run / LOCK)


HOLD = """
import pathlib, sys, time
from residua.disk import claim
assert claim(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_that_another_process_trains_in_is_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = prepare(small().override(dry_run=False)).run
    assert first is not None
    release(first / LOCK)
    shutil.copytree(finished, tmp_path / "copy")
    for folder in (first, tmp_path / "copy"):
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / LOCK)], stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(ValueError, match="is being trained in by another process"):
                prepare(small(folder, resume=folder != first))
            if folder == first:  # a folder that is ours to name gets another number
                assert prepare(small().override(dry_run=False)).run == first.with_name(f"{first.name}-2")
        finally:
            holder.kill()
            holder.wait()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to the run folder .*choose another with --out"):
        prepare(small(tmp_path / "file" / "run"))

    def read_only(path: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ValueError, match="Read-only file system"):
        prepare(small(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": 16, "patch_size": 32}, "smaller than one patch"),
        ({"img_size": 18}, "not divisible"),
        ({"alpha_min": 1.2}, "alpha_min is 1.2"),
        ({"mask_ratio": 1.0}, "mask_ratio"),
        ({"embed_dim": 30}, "30"),
        ({"anneal": 2.0}, "anneal"),
        ({"init": "nowhere.pth"}, "nothing at nowhere.pth"),
    ],
)
def test_wrong_settings_leave_no_run_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(small(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_runs_without_a_name_get_one_each(tmp_path: Path) -> None:
    config = small().override(dry_run=False, steps=1, ema=None, trackers=("tensorboard",))
    names = []
    for _ in range(2):
        session = prepare(config)
        fit(session)
        assert session.run is not None
        names.append(session.run.name)
    assert names[0].endswith("-shapes")
    assert names[1] == names[0] + "-2"
    assert (tmp_path / "runs" / names[0] / "config.yaml").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(names)  # trackers write into the run


# ---------------------------------------------------------------- what a run leaves


def test_the_run_folder(finished: Path) -> None:
    assert {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints"} <= {p.name for p in finished.iterdir()}
    assert [p.name for p in checkpoints(finished)] == ["step-0000009", "step-0000012"]
    saved = Pretrain.read(finished / "config.yaml")
    assert saved.optim.steps == STEPS
    assert saved.data.img_size == 16
    model = residua.load(finished)
    assert isinstance(model, MAE)
    assert float(model.encoder.shortcut.alpha[-1]) == pytest.approx(0.7)
    assert model.preprocessing.img_size == (16, 16)


def test_a_run_says_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when it was last continued, with what the rest of the file is of."""
    run = tmp_path / "run"

    def at(time: str, **changes: Any) -> tuple[str | None, str | None]:
        monkeypatch.setattr("residua.train.session.now", lambda: time)
        pretrain(small(run, steps=2, **changes))
        told = json.loads((run / "environment.json").read_text())
        assert told["torch"] == torch.__version__
        return told["began"], told.get("resumed")

    assert at("first") == ("first", None)
    assert at("second", resume=True) == ("first", "second")
    assert at("third", resume=True) == ("first", "third")
    for left in ('{"torch": "1"}', "{", "[]"):  # of an older version, or damaged
        (run / "environment.json").write_text(left)
        assert at("fourth", resume=True) == (None, "fourth")
    (run / "environment.json").unlink()
    assert at("fifth", resume=True) == (None, "fifth")


def test_it_learns(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    pretrain(small(steps=60, lr=5e-3, ema=None), Hooks(on_record=records.append))
    assert records[-1]["loss"] < 0.97 * records[0]["loss"]


def test_starting_from_other_weights(finished: Path, tmp_path: Path) -> None:
    session = prepare(small(init=str(finished), alpha_min=0.9))
    loaded = residua.load(finished)
    own = session.model.state_dict()
    assert torch.equal(own["encoder.cls_token"], loaded.encoder.cls_token)
    assert torch.equal(own["decoder.pred.weight"], loaded.decoder.pred.weight)
    assert float(own["encoder.shortcut.alpha"][-1]) == pytest.approx(0.9)
    with pytest.raises(CheckpointError):
        prepare(small(init=str(tmp_path / "nothing")))


def test_an_architecture_is_taken_whole_or_what_differs_is_said(tmp_path: Path) -> None:
    for there, other in (("plain", "ushape"), ("ushape", "plain")):
        pretrain(small(tmp_path / there, steps=1, decoder=there))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            session = prepare(small(init=str(tmp_path / there), anneal=0.0))
        loaded: Any = residua.load(tmp_path / there)
        assert session.config.model.decoder == there
        assert torch.equal(session.model.decoder.pred.weight, loaded.decoder.pred.weight)
        with pytest.raises(ValueError, match=rf"different architecture: decoder {there} there, {other} here\. Leave"):
            prepare(small(init=str(tmp_path / there), decoder=other), given=("decoder",))
    with pytest.raises(ValueError, match=r"decoder_embed_dim 16 there, 32 here"):
        prepare(small(init=str(tmp_path / "plain"), decoder_embed_dim=32))


def test_classes_are_those_of_labels() -> None:
    session = prepare(small())
    source = session.splits.train
    assert "3 channels, 8 classes" in dict(session.lines())["data"]
    source.classes = None
    assert "3 channels, 8 classes" in dict(session.lines())["data"]
    source.classes, source.labels = ["a", "b"], None  # as of the unlabelled part of a data set
    assert "3 channels, no labels" in dict(session.lines())["data"]
