"""Residual networks (He et al. 2016) whose shortcuts may fade. Parameter names are torchvision's."""

from dataclasses import asdict
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from residua.nn.shortcut import Decay, Shortcuts
from residua.nn.stream import Step, Tap, scaled, walk
from residua.nn.vit import expect_images, pair

BlockKind = Literal["basic", "bottleneck"]

RESNETS: dict[str, dict[str, Any]] = {
    "resnet18": {"block": "basic", "stages": (2, 2, 2, 2)},
    "resnet34": {"block": "basic", "stages": (3, 4, 6, 3)},
    "resnet50": {"block": "bottleneck", "stages": (3, 4, 6, 3)},
}
SMALL_IMAGE = 64  # px: up to here the stem keeps the resolution


class ResidualBlock(nn.Module):
    """The branch `F` of `relu(alpha * shortcut(x) + F(x))`, and the projection where the shape changes."""

    expansion = 1

    def __init__(self, in_chans: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_chans != out:
            self.downsample = nn.Sequential(_conv(in_chans, out, 1, stride), nn.BatchNorm2d(out))

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class BasicBlock(ResidualBlock):
    """Two 3 x 3 convolutions."""

    def __init__(self, in_chans: int, width: int, stride: int) -> None:
        super().__init__(in_chans, width, stride)
        self.conv1, self.bn1 = _conv(in_chans, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)

    def branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(x))


class Bottleneck(ResidualBlock):
    """1 x 1, 3 x 3 (which has the stride, as in torchvision) and 1 x 1 convolutions; four times as wide outside."""

    expansion = 4

    def __init__(self, in_chans: int, width: int, stride: int) -> None:
        super().__init__(in_chans, width, stride)
        self.conv1, self.bn1 = _conv(in_chans, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)

    def branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))


BLOCKS: dict[str, type[ResidualBlock]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """Stem, four stages of residual blocks with fading shortcuts, mean over the image, linear head.

    `x <- relu(alpha_k * shortcut(x) + F_k(x))`, k over all blocks; projections are scaled as identities are. The stem
    of images up to 64 px is a 3 x 3 convolution that keeps their size, that of larger ones torchvision's.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        block: BlockKind = "basic",
        stages: tuple[int, ...] | list[int] = (2, 2, 2, 2),
        width: int = 64,
        small_stem: bool | None = None,
        decay: Decay | None = None,
    ) -> None:
        super().__init__()
        if block not in BLOCKS:
            raise ValueError(f"block is {block!r}; choose one of {', '.join(BLOCKS)}")
        if len(stages) != 4 or min(stages) < 1:
            raise ValueError(f"stages are {tuple(stages)}; expected four numbers of blocks, such as 2 2 6 2")
        if min(num_classes, in_chans, width) < 1:
            raise ValueError(f"num_classes {num_classes}, in_chans {in_chans} and width {width} must be at least 1")
        self.img_size, self.in_chans, self.num_classes = pair(img_size), in_chans, num_classes
        self.block: BlockKind = block
        self.stages, self.width = tuple(stages), width
        self.small_stem = max(self.img_size) <= SMALL_IMAGE if small_stem is None else small_stem
        self.preprocessing: Any = None
        self.classes: list[str] | None = None
        self.grad_checkpointing = False

        self.shortcut = Shortcuts(decay or Decay(), sum(stages), sublayers=1)
        self.conv1 = _conv(in_chans, width, 3) if self.small_stem else _conv(in_chans, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for i, count in enumerate(self.stages):
            blocks = []
            for j in range(count):
                blocks.append(BLOCKS[block](channels, width << i, stride=2 if i and not j else 1))
                channels = (width << i) * BLOCKS[block].expansion
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.embed_dim = channels
        self.fc = nn.Linear(channels, num_classes)

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        names = "img_size in_chans num_classes block stages width small_stem"
        fields = {name: getattr(self, name) for name in names.split()}
        return {"name": "resnet", **fields, **asdict(self.shortcut.decay)}

    @property
    def head(self) -> nn.Linear:
        return self.fc

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        if enable:
            raise ValueError("blocks with batch norm are not recomputed: they would count their statistics twice")

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Which parameters make a layer, in timm's words."""
        return {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> stream (B, width, h, w) before the first step."""
        expect_images(images, self.in_chans)
        x = F.relu(self.bn1(self.conv1(images)))
        return x if self.small_stem else F.max_pool2d(x, 3, stride=2, padding=1)

    def steps(self) -> list[Step]:
        """One step a block."""
        blocks: list[tuple[str, Any]] = []
        for i in range(4):
            stage: Any = getattr(self, f"layer{i + 1}")
            blocks += [(f"layer{i + 1}.{j}", block) for j, block in enumerate(stage)]
        steps = [
            Step(name, block.branch, alpha, shortcut=block.downsample, after=F.relu)
            for (name, block), alpha in zip(blocks, self.shortcut.alpha.unbind(0))
        ]
        return scaled(steps, self.shortcut.decay.branch_scale)

    def forward_features(self, images: Tensor, tap: Tap | None = None, keep: Tensor | None = None) -> Tensor:
        """Images -> the last stage's maps (B, D, h, w). `keep` (B, blocks) scales branches image by image."""
        return walk(self.steps(), self.embed(images), tap, keep)

    def pooled(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Features (B, D) that the head sees."""
        return self.forward_features(images, keep=keep).mean((2, 3))

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits (B, classes)."""
        return self.fc(self.pooled(images, keep))


def _conv(in_chans: int, out_chans: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Without bias (a norm follows), He-normal over the outputs."""
    conv = nn.Conv2d(in_chans, out_chans, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
