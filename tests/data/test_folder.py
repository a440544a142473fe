import hashlib
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from residua.data import BadImage, DataError, Feed, count_shared, load
from residua.data.errors import DataWarning
from residua.data.folder import FolderSource
from residua.data.index import list_images

RNG = np.random.default_rng(0)


def put(path: Path, mode: str = "RGB", size: tuple[int, int] = (10, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (*size, 3) if mode == "RGB" else size
    if path.suffix == ".npy":
        np.save(path, RNG.random((*size, 4)).astype(np.float32))
    elif mode == "I;16":
        Image.fromarray(RNG.integers(0, 65536, size, dtype=np.uint16)).save(path)
    else:
        Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8), mode).save(path)


def test_names_that_are_no_text(tmp_path):
    """Bytes of another encoding than the system's, as old archives leave them."""
    for name in (b"a\xff/1.png", b"a\xff/2.png", b"b/\xe9.png", b"b/2.png"):
        put(tmp_path / os.fsdecode(name))
    splits = load(f"folder:{tmp_path}")
    assert len(splits.train) == len(splits.test) == 2
    assert splits.train.read(0).shape == (10, 8, 3)
    assert splits.train.fingerprint() != splits.test.fingerprint()


def test_class_folders_hold_out_a_tenth_of_each(tmp_path):
    for name, count in (("cat", 30), ("dog", 20), ("eel", 2)):
        for k in range(count):
            put(tmp_path / name / f"{k}.png")
    splits = load(f"folder:{tmp_path}")
    assert splits.train.classes == ["cat", "dog", "eel"]
    assert np.bincount(splits.test.labels).tolist() == [3, 2, 1]
    train, test = ({part.identify(i) for i in range(len(part))} for part in (splits.train, splits.test))
    assert len(train | test) == 52
    assert not train & test
    again = load(f"folder:{tmp_path}")
    assert {again.test.identify(i) for i in range(6)} == test
    for part in (splits.train, splits.test):
        for i in range(len(part)):
            assert part.identify(i).split("/")[0] == part.classes[part.labels[i]]


def test_held_out_images_are_not_neighbours(tmp_path):
    """Files in order are often frames of one film."""
    for name in ("cat", "dog"):
        for k in range(100):
            put(tmp_path / name / f"{k:03d}.png", size=(2, 2))
    test = load(f"folder:{tmp_path}").test
    numbers = [int(Path(test.identify(i)).stem) for i in range(10)]
    assert max(numbers) - min(numbers) > 50


def test_classes_are_in_the_order_of_their_names_and_images_in_that_of_their_paths(tmp_path):
    for file in ("a/1.png", "a/2.png", "a b/1.png", "a b/2.png", "a-b/1.png", "a-b/2.png"):
        put(tmp_path / file)
    splits = load(f"folder:{tmp_path}")
    assert splits.train.classes == ["a", "a b", "a-b"]
    for part in (splits.train, splits.test):
        assert [part.identify(i).split("/")[0] for i in range(3)] == ["a b", "a-b", "a"]
        assert part.labels.tolist() == [1, 2, 0]


def test_which_images_are_held_out_is_told_by_the_hash_of_their_names(tmp_path):
    """Counted out in the plain way."""
    for name, count in (("a", 1), ("b", 2), ("c", 5), ("d", 26), ("e", 40)):
        for k in range(count):
            put(tmp_path / name / f"{k}.png", size=(2, 2))
    expected = []
    for name in "bcde":
        files = [f"{name}/{file.name}" for file in (tmp_path / name).iterdir()]
        files.sort(key=lambda file: hashlib.blake2b(file.encode()).digest())
        expected += files[: max(1, round(0.1 * len(files)))]
    splits = load(f"folder:{tmp_path}")
    assert [splits.test.identify(i) for i in range(len(splits.test))] == sorted(expected)
    assert len(splits.train) == 74 - len(expected)


