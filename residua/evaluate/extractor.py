"""What turns images into the features that sets of images are compared by.

| name | features |
|---|---|
| `inception` | the ones of FID and KID, see `residua.evaluate.inception` |
| `timm:NAME` | pooled features of a timm model, its published weights or a file's |
| a run or checkpoint | of an encoder trained here |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.adapt import encoder_of
from residua.adapt.folder import from_timm
from residua.data import Batch, Preprocessing

from .cache import weights_hash
from .featureset import Readout
from .inception import FEATURES, load_inception
from .reading import EncoderReader, check_readout, resolve_layers
from .torchscript import is_torchscript

GREY = (0.299, 0.587, 0.114)
"""What the colours of an image weigh where a network sees one channel."""


@dataclass(frozen=True)
class Extractor:
    """A network with what to call it."""

    name: str
    module: nn.Module
    """uint8 images (B, 3, H, W) -> features (B, D)."""
    frechet: str = "Frechet distance"
    """What the Frechet distance in its features is called."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the features depend on beside the weights: input size, layer, ..."""
    notes: tuple[str, ...] = ()
    """What a reader of its scores should know."""

    @property
    def inception(self) -> bool:
        """Whether distances in its features are FID and KID."""
        return self.frechet == "FID"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Changes when the features do."""
        from residua import __version__

        return {"weights": weights_hash(self.module), "residua": __version__, **self.about}


def open_extractor(
    name: str = "inception", weights: str | Path | None = None, *, readout: Readout = "tokens", layer: int = -1
) -> Extractor:
    """By name, as the table above has it; `readout` and `layer` are of an encoder trained here."""
    if name == "inception":
        return inception_extractor(weights)
    if name.startswith("timm:"):
        return timm_extractor(name.removeprefix("timm:"), weights)
    if weights is not None:
        raise ValueError(f"a file of weights is for inception and timm:NAME; {name} brings its own")
    path = Path(name).expanduser()
    if path.is_file() and is_torchscript(path):
        raise ValueError(
            f"the extractor {name} is a TorchScript file, a program, which is not run: of the Inception of 2015-12-05 "
            f"the numbers are read, as weights of the extractor inception (residua score --weights {name})"
        )
    if not path.exists():
        raise ValueError(f"there is no extractor {name!r}: give inception, timm:NAME, or a run")
    from residua.train.checkpoint import load

    return encoder_extractor(load(path), name, readout=readout, layer=layer)


def inception_extractor(weights: str | Path | None = None) -> Extractor:
    """The one of FID."""
    model = load_inception(weights)
    about: dict[str, Any] = {"input": "TensorFlow 1 bilinear to 299 px", "features": FEATURES}
    if model.published:
        return Extractor("Inception 2015-12-05", model, "FID", about)
    warning = f"{weights} does not hold the weights of 2015-12-05: this distance is comparable with no published FID"
    return Extractor(f"Inception with weights {Path(str(weights)).name}", model, about=about, notes=(warning,))


def encoder_extractor(
    model: nn.Module, name: str = "encoder", *, readout: Readout = "tokens", layer: int = -1
) -> Extractor:
    """Pooled tokens of an encoder trained here, whose preprocessing travels with it."""
    try:
        encoder = encoder_of(model)
    except TypeError as error:
        raise ValueError(f"{name} cannot extract features: {error}") from error
    pre = getattr(model, "preprocessing", None) or encoder.preprocessing
    if pre is None:
        raise ValueError(f"{name} does not say how its images are normalised: set model.preprocessing")
    (block,) = resolve_layers([layer], encoder.depth)
    reader = EncoderReader(encoder, [block], check_readout(readout))
    about = {"config": encoder.config, "preprocessing": pre.to_dict(), "readout": readout, "layer": block}
    return Extractor(
        f"{name} (layer {block}, {readout}, {_side(pre)})",
        _Prepared(model, pre, lambda x: reader(x)[block]),
        about=about,
    )


def timm_extractor(name: str, weights: str | Path | None = None) -> Extractor:
    """Pooled features of a timm model with its own preprocessing."""
    import timm
    from timm.data import resolve_model_data_config

    overlay = None if weights is None else {"file": str(Path(weights).expanduser())}
    if weights is not None and not Path(weights).expanduser().is_file():
        raise ValueError(f"there are no weights at {weights}")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
        raise ValueError(f"timm has no model {name!r}" + (f"; near it are {', '.join(near)}" if near else ""))
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0, pretrained_cfg_overlay=overlay).eval()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"timm:{name}: its weights could not be had ({error}); give a file of them, --weights FILE (of residua "
            "diffuse and sweep --fid-weights FILE)"
        ) from error
    config = resolve_model_data_config(model)
    pre = from_timm(config, tuple(config["input_size"][1:]), 3)
    about = {"timm": name, "preprocessing": pre.to_dict()}
    return Extractor(f"timm:{name} ({_side(pre)})", _Prepared(model, pre, model), about=about)


class _Prepared(nn.Module):
    """A network behind its own preprocessing."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if preprocessing.in_chans not in (1, 3):
            raise ValueError(f"the network takes {preprocessing.in_chans} channels; images to score have three")
        self.model, self.preprocessing, self.compute = model, preprocessing, compute

    def forward(self, images: Tensor) -> Tensor:
        p = self.preprocessing
        if p.in_chans == 1:
            weights = images.new_tensor(GREY, dtype=torch.float32)
            images = torch.einsum("bchw,c->bhw", images.float(), weights).round().to(torch.uint8)[:, None]
        sizes = torch.full((len(images), 2), images.shape[2], device=images.device)
        sizes[:, 1] = images.shape[3]
        batch = Batch(images, sizes, torch.arange(len(images), device=images.device))
        return self.compute(p.view(batch)).flatten(1)


def _side(pre: Preprocessing) -> str:
    height, width = pre.img_size
    return f"{height} px" if height == width else f"{height} x {width} px"
