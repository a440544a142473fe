"""Settings: how they are written, read and chosen."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from residua import alphas, data
from residua.train import diffuse_config
from residua.train.config import Pretrain, build_model, resolve
from residua.train.diffuse_config import Diffuse
from residua.train.finetune_config import Finetune
from residua.train.options import auto_alpha, check_place, steps_of, trained_on


def chosen(device: str = "cpu", n: int = 1000, size: int = 32, **settings: Any) -> dict[str, Any]:
    source = data.load(f"shapes?n={n}&size={size}").train
    return resolve(Pretrain().override(**settings), source, device).settings()


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = Pretrain().override(
        data="folder:~/my photos", alpha_min=0.7, betas=(0.9, 0.99), trackers=("tensorboard", "wandb"),
        lr=1e-4, steps=10, zero_init=False, clip=None, ema=0.999, until=0.5,
    )  # fmt: skip
    config.save(tmp_path / "config.yaml")
    assert Pretrain.read(tmp_path / "config.yaml") == config


def test_yaml_may_be_flat_and_partial(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("alpha_min: 0.8\nscale: [0.5, 1.0]\noptim:\n  epochs: 3\n")
    assert Pretrain.read(path) == Pretrain().override(alpha_min=0.8, scale=(0.5, 1.0), epochs=3)
    path.write_text("")
    assert Pretrain.read(path) == Pretrain()


def test_yaml_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lr: 1e-4\nweight_decay: 5E-2\ndata: digits\nsteps: 1e3\n")
    config = Pretrain.read(path)
    assert (config.optim.lr, config.optim.weight_decay, config.data.data) == (1e-4, 0.05, "digits")
    assert (config.optim.steps, type(config.optim.steps)) == (1000, int)


def test_yaml_mistakes_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("alfa_min: 0.8\n")
    with pytest.raises(ValueError, match=r"mine.yaml: no setting named alfa_min"):
        Pretrain.read(path)
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match=r"mine.yaml holds no settings"):
        Pretrain.read(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: digits\nscale: [0.5\n", r"mine\.yaml, line 3, is no YAML: expected ',' or ']'"),
        ("alpha_min: high", r"mine\.yaml: alpha_min is high; expected a number or auto$"),
        ("alpha_min: true", "alpha_min is True; expected a number or auto"),
        ("optim:\n  steps: 10.5", r"steps is 10\.5; expected a whole number or null"),
        ("scale: [0.5]", r"scale is \[0\.5\]; expected \[a number, a number\] or auto"),
        ("trackers: [wandb, 3]", r"trackers is \['wandb', 3\]; expected \[text, \.\.\.\]"),
        ("flip: 1", "flip is 1; expected true or false"),
        ("size: vast", "size is vast; expected nano or tiny or small or base or large or auto"),
        ("3: 4", "no setting named 3"),
    ],
)
def test_yaml_values_are_checked(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=says):
        Pretrain.read(tmp_path / "mine.yaml")


def test_only_a_run_says_what_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights" / "m.pth"
    weights.parent.mkdir()
    weights.touch()
    settings = tmp_path / "config.yaml"
    for content in ("version: 3\nservices: {web: {image: nginx}}\n", "data: digits\n", "version: [\n"):
        settings.write_text(content)  # somebody else's, above the weights
        assert trained_on(weights) is None
    (tmp_path / "checkpoints" / "step-0000001").mkdir(parents=True)
    settings.write_text("version: 3\n")
    assert trained_on(tmp_path) is None
    Pretrain().override(data="digits").save(settings)
    assert trained_on(tmp_path) == trained_on(tmp_path / "checkpoints" / "step-0000001") == "digits"
    monkeypatch.chdir(tmp_path)
    assert trained_on("timm:test_vit") is None


def test_every_setting_has_a_name_of_its_own() -> None:
    from dataclasses import fields

    groups = [getattr(Pretrain(), f.name) for f in fields(Pretrain)]
    assert len(Pretrain().settings()) == sum(len(fields(group)) for group in groups)


RELATIVE = ("folder:photos", "parquet:photos?label=x", "imagenet:photos", "tar:photos", "tar:photos/{0..1}.tar")


def test_a_run_says_where_its_relative_images_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "step-0000001").mkdir(parents=True)
    for spec in RELATIVE:
        Pretrain().override(data=spec).save(tmp_path / "config.yaml")
        check_place(tmp_path, spec)  # of a run that does not say
    (tmp_path / "environment.json").write_text('{"cwd": "/the/start"}')
    for spec in RELATIVE:
        with pytest.raises(ValueError, match=r"photos does not exist here; it is relative to /the/start"):
            check_place(tmp_path / "checkpoints" / "step-0000001", spec)
    for spec in (
        "shapes?n=2",
        "hf:photos",
        "folder:/photos",
        "tar:s3://photos/{0..1}.tar",
        "parquet:s3://photos",
        "tar:*.tar",
    ):
        check_place(tmp_path, spec)
    (tmp_path / "photos").mkdir()
    check_place(tmp_path, "folder:photos")


@pytest.mark.parametrize(("device", "steps"), [("cpu", 1500), ("cuda", 3000)])
def test_a_few_images_are_trained_on_for_as_long_as_it_takes(device: str, steps: int) -> None:
    got = chosen(device, 45)
    assert (got["steps"], got["batch_size"], got["epochs"]) == (steps, 45, steps)
    assert chosen(device, 45, epochs=60.0)["steps"] == 60  # unless told
    few = data.load("shapes?n=45&size=32").train
    assert diffuse_config.resolve(Diffuse(), few, device).optim.steps == steps
    assert diffuse_config.resolve(Diffuse().override(epochs=60.0), few, device).optim.steps == 60


@pytest.mark.parametrize(("epochs", "steps"), [(1.1, 11), (2.2, 22), (1.11, 12), (1e-9, 1)])
def test_epochs_are_no_step_longer_by_rounding(epochs: float, steps: int) -> None:
    assert steps_of(epochs, images=100, batch=10) == steps  # 1.1 * 100 > 110


@pytest.mark.parametrize(
    ("n", "device", "epochs"),
    [
        (2_000, "cpu", 60), (10_000, "cpu", 15), (1_000_000, "cpu", 5),
        (1_000, "cuda", 800), (25_000, "cuda", 200), (1_281_167, "cuda", 100),
    ],
)  # fmt: skip
def test_epochs_follow_data_and_device(n: int, device: str, epochs: int) -> None:
    got = chosen(device, n)
    batch = 64 if device == "cpu" else 256
    assert got["batch_size"] == batch
    assert got["steps"] == math.ceil(epochs * n / batch)
    assert got["epochs"] == pytest.approx(epochs, rel=0.01)
    assert got["size"] == ("nano" if device == "cpu" else "small")
    assert got["compile"] == (device == "cuda")
    assert got["precision"] == ("bf16" if device == "cuda" and torch.cuda.is_available() else "fp32")


@pytest.mark.parametrize(
    ("pixels", "side", "patch"),
    [
        (8, 8, 2), (14, 14, 2), (16, 16, 2), (28, 28, 4), (32, 32, 4), (64, 64, 8), (90, 64, 8), (100, 96, 8),
        (256, 224, 16),
    ],
)  # fmt: skip
def test_image_and_patch_size_follow_the_images(pixels: int, side: int, patch: int) -> None:
    got = chosen(n=10, size=pixels)
    assert (got["img_size"], got["patch_size"]) == (side, patch)
    assert side % patch == 0


def test_what_is_left_to_us_goes_by_the_length_of_the_run() -> None:
    """A twentieth of the run between checkpoints, a two-hundredth between records; compiled from 1,000 steps on."""
    names = ("checkpoint_every", "log_every", "compile")
    assert [chosen("cuda", steps=3000)[name] for name in names] == [150, 15, True]
    assert [chosen("cuda", steps=999)[name] for name in names] == [49, 4, False]
    assert [chosen("cpu", steps=3)[name] for name in names] == [1, 1, False]
    given = {"checkpoint_every": 7, "log_every": 2, "compile": True}
    assert {name: chosen("cuda", steps=999, **given)[name] for name in names} == given


def test_a_chosen_size_fits_the_patch_given() -> None:
    got = chosen(n=10, size=30, patch_size=8)
    assert (got["img_size"], got["patch_size"]) == (24, 8)
    assert chosen(n=10, size=64, img_size=30)["img_size"] == 30  # what is given stays


def test_the_batch_is_never_larger_than_the_data() -> None:
    assert chosen(n=20)["batch_size"] == 20
    assert chosen(n=20, batch_size=512)["batch_size"] == 20


def test_learning_rate_rules() -> None:
    assert chosen("cuda")["lr"] == pytest.approx(3e-4)  # width 384, batch 256
    assert chosen("cuda", size=32, embed_dim=768, batch_size=64)["lr"] == pytest.approx(3e-4 / 2 / 2)
    assert chosen("cuda", base_lr=1.5e-4, batch_size=1024, n=5000)["lr"] == pytest.approx(6e-4)
    assert chosen(lr=0.5)["lr"] == 0.5


@pytest.mark.parametrize(
    ("settings", "alpha"),
    [
        ({}, 0.7), ({"steps": 11_000}, 0.8), ({"steps": 2500}, 1.0), ({"decoder": "plain"}, 1.0),
        ({"alpha_eff": 0.01}, 1.0), ({"control": "both"}, 1.0), ({"schedule": "learned"}, 1.0),
        ({"alpha_min": 0.6, "decoder": "plain"}, 0.6),
    ],
)  # fmt: skip
def test_alpha_left_to_us(settings: dict[str, Any], alpha: float) -> None:
    assert chosen(**{"n": 256, "batch_size": 256, "depth": 12, "steps": 30_000} | settings)["alpha_min"] == alpha


def test_alpha_goes_by_steps_of_256_images_of_which_small_ones_count_less() -> None:
    of = lambda batch, steps: chosen(n=1024, batch_size=batch, depth=12, steps=steps)["alpha_min"]  # noqa: E731
    assert of(256, 5500) == of(64, 11_000) == of(1024, 2750) == 0.9


KINDS = {Pretrain: "pretraining", Finetune: "classifier", Diffuse: "diffusion"}


@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("given", KINDS)
def test_another_kind_of_run_is_told_apart(given: type[Any], wanted: type[Any], tmp_path: Path) -> None:
    given().save(tmp_path / "config.yaml")
    if given is wanted:
        assert wanted.read(tmp_path / "config.yaml") == given()
        return
    with pytest.raises(ValueError, match=rf"settings of a {KINDS[given]}.*, not of a {KINDS[wanted]}"):
        wanted.read(tmp_path / "config.yaml")


def test_alpha_by_steps_and_depth() -> None:
    assert [auto_alpha(steps, 12, False) for steps in (1, 2750, 5500, 22_000, 10**6)] == [1.0, 1.0, 0.9, 0.7, 0.7]
    assert [auto_alpha(steps, 12, True) for steps in (1, 7500, 15_000, 60_000, 10**6)] == [1.0, 1.0, 0.9, 0.7, 0.7]
    for depth in (6, 24):  # the same share of the input is left at the end
        left = float(alphas(depth, auto_alpha(5500, depth, False)).prod())
        assert left == pytest.approx(float(alphas(12, 0.9).prod()), rel=0.02)
    assert auto_alpha(10**6, 4, False) == 0.5  # stable, if not the same


def test_alpha_of_other_networks_and_schedules_leaves_as_much_of_the_input() -> None:
    known = float(alphas(12, 0.7).prod())
    config = {"n": 256, "batch_size": 256, "steps": 10**6, "size": 64}
    outside = chosen(**config, encoder="timm:vit_large_patch16_224")
    assert float(alphas(24, outside["alpha_min"]).prod()) == pytest.approx(known, rel=0.02)
    constant = chosen(**config, depth=12, schedule="constant")
    assert float(alphas(12, constant["alpha_min"], "constant").prod()) == pytest.approx(known, rel=0.05)


def test_a_run_that_goes_on_does_not_ask_for_the_weights_that_it_started_from() -> None:
    source = data.load("shapes?n=100&size=32").train
    config = resolve(Pretrain().override(encoder="timm:test_vit", encoder_weights="gone.pth"), source, "cpu")
    with pytest.raises(ValueError, match=r"no weights at gone\.pth"):
        build_model(config, in_chans=3)
    assert build_model(config, in_chans=3, begun=True).encoder.depth > 0


@pytest.mark.parametrize(("side", "patch"), [(100, 4), (30, 2), (50, 2), (64, 8), (224, 16)])
def test_patches_fit_a_size_that_is_given(side: int, patch: int) -> None:
    assert chosen(img_size=side)["patch_size"] == patch


def test_a_run_that_goes_on_wants_its_images_back() -> None:
    begun = resolve(Pretrain().override(steps=10), data.load("shapes?n=100&size=32").train, "cpu").override(resume=True)
    assert resolve(begun, data.load("shapes?n=100&size=32").train, "cpu") == begun
    with pytest.raises(ValueError, match="begun with 100 images and now there are 120"):
        resolve(begun, data.load("shapes?n=120&size=32").train, "cpu")


def test_branches_start_at_zero_where_that_is_asked_for_and_fade_later_then() -> None:
    assert chosen()["zero_init"] is False
    assert chosen(zero_init=True)["zero_init"] is True
    assert chosen(steps=7500, batch_size=256, depth=12)["alpha_min"] == pytest.approx(0.855, abs=1e-3)
    assert chosen(steps=7500, batch_size=256, depth=12, zero_init=True)["alpha_min"] == 1.0


def test_nothing_is_left_open_and_choosing_again_changes_nothing() -> None:
    source = data.load("shapes?n=100&size=32").train
    config = resolve(Pretrain(), source, "cpu")
    open_settings = [k for k, v in config.settings().items() if v == "auto" and k != "resident"]
    assert open_settings == []
    assert resolve(config, source, "cpu") == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": -1.0}, "epochs is -1.0"),
        ({"epochs": math.inf}, "epochs is inf"),
        ({"lr": math.inf}, "lr is inf"),
        ({"eval_every": -1.0}, "eval_every is -1.0"),
        ({"workers": -1}, "workers is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"anneal": 1.5}, "anneal is 1.5"),
        ({"anneal": 0.5, "schedule": "learned"}, "no alpha_min"),
        ({"anneal": 0.5, "control": "both"}, "no alpha_min"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"scale": (0.0, 1.0)}, "scale is"),
        ({"scale": (0.5, 0.2)}, "scale is"),
        ({"log_every": -1}, "log_every is -1"),
        ({"keep": -1}, "keep is -1"),
        ({"mask_ratio": 1.0}, "mask_ratio is 1.0"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(**settings)


def test_the_model_is_the_one_described() -> None:
    source = data.load("shapes?n=100&size=32").train
    config = Pretrain().override(size="tiny", embed_dim=48, depth=2, decoder_depth=1, alpha_min=0.6, mask_ratio=0.5)
    config = config.override(zero_init=True, norm_pix=False, decoder="plain")
    model = build_model(resolve(config, source, "cpu"), in_chans=4)
    got = model.config
    assert (got["norm_pix"], got["decoder"]) == (False, "plain")
    assert (got["embed_dim"], got["depth"], got["num_heads"], got["in_chans"]) == (48, 2, 3, 4)
    assert (got["decoder_embed_dim"], got["decoder_depth"], got["mask_ratio"]) == (192, 1, 0.5)
    assert (got["img_size"], got["alpha_min"], got["zero_init"]) == ((32, 32), 0.6, True)
    with pytest.raises(ValueError, match="resolve the configuration first"):
        build_model(Pretrain(), in_chans=3)
