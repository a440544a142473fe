"""A ViT with a head against timm's, and branches dropped image by image."""

from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import residua
from residua.nn import Classifier, ViT
from residua.nn.classifier import pool

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}


def timms(readout: str) -> VisionTransformer:
    pooling = {"patches": {"global_pool": "avg", "fc_norm": True}, "cls": {"global_pool": "token", "fc_norm": False}}
    norm = partial(nn.LayerNorm, eps=1e-6)
    model = VisionTransformer(**SMALL, num_classes=5, norm_layer=norm, **pooling[readout]).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("readout", ["patches", "cls"])
def test_it_is_timms_classifier(readout: str) -> None:
    theirs = timms(readout)
    ours = residua.create_model("vit", **SMALL, num_classes=5, readout=readout).eval()
    names = {"fc_norm.": "norm.", "head.": "head.", "norm.": "norm."}
    state = {}
    for name, value in theirs.state_dict().items():
        part = next((new for old, new in names.items() if name.startswith(old)), None)
        state[f"encoder.{name}" if part is None else part + name.split(".")[-1]] = value
    missing, extra = ours.load_state_dict(state, strict=False)
    assert (missing, extra) == (["encoder.shortcut.alpha"], [])
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("readout", ["patches", "tokens", "cls"])
def test_the_head_sees_the_readout(readout: str) -> None:
    model = residua.create_model("vit", **SMALL, num_classes=5, readout=readout, alpha_min=0.6)
    assert isinstance(model, Classifier)
    images = torch.randn(2, 3, 16, 16)
    tokens = model.encoder(images)
    pooled = {"patches": tokens[:, 1:].mean(1), "tokens": tokens.mean(1), "cls": tokens[:, 0]}[readout]
    torch.testing.assert_close(model.pooled(images), model.norm(pooled))
    torch.testing.assert_close(model(images), model.head(model.norm(pooled)))
    assert model.config["readout"] == readout


def test_the_config_builds_it_again() -> None:
    model = residua.create_model("vit_nano", img_size=16, patch_size=4, num_classes=3, readout="cls", alpha_min=0.7)
    again = residua.create_model(**model.config)
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    assert residua.stream(again).alpha_eff == pytest.approx(float(residua.alphas(6, 0.7).prod()), rel=1e-5)


def test_the_head_starts_small_as_maes() -> None:
    head = residua.create_model("vit", **SMALL, num_classes=50).head
    assert 1.8e-5 < float(head.weight.detach().std()) < 2.2e-5
    assert not head.bias.any()


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="readout is 'mean'; choose one of tokens, patches, cls"):
        residua.create_model("vit", **SMALL, num_classes=5, readout="mean")
    with pytest.raises(ValueError, match="num_classes is 0"):
        residua.create_model("vit", **SMALL, num_classes=0)
    with pytest.raises(ValueError, match="final_norm=False"):
        Classifier(residua.create_model("vit", **SMALL), 5)


# ---------------------------------------------------------------- drop path


@pytest.fixture
def vit() -> ViT:
    model = residua.create_model("vit", **SMALL, alpha_min=0.5)
    assert isinstance(model, ViT)
    return model


def test_keeping_everything_changes_nothing(vit: ViT) -> None:
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(vit.forward_features(images, keep=torch.ones(3, 6)), vit(images))


def test_branches_are_scaled_image_by_image(vit: ViT) -> None:
    """As timm's DropPath does: a dropped branch leaves `alpha * x`, a kept one is divided by its probability."""
    x = torch.randn(3, 17, 32)
    keep = torch.tensor([[0.0, 1.25, 1, 1, 1, 1], [1.25, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    expected = x
    for k, step in enumerate(vit.steps()):
        expected = step.alpha * expected + keep[:, k, None, None] * step.branch(expected)
    taps: dict[str, Tensor] = {}
    torch.testing.assert_close(vit.run(x, taps.__setitem__, keep), expected)
    torch.testing.assert_close(taps["blocks.0.attn"][0], vit.shortcut.alpha[0] * x[0])


def test_branches_are_dropped_from_images_to_logits() -> None:
    model = residua.create_model("vit", **SMALL, num_classes=5, alpha_min=0.5)
    nn.init.normal_(model.head.weight)
    images, keep = torch.randn(2, 3, 16, 16), torch.tensor([[0.0, 1.25, 1, 1, 0, 1], [1.25, 0, 1, 0, 1, 1]])
    tokens = model.encoder.run(model.encoder.embed(images), keep=keep)
    torch.testing.assert_close(model.encoder.forward_features(images, keep=keep), tokens)
    torch.testing.assert_close(model(images, keep), model.head(model.norm(tokens[:, 1:].mean(1))))
    assert not torch.allclose(model(images, keep), model(images), atol=1e-3)


def test_dropping_goes_with_recomputing(vit: ViT) -> None:
    images, keep = torch.randn(3, 3, 16, 16), (torch.rand(3, 6) > 0.3) / 0.7
    grads = []
    for recompute in (False, True):
        vit.set_grad_checkpointing(recompute)
        vit.zero_grad()
        vit.forward_features(images, keep=keep).square().mean().backward()
        grads.append([p.grad.clone() for p in vit.parameters()])
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other)


def test_patches_come_after_all_that_is_no_patch_and_means_are_in_full_precision() -> None:
    tokens = 1 + 0.01 * torch.randn(2, 200, 8)
    short = tokens.bfloat16()
    for prefix in (0, 1, 5):
        found = pool(short, "patches", prefix)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, short[:, prefix:].double().mean(1).float())
    torch.testing.assert_close(pool(short, "tokens", 5), short.double().mean(1).float())


def test_there_is_no_mean_of_no_patches() -> None:
    with pytest.raises(ValueError, match="of 1 tokens 1 come before the patches"):
        pool(torch.randn(2, 1, 8), "patches", 1)


def test_a_patch_is_not_taken_for_a_class_token() -> None:
    with pytest.raises(ValueError, match="there is no class token"):
        pool(torch.randn(2, 4, 8), "cls", 0)
