"""What stock libraries load computes what the model computes, in processes that do not know this package."""

import copy
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import residua
from residua.adapt import encoder_of as encode
from residua.adapt.encoder import open_encoder
from residua.cli import main
from residua.data import Preprocessing
from residua.export import ExportError, export, graph, hub, stock
from residua.export.clean import CHECKER, Export, check, real_images, relative
from residua.export.fold import fold_vit, single_eps_difference
from residua.nn import encoder_of


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return relative(a.detach(), b.detach())


def photo() -> Image.Image:
    """Twice as wide as high, so that cropping shows."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 128, 3), np.uint8)).resize((48, 24))


# ---------------------------------------------------------------- folded weights in stock libraries


@pytest.fixture(scope="module")
def plain_hub(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("hub") / "tiny"
    (runs("plain") / "evaluation.json").write_text(json.dumps(EVALUATION))
    return export(runs("plain"), "hub", out, license="mit")


EVALUATION = {
    "data": "shapes?n=64", "readout": "tokens", "layers": [3], "img_size": [16, 16], "n_train": 64, "n_test": 20,
    "test": "test split", "seed": 0,
    "scores": [{"metric": "kNN", "subject": "model", "layer": 3, "value": 61.5, "unit": "%",
                "settings": {"k": 20, "T": 0.07}},
               {"metric": "kNN", "subject": "pixels", "layer": -1, "value": 1.25, "unit": "%",
                "settings": {"k": 20, "T": 0.07}}],
}  # fmt: skip


@pytest.mark.parametrize("target", ["timm", "transformers"])
def test_a_decayed_encoder_without_final_norm(runs: Any, tmp_path: Path, target: str) -> None:
    result = export(runs("ushape"), target, tmp_path / "out")
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
    result = export(runs("plain"), "transformers-mae", tmp_path / "out")
    assert result.largest < 1e-5
    assert "predicted patches" in result.exports[0][1].differences
    with pytest.raises(ExportError, match="no U-shaped decoder: --to transformers"):
        export(runs("ushape"), "transformers-mae", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@torch.no_grad()
def test_classifiers(runs: Any, tmp_path: Path) -> None:
    assert export(runs("patches"), "timm", tmp_path / "timm").largest < 1e-5
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
    result = export(runs("timm"), "timm", tmp_path / "timm")
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


def test_models_of_other_libraries_stay_there(tmp_path: Path) -> None:
    import timm

    for model in ("timm:test_vit", timm.create_model("test_vit")):
        with pytest.raises(ExportError, match="its own library's model already"):
            export(model, "onnx", tmp_path / "out")


def test_torchvision(runs: Any, tmp_path: Path) -> None:
    result = export(runs("resnet"), "torchvision", tmp_path / "out")
    assert result.largest < 1e-5
    assert "maxpool" in result.exports[0][0].snippet  # the stem of small images
    with pytest.raises(ExportError, match="starts with 64 channels, this one with 8"):
        export(residua.create_model("resnet18", img_size=32, width=8), "torchvision", tmp_path / "narrow")
    with pytest.raises(ExportError, match=r"timm has no network like this ResNet: --to torchvision"):
        export(runs("resnet"), "timm", tmp_path / "timm")


# ---------------------------------------------------------------- programs and plain weights


def test_onnx(runs: Any, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    result = export(runs("ushape"), "onnx", tmp_path / "out")
    differences = result.exports[0][1].differences["tokens"]
    assert differences[1] < 1e-4
    assert differences[7] < 1e-4
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert model.opset_import[0].version == graph.OPSET == torch.onnx._constants.ONNX_MAX_OPSET
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    kept = json.loads({entry.key: entry.value for entry in model.metadata_props}["preprocessing"])
    assert kept == residua.load(runs("ushape")).preprocessing.to_dict()
    assert kept == json.loads((tmp_path / "out" / "preprocessing.json").read_text())


def test_a_diffusion_model_becomes_a_program_and_nothing_else(runs: Any, tmp_path: Path) -> None:
    result = export(runs("diffusion"), "torch-export", tmp_path / "out")
    assert result.largest < 1e-5
    assert result.exports[0][0].computing == "prediction = model(x, t, y)"
    for target in ("timm", "transformers", "torchvision", "transformers-mae"):
        with pytest.raises(ExportError, match="UViT"):
            export(runs("diffusion"), target, tmp_path / target)


@torch.no_grad()
def test_torch_export_of_classifiers_and_foreign_encoders(runs: Any, tmp_path: Path) -> None:
    for name in ("patches", "resnet", "timm"):
        model: Any = residua.load(runs(name))
        images, _ = real_images(runs(name), model.preprocessing)
        graph.to_torch_export(model, tmp_path, images, "")
        program = torch.export.load(tmp_path / "model.pt2").module()
        for size in (1, 7):
            if name == "timm":  # an encoder
                assert apart(model.encoder(images[:size]), program(images[:size])) < 1e-5
                continue
            logits, features = program(images[:size])
            assert apart(model(images[:size]), logits) < 1e-5
            assert apart(model.pooled(images[:size]), features) < 1e-5


def test_safetensors_is_our_own_file(runs: Any, tmp_path: Path) -> None:
    result = export(runs("ushape"), "safetensors", tmp_path / "out")
    assert result.largest < 1e-5
    assert result.exports[0][1].differences["tokens"]  # plain.py ran on the images
    before, after = residua.load(runs("ushape")), residua.load(tmp_path / "out")
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name


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
    export(model, target, tmp_path / "out")
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
    export(runs(name), target, out)
    assert ("layer_norm_eps_of_each" in json.loads((out / "config.json").read_text())) == (name == "timm")
    by_name = {"timm": "timm:local-dir:", "transformers": "transformers:"}[target]
    for place in (str(out), f"{by_name}{out}"):
        assert apart(model.encoder(images), encode(residua.load(place))(images)) < 1e-5


def small_vit(img_size: tuple[int, int] = (16, 16)) -> Any:
    return residua.create_model(
        "vit", img_size=img_size, patch_size=8, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2, alpha_min=0.5
    ).eval()


def test_the_stretching_of_transformers_is_said(tmp_path: Path) -> None:
    model = small_vit((16, 24))
    model.preprocessing = Preprocessing((16, 24), (0.5,) * 3, (0.5,) * 3, crop_pct=0.9)
    notes = export(model, "transformers", tmp_path / "out").exports[0][0].notes
    assert any("stretches whole images to 16 x 24" in note and "0.9" in note for note in notes)
    loaded: Any = residua.load(f"transformers:{tmp_path / 'out'}")
    assert loaded.preprocessing == model.preprocessing


# ---------------------------------------------------------------- the Hub


def test_the_card(plain_hub: Any) -> None:
    card = (plain_hub.out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nlibrary_name: timm\n")
    for text in ("alpha_min = 0.6", "| kNN (k 20, T 0.07) | 3 | 61.5 % |", "local-dir:", "AutoModel", "residua.load",
                 "relative difference", "lr: 0.005", "shapes?n=64&size=16&test=20", "for 30 steps"):  # fmt: skip
        assert text in card, text
    assert "1.2 %" not in card  # of the pixels
    assert "out:" not in card


def test_the_snippets_of_a_card_run_as_they_stand(plain_hub: Any, tmp_path: Path) -> None:
    """Those of timm, transformers and residua, one after the other in a process of their own."""
    card = (plain_hub.out / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"license": "mit", "library_name": "timm", "tags": ["residua", "image-feature-extraction"]}
    snippets = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    assert [s.split()[1] for s in snippets] == ["timm,", "transformers", "residua"]
    photo().save(tmp_path / "photo.jpg")
    script = "import torch\nimages = torch.rand(2, 3, 16, 16)\nseen = []\n"
    for snippet in snippets[:2]:
        script += f"{snippet}\nseen.append(tokens)\n"
    script += f"photos = images\n{snippets[2]}\nassert images.shape == (1, 3, 16, 16)\n"
    script += "seen.append(model.encoder(photos))\n"
    script += "for x in seen: torch.testing.assert_close(x, seen[0], atol=1e-4, rtol=1e-4)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_cards_keep_folders_to_themselves() -> None:
    assert hub._short("folder:/home/me/cats") == "folder:cats"
    assert hub._short("/home/me/runs/a") == "a"
    assert hub._short("hf:zh-plus/tiny-imagenet") == "hf:zh-plus/tiny-imagenet"


def test_pushing(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On the Hub the card loads from there; without network the folder stays and the error says how to go on."""
    calls: list[Any] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> str:
            calls.append((name, options))
            return f"https://hub/{name}"

        def upload_folder(self, **options: Any) -> None:
            calls.append(options)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("residua.export.check", lambda *a: residua.export.Checked({"tokens": {1: 1e-7}}, {}))
    assert main(["export", str(runs("ushape")), "--to", "hub", "--out", "h", "--push", "me/tiny", "--private"]) == 0
    assert calls[0] == ("me/tiny", {"exist_ok": True, "private": True})
    assert calls[1]["repo_id"] == "me/tiny"
    card = Path("h/README.md").read_text()
    for text in ("'hf-hub:me/tiny'", "'me/tiny', subfolder='transformers'", "snapshot_download('me/tiny')"):
        assert text in card
    assert "'h'" not in card

    def offline(self: Any, **options: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(Api, "upload_folder", offline)
    with pytest.raises(ExportError, match=r"ConnectionError: no route to host.*complete.*hf upload me/tiny h"):
        hub.push(Path("h"), "me/tiny")
    with pytest.raises(ExportError, match="give OWNER/NAME"):
        hub.push(Path("h"), "tiny")


def test_a_hub_folder_of_what_no_library_has(runs: Any, tmp_path: Path) -> None:
    result = export(runs("diffusion"), "hub", tmp_path / "out")
    assert "no stock library has a UViT" in result.notes[0]
    assert residua.load(tmp_path / "out").process is not None
    assert not (tmp_path / "out" / "config.json").exists()


# ---------------------------------------------------------------- checks and refusals


def sample(**changes: Any) -> Export:
    ones = torch.ones(14, 2)
    base = Export("onnx", Path(), [], "import numpy\n", "y = numpy.tanh(x)", {"x": ones}, {"y": ("y", ones.tanh())},
                  ("numpy",))  # fmt: skip
    return replace(base, **changes)


def test_a_check_finds_what_is_wrong() -> None:
    assert check(sample()).largest < 1e-6
    with pytest.raises(ExportError, match=r"differs from the model by 2.4e-01: withdrawn"):
        check(sample(computing="y = numpy.tanh(x) * 1.24"))
    with pytest.raises(ExportError, match="residua was imported"):
        check(sample(loading="import numpy, residua"))
    with pytest.raises(ExportError, match="does not load in a process of its own: ModuleNotFoundError"):
        check(sample(loading="import no_such_library"))
    assert "import residua" not in CHECKER


def test_images_that_are_out_of_reach_are_replaced(runs: Any, tmp_path: Path) -> None:
    pre = residua.load(runs("plain")).preprocessing
    (tmp_path / "config.yaml").write_text("data: folder:/nowhere/at/all")
    images, where = real_images(tmp_path, pre)
    assert images.shape == (14, 3, 16, 16)
    assert "images of shapes" in where
    for channels in (1, 2, 5):
        half = (0.5,) * channels
        images, _ = real_images(None, Preprocessing((8, 12), half, half, in_chans=channels))
        assert images.shape == (14, channels, 8, 12)
        assert images.std() > 0.1


def test_a_withdrawn_export_leaves_nothing(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise ExportError("differs")

    monkeypatch.setattr("residua.export.check", wrong)
    with pytest.raises(ExportError, match="differs"):
        export(runs("plain"), "timm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="differs"):
        export(runs("plain"), "timm", tmp_path / "out")
    assert [*tmp_path.rglob("*")] == [tmp_path / "out"]


def test_a_withdrawn_export_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export(small_vit(), "timm", out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def wrong(*_: Any) -> Any:
        raise ExportError("differs")

    monkeypatch.setattr("residua.export.check", wrong)
    with pytest.raises(ExportError, match="differs"):
        export(small_vit(), "timm", out, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [*tmp_path.iterdir()] == [out]


def test_overwriting_leaves_nothing_of_another_target(tmp_path: Path) -> None:
    out, model = tmp_path / "out", small_vit()
    export(small_vit(), "hub", out)
    (out / "notes.txt").write_text("mine")
    (out / "checkpoints" / "step-9").mkdir()
    (out / "checkpoints" / "step-9" / "mine.pt").write_text("mine")
    export(model, "transformers", out, overwrite=True)
    ((written, _),) = export(model, "timm", out, overwrite=True).exports
    left = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert left == ["README.md", "checkpoints/step-9/mine.pt", "config.json", "model.safetensors", "notes.txt"]
    assert written.files == ["model.safetensors", "config.json"]
    assert f"local-dir:{out}" in written.loading
    shutil.rmtree(out / "checkpoints")
    export(model, "hub", out, overwrite=True)
    export(model, "timm", out, overwrite=True)
    assert torch.equal(residua.load(out).cls_token, model.cls_token)


def test_a_run_is_not_written_over(runs: Any) -> None:
    with pytest.raises(ExportError, match="is a run"):
        export(runs("plain"), "hub", runs("plain"), overwrite=True)


def test_refusals_at_the_command_line(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = str(runs("plain"))

    def refused(*arguments: str) -> str:
        assert main(["export", run, *arguments]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "no target 'timmm'; did you mean 'timm'" in refused("--to", "timmm")
    assert "did you mean 'transformers'" in refused("--to", "tranformers")
    assert "--push uploads hub folders" in refused("--to", "timm", "--push", "me/x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert "mine exists: choose another --out, or --overwrite" in refused("--to", "timm", "--out", "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'residua[onnx]'" in refused("--to", "onnx")
    assert "pip install transformers" in refused("--to", "transformers")


def test_the_command_prints_the_difference_and_the_snippet(runs: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["export", str(runs("diffusion")), "--to", "safetensors", "--out", "out", "--overwrite"]) == 0
    text = capsys.readouterr().out
    assert "tensors of weights: largest relative difference 0.0e+00" in text
    assert "compared on its weights alone" in text
    assert "state = load_file('out/model.safetensors')" in text
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
