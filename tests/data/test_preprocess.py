import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from residua.data import BadImage, DataError, Feed, Preprocessing, center_view, load
from residua.data.preprocess import to_canvas

RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (40, 52, 3), dtype=np.uint8)
PRE = Preprocessing((24, 24), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), crop_pct=0.9)


def test_every_spelling_of_an_image_gives_the_same_tensor(tmp_path):
    Image.fromarray(PHOTO).save(tmp_path / "a.png")
    expected = PRE(PHOTO)
    assert expected.shape == (3, 24, 24)
    for image in (Image.fromarray(PHOTO), tmp_path / "a.png", str(tmp_path / "a.png")):
        assert torch.equal(PRE(image), expected)
    batch = PRE([PHOTO, PHOTO[:, :30]])
    assert batch.shape == (2, 3, 24, 24)
    torch.testing.assert_close(batch[0], expected)
    torch.testing.assert_close(batch[1], PRE(PHOTO[:, :30].copy()))


def test_same_numbers_as_the_feed_gives(tmp_path):
    """Also for images so large that the feed shrinks them."""
    for k, size in enumerate([(40, 52), (300, 200), (20, 200)]):
        y, x = np.mgrid[: size[0], : size[1]] / 10
        photo = (np.stack([np.sin(x), np.cos(y), np.sin(x + y)], 2) * 100 + 128).astype(np.uint8)
        Image.fromarray(photo).save(tmp_path / f"{k}.jpg")
    source = load(f"folder:{tmp_path}").train
    batch = next(Feed(source, "cpu", img_size=24).iterate([torch.arange(3)]))
    ours = center_view(batch, PRE.img_size, PRE.mean, PRE.std, PRE.crop_pct)
    torch.testing.assert_close(PRE([tmp_path / f"{k}.jpg" for k in range(3)]), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "shape", [(40, 40), (41, 40), (40, 53), (47, 31), (30, 47), (17, 30), (24, 25), (1, 5), (5, 1)]
)
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875])
def test_the_same_pixels_as_timms_transform(shape, crop_pct):
    """Even of noise, of which PIL cuts off what overshoots between the axes; a tie may round to either side."""
    noise = RNG.integers(0, 256, (*shape, 3), dtype=np.uint8)
    plain = replace(PRE, mean=(0.0,) * 3, std=(1.0,) * 3, crop_pct=crop_pct)
    pres = [plain, replace(plain, interpolation="bilinear"), replace(plain, img_size=(25, 25))]
    pres += [replace(plain, interpolation="bilinear", crop_mode="squash", img_size=(24, 20))]
    pres += [replace(plain, interpolation="bilinear", img_size=(24, 20))]  # all that timm has for the centre of these
    for pre in pres:
        how = {"crop_pct": crop_pct, "crop_mode": pre.crop_mode, "interpolation": pre.interpolation}
        theirs = create_transform((3, *pre.img_size), mean=pre.mean, std=pre.std, **how)(Image.fromarray(noise))
        assert ((pre(noise) - theirs) * 255).round().abs().max() <= 2


def test_squashed_images_are_seen_whole(tmp_path):
    """As torchvision stretches them, however they come; also those that are too long for the feed's canvas."""
    squash = replace(PRE, crop_pct=1.0, crop_mode="squash")
    for k, size in enumerate([(40, 52), (300, 200), (30, 400)]):
        y, x = np.mgrid[: size[0], : size[1]] / max(size) * 9
        photo = (np.stack([np.sin(x), np.cos(y), np.sin(x + y)], 2) * 100 + 128).astype(np.uint8)
        Image.fromarray(photo).save(tmp_path / f"{k}.png")
    files = [tmp_path / f"{k}.png" for k in range(3)]
    source = load(f"folder:{tmp_path}").train
    whole = [torch.from_numpy(source.read(i).copy()).permute(2, 0, 1) / 255 for i in range(3)]
    expected = torch.stack([resize(x, [24, 24], InterpolationMode.BICUBIC, antialias=True) for x in whole])
    mean, std = (torch.tensor(values)[:, None, None] for values in (PRE.mean, PRE.std))
    torch.testing.assert_close(squash(files), (expected - mean) / std, atol=0.1, rtol=0)
    for resident in (True, False):
        feed = Feed(source, "cpu", img_size=24, resident=resident, workers=0, squash=True)
        assert feed.canvas[1] == 72
        batch = next(feed.iterate([torch.arange(3)]))
        torch.testing.assert_close(squash.view(batch), squash(files), atol=0.1, rtol=0)


