"""Training of diffusion models: the objective by its definition, whole runs, and what is refused."""

import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from drive import STEPS, differences, small_diffusion, start, together, train, train_rank
from PIL import Image
from torch import Tensor, nn

import residua
from residua.data import Batch, DataError, latents
from residua.data.autoencoder import LatentSpace
from residua.data.source import fingerprint_of
from residua.nn import UViT
from residua.nn.diffusion import VP, Flow
from residua.train import TrainingStopped, fit, read_metrics
from residua.train.checkpoint import CheckpointError, checkpoints, load_file, save_model
from residua.train.diffuse import Denoising, Diffusion, _attach, prepare
from residua.train.diffuse_config import Diffuse, build_model, resolve
from residua.train.optim import parameter_groups
from residua.train.options import auto_alpha


def diffuse(config: Diffuse, **hooks: Any) -> Any:
    session = prepare(config)
    return fit(session, session.hooks(**hooks))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    diffuse(small_diffusion(run))
    return run


class Told(nn.Module):
    """Predicts zero and remembers what it was asked."""

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        self.x, self.t, self.y = x, t, y
        return torch.zeros_like(x)


def batch_of(session: Diffusion, n: int = 40) -> tuple[Batch, Tensor]:
    return session.feed.gather(torch.arange(n)), torch.zeros(n, dtype=torch.long)


# ---------------------------------------------------------------- the objective


@pytest.mark.parametrize("process", ["vp", "flow"])
def test_the_objective_is_its_definition(process: str) -> None:
    session, model = prepare(small_diffusion(process=process, flip=False, label_dropout=0.0)), Told()
    objective: Any = session.objective()
    batch, epochs = batch_of(session)
    loss = objective(model, batch, epochs)
    x_0 = batch.pixels / 127.5 - 1
    x, eps, t, y = objective.draw(batch, epochs)
    assert torch.allclose(x, x_0, atol=1e-6)
    assert torch.equal(y, torch.from_numpy(session.splits.train.labels))
    tt = t.view(-1, 1, 1, 1)
    if process == "vp":
        log_a = -0.25 * tt**2 * 19.9 - 0.5 * tt * 0.1
        expected, wanted = log_a.exp() * x_0 + (1 - (2 * log_a).exp()).sqrt() * eps, eps
    else:
        expected, wanted = (1 - tt) * x_0 + tt * eps, eps - x_0
    assert torch.allclose(model.x, expected, atol=1e-5)
    assert torch.allclose(model.t, 999 * t)
    assert float(loss) == pytest.approx(float(wanted.square().mean()), rel=1e-5)


