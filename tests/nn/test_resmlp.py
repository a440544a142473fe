"""Residual networks of one width: what they compute, written out, and what surrounds them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import residua
from residua.nn import UniformNet

KINDS = ("resmlp", "resconv", "resconv_down")
TINY: dict[str, Any] = {"img_size": 8, "in_chans": 2, "num_classes": 3, "depth": 4, "width": 6}


def build(kind: str, **options: Any) -> UniformNet:
    model = residua.create_model(kind, **TINY | options)
    assert isinstance(model, UniformNet)
    return model.eval()


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 2, 8, 8)


def by_hand(model: UniformNet, x: Tensor) -> Tensor:
    """`relu(alpha * shortcut(x) + W2 relu(W1 x))` block by block."""
    x = model.embed(x)
    for alpha, block in zip(model.shortcut.alpha.tolist(), model.blocks):
        kept = x if block.downsample is None else block.downsample(x)
        branch = block.norm2(block.layer2(F.relu(block.norm1(block.layer1(x)))))
        x = F.relu(alpha * kept + branch)
    return x


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_is_what_the_text_says(kind: str, norm: bool) -> None:
    model = build(kind, alpha_min=0.6, norm=norm)
    x = images()
    features = by_hand(model, x)
    torch.testing.assert_close(model.forward_features(x), features)
    pooled = features if kind == "resmlp" else features.mean((2, 3))
    torch.testing.assert_close(model.pooled(x), pooled)
    torch.testing.assert_close(model(x), F.linear(pooled, model.head.weight, model.head.bias))


@pytest.mark.parametrize("kind", KINDS)
def test_walking_the_steps_is_the_forward_pass(kind: str) -> None:
    model, x = build(kind, alpha_min=0.7), images()
    taps: dict[str, Tensor] = {}
    features = model.forward_features(x, tap=taps.__setitem__)
    before = "embed"
    for step in residua.stream(model, x):
        assert torch.equal(step.input, taps[before])
        assert torch.equal(step(step.input), taps[step.name])
        before = step.name
    assert torch.equal(taps["blocks.3"], features)


@pytest.mark.parametrize("control", ["branch", "both"])
def test_controls_scale_what_they_say(control: str) -> None:
    model, half = build("resmlp", control=control), 0.5**0.5
    given = images()
    x = model.embed(given)
    for block in model.blocks:
        x = F.relu((half * x if control == "both" else x) + half * block.branch(x))
    torch.testing.assert_close(model.forward_features(given), x)


def test_shapes_stay_or_change_once() -> None:
    assert build("resmlp").embed(images()).shape == (2, 6)
    assert build("resconv").forward_features(images()).shape == (2, 6, 8, 8)
    down = build("resconv_down")
    assert [step.shortcut is not None for step in residua.stream(down)] == [False, False, True, False]
    assert down.forward_features(images()).shape == (2, 12, 4, 4)


def test_the_schedule_runs_over_the_blocks() -> None:
    model = build("resmlp", depth=8, alpha_min=0.5)
    torch.testing.assert_close(model.shortcut.alpha.double(), residua.alphas(8, 0.5, per="block"))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_without_shortcuts_nothing_of_the_input_passes_by(kind: str) -> None:
    model = build(kind, alpha_min=0.0, schedule="constant")
    assert residua.stream(model).alphas.tolist() == [0.0] * 4
    x = model.embed(images())
    step = residua.stream(model)[0]
    assert torch.equal(step(x), F.relu(step.branch(x)))


@pytest.mark.parametrize(("alpha", "schedule"), [(1.0, "linear"), (0.5, "linear"), (0.0, "linear"), (0.0, "constant")])
@torch.no_grad()
def test_streams_start_neither_vanishing_nor_exploding(alpha: float, schedule: str) -> None:
    torch.manual_seed(0)
    model = build("resmlp", depth=32, width=128, alpha_min=alpha, schedule=schedule)
    taps: dict[str, Tensor] = {}
    model.forward_features(images(16), tap=taps.__setitem__)
    growth = float(taps["blocks.31"].norm() / taps["embed"].norm())
    assert 0.2 < growth < 15


def test_dropped_branches_leave_the_shortcut() -> None:
    model, x = build("resmlp", alpha_min=0.5), images(3)
    keep = torch.ones(3, 4)
    assert torch.equal(model(x, keep), model(x))
    keep[1] = 0.0
    expected = model.shortcut.alpha.prod() * model.embed(x)[1]
    torch.testing.assert_close(model.forward_features(x, keep=keep)[1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_builds_it_again(kind: str) -> None:
    model = build(kind, alpha_min=0.6, norm=True)
    again = residua.create_model(**model.config).eval()
    again.load_state_dict(model.state_dict())
    x = images()
    assert torch.equal(again(x), model(x))
    assert again.config == model.config


def test_recomputing_blocks_changes_no_gradient() -> None:
    model, x = build("resconv"), images()
    found = []
    for recompute in (False, True):
        model.set_grad_checkpointing(recompute)
        model.zero_grad()
        model(x).square().sum().backward()
        found.append(model.stem[0].weight.grad.clone())
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="not recomputed"):
        build("resmlp", norm=True).set_grad_checkpointing()


@pytest.mark.filterwarnings("error:Converting a tensor")
def test_learned_alphas_are_built_without_a_warning() -> None:
    torch.set_warn_always(True)
    try:
        assert build("resmlp", schedule="learned").shortcut.alpha.requires_grad
    finally:
        torch.set_warn_always(False)


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="depth 0"):
        build("resmlp", depth=0)
    with pytest.raises(ValueError, match="takes 8 x 8"):
        build("resmlp")(torch.randn(1, 2, 9, 9))
    with pytest.raises(ValueError, match=r"expected \(batch, 2, h, w\)"):
        build("resconv")(torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match="kind is 'resfc'"):
        UniformNet(kind="resfc")  # type: ignore[arg-type]
