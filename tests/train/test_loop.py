"""The loop: learning rates, groups, averages, accumulation, and what happens when a run goes wrong."""

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import STEPS, differences, small
from torch import Tensor

import residua
from residua.data import Batch
from residua.train import Hooks, Loop, Session, TrainingStopped, fit, prepare, read_metrics
from residua.train import checkpoint as ckpt
from residua.train.config import Pretrain
from residua.train.optim import Settings, learning_rate

Weights = dict[str, Tensor]


def weights(model: torch.nn.Module) -> Weights:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[k], other[k]) for k in one)


def close(one: Weights, other: Weights, rtol: float = 1e-3, atol: float = 2e-5) -> None:
    """Attention does not depend on the biases of keys: their gradient is rounding, which AdamW magnifies."""
    for name, value in one.items():
        pair = [value, other[name]]
        if name.endswith("qkv.bias"):
            pair = [torch.cat([query, v]) for query, _, v in (bias.chunk(3) for bias in pair)]
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def trained(hooks: Hooks | None = None, **changes: Any) -> Weights:
    """The weights at the end of a small run that is not written down (without its moving average)."""
    return weights(prepare(small(**{"ema": None} | changes)).loop(hooks).fit())


@pytest.fixture(scope="module")
def plain() -> Weights:
    """Where the small run ends when nothing happens to it."""
    return trained()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    fit(prepare(small(run)))
    return run


def test_alphas_move_while_training(finished: Path) -> None:
    last = {r["step"]: r["alpha_last"] for r in read_metrics(finished)}
    for step in (2, 4, 6, 12):  # 0.7 is reached after half of the 12 steps
        strength = min((step - 1) / 6, 1)
        assert last[step] == pytest.approx(1 - 0.3 * strength, rel=1e-6)


@pytest.mark.filterwarnings("error:Converting a tensor")
def test_learned_alphas_are_recorded_without_a_warning() -> None:
    records: list[dict[str, Any]] = []
    torch.set_warn_always(True)
    try:
        after = trained(Hooks(on_record=records.append), schedule="learned", alpha_min=1.0, anneal=0.0, steps=2)
    finally:
        torch.set_warn_always(False)
    assert records[-1]["alpha_last"] == float(after["encoder.shortcut.alpha"][-1]) != 1.0


def test_a_step_is_adamw_on_the_mean_loss() -> None:
    """Four steps against torch's plain AdamW, written out; with the third the second epoch begins."""
    session = prepare(small(steps=4, ema=None, clip=None, anneal=0.0, weight_decay=0.1))
    twin = residua.create_model(**session.model.config)
    twin.load_state_dict(session.model.state_dict())
    loop = session.loop()
    matrices = [p for n, p in twin.named_parameters() if p.ndim >= 2 and not n.endswith("token")]
    others = [p for n, p in twin.named_parameters() if p.ndim < 2 or n.endswith("token")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    assert loop.order.epoch_of(2).unique().tolist() == [0, 1]
    for step, chosen in enumerate(loop.batches(0, 4)):
        loss, _ = loop.advance(chosen)
        batch = session.feed.gather(*chosen)
        images, noise = loop.objective.view(batch, loop.order.epoch_of(step))
        expected = twin(images, noise)[0]
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, loop.settings)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    close(weights(session.model), weights(twin), rtol=1e-5, atol=1e-6)


def test_clipping_limits_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: dict[float | None, Tensor] = {}
    reported = {}
    for clip in (None, 1e-2, 1e3):
        session = prepare(small(steps=1, ema=None, clip=clip))
        loop = session.loop()

        def step(loop: Loop = loop, clip: float | None = clip) -> None:
            grads = [p.grad for p in loop.bare.parameters()]
            norms[clip] = torch.stack([g.norm() for g in grads if g is not None]).norm()

        monkeypatch.setattr(loop.optimizer, "step", step)
        for images in loop.batches(0, 1):
            reported[clip] = float(loop.advance(images)[1])
    full = float(norms[None])
    assert full > 0.02  # or there was nothing to clip
    assert float(norms[1e-2]) == pytest.approx(1e-2, rel=1e-3)
    assert float(norms[1e3]) == pytest.approx(full, rel=1e-5)
    assert reported[1e-2] == pytest.approx(full, rel=1e-5)  # the norm before it was cut


