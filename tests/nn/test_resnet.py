"""ResNets: torchvision's function where shortcuts do not fade, and the paper's where they do."""

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor

import residua
from residua.nn import ResNet

TINY: dict[str, Any] = {"img_size": 16, "num_classes": 5, "width": 4}


def spread(model: torch.nn.Module) -> None:
    """Running statistics and affine weights as after some training, not 0 and 1."""
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(m.running_mean, std=0.1)
            torch.nn.init.uniform_(m.running_var, 0.5, 1.5)
            torch.nn.init.normal_(m.weight, 1.0, 0.2)


@pytest.fixture
def tiny() -> ResNet:
    model = residua.create_model("resnet18", **TINY, alpha_min=0.6)
    assert isinstance(model, ResNet)
    spread(model)
    return model.eval()


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_without_decay_it_is_torchvisions(name: str) -> None:
    theirs = getattr(torchvision.models, name)(num_classes=7)
    spread(theirs)
    ours = residua.create_model(name, num_classes=7)
    missing, extra = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert (missing, extra) == (["shortcut.alpha"], [])
    images = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-5, atol=1e-5)


def test_gradients_are_torchvisions() -> None:
    theirs = torchvision.models.resnet18(num_classes=3)
    ours = residua.create_model("resnet18", num_classes=3)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    images = torch.randn(4, 3, 64, 64)
    for model in (ours, theirs):  # in training mode: batch statistics too
        model(images).square().sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.bn1.running_var, theirs.bn1.running_var)


def test_the_stem_follows_the_image_size() -> None:
    assert residua.create_model("resnet18", img_size=32, width=4).embed(torch.randn(1, 3, 32, 32)).shape[2:] == (32, 32)
    assert residua.create_model("resnet18", img_size=96, width=4).embed(torch.randn(1, 3, 96, 96)).shape[2:] == (24, 24)
    small = residua.create_model("resnet18", img_size=96, width=4, small_stem=True)
    assert small.embed(torch.randn(1, 3, 96, 96)).shape[2:] == (96, 96)


@pytest.mark.parametrize(("stages", "blocks"), [((2, 2, 2, 2), 8), ((2, 2, 6, 2), 12), ((2, 2, 10, 2), 16)])
def test_the_schedule_runs_over_the_blocks(stages: tuple[int, ...], blocks: int) -> None:
    model = residua.create_model("resnet18", **TINY, stages=stages, alpha_min=0.7)
    expected = residua.alphas(blocks, 0.7, per="block")
    torch.testing.assert_close(residua.stream(model).alphas.double(), expected)
    assert len(residua.stream(model)) == blocks
    cosine = residua.create_model("resnet18", **TINY, stages=stages, alpha_min=0.7, schedule="cosine")
    torch.testing.assert_close(cosine.shortcut.alpha.double(), residua.alphas(blocks, 0.7, "cosine", per="block"))


def by_hand(model: ResNet, images: Tensor) -> Tensor:
    """`relu(alpha * shortcut(x) + F(x))`, written out."""
    x = model.embed(images)
    blocks = [block for i in range(4) for block in getattr(model, f"layer{i + 1}")]
    for alpha, block in zip(model.shortcut.alpha.tolist(), blocks):
        kept = x if block.downsample is None else block.downsample(x)
        x = torch.relu(alpha * kept + block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x))))))
    return x


def test_decay_scales_identities_and_projections(tiny: ResNet) -> None:
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(tiny.forward_features(images), by_hand(tiny, images), rtol=1e-5, atol=1e-6)


def test_walking_the_steps_is_the_forward_pass(tiny: ResNet) -> None:
    images = torch.randn(2, 3, 16, 16)
    taps: dict[str, Tensor] = {}
    features = tiny.forward_features(images, tap=taps.__setitem__)
    bound = residua.stream(tiny, images)
    before = "embed"
    for step in bound:
        assert torch.equal(step.input, taps[before])
        assert torch.equal(step(step.input), taps[step.name])
        before = step.name
    assert [step.name for step in bound][:3] == ["layer1.0", "layer1.1", "layer2.0"]
    assert [step.shortcut is not None for step in bound] == [False, False, True, False, True, False, True, False]
    assert torch.equal(taps["layer4.1"], features)
    assert torch.equal(tiny.fc(features.mean((2, 3))), tiny(images))


