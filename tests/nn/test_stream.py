"""A model's steps, walked by hand, are the model."""

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.nn import MAE, ViT

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
DECODER = {"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2}


@pytest.fixture
def vit() -> ViT:
    return residua.create_model("vit", **SMALL, alpha_min=0.6)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def test_steps_are_named_in_order(vit: ViT) -> None:
    stream = residua.stream(vit)
    names = ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"]
    assert [step.name for step in stream] == names
    assert [step.name for step in stream[2:]] == names[2:]
    assert all(step.input is None for step in stream)
    torch.testing.assert_close(stream.alphas.double(), residua.alphas(2, 0.6))
    assert stream.alpha_eff == pytest.approx(float(residua.alphas(2, 0.6).prod()), rel=1e-6)


def test_walking_the_steps_is_the_forward_pass(vit: ViT, images: Tensor) -> None:
    x = vit.embed(images)
    for step in residua.stream(vit):
        x = step.alpha * x + step.branch(x)
    torch.testing.assert_close(vit.norm(x), vit(images), rtol=1e-6, atol=1e-6)


def test_branches_are_those_of_the_named_blocks(vit: ViT, images: Tensor) -> None:
    x = vit.embed(images)
    for step in residua.stream(vit):
        block, kind = step.name.rsplit(".", 1)
        module = vit.get_submodule(block)
        branch = module.attn(module.norm1(x)) if kind == "attn" else module.mlp(module.norm2(x))
        assert torch.equal(step.branch(x), branch)


def test_bound_steps_know_their_inputs(vit: ViT, images: Tensor) -> None:
    taps: dict[str, Tensor] = {}
    vit.forward_features(images, tap=taps.__setitem__)
    bound = residua.stream(vit, images)
    assert [step.name for step in bound] == list(taps)[1:]
    before = "embed"
    for step in bound:
        assert torch.equal(step.input, taps[before])
        torch.testing.assert_close(step(step.input), taps[step.name])
        before = step.name


def test_an_autoencoders_steps_are_its_encoders() -> None:
    mae = residua.create_model("mae_vit", **SMALL, **DECODER, alpha_min=0.6)
    assert isinstance(mae, MAE)
    assert len(residua.stream(mae)) == 4
    assert torch.equal(residua.stream(mae).alphas, mae.encoder.shortcut.alpha)


@pytest.mark.parametrize(
    "decay",
    [
        {"alpha_min": 0.5}, {"alpha_eff": 0.1}, {"alpha_min": 0.7, "schedule": "cosine"}, {"control": "both"},
        {"control": "branch"}, {"alpha_min": 0.4, "branches": "mlp", "per": "block"},
    ],
)  # fmt: skip
def test_fading_equals_building_so_and_is_undone(images: Tensor, decay: dict) -> None:
    plain = residua.create_model("vit", **SMALL)
    built = residua.create_model("vit", **SMALL, **decay)
    before = plain(images)
    built.load_state_dict({k: v for k, v in plain.state_dict().items() if "shortcut" not in k}, strict=False)
    names = list(plain.state_dict())
    assert residua.fade(plain, **decay) is plain
    faded = plain(images)
    assert torch.equal(faded, built(images))
    assert not torch.allclose(faded, before, atol=1e-3)
    assert plain.config == built.config
    assert list(plain.state_dict()) == names
    assert residua.unfade(plain) is plain
    assert torch.equal(plain(images), before)
    assert list(plain.state_dict()) == names


def test_fading_again_replaces_the_schedule(vit: ViT) -> None:
    residua.fade(vit, alpha_min=0.9)
    torch.testing.assert_close(residua.stream(vit).alphas.double(), residua.alphas(2, 0.9))
    assert float(residua.unfade(vit).shortcut.alpha.min()) == 1


def test_faded_weights_load_into_the_ordinary_model_and_back(vit: ViT) -> None:
    ordinary = residua.create_model("vit", **SMALL)
    ordinary.load_state_dict(vit.state_dict())
    assert torch.equal(ordinary.shortcut.alpha, vit.shortcut.alpha)


def test_learned_shortcuts_do_not_turn_into_fixed_ones(vit: ViT) -> None:
    with pytest.raises(ValueError, match="learned"):
        residua.fade(vit, schedule="learned")
    learned = residua.create_model("vit", **SMALL, schedule="learned")
    with pytest.raises(ValueError, match="learned"):
        residua.fade(learned, alpha_min=0.5)


def test_learned_shortcuts_start_again_at_one() -> None:
    learned = residua.create_model("vit", **SMALL, schedule="learned")
    torch.nn.init.constant_(learned.shortcut.alpha, 0.5)
    residua.unfade(learned)
    assert isinstance(learned.shortcut.alpha, nn.Parameter)
    assert learned.shortcut.alpha.tolist() == [1.0] * 4


def test_what_is_no_residual_network_is_refused() -> None:
    for call in (residua.nn.stream, residua.nn.fade, residua.nn.unfade):  # those of our own networks
        with pytest.raises(TypeError, match="Linear does not describe its residual steps"):
            call(nn.Linear(3, 3))
    for call in (residua.stream, residua.fade):  # those of any
        with pytest.raises(ValueError, match="Linear: no residual blocks found"):
            call(nn.Linear(3, 3))
