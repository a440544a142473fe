"""Networks looked at from all sides, and networks that differ in one thing."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residua
from residua.adapt import Foreign
from residua.anatomy import counterfactual, jacobian_svd, neural_collapse
from residua.anatomy import study as study_module
from residua.anatomy.counterfactual import plan, points, run
from residua.anatomy.study import Look, _drawn, _shown, along, balanced, preprocessing, study
from residua.anatomy.study import _features as layer_features
from residua.data import DataError, Preprocessing
from residua.evaluate import extract, knn
from residua.nn.diffusion import VP
from residua.train.checkpoint import checkpoints, write_checkpoint

LOOK = Look(k=6, images=3, per_class=2)
QUICK: dict[str, Any] = {"width": 12, "depths": (3,), "epochs": 1.0}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def digits() -> residua.data.Splits:
    return residua.data.load("digits?classes=3")


def classifier(**options: Any) -> Any:
    model = residua.create_model("resmlp", img_size=8, in_chans=1, num_classes=3, depth=4, width=12, **options)
    return model.eval()


def test_images_are_chosen_evenly_over_classes(digits: residua.data.Splits) -> None:
    chosen = balanced(digits.train, 7, seed=1)
    assert len(set(chosen)) == 7
    assert sorted(np.bincount(digits.train.labels[chosen]).tolist()) == [2, 2, 3]
    assert chosen == balanced(digits.train, 7, seed=1)
    assert chosen != balanced(digits.train, 7, seed=2)


def test_a_classifier_on_both_splits(digits: residua.data.Splits) -> None:
    model = classifier(alpha_min=0.7)
    found = study(model, digits, look=LOOK)
    assert [part.split for part in found.parts] == ["train", "test"]
    part = found.parts[1]
    assert part.laws.S.shape == (3, 4, 6)
    assert part.laws.classes == 3
    assert part.paths.shape == (5, 6, 2)  # two of each of three classes
    assert sorted(part.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    assert list(part.collapse) == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert all(layer.nc3 is not None for layer in part.collapse.values())  # all as wide as what the head sees
    json.dumps(found.to_dict())
    x = model.preprocessing or study.__globals__["preprocessing"](model, digits.train)
    images = x([digits.test.read(i) for i in range(len(digits.test))])
    with torch.no_grad():
        labels = torch.from_numpy(digits.test.labels)
        direct = neural_collapse(model.pooled(images), labels, model.head.weight, model(images).argmax(1))
        accuracy = float((model(images).argmax(1) == labels).double().mean())
    assert part.collapse["blocks.3"].nc1 == pytest.approx(direct.nc1, rel=1e-4)
    assert part.collapse["blocks.3"].nc4 == pytest.approx(direct.nc4)
    assert part.accuracy == pytest.approx(100 * accuracy)


def test_paths_are_those_of_the_stream_in_one_plane(digits: residua.data.Splits) -> None:
    model = classifier()
    one, other = (study(model, digits, split, LOOK).parts[0] for split in ("train", "test"))
    steps = one.paths.diff(dim=0)
    assert steps.shape == (4, 6, 2)
    again = study(model, digits, "train", LOOK).parts[0]
    assert torch.equal(again.paths, one.paths)
    assert not torch.equal(other.paths, one.paths)


def test_paths_and_labels_are_of_the_same_images(digits: residua.data.Splits) -> None:
    model, look = classifier(), replace(LOOK, per_class=10)
    part, drawn = study(model, digits, "test", look).parts[0], _drawn(digits.test, look)
    assert part.labels.tolist() == digits.test.labels[drawn].tolist()
    with torch.no_grad():
        start = model.embed(preprocessing(model, digits.train)([digits.test.read(i) for i in drawn]))
    start = start.flatten(1).double()  # 30 points in 12 dimensions: a plane that all fit is no accident
    plane = torch.linalg.pinv(start) @ part.paths[0]  # features may be dead
    torch.testing.assert_close(start @ plane, part.paths[0], rtol=0, atol=1e-5)


def test_paths_are_drawn_of_the_first_classes(digits: residua.data.Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "MOST_CLASSES", 2)
    drawn = _drawn(digits.test, replace(LOOK, per_class=5))
    assert np.bincount(digits.test.labels[drawn]).tolist() == [5, 5]


def test_paths_in_the_other_gauge_are_those_of_the_ordinary_network(digits: residua.data.Splits) -> None:
    model = classifier(alpha_min=0.5)
    faded, ordinary = (study(model, digits, "test", replace(LOOK, gauge=g)).parts[0] for g in ("J", "J/alpha"))
    left = torch.cat([torch.ones(1), residua.stream(model).alphas.detach().cumprod(0)]).double()
    torch.testing.assert_close(ordinary.paths, faded.paths / left[:, None, None])
    own = residua.stream(model).alphas.detach().double()
    torch.testing.assert_close(ordinary.laws.S, faded.laws.S / own[:, None])


def test_what_is_asked_for_goes_before_what_is_known(digits: residua.data.Splits) -> None:
    model = classifier()
    assert study(model, digits, "test", replace(LOOK, classes=2)).parts[0].laws.classes == 2
    model.preprocessing = Preprocessing((8, 8), (0.2,), (0.3,), 1)
    assert preprocessing(model, digits.train) == model.preprocessing


def autoencoder() -> Any:
    return residua.create_model("mae_vit", img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2,
                                decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=1,
                                zero_init=False).eval()  # fmt: skip


def test_layers_of_an_encoder_are_means_of_its_tokens() -> None:
    shapes, model = residua.data.load("shapes?n=24&size=8&test=12"), autoencoder()
    part = study(model, shapes, "test", LOOK).parts[0]
    pre, taps = preprocessing(model, shapes.train), {}
    with torch.no_grad():
        images = pre([shapes.test.read(i) for i in range(len(shapes.test))])
        model.encoder.forward_features(images, tap=taps.__setitem__)
    assert list(part.collapse) == list(taps)
    for name, tokens in taps.items():
        direct = neural_collapse(tokens.mean(1), torch.from_numpy(shapes.test.labels))
        assert part.collapse[name].nc1 == pytest.approx(direct.nc1, rel=1e-3)


def test_encoders_have_no_c_and_no_head() -> None:
    shapes, model = residua.data.load("shapes?n=24&size=8&test=12"), autoencoder()
    whole = study(model, shapes, "test", LOOK).parts[0]
    assert whole.laws.S.shape == (3, 4, 6)
    assert "RA3" not in whole.laws.verdicts()
    assert whole.accuracy is None
    assert next(iter(whole.collapse)) == "embed"
    single = study(model, shapes, "test", Look(k=30, images=2, per_class=1, token=0)).parts[0]
    assert single.laws.S.shape == (2, 4, 12)  # a token has 12 dimensions


def test_what_cannot_be_studied_is_refused(digits: residua.data.Splits) -> None:
    with pytest.raises(ValueError, match="no residual blocks found"):
        study(torch.nn.Linear(2, 2), digits)
    unknown = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Sequential does not say which input it takes; in Python.*alignment\(model"):
        study(unknown, digits)
    latent = residua.create_model("uvit", img_size=8, patch_size=4, in_chans=4, embed_dim=12, depth=2, num_heads=2)
    latent.autoencoder = object()
    with pytest.raises(ValueError, match="not shown images"):
        study(latent, digits)
    with pytest.raises(DataError, match="takes 3"):
        study(residua.create_model("resmlp", img_size=8, depth=2, width=4), digits)
    with pytest.raises(ValueError, match="split is 'valid'"):
        study(classifier(), digits, "valid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        Look(images=0)
    with pytest.raises(ValueError, match="seed is -1"):
        Look(seed=-1)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"classes is {wrong}"):
            study(classifier(), digits, "test", replace(LOOK, classes=wrong))


# ---------------------------------------------------------------- counterfactuals


def test_plans_vary_one_thing() -> None:
    cases = plan("shortcut", depths=(4, 8), seeds=2)
    assert len(cases) == len({case.name for case in cases}) == 8
    without = [c.settings for c in cases if c.series == "no shortcuts"]
    assert all((s["alpha_min"], s["schedule"]) == (0.0, "constant") for s in without)
    assert [c.settings["data"] for c in plan("classes", data="shapes?n=9", classes=(2, 3))] == [
        "shapes?n=9&classes=2", "shapes?n=9&classes=3",
    ]  # fmt: skip
    for kind, key in (("decay", "alpha_min"), ("depth", "depth"), ("stochastic-depth", "drop_path")):
        depths = (4, 8) if kind == "depth" else (16,)
        planned = plan(kind, depths=depths)
        assert [c.settings[key] for c in planned] == [c.x for c in planned]
    with pytest.raises(ValueError, match="one depth"):
        plan("decay", depths=(4, 8))
    with pytest.raises(ValueError, match="no counterfactual"):
        plan("width")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two blocks"):
        plan("depth", depths=(1,))


def test_finished_networks_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = plan("decay", alphas=(1.0, 0.5), data="digits?classes=2", **QUICK)
    folder = tmp_path / "study"
    first = run(cases[:1], folder, LOOK, gauges=("J",))
    trained: list[str] = []
    original = counterfactual.finetune
    monkeypatch.setattr(counterfactual, "finetune", lambda *a, **k: (trained.append(k["out"]), original(*a, **k))[1])
    both = run(cases, folder, LOOK, gauges=("J", "J/alpha"))
    assert trained == [str(folder / cases[1].name)]
    assert both[0].laws["J"] == first[0].laws["J"]
    run(cases, folder, LOOK, gauges=("J", "J/alpha"))
    assert len(trained) == 1
    assert run(cases, folder, LOOK, gauges=("J",))[0].reused
    s_j, s_alpha = (both[1].laws[g]["singular_values"] for g in ("J", "J/alpha"))
    assert s_alpha[-1][0] == pytest.approx(s_j[-1][0] / 0.5)
    found = points(both, "alpha_min", "RA1 line shape")
    assert [p.x for p in found] == [0.5, 1.0]
    with pytest.raises(ValueError, match="choose another --out"):
        run(plan("decay", alphas=(1.0,), data="digits?classes=2", **QUICK | {"width": 8}), folder, LOOK)


def test_what_cannot_be_trained_or_measured_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(counterfactual, "finetune", refuse)
    for wrong in ({"alphas": (0.5, 2.0)}, {"rates": (0.5, 1.5)}, {"classes": (2, 1)}):
        with pytest.raises(ValueError, match="give at least 2 classes"):
            plan("decay", **wrong)
    with pytest.raises(DataError, match="classes=11"):
        run(plan("classes", classes=(2, 11), **QUICK), tmp_path / "a", LOOK)
    for kind in ("shortcut", "decay"):
        cases = plan(kind, alphas=(0.5, 0.0), data="digits?classes=2", **QUICK)
        with pytest.raises(ValueError, match="use gauge J alone"):
            run(cases, tmp_path / "b", LOOK, gauges=("J", "J/alpha"))


def test_a_network_that_failed_before_training_does_not_keep_its_folder(tmp_path: Path) -> None:
    wrong, right = (plan("decay", alphas=(0.5,), data="digits?classes=2", **QUICK | {"width": w}) for w in (0, 8))
    with pytest.raises(ValueError, match=r"width .*0"):
        run(wrong, tmp_path, LOOK)
    home = tmp_path / right[0].name
    (home / "checkpoints").mkdir(exist_ok=True)  # as where getting ready fails later than that
    (home / ".lock").touch()
    assert run(right, tmp_path, LOOK)[0].case == right[0]


def test_a_value_given_twice_is_one_network() -> None:
    assert [case.x for case in plan("decay", alphas=(0.5, 1.0, 0.5))] == [0.5, 1.0]


def test_seeds_are_one_point_and_jobs_change_nothing(tmp_path: Path) -> None:
    cases = plan("decay", alphas=(0.5,), data="digits?classes=2", seeds=2, seed=3, **QUICK)
    assert [case.seed for case in cases] == [case.settings["seed"] for case in cases] == [3, 4]
    one = run(cases, tmp_path / "one", LOOK)
    both = run(cases, tmp_path / "both", LOOK, jobs=2)
    assert [o.case for o in both] == cases
    for a, b in zip(one, both):
        assert b.accuracy == pytest.approx(a.accuracy)
        first, second = (o.laws["J"]["scalars"]["RA1 line shape"]["mean"] for o in (a, b))
        assert second == pytest.approx(first, rel=1e-3)
    (point,) = points(one, "alpha_min", "RA1 line shape")
    means = [o.laws["J"]["scalars"]["RA1 line shape"]["mean"] for o in one]
    assert point.mean == pytest.approx(np.mean(means))
    assert point.spread == pytest.approx(np.std(means, ddof=1))
    (right,) = counterfactual.accuracies(one, "alpha_min")
    assert right.mean == pytest.approx(np.mean([o.accuracy for o in one]))
    with pytest.raises(ValueError, match="at least one"):
        run(cases, tmp_path / "none", LOOK, jobs=0)


def test_every_checkpoint_of_a_run(tmp_path: Path, digits: residua.data.Splits) -> None:
    out = tmp_path / "run"
    residua.evaluate.finetune("resmlp", "digits?classes=3", out=str(out), depth=3, width=8, steps=4, batch_size=32,
                              checkpoint_every=2, keep=0, cpu=True, trackers=())  # fmt: skip
    seen: list[int] = []
    moments = along(out, digits, LOOK, each=lambda moment: seen.append(moment.step))
    assert seen == [moment.step for moment in moments] == [2, 4]
    for moment, path in zip(moments, checkpoints(out), strict=True):
        (there,) = study(residua.load(path, ema=False), digits, "test", LOOK).parts
        torch.testing.assert_close(moment.laws.S, there.laws.S)
        assert moment.score == there.accuracy
    with pytest.raises(ValueError, match="no checkpoints"):
        along(tmp_path, digits, LOOK)


def test_the_score_of_an_encoder_is_its_knn(tmp_path: Path) -> None:
    shapes, model = residua.data.load("shapes?n=64&size=8&test=32"), autoencoder()
    model.preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
    write_checkpoint(tmp_path, 1, model, {})
    (moment,) = along(tmp_path, shapes, LOOK)
    features = extract(residua.load(tmp_path), shapes)
    assert moment.score == knn(features.train, features.test, k=20, temperature=0.07).accuracy


def test_a_diffusion_model_is_shown_noise_its_time_and_labels(digits: residua.data.Splits) -> None:
    model = residua.create_model("uvit", img_size=8, patch_size=4, in_chans=1, embed_dim=12, depth=2, num_heads=2,
                                 num_classes=3).double()  # fmt: skip
    model.process, chosen = VP(), [5, 3, 10]
    pre = Preprocessing((8, 8), (0.5,), (0.5,), 1)
    x, t, y = _shown(model, digits.train, chosen, pre, 1, 0.3)
    assert t.tolist() == pytest.approx([999 * 0.3] * 3)
    assert y.tolist() == digits.train.labels[chosen].tolist()
    a = np.exp(-0.25 * 0.3**2 * 19.9 - 0.5 * 0.3 * 0.1)
    noise = (x - a * pre([digits.train.read(i) for i in chosen]).double()) / np.sqrt(1 - a**2)
    assert float(noise.square().mean()) == pytest.approx(1, abs=0.25)  # 192 normal numbers
    assert not torch.allclose(x, _shown(model, digits.train, chosen, pre, 2, 0.3)[0])  # another seed


def test_a_diffusion_model_is_told_labels_as_in_training(digits: residua.data.Splits) -> None:
    """Numbers among the classes of its training images, where some of the data's have none."""
    model = residua.create_model("uvit", img_size=8, patch_size=4, in_chans=1, embed_dim=12, depth=2, num_heads=2,
                                 num_classes=2)  # fmt: skip
    model.process, model.classes = VP(), ["1", "2"]
    chosen = [int(np.flatnonzero(digits.train.labels == label)[0]) for label in (2, 1, 0)]
    pre = Preprocessing((8, 8), (0.5,), (0.5,), 1)
    assert _shown(model, digits.train, chosen[:2], pre, 1, 0.3)[2].tolist() == [1, 0]
    with pytest.raises(DataError, match="not trained on: 0"):
        _shown(model, digits.train, chosen, pre, 1, 0.3)


