"""Every family of timm that fades at each sublayer: a reference written by hand, and itself at alpha = 1."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models import byobnet
from timm.models import vision_transformer as vt
from timm.models.inception_resnet_v2 import Block8, Block17, Block35
from torch import Tensor, nn

import residua
from residua.adapt import blocks_of
from residua.adapt.block import ALPHA, Faded, computed_by

TINY: dict[str, Any] = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=5)
CONV: dict[str, Any] = dict(layers=(2, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8, num_classes=5)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", TINY | dict(drop_path_rate=0.2)),
    "deit3": ("deit3_small_patch16_224", TINY | dict(init_values=0.3)),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", TINY),
    "dinov2": ("vit_small_patch14_reg4_dinov2", TINY | dict(img_size=28)),
    "siglip": ("vit_base_patch16_siglip_224", TINY),
    "vit_respost": ("vit_tiny_patch16_224", TINY | dict(block_fn=vt.ResPostBlock, init_values=0.5, drop_path_rate=0.2)),
    "vit_things": ("vit_tiny_patch16_224", TINY | dict(block_fn=vt.ParallelThingsBlock)),
    "vit_22b": ("vit_tiny_patch16_224", TINY | dict(block_fn=vt.ParallelScalingBlock)),
    "vit_22b_diff": ("vit_tiny_patch16_224", TINY | dict(block_fn=vt.DiffParallelScalingBlock)),
    "vit_relpos": ("vit_srelpos_small_patch16_224", TINY),
    "vit_relpos_rpn": ("vit_relpos_base_patch32_plus_rpn_256", TINY | dict(img_size=64)),
    "eva02": ("eva02_tiny_patch14_224", TINY | dict(img_size=28, drop_path_rate=0.2)),
    "eva_gamma": ("eva02_base_patch14_224", TINY | dict(img_size=28, init_values=0.2)),
    "eva_postnorm": ("eva02_tiny_patch14_224", TINY | dict(img_size=28, use_post_norm=True)),
    "deepseek": ("deepseek_vit_412m", TINY | dict(img_size=42, drop_path_rate=0.2)),
    "gemma4": ("gemma4_vit_167m", TINY | dict(img_size=48, drop_path_rate=0.2)),
    "beit": ("beit_base_patch16_224", TINY | dict(drop_path_rate=0.2)),
    "beit_shared": (
        "beit_base_patch16_224",
        TINY | dict(init_values=None, use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    ),
    "cait": ("cait_xxs24_224", TINY | dict(init_values=0.1)),
    "poolformer": ("poolformer_s12", dict(num_classes=5)),
    "caformer": ("caformer_s18", dict(num_classes=5)),
    "swin": (
        "swin_tiny_patch4_window7_224",
        dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 2), num_classes=5),
    ),
    "swinv2": (
        "swinv2_tiny_window8_256",
        dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 2), num_classes=5),
    ),
    "swinv2_cr": (
        "swinv2_cr_tiny_ns_224",
        dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 1), num_heads=(2, 2), num_classes=5),
    ),
    "convnext": ("convnext_tiny", dict(depths=(2, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=5, ls_init_value=0.5)),
    "convnext_conv": (
        "convnext_atto",
        dict(depths=(2, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=5, drop_path_rate=0.2),
    ),
    "convnextv2": ("convnextv2_atto", dict(depths=(2, 1, 1, 1), dims=(8, 16, 16, 16), num_classes=5)),
    "mixer": ("mixer_s32_224", dict(img_size=64, num_classes=5)),
    "resmlp": ("resmlp_12_224", dict(img_size=32, num_classes=5)),
    "gmlp": ("gmlp_ti16_224", dict(img_size=32, num_classes=5)),
    "resnet18": ("resnet18", CONV | dict(drop_path_rate=0.2)),
    "resnet50": ("resnet50", CONV),
    "resnet_blur": ("resnetblur50", CONV),
    "resnet_d_se": ("seresnet50", CONV | dict(avg_down=True, drop_block_rate=0.1)),
    "resnetv2_18": ("resnetv2_18", dict(layers=(2, 1, 1, 1), channels=(8, 8, 16, 16), stem_chs=8, num_classes=5)),
    "resnetv2_50": ("resnetv2_50", dict(layers=(2, 1, 1, 1), channels=(32, 32, 64, 64), stem_chs=8, num_classes=5)),
    "resnetv2_post": (
        "resnetv2_50",
        dict(layers=(2, 1, 1, 1), channels=(32, 32, 64, 64), stem_chs=8, num_classes=5, preact=False),
    ),
    "regnet": ("regnety_002", dict(num_classes=5)),
    "senet18": ("legacy_seresnet18", dict(num_classes=5)),
    "senet50": ("legacy_seresnet50", dict(num_classes=5)),
    "skresnet18": ("skresnet18", dict(num_classes=5)),
    "tresnet": ("tresnet_m", dict(layers=(1, 1, 1, 1), num_classes=5)),
    "cspresnet": ("cspresnet50", dict(num_classes=5)),
    "resnest": ("resnest26d", CONV | dict(drop_path_rate=0.2)),
    "res2net": ("res2net50_26w_4s", CONV),
    "byob_bottleneck": ("gcresnext26ts", dict(num_classes=5)),
    "byob_attention": ("halonet26t", dict(num_classes=5)),
    "xcit": ("xcit_nano_12_p16_224", dict(embed_dim=32, depth=2, num_heads=2, num_classes=5)),
}
SLOW = {
    "caformer", "senet18", "senet50", "tresnet", "cspresnet", "skresnet18", "byob_bottleneck", "byob_attention",
    "regnet",
}  # fmt: skip
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]


def build(family: str) -> tuple[nn.Module, Tensor]:
    """A small model in float64 with random weights everywhere, also where the library starts at zero; and images."""
    name, kwargs = MODELS[family]
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    size = 256 if family == "byob_attention" else kwargs.get("img_size", 64)
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


def ln(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def rms(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def two(attend: Callable[..., Tensor], mix: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reference(b: Any, x: Tensor, a: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x * a[0] + attend(b, x, *args, **kwargs)
        return x * a[1] + mix(b, x)

    return reference


def ref_things(b: Any, x: Tensor, a: Tensor) -> Tensor:
    x = a[0] * x + sum(m[1](ln(m[0], x)) for m in b.attns)
    return a[1] * x + sum(m[1](ln(m[0], x)) for m in b.ffns)


def ref_22b(b: Any, x: Tensor, a: Tensor) -> Tensor:
    y = type(b).residua_plain.forward(b, x)
    return a[0] * x + (y - x)


def ref_rows(norm_first: bool, attend: str) -> Callable[..., Tensor]:
    def reference(b: Any, x: Tensor, a: Tensor) -> Tensor:
        attn = getattr(b, attend)
        x = a[0] * x + (attn(ln(b.norm1, x)) if norm_first else ln(b.norm1, attn(x)))
        x = a[1] * x + (b.mlp(ln(b.norm2, x)) if norm_first else ln(b.norm2, b.mlp(x)))
        return x if isinstance(getattr(b, "norm3", nn.Identity()), nn.Identity) else ln(b.norm3, x)

    return reference


def ref_convnext(b: Any, x: Tensor, a: Tensor) -> Tensor:
    y = nn.functional.conv2d(x, b.conv_dw.weight, b.conv_dw.bias, padding=3, groups=x.shape[1])
    y = ln(b.norm, y.permute(0, 2, 3, 1))
    y = b.mlp(y.permute(0, 3, 1, 2)) if b.use_conv_mlp else b.mlp(y).permute(0, 3, 1, 2)
    return a[0] * x + (y if b.gamma is None else y * b.gamma[:, None, None])


def ref_metaformer(b: Any, x: Tensor, a: Tensor) -> Tensor:
    for alpha, branch, norm, ls, kept in (
        (a[0], b.token_mixer, b.norm1, b.layer_scale1, b.res_scale1),
        (a[1], b.mlp, b.norm2, b.layer_scale2, b.res_scale2),
    ):
        scales = [
            1.0 if isinstance(m, nn.Identity) else m.scale.view(m.shape if x.ndim == 4 and m.shape else -1)
            for m in (ls, kept)
        ]
        x = alpha * scales[1] * x + scales[0] * branch(norm(x))
    return x


def ref_resmlp(b: Any, x: Tensor, a: Tensor) -> Tensor:
    affine = lambda n, x: n.alpha * x + n.beta  # noqa: E731
    tokens = torch.einsum("mn,bnc->bmc", b.linear_tokens.weight, affine(b.norm1, x)) + b.linear_tokens.bias[:, None]
    x = a[0] * x + b.ls1 * tokens
    return a[1] * x + b.ls2 * b.mlp_channels(affine(b.norm2, x))


def ref_resnet(b: Any, x: Tensor, a: Tensor) -> Tensor:
    relu, y = torch.relu, relu_bn(b.bn1, b.conv1(x))
    if hasattr(b, "conv3"):
        y = b.aa(relu_bn(b.bn2, b.conv2(y))) if b.aa is not None else relu_bn(b.bn2, b.conv2(y))
        y = bn(b.bn3, b.conv3(y))
    else:
        y = bn(b.bn2, b.conv2(y))
    se = getattr(b, "se", None) or getattr(b, "se_module", None)
    y = y if se is None else se(y)
    return relu(a[0] * (x if b.downsample is None else b.downsample(x)) + y)


def ref_senet(b: Any, x: Tensor, a: Tensor) -> Tensor:
    y = relu_bn(b.bn2, b.conv2(relu_bn(b.bn1, b.conv1(x))))
    y = b.se_module(bn(b.bn3, b.conv3(y)) if hasattr(b, "conv3") else y)
    return torch.relu(a[0] * (x if b.downsample is None else b.downsample(x)) + y)


def ref_resnest(b: Any, x: Tensor, a: Tensor) -> Tensor:
    y = b.conv2(relu_bn(b.bn1, b.conv1(x)))
    y = b.avd_last(y) if b.avd_last is not None else y
    return torch.relu(a[0] * (x if b.downsample is None else b.downsample(x)) + bn(b.bn3, b.conv3(y)))


def ref_res2net(b: Any, x: Tensor, a: Tensor) -> Tensor:
    first, second, third, last = relu_bn(b.bn1, b.conv1(x)).chunk(4, dim=1)
    first = relu_bn(b.bns[0], b.convs[0](first))
    second = relu_bn(b.bns[1], b.convs[1](second if b.is_first else first + second))
    third = relu_bn(b.bns[2], b.convs[2](third if b.is_first else second + third))
    y = torch.cat((first, second, third, b.pool(last) if b.is_first else last), dim=1)
    return torch.relu(a[0] * (x if b.downsample is None else b.downsample(x)) + bn(b.bn3, b.conv3(y)))


def bn(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


def relu_bn(norm: Any, x: Tensor) -> Tensor:
    return torch.relu(bn(norm, x))


def ref_preact(b: Any, x: Tensor, a: Tensor) -> Tensor:
    pre = relu_bn(b.norm1, x)
    y = b.conv2(relu_bn(b.norm2, b.conv1(pre)))
    y = b.conv3(relu_bn(b.norm3, y)) if hasattr(b, "conv3") else y
    return a[0] * (x if b.downsample is None else b.downsample(pre)) + y


def ref_postact(b: Any, x: Tensor, a: Tensor) -> Tensor:
    y = bn(b.norm3, b.conv3(relu_bn(b.norm2, b.conv2(relu_bn(b.norm1, b.conv1(x))))))
    return torch.relu(a[0] * (x if b.downsample is None else b.downsample(x)) + y)


def ref_row(layers: str, shortcut: str = "downsample", act: str = "act") -> Callable[..., Tensor]:
    def reference(b: Any, x: Tensor, a: Tensor) -> Tensor:
        y = x
        for name in layers.split():
            y = getattr(b, name)(y) if getattr(b, name) is not None else y
        kept = x if getattr(b, shortcut, None) is None else getattr(b, shortcut)(x)
        return getattr(b, act)(a[0] * kept + y)

    return reference


def ref_xcit(b: Any, x: Tensor, a: Tensor, h: int, w: int) -> Tensor:
    x = a[0] * x + b.gamma1 * b.attn(ln(b.norm1, x))
    x = a[1] * x + b.gamma3 * b.local_mp(ln(b.norm3, x), h, w)
    return a[2] * x + b.gamma2 * b.mlp(ln(b.norm2, x))


scale = lambda g, y: y if g is None else g * y  # noqa: E731
VIT = two(lambda b, x, *c, **k: b.ls1(b.attn(ln(b.norm1, x), *c, **k)), lambda b, x: b.ls2(b.mlp(ln(b.norm2, x))))
POST = two(lambda b, x, *c, **k: ln(b.norm1, b.attn(x, *c, **k)), lambda b, x: ln(b.norm2, b.mlp(x)))
GAMMA = two(
    lambda b, x, *c, **k: scale(b.gamma_1, b.attn(ln(b.norm1, x), *c, **k)),
    lambda b, x: scale(b.gamma_2, b.mlp(ln(b.norm2, x))),
)
BARE = two(lambda b, x, **k: b.attn(rms(b.norm1, x), **k), lambda b, x: b.mlp(rms(b.norm2, x)))
SANDWICH = two(
    lambda b, x, *c, **k: rms(b.norm2, b.attn(rms(b.norm1, x), *c, **k)),
    lambda b, x: rms(b.norm4, b.mlp(rms(b.norm3, x))),
)
REFERENCES: dict[str, Callable[..., Tensor]] = {
    f"timm.models.{name}": reference
    for name, reference in {
        "vision_transformer.Block": VIT,
        "vision_transformer.ResPostBlock": POST,
        "vision_transformer.ParallelThingsBlock": ref_things,
        "vision_transformer.ParallelScalingBlock": ref_22b,
        "vision_transformer.DiffParallelScalingBlock": ref_22b,
        "vision_transformer_relpos.RelPosBlock": VIT,
        "vision_transformer_relpos.ResPostRelPosBlock": POST,
        "eva.EvaBlock": GAMMA,
        "eva.EvaBlockPostNorm": POST,
        "deepseek_vit.DeepseekVitBlock": BARE,
        "gemma4_vit.Gemma4Block": SANDWICH,
        "beit.Block": GAMMA,
        "cait.LayerScaleBlock": GAMMA,
        "metaformer.MetaFormerBlock": ref_metaformer,
        "swin_transformer.SwinTransformerBlock": ref_rows(True, "_attn"),
        "swin_transformer_v2.SwinTransformerV2Block": ref_rows(False, "_attn"),
        "swin_transformer_v2_cr.SwinTransformerV2CrBlock": ref_rows(False, "_shifted_window_attn"),
        "convnext.ConvNeXtBlock": ref_convnext,
        "mlp_mixer.MixerBlock": two(
            lambda b, x: b.mlp_tokens(ln(b.norm1, x).mT).mT, lambda b, x: b.mlp_channels(ln(b.norm2, x))
        ),
        "mlp_mixer.ResBlock": ref_resmlp,
        "mlp_mixer.SpatialGatingBlock": lambda b, x, a: a[0] * x + b.mlp_channels(ln(b.norm, x)),
        "resnet.BasicBlock": ref_resnet,
        "resnet.Bottleneck": ref_resnet,
        "resnetv2.PreActBasic": ref_preact,
        "resnetv2.PreActBottleneck": ref_preact,
        "resnetv2.Bottleneck": ref_postact,
        "senet.Bottleneck": ref_senet,
        "senet.SEResNetBlock": ref_senet,
        "regnet.Bottleneck": ref_row("conv1 conv2 se conv3", act="act3"),
        "sknet.SelectiveKernelBasic": ref_row("conv1 conv2 se"),
        "resnest.ResNestBottleneck": ref_resnest,
        "res2net.Bottle2neck": ref_res2net,
        "tresnet.BasicBlock": ref_row("conv1 conv2 se"),
        "tresnet.Bottleneck": ref_row("conv1 conv2 se conv3"),
        "cspnet.BottleneckBlock": ref_row("conv1 conv2 attn2 conv3 attn3", act="act3"),
        "byobnet.BottleneckBlock": ref_row("conv1_1x1 conv2_kxk conv2b_kxk attn conv3_1x1 attn_last", "shortcut"),
        "byobnet.BasicBlock": ref_row("conv1_kxk attn conv2_kxk attn_last", "shortcut"),
        "byobnet.EdgeBlock": ref_row("conv1_kxk attn conv2_1x1 attn_last", "shortcut"),
        "byobnet.DarkBlock": ref_row("conv1_1x1 attn conv2_kxk attn_last", "shortcut"),
        "byobnet.SelfAttnBlock": ref_row("conv1_1x1 conv2_kxk self_attn post_attn conv3_1x1", "shortcut"),
        "xcit.XCABlock": ref_xcit,
    }.items()
}


def seeded(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of a forward pass in training with fixed chance, and the buffers it leaves."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(3)
    out = model(images)
    return (out[0] if isinstance(out, tuple) else out), dict(model.state_dict())


@pytest.mark.parametrize("family", EVERY)
def test_alpha_one_is_the_plain_model_bit_for_bit(family: str) -> None:
    model, images = build(family)
    plain, trained, names = model(images), seeded(model, images), list(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    classes = [type(module) for module in model.modules()]

    residua.fade(model, alpha_min=1.0)
    assert any(isinstance(module, Faded) for module in model.modules())
    assert list(model.state_dict()) == names
    assert torch.equal(model(images), plain)
    again = seeded(model, images)
    assert torch.equal(again[0], trained[0])
    for name, value in trained[1].items():
        torch.testing.assert_close(again[1][name], value, rtol=0, atol=0)

    residua.fade(model, alpha_min=0.5)
    assert not torch.equal(model(images), plain)
    residua.unfade(model)
    assert torch.equal(model(images), plain)
    assert [type(module) for module in model.modules()] == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("family", EVERY)
def test_faded_blocks_match_a_reference_and_pass_gradients(family: str) -> None:
    model, images = build(family)
    learned = reached(model, images)
    residua.fade(model, alpha_min=0.4)
    seen: list[str] = []

    def check(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        alphas = getattr(block, ALPHA).double()
        expected = REFERENCES[computed_by(block)](block, args[0], alphas, *args[1:], **kwargs)
        error = (out - expected).abs().max() / expected.abs().max()
        assert error < 1e-6, f"{computed_by(block)}: {error}"
        seen.append(computed_by(block))

    located = blocks_of(model)
    handles = [at.block.register_forward_hook(check, with_kwargs=True) for at in located]
    with torch.no_grad():
        model(images)
    assert len(seen) == len(located) >= 2
    for handle in handles:
        handle.remove()
    assert reached(model, images) == learned
    alphas = torch.cat([getattr(at.block, ALPHA) for at in located])
    torch.testing.assert_close(alphas, torch.linspace(1, 0.4, len(alphas)))


@pytest.mark.parametrize("block", [byobnet.BasicBlock, byobnet.DarkBlock, byobnet.EdgeBlock])
def test_blocks_that_models_are_put_together_from(block: type[nn.Module]) -> None:
    model = nn.Sequential(block(8, 8), block(8, 8), block(8, 16, stride=2, downsample="")).eval()
    x = torch.randn(2, 8, 8, 8)
    plain = model(x)
    assert torch.equal(residua.fade(model, alpha_min=1.0)(x), plain)
    assert not isinstance(model[2], Faded)  # changes the shape and was built without a shortcut
    residua.fade(model, alpha_min=0.4)
    for inner in model[:2]:
        expected = REFERENCES[computed_by(inner)](inner, x, getattr(inner, ALPHA))
        torch.testing.assert_close(inner(x), expected)


@pytest.mark.parametrize("block", [Block35, Block17, Block8])
def test_blocks_of_inception_resnet(block: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(scale=0.2), block(scale=0.5)).eval()
    x = torch.randn(2, {"Block35": 320, "Block17": 1088, "Block8": 2080}[block.__name__], 3, 3)
    plain = model(x)
    assert torch.equal(residua.fade(model, alpha_min=1.0)(x), plain)
    faded = residua.fade(model, alpha_min=0.4)(x)
    for inner, alpha, scale in zip(model, (1.0, 0.4), (0.2, 0.5)):
        rows = [inner.branch0(x), inner.branch1(x)] + ([inner.branch2(x)] if hasattr(inner, "branch2") else [])
        x = torch.relu(alpha * x + scale * inner.conv2d(torch.cat(rows, dim=1)))
    torch.testing.assert_close(faded, x)


def reached(model: nn.Module, images: Tensor) -> set[str]:
    """Names of the parameters that a gradient reaches."""
    model.zero_grad()
    model(images).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return {name for name, p in model.named_parameters() if p.grad is not None}


def compiles(family: str, backend: str) -> None:
    model, images = build(family)
    residua.fade(model, alpha_min=0.5)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-5, atol=1e-6)
    compiled(images).sum().backward()
    model.train()(images).sum().backward()


@pytest.mark.parametrize("family", ["vit", "resnet18", "swin", "convnext", "vit_22b", "resnetv2_18"])
def test_traces_as_one_graph(family: str) -> None:
    compiles(family, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_compiles(family: str) -> None:
    compiles(family, "inductor")
