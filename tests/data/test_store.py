"""Images decoded once: the pixels of direct decoding, whatever happens to the process, the disk or the files."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from residua import cli
from residua.data import BadImage, Crops, DataError, Feed, Source, decode, load, store
from residua.data.errors import DataWarning
from residua.data.store import NoStore, StoredSource, stored, stored_splits, stores_in

SIDE = 32
SIZES = [(40, 60), (64, 33), (20, 90), (31, 31), (200, 300), (90, 45), (33, 32), (300, 40), (50, 50), (70, 64)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images of different sizes, some smaller than the side of the store, one grey, one turned by EXIF."""
    folder, random = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for k, (height, width) in enumerate(SIZES):
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[0x0112] = 6 if k == 1 else 1
        (image.convert("L") if k == 8 else image).save(folder / f"{k}.{'jpg' if k < 5 else 'png'}", exif=exif)
    return folder


def images(folder: Path) -> Source:
    return load(f"folder:{folder}").train


def build(folder: Path, place: Path, **options: Any) -> StoredSource:
    found = stored(images(folder), str(place), SIDE, **options)
    assert isinstance(found, StoredSource)
    return found


def whole(found: StoredSource) -> bool:
    """Whether all its pixels are those of the files."""
    return all(np.array_equal(found.read(i), store._read(found.images, i, SIDE)) for i in range(len(found)))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the images that are decoded for a store from here on."""
    decoded: list[int] = []
    read = store._read

    def counting(source: Source, i: int, side: int) -> np.ndarray:
        decoded.append(i)
        return read(source, i, side)

    monkeypatch.setattr(store, "_read", counting)
    return decoded


def test_pixels_are_those_of_the_files_shrunk_to_the_side(photos: Path, tmp_path: Path) -> None:
    found = build(photos, tmp_path / "stores")
    for i, name in enumerate(sorted(os.listdir(photos))):
        direct = decode.conform(decode.decode(photos / name, name), 3, np.dtype(np.uint8))
        height, width = direct.shape[:2]
        factor = min(1.0, SIDE / min(height, width))
        size = round(height * factor), round(width * factor)
        assert found.size(i) == size
        if max(height, width) <= 3 * SIDE and min(height, width) <= 2 * SIDE:  # larger ones are shrunk on reading
            np.testing.assert_array_equal(found.read(i), decode.resize(direct, *size))
        if min(height, width) <= SIDE:
            assert size == (height, width)
    assert whole(found)
    assert min(min(size) for size in map(found.size, range(len(found)))) == 20


def test_what_is_read_is_the_mapping_itself_unless_it_is_shrunk(photos: Path, tmp_path: Path) -> None:
    found = build(photos, tmp_path / "stores")
    image = found.read(0, SIDE)
    assert np.shares_memory(image, found._pixels)
    assert not image.flags.writeable
    assert found.fetch(0) is None
    assert found.read(0, 8).shape == decode.shrink(image, 8).shape == (16, 24, 3)


def test_all_else_is_that_of_the_set(tmp_path: Path) -> None:
    for k in range(12):
        path = tmp_path / "set" / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (20 * k, 0, 0)).save(path)
    splits = load(f"folder:{tmp_path / 'set'}")
    kept = stored_splits(splits, str(tmp_path / "stores"), SIDE)
    assert kept.test is not None
    assert splits.test is not None
    assert kept.name.startswith(f"{splits.name}, stored at {SIDE} px (")
    for ours, theirs in ((kept.train, splits.train), (kept.test, splits.test)):
        assert ours.labels is not None
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        assert (ours.classes, ours.name, ours.split) == (theirs.classes, theirs.name, theirs.split)
        assert [ours.identify(i) for i in range(len(ours))] == [theirs.identify(i) for i in range(len(theirs))]
        assert ours.stats() == theirs.stats()
        assert ours.fingerprint() != theirs.fingerprint()
        assert store.store_of(ours.subset([1]).subset([0])) is ours
        assert store.store_of(theirs) is None
    assert kept.train.fingerprint() != kept.test.fingerprint()
    twin = pickle.loads(pickle.dumps(kept.train))
    np.testing.assert_array_equal(twin.read(3), kept.train.read(3))


@pytest.mark.parametrize("workers", [0, 2])
def test_views_are_alike_resident_and_streamed(photos: Path, tmp_path: Path, workers: int) -> None:
    found = build(photos, tmp_path / "stores")
    crops, index = Crops((16, 16)), torch.tensor([4, 1, 3, 0])
    resident = Feed(found, "cpu", img_size=16, resident=True, crops=crops)
    streamed = Feed(found, "cpu", img_size=16, resident=False, workers=workers, crops=crops)
    (held,), (came,) = (list(feed.iterate([index], [3])) for feed in (resident, streamed))
    assert torch.equal(crops(held, 3), crops(came, 3))
    expected = crops.boxes(index, 3, torch.tensor([decode.shrunk_size(*found.size(i), 16) for i in index.tolist()]))
    assert torch.equal(crops.boxes(held.index, 3, held.sizes), expected)  # of the stored sizes
    streamed.close()


def test_a_second_time_nothing_is_decoded(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted(monkeypatch)
    told: list[tuple[str, int, int]] = []
    build(photos, tmp_path / "stores", progress=lambda *told_: told.append(told_))
    assert sorted(decoded) == list(range(10))
    assert told[-1] == ("decoding images into their store", 10, 10)
    build(photos, tmp_path / "stores")
    assert len(decoded) == 10


def test_bytes_are_read_once_to_be_decoded_and_hashed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read_bytes = Path.read_bytes

    def counting(path: Path) -> bytes:
        reads.append(path)
        return read_bytes(path)

    for file in photos.rglob("*.*"):
        os.utime(file, (1e9, 1e9))
    time.sleep(2.1)  # a change within two seconds may leave no trace, so nothing is believed of a file that new
    monkeypatch.setattr(Path, "read_bytes", counting)
    source = images(photos)
    found = stored(source, str(tmp_path / "place"))
    assert isinstance(found, StoredSource)
    assert sorted(p for p in reads if photos in p.parents) == sorted(Path(source.base, f) for f in source.files)
    assert found.folder.name == stored(images(photos), str(tmp_path / "place")).folder.name
    assert len(list((tmp_path / "place").iterdir())) == 1


def test_another_side_or_image_is_another_store(photos: Path, tmp_path: Path) -> None:
    first = build(photos, tmp_path / "stores").fingerprint()
    assert stored(images(photos), str(tmp_path / "stores"), 16).fingerprint() != first
    Image.new("RGB", (60, 40), "red").save(photos / "0.jpg")
    swapped = build(photos, tmp_path / "stores")
    assert swapped.fingerprint() != first
    assert whole(swapped)
    assert len(stores_in(tmp_path / "stores")) == 3


def test_images_that_change_while_they_are_decoded_have_no_store(photos: Path, tmp_path: Path) -> None:
    def swap(what: str, done: int, total: int) -> None:
        if done == 9:
            Image.new("RGB", (61, 40), "red").save(photos / "0.jpg")

    with pytest.raises(DataError, match="changed while they were decoded"):
        build(photos, tmp_path / "stores", progress=swap)
    assert not stores_in(tmp_path / "stores")
    assert whole(build(photos, tmp_path / "stores"))


# ---------------------------------------------------------------- cut short, damaged, full

BUILDER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its children ignore in the background
from residua.data import load, store
read = store._read
def slowly(source, i, side):
    time.sleep(0.1)
    print(i, flush=True)
    return read(source, i, side)
store._read, store._TASK, store._AHEAD, store._KEPT = slowly, 1, 0, 4
found = store.stored(load("folder:" + sys.argv[1]).train, sys.argv[2], int(sys.argv[3]))
print("done", flush=True)
"""


