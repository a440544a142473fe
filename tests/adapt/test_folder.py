"""What a model's folder says about its images, against what the model's own library makes of them."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import residua
from residua.adapt import folder, open_model
from residua.data import Preprocessing
from residua.data.errors import DataWarning

Y, X = np.mgrid[:144, :192] / 40
PHOTO = Image.fromarray((np.stack([np.sin(X), np.cos(Y), np.sin(X + Y)], 2) * 100 + 128).astype(np.uint8))
VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 8}


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().mean())


CUT = {"crop_size": {"height": 32, "width": 32}}


@pytest.mark.parametrize(
    ("name", "options", "mode"),
    [
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}, "squash"),
        ("SiglipImageProcessor", {"size": {"height": 32, "width": 32}}, "squash"),
        ("DeiTImageProcessor", {"size": {"height": 40, "width": 40}, **CUT}, "squash"),
        ("BitImageProcessor", {"size": {"shortest_edge": 40}, **CUT}, "center"),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}, "crop_pct": 0.8}, "center"),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}, "squash"),
        ("PoolFormerImageProcessor", {"size": {"shortest_edge": 32}, "crop_pct": 0.8, **CUT}, "center"),
        (
            "PoolFormerImageProcessor",
            {"size": {"shortest_edge": 384}, "crop_pct": 0.8, "crop_size": {"height": 384, "width": 384}},
            "center",
        ),
        ("LevitImageProcessor", {"size": {"shortest_edge": 32}, **CUT}, "center"),
    ],
)
def test_images_are_those_of_transformers_processor(name: str, options: dict[str, Any], mode: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, name)(**options)
    processor.save_pretrained(tmp_path)
    theirs = processor(PHOTO, return_tensors="pt")["pixel_values"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pre = folder.preprocessing_in(tmp_path, tuple(theirs.shape[1:]), 3)
    assert pre is not None
    assert pre.crop_mode == mode
    close = gap(pre(PHOTO), theirs)
    assert close < 0.05
    other = Preprocessing.from_dict(pre.to_dict() | {"crop_mode": "center" if mode == "squash" else "squash"})
    assert gap(other(PHOTO), theirs) > 4 * close


@pytest.mark.parametrize(
    "told",
    [{"do_normalize": False}, {"do_rescale": False}, {"do_rescale": False, "do_normalize": False},
     {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}, {"do_rescale": True}],
)  # fmt: skip
def test_a_processor_that_leaves_values_as_they_are(told: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.ViTImageProcessor(size={"height": 72, "width": 96}, **told)
    processor.save_pretrained(tmp_path)
    theirs = processor(PHOTO, return_tensors="pt")["pixel_values"][0].float()
    pre = folder.preprocessing_in(tmp_path, (72, 96), 3)
    assert pre is not None
    assert gap(pre(PHOTO), theirs) < 0.02 * theirs.std()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"do_resize": False, "size": {"height": 64, "width": 64}}, r"own size \(do_resize is false\); taken is them"),
        ({"do_flip_channel_order": True}, "blue before red; taken is red before blue"),
    ],
)
def test_what_a_processor_asks_for_in_vain_is_told(said: dict[str, Any], told: str) -> None:
    with pytest.warns(DataWarning, match=told):
        pre = folder.from_processor(said, (32, 32), 3)
    assert (pre.crop_mode, pre.crop_pct) == ("center", 1.0)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"feature_extractor_type": "ViTFeatureExtractor", "size": 32}, ("squash", 1.0)),
        ({"feature_extractor_type": "DeiTFeatureExtractor", "size": 40, "crop_size": 32}, ("squash", 0.8)),
        ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 40, "crop_size": 32}, ("center", 0.8)),
        ({"size": {"height": 32}, folder.CROP: 0.7}, ("center", 0.7)),  # an export of earlier days
    ],
)
def test_older_files_of_processors(said: dict[str, Any], found: tuple[str, float]) -> None:
    pre = folder.from_processor(said, (32, 32), 3)
    assert (pre.crop_mode, pre.crop_pct) == found


@pytest.mark.parametrize(("mode", "crop_pct"), [("squash", 1.0), ("squash", 0.8), ("center", 0.8)])
def test_images_are_those_of_timms_transform(mode: str, crop_pct: float) -> None:
    cfg = {"input_size": (3, 32, 32), "crop_mode": mode, "crop_pct": crop_pct}
    model: Any = open_model("timm:test_vit", pretrained=False, img_size=32, pretrained_cfg_overlay=cfg)
    pre = model.preprocessing
    assert (pre.crop_mode, pre.crop_pct) == (mode, crop_pct)
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)(PHOTO)
    assert gap(pre(PHOTO), theirs) < 0.03


def test_what_timm_leaves_open_is_timms_default() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was asked for in vain
        pre = folder.from_timm({"crop_pct": None, "crop_mode": None}, (32, 32), 3)
    expected: Any = timm.data.resolve_data_config({}, pretrained_cfg={"input_size": (3, 32, 32)})
    assert (pre.crop_pct, pre.crop_mode) == (expected["crop_pct"], expected["crop_mode"])
    assert (pre.mean, pre.std, pre.interpolation) == tuple(expected[key] for key in ("mean", "std", "interpolation"))


@pytest.mark.parametrize(
    ("config", "told"),
    [({"crop_pct": 1.15}, r"padded \(crop_pct above 1\); taken is no padding"),
     ({"crop_mode": "border"}, r"padded \(crop_mode border\); taken is a central crop"),
     ({"interpolation": "lanczos"}, "lanczos interpolation; taken is bicubic")],
)  # fmt: skip
def test_what_cannot_be_done_of_timms_is_told(config: dict[str, Any], told: str) -> None:
    with pytest.warns(DataWarning, match=told):
        pre = folder.from_timm(config, (32, 32), 3)
    assert (pre.crop_mode, pre.interpolation) == ("center", "bicubic")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"size": {"shortest_edge": 32}}, "images of any shape"),
        ({"size": {"height": 32}, "do_pad": True}, "no padding"),
        ({"size": {"height": 32}, "resample": 1}, "resampling 1"),
        ({"size": {"shortest_edge": 60, "longest_edge": 80}}, "images of any shape"),
        ({"size": {"shortest_edge": 20}, "crop_size": {"height": 16}}, "images of 16 px, and is built for 32 px"),
        ({"size": 40, "crop_size": 30}, "images of 30 px, and is built for 32 px"),
        ({"size": {"height": 64, "width": 64}}, "images of 64 px, and is built for 32 px"),
    ],
)
def test_what_cannot_be_done_of_transformers_is_told(said: dict[str, Any], told: str) -> None:
    with pytest.warns(DataWarning, match=told):
        folder.from_processor(said, (32, 32), 3)


def test_a_stretching_model_by_name_and_by_path(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTModel(transformers.ViTConfig(**VIT, image_size=32)).save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path)
    theirs = processor(PHOTO, return_tensors="pt")["pixel_values"][0]
    for name in (f"transformers:{tmp_path}", str(tmp_path)):
        model: Any = residua.load(name)
        assert gap(model.preprocessing(PHOTO), theirs) < 0.02


def test_a_folder_that_says_nothing_gets_the_same_by_name_and_by_path(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTModel(transformers.ViTConfig(**VIT, image_size=32)).save_pretrained(tmp_path)
    found = []
    for name in (f"transformers:{tmp_path}", str(tmp_path)):
        with pytest.warns(UserWarning, match="does not say how images are prepared: taken are ImageNet's"):
            model: Any = residua.load(name)
        found.append(model.preprocessing)
    assert found[0] == found[1]
    assert found[0].mean == folder.IMAGENET_MEAN
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_channels": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    grey: Any = open_model(f"transformers:{tmp_path}", pretrained=False)
    assert grey.preprocessing is None


def test_a_processor_that_the_hub_does_not_give_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**VIT, image_size=32)
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", lambda *_, **__: ({}, {}))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)

    def gone(*_: Any, **__: Any) -> Any:
        raise OSError("the Hub is out of reach\nand more")

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", gone)
    with pytest.warns(
        DataWarning, match=r"owner/model does not say .* \(the Hub is out of reach\): taken are ImageNet's"
    ):
        model: Any = open_model("transformers:owner/model", pretrained=False)
    assert model.preprocessing.mean == folder.IMAGENET_MEAN


@pytest.mark.parametrize(
    ("text", "said"), [("{", r"config\.json is no JSON: .*line 1"), ("[1, 2]", r"config\.json holds no settings")]
)
def test_a_file_that_holds_no_settings_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        folder.config_of(tmp_path)
    assert folder.config_of(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("config.json", {"architecture": "vit", "mean": 2.5}),
        ("config.json", {"architecture": "vit", "std": [0.1, 0.0, 0.1]}),
        ("preprocessor_config.json", {"image_mean": [0.5, 0.5, []]}),
        ("preprocessor_config.json", {"rescale_factor": "x"}),
        ("preprocessor_config.json", {"resample": [1, 2]}),
    ],
)
def test_preprocessing_that_cannot_be_read_is_named(name: str, told: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(told))
    with pytest.raises(ValueError, match=rf"{name} does not say how images are prepared in a way that can be read"):
        folder.preprocessing_in(tmp_path, (16, 16), 3)


def test_the_size_of_images_in_the_files_of_either_library(tmp_path: Path) -> None:
    for config, size in (
        ({"image_size": 32}, (32, 32)),
        ({"image_size": [24, 32]}, (24, 32)),
        ({"pretrained_cfg": {"input_size": [3, 24, 32]}}, (24, 32)),
        ({"architecture": "vit", "input_size": [3, 24, 32]}, (24, 32)),
        ({}, None),
    ):
        assert folder.img_size_in(config) == size


def test_timms_folders_of_both_layouts_bring_their_preprocessing(tmp_path: Path) -> None:
    """Older ones have no inner part; grey images get the mean of what is said of colours."""
    told = {"mean": [0.1, 0.2, 0.3], "std": [0.2, 0.3, 0.4], "crop_pct": 0.9, "interpolation": "bilinear"}
    for config in (told, {"pretrained_cfg": told}):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_vit", **config}))
        pre = folder.preprocessing_in(tmp_path, (24, 32), 3)
        expected = Preprocessing((24, 32), (0.1, 0.2, 0.3), (0.2, 0.3, 0.4), crop_pct=0.9, interpolation="bilinear")
        assert pre == expected
    grey = folder.preprocessing_in(tmp_path, (24, 32), 1)
    assert grey is not None
    assert (grey.in_chans, *grey.mean, *grey.std) == (1, pytest.approx(0.2), pytest.approx(0.3))