@pytest.mark.parametrize("micro", [8, 5, 1])
def test_accumulation_follows_the_full_batch(plain: Weights, micro: int) -> None:
    calls: list[int] = []
    session = prepare(small(ema=None, micro_batch=micro))
    loop = session.loop()
    objective = loop.objective
    loop.objective = lambda model, batch, epochs: (calls.append(len(batch.index)), objective(model, batch, epochs))[1]
    after = weights(loop.fit())
    assert max(calls) == micro
    assert sum(calls) == 16 * STEPS
    close(after, plain)


def test_the_loss_that_is_told_is_that_of_the_whole_batch() -> None:
    told = []
    for micro in (None, 5):  # 5, 5, 5 and 1
        loop = prepare(small(steps=1, ema=None, micro_batch=micro)).loop()
        told += [float(loop.advance(images)[0]) for images in loop.batches(0, 1)]
    assert told[1] == pytest.approx(told[0], rel=1e-5)


def test_the_moving_average_is_its_definition(tmp_path: Path) -> None:
    seen: list[Weights] = []
    hooks = Hooks(every=1, on_interval=lambda step, model: seen.append(weights(model)))
    session = prepare(small(tmp_path / "run", ema=0.8))
    model = fit(session, hooks)
    last = ckpt.checkpoints(tmp_path / "run")[-1]
    seen.append(ckpt.load_file(last / "model.safetensors"))
    assert len(seen) == STEPS
    average = {k: v.double() for k, v in seen[0].items()}
    for t, step in enumerate(seen[1:], start=1):
        decay = min(0.8, (1 + t) / (10 + t))
        average = {k: decay * average[k] + (1 - decay) * step[k] for k in average}
    average["encoder.shortcut.alpha"] = seen[-1]["encoder.shortcut.alpha"].double()  # no parameter: as it is now
    kept = ckpt.load_file(last / "ema.safetensors")
    for name, value in average.items():
        torch.testing.assert_close(kept[name].double(), value, rtol=1e-5, atol=1e-7)
    assert equal(weights(model), kept)  # it is what the run returns
    assert not equal(kept, seen[-1])


# ---------------------------------------------------------------- orchestration changes nothing


@pytest.mark.parametrize(
    "change",
    [{"resident": False, "workers": 0}, {"grad_checkpointing": True}, {"log_every": 5, "checkpoint_every": 7}],
)
def test_machine_settings_change_no_bit(plain: Weights, change: dict[str, Any]) -> None:
    assert equal(trained(**change), plain)


def test_an_evaluation_in_between_changes_nothing(plain: Weights) -> None:
    modes: list[bool] = []

    def evaluate(step: int, model: torch.nn.Module) -> dict[str, float]:
        modes.append(model.training)
        torch.rand(100)
        model.eval()
        return {"knn": 0.5 + step / 100}

    records: list[dict[str, Any]] = []
    hooks = Hooks(on_record=records.append, every=5, on_interval=evaluate)
    assert equal(trained(hooks), plain)
    assert [(r["step"], r["knn"]) for r in records if "knn" in r] == [(5, 0.55), (10, 0.6)]
    assert modes == [True, True]  # and training goes on in its own mode


@pytest.mark.parametrize("error", [ValueError("samples are not finite"), torch.OutOfMemoryError("too much")])
def test_a_look_at_the_model_that_fails_is_told_and_training_goes_on(
    finished: Path, tmp_path: Path, error: Exception
) -> None:
    run, messages, kept = tmp_path / "run", list[str](), list[Any]()

    def look(step: int, model: torch.nn.Module) -> dict[str, float]:
        kept.append((ckpt.checkpoints(run)[-1].name, read_metrics(run)[-1]["step"]))
        model.eval()
        if step == 3:
            raise error
        return {"eval/knn": 0.5}

    fit(prepare(small(run)), Hooks(every=3, on_interval=look, on_message=messages.append))
    assert kept == [(f"step-{step:07d}", step) for step in (3, 6, 9)]  # saved and written down first
    (message,) = messages
    assert message.startswith(f"the preview or evaluation at step 3 failed, training goes on: {error}")
    assert differences(run, finished) == []
    assert [r["step"] for r in read_metrics(run) if "eval/knn" in r] == [6, 9]


