"""Features of diffusion models: what is read at a noise level, and what is chosen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residua
from residua import cli
from residua.data import DataError, Preprocessing, Splits, mixing, rng
from residua.data.arrays import ArraySource
from residua.evaluate import suite
from residua.evaluate.diffusion import (
    NoisedReader,
    best,
    block_names,
    evaluate_diffusion,
    grid,
    grid_table,
    noised_subject,
    untrained,
)
from residua.evaluate.report import Report, Score
from residua.nn.diffusion import VP, Flow
from residua.train.checkpoint import write_checkpoint

DATA = "shapes?n=120&size=16&test=60&classes=3"


def network(name: str = "uvit", **options: Any) -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "in_chans": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model: Any = residua.create_model(name, **shape | {"zero_init": False} | options).eval()
    model.process = VP() if name == "uvit" else Flow()
    model.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    return model


@pytest.mark.parametrize("name", ["uvit", "sit"])
def test_what_reads_encoders_points_to_what_reads_diffusion_models(name: str) -> None:
    for read in (suite.evaluate, residua.evaluate.extract):
        with pytest.raises(TypeError, match=r"is a diffusion model.* use residua\.evaluate$"):
            read(network(name), DATA)


@pytest.mark.parametrize("name", ["uvit", "sit"])
def test_a_feature_is_the_mean_of_patches_of_the_noised_image(name: str) -> None:
    model = network(name, num_classes=3)
    x, index, t = torch.rand(4, 3, 16, 16) * 2 - 1, torch.tensor([3, 8, 100, 5]), 0.2
    read = NoisedReader(model, [("t=0.2", 0), ("t=0.2", 1), ("t=0.05", 1)], seed=7)
    with torch.no_grad():
        found = read(x, index)
        eps = mixing.normal(rng.uniform(7, 0, index, x[0].numel(), "probe")).view_as(x)
        times = torch.full((4,), t)
        x_t = model.process.a(times[0]) * x + model.process.s(times[0]) * eps
        taps: dict[str, Any] = {}
        model.forward_features(x_t, 999 * times, torch.full((4,), 3), tap=taps.__setitem__)  # 3: no label
    assert set(found) == {("t=0.2", 0), ("t=0.2", 1), ("t=0.05", 1)}
    for layer in (0, 1):
        stream = taps[block_names(model)[layer]][:, model.num_prefix_tokens :]
        assert torch.allclose(found["t=0.2", layer], stream.mean(1), atol=1e-5)
    assert not torch.allclose(found["t=0.05", 1], found["t=0.2", 1], atol=1e-3)


def test_latents_are_noised_as_images_are() -> None:
    class Halves:
        """In place of an autoencoder."""

        def encode(self, images: torch.Tensor) -> torch.Tensor:
            return 0.5 * images[:, :, ::2, ::2]

    model, columns, index = network(img_size=8), [("t=0.1", 1)], torch.arange(4)
    x = torch.rand(4, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        found = NoisedReader(model, columns, 7, Halves())(x, index)  # type: ignore[arg-type]
        expected = NoisedReader(model, columns, 7)(0.5 * x[:, :, ::2, ::2], index)
    assert torch.equal(found["t=0.1", 1], expected["t=0.1", 1])


def test_kept_features_are_of_one_process_seed_and_split() -> None:
    model = network()

    def identity(seed: int = 0, part: str = "train") -> str:
        return json.dumps(noised_subject(model, [0], [0.1], seed, part=part).identity(), sort_keys=True)

    before = identity()
    assert len({before, identity(seed=1), identity(part="test")}) == 3
    model.process = Flow()
    assert identity() != before


def test_the_untrained_network_has_branches_and_repeats_with_the_seed() -> None:
    model = network(zero_init=True)
    assert not model.mid_block.mlp.fc2.weight.any()
    one, same, other = (untrained(model, seed).mid_block.mlp.fc2.weight for seed in (1, 1, 2))
    assert one.any()
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_limit_seed_and_repeated_levels() -> None:
    options: dict[str, Any] = {"layers": "last", "baselines": False, "knn": False, "probe": "simple", "epochs": 1}
    report = evaluate_diffusion(network(), DATA, times=(0.3, 0.1, 0.3), limit=30, seed=2, **options)
    assert (report.n_train, report.n_test, report.readout) == (30, 30, "t=0.1, t=0.3")
    assert report.probes["model"]["seed"] == report.seed == 2


def test_noise_does_not_tell_a_test_image_from_others() -> None:
    """Images that are all alike, sorted by class in both splits: what could tell them is noise that splits share."""
    sides = [ArraySource("grey", part, np.full((200, 16, 16, 3), 128, np.uint8), np.arange(200) // 100, ["a", "b"])
             for part in ("train", "test")]  # fmt: skip
    options: dict[str, Any] = {"probe": None, "times": (0.5,), "layers": "last", "baselines": False, "k": 1}
    found = evaluate_diffusion(network(), Splits("grey", *sides), **options)
    assert 35 < found.value("kNN") < 65


def test_blocks_are_counted_through_both_halves() -> None:
    assert block_names(network()) == ["in_blocks.0.mlp", "mid_block.mlp", "out_blocks.0.mlp"]
    assert block_names(network("sit")) == ["blocks.0.mlp", "blocks.1.mlp"]


def test_features_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = network()
    options: dict[str, Any] = {"probe": "lbfgs", "times": (0.1, 0.3), "baselines": False}
    one = evaluate_diffusion(model, DATA, batch_size=128, cache=tmp_path, **options)
    other = evaluate_diffusion(model, DATA, batch_size=7, **options)
    again = evaluate_diffusion(model, DATA, batch_size=128, cache=tmp_path, **options)
    values = [[s.value for s in r.scores] for r in (one, other, again)]
    assert values[0] == values[2]
    assert values[1] == pytest.approx(values[0], abs=4)  # rounding may turn an image or two
    assert any(tmp_path.iterdir())


def test_a_model_that_never_went_without_labels_is_told(recwarn: pytest.WarningsRecorder) -> None:
    model, options = network(num_classes=3), {"probe": None, "times": (0.1,), "layers": "last", "baselines": False}
    model.label_dropout = 0.1
    evaluate_diffusion(model, DATA, **options)
    assert not [w for w in recwarn if "label_dropout" in str(w.message)]
    model.label_dropout = 0.0
    with pytest.warns(UserWarning, match="trained with label_dropout 0, so never without labels"):
        evaluate_diffusion(model, DATA, **options)


def test_layer_and_noise_are_chosen_on_held_out_training_images() -> None:
    report = evaluate_diffusion(network(), DATA, probe="lbfgs", times=(0.02, 0.1, 0.9), rank=True)
    table = grid(report)
    assert list(table) == [0, 1, 2]
    assert list(table[0]) == ["t=0.02", "t=0.1", "t=0.9"]
    result = report.probes["model"]
    held = {(h["layer"], h["readout"]): 0.0 for h in result["grid"]}
    assert set(held) == {(layer, t) for layer in table for t in table[0]}
    assert best(report) == (result["best"]["layer"], result["best"]["readout"])
    assert report.value("linear probe") == table[best(report)[0]][best(report)[1]]
    subjects = {s.subject for s in report.scores}
    assert subjects == {"model", "random init", "pixels"}
    assert {s.layer for s in report.scores if s.subject == "random init"} == {2}  # the last stands for all
    assert grid_table(report).row_count == grid_table(report, "kNN").row_count == 5
    json.loads(report.to_json())


def test_a_table_of_ranks_marks_nothing() -> None:
    report = evaluate_diffusion(network(), DATA, probe=None, times=(0.02, 0.9), rank=True)
    table = grid_table(report, "entropy rank")
    cells = [list(column.cells) for column in table.columns]
    ranks = grid(report, "entropy rank")
    assert cells[0] == ["0", "1", "2", "random init, last", "pixels"]
    assert cells[2][:3] == [f"{ranks[layer]['t=0.9']:.2f}" for layer in ranks]
    assert cells[1][-1] == f"{report.value('entropy rank', 'pixels'):.2f}"
    assert str(table.title).startswith("entropy rank, nats")
    assert table.caption == "of the test images; mean of patch tokens"
    half = evaluate_diffusion(network(), DATA, probe=None, times=(0.9,), rank=True, baselines=False, bf16=True)
    rank, same = grid(half, "entropy rank")[2]["t=0.9"], ranks[2]["t=0.9"]
    assert rank != same
    assert rank == pytest.approx(same, rel=0.02)


def test_a_little_noise_costs_less_than_much() -> None:
    """Nothing of an image is left at t = 0.99: its features cannot know the class."""
    model = network(in_chans=1, img_size=8, patch_size=2, embed_dim=32)
    model.preprocessing = Preprocessing((8, 8), (0.5,), (0.5,), 1)
    report = evaluate_diffusion(model, "digits", probe="lbfgs", times=(0.02, 0.99), layers=[0], baselines=False)
    row = grid(report)[0]
    assert row["t=0.02"] > 50
    assert row["t=0.99"] < 20


@pytest.mark.parametrize("probe", ["simple", "cached"])
def test_other_protocols(probe: Any) -> None:
    options: dict[str, Any] = {"epochs": 3, "learning_rates": (1e-2,), "times": (0.05,), "baselines": False}
    report = evaluate_diffusion(network(), DATA, probe=probe, knn=False, views=1, **options)
    assert 0 <= report.value("linear probe") <= 100


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        evaluate_diffusion(network(), DATA, times=(0.5, 1.5))
    with pytest.raises(ValueError, match="new views"):
        evaluate_diffusion(network(), DATA, probe="mae")
    with pytest.raises(ValueError, match="no diffusion model"):
        evaluate_diffusion(residua.create_model("vit_nano", img_size=16, patch_size=4), DATA)
    with pytest.raises(DataError, match="1 channels"):
        evaluate_diffusion(network(), "digits")
    with pytest.raises(ValueError, match="do not exist"):
        evaluate_diffusion(network(), DATA, layers=[3])
    with pytest.raises(ValueError, match="unknown probe protocol 'nothing'; there are"):
        evaluate_diffusion(network(), DATA, probe="nothing")  # type: ignore[arg-type]
    alike = ArraySource(
        "alike", "train", np.zeros((8, 16, 16, 3), np.uint8), classes=["a"], labels=np.zeros(8, np.int64)
    )
    with pytest.raises(DataError, match="alike has no labels of two classes or more"):
        evaluate_diffusion(network(), Splits("alike", alike, alike), probe=None, times=(0.1,), baselines=False)
    lost = network()
    lost.process = None
    with pytest.raises(ValueError, match="lacks a process"):
        evaluate_diffusion(lost, DATA)


def test_votes_that_cannot_be_are_refused_before_the_work() -> None:
    model = network()
    model.forward_features = lambda *_, **__: pytest.fail("work was done")
    with pytest.raises(ValueError, match=r"k must be"):
        evaluate_diffusion(model, DATA, k=0)
    with pytest.raises(ValueError, match="temperature must be"):
        evaluate_diffusion(model, DATA, temperature=0.0)


def test_a_model_in_a_launchers_wrapping_is_scored_where_the_launcher_says() -> None:
    class Launcher:
        device = torch.device("cpu")

        def unwrap_model(self, model: Any) -> Any:
            return model.module

    options: dict[str, Any] = {"probe": None, "times": (0.1,), "baselines": False}
    wrapped = torch.nn.DataParallel(network())
    found = evaluate_diffusion(wrapped, DATA, accelerator=Launcher(), **options)
    assert found.scores == evaluate_diffusion(network(), DATA, **options).scores


def test_a_probe_that_diverged_is_not_the_best() -> None:
    report = Report("d", "t=0.1, t=0.2", [0, 1], (16, 16), 10, 10, "test split", 0)
    for layer, level, value in ((0, "t=0.1", float("nan")), (1, "t=0.1", 30.0), (1, "t=0.2", 40.0)):
        report.scores.append(Score("linear probe", "model", layer, value, "%", {"readout": level}))
    assert best(report) == (1, "t=0.2")
    with pytest.raises(KeyError, match="no 'kNN' in this report"):
        best(report, "kNN")


def test_the_command_writes_tables_figure_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 1, network(), {})
    args = ["evaluate", str(tmp_path), "--data", DATA, "--device", "cpu", "--probe", "lbfgs"]
    assert cli.main([*args, "--times", "0.05", "0.3"]) == 0
    out = capsys.readouterr().out
    assert "t=0.05" in out
    assert "t=0.3" in out
    assert "linear probe (lbfgs), %" in out
    assert "entropy rank, nats" in out
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    assert stored["readout"] == "t=0.05, t=0.3"
    assert (tmp_path / "evaluation-probe.png").exists()
    assert (tmp_path / "evaluation-knn.png").exists()
    assert cli.main([*args, "--times", "0.05", "--no-rank"]) == 0
    assert "entropy rank" not in capsys.readouterr().out
    assert cli.main([*args, "--geometry"]) == 2
    assert "--geometry is not for diffusion models" in capsys.readouterr().err


def test_of_several_k_the_test_images_choose_none() -> None:
    report = Report("d", "t=0.1, t=0.2", [0, 1], (16, 16), 10, 10, "test split", 0)
    for k, layer, level, value, chosen in (
        (5, 0, "t=0.1", 30.0, True), (9, 0, "t=0.1", 20.0, False),
        (5, 1, "t=0.2", 40.0, False), (9, 1, "t=0.2", 50.0, True),
    ):  # fmt: skip
        settings = {"k": k, "T": 0.07, "readout": level} | ({"chosen": True} if chosen else {})
        report.scores.append(Score("kNN", "model", layer, value, "%", settings))
    assert best(report, "kNN") == (0, "t=0.1")
    assert list(grid_table(report, "kNN").columns[1].cells) == ["30.0 *", "nan"]
