"""Every family of torchvision that fades at each sublayer: against a reference by hand, and itself at alpha = 1."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import convnext, regnet, resnet, swin_transformer, vision_transformer

import residua
from residua.adapt import blocks_of
from residua.adapt.block import ALPHA, computed_by

SWIN: dict[str, Any] = dict(
    patch_size=[4, 4], embed_dim=16, depths=[2, 1], num_heads=[2, 2], window_size=[4, 4], num_classes=5
)
CONVNEXT = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(resnet.ResNet, resnet.BasicBlock, [2, 1, 1, 1], num_classes=5),
    "resnet50": partial(resnet.ResNet, resnet.Bottleneck, [2, 1, 1, 1], num_classes=5),
    "vit": partial(vision_transformer.VisionTransformer, 32, 16, 2, 2, 32, 64, dropout=0.1, num_classes=5),
    "swin": partial(swin_transformer.SwinTransformer, **SWIN, stochastic_depth_prob=0.2),
    "swin_v2": partial(
        swin_transformer.SwinTransformer,
        **SWIN,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    ),
    "convnext": partial(convnext.ConvNeXt, CONVNEXT, stochastic_depth_prob=0.2, layer_scale=0.5, num_classes=5),
    "regnet": partial(regnet.regnet_y_400mf, num_classes=5),
}


def ref_resnet(b: Any, x: Tensor, a: Tensor) -> Tensor:
    convs = [(b.conv1, b.bn1), (b.conv2, b.bn2)] + ([(b.conv3, b.bn3)] if hasattr(b, "conv3") else [])
    y = x
    for i, (conv, norm) in enumerate(convs):
        y = (torch.relu(y) if i else y).to(y.dtype)
        y = nn.functional.conv2d(y, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
        y = (y - norm.running_mean[:, None, None]) / (norm.running_var + norm.eps).sqrt()[:, None, None]
        y = y * norm.weight[:, None, None] + norm.bias[:, None, None]
    return torch.relu(a[0] * (x if b.downsample is None else b.downsample(x)) + y)


def ref_vit(b: Any, x: Tensor, a: Tensor) -> Tensor:
    y = nn.functional.layer_norm(x, x.shape[-1:], b.ln_1.weight, b.ln_1.bias, 1e-6)
    w, heads = b.self_attention, b.self_attention.num_heads
    q, k, v = nn.functional.linear(y, w.in_proj_weight, w.in_proj_bias).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    y = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
    x = a[0] * x + w.out_proj(y.transpose(1, 2).flatten(2))
    return a[1] * x + b.mlp(nn.functional.layer_norm(x, x.shape[-1:], b.ln_2.weight, b.ln_2.bias, 1e-6))


def ref_swin(b: Any, x: Tensor, a: Tensor) -> Tensor:
    x = a[0] * x + b.attn(b.norm1(x))
    return a[1] * x + b.mlp(b.norm2(x))


def ref_swin_v2(b: Any, x: Tensor, a: Tensor) -> Tensor:
    x = a[0] * x + b.norm1(b.attn(x))
    return a[1] * x + b.norm2(b.mlp(x))


REFERENCES: dict[str, Callable[..., Tensor]] = {
    f"torchvision.models.{name}": reference
    for name, reference in {
        "resnet.BasicBlock": ref_resnet,
        "resnet.Bottleneck": ref_resnet,
        "vision_transformer.EncoderBlock": ref_vit,
        "swin_transformer.SwinTransformerBlock": ref_swin,
        "swin_transformer.SwinTransformerBlockV2": ref_swin_v2,
        "convnext.CNBlock": lambda b, x, a: a[0] * x + b.layer_scale * b.block(x),
        "regnet.ResBottleneckBlock": lambda b, x, a: torch.relu(a[0] * (x if b.proj is None else b.proj(x)) + b.f(x)),
    }.items()
}


def build(family: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = MODELS[family]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    size = 32 if family in ("vit", "swin", "swin_v2") else 64
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


def trained(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model = copy.deepcopy(model).train()
    torch.manual_seed(3)
    return model(images), dict(model.state_dict())


@pytest.mark.parametrize("family", MODELS)
def test_alpha_one_is_the_plain_model_bit_for_bit(family: str) -> None:
    model, images = build(family)
    plain, (moving, buffers), names = model(images), trained(model, images), list(model.state_dict())
    classes = [type(module) for module in model.modules()]
    residua.fade(model, alpha_min=1.0)
    assert list(model.state_dict()) == names
    assert torch.equal(model(images), plain)
    again, kept = trained(model, images)
    assert torch.equal(again, moving)
    assert all(torch.equal(kept[name], value) for name, value in buffers.items())
    residua.unfade(residua.fade(model, alpha_min=0.5))
    assert torch.equal(model(images), plain)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("family", MODELS)
def test_faded_blocks_match_a_reference_and_pass_gradients(family: str) -> None:
    model, images = build(family)
    residua.fade(model, alpha_min=0.4)
    seen: list[Tensor] = []

    def check(block: Any, args: tuple[Any, ...], out: Tensor) -> None:
        expected = REFERENCES[computed_by(block)](block, args[0], getattr(block, ALPHA).double())
        assert (out - expected).abs().max() / expected.abs().max() < 1e-6
        seen.append(getattr(block, ALPHA))

    located = blocks_of(model)
    handles = [at.block.register_forward_hook(check) for at in located]
    with torch.no_grad():
        model(images)
    assert len(seen) == len(located)
    alphas = torch.cat(seen)
    torch.testing.assert_close(alphas, torch.linspace(1, 0.4, len(alphas)))
    for handle in handles:
        handle.remove()
    model(images).square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters() if p.ndim > 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_compiles(family: str) -> None:
    model, images = build(family)
    residua.fade(model, alpha_min=0.5)
    torch._dynamo.reset()
    out = torch.compile(model, fullgraph=True)(images)
    torch.testing.assert_close(out, model(images), rtol=1e-5, atol=1e-6)
