"""Sets on object stores and web servers: fsspec's `memory:`, and servers on this machine that the tests start."""

import errno
import http.server
import io
import multiprocessing
import os
import pickle
import re
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from residua.data import BadImage, DataError, Feed, load, parquet, remote, tar
from residua.data.errors import DataWarning
from residua.data.remote import RemoteFile, fetch

from .test_parquet import write
from .test_tar import noise, pack, png, samples


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", partial(_less, time.sleep))
    return tmp_path / "cache" / "remote"


def _less(sleep, seconds):
    sleep(min(seconds, 0.01))


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Shards of 5 images each."""
    folder, images = tmp_path_factory.mktemp("shards"), noise(20)
    for k in range(3):
        pack(folder / f"train-{k:03d}.tar", samples(images[5 * k : 5 * k + 5], [0, 1, 2, 0, 1], 5 * k))
    pack(folder / "val-000.tar", samples(images[15:], [0, 1, 2, 0, 1], 15))
    return folder, images


@pytest.fixture
def memory(local):
    url = f"memory://{uuid.uuid4().hex}/shards"
    fs = fsspec.filesystem("memory")
    fs.put(str(local[0]), url, recursive=True)
    yield url
    fs.rm(url, recursive=True)


def same(spec: str, folder: Path, kind: str = "tar") -> None:
    ours, theirs = load(spec), load(f"{kind}:{folder}")
    for split in ("train", "test"):
        here, there = getattr(ours, split), getattr(theirs, split)
        assert [here.identify(i) for i in range(len(here))] == [there.identify(i) for i in range(len(there))]
        assert here.labels.tolist() == there.labels.tolist()
        for i in reversed(range(len(here))):
            assert np.array_equal(here.read(i), there.read(i))


@pytest.mark.parametrize("pattern", ["", "/", "/{train-000,train-001,train-002,val-000}.tar", "/*.tar"])
def test_shards_anywhere_are_those_of_a_folder(memory, local, pattern):
    same(f"tar:{memory}{pattern}", local[0])
    assert len(load(f"tar:{memory}{pattern}?classes=2&train=5").train) == 5


def test_copies_are_used_again(memory, local, cache, monkeypatch):
    first = load(f"tar:{memory}").train
    kept = sorted(cache.glob("*.tar"))
    assert sorted(file.read_bytes() for file in kept) == sorted(file.read_bytes() for file in local[0].iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(remote, "_open", lambda file: pytest.fail("fetched again"))
        patch.setattr(tar, "read_index", lambda *_: pytest.fail("walked again"))
        again = load(f"tar:{memory}").train
        assert np.array_equal(again.read(7), local[1][7])
    assert again.fingerprint() == first.fingerprint()
    time.sleep(0.01)
    pack(local[0].parent / "other.tar", samples(noise(2), [0, 1]))
    fsspec.filesystem("memory").put(str(local[0].parent / "other.tar"), f"{memory}/train-001.tar")
    changed = load(f"tar:{memory}").train
    assert (len(changed), changed.fingerprint() == first.fingerprint()) == (12, False)


def test_a_set_larger_than_the_cache_is_read_from_afar(memory, local, cache, monkeypatch):
    size = (local[0] / "train-000.tar").stat().st_size
    monkeypatch.setenv(remote.VARIABLE, str(2.5 * size / 2**30))
    same(f"tar:{memory}", local[0])
    assert sum(file.stat().st_size for file in cache.glob("*.tar")) == 2 * size
    train = pickle.loads(pickle.dumps(load(f"tar:{memory}").train))
    for file in cache.glob("*.tar"):  # removed by another process meanwhile
        file.unlink()
    assert np.array_equal(train.read(3), local[1][3])


def far(name: str, size: int, keep: tuple[str, ...] = ()) -> RemoteFile:
    url = f"memory://{name}"
    fsspec.filesystem("memory").pipe(url, bytes(size))
    return RemoteFile(url, name, size, "1", frozenset(keep))


def test_what_was_used_longest_ago_makes_room(cache, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, str(3000 / 2**30))
    a, b, c = (far(name, 1000) for name in "abc")
    for age, file in enumerate((a, b, c)):
        fetch(file)
        os.utime(file.copy, (age, age))
    fetch(a)  # used again
    fetch(far("d", 1000))
    assert [file.copy.exists() for file in (a, b, c)] == [True, False, True]
    assert fetch(far("e", 2500, (a.copy.name,))) is None, "it has no room beside what must stay"
    assert [file.copy.exists() for file in (a, b, c)] == [True, False, True]
    fetch(far("e", 2500))
    assert [file.name.rpartition("-")[2] for file in cache.iterdir() if file.name != ".lock"] == ["e"]
    assert fetch(far("f", 3001)) is None


def test_what_a_process_that_is_gone_began_makes_room(cache, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, str(1500 / 2**30))
    cache.mkdir(parents=True)
    (cache / ".gone.part").write_bytes(bytes(1000))
    assert fetch(far("a", 1000)).read_bytes() == bytes(1000)
    assert not (cache / ".gone.part").exists()


def test_without_a_number_the_cache_leaves_half_of_the_disk(monkeypatch):
    free = remote.shutil.disk_usage("/")._replace(free=10 << 30)
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: free)
    assert remote.bound() == 5 << 30
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda _: free._replace(free=10 << 40))
    assert remote.bound() == 50 << 30
    for told in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv(remote.VARIABLE, told)
        with pytest.raises(DataError, match=f"RESIDUA_REMOTE_CACHE='{told}', expected how many GiB"):
            remote.bound()


def test_one_of_several_processes_fetches(tmp_path, cache, monkeypatch):
    file, log, download = far("a", 100_000), tmp_path / "log", remote._download

    def slow(file: RemoteFile, handle: io.BufferedRandom) -> None:
        with log.open("a") as written:
            written.write("x")
        threading.Event().wait(0.3)
        download(file, handle)

    monkeypatch.setattr(remote, "_download", slow)
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=fetch, args=(file,)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert log.read_text() == "x"
    assert file.copy.read_bytes() == bytes(100_000)


def test_a_full_disk_is_told(memory, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote, "set_aside", full)
    with pytest.raises(DataError, match=r"train-000\.tar: its .* cannot be kept in .*: the disk is full; free some"):
        load(f"tar:{memory}")
    assert not list(cache.glob(".*.part"))


def test_a_connection_that_breaks_is_tried_again(cache, monkeypatch):
    file, download, asked = far("a", 1000), remote._download, []

    def breaks(file, handle):
        asked.append(file)
        if len(asked) < 3:
            handle.write(b"x" * 400)
            raise ConnectionResetError("reset by peer")
        download(file, handle)

    monkeypatch.setattr(remote, "_download", breaks)
    assert fetch(file).read_bytes() == bytes(1000)
    monkeypatch.setattr(remote, "_download", lambda *_: (_ for _ in ()).throw(ConnectionResetError("reset by peer")))
    with pytest.raises(DataError, match=r"memory://b cannot be read: ConnectionResetError: reset by peer; check"):
        fetch(far("b", 10))
    assert [path.name for path in cache.glob("*-b")] == []


def test_a_file_of_another_length_than_told_is_refused(cache):
    for size in (900, 1100):
        file = far(f"a{size}", size)
        with pytest.raises(DataError, match=r"(900|more than 1,000) of its 1,000 bytes came"):
            fetch(RemoteFile(file.url, "a", 1000, "1"))
    assert not list(cache.glob("*a*"))


def test_much_to_fetch_is_said(memory, monkeypatch):
    monkeypatch.setattr(remote, "_MANY", 1)
    with pytest.warns(DataWarning, match=r"GiB of 4 files are fetched into .*remote, which may hold .* GiB"):
        load(f"tar:{memory}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tar:memory://nowhere/a.tar", r"memory://.*nowhere/a\.tar does not exist"),
        ("tar:memory://nowhere", r"memory://nowhere(: no \.tar files there| does not exist)"),
        ("folder:memory://nowhere/photos", r"folder:memory://.*nowhere/photos does not exist"),
        ("tar:qwertz://x/a.tar", r"qwertz://x/a\.tar: .*expected s3://, gs://, https://"),
    ],
)
def test_what_is_not_there(spec, message):
    with pytest.raises(DataError, match=message):
        load(spec)


def test_missing_libraries_are_named(monkeypatch):
    def lacks(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacks)
    with pytest.raises(DataError, match=r"s3 needs a library .*Install s3fs.*pip install .*s3fs"):
        load("tar:s3://bucket/a.tar")


@pytest.fixture
def rows(tmp_path):
    """Parquet files of several row groups, here and elsewhere."""
    images, url = noise(15), f"memory://{uuid.uuid4().hex}/rows"
    write(tmp_path / "rows" / "train-0.parquet", images[:6], [0, 1, 2, 0, 1, 2])
    write(tmp_path / "rows" / "train-1.parquet", images[6:11], [2, 2, 2, 2, 2])
    write(tmp_path / "rows" / "valid-0.parquet", images[11:], [1, 0, 1, 0])
    fsspec.filesystem("memory").put(str(tmp_path / "rows"), url, recursive=True)
    return url, images, tmp_path / "rows"


@pytest.mark.parametrize("pattern", ["", "/*.parquet"])
def test_rows_anywhere_are_those_of_a_folder(rows, cache, pattern, monkeypatch):
    url, images, folder = rows
    ours, theirs = load(f"parquet:{url}{pattern}?label=coarse"), load(f"parquet:{folder}?label=coarse")
    for here, there in ((ours.train, theirs.train), (ours.test, theirs.test)):
        assert (here.name, here.split, here.classes) == ("rows", there.split, ["animal", "thing"])
        assert here.labels.tolist() == there.labels.tolist()
        assert all(np.array_equal(here.read(i), there.read(i)) for i in reversed(range(len(here))))
    assert len(list(cache.iterdir())) == 4, "three columns and a lock"
    monkeypatch.setattr(parquet, "_unpack", lambda *_: pytest.fail("fetched again"))
    again = pickle.loads(pickle.dumps(load(f"parquet:{url}").train))
    assert np.array_equal(again.read(10), images[10])


def test_rows_change_their_fingerprint(rows):
    url, images, folder = rows
    before = load(f"parquet:{url}").train.fingerprint()
    assert load(f"parquet:{url}").train.fingerprint() == before
    write(folder / "train-1.parquet", images[:5], [2, 2, 2, 2, 2])
    fsspec.filesystem("memory").put(str(folder / "train-1.parquet"), f"{url}/train-1.parquet")
    assert load(f"parquet:{url}").train.fingerprint() != before


def test_rows_without_room_are_refused(rows, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, str(50_000 / 2**30))  # a file sets 64 KiB and more aside
    with pytest.raises(DataError, match=r"train-.\.parquet: its images .* has no room beside the rest of the set"):
        load(f"parquet:{rows[0]}")


def test_damaged_rows_are_named(rows):
    fsspec.filesystem("memory").pipe(f"{rows[0]}/train-1.parquet", b"no parquet")
    with pytest.raises(DataError, match=r"train-1\.parquet is not a readable parquet file"):
        load(f"parquet:{rows[0]}")


def test_rows_that_name_files_are_bad_images(rows):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    found = [{"bytes": png(noise(1)[0]), "path": None}, {"bytes": None, "path": "/etc/passwd"}]
    with fsspec.open(f"{rows[0]}/a.parquet", "wb") as file:
        pq.write_table(pa.table({"image": pa.array(found, kind)}), file)
    with pytest.raises(BadImage, match=r"its row names /etc/passwd, a file"):
        load(f"parquet:{rows[0]}/a.parquet").train.read(1)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, whole or in parts."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            return super().do_GET()
        data, start, end = path.read_bytes(), int(asked[1]), int(asked[2]) + 1
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data[start:end])))
        self.end_headers()
        self.wfile.write(data[start:end])


@pytest.mark.parametrize("room", ["1", "0"])
def test_a_web_server(local, room, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setenv(remote.VARIABLE, room)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=local[0])) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        same(f"tar:{url}/{{train-000,train-001,train-002,val-000}}.tar", local[0])
        same(f"tar:{url}/", local[0])
        with pytest.raises(DataError, match=r"nothing\.tar does not exist"):
            load(f"tar:{url}/nothing.tar")
        server.shutdown()


@pytest.fixture(scope="module")
def bucket(local):
    """An object store on this machine, of one bucket."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    import boto3

    with pytest.MonkeyPatch.context() as patch:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(key, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        store = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        store.start()
        address = "http://{}:{}".format(*store.get_host_and_port())
        patch.setenv("AWS_ENDPOINT_URL", address)
        client = boto3.client("s3")
        client.create_bucket(Bucket="images")
        for file in local[0].iterdir():
            client.upload_file(str(file), "images", f"shards/{file.name}")
        yield client
        store.stop()


@pytest.mark.parametrize("room", ["1", "0"])
def test_an_object_store(local, bucket, room, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, room)
    same("tar:s3://images/shards", local[0])
    same("tar:s3://images/shards/*.tar", local[0])
    assert len(load("tar:s3://images/shards/train-{000..001}.tar").train) == 10
    with pytest.raises(DataError, match=r"s3://images/shards/train-003\.tar does not exist"):
        load("tar:s3://images/shards/train-{000..003}.tar")
    with pytest.raises(DataError, match=r"s3://nobodys/"):
        load("tar:s3://nobodys/train-{000..003}.tar")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_decoding_processes_ask_an_object_store(local, bucket, monkeypatch):
    """They are forked from a process that has asked already, whose connections they must not use."""
    monkeypatch.setenv(remote.VARIABLE, "0")
    train = load("tar:s3://images/shards").train
    feed = Feed(train, "cpu", img_size=9, resident=False, workers=2)
    got = [batch.index.tolist() for batch in feed.iterate(torch.arange(15).flip(0).split(5))]
    feed.close()
    assert got == [[14, 13, 12, 11, 10], [9, 8, 7, 6, 5], [4, 3, 2, 1, 0]]


def test_rows_in_an_object_store(rows, bucket):
    for file in rows[2].iterdir():
        bucket.upload_file(str(file), "images", f"rows/{file.name}")
    train = load("parquet:s3://images/rows").train
    assert all(np.array_equal(train.read(i), rows[1][i]) for i in range(11))


def test_a_changed_object_is_another_set(bucket, tmp_path):
    bucket.upload_file(str(pack(tmp_path / "a.tar", samples(noise(3), [0, 1, 2]))), "images", "other/a.tar")
    before = load("tar:s3://images/other/a.tar").train.fingerprint()
    assert load("tar:s3://images/other/a.tar").train.fingerprint() == before
    bucket.upload_file(str(pack(tmp_path / "a.tar", samples(noise(3), [0, 1, 2]))), "images", "other/a.tar")
    assert load("tar:s3://images/other/a.tar").train.fingerprint() != before


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Twelve images of three classes in a folder, with names that are patterns elsewhere."""
    monkeypatch.setattr(remote, "_PACK", 600)
    images, folder = noise(12), tmp_path / "photos"
    for k, image in enumerate(images):
        place = folder / "train" / "abc"[k % 3]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"[{k}] *?#.png").write_bytes(png(image))
    for k, image in enumerate(noise(3)):
        (folder / "val" / "abc"[k]).mkdir(parents=True)
        (folder / "val" / "abc"[k] / "x.png").write_bytes(png(image))
    (folder / "train" / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def remote_photos(photos):
    url, fs = f"memory://{uuid.uuid4().hex}/photos", fsspec.filesystem("memory")
    for file in photos.rglob("*.*"):
        fs.pipe(f"{url}/{file.relative_to(photos).as_posix()}", file.read_bytes())
    return url


@pytest.mark.parametrize("room", ["1", "0"])
def test_images_elsewhere_are_those_of_a_folder(photos, remote_photos, room, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, room)
    same(f"folder:{remote_photos}", photos, "folder")
    same(f"folder:{remote_photos}/train", photos / "train", "folder")
    ours, theirs = load(f"folder:{remote_photos}").train, load(f"folder:{photos}").train
    assert ours.fingerprint() == theirs.fingerprint()
    assert ours.weights().tolist() == theirs.weights().tolist()
    travelled = pickle.loads(pickle.dumps(ours))
    assert all(np.array_equal(travelled.read(i), theirs.read(i)) for i in range(12))


def test_images_elsewhere_are_fetched_once_and_together(photos, remote_photos, cache, monkeypatch):
    first = load(f"folder:{remote_photos}")
    packs = list(cache.glob("*images-*"))
    assert 1 < len(packs) < 15, "several to a file"
    assert sum(file.stat().st_size for file in packs) == sum(file.stat().st_size for file in photos.rglob("*.png"))
    asked, ask = [], remote.Packs._ask
    monkeypatch.setattr(remote.Packs, "_ask", lambda self, i: asked.append(self.images[i]) or ask(self, i))
    again = load(f"folder:{remote_photos}")
    assert [np.array_equal(first.train.read(i), again.train.read(i)) for i in range(12)] == [True] * 12
    assert asked == []
    fsspec.filesystem("memory").pipe(f"{remote_photos}/train/b/new.png", png(noise(1)[0]))
    changed = load(f"folder:{remote_photos}").train
    assert len(changed) == 13
    assert "b/new.png" in asked
    assert len(asked) < 13, "only what its pack holds"


def test_an_image_elsewhere_that_has_changed(photos, remote_photos, monkeypatch):
    before = load(f"folder:{remote_photos}").train
    keys = before.fingerprint(), before.stamp()
    name = before.identify(0)
    data = bytearray((photos / name).read_bytes())
    data[-1] ^= 1
    time.sleep(0.01)
    fsspec.filesystem("memory").pipe(f"{remote_photos}/{name}", bytes(data))
    after = load(f"folder:{remote_photos}").train
    assert after.fetch(0) == bytes(data)
    assert (after.fingerprint() == keys[0], after.stamp() == keys[1]) == (False, False)
    monkeypatch.setenv(remote.VARIABLE, "0")
    monkeypatch.setenv("RESIDUA_DATA", os.environ["RESIDUA_DATA"] + "2")
    listed = load(f"folder:{remote_photos}").train
    fsspec.filesystem("memory").pipe(f"{remote_photos}/{name}", bytes(data) + b"more")
    with pytest.raises(DataError, match=r"bytes where it was listed with .*: it has changed, start again"):
        listed.read(0)


def test_fetching_images_goes_on_where_it_was_cut_short(photos, remote_photos, monkeypatch):
    asked, ask = [], remote.Packs._ask

    def breaks(self, i):
        asked.append(self.images[i])
        if len(asked) > 8:
            raise KeyboardInterrupt
        return ask(self, i)

    monkeypatch.setattr(remote, "_AT_ONCE", 1)
    monkeypatch.setattr(remote, "_PACKS_AT_ONCE", 1)
    monkeypatch.setattr(remote.Packs, "_ask", breaks)
    with pytest.raises(KeyboardInterrupt):
        load(f"folder:{remote_photos}")
    monkeypatch.setattr(remote.Packs, "_ask", lambda self, i: asked.append(self.images[i]) or ask(self, i))
    load(f"folder:{remote_photos}")
    assert len(asked) < 9 + 15


@pytest.mark.parametrize("room", ["1", "0"])
def test_a_folder_in_an_object_store(photos, bucket, room, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, room)
    for file in photos.rglob("*.png"):
        bucket.upload_file(str(file), "images", f"photos/{file.relative_to(photos).as_posix()}")
    same("folder:s3://images/photos", photos, "folder")
    assert load("folder:s3://images/photos?classes=2&train=5").train.fingerprint()
    with pytest.raises(DataError, match=r"s3://images/nothing does not exist"):
        load("folder:s3://images/nothing")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_decoding_processes_ask_an_object_store_for_images(photos, bucket, monkeypatch):
    monkeypatch.setenv(remote.VARIABLE, "0")
    for file in photos.rglob("*.png"):
        bucket.upload_file(str(file), "images", f"asked/{file.relative_to(photos).as_posix()}")
    feed = Feed(load("folder:s3://images/asked").train, "cpu", img_size=9, resident=False, workers=2)
    got = [batch.index.tolist() for batch in feed.iterate(torch.arange(12).flip(0).split(5))]
    feed.close()
    assert got == [[11, 10, 9, 8, 7], [6, 5, 4, 3, 2], [1, 0]]