@pytest.mark.parametrize("key", ["fingerprint", "stamp"])
def test_keys_follow_files_names_and_labels(tmp_path, key):
    def now() -> str:
        return getattr(load(f"folder:{tmp_path}").test, key)()

    for file in ("train/b/1.png", "train/c/1.png", "test/b/1.png", "test/c/1.png"):
        put(tmp_path / file)
    seen = {now()}
    assert now() in seen
    os.utime(tmp_path / "test/b/1.png", (1, 1))  # written again, as long as before
    assert (now() in seen) == (key == "fingerprint"), "only who reads knows that nothing has changed"
    seen.add(now())
    (tmp_path / "test/b/1.png").rename(tmp_path / "test/b/2.png")
    seen.add(now())
    put(tmp_path / "train/a/1.png")  # the same test images are now of classes 1 and 2
    seen.add(now())
    assert len(seen) == (3 if key == "fingerprint" else 4)


@pytest.mark.parametrize("held_out", ["val", "valid", "validation", "test"])
def test_ready_splits(tmp_path, held_out):
    for file in ("train/a/1.png", "train/b/2.jpg", "train/b/3.webp", f"{held_out}/b/4.bmp"):
        put(tmp_path / file)
    splits = load(f"folder:{tmp_path}")
    assert splits.train.labels.tolist() == [0, 1, 1]
    assert splits.test.labels.tolist() == [1]
    assert splits.test.identify(0) == f"{held_out}/b/4.bmp"


def test_unlabelled_test_folder_gives_way_to_a_labelled_one(tmp_path):
    for file in ("train/a/1.png", "train/b/2.png", "test/9.png", "val/a/3.png", "val/b/4.png"):
        put(tmp_path / file)
    assert load(f"folder:{tmp_path}").test.split == "val"


@pytest.mark.parametrize(
    "files",
    [("1.png", "2.png"), ("a/1.png", "a/2.png"), ("a/1.png", "b/2.png", "3.png"), ("a/x/1.png", "b/y/2.png")],
)
def test_anything_else_is_unlabelled(tmp_path, files):
    for file in files:
        put(tmp_path / file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        splits = load(f"folder:{tmp_path}")
    assert splits.train.labels is None
    assert splits.test is None
    assert [splits.train.identify(i) for i in range(len(files))] == sorted(files)


def test_hidden_and_foreign_files_are_ignored(tmp_path):
    for file in ("1.png", ".hidden.png", ".thumbs/2.png"):
        put(tmp_path / file)
    (tmp_path / "notes.txt").write_text("hello")
    assert len(load(f"folder:{tmp_path}").train) == 1


def test_one_colour_image_makes_the_set_colour(tmp_path):
    put(tmp_path / "1.png", "L")
    assert load(f"folder:{tmp_path}").train.channels == 1
    put(tmp_path / "2.png", "RGB")
    train = load(f"folder:{tmp_path}").train
    assert train.channels == 3
    assert (np.ptp(train.read(0), axis=2) == 0).all()


def test_sixteen_bit_set(tmp_path):
    put(tmp_path / "1.png", "I;16")
    put(tmp_path / "2.tif", "L")
    train = load(f"folder:{tmp_path}").train
    assert train.dtype == np.uint16
    assert train.read(0).max() > 255
    eight = np.asarray(Image.open(tmp_path / "2.tif"))
    assert np.array_equal(train.read(1)[..., 0], eight.astype(np.uint16) * 257)


def test_floats_beside_integers_must_share_their_range(tmp_path):
    for k in range(3):
        put(tmp_path / f"{k}.png")
    photo = np.asarray(Image.open(tmp_path / "0.png"))
    np.save(tmp_path / "unit.npy", (photo / 255).astype(np.float32))
    np.save(tmp_path / "wide.npy", photo.astype(np.float32))
    with pytest.warns(DataWarning, match=r"unit\.npy is float32 and 0\.png uint8"):
        train = load(f"folder:{tmp_path}").train
    np.testing.assert_allclose(train.read(3), photo / 255, atol=1e-6)
    np.testing.assert_allclose(train.read(0), photo / 255, atol=1e-6)
    with pytest.raises(BadImage, match=r"wide\.npy: floats from .* beside integer images; expected floats in \[0, 1\]"):
        train.read(4)
    for file in tmp_path.glob("*.png"):
        file.unlink()
    (tmp_path / "unit.npy").unlink()
    assert load(f"folder:{tmp_path}").train.read(0).max() > 1  # among themselves floats are what they are


def test_another_way_of_decoding_is_another_fingerprint(tmp_path, monkeypatch):
    put(tmp_path / "1.png")
    train = load(f"folder:{tmp_path}").train
    before = train.fingerprint()
    assert train.fingerprint() == before
    monkeypatch.setattr("residua.data.decode.VERSION", 1)
    assert train.fingerprint() != before


def test_a_file_of_many_pages_among_photos_is_a_bad_image(tmp_path):
    for k in range(3):
        put(tmp_path / f"{k}.png")
    pages = [Image.fromarray(np.full((8, 8), k, np.uint8)) for k in range(5)]
    pages[0].save(tmp_path / "pages.tiff", save_all=True, append_images=pages[1:])
    with pytest.warns(DataWarning, match=r"pages\.tiff has 5 channels where most images have 3: 1 of 4 images"):
        train = load(f"folder:{tmp_path}").train
    assert train.channels == 3
    with pytest.raises(BadImage, match=r"pages\.tiff: 5 channels where the other images have 3 \(--on-bad-image skip"):
        Feed(train, "cpu", img_size=8)
    assert Feed(train, "cpu", img_size=8, on_bad_image="skip").skipped == 1


def test_many_channels_and_their_confusion(tmp_path):
    put(tmp_path / "1.npy")
    train = load(f"folder:{tmp_path}").train
    assert (train.channels, train.dtype) == (4, np.float32)
    put(tmp_path / "2.png")
    with pytest.raises(DataError, match=r"1\.npy has 4"):
        load(f"folder:{tmp_path}")


def test_channels_first_arrays_are_recognised(tmp_path):
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", np.zeros((3, 200, 200 + k), np.uint8))
    with pytest.raises(DataError, match="channels last"):
        load(f"folder:{tmp_path}")


def test_wrong_paths(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load(f"folder:{tmp_path}/nowhere")
    with pytest.raises(DataError, match="no images"):
        load(f"folder:{tmp_path}")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="not a folder"):
        load(f"folder:{tmp_path}/file")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="no images"):
        load(f"folder:{tmp_path}")


