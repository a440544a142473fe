"""Small runs, trained far enough that every branch matters."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "train")]

import drive

from residua.export import Checked, write

TRAINED = {"steps": 30, "lr": 5e-3, "ema": None, "checkpoint_every": 30, "data": "shapes?n=64&size=16&test=20"}
EVALUATION = {
    "data": "shapes?n=64", "readout": "tokens, cls", "layers": [3], "img_size": [16, 16], "n_train": 64, "n_test": 20,
    "test": "test split", "seed": 0,
    "scores": [{"metric": "kNN", "subject": "model", "layer": 3, "value": 61.5, "unit": "%",
                "settings": {"k": 20, "T": 0.07, "readout": "tokens"}},
               {"metric": "kNN", "subject": "model", "layer": 3, "value": 43.5, "unit": "%",
                "settings": {"k": 20, "T": 0.07, "readout": "cls"}},
               {"metric": "kNN", "subject": "pixels", "layer": -1, "value": 1.25, "unit": "%",
                "settings": {"k": 20, "T": 0.07}}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is written into the working folder, no random state leaks."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are not opened in a process of their own, which takes seconds: for tests of what is written."""
    monkeypatch.setattr("residua.export.check", lambda *a: Checked({"tokens": {1: 1e-7}}, {}))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run by name, trained when first asked for."""
    home = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        out = home / name
        if not out.exists():
            torch.set_num_threads(1)
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                _train(name, out, run)
        return out

    return run


@pytest.fixture(scope="session")
def plain_hub(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("hub") / "tiny"
    (runs("plain") / "evaluation.json").write_text(json.dumps(EVALUATION))
    return write(runs("plain"), "hub", out, license="mit")


def _train(name: str, out: Path, run: Any) -> None:
    if name in ("ushape", "plain"):
        drive.pretrain(drive.small(out, decoder=name, alpha_min=0.6, anneal=0.0, depth=4, **TRAINED))
    elif name in ("patches", "cls"):
        drive.finetune(drive.small_classifier(str(run("ushape")), out, readout=name, **TRAINED))
    elif name == "resnet":
        short = TRAINED | {"steps": 3, "checkpoint_every": 3}
        drive.finetune(drive.small_classifier("resnet18", out, alpha_min=0.7, drop_path=0.0, **short))
    elif name == "timm":  # branches start at zero and learn little: the stream ends short, and norms see their eps
        own = {"encoder": "timm:test_vit", "alpha_min": 0.6, "anneal": 0.0, "steps": 3, "checkpoint_every": 3}
        own["zero_init"] = True
        own |= dict.fromkeys(("embed_dim", "depth", "num_heads"))
        drive.pretrain(drive.small(out, decoder="ushape", **TRAINED | own))
    else:
        drive.fit(drive.ready(drive.small_diffusion(out, anneal=0.0, **TRAINED)))
