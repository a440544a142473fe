import dataclasses
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

import residua.evaluate
from residua.data import Batch, DataError, Preprocessing, Splits, center_view, load, train_view
from residua.evaluate import extract, mae_probe, pixel_features
from residua.evaluate.features import preprocessing_of
from residua.evaluate.reading import PixelReader, View, _read_batch, _Replayed, open_feed
from residua.nn import ViT, create_model


def as_batch(source, numbers: list[int]) -> Batch:
    images = torch.stack([torch.from_numpy(source.read(i)) for i in numbers]).permute(0, 3, 1, 2)
    return Batch(images, torch.tensor([images.shape[2:]] * len(numbers)), torch.tensor(numbers))


def expected_streams(vit: ViT, source, numbers: list[int], img_size=(16, 16)) -> dict[str, torch.Tensor]:
    mean, std = source.stats()
    taps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        taps["out"] = vit.eval().forward_features(
            center_view(as_batch(source, numbers), img_size, mean, std), tap=taps.__setitem__
        )
    return taps


@pytest.mark.parametrize(
    ("readout", "pool"),
    [
        ("cls", lambda t: t[:, 0]),
        ("patches", lambda t: t[:, 1:].mean(1)),
        ("tokens", lambda t: t.mean(1)),
    ],
)
def test_features_are_the_pooled_streams(vit: ViT, noise: Splits, readout: str, pool) -> None:
    feats = extract(vit, noise, layers="all", readout=readout, batch_size=7)
    taps = expected_streams(vit, noise.train, list(range(50)))
    assert feats.train.layers == [0, 1, 2]
    for layer, name in ((0, "blocks.0.mlp"), (1, "blocks.1.mlp"), (2, "out")):
        torch.testing.assert_close(feats.train.layer(layer), pool(taps[name]), atol=1e-5, rtol=1e-5)
    assert (feats.train.last - pool(taps["blocks.2.mlp"])).abs().max() > 0.01  # the final norm is in
    assert feats.train.readout == readout


def test_several_read_outs_come_from_one_pass(vit: ViT, noise: Splits) -> None:
    both = extract(vit, noise, layers=[0, 2], readout=("patches", "cls"), views=1)
    for readout in ("patches", "cls"):
        alone = extract(vit, noise, layers=[0, 2], readout=readout, views=1)
        for split in ("train", "test"):
            own, expected = both.splits[split].of(readout), alone.splits[split]
            assert own.readout == readout
            assert all(torch.equal(own.layer(i), expected.layer(i)) for i in (0, 2))
            assert all(torch.equal(own.views[i], expected.views[i]) for i in (0, 2))
    assert both.train.readout == "patches"
    with pytest.raises(ValueError, match="at least one readout"):
        extract(vit, noise, readout=())


def test_a_replayed_batch_is_read_as_any_other(noise: Splits, monkeypatch) -> None:
    """The recording itself needs a GPU; all around it does not."""

    def record(function, device):
        output = function()

        @torch.inference_mode()
        def replay() -> None:
            for (_, mine), (_, read) in zip(output, function(), strict=True):
                mine.copy_(read)

        return replay, output

    monkeypatch.setattr("residua.evaluate.reading.record", record)
    preprocessing = Preprocessing((16, 16), *noise.train.stats(), noise.train.channels)
    view, reader = View(preprocessing, views=1), PixelReader(16)
    replayed = _Replayed(reader, view, full=False)
    for numbers in ([0, 1, 2], [7, 3, 5], [9, 8], [4, 6, 10]):
        batch = as_batch(noise.train, numbers)
        ((keys, own),), ((others, expected),) = replayed(batch), _read_batch(batch, reader, view, full=False)
        assert keys == others
        torch.testing.assert_close(own, expected)