def test_times_are_uniform_noise_is_normal_and_labels_are_dropped_at_their_rate() -> None:
    session = prepare(small_diffusion(label_dropout=0.15, flip=True))
    objective: Any = session.objective()
    batch, _ = batch_of(session)
    epochs = range(50)
    drawn = [objective.draw(batch, torch.full((40,), epoch)) for epoch in epochs]
    t, eps, y = (torch.cat([d[i] for d in drawn]) for i in (2, 1, 3))
    assert 0 < float(t.min()) < 0.01 < 0.99 < float(t.max()) < 1
    assert float(t.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(eps.mean()) == pytest.approx(0, abs=0.01)
    assert float(eps.std()) == pytest.approx(1, abs=0.01)
    share = float((y == session.model.num_classes).float().mean())
    assert share == pytest.approx(0.15, abs=0.03)  # 2,000 draws: four standard errors
    kept = y != session.model.num_classes
    labels = torch.from_numpy(session.splits.train.labels).repeat(len(epochs))
    assert torch.equal(y[kept], labels[kept])
    assert float(t[~kept].mean()) == pytest.approx(0.5, abs=0.07)  # 300 draws: labels are dropped at all times alike
    assert abs(float(torch.corrcoef(torch.stack([t, eps[:, 0, 0, 0]]))[0, 1])) < 0.09
    upright = batch.pixels / 127.5 - 1
    same = torch.stack([(d[0] - upright).abs().amax((1, 2, 3)) < 1e-5 for d in drawn]).float().mean()
    assert float(same) == pytest.approx(0.5, abs=0.05)
    assert all((((d[0] - upright).abs().amax((1, 2, 3)) < 1e-5)
                | ((d[0].flip(-1) - upright).abs().amax((1, 2, 3)) < 1e-5)).all() for d in drawn)  # fmt: skip


def test_what_is_drawn_for_an_image_does_not_depend_on_its_batch() -> None:
    session = prepare(small_diffusion())
    objective: Any = session.objective()
    batch, epochs = batch_of(session)
    whole = objective.draw(batch, epochs + 3)
    part = objective.draw(session.feed.gather(torch.tensor([7, 31])), torch.tensor([3, 3]))
    for a, b in zip(whole, part):
        assert torch.equal(a[[7, 31]], b)


def test_pixels_that_are_no_bytes_are_taken_as_they_are() -> None:
    session = prepare(small_diffusion(flip=False))
    objective: Any = session.objective()
    batch, epochs = batch_of(session)
    fractions = Batch(batch.pixels / 255, batch.sizes, batch.index)
    torch.testing.assert_close(objective.view(fractions, epochs), objective.view(batch, epochs))
    assert float(objective.view(batch, epochs).max()) > 0.5


def test_images_of_another_size_are_cropped_centrally() -> None:
    session = prepare(small_diffusion(data="shapes?n=8&size=24", img_size=16, batch_size=8, flip=False))
    objective: Any = session.objective()
    batch, epochs = batch_of(session, 8)
    expected = residua.data.center_view(batch, 16, (0.5,) * 3, (0.5,) * 3)
    assert torch.allclose(objective.view(batch, epochs), expected, atol=1e-6)
    zoomed = prepare(small_diffusion(data="shapes?n=8&size=24", img_size=16, batch_size=8, scale=(0.3, 0.5)))
    other: Any = zoomed.objective()
    assert not torch.allclose(other.view(batch, epochs), expected, atol=1e-2)


# ---------------------------------------------------------------- whole runs


def test_a_run_learns_and_comes_back_with_process_and_preprocessing(finished: Path) -> None:
    losses = [r["loss"] for r in read_metrics(finished)]
    assert losses[-1] < losses[0]
    model: Any = residua.load(finished)
    assert isinstance(model, UViT)
    assert model.process == VP()
    assert model.preprocessing.mean == model.preprocessing.std == (0.5, 0.5, 0.5)
    assert model.classes[:2] == ["disc", "triangle"]
    assert model.num_classes == 8
    last = checkpoints(finished)[-1]
    average, raw = load_file(last / "ema.safetensors"), load_file(last / "model.safetensors")
    own = model.state_dict()
    assert all(torch.equal(own[k], v) for k, v in average.items())
    assert any(not torch.equal(own[k], v) for k, v in raw.items())


def test_the_rate_rises_and_stays(finished: Path) -> None:
    rates = [r["lr"] for r in read_metrics(finished)]
    assert rates[1:] == [2e-3] * (len(rates) - 1)


def test_killed_and_resumed_it_ends_the_same(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(train, small_diffusion(run), "in the training state", 2)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert 0 < int(checkpoints(run)[-1].name[5:]) < STEPS
    diffuse(small_diffusion(run, resume=True))
    assert differences(run, finished) == []


def test_pictures_of_samples_do_not_disturb_a_run(finished: Path, tmp_path: Path) -> None:
    run, seen = tmp_path / "run", []

    def look(step: int, model: nn.Module) -> None:
        seen.append((step, {k: v.clone() for k, v in model.state_dict().items()}))

    diffuse(small_diffusion(run, sample_every=2.4, samples=5), on_interval=look)
    assert differences(run, finished) == []
    pictures = sorted((run / "samples").iterdir())
    assert [p.name for p in pictures] == ["step-0000006.png"]
    assert Image.open(pictures[0]).size == (3 * 18 - 2, 2 * 18 - 2)
    average = load_file(run / "checkpoints" / "step-0000012" / "ema.safetensors")
    assert seen[0][0] == 6
    assert set(seen[0][1]) == set(average)


def test_the_moving_average_is_what_is_looked_at(tmp_path: Path) -> None:
    seen: dict[int, dict[str, Tensor]] = {}

    def look(step: int, model: nn.Module) -> None:
        seen[step] = {k: v.clone() for k, v in model.state_dict().items()}

    run = tmp_path / "run"
    diffuse(small_diffusion(run, sample_every=1.2, samples=1, keep=0), on_interval=look)
    for step in (3, 6):
        kept = load_file(run / "checkpoints" / f"step-{step:07d}" / "ema.safetensors")
        assert all(torch.equal(seen[step][k], v) for k, v in kept.items())


def test_two_processes_follow_one(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert together(train_rank, small_diffusion(run)) == [0, 0]
    mine, theirs = (load_file(checkpoints(r)[-1] / "model.safetensors") for r in (run, finished))
    assert all(torch.allclose(mine[k], v, atol=2e-4) for k, v in theirs.items())


def test_sit_learns_velocity_without_labels(tmp_path: Path) -> None:
    run = tmp_path / "run"
    diffuse(small_diffusion(run, network="sit", conditional=False))
    model: Any = residua.load(run)
    assert model.process == Flow()
    assert model.num_classes is None
    losses = [r["loss"] for r in read_metrics(run)]
    assert losses[-1] < losses[0]


def test_one_channel_and_odd_sizes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    diffuse(small_diffusion(run, data="digits", patch_size="auto", steps=4, sample_every=0.01, samples=2))
    model: Any = residua.load(run)
    assert (model.in_chans, model.img_size, model.patch_size) == (1, (8, 8), (2, 2))
    assert Image.open(next((run / "samples").iterdir())).mode == "L"


def test_one_process_on_each_machine_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondMachine(Accelerator):
        is_main_process = property(lambda self: False)
        is_local_main_process = property(lambda self: True)

    class Asked(Exception):
        pass

    def ask(*args: Any, writes: bool, **options: Any) -> None:
        raise Asked(writes)

    space = LatentSpace("stand-in", 4, 4, 1.0, 0.0, "")
    monkeypatch.setattr(residua.train.diffuse, "open_autoencoder", lambda *_: SimpleNamespace(space=space))
    monkeypatch.setattr(residua.train.diffuse, "open_accelerator", lambda machine: SecondMachine(cpu=True))
    monkeypatch.setattr(residua.train.diffuse, "latents_of", ask)
    with pytest.raises(Asked, match="True"):
        prepare(small_diffusion(latents="stand-in", patch_size=1))


def test_those_who_wait_for_latents_give_up_when_nobody_encodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "_PATIENCE", 0.5)
    space = LatentSpace("stand-in", 4, 4, 1.0, 0.0, "")
    source, began = residua.data.load("shapes?n=8&size=16").train, time.monotonic()

    def wait() -> None:
        latents.latents_of(
            source, SimpleNamespace(space=space), 16, tmp_path, torch.device("cpu"), writes=False
        )  # fmt: skip

    with pytest.raises(DataError, match="the process that this one waits for has failed, or writes to another disk"):
        wait()
    key = fingerprint_of(source.fingerprint(), "", 16, "error", latents._FORMAT)
    unfinished = tmp_path / f".unfinished-{key}-0"
    unfinished.mkdir()

    def encode() -> None:
        for i in range(15):
            os.utime(unfinished, (i, i))
            time.sleep(0.1)

    thread, began = threading.Thread(target=encode), time.monotonic()
    thread.start()
    with pytest.raises(DataError):
        wait()
    thread.join()
    assert time.monotonic() - began > 1.5  # as long as there are signs of work


# ---------------------------------------------------------------- settings


def test_left_alone_it_is_the_papers_recipe() -> None:
    source = residua.data.load("shapes?n=4096").train
    c = resolve(Diffuse(), source, "cuda").override()
    o = c.optim
    assert (o.lr, o.betas, o.weight_decay, o.batch_size, o.lr_schedule) == (2e-4, (0.99, 0.999), 0.03, 128, "constant")
    assert (o.warmup_steps, c.model.patch_size, c.model.process, c.data.scale) == (2500, 2, "vp", (1.0, 1.0))
    assert resolve(Diffuse().override(steps=500_000), source, "cuda").optim.ema == 0.9999
    assert resolve(Diffuse().override(steps=2000), source, "cuda").optim.ema == pytest.approx(0.99)
    assert resolve(Diffuse().override(network="sit"), source, "cuda").model.process == "flow"


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 2e-4), ({"embed_dim": 256}, 4e-4), ({"embed_dim": 1024}, 2e-4), ({"size": "large"}, 2e-4),
        ({"network": "sit"}, 1e-4), ({"network": "sit", "embed_dim": 192}, 2e-4),
        ({"network": "sit", "size": "base"}, 1e-4),
        ({"base_lr": 1e-4}, 5e-5), ({"base_lr": 1e-4, "batch_size": 512}, 2e-4), ({"lr": 0.5}, 0.5),
    ],
)  # fmt: skip
def test_learning_rates_by_network_width_and_batch(settings: dict[str, Any], rate: float) -> None:
    source = residua.data.load("shapes?n=4096").train
    assert resolve(Diffuse().override(**settings), source, "cuda").optim.lr == pytest.approx(rate)


