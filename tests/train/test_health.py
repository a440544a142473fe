"""What a run is told when it goes wrong, and that a normal one is told nothing."""

import math
import re

import pytest
import torch

from residua.train.config import Pretrain
from residua.train.diffuse_config import Diffuse
from residua.train.finetune_config import Finetune
from residua.train.health import Health

CPU = torch.device("cpu")


def test_a_normal_run_is_told_nothing() -> None:
    health = Health(steps=1000)
    for step in range(10, 1001, 10):
        assert health.check(step, loss=1.0 * 0.999**step, wait_share=0.05, device=CPU) == []
    assert health.check_rank(3.0, 384) == []


def test_a_loss_that_does_not_move_is_told_once_and_late() -> None:
    health = Health(steps=1000)
    told = {
        step: health.check(step, loss=0.98 + 0.001 * (step % 3), wait_share=0, device=CPU)
        for step in range(10, 1001, 10)
    }
    spoken = [step for step, messages in told.items() if messages]
    assert spoken == [200]
    (message,) = told[200]
    assert "has not moved" in message
    assert "0.98" in message
    assert "step 200" in message
    assert "--lr" in message


def test_a_loss_is_not_compared_with_itself() -> None:
    health = Health(steps=1000)
    assert health.check(500, 1.0, 0, CPU) == []
    assert "1.0000 at first" in health.check(510, 1.0, 0, CPU)[0]


def test_a_short_run_is_given_a_hundred_steps() -> None:
    health = Health(steps=60)
    assert all(not health.check(step, 1.0, 0, CPU) for step in range(1, 61))


def test_a_starving_loader_is_named() -> None:
    health = Health(steps=100)
    assert health.check(10, 1.0, 0.9, CPU) == []  # the first steps fill the pipeline
    (message,) = health.check(30, 0.8, 0.43, CPU)
    assert message.startswith("43 % of the time")
    assert "--workers" in message
    assert health.check(40, 0.7, 0.43, CPU) == []


def test_nearly_full_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    health, gpu = Health(steps=100), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 80 * 2**30))
    assert health.check(1, 1.0, 0, gpu) == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 80 * 2**30))
    (message,) = health.check(2, 1.0, 0, gpu)
    assert "nearly full (79 of 80 GiB). If it runs out, the run stops; a smaller --micro-batch" in message
    (message,) = Health(steps=100).check(2, 1.0, 0, gpu, splits=True)
    assert "the batch is split by itself" in message


def test_collapsed_features_are_named() -> None:
    health = Health(steps=100)
    (message,) = health.check_rank(0.12, 384)
    assert "collapsed" in message
    assert f"0.12 nats of at most {math.log(384):.1f}" in message
    assert health.check_rank(0.12, 384) == []


def test_what_is_advised_are_options_of_every_command_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 80 * 2**30))
    health = Health(steps=100)
    health.check(1, 1.0, 0, CPU)
    told = [*health.check(100, 1.0, 0.5, torch.device("cuda")), *health.check_rank(0.1, 384)]
    assert len(told) == 4
    advised = set(re.findall(r"--([a-z-]+)", " ".join(told)))
    for config in (Pretrain(), Finetune(), Diffuse()):
        assert {name.replace("-", "_") for name in advised} <= config.settings().keys()
