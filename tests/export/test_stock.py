"""What stock libraries load computes what the model computes, and comes back with its preprocessing."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import apart, photo, small_vit
from packaging.version import Version
from safetensors.torch import load_file

import residua
from residua.adapt import encoder_of as encode
from residua.adapt.encoder import open_encoder
from residua.data import Preprocessing
from residua.export import ExportError, stock, write
from residua.export.clean import Export, real_images
from residua.export.fold import fold_vit, single_eps_difference
from residua.nn import Classifier, encoder_of

# ---------------------------------------------------------------- folded weights in stock libraries


@pytest.mark.parametrize("target", ["timm", "transformers"])
def test_a_decayed_encoder_without_final_norm(runs: Any, tmp_path: Path, target: str) -> None:
    result = write(runs("ushape"), target, tmp_path / "out")
    ((written, checked),) = result.exports
    assert result.largest < 1e-5
    assert 0 < result.rounding < 1e-5
    assert "test images of shapes?n=64" in result.images
    assert set(checked.differences["tokens"]) == {1, 7, 14}
    assert checked.versions[target]
    assert len(written.snippet.splitlines()) == 3


def test_a_decayed_encoder_with_final_norm(plain_hub: Any) -> None:
    """Stock timm needs no word about the eps here; transformers lies in a folder of its own."""
    assert [written.target for written, _ in plain_hub.exports] == ["timm", "transformers"]
    assert plain_hub.largest < 1e-5
    assert "norm_layer" not in plain_hub.exports[0][0].snippet


@pytest.mark.parametrize("name", ["ushape", "plain"])
@torch.no_grad()
def test_the_runs_would_show_a_wrong_fold(runs: Any, name: str) -> None:
    """Their branches and their decay matter: without either, features are others."""
    model: Any = residua.load(runs(name))
    images, _ = real_images(runs(name), model.preprocessing)
    tokens = model.encoder(images)
    assert model.encoder.shortcut.alpha.min() == pytest.approx(0.6)
    faded = residua.unfade(residua.load(runs(name)))
    assert apart(tokens, encoder_of(faded)(images)) > 1e-2
    for block in model.encoder.blocks:
        block.attn.proj.weight.zero_()
        block.mlp.fc2.weight.zero_()
    assert apart(tokens, model.encoder(images)) > 1e-2


@torch.no_grad()
def test_timms_own_eps_is_wrong_without_final_norm(runs: Any, tmp_path: Path) -> None:
    import timm

    model: Any = residua.load(runs("ushape"))
    images, _ = real_images(runs("ushape"), model.preprocessing)
    written = stock.to_timm(model, tmp_path, images, repr(f"local-dir:{tmp_path}"))
    default = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    scope: dict[str, Any] = {"images": images}
    exec(written.snippet, scope)
    told, untold = apart(model.encoder(images), scope["tokens"]), apart(
        model.encoder(images), default.forward_features(images)
    )  # fmt: skip
    assert told < 1e-5 < 1e-4 < untold
    assert "must be told the eps" in written.notes[0]


def test_the_whole_autoencoder(runs: Any, tmp_path: Path) -> None:
    result = write(runs("plain"), "transformers-mae", tmp_path / "out")
    assert result.largest < 1e-5
    assert "predicted patches" in result.exports[0][1].differences
    with pytest.raises(ExportError, match="no U-shaped decoder: --to transformers"):
        write(runs("ushape"), "transformers-mae", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@torch.no_grad()
def test_classifiers(runs: Any, tmp_path: Path) -> None:
    assert write(runs("patches"), "timm", tmp_path / "timm").largest < 1e-5
    from transformers import AutoModelForImageClassification

    model: Any = residua.load(runs("cls"))
    images, _ = real_images(runs("cls"), model.preprocessing)
    stock.to_transformers(model, tmp_path, images, repr(str(tmp_path)))
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert apart(model(images), theirs(images).logits) < 1e-5
    assert [theirs.config.id2label[i] for i in range(len(model.classes))] == model.classes


@torch.no_grad()
@pytest.mark.parametrize(("height", "width", "channels"), [(16, 24, 3), (16, 16, 1), (16, 16, 4)])
def test_other_shapes_of_images(tmp_path: Path, height: int, width: int, channels: int) -> None:
    import timm
    from transformers import AutoModel

    model = residua.create_model(
        "vit", img_size=(height, width), patch_size=8, in_chans=channels, embed_dim=24, depth=2, num_heads=2,
        mlp_ratio=2, alpha_min=0.5,
    ).eval()  # fmt: skip
    images = torch.rand(2, channels, height, width)
    stock.to_timm(model, tmp_path, images, "")
    theirs: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert apart(model(images), theirs.forward_features(images)) < 1e-5
    stock.to_transformers(model, tmp_path, images, "")
    theirs = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    assert apart(model(images), theirs(images).last_hidden_state) < 1e-5


def test_one_eps_is_not_enough_for_a_short_stream(runs: Any, tmp_path: Path) -> None:
    """Then every norm is told its own, and the difference is rounding again."""
    model: Any = residua.load(runs("timm"))
    encoder = copy.deepcopy(model.encoder).double()
    images, _ = real_images(runs("timm"), model.preprocessing)
    folded = fold_vit(encoder)
    assert single_eps_difference(encoder, folded, images.double()) > 1e-4
    assert single_eps_difference(encoder, replace(folded, eps=1e-6), images.double()) > 1e-4
    result = write(runs("timm"), "timm", tmp_path / "timm")
    assert result.largest < 1e-5
    assert len(result.exports[0][0].loading.splitlines()) == 3
    assert "an eps of its own" in result.exports[0][0].notes[0]
    written = stock.to_transformers(model, tmp_path, images, repr(str(tmp_path)))
    assert apart(model.encoder(images), run_here(written, images)) < 1e-5
    for folder in (tmp_path / "timm" / "model.safetensors", tmp_path):  # our reader gives each its eps, too
        tokens: dict[str, torch.Tensor] = {}
        encoder_of(residua.load(folder)).forward_features(images, tokens.__setitem__)
        assert apart(model.encoder(images), list(tokens.values())[-1]) < 1e-5


def run_here(written: Export, images: torch.Tensor) -> torch.Tensor:
    scope: dict[str, Any] = {"images": images}
    with torch.no_grad():
        exec(written.snippet, scope)
    return scope["tokens"]


# more than a plain ViT: two class tokens; registers and no final norm; layer scale and positions for patches alone
@pytest.mark.parametrize(
    "name", ["deit_tiny_distilled_patch16_224", "vit_wee_patch16_reg1_gap_256", "deit3_small_patch16_224"]
)
@pytest.mark.parametrize("final_norm", [True, False])
@torch.no_grad()
def test_encoders_of_timm(name: str, final_norm: bool, tmp_path: Path) -> None:
    encoder = open_encoder(f"timm:{name}", img_size=16, patch_size=8, final_norm=final_norm, alpha_min=0.6).eval()
    for p in encoder.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    images = torch.randn(2, 3, 16, 16)
    written = stock.to_timm(encoder, tmp_path, images, repr(f"local-dir:{tmp_path}"))
    assert apart(encoder(images), run_here(written, images)) < 1e-5
    with pytest.raises(ExportError, match=f"no place for all that timm:{name} has"):
        stock.to_transformers(encoder, tmp_path, images, "")


@torch.no_grad()
def test_an_encoder_from_a_folder_of_timm_goes_back_to_timm(tmp_path: Path) -> None:
    """As the network of that folder, whose eps timm has to be told again."""
    folders = [tmp_path / name for name in ("before it", "after it")]
    images, config = torch.randn(2, 3, 16, 16), small_vit().config | {"final_norm": False}
    model: Any = residua.create_model(**config).eval()
    for folder in folders:
        folder.mkdir()
        written = stock.to_timm(model, folder, images, repr(f"local-dir:{folder}"))
        assert apart(model(images), run_here(written, images)) < 1e-5
        model = open_encoder(f"timm:local-dir:{folder}", weights="published", final_norm=False).eval()
    args = [json.loads((folder / "config.json").read_text())["model_args"] for folder in folders]
    assert args[0] == args[1]


@pytest.mark.parametrize(
    ("name", "readout", "reason"),
    [
        ("deit_tiny_distilled_patch16_224", "cls", "two heads"),
        ("deit_tiny_distilled_patch16_224", "patches", "two heads"),
        ("test_vit2", "cls", "no class token"),
    ],
)
def test_heads_that_a_network_of_timm_has_no_place_for(name: str, readout: Any, reason: str, tmp_path: Path) -> None:
    encoder = open_encoder(f"timm:{name}", img_size=16, patch_size=8, final_norm=False)
    with pytest.raises(ExportError, match=f"timm's {name} has {reason}.*: --to onnx"):
        stock.to_timm(Classifier(encoder, 3, readout), tmp_path, torch.randn(2, 3, 16, 16), "")


def test_models_of_other_libraries_stay_there(tmp_path: Path) -> None:
    import timm

    for model in ("timm:test_vit", timm.create_model("test_vit")):
        with pytest.raises(ExportError, match="its own library's model already"):
            write(model, "onnx", tmp_path / "out")


def test_torchvision(runs: Any, tmp_path: Path) -> None:
    result = write(runs("resnet"), "torchvision", tmp_path / "out")
    assert result.largest < 1e-5
    assert "maxpool" in result.exports[0][0].snippet  # the stem of small images
    with pytest.raises(ExportError, match="starts with 64 channels, this one with 8"):
        write(residua.create_model("resnet18", img_size=32, width=8), "torchvision", tmp_path / "narrow")
    with pytest.raises(ExportError, match=r"timm has no network like this ResNet: --to torchvision"):
        write(runs("resnet"), "timm", tmp_path / "timm")


@torch.no_grad()
def test_a_head_that_transformers_cannot_read_with_is_left_out(tmp_path: Path) -> None:
    encoder = residua.create_model(**small_vit().config | {"final_norm": False})
    images = torch.randn(2, 3, 16, 16)
    written = stock.to_transformers(Classifier(encoder, 3, "patches").eval(), tmp_path, images, repr(str(tmp_path)))
    assert apart(encoder(images), run_here(written, images)) < 1e-5
    assert "the head is left out: it reads patches, transformers' reads the class token" in written.notes
    assert "classifier.weight" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("readout", ["cls", "patches"])
@torch.no_grad()
def test_a_negative_alpha_turns_the_norm_before_the_head(readout: Any, tmp_path: Path) -> None:
    """Folded, the stream ends with the other sign."""
    config = small_vit().config | {"final_norm": False, "alpha_min": 1.0, "schedule": "learned"}
    encoder: Any = residua.create_model(**config)
    encoder.shortcut.alpha.copy_(torch.tensor([0.9, -0.7, 0.8, 0.6]))
    model, images = Classifier(encoder, 3, readout).eval(), torch.randn(2, 3, 16, 16)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.2) if p is not encoder.shortcut.alpha else None
    targets = [stock.to_timm, stock.to_transformers] if readout == "cls" else [stock.to_timm]
    for to in targets:
        where = f"local-dir:{tmp_path}" if to is stock.to_timm else str(tmp_path)
        scope: dict[str, Any] = {"images": images}
        exec(to(model, tmp_path, images, repr(where)).snippet, scope)
        assert apart(model(images), scope["logits"]) < 1e-5


@torch.no_grad()
def test_the_autoencoders_loss_and_share_of_hidden_patches_go_along(tmp_path: Path) -> None:
    """transformers' loss is ours, with targets normed or not."""
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "decoder_embed_dim": 8, "decoder_depth": 1}
    images, noise = torch.rand(2, 3, 16, 16), torch.rand(2, 16)
    for norm_pix in (True, False):
        model: Any = residua.create_model(
            "mae_vit", decoder="plain", decoder_num_heads=2, img_size=16, patch_size=4, mask_ratio=0.5,
            norm_pix=norm_pix, alpha_min=0.6, **sizes,
        ).eval()  # fmt: skip
        written = stock.to_vitmae(model, tmp_path, images, repr(str(tmp_path)))
        scope: dict[str, Any] = {"images": images, "noise": noise}
        exec(written.snippet, scope)
        loss, _, mask = model(images, noise)
        assert torch.equal(scope["out"].mask.bool(), mask.bool())
        assert mask.float().mean() == 0.5
        torch.testing.assert_close(scope["out"].loss, loss, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_names_of_classes_go_along(tmp_path: Path) -> None:
    """Where there are none, transformers gets the ones that it would give itself."""
    import timm
    from transformers import AutoConfig, ViTConfig

    encoder = residua.create_model(**small_vit().config | {"final_norm": False})
    model: Any = Classifier(encoder, 3, "cls").eval()
    images = torch.randn(2, 3, 16, 16)
    stock.to_transformers(model, tmp_path, images, "")
    assert AutoConfig.from_pretrained(tmp_path).id2label == ViTConfig(num_labels=3).id2label
    model.classes = ["cat", "dog", "fish"]
    stock.to_transformers(model, tmp_path, images, "")
    assert AutoConfig.from_pretrained(tmp_path).label2id == {"cat": 0, "dog": 1, "fish": 2}
    stock.to_timm(model, tmp_path, images, "")
    assert timm.create_model(f"local-dir:{tmp_path}").pretrained_cfg["label_names"] == model.classes


@pytest.mark.parametrize(("small_stem", "channels"), [(False, 3), (False, 1), (True, 1)])
@torch.no_grad()
def test_stems_of_torchvision(small_stem: bool, channels: int, tmp_path: Path) -> None:
    sizes = {"img_size": 32, "stages": (1, 1, 1, 1), "block": "bottleneck", "num_classes": 3, "in_chans": channels}
    model: Any = residua.create_model("resnet", small_stem=small_stem, alpha_min=0.5, **sizes).eval()
    model.classes = ["a", "b", "c"]
    images = torch.randn(2, channels, 32, 32)
    written = stock.to_torchvision(model, tmp_path, images, repr(f"{tmp_path}/model.safetensors"))
    scope: dict[str, Any] = {"images": images}
    exec(written.snippet, scope)
    assert apart(model(images), scope["logits"]) < 1e-5
    assert bool(written.notes) == small_stem
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["in_chans"], config["small_stem"], config["classes"]) == (channels, small_stem, ["a", "b", "c"])


