import multiprocessing
import os
import pickle
import shutil
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from residua.data import DataError, Feed, decode, load
from residua.data import index as index_module
from residua.data import source as source_module
from residua.data.errors import DataWarning
from residua.data.folder import FolderSource
from residua.data.index import UNSURE, Hashes, Listing, found_before, list_images, settled
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


def test_a_subset_is_stamped_by_its_own_files(tmp_path):
    spec = sets(tmp_path)["folder"]
    train = load(spec).train
    part, whole = train.subset([3, 1]).stamp(), train.stamp()
    assert len({part, whole, train.subset([1, 3]).stamp()}) == 3
    os.utime(tmp_path / "photos" / train.identify(0), (1, 1))
    assert (train.subset([3, 1]).stamp(), train.stamp() == whole) == (part, False)
    os.utime(tmp_path / "photos" / train.identify(1), (1, 1))
    assert train.subset([3, 1]).stamp() != part


def test_an_image_that_cannot_be_read_is_part_of_the_set(tmp_path):
    spec = sets(tmp_path)["folder"]
    (tmp_path / "photos" / "train" / "a" / "x.png").symlink_to("nowhere.png")
    before = load(spec).train.fingerprint()
    assert load(spec).train.fingerprint() == before
    shutil.copy(tmp_path / "photos" / "train" / "a" / "0.png", tmp_path / "photos" / "train" / "a" / "nowhere.png")
    (tmp_path / "photos" / "train" / "a" / "0.png").unlink()
    assert load(spec).train.fingerprint() != before


def test_an_image_that_is_named_and_not_there_is_an_unreadable_one(tmp_path):
    put(tmp_path, noise(2), "a")
    source = FolderSource("set", "all", tmp_path, ["a/0.png", "a/1.png", "a/2.png"], classes=None, labels=None)
    assert len(source.sizes()) == 2
    assert source.weights()[2] == 0
    key, stamp = source.fingerprint(), source.stamp()
    put(tmp_path, noise(3), "a")
    assert (source.fingerprint() == key, source.stamp() == stamp) == (False, False)


def test_damaged_hashes_are_not_believed(tmp_path, cache):
    spec = sets(tmp_path)["tar"]
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
    with pytest.warns(DataWarning, match="cannot be written .* set RESIDUA_DATA to a folder of yours") as told:
        assert load(spec).train.fingerprint() == load(spec).train.fingerprint() == expected
    assert len(told) == 1


def test_hashes_that_may_only_be_read_are_used(tmp_path, cache, monkeypatch):
    spec = sets(tmp_path)["tar"]
    before = load(spec).train.fingerprint()
    (file,) = (cache / "hashes").iterdir()
    records = np.frombuffer(file.read_bytes(), np.uint64).reshape(-1, 3).copy()
    records[3] = 0
    file.write_bytes(records.tobytes())
    monkeypatch.setattr(index_module.os, "access", lambda *_: False)
    assert load(spec).train.fingerprint() == before
    assert file.read_bytes() == records.tobytes()


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


def nobody_lists(monkeypatch):
    monkeypatch.setattr(index_module, "_scan", lambda path: pytest.fail(f"{path} is listed"))


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"image")
    return folder


NAMES = (
    "b.png",
    "b/1.png",
    "b/c/2.jpg",
    "b-d/1.png",
    "b0.png",
    "b d/1.png",
    "B/1.PNG",
    "ä/ö.png",
    "x\n/1.png",
    "b.d/1.gif",
)


def test_images_are_listed_in_the_order_of_their_whole_names(tmp_path):
    touch(tmp_path / "set", *NAMES, "notes.txt", ".hidden.png", ".store/1.png", "b/.x/1.png")
    with open(os.fsencode(tmp_path / "set") + b"/b/\xff.png", "wb"):
        pass
    expected = sorted([*NAMES, os.fsdecode(b"b/\xff.png")])
    for _ in range(2):
        found = list_images(tmp_path / "set")
        assert list(found) == expected
        assert [found[i] for i in (0, -1)] == [expected[0], expected[-1]]
        assert found[1:3] == expected[1:3]
        assert sorted(found.groups) == sorted({name.split("/")[0] for name in expected})
        assert [found.groups[k] for k in found.field("tops")] == [name.split("/")[0] for name in expected]
        assert found.field("depths").tolist() == [name.count("/") for name in expected]
        assert found.sizes.tolist() == [0 if "\udcff" in name else 5 for name in expected]
    part = found.take(np.array([4, 2])).take(np.array([1])).below("up/")
    assert list(part) == ["up/" + expected[2]]
    with pytest.raises(IndexError):
        found[len(expected)]


def test_a_folder_is_listed_once(tmp_path, monkeypatch):
    folder = touch(tmp_path / "set", *NAMES)
    (tmp_path / "link").symlink_to(folder)
    first = list(list_images(folder))
    nobody_lists(monkeypatch)
    assert list(list_images(folder)) == list(list_images(tmp_path / "link")) == first


def test_what_is_added_removed_and_renamed_is_seen(tmp_path):
    folder, other = touch(tmp_path / "set", *NAMES), touch(tmp_path / "other", "1.png")
    (folder / "link").symlink_to(other)
    (folder / "lost").symlink_to(tmp_path / "later")

    def now() -> set[str]:
        return set(list_images(folder))

    names = {*NAMES, "link/1.png"}
    assert now() == names
    for change, added, removed in (
        (lambda: touch(folder, "b/c/3.png"), {"b/c/3.png"}, set()),
        (lambda: (folder / "b/c/3.png").unlink(), set(), {"b/c/3.png"}),
        (lambda: (folder / "b/1.png").rename(folder / "b/9.png"), {"b/9.png"}, {"b/1.png"}),
        (lambda: touch(folder, "new/deep/1.png"), {"new/deep/1.png"}, set()),
        (lambda: touch(other, "2.png"), {"link/2.png"}, set()),
        (lambda: touch(tmp_path, "later/1.png"), {"lost/1.png"}, set()),
        (lambda: shutil.rmtree(folder / "b-d"), set(), {"b-d/1.png"}),
    ):
        change()
        names = (names | added) - removed
        assert now() == names


