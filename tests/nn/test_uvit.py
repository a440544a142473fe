"""U-ViT against its definition, written out plainly."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import residua
from residua.nn import Stream, UViT
from residua.nn.stream import walk

TINY: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 4, "num_heads": 2}
NAMES = [
    f"{block}.{kind}"
    for block in ("in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1")
    for kind in ("attn", "mlp")
]


def build(**options: Any) -> UViT:
    """In float64, every parameter away from its initial value."""
    model = residua.create_model("uvit", **TINY | options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    assert isinstance(model, UViT)
    return model.eval()


def batch(model: UViT, size: int = 3) -> tuple[Tensor, ...]:
    x = torch.randn(size, model.in_chans, *model.img_size, dtype=torch.float64)
    t = 999 * torch.rand(size, dtype=torch.float64)
    return (x, t) if model.num_classes is None else (x, t, torch.arange(size) % (model.num_classes + 1))


def by_definition(
    w: dict[str, Tensor], x: Tensor, t: Tensor, y: Tensor | None, heads: int, alphas: list[float]
) -> Tensor:
    """Bao et al.'s network from its weights alone, with a factor for every shortcut."""
    embed, bias = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    (d, channels, ph, pw), (b, *_, width) = embed.shape, x.shape
    factors = iter(alphas)

    def linear(h: Tensor, name: str) -> Tensor:
        out = h @ w[f"{name}.weight"].T
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def norm(h: Tensor, name: str) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(h: Tensor, name: str) -> Tensor:
        q, k, v = linear(h, f"{name}.qkv").split(d, dim=-1)
        size = d // heads
        parts = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            scores = q[..., at] @ k[..., at].mT / math.sqrt(size)
            parts.append(scores.softmax(-1) @ v[..., at])
        return linear(torch.cat(parts, dim=-1), f"{name}.proj")

    def block(h: Tensor, name: str) -> Tensor:
        h = next(factors) * h + attention(norm(h, f"{name}.norm1"), f"{name}.attn")
        return next(factors) * h + linear(
            F.gelu(linear(norm(h, f"{name}.norm2"), f"{name}.mlp.fc1")), f"{name}.mlp.fc2"
        )

    frequencies = torch.tensor([10000 ** (-i / (d // 2)) for i in range(d // 2)], dtype=x.dtype)
    time = torch.cat([torch.cos(t[:, None] * frequencies), torch.sin(t[:, None] * frequencies)], dim=1)
    if "time_embed.0.weight" in w:
        time = linear(F.silu(linear(time, "time_embed.0")), "time_embed.2")
    tokens = [time[:, None], F.conv2d(x, embed, bias, stride=(ph, pw)).flatten(2).mT]
    if y is not None:
        tokens.insert(0, w["label_emb.weight"][y][:, None])
    h = torch.cat(tokens, dim=1) + w["pos_embed"]
    half = sum(name.startswith("in_blocks") and name.endswith("norm1.weight") for name in w)
    skips = []
    for i in range(half):
        h = block(h, f"in_blocks.{i}")
        skips.append(h)
    h = block(h, "mid_block")
    for i in range(half):
        h = block(linear(torch.cat([h, skips.pop()], dim=-1), f"out_blocks.{i}.skip_linear"), f"out_blocks.{i}")
    patches = linear(norm(h, "norm"), "decoder_pred")[:, len(tokens) - 1 :]
    image = torch.zeros_like(x)
    for n in range(patches.shape[1]):
        row, col = divmod(n, width // pw)
        cell = patches[:, n].reshape(b, ph, pw, channels).permute(0, 3, 1, 2)
        image[:, :, row * ph : (row + 1) * ph, col * pw : (col + 1) * pw] = cell
    if "final_layer.weight" in w:
        image = F.conv2d(image, w["final_layer.weight"], w["final_layer.bias"], padding=1)
    return image


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_classes": 5, "mlp_time_embed": True},
        {"in_chans": 4, "final_conv": False, "depth": 6},
        {"img_size": (8, 12), "patch_size": (2, 3), "num_heads": 4, "num_classes": 2, "mlp_ratio": 3.0},
    ],
)
def test_without_decay_it_is_the_original_function(options: dict[str, Any]) -> None:
    model = build(**options)
    x, t, *y = batch(model)
    expected = by_definition(
        model.state_dict(), x, t, y[0] if y else None, model.num_heads, [1.0] * 2 * (model.depth + 1)
    )
    torch.testing.assert_close(model(x, t, *y), expected, rtol=1e-10, atol=1e-10)


def test_queries_keys_and_values_have_no_bias() -> None:
    names = [name for name, _ in build(num_classes=2).named_parameters() if ".attn." in name]
    assert len(names) == 5 * 3  # of each block the packed weight, and weight and bias of the projection
    assert not [name for name in names if name.endswith("qkv.bias")]


@pytest.mark.parametrize("decay", [{}, {"schedule": "cosine"}, {"until": 0.6}, {"branches": "attn"}, {"per": "block"}])
def test_decay_runs_over_all_sublayers(decay: dict[str, Any]) -> None:
    model = build(alpha_min=0.5, **decay)
    alphas = residua.nn.Decay(alpha_min=0.5, **decay).alphas(5).float().tolist()
    assert alphas[0] == 1
    assert min(alphas) == pytest.approx(0.5, abs=0.1)
    x, t = batch(model)
    expected = by_definition(model.state_dict(), x, t, None, model.num_heads, alphas)
    torch.testing.assert_close(model(x, t), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("alpha_min", "product"), [(0.6, "2.2e-03"), (0.7, "1.3e-02"), (0.8, "6.1e-02")])
def test_effective_strengths_of_the_paper(alpha_min: float, product: str) -> None:
    model = residua.create_model("uvit_small", embed_dim=16, num_heads=2, alpha_min=alpha_min)
    stream = residua.stream(model)
    assert len(stream) == 26
    expected = [1 - (1 - alpha_min) * k / 25 for k in range(26)]
    torch.testing.assert_close(stream.alphas.double(), torch.tensor(expected, dtype=torch.float64))
    assert f"{stream.alpha_eff:.1e}" == product


def test_taps_and_bound_steps_are_the_forward_pass() -> None:
    model = build(alpha_min=0.6, num_classes=3)
    given = batch(model)
    taps: dict[str, Tensor] = {}
    out = model.forward_features(*given, tap=taps.__setitem__)
    assert list(taps) == ["embed", *NAMES]
    assert all(v.shape == (3, 2 + 16, 16) for v in taps.values())
    bound = residua.stream(model, *given)
    assert [step.name for step in bound] == [step.name for step in residua.stream(model)] == NAMES
    mirror = {"out_blocks.0": "in_blocks.1.mlp", "out_blocks.1": "in_blocks.0.mlp"}
    before = taps["embed"]
    for step in bound:
        block, kind = step.name.rsplit(".", 1)
        module: Any = model.get_submodule(block)
        if kind == "attn" and block in mirror:
            assert step.skip is not None
            assert step.skip.source == mirror[block]
            before = module.skip_linear(torch.cat([before, taps[mirror[block]]], dim=-1))
        else:
            assert step.skip is None
        torch.testing.assert_close(step.input, before, rtol=1e-12, atol=1e-12)
        branch = module.attn(module.norm1(before)) if kind == "attn" else module.mlp(module.norm2(before))
        torch.testing.assert_close(step.branch(step.input), branch)
        torch.testing.assert_close(step(step.input), taps[step.name], rtol=1e-12, atol=1e-12)
        before = taps[step.name]
    torch.testing.assert_close(model.norm(before), out)
    for steps in (bound, residua.stream(model)):
        assert isinstance(steps, Stream)
        torch.testing.assert_close(walk(steps, taps["embed"], None, None), before)


def test_fading_is_undone() -> None:
    model = build()
    given = batch(model)
    before = model(*given)
    residua.fade(model, alpha_min=0.6)
    expected = by_definition(model.state_dict(), *given, None, 2, residua.alphas(5, 0.6).tolist())
    torch.testing.assert_close(model(*given), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(expected, before, atol=1e-3)
    assert torch.equal(residua.unfade(model)(*given), before)


@pytest.mark.parametrize("control", ["branch", "both"])
def test_controls_scale_what_they_say(control: Any) -> None:
    model = build(control=control)
    given = batch(model)
    for step in residua.stream(model, *given):
        block, kind = step.name.rsplit(".", 1)
        module: Any = model.get_submodule(block)
        branch = module.attn_branch if kind == "attn" else module.mlp_branch
        torch.testing.assert_close(step.branch(step.input), 0.5**0.5 * branch(step.input))
        assert float(step.alpha) == pytest.approx(0.5**0.5 if control == "both" else 1.0)


def test_config_builds_it_again() -> None:
    model = build(num_classes=3, mlp_time_embed=True, alpha_min=0.7, schedule="cosine", until=0.5, zero_init=False)
    again = residua.create_model(**model.config).double()
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    given = batch(model)
    assert torch.equal(again(*given), model(*given))
    assert {f"uvit_{size}" for size in ("nano", "tiny", "small", "mid", "large")} <= set(residua.nn.model_names())


@pytest.mark.parametrize(("name", "millions"), [("small", 44), ("mid", 131), ("large", 287), ("huge", 501)])
def test_named_sizes_have_the_papers_number_of_parameters(name: str, millions: int) -> None:
    sizes = {"small": {}, "mid": {"img_size": 64, "patch_size": 4, "num_classes": 1000}}
    latent = {"in_chans": 4, "num_classes": 1000}
    with torch.device("meta"):
        model = residua.create_model(f"uvit_{name}", **sizes.get(name, latent))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_labels_guide_and_none_is_a_label_of_its_own() -> None:
    model = build(num_classes=4)
    x, t, _ = batch(model)
    none = torch.full((3,), 4)
    assert torch.equal(model(x, t), model(x, t, none))
    assert not torch.allclose(model(x, t, torch.zeros(3, dtype=torch.long)), model(x, t), atol=1e-4)
    with pytest.raises(ValueError, match="labels from 0 to 5"):
        model(x, t, torch.tensor([0, 5, 0]))
    with pytest.raises(ValueError, match="unconditional"):
        build()(x, t, none)


def test_compiles_without_a_break() -> None:
    model = build(num_classes=4, alpha_min=0.7, depth=2)
    given = batch(model)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), model(*given))
    compiled(*given).square().mean().backward()


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = build(alpha_min=0.6).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    given, kept = batch(model), []
    for m in (model, other):
        count = [0]

        def pack(tensor: Tensor, count: list[int] = count) -> Tensor:
            count[0] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = m(*given).square().mean()
        kept.append(count[0])
        loss.backward()
    assert kept[1] < kept[0]
    for (name, p), q in zip(model.named_parameters(), other.named_parameters()):
        assert torch.equal(p.grad, q[1].grad), name


def test_the_stream_is_in_half_precision_under_autocast() -> None:
    model = build(num_classes=4, alpha_min=0.7).float()
    x, t, y = batch(model)
    taps: dict[str, Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.forward_features(x.float(), t.float(), y, tap=taps.__setitem__)
        low = model(x.float(), t.float(), y)
    assert {v.dtype for v in taps.values()} == {torch.bfloat16}
    torch.testing.assert_close(low.float(), model(x.float(), t.float(), y), rtol=0.1, atol=0.1)


def test_zero_init_starts_as_shortcuts_alone() -> None:
    model = residua.create_model("uvit", **TINY, alpha_min=0.5)
    given, taps = (torch.randn(2, 3, 8, 8), torch.rand(2)), {}
    model.forward_features(*given, tap=taps.__setitem__)
    product = residua.alphas(5, 0.5)[:6].prod().float()
    torch.testing.assert_close(taps["mid_block.mlp"], product * taps["embed"])
    assert model(*given).std() > 0
    plain = residua.create_model("uvit", **TINY, zero_init=False)
    assert float(plain.mid_block.mlp.fc2.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(plain.pos_embed.detach().std()) == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize("options", [{}, {"num_classes": 6, "mlp_time_embed": True, "final_conv": False}])
def test_original_files_load(tmp_path: Path, options: dict[str, Any]) -> None:
    model = build(**{"embed_dim": 64, "num_heads": 1, "zero_init": False, **options}).float()
    state = {k: v for k, v in model.state_dict().items() if k != "shortcut.alpha"}  # the original's, name for name
    torch.save(state, tmp_path / "nnet_ema.pth")
    loaded: Any = residua.load(tmp_path / "nnet_ema.pth")
    assert loaded.config == model.config | {"zero_init": True}
    x, t = torch.randn(2, 3, 8, 8), 999 * torch.rand(2)
    assert torch.equal(loaded(x, t), model(x, t))


def test_learned_positions_of_another_size_are_refused() -> None:
    model, other = build(), build(img_size=16)
    with pytest.raises(ValueError, match=r"pos_embed is \(1, 65, 16\), expected \(1, 17, 16\)"):
        residua.nn.weights.load_weights(model, other.state_dict(), what="a file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 9}, "not divisible by patch size"),
        ({"depth": 5}, "depth is 5; two equal halves"),
        ({"depth": 0}, "depth is 0"),
        ({"in_chans": 0}, "in_chans 0"),
        ({"num_classes": 0}, "num_classes 0"),
        ({"num_heads": 3}, "width 16 is not divisible by 3 heads"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residua.create_model("uvit", **TINY | options)


def test_wrong_images_are_refused() -> None:
    model = build()
    t = torch.rand(2, dtype=torch.float64)
    for shape in ((2, 4, 8, 8), (2, 3, 9, 8), (3, 8, 8)):
        with pytest.raises(ValueError, match=r"given; expected \(batch, 3, 8, 8\)"):
            model(torch.zeros(shape, dtype=torch.float64), t)
