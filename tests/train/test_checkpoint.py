"""What is on disk: whole or not there, and enough to build the model again."""

import errno
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

import residua
from residua.adapt.encoder import create_model
from residua.data import Preprocessing
from residua.nn import MAE
from residua.train import checkpoint as ckpt

SMALL = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2,
}  # fmt: skip


@pytest.fixture
def model() -> MAE:
    mae = residua.create_model("mae_vit", **SMALL, alpha_min=0.6, zero_init=False)
    assert isinstance(mae, MAE)
    mae.preprocessing = Preprocessing((16, 16), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    return mae


def write(run: Path, step: int, model: MAE, **options: Any) -> Path:
    return ckpt.write_checkpoint(run, step, model, {"step": step}, **options)


def outputs(model: MAE) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    with torch.no_grad():
        return model(images, torch.rand(2, 16, generator=generator))


def same(one: MAE, other: MAE) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs(one), outputs(other)))


def test_a_checkpoint_brings_model_and_preprocessing(model: MAE, tmp_path: Path) -> None:
    path = write(tmp_path, 7, model)
    assert path == tmp_path / "checkpoints" / "step-0000007"
    for place in (tmp_path, path, path / "model.safetensors"):
        loaded = residua.load(place)
        assert isinstance(loaded, MAE)
        assert same(loaded, model)
        assert not loaded.training
        assert loaded.preprocessing == model.preprocessing == loaded.encoder.preprocessing
        assert loaded.config == model.config
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assert loaded.encoder(loaded.preprocessing(image)[None]).shape == (1, 17, 32)
    described = json.loads((path / "model.json").read_text())
    assert (described["step"], described["model"]["alpha_min"]) == (7, 0.6)
    assert ckpt.load_training(path) == {"step": 7}


def test_the_moving_average_is_preferred(model: MAE, tmp_path: Path) -> None:
    average = {k: v + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    write(tmp_path, 1, model, ema=average)
    assert torch.equal(residua.load(tmp_path).encoder.cls_token, average["encoder.cls_token"])
    assert same(residua.load(tmp_path, ema=False), model)


def test_lone_encoders_and_annealed_alphas_come_back(tmp_path: Path) -> None:
    vit = residua.create_model("vit", **{k: v for k, v in SMALL.items() if "decoder" not in k}, alpha_min=0.5)
    vit.shortcut.set_strength(0.5)
    ckpt.save_model(vit, tmp_path / "vit.safetensors")
    loaded = residua.load(tmp_path / "vit.safetensors")
    assert torch.equal(loaded.shortcut.alpha, vit.shortcut.alpha)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), vit(images))


@pytest.mark.parametrize(("keep", "left"), [(2, [4, 5]), (1, [5]), (0, [1, 2, 3, 4, 5])])
def test_only_the_newest_are_kept(model: MAE, tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        write(tmp_path, step, model, keep=keep)
    assert [int(p.name[5:]) for p in ckpt.checkpoints(tmp_path)] == left
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)


def test_checkpoints_are_in_order_beyond_seven_digits(model: MAE, tmp_path: Path) -> None:
    for step in (9_999_999, 10_000_000):
        write(tmp_path, step, model)
    assert ckpt.checkpoints(tmp_path)[-1].name == "step-10000000"


def test_a_run_is_its_newest_checkpoint(model: MAE, tmp_path: Path) -> None:
    first = write(tmp_path, 1, model)
    with torch.no_grad():
        model.encoder.cls_token.add_(1)
    write(tmp_path, 2, model)
    assert same(residua.load(tmp_path), model)
    assert not same(residua.load(first), model)


def test_the_same_step_may_be_written_again(model: MAE, tmp_path: Path) -> None:
    write(tmp_path, 1, model)
    with torch.no_grad():
        model.encoder.cls_token.add_(1)
    write(tmp_path, 1, model)
    assert same(residua.load(tmp_path), model)