def test_alpha_and_branches_left_to_us() -> None:
    source = residua.data.load("shapes?n=256").train

    def chosen(**settings: Any) -> Any:
        return resolve(Diffuse().override(**{"steps": 15_000, "depth": 12} | settings), source, "cuda")

    assert chosen().model.zero_init is True  # where fading begins with 7,500 steps
    assert chosen(zero_init=False).model.zero_init is False
    assert chosen().shortcut.alpha_min == 0.9
    assert chosen(zero_init=False).shortcut.alpha_min == auto_alpha(15_000, 12, False) < 0.9
    assert chosen(depth=24).shortcut.alpha_min == auto_alpha(15_000, 24, True) > 0.9
    for other in ({"schedule": "learned"}, {"alpha_eff": 0.01}, {"control": "both"}, {"steps": 7500}):
        assert chosen(**other).shortcut.alpha_min == 1.0
    assert chosen(alpha_min=0.6).shortcut.alpha_min == 0.6


def test_the_network_is_the_one_described() -> None:
    source = residua.data.load("shapes?n=256&size=32").train
    asked = {"network": "sit", "skips": False, "zero_init": False, "depth": 4, "embed_dim": 48, "num_heads": 3}
    config = resolve(Diffuse().override(**asked, alpha_min=0.6, schedule="cosine"), source, "cpu")
    model = build_model(config, in_chans=4, classes=5, factor=4)
    built = model.config | {"network": model.config["name"]}
    assert {name: built[name] for name in asked} == asked
    assert (model.img_size, model.in_chans, model.num_classes) == ((8, 8), 4, 5)
    assert (model.config["alpha_min"], model.config["schedule"]) == (0.6, "cosine")