def test_alpha_zero_removes_the_shortcut() -> None:
    model = residua.create_model("resnet18", **TINY, alpha_min=0.0).eval()
    last = residua.stream(model)[-1]
    x = torch.randn(2, 32, 2, 2)
    assert float(last.alpha) == 0
    assert torch.equal(last(x), torch.relu(last.branch(x)))


def test_fading_equals_building_so_and_is_undone(tiny: ResNet) -> None:
    plain = residua.create_model("resnet18", **TINY).eval()
    plain.load_state_dict({k: v for k, v in tiny.state_dict().items() if "shortcut" not in k}, strict=False)
    images = torch.randn(2, 3, 16, 16)
    before = plain(images)
    assert torch.equal(residua.fade(plain, alpha_min=0.6)(images), tiny(images))
    assert plain.config == tiny.config
    assert torch.equal(residua.unfade(plain)(images), before)


@pytest.mark.parametrize("control", ["branch", "both"])
def test_controls_scale_by_the_root_of_a_half(control: str) -> None:
    model = residua.create_model("resnet18", **TINY, control=control).eval()
    step, x = residua.stream(model)[0], torch.rand(1, 4, 16, 16)
    block = model.layer1[0]
    alpha = 0.5**0.5 if control == "both" else 1.0
    torch.testing.assert_close(step(x), torch.relu(alpha * x + 0.5**0.5 * block.branch(x)))


def test_dropped_branches_leave_the_shortcut(tiny: ResNet) -> None:
    images = torch.randn(3, 3, 16, 16)
    keep = torch.ones(3, 8)
    assert torch.equal(tiny(images, keep), tiny(images))
    keep[1, 0], keep[2, 1] = 0.0, 2.0
    taps: dict[str, Tensor] = {}
    tiny.forward_features(images, tap=taps.__setitem__, keep=keep)
    alpha = tiny.shortcut.alpha
    torch.testing.assert_close(taps["layer1.0"][1], torch.relu(alpha[0] * taps["embed"][1]))
    block = tiny.layer1[1]
    doubled = torch.relu(alpha[1] * taps["layer1.0"] + 2 * block.branch(taps["layer1.0"]))
    torch.testing.assert_close(taps["layer1.1"][2], doubled[2])


def test_the_config_builds_it_again(tiny: ResNet) -> None:
    again = residua.create_model(**tiny.config)
    again.load_state_dict(tiny.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(again.eval()(images), tiny(images))
    assert again.config == tiny.config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": (2, 2, 2)}, r"stages are \(2, 2, 2\)"), ({"stages": (2, 0, 2, 2)}, "stages are"),
        ({"num_classes": 0}, "num_classes 0"), ({"block": "wide"}, "block is 'wide'"),
        ({"branches": "attn"}, "branches='attn' needs a network with attention"), ({"alpha_min": 2}, "alpha_min is 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residua.create_model("resnet18", **options)


def test_mistakes_name_the_model_and_the_input(tiny: ResNet) -> None:
    with pytest.raises(ValueError, match="did you mean resnet18"):
        residua.create_model("resnet81")
    with pytest.raises(TypeError, match=r"resnet18: .*depth"):
        residua.create_model("resnet18", depth=3)
    with pytest.raises(ValueError, match=r"expected \(batch, 3, h, w\)"):
        tiny(torch.randn(1, 1, 16, 16))
    with pytest.raises(ValueError, match="not recomputed"):
        tiny.set_grad_checkpointing()


def test_the_stream_keeps_its_channels_last(tiny: ResNet) -> None:
    """As training on a CPU shows images: a step that lays the stream out anew would cost what that saves."""
    found = {}
    images = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    tiny.forward_features(images, tap=found.__setitem__)
    assert len(found) == 1 + len(tiny.steps())
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in found.values())
