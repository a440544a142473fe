"""What is typed arrives where it is used."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from residua import cli
from residua.anatomy.study import Look
from residua.commands.sample import Options

TINY = """
pretrain --data shapes?n=48&size=16&test=16 --size nano --depth 2 --embed-dim 32 --num-heads 2 --decoder-embed-dim 32
--decoder-depth 1 --patch-size 4 --batch-size 16 --steps 1 --no-evaluate --cpu --out
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options") / "run"
    assert cli.main([*TINY.split(), str(folder)]) == 0
    return folder


class Called(Exception):
    """What a function was called with."""


def arrived(monkeypatch: pytest.MonkeyPatch, function: str, *typed: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a command hands to MODULE:NAME, which is not carried out."""

    def stop(*args: Any, **options: Any) -> None:
        raise Called(args, options)

    module, _, name = function.partition(":")
    monkeypatch.setattr(importlib.import_module(module), name, stop)
    with pytest.raises(Called) as caught:
        cli.main(list(typed))
    args, options = caught.value.args
    return args, options


EVALUATED = """
evaluate RUN --no-knn --probe cached --no-rank --layers 0 1 --learning-rates 0.1 0.2 --weight-decays 0.3 --epochs 7
--k 3 4 --temperature 0.05 --batch-size 9 --limit 11 --seed 5 --no-baselines --on-bad-image skip --bf16 --no-cache
--device meta"""
SCORES: dict[str, Any] = {
    "knn": False, "probe": "cached", "rank": False, "layers": [0, 1], "learning_rates": (0.1, 0.2),
    "weight_decays": (0.3,), "epochs": 7, "k": (3, 4), "temperature": 0.05, "batch_size": 9, "limit": 11, "seed": 5,
    "baselines": False, "on_bad_image": "skip", "bf16": True, "cache": None, "device": "meta",
}  # fmt: skip
ARRIVING: dict[str, tuple[str, dict[str, Any]]] = {
    "residua.evaluate.suite:evaluate": (
        EVALUATED + " --geometry --shots 1 5 --readout cls patches --img-size 24 16",
        SCORES | {"geometry": True, "shots": (1, 5), "readout": ("cls", "patches"), "img_size": (24, 16)},
    ),
    "residua.evaluate.diffusion:evaluate_diffusion": (
        EVALUATED + " --times 0.3 0.6",
        SCORES | {"times": (0.3, 0.6)},
    ),
    "residua.evaluate.table:write_table": (
        "embed RUN --data digits --layers 1 --readout cls --img-size 24 --batch-size 9 --on-bad-image skip "
        "--device meta",
        {"layers": [1], "readout": "cls", "img_size": (24, 24), "batch_size": 9, "on_bad_image": "skip",
         "device": "meta"},
    ),
    "residua.evaluate.clusters:segment": (
        "segment RUN --masks m --split train --layer 0 --max-images 7 --img-size 24 16 --intra 3 --inter 4 "
        "--ignore-index 9 --count-absent --seed 5 --no-baselines --batch-size 6 --on-bad-image skip --device meta",
        {"masks": "m", "split": "train", "layer": 0, "max_images": 7, "img_size": (24, 16), "intra": 3, "inter": 4,
         "ignore_index": 9, "count_absent": True, "seed": 5, "baselines": False, "batch_size": 6,
         "on_bad_image": "skip", "device": "meta"},
    ),
    "residua.evaluate.generative:score": (
        "score s --reference r --kid --prc --extractor e --weights w --readout cls --layer 0 --img-size 24 16 "
        "--split test --reference-split train --limit 11 --reference-limit 12 --k 5 --subsets 6 --subset-size 7 "
        "--seed 8 --batch-size 9 --bf16 --on-bad-image skip --no-cache --device meta",
        {"metrics": ["kid", "prc"], "extractor": "e", "weights": "w", "readout": "cls", "layer": 0,
         "img_size": (24, 16), "split": "test", "reference_split": "train", "limit": 11, "reference_limit": 12,
         "k": 5, "subsets": 6, "subset_size": 7, "seed": 8, "batch_size": 9, "bf16": True, "on_bad_image": "skip",
         "cache": None, "device": "meta"},
    ),
    "residua.report:compare": (
        "compare a b --dynamics --limit 7 --colors spectral --device meta",
        {"along": True, "limit": 7, "basis": "spectral", "device": "meta"},
    ),
    "residua.export:write": (
        "export RUN --to hub --overwrite --no-ema --license mit --push me/tiny",
        {"overwrite": True, "ema": False, "license": "mit", "name": "me/tiny"},
    ),
    "residua.data:preview": (
        "data preview digits --n 9 --img-size 20 --augmented --on-bad-image skip",
        {"n": 9, "img_size": 20, "augmented": True, "on_bad_image": "skip"},
    ),
    "residua.anatomy:solve": (
        "ujm --penalty kinetic --lam 0.2 --lam-w 0.3 --seed 5",
        {"penalty": "kinetic", "lam": 0.2, "lam_w": 0.3, "seed": 5},
    ),
    "residua.anatomy.study:study": ("anatomy RUN --device meta", {"device": "meta"}),
    "residua.anatomy.counterfactual:plan": (
        "counterfactual decay --network resconv --data shapes --depth 3 --width 9 --alpha-min 0.7 --classes 3 "
        "--drop-path 0.2 --norm --seeds 2 --seed 5 --epochs 4 --lr 0.2 --weight-decay 0.3 --batch-size 6",
        {"network": "resconv", "data": "shapes", "depths": (3,), "width": 9, "alphas": (0.7,), "classes": (3,),
         "rates": (0.2,), "norm": True, "seeds": 2, "seed": 5, "epochs": 4.0, "lr": 0.2, "weight_decay": 0.3,
         "batch_size": 6},
    ),
    "residua.anatomy.counterfactual:run": (
        "counterfactual decay --gauge J/alpha --split test --jobs 3 --device meta",
        {"gauges": ("J/alpha",), "split": "test", "jobs": 3, "device": "meta"},
    ),
    "residua.report.demo:demo": ("demo --quick", {"quick": True}),
}  # fmt: skip
"""Function -> what is typed, and the options that it is then called with, none of them as they are by default."""


@pytest.mark.parametrize("function", ARRIVING)
def test_every_option_arrives(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("residua.evaluate.diffusion.is_diffusion", lambda model: "diffusion" in function)
    typed, options = ARRIVING[function]
    _, found = arrived(monkeypatch, function, *typed.replace("RUN", str(run)).split())
    assert {name: found[name] for name in options} == options


def test_what_has_no_name_arrives_in_order(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def given(function: str, *typed: str) -> tuple[Any, ...]:
        with monkeypatch.context() as patched:
            return arrived(patched, function, *typed)[0]

    sizes = "--dim 5 --samples 30 --classes 3 --noise 0.2 --seed 4"
    assert given("residua.anatomy:blobs", "ujm", *sizes.split()) == (5, 30, 3, 0.2, 4)
    assert given("residua.anatomy:solve", "ujm", "--depth", "3")[2] == 3
    look = "--top 4 --images 3 --gauge J/alpha --token 0 --time 0.3 --precision float32 --method lanczos --budget 0.5"
    args = ["anatomy", str(run), *look.split(), "--classes", "6", "--seed", "5", "--split", "test"]
    _, splits, split, found = given("residua.anatomy.study:study", *args, "--data", "digits")
    assert (splits.train.name, split) == ("digits", "test")
    assert found == Look(
        k=4, images=3, gauge="J/alpha", token=0, time=0.3, precision="float32", method="lanczos", budget=0.5,
        classes=6, seed=5,
    )  # fmt: skip
    _, folder, found = given(
        "residua.anatomy.counterfactual:run", "counterfactual", "depth", "--top", "4", "--images", "3"
    )
    assert (str(folder), found) == ("counterfactuals/depth", Look(k=4, images=3))
    args = ["embed", str(run), "--data", "digits", "--out", "f.parquet"]
    _, data, out = given("residua.evaluate.table:write_table", *args)
    assert (data.train.name, str(out)) == ("digits", "f.parquet")
    assert given("residua.export:write", "export", str(run), "--to", "onnx", "--out", "o") == (str(run), "onnx", "o")
    assert given("residua.report:compare", "compare", "a", "b", "--out", "p") == (
        [Path("a"), Path("b")],
        Path("p"),
    )
    assert given("residua.evaluate.generative:score", "score", "s", "--reference", "r") == ("s", "r")
    made = given("residua.commands.sample:plan", "score", str(run), "-n", "7", "--latents", "vae", "--device", "meta")
    assert made == (Options(str(run), n=7, latents="vae", device="meta"),)
    assert given("residua.data:preview", "data", "preview", "digits", "--out", "p.png")[1] == Path("p.png")


@pytest.mark.parametrize("command", ["evaluate", "embed", "anatomy"])
def test_weights_and_size_of_a_model_by_name_arrive(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [command, "timm:test_vit", "--weights", "w.pt", "--data", "digits"]
    with monkeypatch.context() as patched:
        assert arrived(patched, "residua:load", *args) == (("timm:test_vit",), {"weights": "w.pt"})
    found = arrived(monkeypatch, "residua.adapt:open_model", *args, "--img-size", "24", "16")
    assert found == (("timm:test_vit", "w.pt"), {"img_size": (24, 16)})
