from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from residua.data import BadImage, DataError, load
from residua.data.masks import COLOR, read_mask, with_masks


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.mark.parametrize("suffix", [".png", ".tif", ".bmp", ".npy"])
def test_numbers_are_read_as_stored(tmp_path: Path, suffix: str) -> None:
    mask = np.arange(12, dtype=np.uint8).reshape(3, 4)
    path = tmp_path / f"m{suffix}"
    np.save(path, mask) if suffix == ".npy" else save(path, mask)
    assert np.array_equal(read_mask(path), mask)


def test_a_mask_is_of_a_format_that_images_are_read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "m.eps")
    (tmp_path / "m.eps").rename(tmp_path / "m.png")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("it starts a program"))
    with pytest.raises(BadImage, match="bytes are none of JPEG, PNG"):
        read_mask(tmp_path / "m.png")


def test_palettes_bits_wide_numbers_and_colours(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 255]], np.uint8)).convert("P")
    image.putpalette(bytes(range(256)) * 3)
    image.save(tmp_path / "p.png")
    assert read_mask(tmp_path / "p.png").tolist() == [[0, 1], [2, 255]]
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "b.png")
    assert read_mask(tmp_path / "b.png").tolist() == [[1, 0]]
    save(tmp_path / "w.png", np.array([[3000, 7]], np.uint16))
    assert read_mask(tmp_path / "w.png").tolist() == [[3000, 7]]
    save(tmp_path / "c.png", np.array([[[1, 2, 3], [0, 0, 255]]], np.uint8))
    assert read_mask(tmp_path / "c.png").tolist() == [[COLOR + 0x010203, COLOR + 255]]
    np.save(tmp_path / "f.npy", np.ones((2, 2)))
    with pytest.raises(DataError, match="whole numbers"):
        read_mask(tmp_path / "f.npy")


def test_masks_are_found_by_name_then_by_folder(tmp_path: Path) -> None:
    for k, name in enumerate(("a/x", "b/x", "b/y")):
        save(tmp_path / f"images/{name}.jpg", np.zeros((8, 8, 3), np.uint8))
        save(tmp_path / f"masks/{name if 'x' in name else 'y'}.png", np.full((8, 8), k, np.uint8))
    source = load(f"folder:{tmp_path}/images").train
    found = with_masks(source, tmp_path / "masks")
    values = {found.identify(i): int(mask[0, 0]) for i in range(len(found)) if (mask := found.mask(i)) is not None}
    assert values == {name: {"a/x.jpg": 0, "b/x.jpg": 1, "b/y.jpg": 2}[name] for name in values}
    assert len(values) == len(source)
    assert found.classes is None
    part = found.subset([0])
    assert np.array_equal(part.mask(0), found.mask(0))


def test_two_masks_of_one_image_are_one_too_many(tmp_path: Path) -> None:
    save(tmp_path / "images/x.jpg", np.zeros((8, 8, 3), np.uint8))
    save(tmp_path / "masks/x.png", np.zeros((8, 8), np.uint8))
    save(tmp_path / "masks/x.bmp", np.zeros((8, 8), np.uint8))
    with pytest.raises(DataError, match="several masks"):
        with_masks(load(f"folder:{tmp_path}/images").train, tmp_path / "masks")


@pytest.mark.parametrize(("size", "fits"), [((30, 20), True), ((15, 10), True), ((45, 31), True), ((20, 30), False)])
def test_a_mask_has_the_shape_of_its_image(tmp_path: Path, size: tuple[int, int], fits: bool) -> None:
    save(tmp_path / "images/x.jpg", np.zeros((30, 20, 3), np.uint8))
    save(tmp_path / "masks/x.png", np.zeros(size, np.uint8))
    found = with_masks(load(f"folder:{tmp_path}/images").train, tmp_path / "masks")
    if fits:
        assert found.mask(0).shape == size
    else:
        with pytest.raises(DataError, match=r"30 x 20, its image x\.jpg 20 x 30"):
            found.mask(0)
