"""Thirty lines of PyTorch against the network itself."""

from typing import Any

import pytest
import torch

import residua
from residua.export.plain import tokens


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("shortcuts", [{"alpha_min": 0.5}, {"control": "branch"}, {"control": "both"}])
@torch.no_grad()
def test_the_plain_text_computes_what_an_encoder_does(shortcuts: dict[str, Any], final_norm: bool) -> None:
    model: Any = residua.create_model(
        "vit", img_size=(8, 16), patch_size=4, embed_dim=24, depth=3, num_heads=3, mlp_ratio=2, norm_eps=1e-3,
        final_norm=final_norm, **shortcuts,
    ).double()  # fmt: skip
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.3)
    images = torch.randn(2, 3, 8, 16, dtype=torch.float64)
    scale = model.shortcut.decay.branch_scale
    assert (scale == 1) == ("control" not in shortcuts)
    expected = model(images)
    torch.testing.assert_close(tokens(model.state_dict(), images, 3, 1e-3, scale), expected)
    whole = {f"encoder.{name}": value for name, value in model.state_dict().items()} | {"decoder.norm.weight": images}
    torch.testing.assert_close(tokens(whole, images, 3, 1e-3, scale), expected)  # of an autoencoder
