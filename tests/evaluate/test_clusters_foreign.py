"""Models of other libraries are segmented too, wherever their layers are grids over the image."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import Block
from torch import nn

from residua import cli
from residua.adapt import Foreign, open_model
from residua.adapt.encoder import TimmViT
from residua.data import Preprocessing
from residua.evaluate.clusters import ColorReader, PatchReader, segment


def test_a_foreign_model_is_segmented_as_the_same_network_of_ours() -> None:
    vit = open_model("timm:test_vit", pretrained=False, img_size=(32, 48), num_classes=0)
    vit.preprocessing = Preprocessing((32, 48), (0.5,) * 3, (0.5,) * 3)
    ours = TimmViT(vit, {"encoder": "timm:test_vit", "img_size": (32, 48)}, final_norm=True, zero_init=False)
    ours.preprocessing = vit.preprocessing
    for layer in (0, -1):
        own, foreign = (segment(model, "shapes?train=40", layer=layer, max_images=8) for model in (ours, vit))
        assert own.labels.shape[1:] == (2, 3)
        assert torch.equal(own.labels, foreign.labels)
        for name in ("model", "patch colours"):
            assert own.scores[name].miou == foreign.scores[name].miou


class Rows(nn.Module):
    """Blocks over tokens that know nothing but the colour under them."""

    def __init__(self, patch_size: Any = None, prefix: int = 0) -> None:
        super().__init__()
        self.num_prefix_tokens = prefix
        self.proj = nn.Conv2d(3, 3, (8, 32), (8, 32), bias=False)
        self.patch_size = patch_size
        with torch.no_grad():
            self.proj.weight.copy_(torch.eye(3)[:, :, None, None].expand(3, 3, 8, 32) / 256)
        self.blocks = nn.ModuleList(Block(3, 1) for _ in range(2))
        for block in self.blocks:
            for branch in (block.attn.proj, block.mlp.fc2):
                nn.init.zeros_(branch.weight)
                nn.init.zeros_(branch.bias)
        self.preprocessing = Preprocessing((64, 64), (0.5,) * 3, (0.5,) * 3)

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        x = self.proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([torch.full_like(x[:, : self.num_prefix_tokens], 9.0), x], 1)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.forward_features(images).mean(1)


def test_patches_of_another_shape_are_laid_out_as_the_model_tells() -> None:
    known = Foreign(Rows((8, 32), prefix=1))
    assert known.grid(0, (64, 64)) == known.grid(1, (64, 64)) == (8, 2)
    assert known.grid(0, (32, 64)) == (4, 2)
    images = torch.rand(2, 3, 64, 64)
    color = ColorReader((8, 2))(images)
    means = images.unflatten(2, (8, 8)).unflatten(4, (2, 32)).mean((3, 5))
    torch.testing.assert_close(color[..., :3], means.flatten(2).mT)
    torch.testing.assert_close(PatchReader(known, 0)(images), color[..., :3])
    with pytest.raises(ValueError, match=r"layer 1 of Rows is no grid over the image \(\(1, 15, 3\)\): choose another"):
        Foreign(Rows()).grid(1, (40, 96))
    with pytest.raises(ValueError, match=r"layer 0 of Rows is no grid over the image \(\(1, 1, 3\)\): choose another"):
        Foreign(Rows()).grid(0, (8, 32))


@pytest.mark.parametrize(
    ("name", "options", "size", "first", "last"),
    [
        ("timm:test_resnet", {}, (64, 96), (16, 24), (2, 3)),
        ("timm:test_convnext", {}, (64, 96), (16, 24), (2, 3)),
        ("torchvision:swin_t", {}, (64, 96), (16, 24), (2, 3)),
        ("timm:swin_tiny_patch4_window7_224", {"img_size": (64, 96)}, (64, 96), (16, 24), (2, 3)),
        ("torchvision:vit_b_32", {}, (224, 224), (7, 7), (7, 7)),
    ],
)
def test_grids_of_other_libraries(name: str, options: dict[str, Any], size: Any, first: Any, last: Any) -> None:
    model = open_model(name, pretrained=False, **options)
    model.preprocessing = Preprocessing(size, (0.5,) * 3, (0.5,) * 3)
    encoder = Foreign(model)
    assert encoder.grid(0, size) == first
    assert encoder.grid(encoder.depth - 1, size) == last


def test_tokens_that_are_not_in_the_order_of_the_image() -> None:
    model = open_model("timm:hiera_tiny_224", pretrained=False)
    with pytest.raises(ValueError, match="Hiera does not keep its tokens in the order of the image"):
        segment(model, "shapes?train=40", max_images=4)


def test_the_command_opens_models_by_name(tmp_path: Path, capsys) -> None:
    given = ["--data=shapes?train=40", "--max-images=6", "--device=cpu", "--img-size=48", "--no-baselines"]
    out = tmp_path / "s.json"
    assert cli.main(["segment", "timm:test_vit", "--weights=random", *given, f"--out={out}"]) == 0
    assert json.loads(out.read_text())["img_size"] == [48, 48]
    file = tmp_path / "weights.safetensors"
    save_file(open_model("timm:test_vit", pretrained=False, img_size=48).state_dict(), file)
    assert cli.main(["segment", "timm:test_vit", f"--weights={file}", *given, f"--out={out}"]) == 0
    assert "mIoU" in capsys.readouterr().out
