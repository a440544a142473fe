"""Samples: what they depend on, the files they go to, and what is refused."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drive import network
from safetensors.torch import save_file
from torch import Tensor, nn

import residua
from residua import cli
from residua.data.autoencoder import LatentSpace
from residua.nn.diffusion import VP, Flow, clipped, noised, split, target
from residua.train import sample
from residua.train.checkpoint import save_model
from residua.train.sample import Sampling, attach_autoencoder, check_sampling, generate, grid_image, labels_of
from residua.train.samplefiles import described, write_samples

QUICK = Sampling(steps=3)


class Gaussian(nn.Module):
    """The exact denoiser of images that are all one colour plus white noise of deviation `d`, under VP."""

    def __init__(self, model: Any, mean: float, d: float) -> None:
        super().__init__()
        self.model, self.mean, self.d = model, mean, d

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        t = (t / 999).view(-1, 1, 1, 1)
        a, s = VP().a(t), VP().s(t)
        return s * (x - a * self.mean) / (a**2 * self.d**2 + s**2)


# ---------------------------------------------------------------- what an image depends on


@pytest.mark.parametrize("sampler", ["dpm-solver", "ddim", "heun", "euler-maruyama"])
def test_an_image_depends_on_its_number_alone(sampler: str) -> None:
    model = network()
    whole = sample.sample(model, 6, sampler=sampler, steps=4)
    part = sample.sample(model, 2, sampler=sampler, steps=4, first=3, batch_size=1)
    assert whole.dtype == torch.uint8
    assert whole.shape == (6, 3, 8, 8)
    assert int((whole[3:5].int() - part.int()).abs().max()) <= 1  # products of another shape round otherwise
    assert len({bytes(image.numpy().tobytes()) for image in whole}) == 6
    other = sample.sample(model, 2, sampler=sampler, steps=4, first=3, seed=1)
    assert int((other.int() - part.int()).abs().max()) > 8


@pytest.mark.parametrize("sampler", ["dpm-solver", "ddim", "heun", "euler-maruyama"])
def test_with_the_exact_denoiser_samples_have_the_datas_distribution(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    exact = Gaussian(model, 0.25, 0.1)
    monkeypatch.setattr(model, "forward", exact.forward)
    steps = 300 if sampler == "euler-maruyama" else 50
    images = sample.sample(model, 64, sampler=sampler, steps=steps).float() / 127.5 - 1
    assert float(images.mean()) == pytest.approx(0.25, abs=0.01)
    assert float(images.std()) == pytest.approx(0.1, abs=0.006)


def test_the_model_is_left_as_it_was() -> None:
    model = network().train()
    before, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    sample.sample(model, 2, sampler="euler-maruyama", steps=2)
    assert model.training
    assert torch.get_float32_matmul_precision() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_guidance_is_its_formula_and_zero_ignores_the_label() -> None:
    model, index = network(num_classes=3), torch.arange(4)
    grid: dict[str, Any] = {"sampler": "ddim", "steps": 1, "classes": (1,), "clip": False}

    def raw(scale: float) -> Tensor:
        return sample._solve(model, index, check_sampling(model, Sampling(guidance=scale, **grid)), None)

    with torch.no_grad():
        c, u, g = raw(1.0), raw(0.0), raw(3.0)
    assert not torch.allclose(c, u)
    assert torch.allclose(g, u + 3.0 * (c - u), atol=1e-3, rtol=1e-3)  # one step is linear in the prediction


def test_classes_called_by_numbers_are_found_once(tmp_path: Path) -> None:
    model = network(num_classes=4)
    model.classes = ["0", "1", "10", "2"]
    for given, meant in ((("10",), (2,)), (("2", 2), (3, 2)), ((), (0, 1, 2, 3))):
        once = check_sampling(model, Sampling(classes=given))
        assert once.classes == meant
        assert check_sampling(model, once) == once
    model.classes = ["1", "4", "9", "10"]  # of which 2 is none, though there is a third
    with pytest.raises(ValueError, match="no class named '2'; did you mean"):
        check_sampling(model, Sampling(classes=("2",)))


def test_classes_are_dealt_out_in_turn() -> None:
    model = network(num_classes=3)
    model.classes = ["cat", "dog", "7"]
    some = check_sampling(model, Sampling(classes=("dog", 0, "7")))
    assert labels_of(torch.arange(5), some).tolist() == [1, 0, 2, 1, 0]
    every = check_sampling(model, Sampling())
    assert labels_of(torch.arange(5), every).tolist() == [0, 1, 2, 0, 1]
    assert labels_of(torch.arange(5), replace(every, guidance=0.0)) is None  # they are of no class


def test_the_class_of_an_image_goes_by_its_number_wherever_its_batch_begins() -> None:
    some = check_sampling(network(num_classes=8), Sampling(classes=(5, 0, 7)))
    found = labels_of(torch.arange(4, 8), some)
    assert found is not None
    assert found.tolist() == [0, 7, 5, 0]


def test_classes_may_be_one_or_an_array() -> None:
    model = network(num_classes=20)
    model.classes = [f"kind {i}" for i in range(20)]
    for given, meant in (
        ("12", (12,)), ("kind 3", (3,)), (3, (3,)), (np.int64(3), (3,)), ([1, "kind 2"], (1, 2)),
        (torch.tensor([1, 2]), (1, 2)), (np.array([4, 5]), (4, 5)), (torch.tensor(6), (6,)),
    ):  # fmt: skip
        assert check_sampling(model, Sampling(classes=given)).classes == meant
    assert torch.equal(sample.sample(model, 2, steps=2, classes="12"), sample.sample(model, 2, steps=2, classes=[12]))
    for wrong in (3.5, torch.tensor([0.5]), None):
        with pytest.raises(ValueError, match="no class named"):
            sample.sample(model, 2, classes=wrong)
    with pytest.raises(ValueError, match="neither classes nor guidance"):
        sample.sample(network(), 2, classes=torch.tensor([0, 1]))


def test_samplers_take_as_many_steps_as_the_text_says_unless_told() -> None:
    for sampler, steps in (("euler-maruyama", 1000), ("dpm-solver", 50), ("ddim", 50), ("heun", 50)):
        assert check_sampling(network(), Sampling(sampler=sampler)).steps == steps
        assert check_sampling(network(), Sampling(sampler=sampler, steps=7)).steps == 7


def test_numbers_of_steps_and_images_are_whole() -> None:
    model = network()
    for options in ({"steps": 2.5}, {"steps": "2"}, {"n": 2.5}, {"n": 2.0}, {"first": 0.5}, {"batch_size": 1.5}):
        with pytest.raises(ValueError, match="whole number"):
            sample.sample(model, **{"n": 2, "steps": 2} | options)
    assert len(sample.sample(model, np.int64(2), steps=np.int64(2))) == 2


@pytest.mark.parametrize("process", [VP(), Flow()])
def test_clipping_keeps_x_0_in_range_and_leaves_the_rest_alone(process: Any) -> None:
    torch.manual_seed(0)
    x, t = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.tensor([0.1, 0.4, 0.7, 0.95], dtype=torch.float64)
    x_0 = torch.rand_like(x) * 4 - 2

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        u = t.view(-1, 1, 1, 1)
        return target(process, x_0, (x - process.a(u) * x_0) / process.s(u), t)

    found, eps = split(process, clipped(denoise, process)(x, t), x, t)
    assert torch.allclose(found, x_0.clamp(-1, 1))
    assert torch.allclose(noised(process, found, eps, t), x)


@pytest.mark.parametrize("sampler", ["dpm-solver", "ddim", "heun", "euler-maruyama"])
@pytest.mark.parametrize("value", ["inf", "-inf"])
def test_clipping_makes_no_images_of_infinities(sampler: str, value: str) -> None:
    model = network()
    model.final_layer.bias.data[0] = float(value)
    with pytest.raises(ValueError, match="weights that are not finite"):
        sample.sample(model, 2, sampler=sampler, steps=3, clip=True)


def test_a_pixel_is_the_nearest_of_256_levels() -> None:
    levels = torch.arange(192, dtype=torch.uint8).reshape(1, 3, 8, 8) + 40
    for off in (-0.4, 0.0, 0.4):
        assert torch.equal(sample._pixels(network(), (levels + off) / 127.5 - 1), levels)
    ends = torch.tensor([-1.2, 1.2]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    assert sample._pixels(network(), ends).flatten(1).unique(dim=1).tolist() == [[0], [255]]


def test_pixels_are_clipped_and_latents_are_not() -> None:
    model = network()
    assert check_sampling(model, QUICK).clip is True
    model.autoencoder = object()
    assert check_sampling(model, QUICK).clip is False
    assert check_sampling(model, Sampling(clip=True)).clip is True


@pytest.mark.parametrize("sampler", ["dpm-solver", "ddim", "heun", "euler-maruyama"])
def test_steps_left_alone_are_even_where_the_text_says(sampler: str) -> None:
    """In log(a / s) for the deterministic samplers of VP models, else in t."""
    model = network()
    stochastic = sampler == "euler-maruyama"
    assert check_sampling(model, Sampling(sampler=sampler)).spacing == ("uniform" if stochastic else "logsnr")
    model.process = Flow()
    assert check_sampling(model, Sampling(sampler=sampler)).spacing == "uniform"


@pytest.mark.parametrize(("precision", "short"), [("float32", False), ("tf32", True)])
def test_float32_is_meant_for_convolutions_too(precision: Any, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not short)
    model, seen = network(), []
    model.final_layer.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    sample.sample(model, 1, steps=1, precision=precision)
    assert seen == [short]
    assert torch.backends.cudnn.allow_tf32 is not short


@pytest.mark.parametrize(("precision", "products"), [("float32", "highest"), ("tf32", "high")])
def test_products_are_as_exact_as_asked_for_and_then_as_they_were(precision: Any, products: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with sample.evaluating(network(), None, Sampling(precision=precision)):
            assert torch.get_float32_matmul_precision() == products
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_half_precision_stays_away_from_pure_noise() -> None:
    model, seen = network(), []
    first = model.patch_embed
    first.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    generate(model, torch.arange(1), check_sampling(model, Sampling("ddim", 10, spacing="uniform", precision="bf16")))
    a = VP().a(torch.linspace(1, 1e-4, 11)[:10])
    assert seen == (a > 0.1).tolist()
    assert True in seen
    assert False in seen


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_samples_that_are_not_finite_are_refused(precision: Any, tmp_path: Path) -> None:
    model = network(num_classes=2)
    good = next(model.parameters()).data.clone()
    for name in ("a", "a.npz"):
        write_samples(model, tmp_path / name, 2, replace(QUICK, precision=precision))
    next(model.parameters()).data.fill_(float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that bf16 is too coarse would be untrue
        for name in ("b", "b.npz", "b.png"):
            with pytest.raises(ValueError, match="weights that are not finite") as error:
                write_samples(model, tmp_path / name, 2, replace(QUICK, precision=precision))
            assert "\n" not in str(error.value)
    assert len(list((tmp_path / "a").glob("*.png"))) == 2
    assert not [*tmp_path.glob("b/*.png"), *tmp_path.glob("b.*")]
    next(model.parameters()).data.copy_(good)
    with pytest.raises(ValueError, match=r"not finite with guidance 1e\+38.*try"):
        sample.sample(model, 2, steps=2, guidance=1e38, clip=False, precision=precision)
    unconditional = network()
    unconditional.patch_embed.proj.weight.data.fill_(1e38)
    with pytest.raises(ValueError, match=r"not finite with dpm-solver, 2 steps, clip False: try more steps, or clip"):
        sample.sample(unconditional, 2, steps=2, clip=False, precision=precision)
    with pytest.raises(ValueError, match=r"clip True: try more steps$"):
        sample.sample(unconditional, 2, steps=2, clip=True, precision=precision)
    for guidance in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="guidance"):
            sample.sample(model, 2, steps=2, guidance=guidance)


def test_half_precision_that_overflows_gives_way_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, solve = network(), sample._solve

    def coarse(model: Any, index: Tensor, settings: Sampling, *rest: Any) -> Tensor:
        x = solve(model, index, settings, *rest)
        return x if settings.precision == "float32" else x * float("inf")

    monkeypatch.setattr(sample, "_solve", coarse)
    with pytest.warns(UserWarning, match="bf16 is too coarse"):
        images = sample.sample(model, 2, steps=2, precision="bf16")
    assert torch.equal(images, sample.sample(model, 2, steps=2))


def test_memory_that_runs_out_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = network(), []
    solve = sample._solve

    def tight(model: Any, index: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(index))
        if len(index) > 2:
            raise torch.OutOfMemoryError
        return solve(model, index, *rest)

    monkeypatch.setattr(sample, "_solve", tight)
    images = sample.sample(model, 8, steps=2)
    monkeypatch.setattr(sample, "_solve", solve)
    assert sizes == [8, 4, 2, 2, 4, 2, 2]
    assert int((images.int() - sample.sample(model, 8, steps=2).int()).abs().max()) <= 1


def test_a_sheet_has_every_image_in_its_place() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 4, 4)
    sheet = grid_image(images)
    assert sheet.shape == (3, 10, 16)
    assert [int(sheet[0, 6 * (i // 3), 6 * (i % 3)]) for i in range(5)] == [0, 1, 2, 3, 4]
    assert int(sheet[0, 9, 15]) == int(sheet[0, 4, 4]) == 255


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sampler", "dpm-solvr"], "dpm-solver"),
        (["--classes", "disk"], "disc"),
        (["--classes", "8"], "0 to 7"),
        (["--classes", "²"], "no class named '²'"),
        (["--classes=--3"], "no class named '--3'"),
        (["--steps", "0"], "steps is 0; expected a whole number, at least 1\n"),
        (["--guidance", "-1"], "at least 0"),
        (["--guidance", "nan"], "guidance is nan; expected a finite number"),
        (["-n", "0"], "n is 0; expected a whole number, at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert cli.main(["sample", str(run), "--device", "cpu", *options]) == 2
    assert words in capsys.readouterr().err


def test_models_that_cannot_are_refused() -> None:
    with pytest.raises(ValueError, match="neither classes nor guidance"):
        sample.sample(network(), 2, guidance=2.0)
    with pytest.raises(ValueError, match="makes no samples"):
        sample.sample(residua.create_model("vit_nano", img_size=8, patch_size=4), 2)
    lost = network()
    lost.process = None
    with pytest.raises(ValueError, match="which process"):
        sample.sample(lost, 2)


def test_a_model_without_preprocessing_is_refused_before_it_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sample, "_solve", lambda *_: pytest.fail("it samples"))
    model = network()
    model.preprocessing = None
    says = "how its numbers become pixels: set model.preprocessing"
    with pytest.raises(ValueError, match=says):
        sample.sample(model, 2)
    for name in ("s", "s.npz", "s.png"):
        with pytest.raises(ValueError, match=says):
            write_samples(model, tmp_path / name, 2, QUICK)
    assert not list(tmp_path.iterdir())


def test_guidance_needs_images_without_labels(tmp_path: Path) -> None:
    """A row for "no label" that was never trained guides nowhere; old checkpoints do not say."""
    for dropout, refused in ((0.0, True), (0.1, False), (None, False)):
        model = network(num_classes=3)
        if dropout is not None:
            model.label_dropout = dropout
        save_model(model, tmp_path / "model.safetensors")
        loaded = residua.load(tmp_path / "model.safetensors")
        for guidance in (0.0, 3.0):
            if refused:
                with pytest.raises(ValueError, match=r"label_dropout 0, .* guidance must stay 1"):
                    sample.sample(loaded, 1, steps=2, guidance=guidance)
            else:
                sample.sample(loaded, 1, steps=2, guidance=guidance)
        sample.sample(loaded, 1, steps=2)


def test_a_run_says_how_many_labels_it_was_not_told(run: Path) -> None:
    model: Any = residua.load(run)
    assert model.label_dropout == 0.3


def test_flow_models_sample_to_their_end() -> None:
    model = network()
    model.process = Flow()
    for sampler in ("dpm-solver", "ddim", "heun", "euler-maruyama"):
        assert sample.sample(model, 2, sampler=sampler, steps=3).shape == (2, 3, 8, 8)


def test_published_latents_get_an_autoencoder(monkeypatch: pytest.MonkeyPatch) -> None:
    space = LatentSpace("some/vae", 4, 8, 0.18, 0.0, "")
    monkeypatch.setattr("residua.train.sample.open_autoencoder", lambda *_: SimpleNamespace(space=space))
    model: Any = residua.create_model("sit", img_size=4, patch_size=2, in_chans=4, embed_dim=16, depth=2, num_heads=2)
    attach_autoencoder(model, "some/vae")
    assert model.autoencoder is space
    assert model.preprocessing.img_size == (32, 32)
    model.in_chans = 3
    with pytest.raises(ValueError, match="latents of 4 channels; the model makes 3"):
        attach_autoencoder(model, "some/vae")


def test_a_model_of_pixels_takes_no_autoencoder(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    space = LatentSpace("some/vae", 3, 8, 0.18, 0.0, "")
    monkeypatch.setattr(sample, "open_autoencoder", lambda *_: SimpleNamespace(space=space))
    with pytest.raises(ValueError, match="this model was trained on pixels: leave --latents out"):
        attach_autoencoder(residua.load(run), "some/vae")
    save_file(network().state_dict(), tmp_path / "published.safetensors")  # which do not say
    model: Any = residua.load(tmp_path / "published.safetensors")
    attach_autoencoder(model, "some/vae")
    assert model.autoencoder is space


def test_a_model_keeps_to_the_autoencoder_it_was_trained_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spaces = {"here": LatentSpace("here", 4, 8, 0.18, 0.0, "abc")}
    spaces["moved"], spaces["other"] = replace(spaces["here"], name="moved"), replace(spaces["here"], weights="xyz")
    decode = lambda x: x[:, :3].repeat(1, 1, 8, 8)  # noqa: E731
    monkeypatch.setattr(sample, "open_autoencoder",
                        lambda name, *_: SimpleNamespace(space=spaces.get(name), decode=decode))  # fmt: skip
    model = network(img_size=4, patch_size=2, in_chans=4)
    attach_autoencoder(model, "here")
    write_samples(model, tmp_path / "s", 1, QUICK)
    assert described(tmp_path / "s")["autoencoder"] == "here"
    attach_autoencoder(model, "moved")
    write_samples(model, tmp_path / "s", 2, QUICK)
    with pytest.raises(ValueError, match=r"other is not the autoencoder.*\(moved, weights abc\).*xyz"):
        attach_autoencoder(model, "other")
    assert model.autoencoder is spaces["moved"]
    model.autoencoder = None  # as published weights come
    attach_autoencoder(model, "other")
    with pytest.raises(ValueError, match="autoencoder_weights abc there, xyz asked for"):
        write_samples(model, tmp_path / "s", 2, QUICK)


def test_an_autoencoder_that_overflows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    space = LatentSpace("some/vae", 4, 8, 0.18, 0.0, "abc")
    broken = SimpleNamespace(space=space, decode=lambda x: x[:, :3] * float("nan"))
    monkeypatch.setattr(sample, "open_autoencoder", lambda *_: broken)
    model = network(img_size=4, patch_size=2, in_chans=4)
    attach_autoencoder(model, "some/vae")
    with pytest.raises(ValueError, match="some/vae decodes"):
        sample.sample(model, 1, steps=2)
