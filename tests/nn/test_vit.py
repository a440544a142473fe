"""The vision transformer against timm's, and its parts against formulas."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import residua
from residua.nn import ViT
from residua.nn.vit import patch_grid, patchify, sincos_positions, unpatchify

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


def shaken(model: torch.nn.Module) -> Any:
    """Every parameter away from its initial value: biases and norms would hide a mistake at 0 and 1."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def timm_twin(vit: ViT) -> VisionTransformer:
    twin = VisionTransformer(
        img_size=vit.img_size, patch_size=vit.patch_size, in_chans=vit.in_chans, num_classes=0, global_pool="",
        embed_dim=vit.embed_dim, depth=vit.depth, num_heads=vit.num_heads, class_token=True,
    )  # fmt: skip
    weights = {k: v for k, v in vit.state_dict().items() if k != "shortcut.alpha"}
    twin.load_state_dict(weights)
    return twin.eval()


@pytest.mark.parametrize(
    "options",
    [{}, {"img_size": (24, 16), "in_chans": 1}, {"patch_size": (4, 8), "in_chans": 5, "num_heads": 4, "depth": 3}],
)
def test_equals_timm(options: dict[str, Any]) -> None:
    vit = shaken(residua.create_model("vit", **SMALL | options))
    images = torch.randn(3, vit.in_chans, *vit.img_size)
    torch.testing.assert_close(vit(images), timm_twin(vit)(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [16, (24, 16)])
def test_positions_interpolate_as_timms(trained: Any) -> None:
    vit = shaken(residua.create_model("vit", **SMALL | {"img_size": trained}))
    twin = timm_twin(vit)
    for height, width in ((24, 24), (32, 16), (8, 20)):
        images = torch.randn(2, 3, height, width)
        twin.set_input_size((height, width))
        torch.testing.assert_close(vit(images), twin(images), rtol=1e-5, atol=1e-5)
        twin = timm_twin(vit)


def test_interpolated_positions_keep_their_place() -> None:
    """Twice the side: the mean of each 2 x 2 cell is about the position of the patch it divides."""
    vit = residua.create_model("vit", **SMALL | {"img_size": 32})
    fine = vit.positions((16, 16))[0, 1:].reshape(1, 16, 16, 32).permute(0, 3, 1, 2)
    coarse = vit.pos_embed[0, 1:].reshape(1, 8, 8, 32).permute(0, 3, 1, 2)
    inner = (F.avg_pool2d(fine, 2) - coarse)[..., 2:-2, 2:-2]
    assert inner.abs().max() < 0.1
    assert torch.equal(vit.positions((16, 16))[:, 0], vit.pos_embed[:, 0])


def test_sincos_table_against_the_formula() -> None:
    rows, cols, dim = 3, 5, 16
    table = sincos_positions((rows, cols), dim).numpy()
    assert table.shape == (1, 16, dim)
    assert (table[0, 0] == 0).all()
    quarter = dim // 4
    for y in range(rows):
        for x in range(cols):
            got = table[0, 1 + y * cols + x]
            for i in range(quarter):
                omega = 1 / 10000 ** (i / quarter)
                expected = [np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)]
                np.testing.assert_allclose(got[i::quarter], expected, atol=1e-6)


