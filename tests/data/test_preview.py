import numpy as np
import pytest
from PIL import Image

from residua.data import BadImage, DataError, load, preview
from residua.data.errors import DataWarning


def test_grid_shows_the_images(tmp_path):
    splits = load("shapes?n=16&size=32")
    page = np.asarray(Image.open(preview(splits, tmp_path / "deep" / "page.png", n=16)))
    assert page.shape == (4 * 34 + 2, 4 * 34 + 2, 3)
    tile = page[2 + 34 : 2 + 34 + 32, 2 + 68 : 2 + 68 + 32]  # second row, third column
    assert np.abs(tile.astype(int) - splits.train.read(6)).max() <= 1


def test_augmented_shows_something_else_of_the_same_size(tmp_path):
    splits = load("shapes?n=9")
    plain, crops = (
        np.asarray(Image.open(preview(splits, tmp_path / "a.png", n=9, augmented=flag))) for flag in (False, True)
    )
    assert plain.shape == crops.shape
    assert not np.array_equal(plain, crops)


def test_odd_channels_can_be_shown(tmp_path):
    for folder, shape in (("two", (9, 9, 2)), ("five", (9, 9, 5))):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "a.npy", np.random.default_rng(0).normal(size=shape))
        page = Image.open(preview(load(f"folder:{tmp_path / folder}"), tmp_path / "page.png", img_size=16))
        assert page.mode == "RGB"
        assert np.asarray(page)[2:-2, 2:-2].std() > 20


def test_unreadable_images_are_left_out_if_told(tmp_path):
    files = [tmp_path / f"{i}.bmp" for i in range(4)]
    for i, file in enumerate(files):
        Image.new("RGB", (16, 16), (60 * i, 0, 0)).save(file)
    files[1].write_bytes(files[1].read_bytes()[:200])
    splits, page = load(f"folder:{tmp_path}"), tmp_path / "page" / "all.png"
    with pytest.raises(BadImage, match=r"1\.bmp"):
        preview(splits, page)
    with pytest.warns(DataWarning, match=r"1 of 4 train images cannot be read and are skipped: 1\.bmp"):
        preview(splits, page, on_bad_image="skip")
    assert set(np.asarray(Image.open(page))[..., 0].ravel()) == {0, 120, 180, 255}
    for file in files:
        file.write_bytes(file.read_bytes()[:200])
    with pytest.warns(DataWarning, match="4 of 4"), pytest.raises(DataError, match="none of the 64 images to show"):
        preview(splits, page, on_bad_image="skip")


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    page, fill = tmp_path / "page.png", Image.Image.save
    preview(load("shapes?n=4"), page, n=4)
    before = page.read_bytes()

    def save(self, file, *args, **more):
        fill(self, file, *args, **more)
        with open(file, "r+b") as written:
            written.truncate(100)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(OSError, match=r"No space left on device: '.*page\.png'"):
        preview(load("shapes?n=9"), page, n=9)
    assert page.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["page.png"]