def test_long_images_are_seen_at_full_resolution(tmp_path):
    """Stripes one pixel wide in the output survive; nothing is shrunk below it and blown up again."""
    stripes = np.zeros((320, 3200, 3), np.uint8)
    stripes[:, np.arange(3200) // 10 % 2 == 0] = 255
    Image.fromarray(stripes).save(tmp_path / "long.png")
    Image.fromarray(stripes[:, 1440:1760]).save(tmp_path / "middle.png")
    pre = Preprocessing((32, 32), (0.0,) * 3, (1.0,) * 3)
    middle, long = pre([tmp_path / "middle.png", tmp_path / "long.png"])
    assert middle.std() > 0.25
    torch.testing.assert_close(long, middle, atol=0.2, rtol=0)
    feed = Feed(load(f"folder:{tmp_path}").train, "cpu", img_size=32)
    assert feed.canvas == (64, 96)
    torch.testing.assert_close(pre.view(next(feed.iterate([torch.arange(2)])))[0], middle, atol=0.2, rtol=0)


def test_channels_are_made_to_fit():
    assert torch.equal(PRE(PHOTO[..., 0]), PRE(PHOTO[..., :1].repeat(3, 2)))
    grey = Preprocessing((24, 24), (0.5,), (0.5,), in_chans=1)
    assert grey(PHOTO).shape == (1, 24, 24)
    with pytest.raises(BadImage, match="5 channels"):
        PRE(np.zeros((30, 30, 5), np.uint8))


def test_sixteen_bits_and_floats_mean_the_same_picture():
    expected = PRE(PHOTO)
    torch.testing.assert_close(PRE(PHOTO.astype(np.uint16) * 257), expected, atol=0.6, rtol=0)
    smooth = np.full((40, 40, 3), 51, np.uint8)
    for image in (smooth, smooth.astype(np.uint16) * 257, smooth / 255):
        torch.testing.assert_close(
            PRE(image)[:, 3, 3], (torch.tensor([0.2] * 3) - torch.tensor(PRE.mean)) / torch.tensor(PRE.std)
        )


def test_denormalize_undoes():
    whole = Preprocessing((40, 52), PRE.mean, PRE.std)
    restored = whole.denormalize(whole(PHOTO)).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(restored, PHOTO / 255, atol=1e-5)


def test_round_trip_through_json():
    for pre in (PRE, replace(PRE, crop_mode="squash")):
        assert Preprocessing.from_dict(json.loads(json.dumps(pre.to_dict()))) == pre
    old = {key: value for key, value in PRE.to_dict().items() if key != "crop_mode"}  # as earlier checkpoints have it
    assert Preprocessing.from_dict(old) == PRE


@pytest.mark.parametrize(("mean", "std"), [(float("nan"), 1.0), (float("inf"), 1.0), (0.5, 0.0), (0.5, float("nan")),
                                           (0.5, -1.0)])  # fmt: skip
def test_numbers_that_would_make_nonsense_of_every_image_are_refused(mean, std):
    with pytest.raises(DataError, match=r"(mean|std) .*, expected"):
        Preprocessing((8, 8), (mean,), (std,), in_chans=1)


def test_wrong_arguments(tmp_path):
    with pytest.raises(DataError, match="2 values for 3 channels"):
        Preprocessing((8, 8), (0.1, 0.2), (1.0, 1.0, 1.0))
    with pytest.raises(DataError, match="'border', expected one of center, squash"):
        replace(PRE, crop_mode="border")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"crop_pct 1\.15, expected"):
        replace(PRE, crop_pct=1.15)
    with pytest.raises(BadImage, match=r"nothing\.png"):
        PRE(tmp_path / "nothing.png")
    with pytest.raises(DataError, match="no images"):
        PRE([])


def test_long_images_do_not_make_a_canvas_without_bounds():
    tall, wide = np.zeros((2000, 40, 3), np.uint8), np.zeros((40, 2000, 3), np.uint8)
    pixels, sizes = to_canvas([tall, wide], 32)
    assert pixels.shape == (2, 3, 96, 96)
    assert sizes.tolist() == [[96, 40], [40, 96]]
    assert to_canvas([PHOTO, PHOTO[:10]], 32)[0].shape[2:] == PHOTO.shape[:2]  # as large as the largest, within bounds


def test_canvas_cuts_what_is_too_long_and_shrinks_what_is_too_large():
    pixels, sizes = to_canvas([PHOTO, PHOTO[:10, :10]], canvas=(20, 30))
    assert pixels.shape == (2, 3, 20, 30)
    assert sizes.tolist() == [[20, 26], [10, 10]]
    assert torch.equal(pixels[1, :, :10, :10], torch.from_numpy(PHOTO[:10, :10].transpose(2, 0, 1).copy()))
    pixels, _ = to_canvas([PHOTO[:20]], canvas=(20, 30))
    assert torch.equal(pixels[0], torch.from_numpy(PHOTO[:20, 11:41].transpose(2, 0, 1).copy()))
    assert to_canvas([PHOTO], canvas=(20, 60), squash=True)[1].tolist() == [[20, 52]]
