"""A small encoder and small data sets."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from residua.data import Preprocessing, Splits, load
from residua.data.arrays import ArraySource
from residua.evaluate.extractor import Extractor
from residua.nn import MAE, ViT, create_model
from residua.train.checkpoint import write_checkpoint


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def vit() -> ViT:
    """Three blocks with a final norm, for 16 px colour images."""
    model = create_model("vit", img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2, alpha_min=0.7)
    assert isinstance(model, ViT)
    torch.nn.init.normal_(model.norm.weight, 1.0, 0.5)
    return model


@pytest.fixture
def mae() -> MAE:
    """For the digits: one channel, 8 px, zero-initialised branches."""
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "decoder_embed_dim": 16, "decoder_depth": 1}
    model = create_model("mae_vit", img_size=8, patch_size=2, in_chans=1, decoder_num_heads=2, **sizes)
    assert isinstance(model, MAE)
    return model


@pytest.fixture(scope="session")
def digits() -> Splits:
    return load("digits")


@pytest.fixture
def noise() -> Splits:
    """Random 16 x 20 px colour images: 50 for training, 21 for testing, three classes."""
    rng = np.random.default_rng(0)

    def part(split: str, n: int) -> ArraySource:
        pixels = rng.integers(0, 256, (n, 16, 20, 3), dtype=np.uint8)
        return ArraySource("noise", split, pixels, classes=["a", "b", "c"], labels=np.arange(n) % 3)

    return Splits("noise", part("train", 50), part("test", 21))


class Small(nn.Module):
    """A network in place of Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x / 255)).mean([2, 3])


@pytest.fixture
def small() -> Extractor:
    """Its features, as a set of images is compared by them; with other weights each time."""
    return Extractor("small", Small())


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """A small encoder, for commands that take an extractor by its path."""
    model = create_model("vit", img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1)
    model.preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    write_checkpoint(tmp_path / "network", 1, model, {})
    return tmp_path / "network"