def test_positions_have_no_weight_decay() -> None:
    model = residua.create_model("uvit_nano", img_size=16, patch_size=4)
    decayed, free = parameter_groups(model, 0.03)
    assert any(p is model.pos_embed for p in free["params"])
    assert all(p is not model.pos_embed for p in decayed["params"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "mid", "network": "sit"}, "no sit of size mid"),
        ({"label_dropout": 1.0}, "label_dropout is 1.0"),
        ({"skips": False}, "skips is False"),
        ({"eval_every": 1.0}, "sample_every and fid_every"),
        ({"fid_every": 1.0}, "without pictures"),
        ({"sample_every": math.inf}, "sample_every is inf"),
        ({"ema": 1.5}, "ema is 1.5"),
        ({"depth": 3}, "even number"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(small_diffusion(**changes))


def test_labels_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for i in range(4):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / f"{i}.png")
    with pytest.raises(DataError, match="no labels"):
        prepare(small_diffusion(data=f"folder:{tmp_path}", batch_size=2))


def test_classes_without_images_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = residua.data.load("shapes?n=40&size=16&test=20")
    splits.train.labels, names = np.array([1, 4, 6, 4])[np.arange(40) % 4], splits.train.classes
    assert names
    monkeypatch.setattr(residua.data, "load", lambda spec: splits)
    session = prepare(small_diffusion())
    assert (session.model.num_classes, session.model.classes) == (3, [names[1], names[4], names[6]])
    objective: Any = session.objective()
    assert objective.labels.tolist() == [0, 1, 2, 1] * 10


