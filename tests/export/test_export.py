"""Programs, plain weights and Hub folders, in processes that do not know this package; checks and refusals."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import apart, photo, small_vit
from PIL import Image
from safetensors import SafetensorError

import residua
from residua.cli import main
from residua.data import Preprocessing
from residua.export import ExportError, graph, hub, write
from residua.export.clean import CHECKER, Export, check, real_images
from residua.missing import pip_install
from residua.train.checkpoint import write_checkpoint
from residua.train.config import Pretrain
from residua.train.diffuse_config import Diffuse
from residua.train.finetune_config import Finetune
from residua.train.options import trained_on

# ---------------------------------------------------------------- programs and plain weights


def test_onnx(runs: Any, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    result = write(runs("ushape"), "onnx", tmp_path / "out")
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
    result = write(runs("diffusion"), "torch-export", tmp_path / "out")
    assert result.largest < 1e-5
    assert result.exports[0][0].computing == "prediction = model(x, t, y)"
    for target in ("timm", "transformers", "torchvision", "transformers-mae"):
        with pytest.raises(ExportError, match="UViT"):
            write(runs("diffusion"), target, tmp_path / target)


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
    result = write(runs("ushape"), "safetensors", tmp_path / "out")
    assert result.largest < 1e-5
    assert result.exports[0][1].differences["tokens"]  # plain.py ran on the images
    before, after = residua.load(runs("ushape")), residua.load(tmp_path / "out")
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name


# ---------------------------------------------------------------- the Hub


def test_the_card(plain_hub: Any) -> None:
    card = (plain_hub.out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nlibrary_name: timm\n")
    for text in ("alpha_min = 0.6", "| kNN (k 20, T 0.07) | tokens | 3 | 61.5 % |", "local-dir:", "AutoModel",
                 "residua.load", "relative difference", "lr: 0.005", "shapes?n=64&size=16&test=20",
                 "for 30 steps"):  # fmt: skip
        assert text in card, text
    assert "| kNN (k 20, T 0.07) | cls | 3 | 43.5 % |" in card
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
    assert hub._short("imagenet:/data/ilsvrc?classes=10") == "imagenet:ilsvrc?classes=10"
    Path("runs/a").mkdir(parents=True)
    assert hub._short("runs/a") == "a"
    assert hub._short("timm:local-dir:runs/a") == "timm:local-dir:a"
    for name in ("hf:zh-plus/tiny-imagenet", "stabilityai/sd-vae-ft-ema", "timm:hf-hub:someone/vit"):
        assert hub._short(name) == name


def test_sentences_of_a_card_keep_the_names_of_python() -> None:
    assert hub._sentence("the head is left out") == "The head is left out."
    assert hub._sentence("create_model must be told") == "create_model must be told."


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("options", "averaged"), [({}, True), ({"ema": True}, True), ({"ema": False}, False)])
def test_the_moving_average_is_exported_unless_told_otherwise(
    tmp_path: Path, options: dict[str, bool], averaged: bool
) -> None:
    last, average = small_vit(), small_vit()
    last.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    write_checkpoint(tmp_path / "run", 7, last, {}, ema=average.state_dict())
    write(tmp_path / "run", "safetensors", tmp_path / "out", **options)
    written = residua.load(tmp_path / "out").state_dict()["blocks.1.mlp.fc2.weight"]
    for model, there in ((last, not averaged), (average, averaged)):
        assert torch.equal(model.state_dict()["blocks.1.mlp.fc2.weight"], written) is there


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("crop_pct", [1.0, 0.8])
def test_a_model_that_stretches_images_does_so_elsewhere(tmp_path: Path, crop_pct: float) -> None:
    transformers, timm = pytest.importorskip("transformers"), pytest.importorskip("timm")
    model: Any = small_vit()
    model.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, crop_pct=crop_pct, crop_mode="squash")
    y, x = np.mgrid[:48, :96] / 24
    image = Image.fromarray((np.stack([np.sin(x), np.cos(y), np.sin(x + y)], 2) * 100 + 128).astype(np.uint8))
    for to, prefix in (("timm", "timm:local-dir:"), ("transformers", "transformers:")):
        out = tmp_path / to
        written = write(model, to, out).exports[0][0]
        assert not any("stretches" in note for note in written.notes)
        for name in (str(out), f"{prefix}{out}"):
            loaded: Any = residua.load(name)
            assert loaded.preprocessing == model.preprocessing
    stock = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(stock))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "transformers")
    for theirs in (transform(image), processor(image, return_tensors="pt")["pixel_values"][0]):
        assert float((model.preprocessing(image) - theirs).abs().mean()) < 0.03
    write(model, "hub", tmp_path / "hub")
    assert f"stretched, central crop {crop_pct:g}" in (tmp_path / "hub" / "README.md").read_text()


def test_a_result_is_printed_without_its_tensors(tmp_path: Path) -> None:
    assert "tensor(" not in repr(write(small_vit(), "timm", tmp_path / "out"))


def test_cards_leave_out_all_that_changes_nothing() -> None:
    machines = [set(asdict(config.machine)) for config in (Pretrain(), Diffuse(), Finetune())]
    assert set.union(*machines) - hub.ORCHESTRATION == {"precision"}
    assert not hub.ORCHESTRATION & (Diffuse().settings().keys() - asdict(Diffuse().machine).keys())


@pytest.mark.usefixtures("unchecked")
def test_the_card_of_a_checkpoint_knows_its_run_and_its_alphas(runs: Any, tmp_path: Path) -> None:
    checkpoint = next((runs("ushape") / "checkpoints").iterdir())
    card = (write(checkpoint, "hub", tmp_path / "last").out / "README.md").read_text()
    assert "trained with Residua on `shapes?" in card
    assert "alpha_min = 0.6, linear over the depth;" in card
    model: Any = residua.load(checkpoint)
    model.encoder.shortcut.set_strength(0.5)
    card = (write(model, "hub", tmp_path / "half").out / "README.md").read_text()
    assert "alpha_min = 0.6, linear over the depth, on the way to which annealing had come to 0.8;" in card


@pytest.mark.parametrize("target", ["timm", "safetensors"])
def test_a_full_disk_is_a_sentence(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("residua.export.stock.save_file", full)
    monkeypatch.setattr("residua.train.checkpoint.save_file", full)
    with pytest.raises(ExportError, match=r"cannot write to .*out: No space left on device\. Free some space"):
        write(small_vit(), target, tmp_path / "out")
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=r"cannot write to .*out: .*choose another --out"):
        write(small_vit(), target, tmp_path / "file" / "out")


def test_a_full_disk_does_not_end_the_process_that_exports_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportError, match=r"cannot write to .*out: .*No space left on device\. Free some space"):
        write(small_vit(), "torch-export", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_an_error_that_is_not_the_disks_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("the Hub cannot be reached")

    monkeypatch.setattr("residua.train.checkpoint.save_file", offline)
    with pytest.raises(OSError, match=r"^the Hub cannot be reached$"):
        write(small_vit(), "safetensors", tmp_path / "out")


@pytest.mark.usefixtures("unchecked")
def test_a_wrapped_model_is_exported_as_what_it_wraps(tmp_path: Path) -> None:
    model = small_vit()
    write(torch.nn.DataParallel(model), "safetensors", tmp_path / "out")
    assert residua.load(tmp_path / "out").config == model.config


@pytest.mark.usefixtures("unchecked")
def test_a_model_that_does_not_say_how_images_are_prepared_is_told() -> None:
    model = residua.create_model("vit", img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2)
    result = write(model, "timm", "unsaid")
    assert [note for note in result.notes if "mean 0.5 and std 0.5 are written" in note]
    assert "assumed" in (write(model, "hub", "card").out / "README.md").read_text()
    model.preprocessing = Preprocessing((16, 16), (0.3,) * 3, (0.2,) * 3)
    assert write(model, "timm", "said").notes == ()


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
    result = write(runs("diffusion"), "hub", tmp_path / "out")
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
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("data: folder:/nowhere/at/all")
    assert trained_on(tmp_path) == "folder:/nowhere/at/all"
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
        write(runs("plain"), "timm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="differs"):
        write(runs("plain"), "timm", tmp_path / "out")
    assert [*tmp_path.rglob("*")] == [tmp_path / "out"]


def test_a_withdrawn_export_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(small_vit(), "timm", out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def wrong(*_: Any) -> Any:
        raise ExportError("differs")

    monkeypatch.setattr("residua.export.check", wrong)
    with pytest.raises(ExportError, match="differs"):
        write(small_vit(), "timm", out, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.usefixtures("unchecked")
def test_overwriting_leaves_nothing_of_another_target(tmp_path: Path) -> None:
    out, model = tmp_path / "out", small_vit()
    write(small_vit(), "hub", out)
    (out / "notes.txt").write_text("mine")
    (out / "checkpoints" / "step-9").mkdir()
    (out / "checkpoints" / "step-9" / "mine.pt").write_text("mine")
    write(model, "transformers", out, overwrite=True)
    ((written, _),) = write(model, "timm", out, overwrite=True).exports
    left = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert left == ["README.md", "checkpoints/step-9/mine.pt", "config.json", "model.safetensors", "notes.txt"]
    assert written.files == ["model.safetensors", "config.json"]
    assert f"local-dir:{out}" in written.loading
    shutil.rmtree(out / "checkpoints")
    write(model, "hub", out, overwrite=True)
    write(model, "timm", out, overwrite=True)
    assert torch.equal(residua.load(out).cls_token, model.cls_token)


def test_a_run_is_not_written_over(runs: Any) -> None:
    with pytest.raises(ExportError, match="is a run"):
        write(runs("plain"), "hub", runs("plain"), overwrite=True)


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
    assert pip_install("onnx", "onnxscript", "onnxruntime") in refused("--to", "onnx")
    assert pip_install("transformers") in refused("--to", "transformers")


def test_the_command_prints_the_difference_and_the_snippet(runs: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["export", str(runs("diffusion")), "--to", "safetensors", "--out", "out", "--overwrite"]) == 0
    text = capsys.readouterr().out
    assert "tensors of weights: largest relative difference 0.0e+00" in text
    assert "compared on its weights alone" in text
    assert "state = load_file('out/model.safetensors')" in text
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
