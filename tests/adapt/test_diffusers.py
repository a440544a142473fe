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


# ---------------------------------------------------------------- blocks written out: norms, projections, softmax


def ln(norm: Any, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return x if norm.weight is None else norm.weight * x + norm.bias


def linear(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def attend(a: Any, x: Tensor, to: Tensor, seen: Tensor | None = None) -> Tensor:
    """Two heads of queries from x, keys and values from `to`, of which `seen` (B, T) are no padding."""
    q, k, v = (linear(p, y).unflatten(-1, (2, -1)) for p, y in ((a.to_q, x), (a.to_k, to), (a.to_v, to)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    return linear(a.to_out[0], torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


def gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def six(b: Any, time: Tensor, labels: Tensor) -> list[Tensor]:
    """adaLN-Zero of DiT: shift, scale and gate of attention, then of the MLP, from sines of time and a label."""
    rates = 10_000.0 ** (-torch.arange(128) / 127)
    angles = time[:, None].float() * rates
    embedder = b.norm1.emb.timestep_embedder
    waves = torch.cat([angles.cos(), angles.sin()], 1).double()
    known = linear(embedder.linear_2, silu(linear(embedder.linear_1, waves)))
    known = known + b.norm1.emb.class_embedder.embedding_table.weight[labels]
    return [part[:, None] for part in linear(b.norm1.linear, silu(known)).chunk(6, 1)]


def hand_dit(b: Any, alpha: Tensor, x: Tensor) -> Tensor:
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = six(b, given("dit")["timestep"], given("dit")["class_labels"])
    y = ln(b.norm1.norm, x) * (1 + scale) + shift
    x = alpha[0] * x + gate * attend(b.attn1, y, y)
    y = ln(b.norm3, x) * (1 + scale_mlp) + shift_mlp
    return alpha[1] * x + gate_mlp * linear(b.ff.net[2], gelu_tanh(linear(b.ff.net[0].proj, y)))


def hand_text(b: Any, alpha: Tensor, x: Tensor) -> Tensor:
    """Transformer2D, reading a text. `timed`: its first two norms are scaled and shifted by a table of times."""
    text = given("text")["encoder_hidden_states"].double()
    seen = given("text")["encoder_attention_mask"].bool()

    def norm(n: Any, x: Tensor) -> Tensor:
        if isinstance(n, nn.LayerNorm):
            return ln(n, x)
        scale, shift = linear(n.linear, silu(n.emb.weight[given("timed")["timestep"]])).chunk(2, 0)
        return ln(n.norm, x) * (1 + scale) + shift

    y = norm(b.norm1, x)
    x = alpha[0] * x + attend(b.attn1, y, y)
    x = alpha[1] * x + attend(b.attn2, norm(b.norm2, x), text, seen)
    value, gate = linear(b.ff.net[0].proj, ln(b.norm3, x)).chunk(2, -1)
    return alpha[2] * x + linear(b.ff.net[2], value * nn.functional.gelu(gate))


def hand_pixart(b: Any, alpha: Tensor, x: Tensor, named: dict[str, Any]) -> Tensor:
    """A table plus what the model made of the time: six parts; the text is read without a norm."""
    table = b.scale_shift_table[None] + named["timestep"].unflatten(1, (6, -1))
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (part[:, None] for part in table.unbind(1))
    y = ln(b.norm1, x) * (1 + scale) + shift
    x = alpha[0] * x + gate * attend(b.attn1, y, y)
    x = alpha[1] * x + attend(b.attn2, x, named["encoder_hidden_states"])
    y = ln(b.norm2, x) * (1 + scale_mlp) + shift_mlp
    return alpha[2] * x + gate_mlp * linear(b.ff.net[2], gelu_tanh(linear(b.ff.net[0].proj, y)))


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
def test_faded_blocks_match_a_reference_by_hand(kind: str) -> None:
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
        for block, (x, *_), named, out in seen:
            alpha, more = getattr(block, ALPHA).double(), (named,) if kind == "pixart" else ()
            reference: Any = {"dit": hand_dit, "pixart": hand_pixart}.get(kind, hand_text)
            torch.testing.assert_close(out, reference(block, alpha, x, *more), atol=1e-6, rtol=1e-6)
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


def test_two_streams_are_refused_by_the_name_of_their_block() -> None:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=16,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 12)}
    given |= {"pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([3, 5])}
    with pytest.raises(ValueError, match=r"transformer_blocks.0, a .*JointTransformerBlock, .*2 streams"):
        residua.fade(model, alpha_min=0.5, example=given)


@pytest.mark.parametrize("kind", ["dit", pytest.param("text", marks=pytest.mark.slow)])
def test_compile(kind: str) -> None:
    model = residua.fade(build(kind), alpha_min=0.5)
    with torch.no_grad():
        wanted = run(model, kind)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(run(compiled, kind), wanted, atol=1e-4, rtol=1e-4)