def test_a_run_does_not_go_on_with_another_process_or_a_damaged_description(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    Diffuse.read(copy / "config.yaml").override(process="flow").save(copy / "config.yaml")
    with pytest.raises(CheckpointError, match=r"config.yaml of .*copy is not what it was: process is .*flow.* there"):
        fit(prepare(Diffuse().override(resume=True, out=str(copy), cpu=True)))
    (checkpoints(copy)[-1] / "model.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-0000004 is damaged or not complete"):
        prepare(Diffuse().override(resume=True, out=str(copy), cpu=True))


def test_a_run_does_not_go_on_with_other_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, splits = tmp_path / "run", residua.data.load("shapes?n=40&size=16&test=20")
    monkeypatch.setattr(residua.data, "load", lambda spec: splits)
    diffuse(small_diffusion(run, steps=1))
    assert splits.train.classes
    splits.train.classes = splits.train.classes[::-1]
    with pytest.raises(DataError, match=r"other classes than when .*run was begun"):
        prepare(small_diffusion(run, steps=1, resume=True))


def test_a_model_knows_whether_it_was_trained_on_pixels(tmp_path: Path) -> None:
    model: Any = residua.create_model("uvit_nano", img_size=8, patch_size=4, in_chans=4)
    space = LatentSpace("ae", channels=4, factor=2, scale=1.0, shift=0.0, weights="")
    for given in (None, space):
        _attach(model, small_diffusion(img_size=16, process="vp"), 3, None, given)
        save_model(model, tmp_path / "model.safetensors")
        assert model.in_pixels == residua.load(tmp_path / "model.safetensors").in_pixels == (given is None)
    assert model.autoencoder == space


def test_crops_of_latents_are_refused() -> None:
    source = residua.data.load("shapes?n=40&size=16").train
    space = LatentSpace("ae", channels=4, factor=2, scale=1.0, shift=0.0, weights="")
    config = small_diffusion(latents="ae", patch_size="auto", img_size=16)
    assert resolve(config, source, "cpu", space).data.scale == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"scale is \(0.2, 1.0\).*the central square"):
        resolve(config.override(scale=(0.2, 1.0)), source, "cpu", space)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match=r"Try a smaller --lr, --clip 1\.0 or"):
        diffuse(small_diffusion(tmp_path / "run", lr=1e20, clip=None, steps=40))


def test_bfloat16_gives_nearly_the_same_loss() -> None:
    session = prepare(small_diffusion())
    objective = Denoising(session.config, VP(), session.preprocessing, torch.device("cpu"), full=True)
    batch, epochs = batch_of(session)
    model = residua.create_model("uvit_nano", img_size=16, patch_size=4)
    exact = objective(model, batch, epochs).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = objective(model, batch, epochs).detach()
    assert rounded.dtype == torch.float32
    assert float(rounded) == pytest.approx(float(exact), rel=1e-2)


def test_the_objective_is_one_graph() -> None:
    """Nothing in it asks the host, so that on a GPU a step can be recorded."""
    session = prepare(small_diffusion())
    objective: Any = session.objective()
    batch, epochs = batch_of(session)

    def loss(pixels: Tensor, sizes: Tensor, index: Tensor, epochs: Tensor) -> Tensor:
        return objective(session.model, Batch(pixels, sizes, index), epochs)

    inputs = (batch.pixels, batch.sizes, batch.index, epochs)
    whole = torch.compile(loss, fullgraph=True, backend="eager")(*inputs)
    assert torch.allclose(whole, loss(*inputs))


def test_published_uvit_weights_come_with_their_process(tmp_path: Path) -> None:
    model = residua.create_model("uvit", img_size=8, patch_size=4, embed_dim=64, depth=2, num_heads=1)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("shortcut")}
    torch.save(state, tmp_path / "uvit.pth")
    loaded: Any = residua.load(tmp_path / "uvit.pth")
    assert loaded.process == VP()
    assert loaded.preprocessing.mean == loaded.preprocessing.std == (0.5, 0.5, 0.5)
    assert loaded.preprocessing.crop_pct == 1.0
    assert residua.sample(loaded, 2, steps=2).shape == (2, 3, 8, 8)


@pytest.mark.filterwarnings("ignore:.*does not say how images are prepared")
def test_published_weights_of_latents_do_not_come_with_the_process_of_pixels(tmp_path: Path) -> None:
    model = residua.create_model("uvit", img_size=8, patch_size=4, in_chans=4, embed_dim=64, depth=2, num_heads=1)
    torch.save({k: v for k, v in model.state_dict().items() if not k.startswith("shortcut")}, tmp_path / "uvit.pth")
    assert getattr(residua.load(tmp_path / "uvit.pth"), "process", None) is None