def test_labels_names_and_order_come_along(vit: ViT, noise: Splits) -> None:
    feats = extract(vit, noise, batch_size=8)
    assert feats.test is not None
    assert (len(feats.train), len(feats.test)) == (50, 21)
    assert feats.test.targets.tolist() == [i % 3 for i in range(21)]
    assert feats.test.ids == [noise.test.identify(i) for i in range(21)]  # type: ignore[union-attr]
    x, y = feats.test
    assert x is feats.test.last
    assert y is feats.test.labels
    assert not x.is_inference()
    assert extract(vit, noise, splits=("test",)).test is not None
    with pytest.raises(ValueError, match="not extracted"):
        _ = extract(vit, noise, splits=("test",)).train


def test_layers_by_number(vit: ViT, noise: Splits) -> None:
    whole = extract(vit, noise, layers="all", splits=("test",)).test
    some = extract(vit, noise, layers=[-1, 0], splits=("test",)).test
    assert whole is not None
    assert some is not None
    assert some.layers == [0, 2]
    assert torch.equal(some.layer(0), whole.layer(0))
    assert torch.equal(some.last, whole.last)
    with pytest.raises(KeyError, match="layer 1 was not extracted"):
        some.layer(1)


def test_views_are_the_training_augmentation(vit: ViT, noise: Splits) -> None:
    test = extract(vit, noise, views=2, seed=5, splits=("test",)).test
    assert test is not None
    assert test.views[2].shape == (2, 21, 32)
    mean, std = noise.train.stats()
    for v in range(2):
        images = train_view(as_batch(noise.test, list(range(21))), 16, mean, std, seed=5, epoch=v)
        with torch.no_grad():
            expected = vit.forward_features(images).mean(1)
        torch.testing.assert_close(test.views[2][v], expected, atol=1e-5, rtol=1e-5)


def test_other_and_oblong_sizes(vit: ViT, noise: Splits) -> None:
    for size in (32, (16, 20)):
        test = extract(vit, noise, img_size=size, splits=("test",)).test
        pair = (size, size) if isinstance(size, int) else size
        mean, std = noise.train.stats()
        with torch.no_grad():
            images = center_view(as_batch(noise.test, list(range(21))), pair, mean, std)
            expected = vit.forward_features(images).mean(1)
        assert test is not None
        torch.testing.assert_close(test.last, expected, atol=1e-5, rtol=1e-5)


def test_images_of_the_right_size_are_read_as_they_are(vit: ViT, noise: Splits) -> None:
    """Whole images need no resampling; it would change nothing but the time."""
    view = View(preprocessing_of(vit, noise.train))
    feed = open_feed(noise.train, torch.device("cpu"), view)
    assert feed.full
    batch = feed.gather(torch.arange(8))
    torch.testing.assert_close(view.center(batch, full=True), view.center(batch), rtol=1e-5, atol=1e-5)
    larger = replace(view, preprocessing=replace(view.preprocessing, img_size=(24, 24)))
    assert larger.center(batch, full=True).shape[2:] == (24, 24)
    for crop_pct in (1.0, 0.5):
        same = replace(view, preprocessing=replace(view.preprocessing, img_size=(16, 20), crop_pct=crop_pct))
        torch.testing.assert_close(same.center(batch, full=True), same.center(batch), rtol=1e-5, atol=1e-5)


def test_the_models_own_preprocessing_is_used(vit: ViT, noise: Splits) -> None:
    vit.preprocessing = Preprocessing((16, 16), (0.1,) * 3, (2.0,) * 3, crop_pct=0.8)
    own = extract(vit, noise, splits=("test",)).test
    assert own is not None
    images = center_view(as_batch(noise.test, list(range(21))), 16, (0.1,) * 3, (2.0,) * 3, 0.8)
    with torch.no_grad():
        torch.testing.assert_close(own.last, vit.forward_features(images).mean(1), atol=1e-5, rtol=1e-5)


def test_an_autoencoder_is_read_through_its_encoder(mae, digits: Splits) -> None:
    both = [extract(m, digits, limit=20, splits=("train",)).train.last for m in (mae, mae.encoder)]
    assert torch.equal(*both)