def test_others_may_read_what_they_may_read_elsewhere(model: MAE, tmp_path: Path) -> None:
    folder = write(tmp_path, 1, model, ema=model.state_dict())
    (tmp_path / "plain").touch()
    assert {file.stat().st_mode for file in folder.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_unfinished_checkpoints_do_not_count(model: MAE, tmp_path: Path) -> None:
    with pytest.raises(ckpt.CheckpointError, match="nothing at"):
        residua.load(tmp_path / "nowhere")
    with pytest.raises(ckpt.CheckpointError, match="holds no run and no weights"):
        residua.load(tmp_path)
    (tmp_path / "checkpoints" / ".unfinished-0000003").mkdir(parents=True)
    with pytest.raises(ckpt.CheckpointError, match="no complete checkpoint yet"):
        residua.load(tmp_path)
    path = write(tmp_path, 2, model)
    assert residua.load(tmp_path).config == model.config
    shutil.copytree(path, tmp_path / "checkpoints" / "step-0000003")
    (tmp_path / "checkpoints" / "step-0000003" / "model.json").unlink()  # its removal was begun
    assert ckpt.checkpoints(tmp_path) == [path]


def test_files_are_on_the_disk_before_a_checkpoint_has_its_name(
    model: MAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(ckpt, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(f"-> {to.name}"), rename(self, to))[1])
    path = write(tmp_path, 5, model, ema=model.state_dict())
    assert sorted(done[:4]) == sorted(file.name for file in path.iterdir())
    assert done[4:] == ["-> step-0000005", "checkpoints"]


def test_a_file_cut_short_says_so(model: MAE, tmp_path: Path) -> None:
    file = write(tmp_path, 1, model) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ckpt.CheckpointError, match=r"model.safetensors is broken or cut short"):
        residua.load(tmp_path)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("{}", "its header describes no model"),
        ("[1]", "its header describes no model"),
        ("{oops", "its header is no JSON"),
        ('{"model": {"name": "vit", "depth": "two"}}', "describes a model that cannot be built"),
        ('{"model": {"name": "vit", "colour": "red"}}', "cannot be built.*colour"),
        ('{"model": {"name": "vit"}, "preprocessing": {"size": 3}}', "cannot be built"),
    ],
)
def test_a_broken_header_is_told_in_one_sentence(tmp_path: Path, header: str, says: str) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "m.safetensors", metadata={"residua": header})
    with pytest.raises(ckpt.CheckpointError, match=rf"m\.safetensors.*{says}"):
        residua.load(tmp_path / "m.safetensors")


def test_a_header_fetches_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"name": "timm_vit", "encoder": "timm:test_vit"}
    ckpt.save_model(create_model(**config), tmp_path / "good.safetensors")
    header = json.dumps({"model": config | {"weights": "published"}, "preprocessing": None})
    save_file({"x": torch.zeros(1)}, tmp_path / "bad.safetensors", metadata={"residua": header})
    asked, real = [], timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *a, **k: asked.append(k["pretrained"]) or real(*a, **k | {"pretrained": False})
    )
    residua.load(tmp_path / "good.safetensors")
    with pytest.raises(ckpt.CheckpointError, match=r"bad\.safetensors.*describes no model"):
        residua.load(tmp_path / "bad.safetensors")
    assert set(asked) == {False}


def test_weights_that_lack_some_are_told_which(tmp_path: Path) -> None:
    state = residua.create_model("vit", **{k: v for k, v in SMALL.items() if "decoder" not in k}).state_dict()
    for lacking in ("pos_embed", "blocks.0.mlp.fc1.weight", "blocks."):
        torch.save({k: v for k, v in state.items() if not k.startswith(lacking)}, tmp_path / "m.pth")
        with pytest.raises(ckpt.CheckpointError, match=rf"m\.pth: .*encoder\.{lacking}\S* is missing"):
            residua.load(tmp_path / "m.pth")
    torch.save(state | {"patch_embed.proj.weight": torch.zeros(32, 48)}, tmp_path / "m.pth")
    with pytest.raises(ckpt.CheckpointError, match=r"proj\.weight is \(32, 48\), expected four dimensions"):
        residua.load(tmp_path / "m.pth")


