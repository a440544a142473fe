"""Residual networks of one width from end to end, as Residual Alignment was found in (Li and Papyan 2023)."""

from dataclasses import asdict
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.nn.shortcut import Decay, Shortcuts
from residua.nn.stream import Step, Tap, scaled, walk
from residua.nn.vit import expect_images, pair

Kind = Literal["resmlp", "resconv", "resconv_down"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class UniformBlock(nn.Module):
    """The branch `F` of `relu(alpha * shortcut(x) + F(x))`: two linear layers or 3 x 3 convolutions, ReLU between.

    The last weight starts scaled by `scale`. With `norm` each layer has a batch norm instead of a bias.
    """

    def __init__(self, kind: Kind, inputs: int, outputs: int, stride: int, scale: float, norm: bool) -> None:
        super().__init__()
        self.layer1, self.norm1 = _layer(kind, inputs, outputs, stride, norm), _norm(kind, outputs, norm)
        self.layer2, self.norm2 = _layer(kind, outputs, outputs, 1, norm), _norm(kind, outputs, norm)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        with torch.no_grad():
            self.layer2.weight.mul_(scale)

    def branch(self, x: Tensor) -> Tensor:
        return self.norm2(self.layer2(F.relu(self.norm1(self.layer1(x)))))


class UniformNet(nn.Module):
    """Stem, `depth` equal residual blocks with fading shortcuts, mean over the image, linear head.

    `x <- relu(alpha_k * x + F_k(x))`. `kind` is "resmlp" (fully connected, images are vectors), "resconv" (3 x 3
    convolutions that keep the image's size) or "resconv_down" (the block in the middle halves the size and doubles
    the channels). Without shortcuts: `alpha_min=0, schedule="constant"`. There is no normalisation unless `norm` asks
    for batch norm; branches start at a size that lets steps about keep that of their stream,
    `max(depth^-1/2, (1 - alpha^2)^1/2)` of He's.
    """

    def __init__(
        self,
        kind: Kind = "resmlp",
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        depth: int = 16,
        width: int = 128,
        norm: bool = False,
        decay: Decay | None = None,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}")
        if min(num_classes, in_chans, width, depth) < 1:
            raise ValueError(
                f"depth {depth}, width {width}, num_classes {num_classes} and in_chans {in_chans} must be at least 1"
            )
        self.kind: Kind = kind
        self.img_size, self.in_chans, self.num_classes = pair(img_size), in_chans, num_classes
        self.depth, self.width, self.norm = depth, width, norm
        self.preprocessing: Any = None
        self.grad_checkpointing = False
        self.classes: list[str] | None = None

        self.shortcut = Shortcuts(decay or Decay(), depth, sublayers=1)
        inputs = in_chans * self.img_size[0] * self.img_size[1] if kind == "resmlp" else in_chans
        self.stem = nn.Sequential(_layer(kind, inputs, width, 1, norm), _norm(kind, width, norm), nn.ReLU())
        self.blocks = nn.ModuleList(self._block(i) for i in range(depth))
        self.embed_dim = 2 * width if kind == "resconv_down" else width
        self.head = nn.Linear(self.embed_dim, num_classes)

    def _block(self, i: int) -> UniformBlock:
        middle = self.depth // 2 if self.kind == "resconv_down" else self.depth
        inputs, outputs = (self.width * (2 if late else 1) for late in (i > middle, i >= middle))
        alpha = float(self.shortcut.alpha[i].detach())
        scale = max(self.depth**-0.5, (1 - alpha**2) ** 0.5)
        return UniformBlock(self.kind, inputs, outputs, 2 if i == middle else 1, scale, self.norm)

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        names = "img_size in_chans num_classes depth width norm"
        fields = {name: getattr(self, name) for name in names.split()}
        return {"name": self.kind, **fields, **asdict(self.shortcut.decay)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        if enable and self.norm:
            raise ValueError("blocks with batch norm are not recomputed: they would count their statistics twice")
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Which parameters make a layer, in timm's words."""
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> stream (B, width) or (B, width, H, W) before the first step."""
        expect_images(images, self.in_chans)
        if self.kind != "resmlp":
            return self.stem(images)
        if images.shape[2:] != self.img_size:
            height, width = self.img_size
            raise ValueError(f"images of {images.shape[2]} x {images.shape[3]} px given; this takes {height} x {width}")
        return self.stem(images.flatten(1))

    def steps(self) -> list[Step]:
        """One step a block."""
        blocks: Any = self.blocks
        steps = [
            Step(f"blocks.{i}", block.branch, alpha, shortcut=block.downsample, after=F.relu)
            for i, (block, alpha) in enumerate(zip(blocks, self.shortcut.alpha.unbind(0)))
        ]
        return scaled(steps, self.shortcut.decay.branch_scale)

    def forward_features(self, images: Tensor, tap: Tap | None = None, keep: Tensor | None = None) -> Tensor:
        """Images -> the stream after the last block. `keep` (B, depth) scales branches image by image."""
        return walk(self.steps(), self.embed(images), tap, keep, recompute=self.grad_checkpointing)

    def pooled(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Features (B, D) that the head sees."""
        x = self.forward_features(images, keep=keep)
        return x if self.kind == "resmlp" else x.mean((2, 3))

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits (B, classes)."""
        return self.head(self.pooled(images, keep))


def _layer(kind: Kind, inputs: int, outputs: int, stride: int, norm: bool) -> nn.Linear | nn.Conv2d:
    """He-normal; a bias only where no norm follows."""
    layer: nn.Linear | nn.Conv2d
    if kind == "resmlp":
        layer = nn.Linear(inputs, outputs, bias=not norm)
    else:
        layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not norm)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _norm(kind: Kind, width: int, norm: bool) -> nn.Module:
    if not norm:
        return nn.Identity()
    return nn.BatchNorm1d(width) if kind == "resmlp" else nn.BatchNorm2d(width)