def test_taps_give_every_sublayers_stream() -> None:
    vit = shaken(residua.create_model("vit", **SMALL, alpha_min=0.5))
    images, taps = torch.randn(2, 3, 16, 16), {}
    out = vit.forward_features(images, tap=taps.__setitem__)
    assert list(taps) == ["embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"]
    x = taps["embed"]
    patches = F.conv2d(images, vit.patch_embed.proj.weight, vit.patch_embed.proj.bias, stride=4)
    tokens = torch.cat([vit.cls_token.expand(2, -1, -1), patches.flatten(2).mT], dim=1) + vit.pos_embed
    torch.testing.assert_close(x, tokens, rtol=1e-5, atol=1e-5)
    alphas = [1, 1 - 0.5 / 3, 1 - 1 / 3, 0.5]
    for i, block in enumerate(vit.blocks):
        x = alphas[2 * i] * x + block.attn(block.norm1(x))
        torch.testing.assert_close(taps[f"blocks.{i}.attn"], x, rtol=1e-5, atol=1e-5)
        x = alphas[2 * i + 1] * x + block.mlp(block.norm2(x))
        torch.testing.assert_close(taps[f"blocks.{i}.mlp"], x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, vit.norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("control", ["branch", "both"])
def test_controls_scale_what_they_say(control: Any) -> None:
    vit = shaken(residua.create_model("vit", **SMALL, control=control, final_norm=False))
    images = torch.randn(2, 3, 16, 16)
    x, half = vit.embed(images), 0.5**0.5
    for block in vit.blocks:
        for branch in (block.attn_branch, block.mlp_branch):
            x = (half * x if control == "both" else x) + half * branch(x)
    torch.testing.assert_close(vit(images), x, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    vit = shaken(residua.create_model("vit", **SMALL, alpha_min=0.6)).train()
    other = copy.deepcopy(vit)
    other.set_grad_checkpointing()
    images = torch.randn(2, 3, 16, 16)
    kept = []
    for model in (vit, other):
        count = [0]

        def pack(t: Tensor, count: list[int] = count) -> Tensor:
            count[0] += 1
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(images).square().mean()
        kept.append(count[0])
        loss.backward()
    assert kept[1] < kept[0]  # it was in force
    for (name, p), q in zip(vit.named_parameters(), other.parameters()):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 8, "patch_size": 16}, r"8 x 8 is smaller than one patch \(16 x 16\)"),
        ({"img_size": (4, 16), "patch_size": 8}, "smaller than one patch"),
        ({"img_size": 30, "patch_size": 8}, "30 x 30 is not divisible by patch size 8 x 8; 32 x 32 would be"),
        ({"patch_size": 0}, "must be positive"),
        ({"embed_dim": 36, "num_heads": 5}, "width 36 is not divisible by 5 heads"),
        ({"embed_dim": 30, "num_heads": 3}, "multiple of 4"),
        ({"depth": 0}, "depth 0"),
        ({"in_chans": 0}, "in_chans 0"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residua.create_model("vit", **SMALL | options)


def test_wrong_images_are_refused() -> None:
    vit = residua.create_model("vit", **SMALL)
    with pytest.raises(ValueError, match=r"\(2, 1, 16, 16\) given; expected \(batch, 3, h, w\)"):
        vit(torch.randn(2, 1, 16, 16))
    with pytest.raises(ValueError, match=r"\(3, 16, 16\) given"):
        vit(torch.randn(3, 16, 16))
    with pytest.raises(ValueError, match="not divisible"):
        vit(torch.randn(2, 3, 18, 16))


@pytest.mark.parametrize(("height", "width", "patch"), [(16, 16, (4, 4)), (8, 24, (4, 8)), (6, 4, (3, 2))])
def test_patchify_against_loops(height: int, width: int, patch: tuple[int, int]) -> None:
    images = torch.randn(2, 3, height, width)
    patches = patchify(images, patch)
    grid = patch_grid((height, width), patch)
    ph, pw = patch
    for row in range(grid[0]):
        for col in range(grid[1]):
            cell = images[:, :, row * ph : (row + 1) * ph, col * pw : (col + 1) * pw]
            assert torch.equal(patches[:, row * grid[1] + col], cell.permute(0, 2, 3, 1).flatten(1))
    assert torch.equal(unpatchify(patches, patch, grid), images)


def test_names_give_sizes_and_keywords_override_them() -> None:
    small = residua.create_model("vit_small", img_size=32, patch_size=16, depth=1)
    assert (small.embed_dim, small.depth, small.num_heads) == (384, 1, 6)
    rebuilt = residua.create_model(**small.config)
    assert rebuilt.config == small.config
    assert [p.shape for p in rebuilt.parameters()] == [p.shape for p in small.parameters()]
    with pytest.raises(ValueError, match=r"did you mean.*vit_small"):
        residua.create_model("vit_smal")
    with pytest.raises(TypeError, match=r"vit_small.*colour"):
        residua.create_model("vit_small", colour=True)


@pytest.mark.parametrize(("name", "width", "heads", "depth"), [("tiny", 192, 3, 12), ("large", 1024, 16, 24)])
def test_named_sizes_have_timms_number_of_parameters(name: str, width: int, heads: int, depth: int) -> None:
    with torch.device("meta"):
        ours = residua.create_model(f"vit_{name}")
        twin = VisionTransformer(num_classes=0, pos_embed="none", embed_dim=width, num_heads=heads, depth=depth)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in twin.parameters())
    assert ours.num_heads == heads


def test_zero_init_starts_as_shortcuts_alone() -> None:
    vit = residua.create_model("vit", **SMALL, zero_init=True, alpha_min=0.5, final_norm=False)
    images = torch.randn(2, 3, 16, 16)
    product = float(residua.alphas(2, 0.5).prod())
    torch.testing.assert_close(vit(images), product * vit.embed(images))


def test_matrices_start_within_xaviers_bound() -> None:
    """That of a matrix for the patch embedding too."""
    vit = residua.create_model("vit", **SMALL | {"embed_dim": 512})
    linear = [m for m in vit.modules() if isinstance(m, torch.nn.Linear)]
    for layer in (vit.patch_embed.proj, *linear):
        matrix = layer.weight.detach().flatten(1)
        assert 0.99 < float(matrix.abs().max()) / (6 / sum(matrix.shape)) ** 0.5 < 1.0001
        assert not layer.bias.any()
