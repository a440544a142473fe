"""Latents: encoded once, flipped, drawn and scaled; and the autoencoders they come from."""

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import residua
from residua.data import DataError, Feed, autoencoder
from residua.data.autoencoder import Autoencoder, LatentSpace, open_autoencoder
from residua.data.errors import DataWarning
from residua.data.latents import latent_view, latents_of

CPU = torch.device("cpu")


class StandIn(nn.Module):
    """Encodes to means over 4 x 4 pixels, with deviation 0.1 or certain, and decodes by repeating them."""

    def __init__(self, certain: bool = False) -> None:
        super().__init__()
        self.weight, self.certain, self.calls = nn.Parameter(torch.ones(1)), certain, 0
        self.config = {"scaling_factor": 0.5, "shift_factor": 0.25}

    def encode(self, x: Tensor) -> Any:
        self.calls += 1
        mean = F.avg_pool2d(x, 4) * self.weight
        if self.certain:
            return SimpleNamespace(latents=mean)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean, std=torch.full_like(mean, 0.1)))

    def decode(self, z: Tensor) -> Any:
        return SimpleNamespace(sample=F.interpolate(z, scale_factor=4.0))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Autoencoder:
    """What opening any autoencoder by name gives."""
    found = Autoencoder(StandIn(), "stand-in")
    monkeypatch.setattr(autoencoder, "_open", lambda name: found)
    return found


def source(n: int = 10) -> Any:
    return residua.data.load(f"shapes?n={n}&size=16").train


def batch(latents: Any, n: int) -> Any:
    return Feed(latents, CPU, img_size=4, resident=True).gather(torch.arange(n))


def test_what_is_known_of_an_autoencoder_is_read_off_it() -> None:
    space = Autoencoder(StandIn(), "stand-in").space
    assert (space.channels, space.factor, space.scale, space.shift) == (3, 4, 0.5, 0.25)
    assert LatentSpace(**space.to_dict()) == space
    images = torch.rand(2, 3, 16, 16).round()
    whole = F.interpolate(F.avg_pool2d(images, 4), scale_factor=4.0)
    own = Autoencoder(StandIn(), "stand-in")
    assert torch.allclose(own.encode(images), (F.avg_pool2d(images, 4) - 0.25) * 0.5)
    assert torch.allclose(own.decode(own.encode(images)), whole, atol=1e-6)


@pytest.mark.parametrize("certain", [False, True])
def test_image_and_mirror_image_are_encoded_once(tmp_path: Path, certain: bool) -> None:
    images, own = source(), Autoencoder(StandIn(certain), "stand-in")
    latents = latents_of(images, own, 16, tmp_path, CPU)
    calls = own.model.calls
    again = latents_of(images, own, 16, tmp_path, CPU)
    assert own.model.calls == calls
    assert len(again) == 10
    assert again.labels.tolist() == images.labels.tolist()
    assert latents.channels == (6 if certain else 12)
    pixels = torch.from_numpy(images.array()).permute(0, 3, 1, 2) / 127.5 - 1
    mean = F.avg_pool2d(pixels, 4)
    kept = batch(latents, 10)
    plain, mirror = kept.pixels.chunk(2, dim=1)
    assert torch.allclose(plain[:, :3], mean, atol=2e-3)
    assert torch.allclose(mirror[:, :3], mean.flip(-1), atol=2e-3)
    assert list(p.name for p in tmp_path.iterdir()) == [latents.fingerprint()]


def test_a_view_flips_half_draws_and_scales(tmp_path: Path) -> None:
    images, own = source(64), Autoencoder(StandIn(), "stand-in")
    kept = batch(latents_of(images, own, 16, tmp_path, CPU), 64)
    mean, mirror = kept.pixels[:, :3], kept.pixels[:, 6:9]
    options: dict[str, Any] = {"seed": 3, "flip": True}
    x = latent_view(kept, 3, 0.25, 0.5, epoch=torch.zeros(64).long(), **options)
    back = x / 0.5 + 0.25
    straight, turned = ((back - m).abs().mean((1, 2, 3)) for m in (mean, mirror))
    nearer = torch.minimum(straight, turned)
    assert float(nearer.mean()) == pytest.approx(0.1 * (2 / torch.pi) ** 0.5, rel=0.1)
    assert 16 < int((straight < turned).sum()) < 48
    assert torch.equal(x, latent_view(kept, 3, 0.25, 0.5, epoch=torch.zeros(64).long(), **options))
    assert not torch.equal(x, latent_view(kept, 3, 0.25, 0.5, epoch=torch.ones(64).long(), **options))


def test_other_images_sizes_or_weights_are_other_latents(tmp_path: Path) -> None:
    own, other = Autoencoder(StandIn(), "a"), StandIn()
    nn.init.constant_(other.weight, 2.0)
    keys = [
        latents_of(images, coder, side, tmp_path, CPU).fingerprint()
        for images, coder, side in [
            (source(), own, 16), (source(9), own, 16), (source(), own, 8), (source(), Autoencoder(other, "a"), 16)
        ]
    ]  # fmt: skip
    assert len(set(keys)) == 4


