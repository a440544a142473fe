from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

from residua.data import Batch, Preprocessing, center_view
from residua.evaluate.extractor import encoder_extractor, open_extractor, timm_extractor
from residua.nn import ViT, create_model
from residua.train.checkpoint import write_checkpoint

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (2, 3, 20, 24), dtype=torch.uint8)


def test_an_encoder_brings_its_preprocessing(vit: ViT, images: Tensor, tmp_path: Path) -> None:
    vit.preprocessing = Preprocessing((16, 16), (0.4,) * 3, (0.3,) * 3)
    write_checkpoint(tmp_path / "run", 1, vit, {})
    found = open_extractor(str(tmp_path / "run"), readout="cls", layer=1)
    assert found.name.endswith("run (layer 1, cls, 16 px)")
    batch = Batch(images, torch.tensor([[20, 24]] * 2), torch.arange(2))
    seen = {}
    with torch.inference_mode():
        vit.eval().forward_features(center_view(batch, 16, (0.4,) * 3, (0.3,) * 3), tap=seen.__setitem__)
        torch.testing.assert_close(found.module(images), seen["blocks.1.mlp"][:, 0])
    same = open_extractor(str(tmp_path / "run"), readout="cls", layer=-2)
    assert same.identity == found.identity
    assert open_extractor(str(tmp_path / "run")).identity != found.identity


def test_an_encoder_of_grey_images_sees_grey(images: Tensor) -> None:
    model = create_model("vit", img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2, in_chans=1)
    model.preprocessing = Preprocessing((16, 16), (0.0,), (1.0,), 1)
    found = encoder_extractor(model).module
    grey = images[:, :1].repeat(1, 3, 1, 1)
    coloured = grey.clone()
    coloured[:, 2] = 255 - coloured[:, 2]
    assert found(grey).shape == (2, 32)
    assert not torch.allclose(found(grey), found(coloured))
    seen = [Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L") for image in images]
    as_pil = torch.from_numpy(np.stack([np.asarray(image) for image in seen]))[:, None].repeat(1, 3, 1, 1)
    torch.testing.assert_close(found(images), found(as_pil), atol=0.01, rtol=0)


def test_timm_with_weights_of_a_file(images: Tensor, tmp_path: Path) -> None:
    model = timm.create_model("test_vit", pretrained=False).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    found = open_extractor("timm:test_vit", tmp_path / "weights.pth")
    assert found.name == "timm:test_vit (160 px)"
    with torch.inference_mode():
        features = found.module(images)
        x = found.module.preprocessing([image.permute(1, 2, 0).numpy() for image in images])
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    other = timm.create_model("test_vit", pretrained=False)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    assert timm_extractor("test_vit", tmp_path / "other.pth").identity != found.identity


def test_all_that_features_depend_on_is_in_the_identity(vit: ViT) -> None:
    """Else a cache would give the features of other settings; what is set on an autoencoder goes before its encoder."""
    found = []
    for pre in (Preprocessing((16, 16), (0.4,) * 3, (0.3,) * 3), Preprocessing((16, 24), (0.4,) * 3, (0.3,) * 3)):
        vit.preprocessing = pre
        found += [
            encoder_extractor(vit, readout=readout, layer=layer) for readout in ("cls", "tokens") for layer in (0, 1)
        ]
    assert len({str(each.identity) for each in found}) == len(found) == 8
    assert found[-1].name == "encoder (layer 1, tokens, 16 x 24 px)"
    mae: Any = create_model("mae_vit", **SIZES, decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=2)
    mae.encoder.preprocessing = Preprocessing((16, 16), (0.4,) * 3, (0.3,) * 3)
    mae.preprocessing = Preprocessing((16, 16), (0.1,) * 3, (0.3,) * 3)
    assert encoder_extractor(mae).identity["preprocessing"]["mean"] == [0.1] * 3
    vit.preprocessing = Preprocessing((16, 16), (0.4,) * 4, (0.3,) * 4, 4)
    with pytest.raises(ValueError, match="takes 4 channels; images to score have three"):
        encoder_extractor(vit)


def test_wrong_names_are_told(tmp_path: Path, vit: ViT, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"no extractor 'incpetion': give inception, timm:NAME"):
        open_extractor("incpetion")
    with pytest.raises(ValueError, match=r"timm has no model 'resnet18x'"):
        open_extractor("timm:resnet18x")
    with pytest.raises(ValueError, match="there are no weights at"):
        open_extractor("timm:test_vit", tmp_path / "none.pth")
    with pytest.raises(ValueError, match="a file of weights is for inception and timm:NAME"):
        open_extractor(str(tmp_path), "x.pth")
    with pytest.raises(ValueError, match="there are no Inception weights"):
        open_extractor("inception", tmp_path / "none.pth")
    with pytest.raises(ValueError, match="how its images are normalised"):
        encoder_extractor(vit)
    with pytest.raises(ValueError, match=r"small cannot extract features: ResNet has no ViT encoder"):
        encoder_extractor(create_model("resnet18", num_classes=2), "small")

    def offline(*_, **__) -> None:
        raise OSError("no route")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match=r"timm:test_vit: its weights could not be had \(no route\); give a file"):
        open_extractor("timm:test_vit")
