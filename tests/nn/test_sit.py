"""SiT against its definition, written out plainly."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import residua
from residua.nn import SiT
from residua.nn.diffusion import ddim, times
from residua.nn.stream import walk

TINY: dict[str, Any] = {"img_size": 8, "patch_size": 2, "in_chans": 3, "embed_dim": 16, "depth": 4, "num_heads": 2}
NAMES = [f"blocks.{i}.{kind}" for i in range(4) for kind in ("attn", "mlp")]


def build(**options: Any) -> SiT:
    """In float64, every parameter away from its initial value."""
    model = residua.create_model("sit", **TINY | options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    assert isinstance(model, SiT)
    return model.eval()


def batch(model: SiT, size: int = 3) -> tuple[Tensor, ...]:
    x = torch.randn(size, model.in_chans, *model.img_size, dtype=torch.float64)
    t = 999 * torch.rand(size, dtype=torch.float64)
    return (x, t) if model.num_classes is None else (x, t, torch.arange(size) % (model.num_classes + 1))


def by_definition(
    w: dict[str, Tensor], x: Tensor, t: Tensor, y: Tensor | None, heads: int, depth: int, alphas: list[float]
) -> Tensor:
    """The network from its weights alone; skips wherever there are weights for them."""
    embed, bias = w["x_embedder.proj.weight"], w["x_embedder.proj.bias"]
    (d, channels, ph, pw), (b, *_, width) = embed.shape, x.shape

    def linear(h: Tensor, name: str) -> Tensor:
        return h @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(h: Tensor) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def attention(h: Tensor, name: str) -> Tensor:
        q, k, v = linear(h, f"{name}.qkv").split(d, dim=-1)
        size = d // heads
        parts = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            parts.append((q[..., at] @ k[..., at].mT / math.sqrt(size)).softmax(-1) @ v[..., at])
        return linear(torch.cat(parts, dim=-1), f"{name}.proj")

    def mlp(h: Tensor, name: str) -> Tensor:
        h = linear(h, f"{name}.fc1")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return linear(h, f"{name}.fc2")

    frequencies = torch.tensor([10000 ** (-i / 128) for i in range(128)], dtype=x.dtype)
    c = torch.cat([torch.cos(t[:, None] * frequencies), torch.sin(t[:, None] * frequencies)], dim=1)
    c = linear(F.silu(linear(c, "t_embedder.mlp.0")), "t_embedder.mlp.2")
    if y is not None:
        c = c + w["y_embedder.embedding_table.weight"][y]
    h = F.conv2d(x, embed, bias, stride=(ph, pw)).flatten(2).mT + w["pos_embed"]
    outputs: list[Tensor] = []
    for i in range(depth):
        if f"blocks.{i}.skip.weight" in w:
            h = h + linear(outputs[depth - 1 - i], f"blocks.{i}.skip")
        parts = linear(F.silu(c), f"blocks.{i}.adaLN_modulation.1")[:, None].split(d, dim=-1)
        for k, (branch, kind) in enumerate(((attention, "attn"), (mlp, "mlp"))):
            shift, scale, gate = parts[3 * k : 3 * k + 3]
            h = alphas[2 * i + k] * h + gate * branch(norm(h) * (1 + scale) + shift, f"blocks.{i}.{kind}")
        outputs.append(h)
    shift, scale = linear(F.silu(c), "final_layer.adaLN_modulation.1")[:, None].split(d, dim=-1)
    patches = linear(norm(h) * (1 + scale) + shift, "final_layer.linear")
    image = torch.zeros_like(x)
    for n in range(patches.shape[1]):
        row, col = divmod(n, width // pw)
        cell = patches[:, n].reshape(b, ph, pw, channels).permute(0, 3, 1, 2)
        image[:, :, row * ph : (row + 1) * ph, col * pw : (col + 1) * pw] = cell
    return image


@pytest.mark.parametrize(
    ("options", "joined"),
    [
        ({"skips": False}, []),
        ({}, [2, 3]),
        ({"num_classes": 5, "depth": 5}, [3, 4]),
        ({"img_size": (8, 12), "patch_size": (2, 3), "in_chans": 4, "num_classes": 2, "alpha_min": 0.6}, [2, 3]),
        ({"depth": 1}, []),
    ],
)
def test_it_is_the_defined_function(options: dict[str, Any], joined: list[int]) -> None:
    model = build(**options)
    assert [i for i, block in enumerate(model.blocks) if block.skip is not None] == joined
    x, t, *y = batch(model)
    alphas = residua.alphas(model.depth, options.get("alpha_min", 1.0)).float().tolist()
    expected = by_definition(model.state_dict(), x, t, y[0] if y else None, model.num_heads, model.depth, alphas)
    torch.testing.assert_close(model(x, t, *y), expected, rtol=1e-10, atol=1e-10)


def test_bound_steps_are_the_forward_pass() -> None:
    model = build(alpha_min=0.6, num_classes=3)
    given = batch(model)
    taps: dict[str, Tensor] = {}
    out = model.forward_features(*given, tap=taps.__setitem__)
    assert list(taps) == ["embed", *NAMES]
    bound = residua.stream(model, *given)
    assert [step.name for step in bound] == NAMES
    before = taps["embed"]
    for step in bound:
        if step.name in ("blocks.2.attn", "blocks.3.attn"):
            source = {"blocks.2.attn": "blocks.1.mlp", "blocks.3.attn": "blocks.0.mlp"}[step.name]
            before = before + model.get_submodule(step.name[:8]).skip(taps[source])
        torch.testing.assert_close(step.input, before, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step(step.input), taps[step.name], rtol=1e-12, atol=1e-12)
        before = taps[step.name]
    assert torch.equal(before, out)
    torch.testing.assert_close(walk(bound, taps["embed"], None, None), out)


def test_branches_carry_their_conditioning() -> None:
    model = build(num_classes=3)
    x, t, y = batch(model)
    one, other = residua.stream(model, x, t, y)[0], residua.stream(model, x, t + 100, y)[0]
    assert torch.equal(one.input, other.input)
    assert not torch.allclose(one.branch(one.input), other.branch(one.input), atol=1e-3)


def test_an_unbound_stream_lists_names_and_alphas_only() -> None:
    model = build(alpha_min=0.8)
    stream = residua.stream(model)
    assert [step.name for step in stream] == NAMES
    torch.testing.assert_close(stream.alphas, residua.alphas(4, 0.8), rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"residua.stream\(model, x_t, t, y\)"):
        stream[0].branch(torch.zeros(1, 16, 16))


def test_fading_is_undone_and_config_builds_it_again() -> None:
    model = build(num_classes=3, skips=False)
    given = batch(model)
    before = model(*given)
    residua.fade(model, alpha_min=0.6, schedule="cosine")
    faded = model(*given)
    assert not torch.allclose(faded, before, atol=1e-3)
    again = residua.create_model(**model.config).double()
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(*given), faded)
    assert torch.equal(residua.unfade(model)(*given), before)


@pytest.mark.parametrize(("name", "millions"), [("small", 33), ("base", 130), ("large", 458), ("xlarge", 675)])
def test_named_sizes_have_the_papers_number_of_parameters(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = residua.create_model(f"sit_{name}", num_classes=1000, skips=False)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_labels_guide_and_none_is_a_label_of_its_own() -> None:
    model = build(num_classes=4)
    x, t, _ = batch(model)
    assert torch.equal(model(x, t), model(x, t, torch.full((3,), 4)))
    assert not torch.allclose(model(x, t, torch.zeros(3, dtype=torch.long)), model(x, t), atol=1e-3)
    with pytest.raises(ValueError, match="labels from 0 to 5"):
        model(x, t, torch.tensor([0, 5, 0]))
    with pytest.raises(ValueError, match="unconditional"):
        build()(x, t, torch.zeros(3, dtype=torch.long))


def test_compiles_without_a_break() -> None:
    model = build(num_classes=4, alpha_min=0.7, depth=2)
    given = batch(model)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), model(*given))
    compiled(*given).square().mean().backward()


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = build(alpha_min=0.6, num_classes=2).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    given = batch(model)
    for m in (model, other):
        m(*given).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(p.grad, q[1].grad, msg=name)


def test_the_stream_is_in_half_precision_under_autocast() -> None:
    model = build(num_classes=4, alpha_min=0.7).float()
    x, t, y = batch(model)
    taps: dict[str, Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.forward_features(x.float(), t.float(), y, tap=taps.__setitem__)
        low = model(x.float(), t.float(), y)
    assert {v.dtype for v in taps.values()} == {torch.bfloat16}
    high = model(x.float(), t.float(), y)
    assert (low.float() - high).norm() < 0.05 * high.norm()


@pytest.mark.parametrize("control", ["branch", "both"])
def test_controls_scale_what_they_say(control: Any) -> None:
    model = build(control=control)
    x, t = batch(model)
    branches = [branch for block in model.blocks for branch in block.branches(model.condition(t))]
    for step, branch in zip(residua.stream(model, x, t), branches, strict=True):
        torch.testing.assert_close(step.branch(step.input), 0.5**0.5 * branch(step.input))
        assert float(step.alpha) == pytest.approx(0.5**0.5 if control == "both" else 1.0)


def test_embeddings_of_time_and_label_start_with_the_originals_deviation() -> None:
    model = residua.create_model("sit", **TINY | {"embed_dim": 64}, num_classes=60)
    matrices = [model.t_embedder.mlp[0].weight, model.t_embedder.mlp[2].weight, *model.y_embedder.parameters()]
    assert len(matrices) == 3
    assert all(0.018 < float(matrix.detach().std()) < 0.022 for matrix in matrices)


def test_it_starts_with_closed_gates_and_predicts_zero() -> None:
    model = residua.create_model("sit", **TINY, alpha_min=0.5, skips=False)
    x, t, taps = torch.randn(2, 3, 8, 8), torch.rand(2), {}
    model.forward_features(x, t, tap=taps.__setitem__)
    torch.testing.assert_close(taps["blocks.3.mlp"], residua.alphas(4, 0.5).prod().float() * taps["embed"])
    assert (model(x, t) == 0).all()
    open_gates = residua.create_model("sit", **TINY, zero_init=False)
    assert open_gates(x, t).std() > 0


@pytest.mark.parametrize("variance", [False, True])
def test_original_files_load(tmp_path: Path, variance: bool) -> None:
    model = build(embed_dim=64, num_heads=1, num_classes=6, skips=False).float()
    state = {k: v for k, v in model.state_dict().items() if k != "shortcut.alpha"}  # the original's, name for name
    if variance:  # it has twice the channels, those of the variance last
        for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
            cells = state[key].reshape(4, 3, *state[key].shape[1:])
            state[key] = torch.cat([cells, torch.randn_like(cells)], dim=1).flatten(0, 1)
    torch.save(state, tmp_path / "SiT.pt")
    loaded: Any = residua.load(tmp_path / "SiT.pt")
    assert loaded.config == model.config
    x, t = torch.randn(2, 3, 8, 8), torch.rand(2)
    assert torch.equal(loaded(x, t), -model(x, t))  # its velocity leads from noise to data, ours to noise


@torch.no_grad()
def test_published_weights_sample_as_their_authors_did(tmp_path: Path) -> None:
    """From s = 0 (noise) to 1 (data) in Euler steps of the published velocity."""
    model = build(embed_dim=64, num_heads=1, num_classes=6, skips=False).float()
    torch.save({k: v for k, v in model.state_dict().items() if k != "shortcut.alpha"}, tmp_path / "SiT.pt")
    loaded: Any = residua.load(tmp_path / "SiT.pt")
    start = torch.randn(2, 3, 8, 8)
    x = start
    for i in range(8):
        x = x + model(x, torch.full((2,), i / 8)) / 8
    process = loaded.process
    ours = ddim(lambda z, t: loaded(z, process.time_input(t)), process, start, times(process, 8))
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 9}, "not divisible by patch size"),
        ({"depth": 0}, "depth 0"),
        ({"num_classes": 0}, "num_classes 0"),
        ({"embed_dim": 18}, "multiple of 4"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residua.create_model("sit", **TINY | options)


def test_wrong_images_are_refused() -> None:
    model, t = build(), torch.rand(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"given; expected \(batch, 3, 8, 8\)"):
        model(torch.zeros(2, 4, 8, 8, dtype=torch.float64), t)
    with pytest.raises(ValueError, match="for 2 images; expected one each"):
        model(torch.zeros(2, 3, 8, 8, dtype=torch.float64), t[:, None])