def test_flips_and_draws_are_new_in_every_epoch_and_of_every_seed(tmp_path: Path) -> None:
    kept = batch(latents_of(source(64), Autoencoder(StandIn(), "a"), 16, tmp_path / "a", CPU), 64)
    sure = batch(latents_of(source(64), Autoencoder(StandIn(certain=True), "b"), 16, tmp_path / "b", CPU), 64)
    for latents, flip in ((kept, False), (sure, True)):  # the draw alone, the flip alone
        first, later, other = (
            latent_view(latents, 3, 0.25, 0.5, seed=seed, epoch=torch.full((64,), epoch), flip=flip)
            for seed, epoch in ((3, 0), (3, 1), (4, 0))
        )
        for x in (later, other):
            assert 16 < int((x != first).flatten(1).any(1).sum()) <= 64


def test_an_unreadable_image_has_no_latents(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    for k, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "images" / f"{k}.png")
    (tmp_path / "images/2.png").write_bytes(b"no image")
    own = Autoencoder(StandIn(certain=True), "a")
    with pytest.warns(DataWarning, match="skipped"):
        found = latents_of(
            residua.data.load(f"folder:{tmp_path / 'images'}").train, own, 16, tmp_path, CPU, on_bad_image="skip"
        )
    assert [found.identify(i) for i in range(len(found))] == ["0.png", "1.png", "3.png", "4.png", "5.png"]
    expected = F.avg_pool2d(torch.from_numpy(images[3]).permute(2, 0, 1) / 127.5 - 1, 4)
    torch.testing.assert_close(torch.from_numpy(found.read(2)[..., :3]).permute(2, 0, 1), expected, atol=1e-3, rtol=0)


def test_stopped_while_encoding_nothing_is_left(tmp_path: Path) -> None:
    own = Autoencoder(StandIn(), "a")

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        latents_of(source(), own, 16, tmp_path, CPU, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def full(handle: int, start: int, size: int) -> None:
        asked.append((start, size))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot be written to .*No space left.*RESIDUA_DATA") as error:
        latents_of(source(), Autoencoder(StandIn(), "a"), 16, tmp_path, CPU)
    assert str(tmp_path) in str(error.value)
    assert asked == [(0, 128 + 10 * 2 * 6 * 4 * 4 * 2)]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_sets_no_space_aside_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    assert len(latents_of(source(), Autoencoder(StandIn(), "a"), 16, tmp_path, CPU)) == 10


def test_grey_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="colour"):
        latents_of(residua.data.load("digits").train, Autoencoder(StandIn(), "a"), 8, tmp_path, CPU)


def test_a_model_learns_latents_samples_images_and_is_probed(
    tmp_path: Path, stand_in: Autoencoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from residua.evaluate.diffusion import evaluate_diffusion
    from residua.train import fit
    from residua.train.diffuse import prepare
    from residua.train.diffuse_config import Diffuse

    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    config = Diffuse().override(
        data="shapes?n=32&size=16&classes=2", latents="any", patch_size=2, embed_dim=16, depth=2, num_heads=2, steps=4,
        batch_size=8, cpu=True, trackers=(), out=str(tmp_path / "run"), sample_every=0.5, samples=2,
    )  # fmt: skip
    session = prepare(config)
    assert (session.model.img_size, session.model.in_chans) == ((4, 4), 3)
    objective: Any = session.objective()
    x_0 = objective.draw(session.feed.gather(torch.arange(8)), torch.zeros(8).long())[0]
    assert x_0.shape == (8, 3, 4, 4)
    fit(session, session.hooks())
    model: Any = residua.load(tmp_path / "run")
    assert model.autoencoder == stand_in.space
    assert model.preprocessing.img_size == (16, 16)
    images = residua.sample(model, 3, steps=2)
    assert images.shape == (3, 3, 16, 16)
    blocks = images.unfold(2, 4, 4).unfold(3, 4, 4)
    assert torch.equal(blocks.amax((-1, -2)), blocks.amin((-1, -2)))  # it decodes by repeating
    report = evaluate_diffusion(model, "shapes?n=32&size=16&classes=2", probe="lbfgs", times=(0.1,), layers="last")
    assert 0 <= report.value("linear probe") <= 100
    nn.init.constant_(stand_in.model.weight, 3.0)
    other = Autoencoder(stand_in.model, "stand-in")
    monkeypatch.setattr(autoencoder, "_open", lambda name: other)
    with pytest.raises(DataError, match="other weights"):
        residua.sample(model, 1, steps=1)
    with pytest.raises(DataError, match=r"stand-in is not the one that .*run was begun with"):
        prepare(Diffuse().override(out=str(tmp_path / "run"), resume=True, cpu=True))
    moved = replace(stand_in.space, name="elsewhere")
    monkeypatch.setattr(autoencoder, "_open", lambda name: stand_in)
    monkeypatch.setattr(stand_in, "space", moved)
    prepare(Diffuse().override(out=str(tmp_path / "run"), resume=True, cpu=True))


def test_an_autoencoder_of_other_channels_is_refused() -> None:
    grey = StandIn()
    grey.config["in_channels"] = 1
    with pytest.raises(DataError, match="the autoencoder some/vae takes 1-channel images; expected one that takes 3"):
        Autoencoder(grey, "some/vae")


@pytest.mark.parametrize("setting", ["latents_mean", "latents_std"])
def test_an_autoencoder_with_half_the_statistics_is_refused(setting: str) -> None:
    model = StandIn()
    model.config |= {"latents_mean": None, "latents_std": None}
    plain = Autoencoder(model, "some/vae").space
    assert plain == Autoencoder(StandIn(), "some/vae").space
    model.config[setting] = (0.1, 0.2, 0.3)
    with pytest.raises(DataError, match="has one of latents_mean and latents_std; expected both"):
        Autoencoder(model, "some/vae")


def test_statistics_of_each_channel_are_applied_as_diffusers_does(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="the extra 'latents' is not installed")
    torch.manual_seed(0)
    made = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, scaling_factor=0.5,
        latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[2.0, 0.5, 1.0, 3.0],
    )  # fmt: skip
    made.save_pretrained(tmp_path / "vae")
    own, images = open_autoencoder(str(tmp_path / "vae")), torch.rand(2, 3, 16, 16) * 2 - 1
    mean, std = (torch.tensor(made.config[f"latents_{what}"]).view(1, 4, 1, 1) for what in ("mean", "std"))
    with torch.no_grad():
        raw = made.eval().encode(images).latent_dist
        assert torch.allclose(own.encode(images), (raw.mean - mean) * 0.5 / std, atol=1e-5)
        assert torch.allclose(own.decode(own.encode(images)), made.decode(raw.mean).sample, atol=1e-4)
    assert torch.allclose(own.moments(images)[1], raw.std / std, atol=1e-5)  # as images are drawn in training
    made.register_to_config(latents_std=[1.0] * 4)
    assert Autoencoder(made, "vae").space.weights != own.space.weights  # so that no other latents are taken for these