@pytest.mark.parametrize("where", ["save_file", "torch.save", "rename"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    model: MAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    good = write(tmp_path, 1, model)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "save_file":
        monkeypatch.setattr(ckpt, "save_file", full)
    elif where == "torch.save":
        monkeypatch.setattr(torch, "save", full)
    else:
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(ckpt.CheckpointError) as caught:
        write(tmp_path, 2, model)
    message = str(caught.value)
    assert "No space left on device" in message
    assert f"the last good checkpoint is {good}" in message
    assert "--resume" in message
    assert list((tmp_path / "checkpoints").iterdir()) == [good]
    assert same(residua.load(tmp_path), model)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file here that is always full")
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_disk_that_fills_up_in_the_training_state_is_told(
    model: MAE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """PyTorch itself tells of positions in an archive then."""
    good, mkdir = write(tmp_path, 1, model), Path.mkdir

    def fill(folder: Path, **options: Any) -> None:
        mkdir(folder, **options)
        if "unfinished" in folder.name:
            (folder / "training.pt").symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", fill)
    with pytest.raises(ckpt.CheckpointError, match=r"No space left on device.*the last good checkpoint is .*step-0*1 "):
        ckpt.write_checkpoint(tmp_path, 2, model, {"a": torch.zeros(size), "b": torch.zeros(size)})
    assert list((tmp_path / "checkpoints").iterdir()) == [good]


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "training.pt"])
@pytest.mark.parametrize("size", [0, 900, None])
def test_a_damaged_checkpoint_is_told_with_the_way_out(model: MAE, tmp_path: Path, name: str, size: int | None) -> None:
    folder = ckpt.write_checkpoint(tmp_path, 1, model, {"step": 1, "optimizer": {}}, model.state_dict())
    weights, averaged, training = ckpt.read_checkpoint(folder, ema=True)
    assert (weights.keys(), averaged.keys(), training["step"]) == (model.state_dict().keys(), weights.keys(), 1)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if size is not None:
        (folder / name).write_bytes(content[:size])
    with pytest.raises(ckpt.CheckpointError, match=r"step-0000001 is damaged or not complete: .*Remove that folder"):
        ckpt.read_checkpoint(folder, ema=True)


def test_another_architecture_under_our_own_names_is_refused(model: MAE, tmp_path: Path) -> None:
    write(tmp_path, 1, model)
    other = residua.create_model("mae_vit", **SMALL | {"depth": 3})
    with pytest.raises(ValueError, match=r"different architecture.*blocks.2"):
        ckpt.initialize(other, tmp_path)


def test_a_run_starts_another_with_its_own_schedule(model: MAE, tmp_path: Path) -> None:
    write(tmp_path, 1, model)
    other = residua.create_model("mae_vit", **SMALL, alpha_min=0.9)
    ckpt.initialize(other, tmp_path)
    assert float(other.encoder.shortcut.alpha[-1]) == pytest.approx(0.9)
    weights = {k: v for k, v in other.state_dict().items() if "alpha" not in k}
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in weights.items())


def test_a_decoder_comes_along_to_images_of_another_size(model: MAE, tmp_path: Path) -> None:
    """All but its positions, which go with the size and are not learned."""
    write(tmp_path, 1, model)
    other = residua.create_model("mae_vit", **SMALL | {"img_size": 24}, alpha_min=0.6)
    positions = other.decoder.pos_embed.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ckpt.initialize(other, tmp_path)
    assert torch.equal(other.decoder.pred.weight, model.decoder.pred.weight)
    assert torch.equal(other.decoder.pos_embed, positions)


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize("read", [residua.load, lambda file: residua.load("timm:test_vit", weights=file)])
def test_a_file_that_would_run_code_is_refused_in_one_line(tmp_path: Path, read: Any, capsys: Any) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"model": {"a": torch.zeros(1), "b": Harmful()}}, file)
    with pytest.raises(ValueError, match="holds other things than tensors") as caught:
        read(file)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert "run" not in capsys.readouterr().out.split()


def test_weights_bring_the_preprocessing_of_their_folder(tmp_path: Path) -> None:
    """timm's, transformers', and with a warning ImageNet's for a file by itself."""
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0).eval()
    file = tmp_path / "model.safetensors"
    ckpt.save_file(theirs.state_dict(), file)
    with pytest.warns(UserWarning, match="does not say how images are prepared: taken are ImageNet's"):
        alone: Any = residua.load(file)
    assert alone.preprocessing.mean == (0.485, 0.456, 0.406)
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"shortest_edge": 40}}
    processor |= {"do_center_crop": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**processor, "resample": 2}))
    pre = residua.load(tmp_path).preprocessing
    assert pre == Preprocessing((32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop_pct=0.8, interpolation="bilinear")
    part = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny", "pretrained_cfg": part}))
    loaded: Any = residua.load(tmp_path)
    assert loaded.preprocessing == Preprocessing((32, 32), (0.5,) * 3, (0.25,) * 3, crop_pct=0.9)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():  # and timm's eps, which its config.json does not name
        torch.testing.assert_close(loaded(images), theirs.forward_features(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "about", [{"architecture": "test_vit"}, {"architecture": "a fork", "model_args": {"num_heads": 2}}]
)
def test_heads_of_another_width_are_those_of_the_folder(tmp_path: Path, about: dict[str, Any]) -> None:
    theirs = timm.create_model("test_vit", img_size=32, num_classes=0).eval()  # two heads, each 32 wide
    ckpt.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            residua.load(tmp_path)(images), theirs.forward_features(images), rtol=1e-5, atol=1e-5
        )


def test_another_activation_is_not_taken_for_ours(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    ckpt.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_act": "relu"}))
    with pytest.raises(ckpt.CheckpointError, match="activation is relu, ours GELU; transformers:"):
        residua.load(tmp_path)
