"""Learning rates, groups, optimiser state and averages."""

import math

import pytest
import torch

import residua
from residua.train.optim import (
    Average,
    Settings,
    decay_strength,
    learning_rate,
    make_optimizer,
    parameter_groups,
    restore_optimizer,
)


@pytest.mark.parametrize("steps", [20, 100, 1000])
def test_learning_rate_rises_then_follows_a_cosine_to_zero(steps: int) -> None:
    settings = Settings(steps=steps, batch_size=8, lr=2e-3, warmup=0.1)
    rates = [learning_rate(step, settings) for step in range(steps + 1)]
    warm = steps // 10
    for step in range(warm):
        assert rates[step] == pytest.approx(2e-3 * (step + 1) / warm)
    assert rates[warm] == pytest.approx(2e-3)
    for step in range(warm, steps + 1):
        angle = math.pi * (step - warm) / (steps - warm)
        assert rates[step] == pytest.approx(1e-3 * (1 + math.cos(angle)), abs=1e-12)
    assert rates[steps] == 0
    assert all(rate > 0 for rate in rates[:-1])


@pytest.mark.parametrize(("anneal", "whole"), [(0.0, 0), (0.5, 5), (1.0, 9)])
def test_annealing_reaches_its_end(anneal: float, whole: int) -> None:
    settings = Settings(steps=10, batch_size=8, lr=1.0, anneal=anneal)
    found = [decay_strength(step, settings) for step in range(10)]
    assert found == [1.0 if step >= whole else step / whole for step in range(10)]


def test_without_warm_up_the_peak_comes_first() -> None:
    settings = Settings(steps=10, batch_size=8, lr=1.0, warmup=0.0)
    assert learning_rate(0, settings) == 1.0
    assert learning_rate(5, settings) == pytest.approx(0.5)


@pytest.mark.parametrize(("most", "warm"), [(None, 20), (5, 5), (20, 20), (50, 20), (0, 0)])
def test_the_warm_up_is_no_longer_than_told(most: int | None, warm: int) -> None:
    settings = Settings(steps=100, batch_size=8, lr=2.0, warmup=0.2, warmup_steps=most, lr_schedule="constant")
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates == pytest.approx([2.0 * min(1, (step + 1) / max(warm, 1)) for step in range(100)])


@pytest.mark.parametrize("warmup", [0.05, 0.13, 0.5, 1.0])
def test_it_never_exceeds_the_peak(warmup: float) -> None:
    settings = Settings(steps=37, batch_size=8, lr=1.0, warmup=warmup)
    rates = [learning_rate(step, settings) for step in range(37)]
    assert 0 < min(rates) <= max(rates) <= 1.0
    assert max(rates) > 0.95


def test_annealing_takes_its_share_of_the_steps() -> None:
    settings = Settings(steps=100, batch_size=8, lr=1.0, anneal=0.4)
    assert [decay_strength(step, settings) for step in (0, 10, 20, 40, 99)] == [0, 0.25, 0.5, 1, 1]
    assert decay_strength(0, Settings(steps=100, batch_size=8, lr=1.0)) == 1


def test_weight_decay_is_for_matrices_alone() -> None:
    model = residua.create_model("mae_vit_nano", img_size=16, patch_size=4, schedule="learned")
    decayed, free = parameter_groups(model, 0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    for p in decayed["params"]:
        assert names[id(p)].endswith("weight")
        assert "norm" not in names[id(p)]
    spared = {names[id(p)] for p in free["params"]}
    for name in names.values():
        if name.endswith(("bias", "token", "alpha")) or "norm" in name:
            assert name in spared
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    model.encoder.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.05)) < len(names)


def test_a_saved_state_does_not_choose_how_steps_are_computed() -> None:
    """A run begun on a GPU can go on here: its optimiser had settings that only a GPU knows."""
    weight = torch.nn.Parameter(torch.ones(3))
    settings = Settings(steps=1, batch_size=1, lr=0.1)
    optimizer = make_optimizer([{"params": [weight], "weight_decay": 0.0}], settings, torch.device("cpu"))
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"capturable": True, "lr": torch.tensor(0.1)}
    again = make_optimizer([{"params": [weight], "weight_decay": 0.0}], settings, torch.device("cpu"))
    restore_optimizer(again, state)
    assert not again.param_groups[0]["capturable"]
    assert torch.equal(again.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])
    again.param_groups[0]["lr"] = 0.1
    again.step()  # would refuse a capturable group on a CPU


@pytest.mark.parametrize("damage", [None, [], torch.zeros(3), "missing"])
def test_a_state_that_does_not_fit_is_refused(damage: object) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([{"params": [weight]}], Settings(steps=9, batch_size=1, lr=0.1), torch.device("cpu"))
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    if damage == "missing":
        state["param_groups"][0]["params"] = []
    else:
        state["state"][0]["exp_avg"] = damage
    with pytest.raises(ValueError, match="its optimiser"):
        restore_optimizer(optimizer, state)


def test_the_average_starts_at_the_first_update_and_copies_buffers() -> None:
    model = torch.nn.BatchNorm1d(2)
    average = Average(model, 0.15)  # less than (1 + 1) / (10 + 1), so it is the decay itself
    for step, value in enumerate((3.0, 2.0, 4.0)):
        torch.nn.init.constant_(model.weight, value)
        model.running_mean.fill_(value)
        average.update(step)
    assert float(average.model.weight[0]) == pytest.approx(0.15 * (0.15 * 3 + 0.85 * 2) + 0.85 * 4)
    assert float(average.model.running_mean[0]) == 4.0


def test_a_long_average_does_not_hold_on_to_the_first_weights() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    average = Average(model, 0.9999)
    for step in range(300):
        torch.nn.init.constant_(model.weight, 0.0 if step else 1.0)
        average.update(step)
    assert float(average.model.weight) < 1e-9  # 0.9999 ** 300 = 0.97 with a constant decay
