"""What a run will cost, and what it leaves open."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import STEPS, small, small_classifier
from PIL import Image
from torch import Tensor

from residua.train import Pretrain, Session, classify, estimate, fit, prepare
from residua.train.recorded import WARM_UP
from residua.train.session import Estimate, hours, resumed


def test_a_dry_run_estimates_and_writes_nothing(tmp_path: Path) -> None:
    session = prepare(small())
    lines = dict(session.lines())
    assert "40 images, 3 channels" in lines["data"]
    assert "12 of 16 images" in lines["steps"]
    assert "alpha_min 0.7" in lines["model"]
    assert "run" not in lines
    guess = estimate(session, steps=2)
    assert guess.seconds > 0
    parameters = sum(p.numel() for p in session.model.parameters())
    assert guess.memory_gib * 2**30 > 16 * parameters
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_grows_with_the_batch() -> None:
    def memory(**changes: Any) -> float:
        return estimate(prepare(small(**changes)), steps=1).memory_gib

    assert memory(batch_size=4) < memory(batch_size=32)
    assert memory(batch_size=32, micro_batch=4) == memory(batch_size=4)


def test_the_estimate_has_what_is_kept_for_every_weight() -> None:
    def bytes_of(session: Session) -> int:
        return round(estimate(session, steps=1).memory_gib * 2**30)

    session = prepare(small())
    parameters = sum(p.numel() for p in session.model.parameters())
    assert bytes_of(session) - bytes_of(prepare(small(ema=None))) == 4 * parameters
    sgd, adamw = (classify.prepare(small_classifier("resmlp", depth=2, optimizer=name)) for name in ("sgd", "adamw"))
    parameters = sum(p.numel() for p in sgd.model.parameters())
    assert bytes_of(adamw) - bytes_of(sgd) == 4 * parameters


def test_the_estimate_counts_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepare(small(resident=False, workers=0))
    read = session.feed.source.read

    def slow(*args: Any) -> Any:
        time.sleep(0.005)
        return read(*args)

    monkeypatch.setattr(session.feed.source, "read", slow)
    guess = estimate(session, steps=1)
    assert guess.seconds > STEPS * 16 * 0.005
    assert set(guess.rates) == {"reading", "decoding", "handing over", "computing"}
    assert guess.rates["decoding"] < 1 / 0.005


def test_the_estimate_of_a_resident_run_decodes_some_images_only(tmp_path: Path) -> None:
    for k in range(100):
        Image.effect_noise((300, 200), 50).save(tmp_path / f"{k:03d}.png")
    session = prepare(small(data=f"folder:{tmp_path}", workers=0))
    assert dict(session.lines())["device"].endswith("whole data set on the device")
    read: list[int] = []
    original = session.feed.source.read
    session.feed.source.read = lambda i, *rest: read.append(i) or original(i, *rest)  # type: ignore[method-assign]
    guess = estimate(session, steps=1)
    assert 0 < len(read) < 100
    assert set(guess.rates) == {"computing"}
    assert guess.seconds > guess.decoding_first > 0
    assert guess.memory_gib * 2**30 > 100 * 48 * 32


def test_the_estimate_names_the_slowest_stage() -> None:
    assert set(estimate(prepare(small()), steps=1).rates) == {"computing"}
    assert Estimate(1.0, 1.0, {"reading": 900.0, "decoding": 70.0, "computing": 80.0}).limit == "decoding"


def test_the_estimate_is_of_replayed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepare(small())
    loop, calls = session.loop(), list[Any]()

    def recorded(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(inputs)
        time.sleep(0.02 if len(calls) <= WARM_UP else 0.0)
        return torch.zeros(()), torch.zeros(())

    loop.recorded = recorded  # type: ignore[assignment]
    monkeypatch.setattr(session, "loop", lambda: loop)
    assert estimate(session).seconds < STEPS * 0.02


def test_fit_closes_what_it_opened(tmp_path: Path) -> None:
    session = prepare(small(tmp_path / "run", steps=1))
    assert isinstance(session, Session)
    assert not fit(session).training
    with pytest.raises(RuntimeError, match="closed"):
        next(session.feed.iterate([torch.arange(2)]))


def test_a_run_goes_on_by_its_own_settings_and_this_calls_orchestration(tmp_path: Path) -> None:
    """What is typed counts, even where it is the default."""
    before = Pretrain().override(seed=3, keep=5, log_every=7, steps=10, batch_size=8, epochs=2.0, lr=1e-3)
    before.save(tmp_path / "config.yaml")
    given = Pretrain().override(out=str(tmp_path), resume=True)
    plain = resumed(given).settings()
    assert (plain["seed"], plain["keep"], plain["log_every"], plain["resume"]) == (3, 5, 7, True)
    assert resumed(given.override(log_every=2)).machine.log_every == 2
    assert resumed(given, {"keep"}).machine.keep == Pretrain().machine.keep == 2
    with pytest.raises(ValueError, match="seed is 3 there, 0 was given"):
        resumed(given, {"seed"})
    assert resumed(given.override(seed=3), {"seed"}).optim.seed == 3


@pytest.mark.parametrize(
    ("seconds", "text"), [(12, "12 s"), (89, "89 s"), (100, "2 min"), (6000, "100 min"), (7500, "2 h 5 min")]
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert hours(seconds) == text
