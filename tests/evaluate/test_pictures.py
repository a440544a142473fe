import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from residua.data import DataError, arrays
from residua.data.arrays import ArraySource
from residua.evaluate.pictures import Pictures, is_array, made_by, open_images
from residua.evaluate.summary import published_statistics


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def source(images: np.ndarray) -> ArraySource:
    return ArraySource("some", "all", images, None, None)


def write(folder: Path, **images: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        Image.fromarray(image).save(folder / f"{name}.png")
    return folder


def test_images_stay_as_they_are_however_large() -> None:
    large = pixels(2, 500, 700, 3)
    found = Pictures(source(large))
    assert found.shape == (500, 700)
    np.testing.assert_array_equal(found.read(1, target=16), large[1])


def test_grey_is_repeated_and_more_bits_become_eight() -> None:
    grey = pixels(2, 4, 5, 1)
    found = Pictures(source(grey)).read(0)
    assert found.shape == (4, 5, 3)
    assert all((found[:, :, c] == grey[0, :, :, 0]).all() for c in range(3))
    deep = np.full((1, 2, 2, 3), 65535 // 2, np.uint16)
    assert (Pictures(source(deep)).read(0) == 127).all()
    with pytest.raises(DataError, match="4 channels; images to score have one or three"):
        Pictures(source(pixels(1, 4, 4, 4)))


def test_another_size_takes_the_centre() -> None:
    wide = np.zeros((1, 8, 20, 3), np.uint8)
    wide[0, :, 6:14] = 200
    assert (Pictures(source(wide), 8).read(0) == 200).all()
    assert (Pictures(source(wide), 4).read(0) == 200).all()
    tall = Pictures(source(pixels(1, 9, 9, 3)), (6, 3))
    assert tall.read(0).shape == (6, 3, 3)
    with pytest.raises(DataError, match="at least 1 pixel"):
        Pictures(source(wide), 0)


def test_mixed_sizes_are_told_apart(tmp_path: Path) -> None:
    folder = write(tmp_path / "mixed", a=pixels(4, 4, 3), b=pixels(5, 6, 3))
    with pytest.raises(DataError, match=r"mixed differ in size \(4 x 4, 5 x 6\): --img-size SIDE"):
        Pictures(open_images(str(folder)))
    assert Pictures(open_images(str(folder)), 3).read(1).shape == (3, 3, 3)

    class Sampled(ArraySource):
        """Its odd image is not among those that were looked at."""

        def read(self, i: int, target: int | None = None) -> np.ndarray:
            return pixels(9, 9, 3) if i == 1 else super().read(i, target)

    found = Pictures(Sampled("odd", "all", pixels(2, 4, 4, 3), None, None))
    found.read(0)
    with pytest.raises(DataError, match=r"4 x 4, 9 x 9; all/000001"):
        found.read(1)


def test_the_fingerprint_knows_images_and_size() -> None:
    a, b = pixels(2, 4, 4, 3), pixels(2, 4, 4, 3, seed=1)
    prints = {Pictures(source(x), size).fingerprint() for x in (a, b) for size in (None, 4, 2)}
    assert len(prints) == 6
    assert Pictures(source(a)).fingerprint() == Pictures(source(a.copy())).fingerprint()


def test_a_folder_is_taken_whole_unless_it_is_split(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / "samples" / name, **{str(i): pixels(4, 4, 3) for i in range(10)})
    assert len(open_images(f"folder:{tmp_path / 'samples'}")) == 20
    assert len(open_images(str(tmp_path / "samples"))) == 20
    assert len(open_images(str(tmp_path / "samples"), "test")) == 2
    write(tmp_path / "data" / "train", a=pixels(4, 4, 3), b=pixels(4, 4, 3))
    write(tmp_path / "data" / "test", a=pixels(4, 4, 3))
    assert [len(open_images(f"folder:{tmp_path / 'data'}", split)) for split in (None, "train", "test")] == [2, 2, 1]
    assert open_images("shapes?n=8&test=4&size=8", "test").split == "test"
    with pytest.raises(DataError, match="has no test images"):
        open_images(f"folder:{tmp_path / 'data' / 'train'}", "test")


def test_arrays(tmp_path: Path) -> None:
    images = pixels(3, 4, 5, 3)
    np.savez(tmp_path / "adm.npz", images, np.arange(3))  # arr_0 and the labels
    np.savez(tmp_path / "one.npz", images=images)
    np.save(tmp_path / "plain.npy", images)
    for name in ("adm.npz", "one.npz", "plain.npy"):
        found = open_images(str(tmp_path / name))
        np.testing.assert_array_equal(found.read(2), images[2])
    np.savez(tmp_path / "two.npz", a=images, b=images)
    np.save(tmp_path / "first.npy", images.transpose(0, 3, 1, 2))
    np.save(tmp_path / "unit.npy", images / 255)
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    for name, says in {
        "two.npz": "holds a, b; expected images under arr_0",
        "first.npy": r"uint8 of shape \(3, 3, 4, 5\); expected uint8 of shape \(images, height, width, 3\)",
        "unit.npy": "holds float64",
        "broken.npz": "cannot be read as an array",
        "none.npy": "there is no file",
    }.items():
        with pytest.raises(DataError, match=says):
            open_images(str(tmp_path / name))


def test_a_colon_names_another_source_than_an_array() -> None:
    assert is_array("samples.npz")
    assert is_array("a/b.NPY")
    assert not is_array("hf:somebody/set.npy")
    assert not is_array("folder:samples.npz")


def damaged(file: Path) -> Iterator[bytes]:
    """Ways in which a file may have been spoilt: empty, cut short, its inside overwritten, something else."""
    whole = file.read_bytes()
    middle = whole.index(b"NUMPY") + 150  # in the array, behind its header
    yield b""
    yield whole[: len(whole) // 2]
    yield whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 20]) + whole[middle + 20 :]
    yield b"PK nothing"


def test_damaged_files_are_told_in_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", pixels(3, 4, 5, 3))
    for content in damaged(tmp_path / "images.npz"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"^\S*bad.npz cannot be read as an array, it may be damaged: .+$"):
            open_images(str(tmp_path / "bad.npz"))
    np.savez(tmp_path / "statistics.npz", mu=np.zeros(20), sigma=np.eye(20))
    for content in damaged(tmp_path / "statistics.npz"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"^\S*bad.npz cannot be read, it may be damaged: .+$"):
            published_statistics(str(tmp_path / "bad.npz"))


def test_an_array_larger_than_the_memory_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", np.zeros((100, 64, 64, 3), np.uint8))
    monkeypatch.setattr(arrays, "free_memory", lambda _: 1_000_000)
    with pytest.raises(DataError, match=r"bomb\.npz cannot be read.*arr_0 unpacks to 1 MiB"):
        open_images(str(tmp_path / "bomb.npz"))
    monkeypatch.setattr(arrays, "free_memory", lambda _: 2_000_000)
    assert len(open_images(str(tmp_path / "bomb.npz"))) == 100
    np.savez_compressed(tmp_path / "bomb.npz", mu=np.zeros(600), sigma=np.zeros((600, 600)))
    with pytest.raises(DataError, match=r"bomb\.npz cannot be read.*sigma unpacks to 3 MiB"):
        published_statistics(str(tmp_path / "bomb.npz"))


def test_an_array_under_the_other_name_is_read(tmp_path: Path) -> None:
    images = pixels(3, 4, 5, 3)
    np.savez(tmp_path / "a.npz", images)
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    np.testing.assert_array_equal(open_images(str(tmp_path / "a.npy")).read(1), images[1])


def test_runs_and_empty_folders_are_not_images(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(DataError, match="is a run, not images"):
        open_images(str(tmp_path / "run"))
    with pytest.raises(DataError, match="there are no images"):
        open_images(str(tmp_path))
    with pytest.raises(DataError, match="unknown data"):
        open_images("cifra100")


def test_how_samples_came_about(tmp_path: Path) -> None:
    folder = write(tmp_path / "samples", a=pixels(4, 4, 3))
    assert made_by(str(folder)) == made_by("shapes") == {}
    known = {"sampler": "DPM-Solver", "steps": 50, "guidance": 1.5}
    (folder / "samples.json").write_text(json.dumps(known))
    (tmp_path / "x.json").write_text(json.dumps(known))
    assert made_by(f"folder:{folder}") == made_by(str(tmp_path / "x.npz")) == known
    for damage in ("{", "[1, 2]", ""):
        (folder / "samples.json").write_text(damage)
        with pytest.raises(DataError, match=rf"^{folder}/samples.json is damaged: remove it"):
            made_by(str(folder))
    (tmp_path / "x.json").write_text("[1, 2]")  # somebody else's
    assert made_by(str(tmp_path / "x.npz")) == {}