@pytest.mark.parametrize("told", [None, 3])
def test_a_diffusion_model_is_looked_at_through_noise(digits: residua.data.Splits, told: int | None) -> None:
    model = residua.create_model(
        "uvit",
        img_size=8,
        patch_size=4,
        in_chans=1,
        embed_dim=12,
        depth=2,
        num_heads=2,
        num_classes=told,
        zero_init=False,
    )
    model.process, model.preprocessing = VP(), Preprocessing((8, 8), (0.5,), (0.5,), 1)
    (part,) = study(model, digits, "test", replace(LOOK, time=0.3)).parts
    assert part.laws.S.shape == (3, 6, 6)
    assert next(iter(part.collapse)) == "embed"
    other = study(model, digits, "test", replace(LOOK, time=0.6)).parts[0]
    assert not torch.allclose(part.laws.S, other.laws.S)
    with pytest.raises(ValueError, match="noise level"):
        study(model, digits, "test", replace(LOOK, time=0.0))


def test_blocks_of_other_shapes_are_measured_by_themselves(digits: residua.data.Splits) -> None:
    model = residua.create_model("resconv_down", img_size=8, in_chans=1, num_classes=3, depth=4, width=4).eval()
    (part,) = study(model, digits, "test", LOOK).parts
    assert {name: len(values) for name, values in part.others.items()} == {"blocks.2": 6, "blocks.3": 6}
    assert json.loads(json.dumps(part.to_dict()))["others"]["blocks.2"][0] > 0