@pytest.mark.parametrize("name", ["/moved/vae", "./vae", "vae"])
def test_a_folder_that_has_moved_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    kind = SimpleNamespace(load_config=lambda *given, **place: asked.append(given))
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoencoderKL=kind))
    monkeypatch.chdir(tmp_path)
    autoencoder._open.cache_clear()
    place = tmp_path / name
    for given in (name, LatentSpace(name, 4, 8, 1.0, 0.0, "hash")):
        with pytest.raises(
            DataError, match=rf"no autoencoder at {place}: give a folder .* moved .*ln -s NEWPLACE {place}"
        ):
            open_autoencoder(given)
    assert not asked  # the hub has no such names


def test_a_name_that_the_hub_does_not_have_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*given: Any, **place: Any) -> None:
        raise OSError("no connection\nand much advice")

    kind = SimpleNamespace(load_config=lost)
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoencoderKL=kind))
    monkeypatch.chdir(tmp_path)
    autoencoder._open.cache_clear()
    says = f"some/vae cannot be opened as an autoencoder: no connection; as a folder it would be {tmp_path}/some/vae"
    with pytest.raises(DataError, match=says):
        open_autoencoder("some/vae")


def test_without_diffusers_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    autoencoder._open.cache_clear()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(DataError, match=r"pip install .?diffusers"):
        open_autoencoder("some/vae")


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderTiny"])
def test_diffusers_autoencoders(tmp_path: Path, kind: str) -> None:
    diffusers = pytest.importorskip("diffusers", reason="the extra 'latents' is not installed")
    torch.manual_seed(0)
    if kind == "AutoencoderKL":
        made = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, scaling_factor=0.18215,
        )  # fmt: skip
    else:
        made = diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1), latent_channels=4,
        )  # fmt: skip
    made.save_pretrained(tmp_path / "vae")
    own = open_autoencoder(str(tmp_path / "vae"))
    assert (own.space.channels, own.space.factor) == (4, 2)
    assert own.space.scale == (0.18215 if kind == "AutoencoderKL" else 1.0)
    assert own.decode(own.encode(torch.zeros(2, 3, 16, 16))).shape == (2, 3, 16, 16)
    latents = latents_of(source(), own, 16, tmp_path / "cache", CPU)
    assert latents.channels == (16 if kind == "AutoencoderKL" else 8)
    images = torch.from_numpy(source().array()).permute(0, 3, 1, 2) / 127.5 - 1
    assert np.allclose(batch(latents, 10).pixels[:, :4], own.moments(images)[0].numpy(), atol=5e-3)
    assert open_autoencoder(own.space) is own
    inner = tmp_path / "pipeline"
    made.save_pretrained(inner / "vae")
    assert open_autoencoder(str(inner)).space.weights == own.space.weights
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="cannot be opened"):
        open_autoencoder(str(tmp_path / "nothing"))
