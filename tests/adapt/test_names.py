"""Models of other libraries by name, with published, given or random weights."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

import residua
from residua.adapt import encoder_of, is_name, names, open_model
from residua.evaluate.cache import weights_hash
from residua.train.checkpoint import read_state

VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16}
DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}


def test_what_is_a_name() -> None:
    assert is_name("timm:resnet18")
    assert not is_name("runs/timm:resnet18")
    assert not is_name("timm")
    assert not is_name(Path("runs/a"))


def test_timm_brings_its_preprocessing() -> None:
    model: Any = residua.load("timm:test_vit", weights="random")
    assert not model.training
    config = timm.data.resolve_model_data_config(model)
    pre = model.preprocessing
    assert (pre.img_size, pre.mean, pre.std) == ((160, 160), config["mean"], config["std"])
    assert (pre.crop_pct, pre.interpolation) == (config["crop_pct"], config["interpolation"])
    small: Any = open_model("timm:test_vit", pretrained=False, img_size=32, in_chans=1)
    assert (small.preprocessing.img_size, small.preprocessing.in_chans) == ((32, 32), 1)
    assert open_model("timm:test_resnet", pretrained=False, img_size=64).preprocessing.img_size == (64, 64)  # type: ignore[union-attr]


def test_torchvision_brings_its_preprocessing() -> None:
    model: Any = open_model("torchvision:resnet18", pretrained=False)
    assert model.preprocessing.img_size == (224, 224)
    assert model.preprocessing.crop_pct == pytest.approx(224 / 256)
    assert isinstance(model, torchvision.models.ResNet)
    with torch.device("meta"):  # of a size that is asked for
        small: Any = open_model("torchvision:vit_b_16", pretrained=False, image_size=64)
    assert small.preprocessing.img_size == (64, 64)


@pytest.mark.parametrize("name", ["efficientnet_b0", "shufflenet_v2_x0_5"])  # bicubic and bilinear
def test_images_are_those_of_torchvisions_transforms(name: str) -> None:
    y, x = np.mgrid[:300, :400] / 5
    photo = Image.fromarray((np.stack([np.sin(x), np.cos(y), np.sin(x + y)], 2) * 100 + 128).astype(np.uint8))
    theirs = torchvision.models.get_model_weights(name).DEFAULT.transforms()(photo)
    pre: Any = open_model(f"torchvision:{name}", pretrained=False).preprocessing
    close = float((pre(photo) - theirs).abs().mean())
    assert close < 0.02
    other = {"bicubic": "bilinear", "bilinear": "bicubic"}[pre.interpolation]
    assert float((replace(pre, interpolation=other)(photo) - theirs).abs().mean()) > 2 * close


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_of_a_file(suffix: str, tmp_path: Path) -> None:
    source = timm.create_model("test_vit", num_classes=7)
    file = tmp_path / f"weights.{suffix}"
    state = {k: v.contiguous() for k, v in source.state_dict().items()}
    if suffix == "pth":
        torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, file)
    else:
        save_file(state, file)
    model: Any = open_model("timm:test_vit", weights=file)  # whose head has 1,000 classes
    x = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), source.eval().forward_features(x))
    with pytest.raises(ValueError, match=r"does not fit timm:test_resnet: it lacks"):
        open_model("timm:test_resnet", weights=file)


def test_settings_beside_the_weights_of_a_file_are_no_hindrance(tmp_path: Path) -> None:
    state = timm.create_model("test_vit").state_dict()
    for wrapped in ({"model": state}, {"state_dict": {"model": state}}, {"model_state_dict": state}):
        torch.save({**wrapped, "args": argparse.Namespace(lr=1e-3), "epoch": 3}, tmp_path / "w.pth")
        model: Any = open_model("timm:test_vit", weights=tmp_path / "w.pth")
        assert torch.equal(model.state_dict()["cls_token"], state["cls_token"])
        assert read_state(tmp_path / "w.pth").keys() == state.keys()


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"model": Path("x")}, file)
    with pytest.raises(ValueError, match="cannot be read as weights"):
        open_model("timm:test_vit", weights=file)


def test_files_that_hold_no_weights_say_why(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    for content in ({"epoch": 3}, [torch.ones(2)]):
        torch.save(content, file)
        with pytest.raises(ValueError, match=r"weights\.pt holds no state dict of tensors"):
            open_model("timm:test_vit", weights=file)
    (tmp_path / "cut.safetensors").write_bytes(b"\x00")
    with pytest.raises(ValueError, match=r"cut\.safetensors cannot be read as weights: .*\w+"):
        open_model("timm:test_vit", weights=tmp_path / "cut.safetensors")
    with pytest.raises(ValueError, match="of a file or published ones"):
        open_model("timm:test_vit", weights=file, pretrained=True)


def test_all_but_the_head_must_be_in_a_file_and_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = timm.create_model("test_vit")
    own = source.state_dict()
    without = {key: value.contiguous() for key, value in own.items() if key != "blocks.1.attn.proj.bias"}
    for changed in (without, without | {"blocks.1.attn.proj.bias": torch.zeros(3)}):
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(ValueError, match=r"it lacks blocks\.1\.attn\.proj\.bias, or has them in other shapes"):
            open_model("timm:test_vit", weights=tmp_path / "w.safetensors")
    headless = {key: value.contiguous() for key, value in own.items() if not key.startswith("head.")}
    save_file(headless, tmp_path / "w.safetensors")
    found = open_model("timm:test_vit", weights=tmp_path / "w.safetensors").state_dict()
    assert all(torch.equal(found[key], value) for key, value in headless.items())
    two = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=7).state_dict()  # heads by other names
    save_file({key: value.contiguous() for key, value in two.items()}, tmp_path / "w.safetensors")
    found = open_model("timm:deit_tiny_distilled_patch16_224", weights=tmp_path / "w.safetensors").state_dict()
    assert torch.equal(found["dist_token"], two["dist_token"])


@pytest.mark.parametrize("classes", [1000, 0])
@torch.no_grad()
def test_weights_of_a_file_at_another_image_size_are_those_that_timm_makes_of_them(
    classes: int, tmp_path: Path
) -> None:
    """Positions are interpolated, whether the file has the head that the model has or none."""
    torch.manual_seed(0)
    source, file = timm.create_model("test_vit", num_classes=classes), tmp_path / "w.pth"
    torch.save(source.state_dict(), file)
    model: Any = open_model("timm:test_vit", weights=file, img_size=64)
    overlay = {"file": str(file), "num_classes": classes}
    theirs = timm.create_model("test_vit", pretrained=True, img_size=64, pretrained_cfg_overlay=overlay).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model.forward_features(x), theirs.forward_features(x))


def test_a_file_for_transformers_must_fit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.ViTModel(transformers.ViTConfig(**VIT, patch_size=4))
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "preprocessor_config.json").write_text('{"size": {"height": 16}}')
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    (first,) = (key for key in state if key.endswith(("layers.0.mlp.fc1.bias", "layer.0.intermediate.dense.bias")))
    for changed in ({"embeddings.cls_token": state["embeddings.cls_token"]}, state | {first: torch.zeros(5)}):
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(
            ValueError, match=r"w\.safetensors does not fit ViTModel: it lacks \w.*, or has them in other"
        ):
            open_model(f"transformers:{tmp_path / 'whole'}", weights=tmp_path / "w.safetensors")


def test_transformers_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    plain = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, patch_size=4)).eval()
    plain.save_pretrained(tmp_path)
    text = '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3, "size": {"height": 16}}'
    (tmp_path / "preprocessor_config.json").write_text(text)
    model: Any = residua.load(f"transformers:{tmp_path}")
    pre = model.preprocessing
    assert (pre.img_size, pre.mean, pre.std) == ((16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (pre.crop_pct, pre.interpolation) == (1.0, "bicubic")
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        wanted = plain.vit(x).last_hidden_state
        assert torch.equal(model(x).last_hidden_state, wanted)
        other: Any = open_model(f"transformers:{tmp_path}", weights=tmp_path / "model.safetensors")
        assert torch.equal(other(x).last_hidden_state, wanted)
        fresh: Any = open_model(f"transformers:{tmp_path}", pretrained=False)
        assert not torch.equal(fresh(x).last_hidden_state, wanted)


def test_transformers_without_a_pooler_has_the_same_features_every_time(tmp_path: Path) -> None:
    """A pooler that the weights do not bring is left out, not drawn at random: it would change the cache's key."""
    transformers = pytest.importorskip("transformers")
    plain = transformers.ViTModel(transformers.ViTConfig(**VIT, patch_size=4), add_pooling_layer=False)
    plain.save_pretrained(tmp_path)
    for weights in (None, tmp_path / "model.safetensors"):
        models = [open_model(f"transformers:{tmp_path}", weights) for _ in range(2)]
        assert len({weights_hash(encoder_of(model)) for model in models}) == 1


