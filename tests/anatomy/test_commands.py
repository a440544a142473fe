"""`residua anatomy`, `residua ujm` and `residua counterfactual`, as typed."""

import json
from pathlib import Path

import pytest

import residua
from residua import cli
from residua.anatomy import study

TRAIN = """
resmlp --data digits?classes=2 --depth 3 --width 8 --alpha-min 0.8 --optimizer sgd --steps 4 --batch-size 32
--checkpoint-every 2 --keep 0 --cpu --trackers
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("anatomy") / "run"
    assert cli.main(["finetune", *TRAIN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_anatomy_of_a_run_lands_in_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["anatomy", str(run), "--images", "2", "--top", "5", "--every-checkpoint", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for text in ("2 train images, 3 blocks, top 5, gauge J", "RA4 slope", "step 2", "step 4", "anatomy.html"):
        assert text in out
    values = json.loads((run / "anatomy.json").read_text())
    assert [part["split"] for part in values["parts"]] == ["train", "test"]
    assert [moment["step"] for moment in values["checkpoints"]] == [2, 4]
    assert values["parts"][0]["laws"]["classes"] == 2
    assert "Along training" in (run / "anatomy.html").read_text()


def test_anatomy_elsewhere_in_the_other_gauge(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-0000002"
    args = ["--images", "2", "--top", "4", "--gauge", "J/alpha", "--split", "test", "--out", "there", "--device", "cpu"]
    assert cli.main(["anatomy", str(checkpoint), *args]) == 0
    values = json.loads((tmp_path / "there" / "anatomy.json").read_text())
    assert (values["gauge"], values["data"]) == ("J/alpha", "digits?classes=2")
    assert [part["split"] for part in values["parts"]] == ["test"]


def test_anatomy_of_nothing_is_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["anatomy", "nowhere"]) == 2
    assert "nothing at nowhere" in capsys.readouterr().err
    assert cli.main(["anatomy", str(run), "--img-size", "16"]) == 2
    assert "--img-size is for a model by name" in capsys.readouterr().err
    assert cli.main(["anatomy", str(run), "--token", "0", "--device", "cpu"]) == 2
    assert "token 0 was asked for" in capsys.readouterr().err


def test_where_nothing_can_be_written_nothing_is_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(study, "study", None)  # called, it fails
    monkeypatch.setattr(residua.anatomy, "solve", None)
    for command in (["anatomy", str(run)], ["ujm"]):
        assert cli.main([*command, "--out", "file/there"]) == 2
        assert "nothing can be written to file/there" in capsys.readouterr().err


def test_ujm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ujm", "--depth", "4", "--penalty", "kinetic", "--out", "u"]) == 0
    assert "100.0 % classified right" in capsys.readouterr().out
    laws = json.loads((tmp_path / "u" / "ujm.json").read_text())["laws"]
    assert laws["scalars"]["RA4 slope"]["mean"] == pytest.approx(laws["left_right"][0], abs=1e-3)
    assert all(verdict["holds"] for verdict in laws["verdicts"].values())
    assert cli.main(["ujm", "--classes", "9"]) == 2
    assert "9 classes need" in capsys.readouterr().err


def test_counterfactual_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--depth 3 --width 8 --epochs 1 --images 2 --top 4"
    args = ["counterfactual", "shortcut", *small.split(), "--device", "cpu", "--out", "c"]
    assert cli.main([*args, "--data", "digits?classes=2"]) == 0
    capsys.readouterr()
    assert cli.main([*args, "--data", "digits?classes=2"]) == 0
    out = capsys.readouterr().out
    assert out.count("(was there)") == 2
    assert (tmp_path / "c" / "counterfactual.png").exists()
    outcomes = json.loads((tmp_path / "c" / "counterfactual.json").read_text())
    assert [o["case"]["series"] for o in outcomes] == ["shortcuts", "no shortcuts"]
    assert cli.main([*args, "--data", "digits?classes=2", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("(was there)") == 2
    assert "mean ± deviation over seeds" in out
    assert cli.main([*args, "--data", "digits"]) == 2
    assert "choose another --out" in " ".join(capsys.readouterr().err.split())


def test_a_trained_network_takes_a_new_head_and_keeps_its_sizes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["finetune", str(run), "--data", "digits?classes=3", "--steps", "1", "--batch-size", "32", "--cpu"]
    assert cli.main([*again, "--out", "again", "--trackers"]) == 0
    model, before = residua.load(tmp_path / "again"), residua.load(run)
    assert (model.num_classes, model.depth, model.width) == (3, before.depth, before.width) == (3, 3, 8)
    assert model.config["alpha_min"] == before.config["alpha_min"] == 0.8
    assert cli.main([*again, "--depth", "5"]) == 2
    assert "depth is 5, but the trained network has 3" in capsys.readouterr().err
    for network, option in (("resnet18", "depth"), ("vit_nano", "width"), ("resmlp", "patch-size")):
        assert cli.main(["finetune", network, "--data", "digits", f"--{option}", "4", "--cpu"]) == 2
        assert f"but {network} has none" in capsys.readouterr().err
