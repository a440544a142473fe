"""What is trained from Python is what the command trains, and leaves the caller's world alone."""

import gc
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residua
from residua import cli
from residua import progress as work_progress
from residua.commands import calling
from residua.train.checkpoint import load_file

DATA = "shapes?n=64&size=16"
COMMON: dict[str, Any] = {"data": DATA, "steps": 6, "batch_size": 16, "cpu": True, "trackers": ()}
SMALL: dict[str, Any] = COMMON | {
    "size": "nano", "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "decoder_embed_dim": 16,
    "decoder_depth": 1, "decoder_num_heads": 2,
}  # fmt: skip
DIFFUSION: dict[str, Any] = COMMON | {"embed_dim": 32, "depth": 2, "num_heads": 2, "steps": 3}


def as_typed(settings: dict[str, Any]) -> list[str]:
    flags = {name: value for name, value in settings.items() if not isinstance(value, bool | tuple)}
    return [*(text for k, v in flags.items() for text in (f"--{k.replace('_', '-')}", str(v))), "--cpu", "--trackers"]


def test_a_run_is_what_the_command_makes_of_the_same_settings(tmp_path: Path) -> None:
    settings = SMALL | {"eval_every": 1.0, "alpha_min": 0.8}
    run = residua.pretrain(**settings, out=tmp_path / "here")
    assert cli.main(["pretrain", *as_typed(settings), "--out", str(tmp_path / "there")]) == 0
    other = residua.Run.of(tmp_path / "there" / "checkpoints" / "step-0000006")
    ours, theirs = (load_file(r.checkpoints[-1] / "model.safetensors") for r in (run, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert run.scores is not None
    assert other.scores is not None
    assert run.scores.to_dict()["scores"] == other.scores.to_dict()["scores"]
    assert {p.name for p in run.path.iterdir()} == {p.name for p in other.path.iterdir()}
    assert run.page == tmp_path / "here" / "report.html"
    assert run.metrics["step"] == 6
    assert "eval/kNN" in run.metrics
    assert [record["step"] for record in run.history] == [record["step"] for record in other.history]
    assert run.config.settings()["alpha_min"] == 0.8
    assert not run.model.training


def test_without_a_folder_a_run_goes_with_the_object(tmp_path: Path) -> None:
    run = residua.pretrain(**SMALL, evaluate=False)
    path = run.path
    assert run.checkpoints
    assert run.page is None
    assert run.scores is None
    assert repr(run) == f"Run('{path}': pretrain, step 6 of 6)"
    del run
    gc.collect()
    assert not path.exists()
    kept = residua.pretrain(**SMALL, evaluate=False).keep(tmp_path / "runs" / "kept")
    gc.collect()
    assert residua.Run.of(kept.path).checkpoints == kept.checkpoints
    with pytest.raises(ValueError, match="there already"):
        kept.keep(tmp_path)
    again = residua.pretrain(**SMALL | {"steps": None, "resume": True}, out=kept.path, evaluate=False)
    assert again.metrics["step"] == 6


def test_a_classifier_from_a_run_or_from_a_network_in_memory() -> None:
    start = residua.pretrain(**SMALL, evaluate=False)
    settings = COMMON | {"steps": 2, "seed": 4}
    before = {name: x.clone() for name, x in start.model.state_dict().items()}
    one, two, three = (residua.finetune(begin, **settings) for begin in (start.path, start.model, start))
    assert three.config.override(out=None) == one.config.override(out=None)
    for run in (one, two, three):
        assert run.scores is not None
        assert run.model.classes == residua.data.load(DATA).train.classes
    assert one.scores.value("accuracy") == two.scores.value("accuracy")
    assert all(torch.equal(x, before[name]) for name, x in start.model.state_dict().items())


def test_a_diffusion_model_with_pictures_on_the_way(tmp_path: Path) -> None:
    run = residua.diffuse(**DIFFUSION, sample_every=0.25, out=tmp_path / "run")
    assert sorted(path.name for path in (run.path / "samples").iterdir())[0] == "step-0000001.png"
    assert residua.sample(run.model, 2).shape == (2, 3, 16, 16)


@pytest.mark.parametrize("name", ["pretrain", "finetune", "diffuse"])
def test_the_world_is_left_as_it_was(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), Path.cwd()]
    start = {"finetune": "resmlp"}.get(name)
    settings = {"pretrain": SMALL | {"evaluate": False}, "finetune": COMMON, "diffuse": DIFFUSION}[name]
    getattr(residua, name)(*([start] if start else []), **settings | {"steps": 2})
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert Path.cwd() == states[3]
    assert torch.get_float32_matmul_precision() == "highest"
    assert capsys.readouterr() == ("", "")
    assert work_progress._listener is None


def test_progress_is_what_the_terminal_shows(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = residua.pretrain(**SMALL, dry_run=True, progress=True)
    assert estimate.seconds > 0
    said = capsys.readouterr().out
    assert "64 images, 3 channels" in said
    assert "nothing was trained or written" in said


def test_notes_are_warnings_where_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("residua.data.count_shared", lambda train, test: 3)
    with pytest.warns(UserWarning, match="3 test images also occur in the training part"):
        residua.pretrain(**SMALL | {"steps": 1}, evaluate=False)


def test_ctrl_c_saves_and_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from residua.commands import pretrain

    class Bar(pretrain.Bar):
        def update(self, record: dict[str, Any]) -> None:
            if record["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(pretrain, "Bar", Bar)
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step 3 of 6.*resume=True, out='(.*)'") as caught:
        residua.pretrain(**SMALL, evaluate=False)
    folder = Path(str(caught.value).split("out='")[1].rstrip("')"))
    monkeypatch.undo()
    run = residua.pretrain(**SMALL, evaluate=False, resume=True, out=folder)
    assert run.keep(tmp_path / "kept").metrics["step"] == 6


def test_what_fails_before_training_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calling, "temporary_folder", lambda: tmp_path / "run")
    with pytest.raises(residua.data.DataError, match="unknown data"):
        residua.pretrain(**SMALL | {"data": "nothing"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step": 3}, "no setting named step"),
        ({"steps": "many"}, "steps is many; expected a whole number or null"),
        ({"betas": (0.9,)}, r"betas is \[0.9\]; expected \[a number, a number\]"),
        ({"lr": 1e-3, "base_lr": 1e-4}, "give --base-lr or --lr, not both"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        residua.pretrain(data=DATA, **settings)


def test_a_recipe_and_a_file_come_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean mae-tiny-imagenet"):
        residua.pretrain("mae-tinyimagenet")
    run = residua.pretrain(**SMALL | {"steps": 1}, evaluate=False, out=tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = residua.pretrain(run.path / "config.yaml", out=str(tmp_path / "again"), seed=5)
    assert again.config.settings()["seed"] == 5
    assert again.config.settings()["depth"] == 2
    with pytest.raises(ValueError, match="is no run"):
        residua.Run.of(tmp_path)