def test_test_class_unknown_to_training(tmp_path):
    for file in ("train/a/1.png", "train/b/2.png", "test/a/3.png", "test/zebra/4.png"):
        put(tmp_path / file)
    with pytest.raises(DataError, match="zebra"):
        load(f"folder:{tmp_path}")


def test_broken_file_is_named_when_read_not_when_listed(tmp_path):
    put(tmp_path / "1.png")
    (tmp_path / "2.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    train = load(f"folder:{tmp_path}").train
    with pytest.raises(BadImage, match=r"2\.png"):
        train.read(1)


def test_typical_size_is_the_median(tmp_path):
    for k, size in enumerate([(10, 20), (12, 20), (300, 40)]):
        put(tmp_path / f"{k}.png", size=size)
    assert load(f"folder:{tmp_path}").train.typical_size() == (12, 20)


def test_shared_files_are_counted_and_fingerprint_follows_the_files(tmp_path):
    for file in ("train/a/1.png", "train/b/2.png", "test/a/3.png"):
        put(tmp_path / file)
    (tmp_path / "test/b").mkdir()
    (tmp_path / "test/b/copy.png").write_bytes((tmp_path / "train/b/2.png").read_bytes())
    splits = load(f"folder:{tmp_path}")
    assert count_shared(splits.train, splits.test) == 1
    before = splits.train.fingerprint()
    assert load(f"folder:{tmp_path}").train.fingerprint() == before
    put(tmp_path / "train/a/1.png", size=(11, 8))
    assert load(f"folder:{tmp_path}").train.fingerprint() != before


def test_train_folder_alone_is_split_too(tmp_path):
    for k in range(10):
        put(tmp_path / f"train/{'ab'[k % 2]}/{k}.png")
    splits = load(f"folder:{tmp_path}")
    assert (len(splits.train), len(splits.test)) == (8, 2)
    assert splits.test.identify(0).startswith("train/a/")


def test_a_class_called_train(tmp_path):
    for name in ("apple", "bear", "train", "truck"):
        for k in range(10):
            put(tmp_path / name / f"{k}.png")
    splits = load(f"folder:{tmp_path}")
    assert splits.train.classes == ["apple", "bear", "train", "truck"]
    assert (len(splits.train), len(splits.test)) == (36, 4)


@pytest.mark.parametrize(
    ("files", "unused"),
    [
        (("train/a/1.png", "train/b/2.png", "test/a/3.png", "more/4.png"), "more"),  # train holds no images itself
        (("train/1.png", "train/2.png", "test1/3.png"), "test1"),
        (("train/1.png", "train/2.png", "val/3.png"), None),
        (("train/1.png", "train/2.png", "val/3.png", ".more/4.png"), None),
    ],
)
def test_train_beside_other_folders_is_a_split(tmp_path, files, unused):
    for file in files:
        put(tmp_path / file)
    (tmp_path / "notes").mkdir()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train = load(f"folder:{tmp_path}").train
    assert [train.identify(i) for i in range(len(train))] == list(files[:2])
    assert [f"the images in {unused} are not used" in str(w.message) for w in told] == [True] * (unused is not None)


def test_what_keeps_class_folders_from_giving_labels_is_told(tmp_path):
    for file in ("train/a/1.png", "train/b/2.png", "train/cover.jpg", "train/b/x/3.png"):
        put(tmp_path / file)
    with pytest.warns(DataWarning, match=r"2 folders .* train/b/x/3\.png and 1 more do not lie directly"):
        assert load(f"folder:{tmp_path}").train.labels is None
    (tmp_path / "train/b/x/3.png").unlink()
    with pytest.warns(DataWarning, match=r"cover\.jpg does not lie directly"):
        load(f"folder:{tmp_path}")


def test_no_folder_is_entered_twice(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for file in ("1.png", "b/2.png", ".store/c/3.png"):
        put(root / file)
    put(other / "4.png")
    (root / "me").symlink_to(".")
    (root / "b" / "up").symlink_to("..")
    (root / "a").symlink_to("b")  # comes before b, but is only a link to it
    (root / "c").symlink_to(".store/c")
    (root / "d").symlink_to(other)
    (other / "back").symlink_to(root)
    assert list(list_images(root)) == ["1.png", "b/2.png", "c/3.png", "d/4.png"]


def test_gifs_are_listed(tmp_path):
    put(tmp_path / "1.gif")
    put(tmp_path / "2.png")
    train = load(f"folder:{tmp_path}").train
    assert len(train) == 2
    assert train.read(0).shape == (10, 8, 3)


@pytest.mark.parametrize(
    ("shape", "warned"), [((3, 32, 32), True), ((1, 9, 9), True), ((9, 9, 12), False), ((3, 9, 4), False)]
)
def test_arrays_that_may_be_channels_first(tmp_path, shape, warned):
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", np.zeros(shape, np.uint8))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert load(f"folder:{tmp_path}").train.channels == shape[2]
    assert ["channels first?" in str(w.message) for w in told] == [True] * warned


def test_a_link_that_leads_nowhere_is_an_unreadable_image(tmp_path):
    for file in ("train/a/1.png", "train/b/2.png", "test/a/3.png"):
        put(tmp_path / file)
    for link in ("train/b/x.png", "test/a/x.png"):
        (tmp_path / link).symlink_to("nowhere.png")
    splits = load(f"folder:{tmp_path}")
    assert splits.train.fingerprint() == load(f"folder:{tmp_path}").train.fingerprint()
    assert count_shared(splits.train, splits.test) == 0
    with pytest.raises(BadImage, match=r"b/x\.png"):
        splits.train.read(2)


def test_files_are_asked_for_their_status_by_plain_names(tmp_path, monkeypatch):
    for file in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        put(tmp_path / file)
    train = load(f"folder:{tmp_path}").train
    sizes, key = [(tmp_path / name).stat().st_size for name in train.files], train.stamp()
    monkeypatch.setattr(FolderSource, "encoded", lambda self, i: pytest.fail("a Path of every file of a large set"))
    assert train.weights().tolist() == sizes
    assert train.stamp() == key
