"""Decay folded into the weights: an ordinary residual network that computes the same function.

With `c_{k+1} = alpha_k c_k` the stream `y_k = x_k / c_k` follows `y_{k+1} = y_k + f_k(c_k y_k) / c_{k+1}`: an ordinary
residual step whose branch is scaled. Where a branch starts with LayerNorm it does not see `c_k`, but for the norm's
eps, which would have to be `eps / c_k^2`. Where it starts with a convolution, `c_k` goes into that convolution.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from residua.adapt.block import computed_by
from residua.adapt.encoder import TimmViT, last_linear
from residua.adapt.folder import norms_of
from residua.nn import ResNet, ViT
from residua.nn.shortcut import Decay, Shortcuts

SMALLEST = 1e-12  # of alpha_eff: below it, squares of the folded stream leave the range of float32


class ExportError(ValueError):
    """An export that cannot be made, and why."""


@dataclass(frozen=True)
class Folded:
    """Weights of an ordinary residual network."""

    state: dict[str, Tensor]
    """timm's names for a ViT, torchvision's for a ResNet."""
    eps: float
    """The one LayerNorm eps that comes closest; of a ResNet that of its batch norms."""
    exact: tuple[float, ...]
    """The eps with which each LayerNorm, one a step and then the final one, would make the two networks equal."""
    left: float = 1.0
    """Of a ViT: what its last tokens, before a final norm, are multiplied with to be the model's."""


def fold_vit(encoder: ViT, true_scale: bool | None = None) -> Folded:
    """A ViT with ordinary shortcuts.

    `true_scale` is the gauge: True ends with `c_K = 1`, the tokens of the last block as they are (default without a
    final norm, which would hide the scale); False starts with `c_0 = 1`. The eps is the model's own at the scale of the
    embedding: right for the first steps, where the class token is still short, and later too small by a share
    `1 - c_k^2 / c_0^2` of an eps that is little beside the stream's variance by then. A negative alpha, which only
    learning finds, turns the sign of the norms after it.
    """
    refuse(encoder)
    normed = not isinstance(encoder.norm, nn.Identity)
    true_scale = not normed if true_scale is None else true_scale
    alphas = encoder.shortcut.alpha.detach().double().cpu()
    _check(alphas)
    c = torch.cat([alphas.new_ones(1), alphas.cumprod(0)])
    c = c / c[-1] if true_scale else c
    state = {k: v.detach().double().cpu().clone() for k, v in encoder.state_dict().items() if "shortcut." not in k}
    for name in _embedding(encoder):
        if name in state:
            state[name] /= c[0]
    for k, (norm, last) in enumerate(pair for i in range(encoder.depth) for pair in _branches(encoder, i)):
        state[f"{norm}.weight"] *= c[k].sign()
        for part in ("weight", "bias"):
            if f"{last}.{part}" in state:
                state[f"{last}.{part}"] *= encoder.shortcut.decay.branch_scale / c[k + 1]
    if normed:
        state["norm.weight"] *= c[-1].sign()
    exact = tuple(encoder.norm_eps / float(scale) ** 2 for scale in c)
    dtype = encoder.pos_embed.dtype
    return Folded({name: value.to(dtype) for name, value in state.items()}, exact[0], exact, float(c[-1]))


def refuse(encoder: ViT) -> None:
    """ExportError for an encoder of timm whose blocks see the scale of the stream."""
    if not isinstance(encoder, TimmViT):
        return
    classes = {computed_by(at.block) for at in encoder.located} - {"timm.models.vision_transformer.Block"}
    if classes:
        raise ExportError(
            f"decay of {encoder.source['encoder']} cannot be folded: its {classes.pop().rpartition('.')[2]} does not "
            "norm what its branches see; onnx and torch-export keep the alphas"
        )


def _embedding(encoder: ViT) -> list[str]:
    """Parameters whose sum, or whose norm, the stream starts as."""
    if not isinstance(getattr(encoder, "norm_pre", nn.Identity()), nn.Identity):
        return ["norm_pre.weight", "norm_pre.bias"]
    normed = not isinstance(getattr(encoder.patch_embed, "norm", nn.Identity()), nn.Identity)
    patches = "patch_embed.norm" if normed else "patch_embed.proj"
    return ["cls_token", "dist_token", "reg_token", "pos_embed", f"{patches}.weight", f"{patches}.bias"]


