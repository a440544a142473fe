"""Pretrained autoencoders of the diffusers library, whose latents a diffusion model may live in instead of pixels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.data.errors import DataError
from residua.missing import pip_install

KINDS = ("AutoencoderKL", "AutoencoderTiny")
COLOUR = 3
"""Channels of the images that can be encoded."""
_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")  # OWNER/NAME


@dataclass(frozen=True)
class LatentSpace:
    """What is to be known of an autoencoder without opening it; it travels with the model trained on its latents."""

    name: str
    """Of a model on the Hugging Face hub, or a folder."""
    channels: int
    factor: int
    """Side of the image over side of the latents."""
    scale: float
    """Latents are `(encoded - shift) * scale`."""
    shift: float
    weights: str
    """Hash of the weights, and of the statistics of its latents where it has them."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Autoencoder:
    """Images in [-1, 1] to latents and back; `model` has diffusers' `encode`, `decode` and `config`."""

    def __init__(self, model: Any, name: str) -> None:
        config = model.config
        channels = _setting(config, "in_channels")
        if channels not in (None, COLOUR):
            raise DataError(f"the autoencoder {name} takes {channels}-channel images; expected one that takes {COLOUR}")
        statistics = [_setting(config, f"latents_{what}") for what in ("mean", "std")]
        if statistics.count(None) == 1:
            raise DataError(f"the autoencoder {name} has one of latents_mean and latents_std; expected both or neither")
        scale, shift = (_setting(config, f"{what}_factor") for what in ("scaling", "shift"))
        probe = torch.zeros(1, COLOUR, 64, 64, device=next(model.parameters()).device)
        self.model = model.eval().requires_grad_(False)
        self.center, self.spread = (
            probe.new_tensor(neutral if own is None else own).view(-1, 1, 1)
            for own, neutral in zip(statistics, ([0.0], [1.0]))
        )
        mean, _ = self.moments(probe)
        self.space = LatentSpace(
            name, mean.shape[1], 64 // mean.shape[2], 1.0 if scale is None else scale, shift or 0.0,
            _hash(model, statistics),
        )  # fmt: skip

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and deviation (B, C, h, w) of the encoded images, unscaled; no deviation where encoding is certain.

        Where the autoencoder says how each channel of its latents is distributed, in those units.
        """
        out = self.model.encode(images)
        if hasattr(out, "latent_dist"):
            mean, std = out.latent_dist.mean.float(), out.latent_dist.std.float()
            return (mean - self.center) / self.spread, std / self.spread
        return (out.latents.float() - self.center) / self.spread, None

    def scaled(self, latents: Tensor) -> Tensor:
        """As a diffusion model sees them."""
        return (latents - self.space.shift) * self.space.scale

    def encode(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1] to the mean of their latents, scaled."""
        return self.scaled(self.moments(images)[0])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents to images (B, 3, H, W), about in [-1, 1]."""
        encoded = (latents / self.space.scale + self.space.shift) * self.spread + self.center
        return self.model.decode(encoded).sample.float()

    def to(self, device: torch.device | str) -> Autoencoder:
        self.model.to(device)
        self.center, self.spread = self.center.to(device), self.spread.to(device)
        return self


def open_autoencoder(name: str | LatentSpace, device: torch.device | str = "cpu") -> Autoencoder:
    """An autoencoder by name or folder; of a `LatentSpace`, with the weights that it names."""
    wanted = name if isinstance(name, LatentSpace) else None
    found = _open(wanted.name if wanted else str(name)).to(device)
    if wanted is not None and found.space.weights != wanted.weights:
        raise DataError(
            f"the autoencoder {wanted.name} has other weights than the one that this model was trained with "
            f"({found.space.weights}, not {wanted.weights})"
        )
    return found


@lru_cache(maxsize=1)
def _open(name: str) -> Autoencoder:
    try:
        import diffusers
    except ImportError as error:
        raise DataError(
            f"the autoencoder {name} is read by the diffusers library, which is not installed: "
            f"{pip_install('diffusers')}"
        ) from error
    folder = Path(name).expanduser()
    if not folder.exists() and not _HUB.fullmatch(name):
        raise DataError(f"there is no autoencoder at {folder.absolute()}: {_remedy(folder)}")
    where = str(folder.resolve()) if folder.exists() else name
    problems = []
    for place in ({}, {"subfolder": "vae"}):
        try:
            config = diffusers.AutoencoderKL.load_config(where, **place)
            kind = config.get("_class_name") if isinstance(config, dict) else None
            if kind not in KINDS:
                problems.append(f"{kind or 'something else'}, expected {' or '.join(KINDS)}")
                continue
            model = getattr(diffusers, kind).from_pretrained(where, **place)
            return Autoencoder(model, where)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            problems.append(str(error).splitlines()[0])
    sought = "" if folder.exists() else f"; as a folder it would be {folder.absolute()}: {_remedy(folder)}"
    raise DataError(f"{name} cannot be opened as an autoencoder: {problems[0]}{sought}")


def _remedy(folder: Path) -> str:
    """What to do about an autoencoder that is not there, or no longer where a run expects it."""
    link = f"ln -s NEWPLACE {folder.absolute()}"
    return (
        "give a folder that is there, or a name on the Hub such as stabilityai/sd-vae-ft-ema; if it has moved since a "
        f"run began, link it there ({link}), or sample and score with --latents NEWPLACE"
    )


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _hash(model: Any, statistics: Sequence[Any]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for key, value in sorted(model.state_dict().items()):
        state.update(key.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
    if any(own is not None for own in statistics):
        state.update(repr([[float(value) for value in own] for own in statistics]).encode())
    return state.hexdigest()