def test_model_and_random_state_are_left_as_they_were(vit: ViT, noise: Splits) -> None:
    vit.train()
    vit.blocks[1].eval()
    modes = [m.training for m in vit.modules()]
    plain, meanwhile = vit.forward_features, []

    def noted(images, tap=None):
        meanwhile.append(any(m.training for m in vit.modules()))
        return plain(images, tap=tap)

    vit.forward_features = noted  # type: ignore[method-assign]
    weights = {name: p.clone() for name, p in vit.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    extract(vit, noise, views=1, limit=10)
    assert set(meanwhile) == {False}
    assert [m.training for m in vit.modules()] == modes
    assert all(torch.equal(p, weights[name]) for name, p in vit.state_dict().items())
    assert all(p.grad is None for p in vit.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_limit_takes_a_random_part_by_seed(vit: ViT, noise: Splits) -> None:
    whole = extract(vit, noise, splits=("train",)).train
    part = extract(vit, noise, limit=12, seed=3, splits=("train",)).train
    rows = torch.tensor([whole.ids.index(name) for name in part.ids])
    assert rows.tolist() == sorted(rows.tolist())
    assert rows.tolist() != list(range(12))
    torch.testing.assert_close(part.last, whole.last[rows])
    assert torch.equal(part.targets, whole.targets[rows])
    assert extract(vit, noise, limit=12, seed=4, splits=("train",)).train.ids != part.ids


def test_unreadable_images_are_left_out_if_asked(vit: ViT, tmp_path: Path) -> None:
    for i in range(6):
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:200])
    data = load(f"folder:{tmp_path}")
    with pytest.raises(DataError, match=r"3\.png"):
        extract(vit, data)
    feats = extract(vit, data, on_bad_image="skip").train
    assert len(feats) == 5
    assert not any("3.png" in name for name in feats.ids)


def test_labels_stay_with_their_images_where_some_are_left_out(vit: ViT, tmp_path: Path) -> None:
    places = ["train/a"] * 4 + ["train/b"] * 4 + ["test/a"]
    for i, place in enumerate(places):
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        file = tmp_path / "images" / place / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        if i in (1, 2, 7):
            file.write_bytes(file.read_bytes()[:200])
    data = load(f"folder:{tmp_path / 'images'}")
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        feats = extract(vit, data, on_bad_image="skip", splits=("train",), cache=cache, batch_size=3).train
        assert [Path(name).name for name in feats.ids] == ["0.png", "3.png", "4.png", "5.png", "6.png"]
        assert feats.targets.tolist() == [0, 0, 1, 1, 1]
        assert feats.last.shape == (5, 32)
    with pytest.raises(DataError, match=r"1\.png"):  # what was left out by request is an error to others
        extract(vit, data, splits=("train",), cache=tmp_path / "cache")


def test_bf16_is_close_and_still_float32(vit: ViT, noise: Splits) -> None:
    full, half = (extract(vit, noise, splits=("train",), bf16=b).train.last for b in (False, True))
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, atol=0.1, rtol=0.1)


def test_pixels_are_the_standardised_image(noise: Splits) -> None:
    small = pixel_features(noise, size=8)
    mean, std = noise.train.stats()
    expected = center_view(as_batch(noise.test, list(range(21))), 8, mean, std).flatten(1)
    assert small.test is not None
    torch.testing.assert_close(small.test.last, expected)
    assert small.test.readout == "pixels"
    assert pixel_features(noise, size=1000).train.last.shape == (50, 3 * 16 * 16)


def test_larger_images_are_shrunk_to_pixels_as_pil_does() -> None:
    images = torch.rand(2, 1, 20, 32)
    expected = [Image.fromarray(image[0].numpy()).resize((8, 5), Image.Resampling.BILINEAR) for image in images]
    small = PixelReader(8)(images)[-1]
    torch.testing.assert_close(small, torch.from_numpy(np.stack(expected)).flatten(1), atol=1e-5, rtol=0)


