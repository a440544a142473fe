"""Small runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # drive.py is imported by the tests and by the processes they start


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is written into the working folder, no random state leaks."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pretraining run."""
    from drive import pretrain, small

    run = tmp_path_factory.mktemp("runs") / "pretrained"
    pretrain(small(run, steps=3))
    return str(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusion run."""
    from drive import small_diffusion

    from residua.train import fit
    from residua.train.diffuse import prepare

    folder = tmp_path_factory.mktemp("runs") / "run"
    fit(prepare(small_diffusion(folder, steps=4)))
    return folder