def _branches(encoder: ViT, i: int) -> list[tuple[str, str]]:
    """Norm and last linear layer of attention and of the MLP of a block."""
    block: Any = encoder.blocks[i]
    names = {module: f"blocks.{i}.{name}" for name, module in block.named_modules()}
    return [
        (names[norm], names[last_linear(part)]) for norm, part in ((block.norm1, block.attn), (block.norm2, block.mlp))
    ]


@torch.no_grad()
def single_eps_difference(encoder: ViT, folded: Folded, images: Tensor) -> float:
    """How far the folded network with one eps for all norms is from the model, over each image's largest value."""
    twin: Any = copy.deepcopy(encoder)
    twin.shortcut = Shortcuts(Decay(), encoder.depth).to(images)
    twin.load_state_dict({**folded.state, "shortcut.alpha": twin.shortcut.alpha})
    for norm in norms_of(twin, twin.norm):
        norm.eps = folded.eps
    ours, theirs = encoder(images).flatten(1), twin(images).flatten(1)
    theirs = theirs * (folded.left if isinstance(encoder.norm, nn.Identity) else 1.0)
    return float(((ours - theirs).abs().amax(1) / ours.abs().amax(1)).max())


def fold_resnet(model: ResNet) -> Folded:
    """A ResNet with ordinary shortcuts, exactly: convolutions and relu carry any positive scale through.

    A projection may change the scale of the stream, so that every stage has its own gauge: each ends at its true scale.
    """
    alphas = model.shortcut.alpha.detach().double().cpu()
    scale = model.shortcut.decay.branch_scale
    state = {k: v.detach().cpu().clone() for k, v in model.state_dict().items() if "shortcut." not in k}
    state = {k: v.double() if v.is_floating_point() else v for k, v in state.items()}
    last = "bn2" if model.block == "basic" else "bn3"
    before, first = 1.0, 0  # scale of the stream as a stage takes it over
    for i, count in enumerate(model.stages):
        stage: Any = getattr(model, f"layer{i + 1}")
        own = alphas[first : first + count]
        projected = stage[0].downsample is not None
        _check(own[1:] if projected else own, first + projected, positive=True)
        c = torch.ones(count + 1, dtype=torch.float64)  # c[j] belongs to the input of block j, and c[count] = 1
        for j in range(count - 1, 0, -1):
            c[j] = c[j + 1] / own[j]
        c[0] = before if projected else c[1] / own[0]
        if i == 0 and not projected:
            for part in ("weight", "bias"):
                state[f"bn1.{part}"] /= c[0]
        for j in range(count):
            name = f"layer{i + 1}.{j}"
            state[f"{name}.conv1.weight"] *= c[j]
            for part in ("weight", "bias"):
                state[f"{name}.{last}.{part}"] *= scale / c[j + 1]
            if j == 0 and projected:
                state[f"{name}.downsample.0.weight"] *= c[0]
                for part in ("weight", "bias"):
                    state[f"{name}.downsample.1.{part}"] *= own[0] / c[1]
        first += count
    dtype = model.conv1.weight.dtype
    return Folded({k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}, model.bn1.eps, ())


def _check(alphas: Tensor, first: int = 0, positive: bool = False) -> None:
    for k, alpha in enumerate(alphas.tolist(), first):
        if not abs(alpha) > 0 or abs(alpha) == float("inf"):
            raise ExportError(f"step {k} has alpha = {alpha:g}: an ordinary residual network always keeps its stream")
        if positive and alpha < 0:
            raise ExportError(f"step {k} has learned alpha = {alpha:.3g}: relu lets no negative scale through")
    if abs(float(alphas.prod())) < SMALLEST:
        raise ExportError(
            f"alpha_eff is {float(alphas.prod()):.2g}: folded weights would leave the range of float32 "
            f"(least: {SMALLEST:g}); onnx, torch-export and safetensors keep the alphas as they are"
        )
