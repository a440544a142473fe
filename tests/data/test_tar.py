import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from residua.data import BadImage, DataError, count_shared, describe, load, tar
from residua.data.errors import DataWarning

RNG = np.random.default_rng(0)
Members = dict[str, bytes]


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def noise(count: int) -> list[np.ndarray]:
    return list(RNG.integers(0, 256, (count, 9, 7, 3), dtype=np.uint8))


def pack(path: Path, members: Members, format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(images: list[np.ndarray], labels: list[int], start: int = 0) -> Members:
    found: Members = {}
    for k, (image, label) in enumerate(zip(images, labels), start):
        found |= {f"{k:05d}.png": png(image), f"{k:05d}.cls": str(label).encode(), f"{k:05d}.txt": b"a caption"}
    return found


@pytest.fixture
def shards(tmp_path):
    images = noise(15)
    pack(tmp_path / "set" / "train-000.tar", samples(images[:6], [0, 1, 2, 0, 1, 2]))
    pack(tmp_path / "set" / "train-001.tar", samples(images[6:11], [2] * 5, 6))
    pack(tmp_path / "set" / "val-000.tar", samples(images[10:], [1, 0, 1, 0, 1]))
    return tmp_path / "set", images


def test_samples_of_all_shards_in_order(shards):
    folder, images = shards
    splits = load(f"tar:{folder}")
    assert (splits.name, len(splits.train), len(splits.test), splits.test.split) == ("set", 11, 5, "valid")
    for i in reversed(range(11)):
        assert np.array_equal(splits.train.read(i), images[i])
    assert splits.train.labels.tolist() == [0, 1, 2, 0, 1, 2] + [2] * 5
    assert splits.train.classes == splits.test.classes == ["0", "1", "2"]
    assert splits.train.identify(0) == "train-000.tar/00000"
    assert splits.train.identify(7) == "train-001.tar/00007"
    assert splits.train.weights().tolist() == [len(png(image)) for image in images[:11]]
    assert count_shared(splits.train, splits.test) == 1
    assert [path.name for path in sorted(folder.iterdir())] == ["train-000.tar", "train-001.tar", "val-000.tar"]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("train-{000..001}.tar", 11), ("train-00{1,0}.tar", 11), ("train-*.tar", 11), ("train-001.tar", 5)],
)
def test_shards_by_pattern(shards, pattern, count):
    folder, images = shards
    splits = load(f"tar:{folder}/{pattern}")
    assert (len(splits.train), splits.test) == (count, None)
    first = 6 if pattern in ("train-00{1,0}.tar", "train-001.tar") else 0
    assert np.array_equal(splits.train.read(0), images[first])


def test_signs_of_patterns_may_be_in_names(tmp_path):
    for k in range(2):
        pack(tmp_path / "[new] {set}" / f"{k}.tar", samples(noise(2), [0, 1]))
    (tmp_path / "[new] {set}" / "2.tar").mkdir()
    for pattern, count in (("{0..1}.tar", 4), ("0.tar", 2), ("", 4)):
        assert len(load(f"tar:{tmp_path}/[new] {{set}}/{pattern}").train) == count


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a{08..11}", ["a08", "a09", "a10", "a11"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}/{0..1}.tar", ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]),
        ("plain{}.tar", ["plain{}.tar"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern, names):
    assert tar.expand(pattern) == names


def test_too_many_shards_are_refused():
    for pattern in ("{0..999999999999}.tar", "{0..999}{0..999}{0..999}.tar"):
        with pytest.raises(DataError, match=r"names 1,000,000.*expected at most 100,000"):
            tar.expand(pattern)


def test_test_folders_and_names_tell_the_splits(tmp_path):
    pack(tmp_path / "train" / "0.tar", samples(noise(2), [0, 1]))
    pack(tmp_path / "val" / "0.tar", samples(noise(3), [0, 1, 0]))
    assert len(load(f"tar:{tmp_path}").test) == 3
    with pytest.raises(DataError, match=r"no training files among valid; name them train-\*\.tar"):
        load(f"tar:{pack(tmp_path / 'val-0.tar', {})}")
    (tmp_path / "val-0.tar").unlink()
    pack(tmp_path / "test" / "0.tar", {"a.png": png(noise(1)[0])})
    assert load(f"tar:{tmp_path}").test.split == "valid", "a test split without labels gives way"


def labelled(path: Path, found: list[object]) -> str:
    members = {f"{k}.png": png(image) for k, image in enumerate(noise(len(found)))}
    texts = {f"{k}.json": json.dumps(value).encode() for k, value in enumerate(found) if value is not None}
    return f"tar:{pack(path / 'train.tar', members | texts)}"


@pytest.mark.parametrize(
    ("found", "query", "classes", "labels"),
    [
        ([{"label": 1}, {"label": 0}], "", ["0", "1"], [1, 0]),
        ([{"label": "dog"}, {"label": "cat"}], "", ["cat", "dog"], [1, 0]),
        ([{"kind": "b", "label": 0}, {"kind": "a", "label": 0}], "?label=kind", ["a", "b"], [1, 0]),
        ([{"label": True}, {"label": False}], "", ["False", "True"], [1, 0]),
        ([1, 0], "", ["0", "1"], [1, 0]),
        ([{"caption": "x"}, {}], "", None, None),
    ],
)
def test_labels_from_json(tmp_path, found, query, classes, labels):
    train = load(labelled(tmp_path, found) + query).train
    assert train.classes == classes
    assert (None if train.labels is None else train.labels.tolist()) == labels


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([{"label": 0}, {}], "1 of its 2 labels are missing"),
        ([{"label": 0}, {"label": -1}], "1 of its 2 labels are negative"),
    ],
)
def test_labels_that_cannot_be_used_are_told(tmp_path, found, why):
    with pytest.warns(DataWarning, match=why):
        assert load(labelled(tmp_path, found)).train.labels is None


