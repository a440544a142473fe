"""Blocks of timm. Keys are the classes whose forward is rewritten here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .block import Kind, Map, Part, refused, whole


def _vit(block: Any, *args: Any, **kwargs: Any) -> list[Part]:
    """`x + drop_path(ls(attn(norm x)))`, then the same with the MLP."""
    return [
        Part("attn", lambda x: block.drop_path1(block.ls1(block.attn(block.norm1(x), *args, **kwargs)))),
        Part("mlp", lambda x: block.drop_path2(block.ls2(block.mlp(block.norm2(x))))),
    ]


def _res_post(block: Any, *args: Any, **kwargs: Any) -> list[Part]:
    """`x + drop_path(norm(attn x))`: the norm is the branch's last layer, the stream stays bare."""
    return [
        Part("attn", lambda x: block.drop_path1(block.norm1(block.attn(x, *args, **kwargs)))),
        Part("mlp", lambda x: block.drop_path2(block.norm2(block.mlp(x)))),
    ]


def _bare(block: Any, *args: Any, **kwargs: Any) -> list[Part]:
    """As `_vit`, without layer scale."""
    return [
        Part("attn", lambda x: block.drop_path1(block.attn(block.norm1(x), *args, **kwargs))),
        Part("mlp", lambda x: block.drop_path2(block.mlp(block.norm2(x)))),
    ]


def _between_norms(block: Any, *args: Any, **kwargs: Any) -> list[Part]:
    """`x + drop_path(norm(attn(norm x)))`: a norm on both sides of each branch."""
    return [
        Part("attn", lambda x: block.drop_path(block.norm2(block.attn(block.norm1(x), *args, **kwargs)))),
        Part("mlp", lambda x: block.drop_path(block.norm4(block.mlp(block.norm3(x))))),
    ]


def _parallel_things(block: Any, attn_mask: Tensor | None = None, is_causal: bool = False) -> list[Part]:
    """Several attentions side by side, then several MLPs: their sum is one branch."""

    def attend(one: Any, x: Tensor) -> Tensor:
        y = one.attn(one.norm(x), attn_mask=attn_mask, is_causal=is_causal)
        return one.drop_path(one.ls(y))

    return [
        Part("attns", lambda x: torch.stack([attend(one, x) for one in block.attns]).sum(dim=0)),
        Part("ffns", lambda x: torch.stack([one(x) for one in block.ffns]).sum(dim=0)),
    ]


def _scaled(gamma: Tensor | None, y: Tensor) -> Tensor:
    return y if gamma is None else gamma * y


def _gamma(block: Any, *args: Any, **kwargs: Any) -> list[Part]:
    """As `_vit`, the layer scale two parameters of the block."""
    return [
        Part("attn", lambda x: block.drop_path1(_scaled(block.gamma_1, block.attn(block.norm1(x), *args, **kwargs)))),
        Part("mlp", lambda x: block.drop_path2(_scaled(block.gamma_2, block.mlp(block.norm2(x))))),
    ]


def _metaformer(block: Any) -> list[Part]:
    """PoolFormer, ConvFormer, CAFormer: some shortcuts have a learned scale of their own."""
    return [
        Part(
            "token_mixer",
            lambda x: block.layer_scale1(block.drop_path1(block.token_mixer(block.norm1(x)))),
            shortcut=block.res_scale1,
        ),
        Part(
            "mlp",
            lambda x: block.layer_scale2(block.drop_path2(block.mlp(block.norm2(x)))),
            shortcut=block.res_scale2,
        ),
    ]


def _cait(block: Any) -> list[Part]:
    return [
        Part("attn", lambda x: block.drop_path(block.gamma_1 * block.attn(block.norm1(x)))),
        Part("mlp", lambda x: block.drop_path(block.gamma_2 * block.mlp(block.norm2(x)))),
    ]