def test_an_autoencoder_of_images_that_are_not_square_is_refused(tmp_path: Path) -> None:
    sizes = {"embed_dim": 8, "depth": 1, "num_heads": 1, "decoder_embed_dim": 8, "decoder_depth": 1}
    for shape in ({"img_size": (16, 24), "patch_size": 8}, {"img_size": 16, "patch_size": (8, 4)}):
        model = residua.create_model("mae_vit", decoder="plain", decoder_num_heads=1, **sizes, **shape)
        with pytest.raises(ExportError, match="square images and patches only: --to transformers"):
            stock.to_vitmae(model, tmp_path, torch.randn(2, 3, 16, 24), "")


# ---------------------------------------------------------------- preprocessing and ways back


def test_preprocessing_goes_along(plain_hub: Any, runs: Any) -> None:
    import timm
    from transformers import AutoImageProcessor

    pre = residua.load(runs("plain")).preprocessing
    model = timm.create_model(f"local-dir:{plain_hub.out}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    processor = AutoImageProcessor.from_pretrained(plain_hub.out / "transformers")
    ours = pre(photo())
    for theirs in (transform(photo()), processor(photo(), return_tensors="pt").pixel_values[0]):
        assert theirs.shape == ours.shape
        assert (theirs - ours).abs().mean() < 1 / 255 / min(pre.std)  # a grey level: they round resized pixels


@torch.no_grad()
def test_what_was_exported_comes_back(plain_hub: Any, runs: Any, tmp_path: Path) -> None:
    """Our reader of foreign weights takes the folded ones; the hub folder gives the model itself."""
    model: Any = residua.load(runs("plain"))
    images, _ = real_images(runs("plain"), model.preprocessing)
    tokens = model.encoder(images)
    for path in (plain_hub.out / "transformers", plain_hub.out / "model.safetensors"):
        assert apart(tokens, encoder_of(residua.load(path))(images)) < 1e-5
    whole: Any = residua.load(plain_hub.out)
    assert torch.equal(whole.encoder(images), tokens)
    assert whole.preprocessing == model.preprocessing
    assert whole.decoder.kind == "plain"


@pytest.mark.parametrize("target", ["timm", "transformers"])
def test_a_folder_brings_its_preprocessing(tmp_path: Path, target: str) -> None:
    """Also the crop, which transformers' processor has rounded to whole pixels."""
    model: Any = small_vit()
    model.preprocessing = Preprocessing((16, 16), (0.3, 0.4, 0.5), (0.2, 0.3, 0.25), crop_pct=0.7)
    write(model, target, tmp_path / "out")
    by_name = {"timm": "timm:local-dir:", "transformers": "transformers:"}[target]
    for name in (str(tmp_path / "out"), f"{by_name}{tmp_path / 'out'}"):
        loaded: Any = residua.load(name)
        assert loaded.preprocessing == model.preprocessing


@pytest.mark.parametrize("name", ["ushape", "timm"])
@pytest.mark.parametrize("target", ["timm", "transformers"])
@torch.no_grad()
def test_an_export_without_final_norm_opens_with_its_norms(runs: Any, tmp_path: Path, name: str, target: str) -> None:
    """By its library's name and by ours: one eps or each its own (the run around timm), and no norm at the end."""
    model: Any = residua.load(runs(name))
    images, _ = real_images(runs(name), model.preprocessing)
    out = tmp_path / "out"
    write(runs(name), target, out)
    assert ("layer_norm_eps_of_each" in json.loads((out / "config.json").read_text())) == (name == "timm")
    by_name = {"timm": "timm:local-dir:", "transformers": "transformers:"}[target]
    for place in (str(out), f"{by_name}{out}"):
        assert apart(model.encoder(images), encode(residua.load(place))(images)) < 1e-5


@pytest.mark.parametrize("size", [(16, 24), (16, 64)])  # the second has as many patches as a square
@pytest.mark.parametrize("target", ["timm", "transformers"])
@torch.no_grad()
def test_an_export_for_images_that_are_not_square_opens_again(
    tmp_path: Path, size: tuple[int, int], target: str
) -> None:
    model, images, out = small_vit(size), torch.rand(2, 3, *size), tmp_path / "out"
    write(model, target, out)
    by_name = {"timm": "timm:local-dir:", "transformers": "transformers:"}[target]
    for place in (str(out), str(out / "model.safetensors"), f"{by_name}{out}"):
        loaded: Any = residua.load(place)
        assert loaded.preprocessing.img_size == size
        assert apart(model(images), encode(loaded)(images)) < 1e-5


def test_the_stretching_of_transformers_is_said(tmp_path: Path) -> None:
    model = small_vit((16, 24))
    model.preprocessing = Preprocessing((16, 24), (0.5,) * 3, (0.5,) * 3, crop_pct=0.9)
    notes = write(model, "transformers", tmp_path / "out").exports[0][0].notes
    assert any("stretches whole images to 16 x 24" in note and "0.9" in note for note in notes)
    loaded: Any = residua.load(f"transformers:{tmp_path / 'out'}")
    assert loaded.preprocessing == model.preprocessing


@pytest.mark.parametrize(
    ("width", "kind", "said"), [(24, "bicubic", True), (24, "bilinear", False), (16, "bicubic", False)]
)
@torch.no_grad()
def test_the_interpolation_of_timm_is_said(width: int, kind: str, said: bool, tmp_path: Path) -> None:
    import timm

    model = small_vit((16, width))
    model.preprocessing = Preprocessing((16, width), (0.5,) * 3, (0.5,) * 3, interpolation=kind)
    where = f"local-dir:{tmp_path}"
    written = stock.to_timm(model, tmp_path, torch.randn(2, 3, 16, width), repr(where))
    assert any("bilinear" in note for note in written.notes) == said
    config = timm.data.resolve_model_data_config(timm.create_model(where, pretrained=True))
    theirs: Any = timm.data.create_transform(**config)
    levels = 127.5 * float((theirs(photo()) - model.preprocessing(photo())).abs().max())
    assert (levels > 3) == (said and Version(timm.__version__) < Version("1.0.31"))