@pytest.mark.parametrize(
    ("found", "query", "message"),
    [
        ([{"label": [1]}], "", r"the label in 0\.json is \[1\], expected the number or name of a class"),
        ([{"label": 10**30}], "", "would make 4,611,686,018,427,387,905 classes of 1 images"),
        ([{"kind": 0}], "?label=kin", "no member .kin and no field 'kin' of a .json; did you mean 'kind'"),
    ],
)
def test_impossible_labels_are_refused(tmp_path, found, query, message):
    with pytest.raises(DataError, match=message):
        load(labelled(tmp_path, found) + query)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_labels_are_named(tmp_path, text):
    pack(tmp_path / "a.tar", {"x.png": png(noise(1)[0]), "x.json": text})
    with pytest.raises(DataError, match=r"a\.tar: x\.json is not a readable label"):
        load(f"tar:{tmp_path}")


def test_members_are_chosen_by_extension(tmp_path):
    images = noise(4)
    members = {}
    for k in range(2):
        members |= {f"d/{k}.jpg": png(images[k]), f"d/{k}.seg.png": png(images[2 + k]), f"d/{k}.fine": b"cat"}
    pack(tmp_path / "a.tar", members)
    assert np.array_equal(load(f"tar:{tmp_path}").train.read(1), images[1])
    train = load(f"tar:{tmp_path}?image=seg.png&label=fine").train
    assert np.array_equal(train.read(1), images[3])
    assert (train.classes, train.labels.tolist(), train.identify(1)) == (["cat"], [0, 0], "a.tar/d/1")
    with pytest.raises(DataError, match=r"looked for \.webp; their members are \.fine, jpg, seg\.png"):
        load(f"tar:{tmp_path}?image=webp")


def test_several_images_of_a_sample_and_samples_without_one_are_told(tmp_path):
    images = noise(2)
    pack(tmp_path / "a.tar", {"0.png": png(images[0]), "0.webp": png(images[1]), "1.txt": b"alone"})
    with pytest.warns(DataWarning) as told:
        train = load(f"tar:{tmp_path}").train
    assert np.array_equal(train.read(0), images[0])
    assert "1 samples hold several images" in str(told[0].message)
    assert "1 of 2 samples hold no image" in str(told[1].message)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_kind(tmp_path, format):
    """Long, of other encodings, in folders, and those that macOS and hidden files leave behind."""
    names = ["./a/1", "häuser/" * 9 + "2", "b/c.d/3"]
    if format != tarfile.USTAR_FORMAT:
        names.append("x" * 300 + "/4")
    members = {f"{name}.png": png(image) for name, image in zip(names, noise(len(names)))}
    pack(tmp_path / "a.tar", members | {"a/._1.png": b"resource fork", ".hidden.png": b"", "a/nodot": b""}, format)
    train = load(f"tar:{tmp_path}").train
    assert [train.identify(i) for i in range(len(train))] == [f"a.tar/{name.removeprefix('./')}" for name in names]
    for i, data in enumerate(members.values()):
        assert train.encoded(i) == data


def test_links_and_paths_out_of_the_archive_are_left_out(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(noise(1)[0]))
    image = png(noise(1)[0])
    path = pack(tmp_path / "set" / "a.tar", {"ok.png": image, "/etc/b.png": image, "x/../../c.png": image})
    with tarfile.open(path, "a") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo(f"link{kind.decode()}.png")
            info.type, info.linkname = kind, str(secret)
            archive.addfile(info)
    with pytest.warns(DataWarning, match=r"6 members are left out.*/etc/b\.png, x/\.\./\.\./c\.png, link2\.png"):
        train = load(f"tar:{path.parent}").train
    assert [train.identify(i) for i in range(len(train))] == ["a.tar/ok"]


@pytest.mark.filterwarnings("ignore::residua.data.errors.DataWarning")
def test_pickles_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    bomb = pickle.dumps(Bomb())
    named = {f"{k}.{kind}": bomb for k, kind in enumerate(("pyd", "pth", "pkl", "npy", "pickle"))}
    image = png(noise(1)[0])
    train = load(f"tar:{pack(tmp_path / 'a.tar', named | {'0.png': image, '9.jpg': bomb, '8.png': image})}").train
    assert train.readable().weights().tolist() == [len(image)] * 2, "a pickle that is called .jpg is no image either"


