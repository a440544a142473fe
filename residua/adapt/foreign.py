"""Any image model as an encoder whose layers can be read: tokens after every block, whatever the blocks are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, nn

from residua.data import Preprocessing
from residua.nn import encoder_of as own_encoder_of
from residua.nn.stream import Tap

from .block import SCALE
from .example import evaluating
from .generic import ASIDE as CLASS_ATTENTION
from .model import Located, as_called, blocks_of, fade_like, is_own, shortcuts, tapped, unfade, unwrapped
from .names import SOURCE, open_model

_NORMED = {
    "torchvision.models.vision_transformer.VisionTransformer": "encoder",
    "torchvision.models.swin_transformer.SwinTransformer": "norm",
}
"""Models that give out logits alone -> the module whose output is the last layer, normed."""


def encoder_of(model: nn.Module) -> Any:
    """What of a model is read layer by layer: our encoder, or a foreign model seen as one."""
    if is_own(model):
        return own_encoder_of(unwrapped(model))
    return Foreign(model)


class Foreign(nn.Module):
    """A model of another library with what reading its layers needs of an encoder.

    Streams come as tokens (B, T, D): feature maps, (B, C, H, W) or (B, H, W, C), as one token a position. A layer is
    the stream after a block; the last one is what the model itself makes of it, normed where it norms.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.preprocessing = preprocessing_of(model)
        self.model = model = unwrapped(model)
        self.img_size, self.in_chans = self.preprocessing.img_size, self.preprocessing.in_chans
        example = torch.zeros(2, self.in_chans, *self.img_size)
        self.located: list[Located] = _read_blocks(model, example.to(next(model.parameters())))
        self.depth = len(self.located)
        self.channels = [_widths(at.block) for at in self.located]
        self.channels_last: bool = getattr(model, "output_fmt", "") == "NHWC"  # as timm's models say
        self.patch_size = (1, 1)  # images of any size may be tried
        self.num_prefix_tokens = prefix_tokens(model)
        late = any(type(module).__name__ in CLASS_ATTENTION for module in model.modules())
        self.inner_prefix_tokens = 0 if late else self.num_prefix_tokens
        """Of the layers before the last: a class token may join after the blocks."""

    @property
    def config(self) -> dict[str, Any]:
        """What features depend on beside weights and buffers."""
        scales = [getattr(at.block, SCALE, 1.0) for at in self.located]  # alphas are buffers, these are not
        late = {"late": True} if self.inner_prefix_tokens != self.num_prefix_tokens else {}
        return {"class": type(self.model).__qualname__, "source": _source(self.model), "scales": scales, **late}

    @torch.no_grad()
    def widths(self) -> list[int]:
        """Of every layer: blocks of one model may differ."""
        found: dict[str, Tensor] = {}
        weight = next(self.model.parameters())
        images = torch.zeros(1, self.in_chans, *self.img_size, device=weight.device, dtype=weight.dtype)
        with evaluating(self.model):
            last = self.forward_features(images, found.__setitem__)
        return [x.shape[-1] for x in [*found.values()][:-1]] + [last.shape[-1]]

    def forward_features(self, images: Tensor, tap: Tap | None = None, keep: Tensor | None = None) -> Tensor:
        """Images -> the last layer's tokens; `tap` sees those of every block as `blocks.I.mlp`."""
        images = images.to(next(self.model.parameters()).dtype)
        if images.shape[1] == 1 and self.in_chans > 1:
            images = images.expand(-1, self.in_chans, -1, -1)

        def seen(layer: int, x: Tensor) -> None:
            if tap is not None:
                tap(f"blocks.{layer}.mlp", self._tokens(layer, x))

        return self._tokens(self.depth - 1, self._streams(images, seen))

    def _streams(self, images: Tensor, seen: Callable[[int, Tensor], None]) -> Tensor:
        """The last layer as the model shapes it; `seen` is given what every block makes."""
        numbers = {at.name: i for i, at in enumerate(self.located)}
        last: list[Tensor] = []

        def block(name: str, x: Tensor) -> None:
            last[:] = [x]
            seen(numbers[name], x)

        with tapped(self.model, block, self.located):
            out = _run(self.model, images)
        return last[0] if out is None else out

    def _tokens(self, layer: int, x: Tensor) -> Tensor:
        return as_tokens(x, self.channels[layer], self.channels_last)

    @torch.no_grad()
    def grid(self, layer: int, img_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of what a layer holds of an image of this size, its tokens being row after row of them."""
        name, weight = type(self.model).__name__, next(self.model.parameters())
        if any(hasattr(module, "reroll") for module in self.model.modules()):
            raise ValueError(
                f"{name} does not keep its tokens in the order of the image: they cannot be laid out as one"
            )
        found: dict[int, Tensor] = {}
        images = torch.zeros(1, self.in_chans, *img_size, device=weight.device, dtype=weight.dtype)
        with evaluating(self.model):
            last = self._streams(images, found.__setitem__)
        x = last if layer == self.depth - 1 else found[layer]
        prefix = self.num_prefix_tokens if layer == self.depth - 1 else self.inner_prefix_tokens
        count = self._tokens(layer, x).shape[1] - prefix
        last_channels = x.ndim == 4 and ends_in_channels(x, self.channels[layer], self.channels_last)
        shape = x.shape[1:3] if last_channels else x.shape[2:]
        rows, columns = shape if x.ndim == 4 else _grid_of(self.model, count, img_size)
        if len(x) != 1 or count < 2 or rows * columns != count:
            raise ValueError(f"layer {layer} of {name} is no grid over the image ({tuple(x.shape)}): choose another")
        return rows, columns

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images)


def _read_blocks(model: nn.Module, images: Tensor) -> list[Located]:
    """The blocks that reading a model calls, in the order in which it does."""
    located = blocks_of(model, images)
    called = as_called(model, located, lambda: _run(model, images))
    if not called:
        raise ValueError(
            f"{type(model).__name__} calls none of its {len(located)} residual blocks: no layer can be read"
        )
    return called


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """What a foreign model was given, by `open_model` or by hand."""
    own: Any = getattr(model, "preprocessing", None) or getattr(unwrapped(model), "preprocessing", None)
    if own is None and hasattr(getattr(model, "config", None), "vocab_size"):
        raise ValueError(f"{type(model).__name__} reads text: what is measured here are layers of models of images")
    if own is None:
        raise ValueError(
            f"{type(model).__name__} does not say what images it takes: set model.preprocessing, a "
            "residua.data.Preprocessing with image size, mean and std"
        )
    return own


def _widths(block: nn.Module) -> set[int]:
    """What the channels of a block's stream may count, by its norms and convolutions."""
    norms = {module.normalized_shape[-1] for module in block.modules() if isinstance(module, nn.LayerNorm)}
    return norms or {module.out_channels for module in block.modules() if isinstance(module, nn.Conv2d)}


def as_tokens(x: Tensor, widths: Set[int] = frozenset(), channels_last: bool = False) -> Tensor:
    """A stream as (B, T, D). Which axis of a map is as wide as its channels may be tells them from positions; where
    both ends are, or neither, `channels_last` does."""
    if x.ndim == 2:
        return x.unsqueeze(1)
    if x.ndim != 4:
        return x
    return x.flatten(1, 2) if ends_in_channels(x, widths, channels_last) else x.flatten(2).transpose(1, 2)


def ends_in_channels(x: Tensor, widths: Set[int], channels_last: bool) -> bool:
    """Whether a map is (B, H, W, C), not (B, C, H, W)."""
    ends = [n in widths for n in (x.shape[1], x.shape[-1])]
    return ends[1] if ends[0] != ends[1] else channels_last


def _grid_of(model: Any, count: int, img_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of so many tokens: by the patches that the model tells of, or of the image's shape."""
    height, width = img_size
    for part in (getattr(model, "patch_embed", None), getattr(_body(model), "config", None), model):
        side = getattr(part, "patch_size", None)
        if isinstance(side, int | tuple | list):
            high, wide = (side, side) if isinstance(side, int) else side
            if (height // high) * (width // wide) == count:
                return height // high, width // wide
    rows = round(math.sqrt(count * height / width))
    return rows, round(rows * width / height)


def _run(model: Any, images: Tensor) -> Tensor | None:
    """The model's own last features; None where it only gives out logits."""
    if hasattr(model, "forward_features"):
        out = model.forward_features(images)
        return out if isinstance(out, Tensor) else None
    normed = _NORMED.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if normed is not None:
        found: list[Tensor] = []
        handle = getattr(model, normed).register_forward_hook(lambda _, __, y: found.append(y))
        try:
            model(images)
        finally:
            handle.remove()
        return found[-1]
    base = _body(model)
    config = getattr(base, "config", None)
    side = getattr(config, "image_size", None)
    resized = isinstance(side, int) and tuple(images.shape[2:]) != (side, side)
    resizes = resized and type(base).__module__.startswith("transformers.")
    options = {"interpolate_pos_encoding": True} if resizes else {}
    if hasattr(config, "mask_ratio"):
        return _unmasked(base, images, options)
    out = base(images, **options)
    return getattr(out, "last_hidden_state", None)


def _body(model: Any) -> Any:
    """A model of transformers without its head."""
    return model.base_model if "For" in type(model).__name__ and hasattr(model, "base_model") else model


def _unmasked(base: Any, images: Tensor, options: dict[str, Any]) -> Tensor:
    """A masked autoencoder's encoder on whole images, patches in their order."""
    before, base.config.mask_ratio = base.config.mask_ratio, 0.0
    try:
        grid = math.prod(n // base.config.patch_size for n in images.shape[2:])
        noise = torch.arange(grid, device=images.device, dtype=torch.float32).expand(len(images), -1)
        return base(images, noise=noise, **options).last_hidden_state
    finally:
        base.config.mask_ratio = before


def prefix_tokens(model: Any) -> int:
    """Tokens before those of the patches: class token, distillation token, registers."""
    module = type(model).__module__
    if hasattr(model, "num_prefix_tokens") or module.startswith("timm."):
        return int(getattr(model, "num_prefix_tokens", 0))
    if module.startswith("torchvision."):
        return int(hasattr(model, "class_token"))
    base = _body(model)
    ends = ("cls_token", "class_embedding", "distillation_token")
    tokens = sum(name.endswith(ends) for name, _ in base.named_parameters())
    registers = max(int(getattr(of, "num_register_tokens", 0) or 0) for of in (base, getattr(base, "config", None)))
    return tokens + registers


def _source(model: nn.Module) -> dict[str, Any] | None:
    return getattr(model, SOURCE, None)


# ---------------------------------------------------------------- the same, untrained


def untrained(model: nn.Module) -> nn.Module:
    """The same architecture at random weights, drawn as its library draws them where it was opened by name.

    Branches that start at zero are drawn at random instead: otherwise the network would be its shortcuts alone.
    """
    source = _source(model)
    if source is not None and not _reads_files(source):
        twin = open_model(**source, pretrained=False)
    else:
        twin = unfade(copy.deepcopy(model))
        for module in twin.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        known = {id(p) for m in twin.modules() if hasattr(m, "reset_parameters") for p in m.parameters(recurse=False)}
        for p in twin.parameters():
            if id(p) not in known and p.ndim > 1:
                nn.init.normal_(p, std=0.02)
    _wake(twin)
    pre: Any = getattr(model, "preprocessing", None)
    twin.preprocessing = pre
    if shortcuts(model) is not None:
        fade_like(twin, model)
    return twin.eval()


def _reads_files(source: dict[str, Any]) -> bool:
    """Whether building the model again would need a folder or the Hub."""
    return "/" in source["name"]


@torch.no_grad()
def _wake(model: nn.Module) -> None:
    """Branches that end in zeros end in random numbers, their norms in ones."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not weight.any():
            nn.init.ones_(weight) if weight.ndim == 1 else nn.init.trunc_normal_(weight, std=0.02)
