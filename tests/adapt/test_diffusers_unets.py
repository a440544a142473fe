"""Convolutional U-Nets of diffusers are one stream: down, middle, up, with long skips joining; and so are halves of
autoencoders."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residua
from residua import adapt
from residua.adapt.block import ALPHA, Faded
from residua.adapt.model import shortcuts
from residua.anatomy.jacobian import residual_branch

diffusers = pytest.importorskip("diffusers")
diffusers.utils.logging.set_verbosity_error()

TIME = torch.tensor([3, 7])
SMALL: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
    "attention_head_dim": 4, "act_fn": "silu",
}  # fmt: skip
PLAIN: dict[str, Any] = SMALL | {
    "in_channels": 4, "out_channels": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
TEXT: dict[str, Any] = SMALL | {
    "cross_attention_dim": 12,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
PYRAMID: dict[str, Any] = PLAIN | {
    "in_channels": 3, "out_channels": 3, "block_out_channels": (32, 32), "mid_block_scale_factor": 2**0.5,
    "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
    "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
}  # fmt: skip
RESIZED: dict[str, Any] = TEXT | {
    "down_block_types": ("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
    "up_block_types": ("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "resnet_time_scale_shift": "scale_shift",
}  # fmt: skip
NORMED: dict[str, Any] = TEXT | {
    "block_out_channels": (32, 64), "down_block_types": ("KCrossAttnDownBlock2D", "KDownBlock2D"),
    "up_block_types": ("KUpBlock2D", "KCrossAttnUpBlock2D"), "mid_block_type": None, "attention_head_dim": 8,
    "resnet_time_scale_shift": "ada_group",
}  # fmt: skip
VIDEO: dict[str, Any] = SMALL | {
    "cross_attention_dim": 12, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}  # fmt: skip
MOTION: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
    "cross_attention_dim": 12, "num_attention_heads": 2, "motion_num_attention_heads": 2, "motion_max_seq_length": 4,
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
}  # fmt: skip
KANDINSKY: dict[str, Any] = {
    "in_channels": 4, "time_embedding_dim": 8, "groups": 2, "attention_head_dim": 4, "layers_per_block": 2,
    "block_out_channels": (8, 16), "cross_attention_dim": 8, "encoder_hid_dim": 12,
}  # fmt: skip


def autoencoder() -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def build(kind: str, **more: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """A tiny model with random weights everywhere, and what to call it with."""
    torch.manual_seed(0)
    images, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    model: Any
    match kind:
        case "plain" | "scaled":
            given = PLAIN | ({"mid_block_scale_factor": 2**0.5} if kind == "scaled" else {})
            model, inputs = diffusers.UNet2DModel(**given | more), (images, TIME)
        case "pyramid":
            model, inputs = diffusers.UNet2DModel(**PYRAMID), (images[:, :3], TIME)
        case "text" | "resized" | "normed":
            given = {"text": TEXT, "resized": RESIZED, "normed": NORMED}[kind]
            model, inputs = diffusers.UNet2DConditionModel(**given), (images, TIME, text)
        case "video":
            model, inputs = diffusers.UNet3DConditionModel(**VIDEO), (torch.randn(2, 4, 3, 8, 8), TIME, text)
        case "motion":
            video, each = torch.randn(2, 4, 3, 8, 8), torch.randn(6, 5, 12)
            model, inputs = diffusers.UNetMotionModel(**MOTION), (video, TIME, each)
        case "kandinsky":
            model, inputs = diffusers.Kandinsky3UNet(**KANDINSKY), (images, TIME, text, torch.ones(2, 5))
        case "encoder":
            model, inputs = autoencoder().encoder, (images[:, :3],)
        case _:
            model, inputs = autoencoder().decoder, (images,)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval(), inputs


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    out = model(*inputs)
    return out if isinstance(out, Tensor) else out[0]


def doubled(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


# ---------------------------------------------------------------- both U-Nets written out


def linear(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def normed(norm: Any, x: Tensor) -> Tensor:
    """Group norm of maps (B, C, ...), layer norm of tokens."""
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
        return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() + norm.bias
    groups = x.reshape(len(x), norm.num_groups, -1)
    groups = groups - groups.mean(-1, keepdim=True)
    groups = groups / (groups.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    shape = (-1, *(1,) * (x.ndim - 2))
    return norm.weight.view(shape) * groups.reshape(x.shape) + norm.bias.view(shape)


def conv(layer: Any, x: Tensor, stride: int = 1) -> Tensor:
    return nn.functional.conv2d(x, layer.weight, layer.bias, stride, padding=layer.weight.shape[-1] // 2)


def attend(a: Any, x: Tensor, to: Tensor, heads: int) -> Tensor:
    q, k, v = (linear(p, y).unflatten(-1, (heads, -1)) for p, y in ((a.to_q, x), (a.to_k, to), (a.to_v, to)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return linear(a.to_out[0], torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


def resnet(b: Any, x: Tensor, time: Tensor, alpha: float, s: float) -> Tensor:
    y = conv(b.conv1, silu(normed(b.norm1, x))) + linear(b.time_emb_proj, silu(time))[..., None, None]
    y = conv(b.conv2, silu(normed(b.norm2, y)))
    kept = x if b.conv_shortcut is None else conv(b.conv_shortcut, x)
    return (alpha * kept + y) / s


def attention(a: Any, x: Tensor, text: Tensor | None, alpha: float, s: float) -> Tensor:
    """Attention of heads of 4 channels; or, with a text, a whole transformer of 4 heads, plain inside."""
    if text is None:
        tokens = normed(a.group_norm, x).flatten(2).transpose(1, 2)
        y = attend(a, tokens, tokens, x.shape[1] // 4)
        return (alpha * x + y.transpose(1, 2).reshape(x.shape)) / s
    y = conv(a.proj_in, normed(a.norm, x)).flatten(2).transpose(1, 2)
    for b in a.transformer_blocks:
        z = normed(b.norm1, y)
        y = y + attend(b.attn1, z, z, 4)
        y = y + attend(b.attn2, normed(b.norm2, y), text, 4)
        value, gate = linear(b.ff.net[0].proj, normed(b.norm3, y)).chunk(2, -1)
        y = y + linear(b.ff.net[2], value * nn.functional.gelu(gate))
    return alpha * x + conv(a.proj_out, y.transpose(1, 2).reshape(x.shape))


def by_hand(m: Any, alphas: Iterator[float], s: float, x: Tensor, time: Tensor, text: Tensor | None = None) -> Tensor:
    """A U-Net whose steps take the next alpha each; those of its middle divide their sums by s."""
    angles = time[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    waves = torch.cat([angles.cos(), angles.sin()], 1).double()
    t = linear(m.time_embedding.linear_2, silu(linear(m.time_embedding.linear_1, waves)))
    x = conv(m.conv_in, x)
    skips = [x]
    for block in m.down_blocks:
        for i, b in enumerate(block.resnets):
            x = resnet(b, x, t, next(alphas), 1)
            if hasattr(block, "attentions"):
                x = attention(block.attentions[i], x, text, next(alphas), 1)
            skips.append(x)
        if block.downsamplers:
            x = conv(block.downsamplers[0].conv, x, stride=2)
            skips.append(x)
    x = resnet(m.mid_block.resnets[0], x, t, next(alphas), s)
    x = attention(m.mid_block.attentions[0], x, text, next(alphas), s)
    x = resnet(m.mid_block.resnets[1], x, t, next(alphas), s)
    for block in m.up_blocks:
        for i, b in enumerate(block.resnets):
            x = resnet(b, torch.cat([x, skips.pop()], 1), t, next(alphas), 1)
            if hasattr(block, "attentions"):
                x = attention(block.attentions[i], x, text, next(alphas), 1)
        if block.upsamplers:
            x = conv(block.upsamplers[0].conv, x.repeat_interleave(2, -1).repeat_interleave(2, -2))
    assert not skips
    return conv(m.conv_out, silu(normed(m.conv_norm_out, x)))


@pytest.mark.parametrize("kind", ["plain", "scaled", "text"])
@torch.no_grad()
def test_faded_unets_match_a_reference_by_hand(kind: str) -> None:
    model, inputs = build(kind)
    model, inputs, s = model.double(), doubled(inputs), 2**0.5 if kind == "scaled" else 1.0
    residua.fade(model, alpha_min=0.5, example=inputs)
    alphas = torch.linspace(1, 0.5, 12).double()
    out = run(model, inputs)
    torch.testing.assert_close(out, by_hand(model, iter(alphas.tolist()), s, *inputs), atol=1e-6, rtol=1e-6)
    assert not any(isinstance(inner, Faded) for at in adapt.blocks_of(model) for inner in [*at.block.modules()][1:])
    middle = torch.tensor([at.name.startswith("mid_block") for at in adapt.blocks_of(model)])
    expected = torch.where(middle, alphas / s, alphas).float()
    torch.testing.assert_close(residua.stream(model).alphas, expected)
    torch.testing.assert_close(residua.stream(model, *inputs).alphas, expected)
    shortcuts(model).set_strength(0.0)
    torch.testing.assert_close(run(model, inputs), run(residua.unfade(model), inputs))


# ---------------------------------------------------------------- every block of every kind

KINDS = (
    "plain",
    "scaled",
    "pyramid",
    "text",
    "resized",
    "normed",
    "video",
    "motion",
    "kandinsky",
    "encoder",
    "decoder",
)
COUNTS = {
    "plain": 12, "scaled": 12, "pyramid": 13, "text": 12, "resized": 14, "normed": 6, "video": 25, "motion": 19,
    "kandinsky": 25, "encoder": 5, "decoder": 7,
}  # fmt: skip
"""How many steps each has, counted in the source: resnets, attentions, convolutions over time."""
LAST = ("conv4.3", "conv2", "to_out.0", "proj_out", "resnet_blocks.3.projection")
"""The last layer of a branch: without it only the shortcut is left."""


@pytest.mark.filterwarnings("ignore:.*stay as they are")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bits_are_kept_and_copies_fade(kind: str) -> None:
    model, inputs = build(kind)
    names, plain = list(model.state_dict()), run(model, inputs)
    torch.manual_seed(1)
    training = run(model.train(), inputs)
    residua.fade(model, alpha_min=1.0, example=inputs)
    torch.manual_seed(1)
    assert torch.equal(run(model, inputs), training)
    assert torch.equal(run(model.eval(), inputs), plain)
    residua.fade(model, alpha_min=0.5)
    assert list(model.state_dict()) == names
    located = adapt.blocks_of(model)
    alphas = [float(getattr(at.block, ALPHA)) for at in located]
    assert alphas == pytest.approx(torch.linspace(1, 0.5, COUNTS[kind]).tolist())
    faded = run(model, inputs)
    assert not torch.allclose(faded, plain, atol=1e-3)
    assert torch.equal(run(copy.deepcopy(model), inputs), faded)
    if kind != "pyramid":  # whose blocks hold functions of their own
        assert torch.equal(run(pickle.loads(pickle.dumps(model)), inputs), faded)
    assert torch.equal(run(residua.unfade(model), inputs), plain)


@pytest.mark.filterwarnings("ignore:.*stay as they are")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_step_is_its_shortcut_scaled_and_its_branch(kind: str) -> None:
    """Of the plain block, what is left without the last layer of its branch is the shortcut P, and the rest the branch:
    a faded block is alpha P + (plain - P), in the order of calls, with the context of its call."""
    model, inputs = build(kind)
    model, inputs = model.double(), doubled(inputs)
    residua.fade(model, alpha_min=0.5, example=inputs)
    steps = residua.stream(model, *inputs)
    seen: list[Any] = []
    hooks = [
        at.block.register_forward_hook(lambda m, a, k, out: seen.append((m, a, k, out)), with_kwargs=True)
        for at in adapt.blocks_of(model)
    ]
    run(model, inputs)
    for hook in hooks:
        hook.remove()
    alphas = torch.linspace(1, 0.5, COUNTS[kind]).double()
    compared = 0
    for (block, args, named, out), alpha, step in zip(seen, alphas, steps, strict=True):
        first = out if isinstance(out, Tensor) else out[0]
        torch.testing.assert_close(step(step.input), first, atol=1e-6, rtol=1e-6)
        last = [name for name in LAST if name in dict(block.named_modules())]
        if not last:
            continue  # attention of "normed" and "kandinsky", two steps in one
        whole = residua.unfade(copy.deepcopy(block))
        silent = copy.deepcopy(whole)
        for p in silent.get_submodule(last[0]).parameters():
            p.zero_()
        y, kept = (y if isinstance(y, Tensor) else y[0] for y in (m(*args, **named) for m in (whole, silent)))
        torch.testing.assert_close(first, alpha * kept + (y - kept), atol=1e-6, rtol=1e-6)
        compared += 1
    assert compared >= {"normed": 4, "kandinsky": 16}.get(kind, COUNTS[kind])


@torch.no_grad()
def test_what_survives_is_the_product_of_the_alphas() -> None:
    """Without branches and biases the way down is conv_in, the strided convolution, and every alpha: those of the
    schedule, and 1 / sqrt(2) of every step in the middle."""
    model, inputs = build("scaled", block_out_channels=(8, 8))
    for name, p in model.named_parameters():
        if name.endswith("bias") or ".conv2." in name or ".to_out." in name:
            p.zero_()
    residua.fade(model, alpha_min=0.5, example=inputs)
    found: list[Tensor] = []
    model.mid_block.register_forward_hook(lambda m, a, out: found.append(out))
    run(model, inputs)
    m: Any = model
    untouched = conv(m.down_blocks[0].downsamplers[0].conv, conv(m.conv_in, inputs[0]), stride=2)
    way = [i for i, step in enumerate(residua.stream(model)) if not step.name.startswith("up_blocks")]
    torch.testing.assert_close(found[0], residua.stream(model)[: len(way)].alpha_eff * untouched)
    assert way == list(range(6))


@pytest.mark.parametrize("name", ["mid_block.resnets.0", "mid_block.attentions.0"])
def test_the_jacobian_of_a_divided_sum(name: str) -> None:
    """J = d out / dx - alpha I, with alpha of the step."""
    model, inputs = build("scaled", block_out_channels=(4, 4))
    model, inputs = model.double(), doubled(inputs)
    residua.fade(model, alpha_min=0.5, example=inputs)
    with torch.no_grad():
        step = next(step for step in residua.stream(model, *inputs) if step.name == name)
    x, whole = step.input, torch.autograd.functional.jacobian
    assert x is not None
    size = x.numel()
    expected = whole(step, x).reshape(size, size) - float(step.alpha) * torch.eye(size)
    torch.testing.assert_close(whole(residual_branch(step), x).reshape(size, size), expected, atol=1e-6, rtol=1e-6)


# ---------------------------------------------------------------- refused, or asked for


@pytest.mark.parametrize("kind", ["plain", "text", "encoder"])
def test_the_order_of_calls_needs_an_example(kind: str) -> None:
    model, inputs = build(kind)
    for call in (residua.fade, residua.stream):
        with pytest.raises(ValueError, match="pass example="):
            call(model)
    residua.fade(model, alpha_min=0.5, example=inputs)
    assert len(residua.stream(residua.fade(model, alpha_min=0.8))) == COUNTS[kind]


def test_an_autoencoder_has_two_streams() -> None:
    with pytest.raises(ValueError, match=r"several residual streams.*get_submodule\('encoder'\)"):
        residua.fade(autoencoder(), alpha_min=0.5, example=torch.randn(2, 3, 8, 8))


def test_blended_streams_are_refused() -> None:
    model = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1, cross_attention_dim=12, num_attention_heads=2,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"resnets.0, a SpatioTemporalResBlock, .*blends"):
        residua.fade(model, alpha_min=0.5)


def test_a_transformer_alone_is_no_branch() -> None:
    """Inside of a U-Net it is one step; by itself, or in a module of one's own, its blocks are the stream."""
    inner = diffusers.Transformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, in_channels=16, norm_num_groups=4
    )
    for model, before in ((inner, ""), (nn.Sequential(inner), "0.")):
        names = [step.name for step in residua.stream(model)]
        assert names == [f"{before}transformer_blocks.{i}.{part}" for i in (0, 1) for part in ("attn1", "ff")]


