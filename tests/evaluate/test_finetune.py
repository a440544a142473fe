"""Fine-tuning as a user meets it: a number with its interval, a run folder, a command."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residua
from residua import cli
from residua.data import Splits
from residua.data.arrays import ArraySource
from residua.evaluate import FinetuneResult, entropy_rank, finetune
from residua.evaluate.finetune import labelled, origin, score
from residua.evaluate.interval import wilson
from residua.nn import MAE, Classifier, ResNet
from residua.recipes.summary import scores_of
from residua.report.runs import read_run
from residua.train import Finetune, read_metrics

QUICK: dict[str, Any] = {"cpu": True, "flip": False, "scale": (0.8, 1.0), "batch_size": 32}
TINY = ["--cpu", "--batch-size", "16", "--steps", "4", "--trackers", "tensorboard"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(mae: MAE, tmp_path: Path) -> Path:
    """An encoder of the digits, hardly pretrained."""
    sizes = ["--depth", "2", "--embed-dim", "32", "--num-heads", "2", "--decoder-embed-dim", "16"]
    small = [*sizes, "--decoder-depth", "1", "--decoder-num-heads", "2", "--alpha-min", "0.8", "--no-evaluate"]
    assert cli.main(["pretrain", "--data", "digits", *small, *TINY, "--out", "run"]) == 0
    return tmp_path / "run"


# ---------------------------------------------------------------- the score


def test_scores_are_their_definitions() -> None:
    logits, labels = torch.randn(200, 8), torch.arange(200) % 8
    features = torch.randn(200, 5)
    got = score(logits, features, labels)
    order = logits.argsort(1, descending=True)
    assert got.accuracy == pytest.approx(100 * float((order[:, 0] == labels).float().mean()))
    assert got.top5 == pytest.approx(100 * float((order[:, :5] == labels[:, None]).any(1).float().mean()))
    assert got.entropy_rank == pytest.approx(entropy_rank(features))
    assert got.cross_entropy == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)))
    assert got.n == 200


def test_few_classes_and_collapsed_features() -> None:
    got = score(torch.randn(20, 3), torch.ones(20, 4), torch.arange(20) % 3)
    assert math.isnan(got.top5)
    assert got.entropy_rank == 0.0


def test_a_fifth_is_held_out_where_nothing_is_left_to_test_on() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    source = ArraySource("made up", "train", pixels, labels=np.arange(50) % 2, classes=["a", "b"])
    splits = labelled(Splits("made up", source))
    assert splits.test is not None
    assert (len(splits.train), len(splits.test)) == (40, 10)
    assert origin(splits) == "20% of the training images, held out"
    ids = [{part.identify(i) for i in range(len(part))} for part in (splits.train, splits.test)]
    assert not ids[0] & ids[1]
    assert origin(labelled(residua.data.load("digits"))) == "test split"


# ---------------------------------------------------------------- in Python


def test_an_encoder_learns_the_digits(mae: MAE) -> None:
    before = {k: v.clone() for k, v in mae.state_dict().items()}
    result = finetune(mae, "digits", epochs=4, lr=6e-3, eval_every=2, **QUICK)
    assert isinstance(result, FinetuneResult)
    assert result.accuracy > 30  # chance is 10
    assert result.interval == wilson(result.accuracy, 355)
    assert (result.n_train, result.n_test, result.test, result.readout) == (1442, 355, "test split", "patches")
    assert result.accuracy < result.top5 <= 100
    assert isinstance(result.model, Classifier)
    assert not result.model.training
    assert all(torch.equal(v, before[k]) for k, v in mae.state_dict().items())  # the user's own is left alone
    digits = residua.data.load("digits")
    hits = sum(
        int(result.model(result.model.preprocessing(digits.test.read(i))[None]).argmax()) == digits.test.labels[i]
        for i in range(100)
    )
    assert abs(hits - result.accuracy) < 15  # the model that is handed over is the one that was tested
    assert not Path("runs").exists()


def test_a_resnet_learns_the_digits_from_scratch(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    result = finetune(
        "resnet18", "digits", width=8, alpha_min=0.7, optimizer="sgd", epochs=2, eval_every=1, out=str(tmp_path / "r"),
        on_record=records.append, trackers=(), **QUICK,
    )  # fmt: skip
    assert result.accuracy > 40
    assert isinstance(result.model, ResNet)
    assert result.readout is None
    tested = [r for r in records if "eval/accuracy" in r]
    assert [r["step"] for r in tested] == [45, 90]  # of 91: the end of the run is the result
    assert 0 < tested[0]["eval/entropy_rank"] < math.log(64)
    assert json.loads((tmp_path / "r" / "finetune.json").read_text())["accuracy"] == result.accuracy
    assert residua.load(tmp_path / "r").config["alpha_min"] == 0.7


def test_what_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    few, out = "shapes?n=24&size=16&test=12&classes=3", str(tmp_path / "r")
    result = finetune("resnet18", few, width=8, steps=1, out=out, trackers=(), **QUICK)
    assert math.isnan(result.top5)
    stored = json.loads((tmp_path / "r" / "finetune.json").read_text(), parse_constant=refuse)
    assert stored["top5"] is None
    report = read_run(out).evaluation
    assert report is not None
    assert {s.metric for s in report.scores} == {"accuracy", "entropy rank"}
    assert scores_of(tmp_path / "r")["accuracy"] == (result.accuracy, "%")


def test_splits_and_unknown_settings(mae: MAE, digits: Splits) -> None:
    result = finetune(mae, digits, steps=1, **QUICK)
    assert result.n_test == 355
    with pytest.raises(ValueError, match="no setting named epoch"):
        finetune(mae, digits, epoch=3)


# ---------------------------------------------------------------- at the terminal


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["finetune", str(run), *TINY, "--out", "tuned"]) == 0
    out = capsys.readouterr().out
    for words in (
        "digits: 1,442 images, 1 channel, 10 classes -> 8 px; test: 355 images", "alpha_min 0.8",
        "read-out: mean of patches", "layer decay 0.65", "top-1", "95 %:", "of 355 images (test split)",
        'model = residua.load("tuned")',
    ):  # fmt: skip
        assert words in out, words
    names = {path.name for path in Path("tuned").iterdir()}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "finetune.json", "checkpoints"} <= names
    assert len(read_metrics(Path("tuned"))) == 4
    assert Finetune.read(Path("tuned/config.yaml")).network.model == str(run)
    # the same command goes on, or says what is the matter
    before = Path("tuned/checkpoints/step-0000004/model.safetensors").read_bytes()
    assert cli.main(["finetune", "--out", "tuned", "--resume", "--cpu"]) == 0
    assert Path("tuned/checkpoints/step-0000004/model.safetensors").read_bytes() == before
    # what is true of an encoder is true of this one
    assert cli.main(["evaluate", "tuned", "--probe", "none", "--no-baselines", "--no-cache"]) == 0
    assert "kNN" in capsys.readouterr().out


def test_a_network_by_name_and_a_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("model: resnet18\nwidth: 4\nstages: [1, 1, 2, 1]\nalpha_min: 0.5\ndata: digits\n")
    assert cli.main(["finetune", "mine.yaml", *TINY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "5 blocks), resnet18 from scratch, alpha_min 0.5" in out
    assert "GiB" in out
    args = ["resnet18", "--data", "digits", "--stages", "1", "1", "1", "1", "--width", "4", "--optimizer", "sgd"]
    assert cli.main(["finetune", *args, *TINY]) == 0
    out = capsys.readouterr().out
    assert "sgd, weight decay 0.0005" in out
    folders = list(Path("runs").iterdir())
    assert [folder.name.endswith("-digits-resnet18") for folder in folders] == [True]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "say what to train"),
        (["nowhere"], "there is nothing at nowhere, and it is none of the networks"),
        (["resnet18"], "resnet18 does not say which images to use: add --data"),
        (["resnet18", "--data", "digits", "--mixup", "-1"], "mixup is -1.0"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_mistakes(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", *args, "--cpu"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