def _in_rows(branch: Map) -> Map:
    """A branch of tokens (B, N, C) on a map (B, H, W, C)."""
    return lambda x: branch(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


def _swin(block: Any) -> list[Part]:
    return [
        Part("attn", lambda x: block.drop_path1(block._attn(block.norm1(x)))),
        Part("mlp", _in_rows(lambda x: block.drop_path2(block.mlp(block.norm2(x))))),
    ]


def _swin_v2(block: Any) -> list[Part]:
    return [
        Part("attn", lambda x: block.drop_path1(block.norm1(block._attn(x)))),
        Part("mlp", _in_rows(lambda x: block.drop_path2(block.norm2(block.mlp(x))))),
    ]


def _swin_v2_cr(block: Any) -> list[Part]:
    """As Swin V2; after some blocks the stream itself is normed."""
    return [
        Part("attn", lambda x: block.drop_path1(block.norm1(block._shifted_window_attn(x)))),
        Part("mlp", _in_rows(lambda x: block.drop_path2(block.norm2(block.mlp(x)))), after=_in_rows(block.norm3)),
    ]


def _xcit(block: Any, *size: Any, **named: Any) -> list[Part]:
    """Attention over channels, local mixing, MLP; `size` is that of the map."""
    return [
        Part("attn", lambda x: block.drop_path1(block.gamma1 * block.attn(block.norm1(x)))),
        Part("local_mp", lambda x: block.drop_path3(block.gamma3 * block.local_mp(block.norm3(x), *size, **named))),
        Part("mlp", lambda x: block.drop_path2(block.gamma2 * block.mlp(block.norm2(x)))),
    ]


def _convnext(block: Any) -> list[Part]:
    def branch(x: Tensor) -> Tensor:
        x = block.conv_dw(x)
        if block.use_conv_mlp:
            x = block.mlp(block.norm(x))
        else:
            x = block.mlp(block.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return block.drop_path(x if block.gamma is None else x.mul(block.gamma.reshape(1, -1, 1, 1)))

    return [Part("", branch, shortcut=block.shortcut, branch_first=True)]


def _mixer(block: Any) -> list[Part]:
    return [
        Part("mlp_tokens", lambda x: block.drop_path(block.mlp_tokens(block.norm1(x).transpose(1, 2)).transpose(1, 2))),
        Part("mlp_channels", lambda x: block.drop_path(block.mlp_channels(block.norm2(x)))),
    ]


def _resmlp(block: Any) -> list[Part]:
    def tokens(x: Tensor) -> Tensor:
        return block.drop_path(block.ls1 * block.linear_tokens(block.norm1(x).transpose(1, 2)).transpose(1, 2))

    return [
        Part("linear_tokens", tokens),
        Part("mlp_channels", lambda x: block.drop_path(block.ls2 * block.mlp_channels(block.norm2(x)))),
    ]


def _gmlp(block: Any) -> list[Part]:
    return [Part("mlp_channels", lambda x: block.drop_path(block.mlp_channels(block.norm(x))))]


def _through(x: Tensor, *modules: Any) -> Tensor:
    """One after the other; None is skipped."""
    for module in modules:
        x = x if module is None else module(x)
    return x


@dataclass(frozen=True)
class Row:
    """One step whose branch is modules of the block one after the other; names of those that are None are skipped."""

    layers: tuple[str, ...]
    shortcut: str
    """Empty where the block was built without one to choose: the stream passes bare."""
    after: str
    identity: bool = True
    """Where its shortcut is None, does the stream pass bare? Else it does not pass, and there is no step."""

    def __call__(self, block: Any) -> list[Part]:
        shortcut = getattr(block, self.shortcut) if self.shortcut else None
        if shortcut is None and not self.identity:
            return []
        branch = lambda x: _through(x, *(getattr(block, name) for name in self.layers))  # noqa: E731
        return [Part("", branch, shortcut=shortcut, after=getattr(block, self.after), branch_first=True)]


def _row(layers: str, after: str, shortcut: str = "downsample", identity: bool = True) -> Kind:
    """Post-activation: `after` follows the addition."""
    return Kind(Row(tuple(layers.split()), shortcut, after, identity))


def _resnest(block: Any) -> list[Part]:
    """Drop path, where there is one, lies before the projection and nowhere else; it is drawn without one, too."""

    def branch(x: Tensor) -> Tensor:
        x = _through(x, block.conv1, block.bn1, block.act1, block.avd_first, block.conv2, block.bn2, block.drop_block)
        return _through(x, block.act2, block.avd_last, block.conv3, block.bn3)

    def shortcut(x: Tensor) -> Tensor:
        dropped = _through(x, block.drop_path)
        return x if block.downsample is None else block.downsample(dropped)

    bare = block.downsample is None and block.drop_path is None
    return [Part("", branch, shortcut=None if bare else shortcut, after=block.act3, branch_first=True)]


def _res2net(block: Any) -> list[Part]:
    """Groups of channels one after the other, each with what became of the one before it; the last has no layer."""

    def branch(x: Tensor) -> Tensor:
        groups = _through(x, block.conv1, block.bn1, block.relu).split(block.width, dim=1)
        done: list[Tensor] = []
        for group, conv, norm in zip(groups, block.convs, block.bns):
            alone = block.is_first or not done
            done.append(_through(group if alone else done[-1] + group, conv, norm, block.relu))
        done += [_through(group, block.pool) for group in groups[len(done) :]]
        dropout = getattr(block, "drop_block", None), getattr(block, "drop_path", None)
        return _through(torch.cat(done, dim=1), dropout[0], block.conv3, block.bn3, block.se, dropout[1])

    return [Part("", branch, shortcut=block.downsample, after=block.relu, branch_first=True)]


def _inception(block: Any) -> list[Part]:
    """Inception-ResNet: convolutions side by side, put together and scaled."""
    rows = [row for name, row in block.named_children() if name.startswith("branch")]
    branch = lambda x: block.conv2d(torch.cat([row(x) for row in rows], dim=1)) * block.scale  # noqa: E731
    after = block.act if hasattr(block, "act") else block.relu
    return [Part("", branch, after=after, branch_first=True)]


def _preact(block: Any, *layers: Any) -> list[Part]:
    """Norm and activation come first; a projection takes its input from behind them, else the stream passes bare."""
    if block.downsample is None:
        return [Part("", lambda x: _through(x, block.norm1, *layers), branch_first=True)]
    shared: list[tuple[Tensor, bool, Tensor]] = []  # norm1(x), which runs once a step: it may count statistics

    def shortcut(x: Tensor) -> Tensor:
        shared[:] = [(x, torch.is_grad_enabled(), block.norm1(x))]
        return block.downsample(shared[0][2])

    def branch(x: Tensor) -> Tensor:
        held = shared.pop() if shared else None
        same = held is not None and held[0] is x and held[1] == torch.is_grad_enabled()
        return _through(held[2] if held is not None and same else block.norm1(x), *layers)

    return [Part("", branch, shortcut=shortcut, branch_first=True)]


def _preact_basic(block: Any) -> list[Part]:
    return _preact(block, block.conv1, block.norm2, block.conv2, block.drop_path)


def _preact_bottleneck(block: Any) -> list[Part]:
    return _preact(block, block.conv1, block.norm2, block.conv2, block.norm3, block.conv3, block.drop_path)


PARALLEL = "it carries several streams side by side, and a schedule over depth has no order for them"

KINDS: dict[str, Kind] = {
    f"timm.models.{name}": kind
    for name, kind in {
        "vision_transformer.Block": Kind(_vit),
        "vision_transformer.ResPostBlock": Kind(_res_post),
        "vision_transformer.ParallelScalingBlock": whole(),
        "vision_transformer.DiffParallelScalingBlock": whole(),
        "vision_transformer.ParallelThingsBlock": Kind(_parallel_things),
        "vision_transformer_relpos.RelPosBlock": Kind(_vit),
        "vision_transformer_relpos.ResPostRelPosBlock": Kind(_res_post),
        "eva.EvaBlock": Kind(_gamma),
        "eva.EvaBlockPostNorm": Kind(_res_post),
        "deepseek_vit.DeepseekVitBlock": Kind(_bare),
        "gemma4_vit.Gemma4Block": Kind(_between_norms),
        "beit.Block": Kind(_gamma),
        "cait.LayerScaleBlock": Kind(_cait),
        "metaformer.MetaFormerBlock": Kind(_metaformer),
        "swin_transformer.SwinTransformerBlock": Kind(_swin),
        "swin_transformer_v2.SwinTransformerV2Block": Kind(_swin_v2),
        "swin_transformer_v2_cr.SwinTransformerV2CrBlock": Kind(_swin_v2_cr),
        "xcit.XCABlock": Kind(_xcit),
        "convnext.ConvNeXtBlock": Kind(_convnext),
        "mlp_mixer.MixerBlock": Kind(_mixer),
        "mlp_mixer.ResBlock": Kind(_resmlp),
        "mlp_mixer.SpatialGatingBlock": Kind(_gmlp),
        "resnet.BasicBlock": _row("conv1 bn1 drop_block act1 aa conv2 bn2 se drop_path", "act2"),
        "resnet.Bottleneck": _row("conv1 bn1 act1 conv2 bn2 drop_block act2 aa conv3 bn3 se drop_path", "act3"),
        "resnetv2.Bottleneck": _row("conv1 norm1 conv2 norm2 conv3 norm3 drop_path", "act3"),
        "regnet.Bottleneck": _row("conv1 conv2 se conv3 drop_path", "act3", identity=False),
        "senet.Bottleneck": _row("conv1 bn1 relu conv2 bn2 relu conv3 bn3 se_module", "relu"),
        "senet.SEResNetBlock": _row("conv1 bn1 relu conv2 bn2 relu se_module", "relu"),
        "sknet.SelectiveKernelBasic": _row("conv1 conv2 se drop_path", "act"),
        "sknet.SelectiveKernelBottleneck": _row("conv1 conv2 conv3 se drop_path", "act"),
        "tresnet.BasicBlock": _row("conv1 conv2 se drop_path", "act"),
        "tresnet.Bottleneck": _row("conv1 conv2 se conv3 drop_path", "act"),
        "cspnet.BottleneckBlock": _row("conv1 conv2 attn2 conv3 attn3 drop_path", "act3", shortcut=""),
        "byobnet.BasicBlock": _row("conv1_kxk attn conv2_kxk attn_last drop_path", "act", "shortcut", False),
        "byobnet.BottleneckBlock": _row(
            "conv1_1x1 conv2_kxk conv2b_kxk attn conv3_1x1 attn_last drop_path", "act", "shortcut", False
        ),
        "byobnet.DarkBlock": _row("conv1_1x1 attn conv2_kxk attn_last drop_path", "act", "shortcut", False),
        "byobnet.EdgeBlock": _row("conv1_kxk attn conv2_1x1 attn_last drop_path", "act", "shortcut", False),
        "byobnet.SelfAttnBlock": _row(
            "conv1_1x1 conv2_kxk self_attn post_attn conv3_1x1 drop_path", "act", "shortcut", False
        ),
        "resnest.ResNestBottleneck": Kind(_resnest),
        "res2net.Bottle2neck": Kind(_res2net),
        "inception_resnet_v2.Block35": Kind(_inception),
        "inception_resnet_v2.Block17": Kind(_inception),
        "inception_resnet_v2.Block8": Kind(_inception),
        "resnetv2.PreActBasic": Kind(_preact_basic),
        "resnetv2.PreActBottleneck": Kind(_preact_bottleneck),
        "hrnet.HighResolutionModule": refused(PARALLEL),
        "crossvit.MultiScaleBlock": refused(PARALLEL),
        "tnt.Block": refused(PARALLEL),
    }.items()
}