@torch.no_grad()
def test_outputs_with_names_keep_them() -> None:
    """Transformers return one of diffusers' outputs unless they are told not to."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = nn.ModuleList(
                diffusers.Transformer2DModel(2, 8, num_layers=1, in_channels=16, norm_num_groups=4) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for transformer in self.attentions:
                x = transformer(x).sample
            return x

    model, x = Two().eval(), torch.randn(1, 16, 4, 4)
    first = model.attentions[0](x).sample
    expected = model.attentions[1](first).sample - 0.5 * first
    residua.fade(model, alpha_min=0.5, example=x)
    torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_a_part_fades_by_itself_and_compiles_as_one_graph() -> None:
    unet, inputs = build("scaled")
    seen: list[Any] = []
    middle: Any = unet.get_submodule("mid_block")
    handle = middle.register_forward_pre_hook(lambda m, given: seen.append(given))
    run(unet, inputs)
    handle.remove()
    residua.fade(middle, alpha_min=0.5, example=seen[0])
    (x, t), s = seen[0], 2**0.5
    wanted = resnet(middle.resnets[0], x, t, 1.0, s)
    wanted = attention(middle.attentions[0], wanted, None, 0.75, s)
    wanted = resnet(middle.resnets[1], wanted, t, 0.5, s)
    torch.testing.assert_close(middle(x, t), wanted, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()
    compiled: Any = torch.compile(middle, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, t), wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_unet_inside_a_module_of_ones_own() -> None:
    class Mine(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, *inputs: Any) -> Tensor:
            return run(self.net, inputs)

    net, inputs = build("video")
    names = [f"net.{step.name}" for step in residua.stream(net, *inputs)]
    assert [step.name for step in residua.stream(Mine(net), *inputs)] == names
    assert len(names) == COUNTS["video"]