@pytest.mark.parametrize("left", [100, 700, 2000, -1500])
def test_a_truncated_shard_is_refused(tmp_path, left):
    path = pack(tmp_path / "a.tar", samples(noise(4), [0, 1, 2, 3]))
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data[:left])
    with pytest.raises(DataError, match=r"a\.tar is not a readable tar archive: at byte .*cut short"):
        load(f"tar:{path}")


def test_a_shard_cut_between_members_is_refused(tmp_path):
    path = pack(tmp_path / "a.tar", samples(noise(4), [0, 1, 2, 3]))
    with tarfile.open(path) as archive:
        cut = archive.getmembers()[3].offset
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=f"at byte {cut:,}: expected .* the blocks of zeros that end an archive"):
        load(f"tar:{path}")


def test_a_damaged_header_does_not_end_a_shard_silently(tmp_path):
    path = pack(tmp_path / "a.tar", samples(noise(4), [0, 1, 2, 3]))
    with tarfile.open(path) as archive:
        at = archive.getmembers()[3].offset
    data = bytearray(path.read_bytes())
    data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"at byte {at:,}"):
        load(f"tar:{path}")


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.REGTYPE])
@pytest.mark.parametrize("size", [1 << 40, -512])
def test_sizes_that_cannot_be_are_refused(tmp_path, kind, size):
    """A header may claim any size: a name of a terabyte, or a member that leads back to itself."""
    (tmp_path / "a.tar").write_bytes(header("x.png", size, kind) + bytes(4096))
    with pytest.raises(DataError, match=r"a\.tar is not a readable tar archive"):
        load(f"tar:{tmp_path}/a.tar")


def test_an_image_of_impossible_size_is_a_bad_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tar, "_MOST_IMAGE", 5000)
    path = pack(tmp_path / "a.tar", {"0.png": png(noise(1)[0]), "1.png": bytes(6000)})
    train = load(f"tar:{path}").train
    with pytest.raises(BadImage, match=r"a\.tar/1: its 6,000 bytes are more than the 5,000"):
        train.read(1)


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_compressed_shards_are_refused(tmp_path, mode):
    with tarfile.open(tmp_path / "a.tar", f"w:{mode}") as archive:
        archive.addfile(tarfile.TarInfo("x.png"))
    with pytest.raises(DataError, match=r"a\.tar is compressed .*unpack it to a plain \.tar"):
        load(f"tar:{tmp_path}")


@pytest.mark.parametrize("content", [b"", b"no archive at all" * 100])
def test_files_that_are_no_archives_are_refused(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar is not a readable tar archive"):
        load(f"tar:{tmp_path}")


def test_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"no \.tar files in"):
        load(f"tar:{tmp_path}")
    pack(tmp_path / "0.tar", samples(noise(2), [0, 1]))
    with pytest.raises(DataError, match=r"1\.tar does not exist; give a \.tar file, a folder"):
        load(f"tar:{tmp_path}/{{0..1}}.tar")
    pack(tmp_path / "0.tar", {"a.txt": b""})
    with pytest.raises(DataError, match=r"no images in the train split .*their members are \.txt"):
        load(f"tar:{tmp_path}")


def test_the_index_is_kept_until_the_shard_changes(shards, monkeypatch, tmp_path):
    folder, images = shards
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    first = load(f"tar:{folder}").train
    with monkeypatch.context() as patch:
        patch.setattr(tar, "read_index", lambda *_: pytest.fail("walked again"))
        again = load(f"tar:{folder}").train
    assert again.fingerprint() == first.fingerprint()
    assert [again.identify(i) for i in range(11)] == [first.identify(i) for i in range(11)]
    assert load(f"tar:{folder}?label=txt").train.classes == ["a caption"]
    for file in (tmp_path / "cache" / "tar").iterdir():
        file.write_bytes(b"damaged")
    assert load(f"tar:{folder}").train.fingerprint() == first.fingerprint()
    pack(folder / "train-001.tar", samples(images[:2], [0, 1]))
    changed = load(f"tar:{folder}").train
    assert (len(changed), changed.fingerprint() == first.fingerprint()) == (8, False)


def test_a_shard_that_shrinks_meanwhile_gives_bad_images(shards):
    folder, _ = shards
    train = load(f"tar:{folder}").train
    (folder / "train-001.tar").write_bytes(b"")
    with pytest.raises(BadImage, match=r"train-001\.tar/00006: 0 of its .* bytes are there"):
        train.read(6)
    (folder / "train-001.tar").unlink()
    with pytest.raises(BadImage, match=r"train-001\.tar/00006.*No such file"):
        train.read(6)


def test_a_set_in_figures(shards):
    told = describe(load(f"tar:{shards[0]}"))
    assert (told["train"]["count"], told["test"]["count"], told["shared"]) == (11, 5, 1)
    assert told["train"]["per_class"] == {"0": 2, "1": 2, "2": 7}


def test_source_survives_pickling(shards):
    folder, images = shards
    train = pickle.loads(pickle.dumps(load(f"tar:{folder}").train))
    assert np.array_equal(train.read(8), images[8])
