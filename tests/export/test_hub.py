"""What a model card says of networks, scores and places, and what a folder holds where a library has no place."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import small_vit
from safetensors.torch import load_file

import residua
from residua.cli import main
from residua.data import Preprocessing
from residua.export import ExportError, default_out, hub, write
from residua.train.checkpoint import write_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")


def resnet() -> Any:
    sizes = {"img_size": 16, "stages": (1, 1, 1, 1), "block": "basic", "small_stem": True, "num_classes": 3}
    model: Any = residua.create_model("resnet", alpha_min=0.5, **sizes).eval()
    model.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    return model


def card(folder: str | Path) -> str:
    return (Path(folder) / "README.md").read_text()


@pytest.mark.parametrize(
    ("shortcuts", "said"),
    [
        ({}, "Its shortcuts are ordinary"),
        ({"control": "branch"}, r"ablation that scales the branch by sqrt\(0\.5\); alpha_eff = 1 of the input"),
        ({"control": "both"}, r"ablation that scales both by sqrt\(0\.5\); alpha_eff = 0\.25 of the input"),
        ({"schedule": "learned"}, "alpha learned, one for each step; alpha_eff = 1 of"),
        ({"alpha_min": 0.5, "schedule": "constant"}, r"alpha_min = 0\.5, constant .*; alpha_eff = 0\.0625 of"),
    ],
)
def test_the_shortcuts_of_a_card(shortcuts: dict[str, Any], said: str) -> None:
    model = residua.create_model("vit", img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, **shortcuts)
    assert re.search(said, hub._shortcuts(model))


@pytest.mark.parametrize("decoder", ["plain", "ushape"])
def test_the_network_of_a_card(decoder: Any) -> None:
    model = residua.create_model("mae_vit_nano", img_size=16, patch_size=4, decoder=decoder)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert hub._kind(model) == f"Network: masked autoencoder, {decoder} decoder ({count:.3g} M parameters)"


@pytest.mark.parametrize(("top5", "said"), [(90.0, ", top-5 90.0 %"), (float("nan"), ""), (None, "")])
def test_the_card_has_the_scores_of_fine_tuning(tmp_path: Path, top5: float | None, said: str) -> None:
    scores = {"accuracy": 61.25, "interval": [58.0, 64.0], "top5": top5, "n_test": 1200, "test": "test split"}
    (tmp_path / "finetune.json").write_text(json.dumps(scores))
    (line,) = filter(None, hub._scores(tmp_path))
    assert line == f"Fine-tuned: top-1 61.2 % (95 %: 58.0 to 64.0){said} of 1,200 images (test split)."
    assert "None were computed" in hub._scores(None)[0]


@torch.no_grad()
def test_a_resnet_on_the_hub_is_fetched_by_the_snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = resnet(), torch.randn(2, 3, 16, 16)
    write(model, "hub", "mine", name="me/net")
    text = card("mine")
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "torchvision"
    assert front["tags"] == ["residua", "image-classification"]
    assert "# net\n" in text
    asked: list[Any] = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(Path("mine") / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    scope: dict[str, Any] = {"images": images}
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.S)[0], scope)
    assert asked == [("me/net", "model.safetensors")]
    torch.testing.assert_close(scope["logits"], model(images), atol=1e-4, rtol=1e-4)


def test_a_name_that_is_none_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tiny", "/tiny", "me/", "me/tiny/more"):
        with pytest.raises(ExportError, match=f"--push {name}: give OWNER/NAME"):
            write(small_vit(), "hub", "h", name=name)
        with pytest.raises(ExportError, match=f"--push {name}: give OWNER/NAME"):
            hub.push(Path("h"), name)
    write_checkpoint(tmp_path / "run", 1, small_vit(), {})
    assert main(["export", "run", "--to", "hub", "--out", "h", "--push", "tiny"]) == 2
    assert "give OWNER/NAME" in capsys.readouterr().err
    assert not Path("h").exists()


def test_what_cannot_be_folded_is_in_the_folder_as_our_checkpoint_alone() -> None:
    model = residua.create_model("vit", img_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2, alpha_min=0.0)
    result = write(model, "hub", "h")
    without = [note for note in result.notes if "without weights" in note]
    assert [note.partition(":")[0] for note in without] == [
        "without weights for timm",
        "without weights for transformers",
    ]
    assert all("alpha = 0" in note for note in without)
    assert sorted(file.name for file in Path("h").iterdir()) == ["README.md", "checkpoints"]
    assert "library_name: residua" in card("h")
    assert torch.equal(residua.load("h").state_dict()["cls_token"], model.state_dict()["cls_token"])


def test_without_transformers_the_rest_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("residua.export._has", lambda modules: "transformers" not in modules)
    result = write(small_vit(), "hub", "h")
    assert any("transformers, which is not installed: pip install" in note for note in result.notes)
    assert [written.target for written, _ in result.exports] == ["timm"]
    assert not Path("h/transformers").exists()
    assert Path("h/config.json").exists()


def test_where_an_export_goes_unless_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 1, small_vit(), {})
    assert write("run", "safetensors").out == Path("run/export/safetensors")
    assert Path("run/export/safetensors/model.safetensors").is_file()
    assert default_out(Path("run/export/safetensors"), "timm") == default_out(None, "timm") == Path("export/timm")
    Path("taken").touch()
    with pytest.raises(ExportError, match="taken is a file: choose another --out"):
        write("run", "safetensors", "taken", overwrite=True)


def test_the_step_of_a_run_goes_along(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 1234, small_vit(), {})
    write("run", "hub", "h")
    assert "for 1,234 steps." in card("h")
    assert [step.name for step in Path("h/checkpoints").iterdir()] == ["step-0001234"]
    (weights,) = Path("h/checkpoints").rglob("model.json")
    assert json.loads(weights.read_text())["step"] == 1234


def test_the_model_that_is_given_stays_as_it_is() -> None:
    """In training, in its own precision; what is written is float32, and computed in evaluation."""
    model = resnet().double().train()
    state = copy.deepcopy(model.state_dict())
    written = write(model, "torchvision", "out").exports[0][0]
    assert model.training
    torch.testing.assert_close(model.state_dict(), state, atol=0, rtol=0)
    kept = load_file("out/model.safetensors").values()
    assert {value.dtype for value in kept if value.is_floating_point()} == {torch.float32}
    with torch.no_grad():
        expected = copy.deepcopy(model).float().eval()(written.given["images"])
    torch.testing.assert_close(written.wanted["logits"][1], expected)


def test_a_card_has_notes_licence_task_and_settings_that_were_given(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 1, small_vit(), {})
    (tmp_path / "run" / "config.yaml").write_text("data: shapes\nalpha_eff: null\nlr: 0.5\nworkers: 3\n")
    result = write("run", "hub", "h", license="mit")
    text = card("h")
    assert [written.folder for written, _ in result.exports] == [Path("h"), Path("h/transformers")]
    assert "## Licence\n\n`mit`\n" in text
    assert yaml.safe_load(text.split("```yaml")[1].split("```")[0]) == {"data": "shapes", "lr": 0.5}
    tiny = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model: Any = residua.create_model("sit", **tiny, in_chans=3)
    model.preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    write(model, "hub", "sit")
    assert yaml.safe_load(card("sit").split("---")[1])["tags"] == ["residua", "image-generation"]
    assert "## Licence\n\nNot stated.\n" in card("sit")
    unnormed = residua.create_model(**small_vit().config | {"final_norm": False})
    noted = [note for written, _ in write(unnormed, "hub", "noted").exports for note in written.notes]
    assert noted
    assert all(hub._sentence(note) in card("noted") for note in noted)


def test_a_note_on_preprocessing_is_for_targets_that_need_one() -> None:
    assert write(small_vit(), "safetensors", "own").notes == ()
    assert len(write(small_vit(), "timm", "timm").notes) == 1
