"""`residua evaluate`: what a user types about probes, read-outs and the cache."""

import json
from pathlib import Path

import pytest

from residua import cli
from residua.nn import ViT
from residua.train.checkpoint import save_model, write_checkpoint

QUICK = ["--data", "shapes?n=40&size=16&test=20&classes=4", "--device", "cpu", "--k", "5"]


@pytest.fixture
def run(vit: ViT, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "run", 1, vit, {})
    return tmp_path / "run"


def test_the_second_evaluation_reads_the_features_of_the_first(run: Path, capsys) -> None:
    args = [str(run), *QUICK, "--probe", "lbfgs", "--readout", "tokens", "cls", "--layers", "all"]
    assert cli.main(["evaluate", *args]) == 0
    assert f"features: kept in {run / 'features'}" in capsys.readouterr().out
    first = json.loads((run / "evaluation.json").read_text())
    assert cli.main(["evaluate", *args]) == 0
    out = capsys.readouterr().out
    assert f"features: read from {run / 'features'}" in out
    assert "95 % interval" in out
    assert json.loads((run / "evaluation.json").read_text()) == first
    assert first["readout"] == "tokens, cls"
    assert len(first["probes"]["model"]["grid"]) == 3 * 2 * 4
    damaged = next((run / "features").rglob("cls.2.npy"))
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert cli.main(["evaluate", *args]) == 0
    assert "damaged" in capsys.readouterr().out
    assert json.loads((run / "evaluation.json").read_text()) == first


def test_where_features_are_kept(run: Path, vit: ViT, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "home"))
    args = [*QUICK, "--probe", "none", "--no-baselines"]
    assert cli.main(["evaluate", str(run), *args, "--no-cache"]) == 0
    assert not (run / "features").exists()
    assert cli.main(["evaluate", str(run), *args, "--cache-dir", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine").is_dir()
    assert not (run / "features").exists()
    assert cli.main(["evaluate", str(run / "checkpoints" / "step-0000001"), *args]) == 0
    assert (run / "features").is_dir()
    (tmp_path / "elsewhere").mkdir()
    save_model(vit, tmp_path / "elsewhere" / "model.safetensors")
    assert cli.main(["evaluate", str(tmp_path / "elsewhere" / "model.safetensors"), *args]) == 0
    assert (tmp_path / "home" / "features").is_dir()
    capsys.readouterr()


def test_the_probe_of_he_et_al(run: Path, capsys) -> None:
    args = ["--probe", "mae", "--epochs", "2", "--learning-rates", "0.1", "10", "--no-baselines", "--no-cache"]
    assert cli.main(["evaluate", str(run), *QUICK, *args]) == 0
    assert "mae protocol, 2 epochs" in capsys.readouterr().out
    stored = json.loads((run / "evaluation.json").read_text())
    score = next(s for s in stored["scores"] if s["metric"] == "linear probe")
    assert {"protocol", "epochs", "learning_rate", "readout", "seed", "n_train", "n_test"} <= set(score["settings"])
    assert [h["learning_rate"] for h in stored["probes"]["model"]["grid"]] == [0.1, 10.0]


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
@pytest.mark.parametrize("command", ["evaluate", "embed"])
def test_a_device_that_is_not_there_is_told_first(command: str, device: str, capsys) -> None:
    assert cli.main([command, "no-run", "--data", "shapes", "--device", device]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: --device {device}: there is no such device; there is cpu" in said


def test_only_an_evaluation_on_all_of_its_own_images_replaces_that_of_a_run(run: Path, tmp_path: Path, capsys) -> None:
    own, other = "shapes?n=24&size=16&test=12&classes=3", "shapes?n=20&size=16&test=10&classes=2"
    (run / "config.yaml").write_text(f"data: {own}\n")

    def written(*args: str) -> Path:
        quick = ["--probe", "none", "--no-baselines", "--no-cache", "--k", "3", "--device", "cpu"]
        assert cli.main(["evaluate", str(run), *quick, *args]) == 0
        return Path(capsys.readouterr().out.split("written: ")[1].strip())

    assert written("--limit", "10") == run / "evaluation.json", "there is none yet: a sweep waits for it"
    assert written() == run / "evaluation.json"
    whole = (run / "evaluation.json").read_text()
    assert json.loads(whole)["n_train"] == 24
    assert written("--data", other) == run / "evaluation-shapes.json"
    assert written("--data", other, "--limit", "9") == run / "evaluation-shapes-9.json"
    assert written("--limit", "10") == run / "evaluation-shapes-10.json"
    assert written("--data", other, "--out", str(tmp_path / "x.json")) == tmp_path / "x.json"
    assert (run / "evaluation.json").read_text() == whole
    assert written("--data", own) == run / "evaluation.json"
    (run / "evaluation.json").unlink()
    assert written("--data", other) == run / "evaluation-shapes.json", "never for other images"


def test_a_folder_to_write_to_is_refused_first(run: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["evaluate", str(run), *QUICK, "--no-cache", "--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
