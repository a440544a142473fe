"""What a run is told when it goes wrong, and that a normal one is told nothing."""

import math
import re
from typing import Any

import pytest
import torch

import residua
from residua.train.health import Health, memory_savers
from residua.train.options import ShortcutConfig

CPU = torch.device("cpu")


def test_a_normal_run_is_told_nothing() -> None:
    health = Health(steps=1000)
    for step in range(10, 1001, 10):
        assert health.check(step, loss=1.0 * 0.999**step, wait_share=0.05, device=CPU) == []
    assert health.check_rank(3.0, 384, ShortcutConfig(alpha_min=0.7)) == []


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
    assert "nearly full (79 of 80 GiB). If it runs out, the run stops." in message
    (message,) = Health(steps=100).check(2, 1.0, 0, gpu, splits=True, savers=["one option", "another"])
    assert message.endswith("the batch is split by itself; what avoids that: one option or another.")


def test_only_options_that_a_network_takes_save_memory() -> None:
    vit: Any = residua.create_model("vit_nano", img_size=16, patch_size=4)
    assert memory_savers(vit, 8) == ["a --micro-batch below 8", "--grad-checkpointing"]
    assert memory_savers(vit, None) == ["--grad-checkpointing"]
    vit.set_grad_checkpointing()
    assert memory_savers(vit, None) == []
    resnet: Any = residua.create_model("resnet18", img_size=16)
    with pytest.raises(ValueError, match="not recomputed"):
        resnet.set_grad_checkpointing()
    assert memory_savers(resnet, None) == []


def test_collapsed_features_are_named() -> None:
    health = Health(steps=100)
    (message,) = health.check_rank(0.12, 384, ShortcutConfig(alpha_min=0.7))
    assert "collapsed" in message
    assert f"0.12 nats of at most {math.log(384):.1f}" in message
    assert "raise --alpha-min or let it come in gradually (--anneal 0.5)" in message
    assert health.check_rank(0.12, 384, ShortcutConfig(alpha_min=0.7)) == []


@pytest.mark.parametrize(
    ("shortcut", "advised"),
    [
        (ShortcutConfig(alpha_min=0.7, anneal=0.5), {"--alpha-min"}),
        (ShortcutConfig(alpha_min=1.0, alpha_eff=0.01), {"--alpha-eff", "--anneal"}),
        (ShortcutConfig(alpha_min=1.0, alpha_eff=1.0), {"--lr"}),
        (ShortcutConfig(alpha_min=1.0), {"--lr"}),
        (ShortcutConfig(alpha_min=1.0, schedule="learned"), {"--lr"}),
        (ShortcutConfig(alpha_min=1.0, control="both"), {"--lr"}),
    ],
)
def test_collapsed_features_are_told_what_this_run_can_do(shortcut: ShortcutConfig, advised: set[str]) -> None:
    (message,) = Health(steps=100).check_rank(0.12, 384, shortcut)
    assert set(re.findall(r"--[a-z-]+", message)) == advised
