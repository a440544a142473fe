import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from residua.data import Feed, load
from residua.data import index as index_module
from residua.data.errors import DataWarning
from residua.data.index import UNSURE, Hashes, found_before, settled
from residua.data.source import EncodedSource
from residua.progress import listen

from .test_parquet import noise, write
from .test_tar import pack, samples


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """One of its own; and files need not be two seconds old for what is known of them to be kept."""
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(index_module, "_SETTLED", 0.0)
    return tmp_path / "cache"


def put(folder: Path, images: np.ndarray, classes: str = "ab") -> Path:
    for k, image in enumerate(images):
        place = folder / classes[k % len(classes)]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{k}.png")
    return folder


def sets(folder: Path) -> dict[str, str]:
    """Ten images in each of the forms that images of a set have."""
    images, labels = noise(10), [k % 2 for k in range(10)]
    put(folder / "photos" / "train", images)
    (folder / "shards").mkdir()
    pack(folder / "shards" / "a.tar", samples(images, labels))
    write(folder / "rows" / "train.parquet", images, labels)
    return {"folder": f"folder:{folder}/photos", "tar": f"tar:{folder}/shards", "parquet": f"parquet:{folder}/rows"}


def nobody_reads(monkeypatch):
    monkeypatch.setattr(EncodedSource, "digest", lambda self, i: pytest.fail(f"{self.identify(i)} is read"))


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_a_set_is_its_images_wherever_and_whenever_they_were_written(kind, tmp_path, monkeypatch):
    spec = sets(tmp_path / "one")[kind]
    before = load(spec).train.fingerprint()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert load(spec.replace("one", "two")).train.fingerprint() == before
    assert len(list((tmp_path / "cache" / "hashes").iterdir())) == 2
    for file in tmp_path.glob("one/**/*.*"):
        os.utime(file, (1, 1))
    assert load(spec).train.fingerprint() == before
    nobody_reads(monkeypatch)
    assert load(spec).train.fingerprint() == before, "from hashes that were kept"


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_an_image_that_takes_the_place_of_another_is_found_out(kind, tmp_path):
    """Of the same length, and with the time of change set back."""
    spec = sets(tmp_path)[kind]
    before = load(spec).train.fingerprint()
    file = next(tmp_path.rglob("*.png" if kind == "folder" else f"*.{kind}"))
    status, data = file.stat(), file.read_bytes()
    at = data.index(b"IDAT") + 20
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([data[at] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert load(spec).train.fingerprint() != before
    file.write_bytes(data)
    assert load(spec).train.fingerprint() == before


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_hashes_are_taken_when_images_are_first_read(kind, tmp_path, monkeypatch):
    spec = sets(tmp_path)[kind]
    feed = Feed(load(spec).train, "cpu", img_size=9, resident=False, workers=2)
    assert len(list(feed.iterate(torch.arange(len(feed)).split(3)))) > 2
    feed.close()
    with monkeypatch.context() as patch:
        nobody_reads(patch)
        by_workers = load(spec).train.fingerprint()
    shutil.rmtree(tmp_path / "cache")
    assert load(spec).train.fingerprint() == by_workers


def test_a_subset_is_its_own_images(tmp_path):
    spec = sets(tmp_path)["folder"]
    train = load(spec).train
    part = train.subset([3, 1]).fingerprint()
    assert len({part, train.fingerprint(), train.subset([1, 3]).fingerprint()}) == 3
    names = [train.identify(i) for i in range(len(train))]
    (tmp_path / "photos" / names[0]).write_bytes(b"another")
    assert load(spec).train.subset([3, 1]).fingerprint() == part
    (tmp_path / "photos" / names[1]).write_bytes(b"another")
    assert load(spec).train.subset([3, 1]).fingerprint() != part


def test_an_image_that_cannot_be_read_is_part_of_the_set(tmp_path):
    spec = sets(tmp_path)["folder"]
    (tmp_path / "photos" / "train" / "a" / "x.png").symlink_to("nowhere.png")
    before = load(spec).train.fingerprint()
    assert load(spec).train.fingerprint() == before
    shutil.copy(tmp_path / "photos" / "train" / "a" / "0.png", tmp_path / "photos" / "train" / "a" / "nowhere.png")
    (tmp_path / "photos" / "train" / "a" / "0.png").unlink()
    assert load(spec).train.fingerprint() != before


def test_damaged_hashes_are_not_believed(tmp_path, cache):
    spec = sets(tmp_path)["folder"]
    before = load(spec).train.fingerprint()
    (file,) = (cache / "hashes").iterdir()
    good = file.read_bytes()
    for bad in (bytes(k ^ 1 for k in good), good[:30], good + good, b"", good[24:] + good[:24]):
        file.write_bytes(bad)
        assert load(spec).train.fingerprint() == before
        assert file.read_bytes() == good


def test_a_file_that_has_just_changed_may_change_once_more_unseen():
    now = 1_700_000_000.0
    times = [[now - 9, now - 9], [now - 9, now - 1], [now + 1, now - 9], [now + 99, now]]
    stamps = np.array([[10, int(a * 1e9), int(b * 1e9)] for a, b in times])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_SETTLED", 2.0)
        assert (settled(stamps, now)[:, 1] == UNSURE).tolist() == [False, True, True, True]


def test_hashes_are_of_the_image_as_it_was_before_it_was_read(cache):
    hashes, numbers = Hashes("key", 3), np.array([2, 0])
    stamps = np.array([[5, 7, 7], [5, UNSURE, 7]])
    hashes.keep(numbers, stamps, np.array([[1, 2], [3, 4]], np.uint64))
    again = Hashes("key", 3)
    assert again.of(numbers, stamps).tolist() == [[1, 2], [0, 0]]
    assert again.of(numbers[:1], np.add(stamps[:1], [0, 0, 1])).tolist() == [[0, 0]]
    assert [again.has(i) for i in range(3)] == [False, False, True]
    part = again.take(np.array([2, 1])).take(np.array([0]))
    assert part.of(np.array([0]), stamps[:1]).tolist() == [[1, 2]]


def test_without_a_cache_it_works_and_says_so_once(tmp_path, monkeypatch):
    spec = sets(tmp_path)["folder"]
    expected = load(spec).train.fingerprint()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "file"))
    index_module._tell_unwritable.cache_clear()
    with pytest.warns(DataWarning, match="cannot be written .* set RESIDUA_DATA to a folder of yours") as told:
        assert load(spec).train.fingerprint() == load(spec).train.fingerprint() == expected
    assert len(told) == 1


def test_hashing_tells_how_far_it_has_come(tmp_path):
    told = []
    listen(lambda *what: told.append(what))
    try:
        load(sets(tmp_path)["tar"]).train.fingerprint()
    finally:
        listen(None)
    assert ("hashing images", 10, 10) in told


def test_what_was_found_is_kept_by_its_key(cache):
    assert found_before("x", ("a", 1), lambda: [1.5, None]) == [1.5, None]
    assert found_before("x", ("a", 1), lambda: pytest.fail("looked again")) == [1.5, None]
    assert found_before("x", ("a", 2), lambda: 3) == 3
    assert found_before("x", ("a", 1), lambda: 4, sure=False) == 4
    for file in (cache / "samples").iterdir():
        file.write_text("{")
    assert found_before("x", ("a", 1), lambda: 5) == 5