def start(photos: Path, place: Path) -> subprocess.Popen[str]:
    """A process that builds the store slowly, and says which images it has decoded."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(photos), str(place), str(SIDE)], stdout=subprocess.PIPE, text=True
    )  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_store_that_was_cut_short_goes_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    place = tmp_path / "stores"
    for k in range(10, 40):
        Image.new("RGB", (30, 30), (k, 0, 0)).save(photos / f"{k}.png")
    builder = start(photos, place)
    assert builder.stdout is not None
    while int(builder.stdout.readline()) < 12:
        pass
    builder.send_signal(how)
    builder.communicate()
    assert builder.returncode != 0
    (part,) = stores_in(place)
    assert part.state == "unfinished"
    decoded = counted(monkeypatch)
    found = build(photos, place)
    assert 0 < len(decoded) <= 40 - 8
    assert whole(found)
    assert stores_in(place)[0].state == "whole"


def test_only_what_is_missing_is_decoded(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = build(photos, tmp_path / "stores")
    about = json.loads((found.folder / "store.json").read_text())
    (found.folder / "store.json").write_text(json.dumps({k: v for k, v in about.items() if k != "index"}))
    index = (found.folder / "index").read_bytes()
    (found.folder / "index").write_bytes(index[: 6 * store._ROW.itemsize + 7])  # cut in the middle of a row
    decoded = counted(monkeypatch)
    again = build(photos, tmp_path / "stores")
    assert sorted(decoded) == [6, 7, 8, 9]
    assert (again.folder / "index").read_bytes() == index
    assert whole(again)


def cut_pixels(folder: Path) -> None:
    os.truncate(folder / "pixels", (folder / "pixels").stat().st_size - 1)


def lengthen_pixels(folder: Path) -> None:
    with (folder / "pixels").open("ab") as file:
        file.write(b"\0")


def turn_index(folder: Path) -> None:
    flip(folder / "index", 5 * store._ROW.itemsize + 3)


def cut_index(folder: Path) -> None:
    os.truncate(folder / "index", 4 * store._ROW.itemsize)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def no_json(folder: Path) -> None:
    (folder / "store.json").write_text('{"images": ' + "[" * 9999)


def other_json(folder: Path) -> None:
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(about | {"images": 9}))


@pytest.mark.parametrize("damage", [cut_pixels, lengthen_pixels, turn_index, cut_index, no_json, other_json])
def test_a_damaged_store_is_not_believed(photos: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    found = build(photos, tmp_path / "stores")
    before = (found.folder / "pixels").read_bytes()
    damage(found.folder)
    assert stores_in(tmp_path / "stores")[0].state == "damaged"
    with pytest.warns(
        DataWarning,
        match=r"is damaged \(.*\): (what its checksums do not confirm is decoded again|another takes its place)",
    ):
        again = build(photos, tmp_path / "stores")
    assert whole(again)
    assert (again.folder / "pixels").read_bytes() == before


def test_a_store_without_its_index_is_built_again(photos: Path, tmp_path: Path) -> None:
    found = build(photos, tmp_path / "stores")
    (found.folder / "index").unlink()
    with pytest.warns(DataWarning, match="is damaged"):
        assert whole(build(photos, tmp_path / "stores"))


def test_a_flipped_byte_is_noticed_and_never_seen(photos: Path, tmp_path: Path) -> None:
    found = build(photos, tmp_path / "stores")
    end, height, width, _ = found._rows[3].item()
    flip(found.folder / "pixels", end - height * width * 3 // 2)
    again = build(photos, tmp_path / "stores")
    with pytest.warns(DataWarning, match=r"3\.jpg is damaged in the store"):
        image = again.read(3)
    np.testing.assert_array_equal(image, store._read(again.images, 3, SIDE))
    assert np.shares_memory(again.read(4), again._pixels)
    (listed,) = stores_in(tmp_path / "stores")
    assert store.verify(listed) == 1


def test_zeros_that_a_power_cut_leaves_are_no_images(photos: Path, tmp_path: Path) -> None:
    found = build(photos, tmp_path / "stores")
    about = json.loads((found.folder / "store.json").read_text())
    del about["index"]
    (found.folder / "store.json").write_text(json.dumps(about))
    rows = len((found.folder / "index").read_bytes())
    for name, kept in (("index", 5 * store._ROW.itemsize), ("pixels", 4000)):
        data = (found.folder / name).read_bytes()
        (found.folder / name).write_bytes(data[:kept] + bytes(len(data) - kept))
    assert store._confirmed(found.folder, about, None)[0] < 5
    again = build(photos, tmp_path / "stores")
    assert whole(again)
    assert len((again.folder / "index").read_bytes()) == rows


class Full:
    """A file of a disk that takes 3,000 bytes more."""

    left = 3000

    def __init__(self, path: Path) -> None:
        self.file = OPENED(path)

    def write(self, data: Any) -> None:
        Full.left -= len(bytes(data))
        if Full.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file.write(data)

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


OPENED = store._opened


def test_a_full_disk_is_left_as_it_was(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_opened", Full)
    with pytest.raises(NoStore, match="No space left on device; what was written of it is removed"):
        build(photos, tmp_path / "stores")
    assert not list((tmp_path / "stores").glob("*"))
    monkeypatch.undo()
    assert whole(build(photos, tmp_path / "stores"))


def test_a_limit_on_files_counts_as_a_full_disk(photos: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(NoStore, match="File too large"):
            build(photos, tmp_path / "stores")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "stores").glob("*"))


def test_room_is_looked_for_before_anything_is_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    need = store.estimate(images(photos), SIDE)
    free = SimpleNamespace(free=3 * need - 1)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: free)
    with pytest.raises(NoStore, match="three times that has to be free"):
        stored(images(photos), "auto", SIDE)
    assert not (tmp_path / "cache" / "stores").exists()
    free.free = 3 * need
    assert isinstance(found := stored(images(photos), "auto", SIDE), StoredSource)
    assert found.folder.parent == tmp_path / "cache" / "stores"
    free.free = need - 1
    with pytest.raises(NoStore, match=r"takes about .* are free in"):
        build(photos, tmp_path / "elsewhere")
    free.free = need
    build(photos, tmp_path / "elsewhere")


def test_the_estimate_is_what_it_takes(photos: Path, tmp_path: Path) -> None:
    source = images(photos)
    found = build(photos, tmp_path / "stores")
    assert store.estimate(source, SIDE) == pytest.approx((found.folder / "pixels").stat().st_size, abs=10)


def test_two_processes_share_the_work_of_one(photos: Path, tmp_path: Path) -> None:
    builders = [start(photos, tmp_path / "stores") for _ in range(2)]
    said = [builder.communicate()[0].split() for builder in builders]
    assert [words[-1] for words in said] == ["done", "done"]
    numbers = [int(word) for words in said for word in words[:-1]]
    assert sorted(numbers) == list(range(10))
    assert whole(build(photos, tmp_path / "stores"))


def test_one_that_waits_takes_over_where_the_other_is_killed(photos: Path, tmp_path: Path) -> None:
    first = start(photos, tmp_path / "stores")
    assert first.stdout is not None
    first.stdout.readline()
    (part,) = stores_in(tmp_path / "stores")
    assert part.state == "being made"
    with pytest.raises(DataError, match="is being made by another process"):
        store.remove(part)
    second = start(photos, tmp_path / "stores")
    time.sleep(0.2)
    first.kill()
    first.communicate()
    assert second.communicate()[0].split()[-1] == "done"
    assert whole(build(photos, tmp_path / "stores"))


# ---------------------------------------------------------------- unreadable images, and sets that have no store


def test_unreadable_images_are_named_and_skipped_as_without_a_store(photos: Path, tmp_path: Path) -> None:
    (photos / "6.png").write_bytes(b"nothing")
    with pytest.raises(BadImage, match=r"6\.png.*--on-bad-image skip"):
        build(photos, tmp_path / "stores")
    found = build(photos, tmp_path / "stores", on_bad_image="skip")
    with pytest.raises(BadImage, match=r"6\.png"):
        found.read(6)
    with pytest.raises(BadImage):
        found.size(6)
    assert len(found.sizes()) == 9
    with pytest.raises(BadImage, match=r"6\.png.*--on-bad-image skip"):
        Feed(found, "cpu", img_size=16, resident=True)
    feeds = [
        Feed(source, "cpu", img_size=16, resident=False, workers=0, on_bad_image="skip")
        for source in (found, found.images)
    ]
    (ours,), (theirs,) = (list(feed.iterate([torch.tensor([5, 6, 7])])) for feed in feeds)
    assert ours.index.tolist() == theirs.index.tolist() == [5, 7, 7]
    for feed in feeds:
        assert feed.skipped == 1
        with pytest.warns(DataWarning, match=r"6\.png"):
            feed.close()
    assert store.verify(stores_in(tmp_path / "stores")[0]) == 0


def test_a_set_without_a_readable_image_has_no_store(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    Image.effect_noise((50, 50), 50).save(tmp_path / "set" / "0.png")
    (tmp_path / "set" / "0.png").write_bytes((tmp_path / "set" / "0.png").read_bytes()[:200])
    source = images(tmp_path / "set")
    with pytest.raises(DataError, match="none of its 1 images can be read"):
        stored(source, str(tmp_path / "stores"), on_bad_image="skip")


def test_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    np.save(tmp_path / "set" / "0.npy", np.zeros((40, 40, 3), np.float32))
    with pytest.raises(DataError, match="images are float32, a store holds uint8 and would lose"):
        stored(images(tmp_path / "set"), str(tmp_path / "stores"))
    assert not (tmp_path / "stores").exists()


def test_images_in_memory_stay_there(tmp_path: Path) -> None:
    digits = load("digits?classes=3").train
    with pytest.warns(DataWarning, match="decoded in memory, and need no store"):
        assert stored(digits, str(tmp_path / "stores")) is digits
    assert not (tmp_path / "stores").exists()


def test_a_place_that_cannot_be_written_is_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        build(photos, tmp_path / "file" / "stores")


def test_the_side_is_more_than_any_view() -> None:
    assert [store.side_for(view) for view in (32, 64, 224, 225, 256, 384, 448)] == [256, 256, 256, 288, 320, 448, 512]
    assert store.side_for(224, crop_pct=1.0) == 256
    assert store.side_for(224, crop_pct=0.5) == 448
    assert all(store.side_for(view) >= 8 / 7 * view for view in range(1, 1000))


# ---------------------------------------------------------------- at the terminal


def test_stores_are_listed_checked_and_removed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))

    def said(*args: str, status: int = 0) -> str:
        found = cli.main(["data", *args])
        out, err = capsys.readouterr()
        assert found == status, err
        return out

    assert "no stores in" in said("stores")
    assert "store   " not in said("info", f"folder:{photos}")
    found = stored(images(photos), "auto", SIDE)
    other = stored(images(photos), "auto", 16)
    assert isinstance(found, StoredSource)
    key = found.folder.name
    assert f"{key}: photos/train, 10 images at {SIDE} px" in said("info", f"folder:{photos}")
    listed = said("stores", "--verify")
    assert listed.count("all images are as written") == 2
    flip(found.folder / "pixels", 100)
    assert "1 of its images are damaged, and read from the set itself" in said("stores", "--verify", status=2)
    assert cli.main(["data", "stores", "--remove", "nothing"]) == 2
    assert cli.main(["data", "stores", "--remove", ""]) == 2
    assert f"removed: {key}" in said("stores", "--remove", key[:8])
    assert [left.folder.name for left in stores_in(tmp_path / "cache" / "stores")] == [other.fingerprint()]
    assert other.fingerprint() in said("stores", str(tmp_path / "cache" / "stores"), "--remove", "all")
    assert not stores_in(tmp_path / "cache" / "stores")
