"""Transformer blocks of diffusers fade step by step: attention, attention to a text, MLP."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residua
from residua import adapt
from residua.adapt.block import ALPHA

diffusers = pytest.importorskip("diffusers")
diffusers.utils.logging.set_verbosity_error()

SIZE = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
KINDS = ("dit", "text", "pixart", "timed")


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "dit":
        model = diffusers.DiTTransformer2DModel(**SIZE, in_channels=4, patch_size=2, num_embeds_ada_norm=10)
    elif kind == "pixart":
        model = diffusers.PixArtTransformer2DModel(
            **SIZE, in_channels=4, patch_size=2, cross_attention_dim=16, caption_channels=12, out_channels=4,
            use_additional_conditions=False,
        )  # fmt: skip
    else:
        more: dict[str, Any] = {"norm_type": "ada_norm", "num_embeds_ada_norm": 10} if kind == "timed" else {}
        model = diffusers.Transformer2DModel(**SIZE, in_channels=16, norm_num_groups=4, cross_attention_dim=12, **more)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval()


def given(kind: str) -> dict[str, Any]:
    torch.manual_seed(1)
    text = torch.randn(2, 5, 12)
    time = torch.tensor([3, 7])
    if kind == "dit":
        return {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": time, "class_labels": torch.tensor([1, 4])}
    if kind == "pixart":
        added = {"resolution": None, "aspect_ratio": None}
        images = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": text, "timestep": time}
        return {**images, "added_cond_kwargs": added}
    mask = {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}
    timed = {"timestep": time[0]} if kind == "timed" else {}
    return {"hidden_states": torch.randn(2, 16, 8, 8), "encoder_hidden_states": text, **mask, **timed}


def run(model: nn.Module, kind: str) -> Tensor:
    return model(**given(kind)).sample


def lonely(block: Any, kept: str) -> Any:
    """The library's own block where every branch but one ends in zeros."""
    twin = adapt.unfade(copy.deepcopy(block))
    ends = {"attn1": twin.attn1.to_out[0], "ff": twin.ff.net[2]}
    if twin.attn2 is not None:
        ends["attn2"] = twin.attn2.to_out[0]
    for name, end in ends.items():
        if name != kept:
            nn.init.zeros_(end.weight)
            nn.init.zeros_(end.bias)
    return twin


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_bits_are_kept(kind: str) -> None:
    model = build(kind)
    names = list(model.state_dict())
    with torch.no_grad():
        plain = run(model, kind)
        assert torch.equal(run(residua.fade(model, alpha_min=1.0), kind), plain)
        assert not torch.allclose(run(residua.fade(model, alpha_min=0.5), kind), plain, atol=1e-3)
        assert list(model.state_dict()) == names
        assert torch.equal(run(residua.unfade(model), kind), plain)
    assert not any(isinstance(module, adapt.block.Faded) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_faded_blocks_match_a_reference(kind: str) -> None:
    model = residua.fade(build(kind).double(), alpha_min=0.5)
    seen: list[Any] = []
    hooks = [
        at.block.register_forward_hook(lambda m, a, k, out: seen.append((m, a, k, out)), with_kwargs=True)
        for at in adapt.blocks_of(model)
    ]
    inputs = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given(kind).items()}
    with torch.no_grad():
        model(**inputs)
        for hook in hooks:
            hook.remove()
        assert len(seen) == 2
        for block, (x, *rest), named, out in seen:
            order = ["attn1", "ff"] if block.attn2 is None else ["attn1", "attn2", "ff"]
            for name, alpha in zip(order, getattr(block, ALPHA).double(), strict=True):
                x = alpha * x + (lonely(block, name)(x, *rest, **named) - x)
            torch.testing.assert_close(out, x, atol=1e-6, rtol=1e-6)
    steps = residua.stream(model)
    assert len(steps) == (4 if kind == "dit" else 6)
    torch.testing.assert_close(float(steps[-1].alpha), 0.5)


def test_dropped_labels_are_dropped_once() -> None:
    """In training the label is dropped by chance: attention and MLP must see the same draw."""
    model = build("dit").train()
    torch.manual_seed(5)
    plain = run(model, "dit")
    residua.fade(model, alpha_min=1.0)
    torch.manual_seed(5)
    assert torch.equal(run(model, "dit"), plain)


@pytest.mark.parametrize("kind", ["dit", "text"])
def test_gradients_with_checkpointing(kind: str) -> None:
    model = residua.fade(build(kind), alpha_min=0.5)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        run(model, kind).square().mean().backward()
        return [p.grad.clone() for at in adapt.blocks_of(model) for p in at.block.parameters() if p.grad is not None]

    wanted = gradients()
    assert all(g.abs().sum() > 0 for g in wanted if g.ndim > 1)
    model.train().enable_gradient_checkpointing()  # type: ignore[operator]
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    for mine, theirs in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_saved_models_are_plain(tmp_path: Path) -> None:
    plain = build("dit")
    residua.fade(copy.deepcopy(plain), alpha_min=0.5).save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(run(loaded.eval(), "dit"), run(plain, "dit"))


def test_a_unet_is_refused() -> None:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=12, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="several residual streams"):
        residua.fade(unet)


@pytest.mark.parametrize("kind", ["dit", pytest.param("text", marks=pytest.mark.slow)])
def test_compile(kind: str) -> None:
    model = residua.fade(build(kind), alpha_min=0.5)
    with torch.no_grad():
        wanted = run(model, kind)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(run(compiled, kind), wanted, atol=1e-4, rtol=1e-4)