def test_transformers_of_a_type() -> None:
    pytest.importorskip("transformers")
    model: Any = open_model("transformers:vit_mae", pretrained=False, **VIT, patch_size=4)
    assert model.config.mask_ratio == 0.0  # whole images are read
    two: Any = open_model("transformers:clip", pretrained=False, vision_config={**VIT, "patch_size": 4})
    assert len(residua.stream(two)) == 4  # the tower that sees
    with pytest.raises(ValueError, match=r"transformers has no model 'vitt'; near it are vit"):
        open_model("transformers:vitt", pretrained=False)


def test_diffusers_from_a_folder(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    plain = diffusers.DiTTransformer2DModel(**DIT, num_embeds_ada_norm=10)
    plain.save_pretrained(tmp_path / "transformer")
    for folder in (tmp_path, tmp_path / "transformer"):  # of a pipeline, or the model's own
        model = residua.load(f"diffusers:{folder}")
        assert len(residua.stream(model)) == 2
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
        fresh: Any = open_model(f"diffusers:{folder}", pretrained=False, num_layers=2)
        assert len(residua.stream(fresh)) == 4
        key = "transformer_blocks.0.attn1.to_q.weight"
        assert not torch.equal(fresh.state_dict()[key], plain.state_dict()[key])
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"empty: it holds no config\.json, nor does a folder transformer or unet in it"
    ):
        open_model(f"diffusers:{tmp_path / 'empty'}")
    unet = diffusers.UNet2DModel(
        8, block_out_channels=(8, 8), down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    unet.save_pretrained(tmp_path / "pipeline" / "unet")
    found = residua.load(f"diffusers:{tmp_path / 'pipeline'}")
    torch.testing.assert_close(found.state_dict(), unet.state_dict())
    with pytest.raises(ValueError, match="diffusers:nowhere: there is no such folder"):
        open_model("diffusers:nowhere")
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "NoSuchModel"}')
    with pytest.raises(ValueError, match="names no model of diffusers"):
        open_model(f"diffusers:{tmp_path}", pretrained=False)


