import json

import numpy as np
import pytest
import torch
from PIL import Image

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
    assert Preprocessing.from_dict(json.loads(json.dumps(PRE.to_dict()))) == PRE


def test_wrong_arguments(tmp_path):
    with pytest.raises(DataError, match="2 values for 3 channels"):
        Preprocessing((8, 8), (0.1, 0.2), (1.0, 1.0, 1.0))
    with pytest.raises(BadImage, match=r"nothing\.png"):
        PRE(tmp_path / "nothing.png")
    with pytest.raises(DataError, match="no images"):
        PRE([])


def test_canvas_shrinks_what_does_not_fit():
    pixels, sizes = to_canvas([PHOTO, PHOTO[:10, :10]], canvas=(20, 30))
    assert pixels.shape == (2, 3, 20, 30)
    assert sizes.tolist() == [[20, 26], [10, 10]]
    assert torch.equal(pixels[1, :, :10, :10], torch.from_numpy(PHOTO[:10, :10].transpose(2, 0, 1).copy()))