def test_singular_values_of_other_blocks_are_means_in_the_gauge_asked_for(digits: residua.data.Splits) -> None:
    model = residua.create_model("resconv_down", img_size=8, in_chans=1, num_classes=3, depth=4, width=4, alpha_min=0.5)
    pre, chosen = preprocessing(model.eval(), digits.train), balanced(digits.test, LOOK.images, LOOK.seed)
    model = model.double()
    steps = residua.stream(model, pre([digits.test.read(i) for i in chosen]).double())
    for gauge in ("J", "J/alpha"):
        (part,) = study(model, digits, "test", replace(LOOK, gauge=gauge)).parts
        for step in steps:
            if step.name in part.others:
                own = jacobian_svd(step, step.input, 6).S.mean(0)
                expected = own if gauge == "J" else own / step.alpha.detach()
                torch.testing.assert_close(part.others[step.name], expected.double())


def test_layers_of_foreign_models_are_pooled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []

    def forward_features(self: Any, images: torch.Tensor, tap: Any) -> torch.Tensor:
        for i in range(3):
            x = torch.full((2, 5, 4), float(i))
            alive.append(weakref.ref(x))
            tap(f"blocks.{i}.mlp", x)
            del x
            assert alive[-1]() is None  # nobody keeps all tokens of a layer
        return torch.ones(2, 5, 4)

    monkeypatch.setattr(Foreign, "__init__", lambda self, model: torch.nn.Module.__init__(self))
    monkeypatch.setattr(Foreign, "forward_features", forward_features)
    found = layer_features(torch.nn.Linear(1, 1), torch.zeros(2, 3, 8, 8))
    assert {name: float(x.mean()) for name, x in found.items()} == {
        "blocks.0": 0,
        "blocks.1": 1,
        "blocks.2": 2,
        "last": 1,
    }