def test_a_folder_that_has_just_changed_is_listed_once_more(tmp_path, monkeypatch):
    """Another change within the same tick of the file system's clock would not show."""
    folder, scanned, scan = touch(tmp_path / "set", *NAMES), [], index_module._scan
    monkeypatch.setattr(index_module, "_scan", lambda path: scanned.append(path) or scan(path))
    monkeypatch.setattr(index_module, "_SETTLED", 60.0)
    for _ in range(2):
        list_images(folder)
    assert scanned.count(str(folder) + "/") == 2


def test_a_damaged_listing_is_made_again(tmp_path, cache):
    folder = touch(tmp_path / "set", *NAMES)
    first = list(list_images(folder))
    (file,) = (file for file in (cache / "index").iterdir() if not file.suffix)
    good = file.read_bytes()
    for k in (0, 20, 40, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:k] + bytes([good[k] ^ 1]) + good[k + 1 :])
        assert list(list_images(folder)) == first
    for bad in (b"", good[:100], good[:-64], b"\x80\x04" * 100):
        file.write_bytes(bad)
        assert list(list_images(folder)) == first


def test_hashes_of_images_stay_when_others_come(tmp_path, cache, monkeypatch):
    spec = sets(tmp_path)["folder"]
    splits = load(spec)
    for part in (splits.train, splits.test):
        part.fingerprint()
    put(tmp_path / "photos" / "train", noise(1), "c")
    read, digest = [], EncodedSource.digest
    monkeypatch.setattr(EncodedSource, "digest", lambda self, i: read.append(self.identify(i)) or digest(self, i))
    load(spec).train.fingerprint()
    assert read == ["train/c/0.png"]
    assert len(list((cache / "hashes").iterdir())) == 1


def test_without_a_cache_folders_are_listed_every_time(tmp_path, monkeypatch):
    folder = touch(tmp_path / "set", *NAMES)
    first = list(list_images(folder))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "file" / "cache"))
    with pytest.warns(DataWarning, match="cannot be written"):
        found = list_images(folder)
    assert list(found) == list(pickle.loads(pickle.dumps(found))) == first


def test_one_of_several_processes_lists(tmp_path, monkeypatch):
    folder, log, folders = touch(tmp_path / "set", *NAMES), tmp_path / "log", index_module._folders

    def slow(scan):
        with log.open("a") as written:
            written.write("x")
        threading.Event().wait(0.3)
        return folders(scan)

    monkeypatch.setattr(index_module, "_folders", slow)
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=list_images, args=(folder,)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert log.read_text() == "x"


def test_a_listing_travels_by_the_name_of_its_file(tmp_path):
    folder = touch(tmp_path / "set", *(f"{k}.png" for k in range(500)))
    sent = pickle.dumps(list_images(folder).below("up/"))
    assert len(sent) < 2000
    assert pickle.loads(sent)[499] == "up/99.png"
    touch(folder, "500.png")
    list_images(folder)
    with pytest.raises(DataError, match="images were added or removed since they were listed"):
        pickle.loads(sent)
    assert list(Listing.of(folder, ["b.png", "a.png"])) == ["b.png", "a.png"]


def test_an_image_of_a_large_folder_takes_few_bytes(tmp_path):
    image = put(tmp_path / "one", noise(1), "a") / "a" / "0.png"
    for k in range(20_000):
        place = tmp_path / "set" / f"class-{k % 20}"
        place.mkdir(parents=True, exist_ok=True)
        os.link(image, place / f"photograph-{k:08d}.png")
    load(f"folder:{tmp_path}/set")
    tracemalloc.start()
    splits = load(f"folder:{tmp_path}/set")
    part = splits.train.subset(np.arange(len(splits.train)))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(part) == 18_000
    assert held < 64 * 20_000, "names, labels, and the numbers and labels of a subset"
    assert peak < 128 * 20_000


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_samples_are_looked_at_once(kind, tmp_path, monkeypatch):
    spec = sets(tmp_path)[kind]

    def now() -> tuple[object, ...]:
        train = load(spec).train
        part = train.subset([4, 2])
        of_part = part.sizes().tolist(), part.stats()
        return train.channels, train.sizes().tolist(), train.stats(), train.stats(1), of_part

    first = now()
    with monkeypatch.context() as patch:
        for name in ("header", "decode"):
            patch.setattr(decode, name, lambda *_: pytest.fail("looked at once more"))
        assert now() == first
    file = next(tmp_path.rglob("*.png" if kind == "folder" else f"*.{kind}"))
    os.utime(file, (1, 1))  # as if it had changed
    looked, header = [], decode.header
    monkeypatch.setattr(decode, "header", lambda *about: looked.append(about) or header(*about))
    assert now() == first
    assert looked


def test_a_second_start_asks_for_the_status_of_sampled_files_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "_PROBED", 8)
    monkeypatch.setattr(source_module, "_STAT_IMAGES", 8)
    put(tmp_path / "set", noise(200))
    asked, stamps = [], index_module.file_stamps

    def start() -> None:
        train = load(f"folder:{tmp_path}/set").train
        train.typical_size(), train.stats(), train.weights()

    start()
    nobody_lists(monkeypatch)
    monkeypatch.setattr("residua.data.folder.file_stamps", lambda paths: asked.extend(paths) or stamps(paths))
    start()
    assert len(asked) == 16