@pytest.mark.parametrize("part", ["transformer", "unet", ""])
def test_diffusers_from_the_hub_is_the_network_of_a_pipeline(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers = pytest.importorskip("diffusers")
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError

    asked: list[Any] = []

    def download(name: str, file: str, **options: Any) -> str:
        if options["subfolder"] != (part or None):
            raise EntryNotFoundError("there is no such file")
        asked.append((name, file, options))
        (tmp_path / file).write_text(json.dumps({"_class_name": "DiTTransformer2DModel", **DIT}))
        return str(tmp_path / file)

    def from_pretrained(name: str, **options: Any) -> Any:
        asked.append((name, options))
        return diffusers.DiTTransformer2DModel(**DIT, num_embeds_ada_norm=10)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(diffusers.DiTTransformer2DModel, "from_pretrained", from_pretrained)
    open_model("diffusers:owner/pipeline", variant="fp16")
    where = {"subfolder": part} if part else {}
    config = ("owner/pipeline", "config.json", {"subfolder": part or None})
    assert asked == [config, ("owner/pipeline", where | {"variant": "fp16"})]
    fresh: Any = open_model("diffusers:owner/pipeline", pretrained=False, num_layers=2)
    assert len(residua.stream(fresh)) == 4

    def offline(name: str, file: str, **options: Any) -> str:
        if kept and options["subfolder"] == (part or None):
            return str(tmp_path / file)
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    kept = True
    assert len(residua.stream(open_model("diffusers:owner/pipeline", pretrained=False))) == 2  # from the Hub's cache
    kept = False
    with pytest.raises(ValueError, match=r"published weights cannot be had here \(no connection\)"):
        open_model("diffusers:owner/pipeline")


def test_a_processor_of_the_hub_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**VIT, patch_size=4)
    processor = transformers.ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]
    )
    monkeypatch.setattr(transformers.PretrainedConfig, "get_config_dict", lambda *_, **__: ({}, {}))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", lambda *_, **__: processor)
    pre: Any = open_model("transformers:owner/model", pretrained=False).preprocessing
    assert (pre.img_size, pre.mean, pre.std) == ((16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert pre.crop_mode == "squash"


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"timm has no model 'vit_tiny_patch16_225'; near it are vit_tiny_patch16_224"):
        open_model("timm:vit_tiny_patch16_225")
    with pytest.raises(ValueError, match=r"torchvision has no model 'resnet17'; near it are resnet18"):
        open_model("torchvision:resnet17")
    with pytest.raises(ValueError, match=r"names no model: give one of timm:NAME"):
        open_model("keras:resnet")
    with pytest.raises(ValueError, match="there are no weights at"):
        open_model("timm:test_vit", weights=tmp_path / "none.pt")
    with pytest.raises(ValueError, match="holds no config"):
        open_model(f"transformers:{tmp_path}")
    with pytest.raises(ValueError, match="weights are for models of other libraries"):
        residua.load(tmp_path, weights="random")


def test_without_the_hub_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(
        ValueError, match=r"\(no route to host\)\. Give a local file \(--weights FILE.*--weights random"
    ):
        open_model("timm:test_vit")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(names, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs transformers, which is not installed: pip install '?transformers"):
        open_model("transformers:x/y")


def test_a_repository_of_the_hub_names_its_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm passes on nothing of a config.json but what it knows itself."""
    asked: list[Any] = []

    def download(repository: str, file: str, revision: str | None = None) -> str:
        asked.append((repository, file, revision))
        return str(tmp_path / file)

    (tmp_path / "config.json").write_text('{"layer_norm_eps": 1e-9}')
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(timm, "create_model", lambda name, make=timm.create_model, **_: make("test_vit"))
    model: Any = open_model("timm:hf-hub:me/mine@v2")
    assert asked == [("me/mine", "config.json", "v2")]
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-9}