def test_an_interrupted_look_at_the_model_loses_no_step(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def look(step: int, model: torch.nn.Module) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(prepare(small(run)), Hooks(every=6, on_interval=look))
    assert ckpt.checkpoints(run)[-1].name == "step-0000006"
    fit(prepare(small(run, resume=True)))
    assert differences(run, finished) == []


def test_bfloat16_keeps_float32_weights_and_learns_alike() -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16"):
        records: list[dict[str, Any]] = []
        after = trained(Hooks(on_record=records.append), precision=precision)
        assert {v.dtype for v in after.values()} == {torch.float32}
        losses[precision] = [r["loss"] for r in records]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["bf16"] != losses["fp32"]


def test_records(finished: Path) -> None:
    records = read_metrics(finished)
    assert [r["step"] for r in records] == [2, 3, 4, 6, 8, 9, 10, 12]  # every 2 steps, and at every checkpoint
    settings = Settings(steps=STEPS, batch_size=16, lr=2e-3)
    for r in records:
        assert r["lr"] == pytest.approx(learning_rate(r["step"] - 1, settings))
        assert r["epoch"] == pytest.approx(r["step"] * 16 / 40)
        assert r["images_per_s"] > 0


def test_a_record_holds_the_mean_loss_since_the_one_before() -> None:
    found: dict[int, list[float]] = {}
    for every in (1, 4):
        records: list[dict[str, Any]] = []
        trained(Hooks(on_record=records.append), log_every=every, checkpoint_every=100)
        found[every] = [record["loss"] for record in records]
    means = [sum(found[1][i : i + 4]) / 4 for i in range(0, STEPS, 4)]
    assert found[4] == pytest.approx(means, rel=1e-6)


def test_a_record_cut_short_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_what_is_not_finite_is_left_out_of_a_record(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    hooks = Hooks(every=3, on_interval=lambda step, model: {"eval/probe": math.nan, "eval/knn": 0.5})
    fit(prepare(small(tmp_path / "run", steps=4)), hooks)
    residua.train.metrics.append_metrics(tmp_path / "run", {"step": 5, "grad_norm": math.inf})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["step"] for r in records] == [2, 3, 4, 5]
    assert records[1]["eval/knn"] == 0.5
    assert "eval/probe" not in records[1]
    assert records[3] == {"step": 5}


# ---------------------------------------------------------------- when it goes wrong


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_run_goes_on_exactly(
    finished: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    before = signal.getsignal(number)

    def interrupt(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(TrainingStopped, match=r"stopped at step [45] of 12; continue with --resume"):
        fit(prepare(small(run)), Hooks(on_record=interrupt))
    assert signal.getsignal(number) is before
    assert int(ckpt.checkpoints(run)[-1].name[5:]) in (4, 5)
    fit(prepare(small(run, resume=True)))
    assert differences(run, finished) == []


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    def insist(record: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        fit(prepare(small(tmp_path / "run")), Hooks(on_record=insist))


def spoil(session: Session, spoiled: Callable[[Tensor], Tensor], step: int, hooks: Hooks | None = None) -> Loop:
    """A loop whose loss is spoiled at one step (counted from 1)."""
    loop = session.loop(hooks)
    objective = loop.objective

    def call(model: torch.nn.Module, batch: Batch, epochs: Tensor) -> Tensor:
        loss = objective(model, batch, epochs)
        return spoiled(loss) if loop.step + 1 == step else loss

    loop.objective = call
    return loop


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, value: float) -> None:
    run = tmp_path / "run"
    loop = spoil(prepare(small(run, log_every=100)), lambda loss: loss * value, step=5)
    with pytest.raises(TrainingStopped) as caught:
        loop.fit()
    message = str(caught.value)
    assert f"the loss became {value} at step 5, learning rate {learning_rate(4, loop.settings):.2e}" in message
    good = run / "checkpoints" / "step-0000003"
    assert f"The last good checkpoint is {good}" in message
    assert ckpt.checkpoints(run)[-1] == good
    assert all(v.isfinite().all() for v in residua.load(run).state_dict().values())


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """A finite loss with an infinite gradient, at the very step of a checkpoint."""
    run = tmp_path / "run"
    loop = spoil(prepare(small(run)), BadGradient.apply, step=6)
    with pytest.raises(TrainingStopped, match=r"weights.*at step 6, learning rate.*step-0000003"):
        loop.fit()
    assert ckpt.checkpoints(run)[-1].name == "step-0000003"


def limited(session: Session, most: int, messages: list[str]) -> Loop:
    """A loop on a device that has room for so many images at once."""
    loop = session.loop(Hooks(on_message=messages.append))
    objective = loop.objective

    def call(model: torch.nn.Module, batch: Batch, epochs: Tensor) -> Tensor:
        loss = objective(model, batch, epochs)
        if len(batch.index) > most and loop.step >= 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    loop.objective = call
    return loop


def test_out_of_memory_halves_the_micro_batch(plain: Weights) -> None:
    messages: list[str] = []
    loop = limited(prepare(small(ema=None)), 5, messages)
    after = weights(loop.fit())
    assert loop.micro == 4
    assert messages == [
        "out of memory: from here 8 images at once, 2 times a step; the batch stays 16",
        "out of memory: from here 4 images at once, 4 times a step; the batch stays 16",
    ]
    close(after, plain)


def test_the_smaller_micro_batch_outlives_a_restart(tmp_path: Path) -> None:
    config = small(tmp_path / "run", steps=3)
    session = prepare(config)
    session.config.save(tmp_path / "run" / "config.yaml")
    limited(session, 5, []).fit()
    session.close()
    again = prepare(config.override(resume=True)).loop()
    assert again.resume() == 3
    assert again.micro == 4


def test_a_resumed_run_is_compared_with_its_first_record(finished: Path) -> None:
    session = prepare(small(finished, resume=True))
    loop = session.loop()
    loop.resume()
    session.close()
    assert loop.health.first_loss == read_metrics(finished)[0]["loss"]


def test_out_of_memory_for_one_image_is_the_end() -> None:
    loop = limited(prepare(small(ema=None)), 0, [])
    with pytest.raises(TrainingStopped, match=r"with 1 images at once at step 2: try --grad-checkpointing, a smaller"):
        loop.fit()


@pytest.mark.parametrize("name", ["optimizer", "micro", "step"])
@pytest.mark.parametrize("value", [None, "x", [1], -1])
def test_a_damaged_training_state_is_told_and_loses_nothing(
    finished: Path, tmp_path: Path, name: str, value: Any
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    file = ckpt.checkpoints(run)[-1] / "training.pt"
    torch.save(torch.load(file, weights_only=True) | {name: value}, file)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    session = prepare(small(run, resume=True))
    with pytest.raises(ckpt.CheckpointError, match=rf"{file.parent.name} is damaged or not complete"):
        fit(session)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("setting", "words"), [({"mask_ratio": 0.5}, "mask_ratio is 0.5 there, 0.75 in step-"),
                                                ({"ema": None}, "ema is off there, step-")])  # fmt: skip
def test_settings_of_another_model_than_the_checkpoint_are_refused(
    finished: Path, tmp_path: Path, setting: dict[str, Any], words: str
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    Pretrain.read(run / "config.yaml").override(**setting).save(run / "config.yaml")
    with pytest.raises(ckpt.CheckpointError, match=f"config.yaml of .* is not what it was: {words}"):
        fit(prepare(small(run, **setting, resume=True)))


@pytest.mark.parametrize("where", ["checkpoint", "metrics"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = tmp_path / "run"
    module, name = (ckpt, "save_file") if where == "checkpoint" else (residua.train.metrics, "_append")
    write = getattr(module, name)

    def filling(*args: Any, **kwargs: Any) -> Any:
        if ckpt.checkpoints(run):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(module, name, filling)
    with pytest.raises(ckpt.CheckpointError, match=r"No space left on device.*last good checkpoint is .*step-0000003"):
        fit(prepare(small(run)))
    monkeypatch.undo()
    fit(prepare(small(run, resume=True)))
    assert differences(run, finished) == []
