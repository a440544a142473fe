"""Settings of classifiers: how they are chosen, and what is refused before any work."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import small_classifier
from torch import nn

import residua
from residua import data
from residua.data import DataError, Splits
from residua.data.arrays import ArraySource
from residua.train import Finetune
from residua.train.checkpoint import CheckpointError
from residua.train.classify import check_labels, prepare
from residua.train.finetune_config import open_start, resolve


def chosen(model: str, device: str = "cpu", n: int = 1000, size: int = 32, **settings: Any) -> dict[str, Any]:
    source = data.load(f"shapes?n={n}&size={size}").train
    config = Finetune().override(model=model, **settings)
    return resolve(config, open_start(model), source, device).settings()


def test_defaults_are_maes_recipe_at_its_scale() -> None:
    big = residua.create_model("vit_base", img_size=32, patch_size=16)
    source = data.load("shapes?n=60000&size=32").train
    got = resolve(Finetune(), big, source, "cuda").settings()
    assert (got["batch_size"], got["epochs"]) == (1024, pytest.approx(100, rel=0.01))
    assert got["lr"] == pytest.approx(5e-4 * 1024 / 256)
    assert (got["layer_decay"], got["weight_decay"], got["drop_path"]) == (0.65, 0.05, 0.1)
    assert (got["mixup"], got["cutmix"], got["erasing"], got["smoothing"]) == (0.8, 1.0, 0.25, 0.1)


def test_defaults_follow_data_device_and_network() -> None:
    small_run = chosen("vit_nano", n=1000)
    assert (small_run["batch_size"], small_run["epochs"]) == (32, 100)
    assert (small_run["mixup"], small_run["erasing"], small_run["smoothing"]) == (0, 0, 0.1)
    assert (small_run["scale"], small_run["layer_decay"], small_run["alpha_min"]) == ((0.5, 1.0), 1.0, 1.0)
    assert chosen("vit_nano", n=1000, mixup=0.4)["mixup"] == 0.4
    resnet = chosen("resnet18", "cuda", n=10_000, optimizer="sgd", alpha_min=0.7)
    assert (resnet["lr"], resnet["weight_decay"], resnet["batch_size"]) == (0.1, 5e-4, 128)
    assert (resnet["mixup"], resnet["drop_path"], resnet["alpha_min"]) == (0, 0, 0.7)
    assert chosen("vit_nano", n=10, size=224)["scale"] == (0.08, 1.0)
    assert chosen("vit_nano", n=10, base_lr=1e-3, batch_size=8)["lr"] == pytest.approx(1e-3 * 8 / 256)


def test_learning_rates_go_by_width_and_the_root_of_the_batch(encoder: str) -> None:
    batch = {"batch_size": 64}
    assert chosen("vit_tiny", **batch)["lr"] == pytest.approx(2e-3 / 2 * 768 / 192 / 4)  # from scratch: half
    assert chosen("resnet18", **batch)["lr"] == pytest.approx(2e-3 / 4)
    assert chosen("resmlp", **batch)["lr"] == pytest.approx(2e-3 / 4)
    width = residua.load(encoder).encoder.embed_dim
    trained = chosen(encoder, **batch)
    assert trained["lr"] == pytest.approx(2e-3 * 768 / width / 4)
    assert trained["betas"] == (0.9, 0.999)


def test_nothing_is_left_open_and_choosing_again_changes_nothing(encoder: str, tmp_path: Path) -> None:
    source = data.load("shapes?n=100&size=32").train
    for name in (encoder, "vit_nano", "resnet18"):
        begin = open_start(name)
        config = resolve(Finetune().override(model=name, data="shapes"), begin, source, "cpu")
        left = [k for k, v in config.settings().items() if v == "auto" and k != "resident"]
        assert left == (["patch_size"] if name == "resnet18" else [])
        assert resolve(config, begin, source, "cpu") == config
        config.save(tmp_path / "config.yaml")
        assert Finetune.read(tmp_path / "config.yaml") == config


def test_data_is_that_of_the_run_unless_told(encoder: str) -> None:
    session = prepare(small_classifier(encoder, data="auto"))
    assert session.config.data.data == "shapes?n=40&size=16"
    with pytest.raises(ValueError, match="resnet18 does not say which images to use: add --data"):
        prepare(small_classifier("resnet18", data="auto"))


# ---------------------------------------------------------------- refused before work


def labelled(train: list[int], test: list[int] | None = None, classes: str = "ab", other: str | None = None) -> Splits:
    def part(split: str, labels: list[int], names: str) -> ArraySource:
        pixels = np.zeros((len(labels), 8, 8, 3), np.uint8)
        return ArraySource("made up", split, pixels, np.array(labels), list(names))

    return Splits(
        "made up", part("train", train, classes), None if test is None else part("test", test, other or classes)
    )


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (labelled([1, 1, 1]), "training images of 1 class"),
        (labelled([0, 1, 2]), "labels of its train split go from 0 to 2; expected 0 to 1"),
        (labelled([0, 1], [0, 3], "ab", "ab"), "labels of its test split go from 0 to 3"),
        (labelled([0, 1], [0, 1], "ab", "ba"), "classes of its test split are not those of its train split"),
    ],
)
def test_labels_that_cannot_be_learned(splits: Splits, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_labels(splits)


def test_images_without_labels(encoder: str, tmp_path: Path) -> None:
    from PIL import Image

    for i in range(4):
        Image.new("RGB", (16, 16), (i, i, i)).save(tmp_path / f"{i}.png")
    with pytest.raises(DataError, match=r"has no labels to learn: put the images of each class into a folder"):
        prepare(small_classifier(encoder, tmp_path / "run", data=f"folder:{tmp_path}"))
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_min": 0.5}, "alpha_min is 0.5, but a trained network keeps its shortcuts"),
        ({"anneal": 0.5}, "anneal is 0.5, but a trained network"),
        ({"patch_size": 8}, "patch_size is 8, but the trained network has 4"),
        ({"stages": (2, 2, 2, 2)}, "stages is .* but the trained network has None"),
        ({"data": "digits"}, "digits has 1 channels, the network takes 3"),
        ({"img_size": 18}, "not divisible"),
        ({"readout": "mean"}, "readout is 'mean'"),
        ({"mixup": -1.0}, "mixup is -1.0; expected 0 or more"),
        ({"drop_path": 1.0}, r"drop_path is 1.0; expected a share in \[0, 1\)"),
        ({"smoothing": 1.5}, "smoothing is 1.5"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"scale": (0.5, 0.2)}, "scale is"),
    ],
)
def test_wrong_settings_leave_no_run_behind(
    encoder: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(small_classifier(encoder, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("resnet18", {"patch_size": 4}, "patch_size is 4, but resnet18 has none"),
        ("vit_nano", {"width": 4}, "width is 4, but vit_nano has none"),
        ("resnet18", {"width": 4, "grad_checkpointing": True}, "not recomputed"),
        ("resnet18", {"width": 4, "branches": "mlp"}, "needs a network with attention"),
    ],
)
def test_settings_that_belong_to_other_networks(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(small_classifier(model, **changes))


def test_what_is_neither_run_nor_network(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nothing at .*resnet81, and it is none of the networks vit_nano.*resnet18"
    ):
        open_start(str(tmp_path / "resnet81"))
    with pytest.raises(ValueError, match="say what to train"):
        open_start(None)
    with pytest.raises(ValueError, match="a Linear cannot be fine-tuned"):
        prepare(small_classifier("resnet18"), start=nn.Linear(2, 2))
