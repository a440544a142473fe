"""transformers' processors, written for our preprocessing, prepare images as it does."""

from pathlib import Path

import pytest
import torch
from helpers import photo, small_vit

from residua.data import Preprocessing
from residua.export.stock import to_transformers, write_processor


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_grey_images_stay_grey_and_are_resized_alike(mode: str, interpolation: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    channels = len(mode)
    mean, std = (0.3, 0.4, 0.5)[:channels], (0.2, 0.3, 0.25)[:channels]
    pre = Preprocessing((16, 16), mean, std, channels, crop_pct=0.8, interpolation=interpolation)
    write_processor(tmp_path, pre)
    image = photo().convert(mode)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values[0]
    ours = pre(image)
    assert theirs.shape == ours.shape == (channels, 16, 16)
    assert (theirs - ours).abs().mean() < 1 / 255 / min(pre.std)


@torch.no_grad()
def test_stretching_is_said_of_models_that_crop_alone(tmp_path: Path) -> None:
    model = small_vit((16, 24))
    for mode in ("center", "squash"):
        model.preprocessing = Preprocessing((16, 24), (0.5,) * 3, (0.5,) * 3, crop_mode=mode)
        notes = to_transformers(model, tmp_path, torch.randn(2, 3, 16, 24), "").notes
        assert any("stretches" in note for note in notes) == (mode == "center")
