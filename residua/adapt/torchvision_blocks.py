"""Blocks of torchvision. Keys are the classes whose forward is rewritten here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .block import Kind, Part


def _basic(block: Any) -> list[Part]:
    """Two convolutions; the activation follows the addition."""

    def branch(x: Tensor) -> Tensor:
        return block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))

    return [Part("", branch, shortcut=block.downsample, after=block.relu, branch_first=True)]


def _bottleneck(block: Any) -> list[Part]:
    def branch(x: Tensor) -> Tensor:
        x = block.relu(block.bn1(block.conv1(x)))
        return block.bn3(block.conv3(block.relu(block.bn2(block.conv2(x)))))

    return [Part("", branch, shortcut=block.downsample, after=block.relu, branch_first=True)]


def _vit(block: Any) -> list[Part]:
    def attend(x: Tensor) -> Tensor:
        x = block.ln_1(x)
        return block.dropout(block.self_attention(x, x, x, need_weights=False)[0])

    return [Part("self_attention", attend, branch_first=True), Part("mlp", lambda x: block.mlp(block.ln_2(x)))]


def _swin(block: Any) -> list[Part]:
    return [
        Part("attn", lambda x: block.stochastic_depth(block.attn(block.norm1(x)))),
        Part("mlp", lambda x: block.stochastic_depth(block.mlp(block.norm2(x)))),
    ]


def _swin_v2(block: Any) -> list[Part]:
    """The norm is the branch's last layer."""
    return [
        Part("attn", lambda x: block.stochastic_depth(block.norm1(block.attn(x)))),
        Part("mlp", lambda x: block.stochastic_depth(block.norm2(block.mlp(x)))),
    ]


def _convnext(block: Any) -> list[Part]:
    return [Part("", lambda x: block.stochastic_depth(block.layer_scale * block.block(x)), branch_first=True)]


def _regnet(block: Any) -> list[Part]:
    return [Part("", block.f, shortcut=block.proj, after=block.activation)]


KINDS: dict[str, Kind] = {
    f"torchvision.models.{name}": kind
    for name, kind in {
        "resnet.BasicBlock": Kind(_basic),
        "resnet.Bottleneck": Kind(_bottleneck),
        "regnet.ResBottleneckBlock": Kind(_regnet),
        "vision_transformer.EncoderBlock": Kind(_vit, stream="input"),
        "swin_transformer.SwinTransformerBlock": Kind(_swin),
        "swin_transformer.SwinTransformerBlockV2": Kind(_swin_v2),
        "convnext.CNBlock": Kind(_convnext, stream="input"),
    }.items()
}
