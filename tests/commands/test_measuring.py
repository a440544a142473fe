"""What is measured from Python is what the command measures, and leaves the caller's world alone."""

import json
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import residua
from residua import cli
from residua.commands.calling import undisturbed_world
from residua.data import Splits
from residua.train.checkpoint import load_file, write_checkpoint

DATA = "shapes?n=64&size=16&test=32"
QUICK: dict[str, Any] = {"probe": None, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "decoder_embed_dim": 16, "decoder_depth": 1}
    made = residua.pretrain(
        data=DATA, size="nano", steps=2, batch_size=16, decoder_num_heads=2, cpu=True, trackers=(), evaluate=False,
        out=tmp_path_factory.mktemp("runs") / "run", **shape,
    )  # fmt: skip
    return made.path


@pytest.fixture(scope="module")
def model(run: Path) -> Any:
    return residua.load(run)


@pytest.fixture(scope="module")
def diffusion() -> Any:
    model = residua.create_model("uvit", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2).eval()
    model.process = residua.nn.diffusion.VP()
    model.preprocessing = residua.data.Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    return model


@pytest.fixture(autouse=True)
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Whatever is called here is quiet, and leaves random states, precision and folder as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    torch.set_float32_matmul_precision("highest")
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?!.*also occur)", UserWarning)  # notes are expected where a test says so
        yield
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert torch.get_float32_matmul_precision() == "highest"
    assert Path.cwd() == tmp_path
    assert capsys.readouterr() == ("", "")


def typed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """What a command says, in a world of its own."""
    with undisturbed_world():
        assert cli.main([str(arg) for arg in args]) == 0
    return capsys.readouterr().out


def _flags(options: dict[str, Any]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def test_an_evaluation_is_what_the_command_makes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"layers": "all", "k": (1, 5), "shots": 1, "limit": 40, "device": "cpu"}
    report = residua.evaluate(run, probe="lbfgs", **options, out=tmp_path / "ours.json")
    flags = "--layers all --probe lbfgs --k 1 5 --shots 1 --limit 40 --device cpu --out theirs.json"
    typed(capsys, "evaluate", run, *flags.split())
    assert report.to_dict()["scores"] == json.loads(Path("theirs.json").read_text())["scores"]
    assert (tmp_path / "ours.json").is_file()
    assert (run / "features").is_dir()
    assert report.layers == [0, 1]
    assert not [name for name in {s.metric for s in residua.evaluate(run, **QUICK).scores} if "probe" in name]
    assert residua.Run.of(run).scores is not None, "what was written by the way"
    assert residua.evaluate(run, **QUICK, layers=[1, 0], data="shapes?n=40&size=16&test=20", limit=20).layers == [0, 1]
    assert (run / "evaluation-shapes-20.json").is_file()


def test_a_network_and_images_in_memory(run: Path, model: Any, tmp_path: Path) -> None:
    splits = residua.data.load(DATA)
    one = residua.evaluate(run, **QUICK, cache=False)
    two = residua.evaluate(model, data=splits, **QUICK)
    assert one.to_dict()["scores"] == two.to_dict()["scores"]
    assert not (tmp_path / "cache").exists(), "its features are kept nowhere"
    residua.evaluate(model, DATA, **QUICK, cache_dir=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir())
    with pytest.raises(ValueError, match="a MAE in memory does not say which images to use: give data"):
        residua.evaluate(model)
    with pytest.raises(ValueError, match="weights are for a model by name"):
        residua.evaluate(model, DATA, weights="random")