def _extract_small(cache: str | None = None) -> tuple[dict, dict, torch.Tensor, float]:
    torch.manual_seed(0)
    model = create_model("vit", img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2)
    options = {"layers": "all", "batch_size": 64, "limit": 330, "views": 1, "cache": cache}
    feats = extract(model, "digits", **options)
    if cache is not None:
        plain, model.forward_features = model.forward_features, None  # everything is there: nothing is computed
        feats = extract(model, "digits", **options)
        model.forward_features = plain
    probe = mae_probe(model, "digits", limit=100, epochs=1, encoder_batch=16, batch_size=30, learning_rates=(50.0,))
    tiny = extract(model, "digits", batch_size=64, limit=5)  # fewer batches than processes
    assert feats.test is not None
    return dataclasses.asdict(feats.train), dataclasses.asdict(feats.test), tiny.train.last, probe.accuracy


def _extract_in_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(_extract_small(f"{folder}/cache"), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    root = str(Path(residua.evaluate.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = _extract_small()
    torch.set_num_threads(threads)
    for rank in range(2):
        shared = torch.load(tmp_path / str(rank))
        for mine, theirs in zip(alone[:2], shared[:2]):
            assert mine["ids"] == theirs["ids"]
            assert torch.equal(mine["labels"], theirs["labels"])
            for layer in (0, 1):
                assert torch.equal(mine["features"][layer], theirs["features"][layer])
                assert torch.equal(mine["views"][layer], theirs["views"][layer])
        assert torch.equal(alone[2], shared[2])
        assert alone[3] == shared[3]
    assert len(list(tmp_path.glob("cache/*/*/about.json"))) == 2  # one of the two wrote, once per split


def test_wrong_inputs(vit: ViT, mae, noise: Splits) -> None:
    with pytest.raises(ValueError, match="unknown readout 'mean'; there are tokens, cls, patches"):
        extract(vit, noise, readout="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layers \[3\] do not exist: the encoder has 3 blocks"):
        extract(vit, noise, layers=[0, 3])
    with pytest.raises(ValueError, match="layers must be"):
        extract(vit, noise, layers="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not divisible by patch size"):
        extract(vit, noise, img_size=18)
    with pytest.raises(DataError, match="3 channels, the model takes 1"):
        extract(mae, noise)
    with pytest.raises(ValueError, match="splits"):
        extract(vit, noise, splits=("val",))
    with pytest.raises(ValueError, match="limit"):
        extract(vit, noise, limit=0)
    with pytest.raises(DataError, match="none of the splits"):
        extract(vit, Splits("noise", noise.train), splits=("test",))
    with pytest.raises(ValueError, match="Linear does not say what images it takes"):
        extract(torch.nn.Linear(2, 2), noise)


if __name__ == "__main__":  # one of the two processes
    _extract_in_process(int(sys.argv[2]), sys.argv[1])


def test_images_that_are_read_again_and_do_not_fit_come_as_views_of_any_size(
    vit: ViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a classifier that is tested while it trains."""
    monkeypatch.setattr("residua.data.feed.free_memory", lambda device: 0)
    monkeypatch.setattr("residua.data.source._PROBED", 1)
    for k, size in enumerate(((20, 20), (40, 20), (20, 40))):
        Image.effect_noise(size, 50).convert("RGB").save(tmp_path / f"{k}.png")
    source, view = load(f"folder:{tmp_path}").train, View(Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3))
    feed = open_feed(source, torch.device("cpu"), view, again=True)
    assert feed.cuts
    for _ in range(2):
        (batch,) = feed.iterate([torch.arange(3)])
        expected = view.preprocessing([tmp_path / f"{k}.png" for k in range(3)])
        torch.testing.assert_close(view.images(batch)[0], expected)