def test_a_diffusion_model_is_evaluated_by_the_same_function(diffusion: Any, tmp_path: Path) -> None:
    report = residua.evaluate(diffusion, DATA, times=0.1, **QUICK, out=tmp_path / "d.json")
    assert report.readout == "t=0.1"
    assert (tmp_path / "d-knn.png").is_file()
    with pytest.raises(ValueError, match="--geometry is not for diffusion models"):
        residua.evaluate(diffusion, DATA, geometry=True)
    with pytest.raises(ValueError, match="a UViT is a diffusion model, which embed does not read"):
        residua.embed(diffusion, DATA)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"probes": "lbfgs"}, "no option named probes; did you mean 'probe'"),
        ({"k": "many"}, r"k is many; expected \[a whole number, ...\]"),
        ({"probe": "svm"}, "probe is svm; expected auto or lbfgs or simple or cached or mae or none"),
        ({"layers": "first"}, r"layers is first; expected \[last or all or a whole number, ...\]"),
        ({"layers": ("last", 0)}, "layers last 0: give last, all, or block numbers"),
        ({"limit": 2.5}, "limit is 2.5; expected a whole number or null"),
        ({"model": "x"}, "multiple values for argument 'model'"),
    ],
)
def test_options_that_cannot_be(run: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        residua.evaluate(run, **options)


def test_progress_is_what_the_terminal_shows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    residua.evaluate(run, **QUICK, cache=False, out="shown.json", progress=True)
    ours = capsys.readouterr().out
    assert ours == typed(
        capsys, "evaluate", run, *["--probe", "none", "--no-cache", "--device", "cpu", "--out", "shown.json"]
    )
    assert "written: shown.json" in ours


def test_notes_are_warnings_where_nothing_is_shown(model: Any) -> None:
    splits = residua.data.load(DATA)
    with pytest.warns(UserWarning, match="64 test images also occur in the training part"):
        residua.evaluate(model, Splits("twice", splits.train, splits.train), **QUICK, baselines=False)


def test_a_table_of_features(run: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = residua.embed(run, DATA, tmp_path / "ours.parquet", layers="all", device="cpu")
    typed(capsys, "embed", run, "--data", DATA, "--layers", "all", "--device", "cpu", "--out", "theirs.parquet")
    assert pq.read_table(ours).equals(pq.read_table("theirs.parquet"))
    again = residua.embed(model, residua.data.load(DATA), layers=(0, 1))
    assert again == Path("features.parquet")
    assert pq.read_table(again).equals(pq.read_table(ours))
    with pytest.raises(ValueError, match=r"is a folder: .*features\.parquet"):
        residua.embed(run, DATA, tmp_path)


def test_a_segmentation(run: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_images": 6, "intra": 5, "inter": 5, "device": "cpu"}
    ours = residua.segment(run, **options, out=tmp_path / "ours.json")
    typed(
        capsys,
        "segment",
        run,
        *["--max-images", "6", "--intra", "5", "--inter", "5", "--device", "cpu", "--out", "theirs.json"],
    )
    assert (tmp_path / "ours.png").read_bytes() == Path("theirs.png").read_bytes()
    assert json.loads((tmp_path / "ours.json").read_text()) == json.loads(Path("theirs.json").read_text())
    again = residua.segment(model, residua.data.load(DATA), ignore_index=None, **options)
    assert {n: s.miou for n, s in again.scores.items()} == {n: s.miou for n, s in ours.scores.items()}
    assert again.settings["ignore_index"] is None


def test_samples_and_their_score(run: Path, diffusion: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "run", 1, diffusion, {})
    (tmp_path / "run" / "config.yaml").write_text(f"data: {DATA}\n")
    typed(capsys, "sample", "run", "-n", "12", "--steps", "2", "--device", "cpu", "--out", "theirs")
    images = residua.sample("run", 12, steps=2, device="cpu")
    assert images.shape == (12, 3, 16, 16)
    assert torch.equal(images, residua.sample(diffusion, 12, steps=np.int64(2)))
    assert residua.sample(diffusion, 12, tmp_path / "ours", steps=2) == tmp_path / "ours"
    for file in Path("theirs").glob("*.png"):
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes()
    with pytest.raises(ValueError, match="no option named step; did you mean 'steps'"):
        residua.sample(diffusion, 2, step=3)
    with pytest.raises(ValueError, match="latents are for weights in a file"):
        residua.sample(diffusion, 2, latents="vae")

    asked = {"kid": True, "extractor": str(run), "subsets": 3, "subset_size": 5, "device": "cpu"}
    ours = residua.score("theirs", DATA, **asked, reference_split="train")
    again = residua.evaluate.score(images, DATA, **asked, reference_split="train")
    flags = f"--kid --extractor {run} --subsets 3 --subset-size 5 --device cpu --reference-split train".split()
    typed(capsys, "score", "theirs", "--reference", DATA, *flags, "--out", "score.json")
    assert ours.to_dict()["scores"] == json.loads(Path("score.json").read_text())["scores"]
    assert again.to_dict()["scores"] == ours.to_dict()["scores"]
    assert residua.score("run", n=12, **asked).value("kernel distance") != 0
    with pytest.raises(ValueError, match="a Tensor in memory is no run of residua diffuse, so give --reference"):
        residua.score(images)
    with pytest.raises(ValueError, match="no option named fids; did you mean 'fid'"):
        residua.score(images, DATA, fids=True)


def test_a_comparison(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, "copy", ignore=shutil.ignore_patterns("features"))
    page = residua.compare(run, "copy", out=tmp_path / "ours.html", device="cpu")
    assert page == tmp_path / "ours.html"
    typed(capsys, "compare", run, "copy", "--out", "theirs.html", "--device", "cpu")
    ours, theirs = (Path(name).read_text() for name in ("ours.html", "theirs.html"))
    assert len(ours) == pytest.approx(len(theirs), abs=2000), "but for how it was made"
    with pytest.raises(ValueError, match="no option named colours; did you mean 'colors'"):
        residua.compare(run, run, colours="spectral")


def test_an_anatomy(run: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"images": 1, "top": 2, "device": "cpu", "split": "train"}
    ours = residua.anatomy(run, **options, out=tmp_path / "ours")
    typed(capsys, "anatomy", run, *_flags(options), "--out", "theirs")
    stored, theirs = (json.loads(Path(name, "anatomy.json").read_text()) for name in ("ours", "theirs"))
    assert stored == theirs
    before = set(tmp_path.rglob("*"))
    again = residua.anatomy(model, residua.data.load(DATA), **options)
    assert again.parts[0].laws.scalars() == ours.parts[0].laws.scalars()
    assert set(tmp_path.rglob("*")) == before, "of a network in memory nothing is written"
    with pytest.raises(ValueError, match="--every-checkpoint is for a run, and MAE is none"):
        residua.anatomy(model, DATA, every_checkpoint=True)
    with pytest.raises(ValueError, match="no option named tops; did you mean"):
        residua.anatomy(model, DATA, tops=1)


def test_small_networks_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"depth": 2, "width": 8, "epochs": 1.0, "data": "digits?train=96", "device": "cpu", "top": 2, "images": 1}
    ours = residua.counterfactual("shortcut", **options)
    assert list(tmp_path.glob("counterfactuals*")) == []
    typed(capsys, "counterfactual", "shortcut", *_flags(options), "--out", "theirs")
    theirs = json.loads(Path("theirs/counterfactual.json").read_text())
    assert [outcome.accuracy for outcome in ours] == [outcome["accuracy"] for outcome in theirs]
    with pytest.raises(ValueError, match="kind is shortcuts; expected shortcut or classes or"):
        residua.counterfactual("shortcuts")


def test_the_unconstrained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, laws = residua.ujm(depth=3, penalty="kinetic", out=tmp_path / "ours")
    typed(capsys, "ujm", "--depth", "3", "--penalty", "kinetic", "--out", "theirs")
    assert Path("ours/ujm.json").read_text() == Path("theirs/ujm.json").read_text()
    assert json.loads(Path("ours/ujm.json").read_text())["accuracy"] == model.accuracy()
    assert residua.ujm(depth=3, penalty="kinetic").laws.scalars() == laws.scalars()
    with pytest.raises(ValueError, match="depth is deep; expected a whole number"):
        residua.ujm(depth="deep")


def test_an_export(run: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = residua.export(run, "safetensors", tmp_path / "ours")
    typed(capsys, "export", run, "--to", "safetensors", "--out", "theirs")
    files = [load_file(Path(name, "model.safetensors")) for name in ("ours", "theirs")]
    assert all(torch.equal(x, files[1][name]) for name, x in files[0].items())
    again = residua.export.export(model, "safetensors", tmp_path / "again")
    assert again.largest == result.largest
    with pytest.raises(ValueError, match="exists: choose another --out, or --overwrite"):
        residua.export(run, to="safetensors", out="ours")
    with pytest.raises(ValueError, match="--push uploads hub folders"):
        residua.export(run, "timm", push="me/tiny")
    with pytest.raises(ValueError, match="no option named licence; did you mean 'license'"):
        residua.export(run, "hub", licence="mit")


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    page = residua.demo(tmp_path / "demo", quick=True)
    assert page == tmp_path / "demo" / "report.html"
    assert page.is_file()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match="no option named fast; known: "):
        residua.demo(fast=True)


FRESH = """
import residua.evaluate.knn, residua.commands.evaluate
import torch
found = residua.evaluate.knn((torch.eye(4), torch.arange(4) % 2), (torch.eye(4), torch.arange(4) % 2), k=1)
assert found.accuracy == 100
from residua.evaluate import clusters, generative, suite, table
assert residua.evaluate.embed is residua.embed and residua.evaluate.segment is residua.segment
assert callable(residua.evaluate) and residua.evaluate.__name__ == "residua.evaluate"
import residua.anatomy.network, residua.export.fold, residua.anatomy.jacobian
assert residua.anatomy.jacobian_svd(lambda x: 2 * x, torch.ones(1, 3), k=1).S.item() == 2
assert callable(residua.anatomy) and callable(residua.export) and callable(residua.export.fold_vit)
model = residua.create_model("vit_nano", img_size=16, patch_size=4, depth=1)
print(residua.evaluate(model, data="shapes?n=40&size=16&test=20", probe=None).value("kNN") > 0)
assert {"Run", "embed", "evaluate", "pretrain"} <= set(dir(residua))
"""


def test_a_package_is_called_and_its_names_are_functions_whatever_was_imported_before() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_types_are_declared_for_every_name() -> None:
    """`__init__.pyi` against `__init__.py`."""
    stub = Path(residua.__file__).with_suffix(".pyi").read_text()
    listed: dict[str, Any] = {}
    exec(stub[stub.index("__all__ = ") : stub.index("]", stub.index("__all__ = ")) + 1], listed)
    assert sorted(listed["__all__"]) == residua.__all__
