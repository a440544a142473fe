import io
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from residua import room
from residua.data import BadImage, DataError, count_shared, load, parquet
from residua.data.errors import DataWarning

RNG = np.random.default_rng(0)
FEATURES = {
    "img": {"_type": "Image"},
    "coarse": {"_type": "ClassLabel", "names": ["animal", "thing"]},
    "fine_label": {"_type": "ClassLabel", "names": ["cat", "dog", "cup"]},
}


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, images: list[np.ndarray], labels: list[int], metadata: bool = True) -> None:
    rows = {
        "img": pa.array([{"bytes": png(image), "path": None} for image in images], _IMAGE),
        "coarse": pa.array([label // 2 for label in labels]),
        "fine_label": pa.array(labels),
    }
    table = pa.table(rows)
    if metadata:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=4)


_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def noise(count: int) -> list[np.ndarray]:
    return list(RNG.integers(0, 256, (count, 9, 7, 3), dtype=np.uint8))


@pytest.fixture
def hub_folder(tmp_path):
    images = noise(15)
    write(tmp_path / "train-00000-of-00002.parquet", images[:6], [0, 1, 2, 0, 1, 2])
    write(tmp_path / "train-00001-of-00002.parquet", images[6:11], [2, 2, 2, 2, 2])
    write(tmp_path / "valid-00000-of-00001.parquet", images[10:], [1, 0, 1, 0, 1])
    return tmp_path, images


def test_rows_of_all_files_in_order(hub_folder):
    folder, images = hub_folder
    splits = load(f"parquet:{folder}")
    assert (len(splits.train), len(splits.test), splits.test.split) == (11, 5, "valid")
    for i in range(11):
        assert np.array_equal(splits.train.read(i), images[i])
    assert splits.train.labels.tolist() == [0, 1, 2, 0, 1, 2] + [2] * 5
    assert splits.train.classes == ["cat", "dog", "cup"]
    assert splits.train.typical_size() == (9, 7)
    assert count_shared(splits.train, splits.test) == 1


def test_columns_can_be_chosen(hub_folder):
    folder, _ = hub_folder
    train = load(f"parquet:{folder}?label=coarse&image=img").train
    assert train.classes == ["animal", "thing"]
    assert train.labels.tolist()[:6] == [0, 0, 1, 0, 0, 1]
    with pytest.raises(DataError, match="'coarse'"):
        load(f"parquet:{folder}?label=coars")


def test_a_single_file_without_metadata(tmp_path):
    write(tmp_path / "mine.parquet", noise(3), [0, 2, 1], metadata=False)
    splits = load(f"parquet:{tmp_path}/mine.parquet")
    assert splits.test is None
    assert splits.train.classes == ["0", "1", "2"]


def test_words_as_labels(tmp_path):
    rows = {
        "image": pa.array([{"bytes": png(i), "path": None} for i in noise(3)], _IMAGE),
        "kind": ["b", "a", "b"],
    }
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    assert load(f"parquet:{tmp_path}").train.labels is None
    train = load(f"parquet:{tmp_path}?label=kind").train
    assert (train.classes, train.labels.tolist()) == (["a", "b"], [1, 0, 1])


def labelled(folder: Path, split: str, labels: pa.Array) -> str:
    rows = {"image": pa.array([{"bytes": png(i), "path": None} for i in noise(len(labels))], _IMAGE), "label": labels}
    pq.write_table(pa.table(rows), folder / f"{split}.parquet")
    return f"parquet:{folder}"


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (pa.array(["b", "a", "b"]), ["a", "b"]),
        (pa.array(["b", "a", "b"], pa.large_string()), ["a", "b"]),
        (pa.array(["b", "a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array([1, 0, 1], pa.int8()).dictionary_encode(), ["0", "1"]),
        (pa.array([True, False, True]), ["False", "True"]),
    ],
)
def test_a_column_called_label_may_have_words_or_truth_values(tmp_path, labels, classes):
    labelled(tmp_path, "test", labels[:1])
    splits = load(labelled(tmp_path, "train", labels))
    assert (splits.train.classes, splits.train.labels.tolist()) == (classes, [1, 0, 1])
    assert (splits.test.classes, splits.test.labels.tolist()) == (classes, [1])


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (pa.array([0.5, 1.0, 2.0]), "'label' holds double"),
        (pa.array([[0], [1], [2]]), "'label' holds list"),
        (pa.array([0, -1, 1]), "1 of its 3 labels are negative"),
        (pa.array([0, None, 1]), "1 of its 3 labels are missing"),
        (pa.array(["a", None, None]), "2 of its 3 labels are missing"),
    ],
)
def test_labels_that_cannot_be_used_are_told(tmp_path, labels, why):
    with pytest.warns(DataWarning, match=why):
        assert load(labelled(tmp_path, "train", labels)).train.labels is None


def test_unlabelled_test_splits_are_told_if_they_are_used(tmp_path):
    spec = labelled(tmp_path, "train", pa.array([0, 1, 1]))
    for labels, why in ((pa.array([-1, -1]), "2 of its 2 labels are negative"), (None, "lack the column 'label'")):
        labelled(tmp_path, "test", pa.array([0, 0]) if labels is None else labels)
        if labels is None:
            table = pq.read_table(tmp_path / "test.parquet")
            pq.write_table(table.drop_columns("label"), tmp_path / "test.parquet")
        with pytest.warns(DataWarning, match=f"the test split has no labels, because .*{why}"):
            assert load(spec).test.labels is None


def test_impossible_labels_are_refused(tmp_path):
    with pytest.raises(DataError, match="would make 30,000,001 classes of 3 images"):
        load(labelled(tmp_path, "train", pa.array([0, 30_000_000, 1])))
    spec = labelled(tmp_path, "train", pa.array([[0], [1], [2]]))
    with pytest.raises(DataError, match=r"holds list.*expected class numbers or names"):
        load(f"{spec}?label=label")


def test_unlabelled_test_split_gives_way(hub_folder):
    folder, _ = hub_folder
    write(folder / "test-00000-of-00001.parquet", noise(2), [-1, -1])
    assert load(f"parquet:{folder}").test.split == "valid"
    write(folder / "test-00000-of-00001.parquet", noise(2), [0, 1])
    assert load(f"parquet:{folder}").test.split == "test"


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("data/train-00000-of-00003.parquet", "train"),
        ("validation-00000-of-00001.parquet", "valid"),
        ("default/test/0000.parquet", "test"),
        ("plain_text/partial-train/0001.parquet", "train"),
        ("data_test.parquet", "test"),
        ("my set/2024.val.003.parquet", "valid"),
        ("whatever.parquet", "train"),
    ],
)
def test_split_names(file, split):
    assert parquet.split_of(file) == split


def test_source_survives_pickling(hub_folder):
    folder, images = hub_folder
    train = load(f"parquet:{folder}").train
    blob = pickle.dumps(train)
    assert len(blob) < 5000  # the images stay behind
    assert np.array_equal(pickle.loads(blob).read(7), images[7])


def test_large_sets_are_mapped_from_a_cache_file(hub_folder, monkeypatch):
    folder, images = hub_folder
    cache = folder / "cache"
    monkeypatch.setenv("RESIDUA_DATA", str(cache))
    monkeypatch.setattr(parquet, "_SPILL_SHARE", 0)
    train = load(f"parquet:{folder}").train
    assert np.array_equal(train.read(8), images[8])
    written = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    assert len(written) == 2
    load(f"parquet:{folder}")
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")} == written


def test_image_and_label_columns_have_fingerprints_and_cache_files_of_their_own(tmp_path, monkeypatch):
    first, second = noise(4), noise(4)
    columns = {
        name: pa.array([{"bytes": png(image), "path": None} for image in images], _IMAGE)
        for name, images in (("left", first), ("right", second))
    }
    pq.write_table(pa.table(columns | {"label": [0, 1, 0, 1], "other": [1, 0, 0, 1]}), tmp_path / "train.parquet")
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(parquet, "_SPILL_SHARE", 0)
    left, right = (load(f"parquet:{tmp_path}?image={name}").train for name in ("left", "right"))
    assert np.array_equal(left.read(2), first[2])
    assert np.array_equal(right.read(2), second[2])
    relabelled = load(f"parquet:{tmp_path}?image=left&label=other").train
    assert len({part.fingerprint() for part in (left, right, relabelled)}) == 3


def test_a_column_declared_as_labels_goes_before_one_that_is_only_called_so(tmp_path):
    images = pa.array([{"bytes": png(image), "path": None} for image in noise(4)], _IMAGE)
    table = pa.table({"img": images, "label": [5, 6, 7, 8], "kind": [0, 1, 0, 1]})
    features = {"img": {"_type": "Image"}, "kind": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "train.parquet")
    train = load(f"parquet:{tmp_path}").train
    assert (train.classes, train.labels.tolist()) == (["cat", "dog"], [0, 1, 0, 1])


def test_fingerprint_follows_the_rows(hub_folder):
    folder, _ = hub_folder
    before = load(f"parquet:{folder}").train.fingerprint()
    assert load(f"parquet:{folder}").train.fingerprint() == before
    write(folder / "train-00001-of-00002.parquet", noise(5), [2] * 5)
    assert load(f"parquet:{folder}").train.fingerprint() != before


def test_images_outside_the_file_are_found_beside_it(tmp_path):
    image = noise(1)[0]
    (tmp_path / "a.png").write_bytes(png(image))
    pq.write_table(pa.table({"image": pa.array([{"bytes": None, "path": "a.png"}], _IMAGE)}), tmp_path / "t.parquet")
    assert np.array_equal(load(f"parquet:{tmp_path}/t.parquet").train.read(0), image)


def test_images_outside_the_folder_are_not_read(tmp_path):
    inside, secret = tmp_path / "set", tmp_path / "private.png"
    (inside / "data").mkdir(parents=True)
    for file in (secret, inside / "a.png"):
        file.write_bytes(png(noise(1)[0]))
    (inside / "link.png").symlink_to(secret)
    paths = ["../a.png", "../../private.png", str(secret), "../link.png", "a\0b"]
    rows = pa.array([{"bytes": None, "path": path} for path in paths], _IMAGE)
    pq.write_table(pa.table({"image": rows}), inside / "data" / "train.parquet")
    train = load(f"parquet:{inside}").train
    assert train.read(0).shape == (9, 7, 3)
    for i in (1, 2, 3):
        with pytest.raises(BadImage, match=r"train/00000\d.*leads out of the folder"):
            train.read(i)
    with pytest.raises(BadImage, match="null"):
        train.read(4)


def test_paths_of_a_hub_set_stay_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "private.png").write_bytes(png(noise(1)[0]))
    rows = [{"bytes": png(noise(1)[0]), "path": None}, {"bytes": None, "path": "../private.png"}]
    (tmp_path / "snapshot").mkdir()
    pq.write_table(pa.table({"image": pa.array(rows, _IMAGE)}), tmp_path / "snapshot" / "train.parquet")
    connect(monkeypatch, Hub(tmp_path / "snapshot", {None: ["data/train.parquet"]}))
    with pytest.raises(BadImage, match="leads out of the folder"):
        load("hf:someone/pets").train.read(1)


def test_the_processes_of_a_machine_share_its_memory(hub_folder, monkeypatch):
    folder, _ = hub_folder
    monkeypatch.setenv("RESIDUA_DATA", str(folder / "cache"))
    size = sum(parquet._column_bytes(file, "img") for file in folder.glob("train*.parquet"))
    monkeypatch.setattr(parquet, "_SPILL_SHARE", 2 * size / room.memory())
    load(f"parquet:{folder}")
    assert not (folder / "cache").exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    load(f"parquet:{folder}")
    assert (folder / "cache").exists()


@pytest.mark.parametrize("part", [slice(4, 60), slice(-400, -200)])
def test_a_damaged_file_is_named(tmp_path, part):
    write(tmp_path / "train-0.parquet", noise(3), [0, 1, 0])
    write(tmp_path / "train-1.parquet", noise(3), [0, 1, 0])
    content = bytearray((tmp_path / "train-1.parquet").read_bytes())
    content[part] = b"\xff" * len(content[part])
    (tmp_path / "train-1.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"train-1.parquet is not a readable parquet file"):
        load(f"parquet:{tmp_path}")


@pytest.mark.parametrize("described", [b"{", b"[]", b'{"info": {"features": 3}}'])
def test_a_damaged_description_is_named(tmp_path, described):
    table = pa.table({"image": [png(image) for image in noise(2)]})
    pq.write_table(table.replace_schema_metadata({"huggingface": described}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train.parquet describes its columns in a way that cannot be read"):
        load(f"parquet:{tmp_path}")


def test_wrong_files(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load(f"parquet:{tmp_path}/nowhere")
    with pytest.raises(DataError, match=r"no \.parquet"):
        load(f"parquet:{tmp_path}")
    (tmp_path / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a readable parquet"):
        load(f"parquet:{tmp_path}")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="no column of images"):
        load(f"parquet:{tmp_path}")


class Hub:
    """The Hub as far as it is asked: files by revision, under a local folder."""

    def __init__(self, root: Path, files: dict[str | None, list[str]]) -> None:
        self.root, self.files, self.asked = root, files, []

    def list_repo_files(self, name, *, repo_type, revision):
        assert repo_type == "dataset"
        return ["README.md", *self.files.get(revision, [])]

    def download(self, name, file, *, repo_type, revision):
        self.asked.append((name, file, revision))
        return str(self.root / Path(file).name)


def connect(monkeypatch, hub: Hub) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)


def test_hub_reads_the_main_branch(hub_folder, monkeypatch):
    folder, images = hub_folder
    hub = Hub(folder, {None: [f"data/{file.name}" for file in folder.glob("*.parquet")]})
    connect(monkeypatch, hub)
    splits = load("hf:someone/pets?label=coarse")
    assert splits.name == "someone/pets"
    assert np.array_equal(splits.train.read(10), images[10])
    assert splits.train.classes == ["animal", "thing"]
    assert {revision for _, _, revision in hub.asked} == {None}


def test_hub_falls_back_to_the_converted_branch_and_asks_for_a_configuration(hub_folder, monkeypatch):
    folder, _ = hub_folder
    write(folder / "0000.parquet", noise(4), [0, 1, 2, 0])
    converted = "refs/convert/parquet"
    hub = Hub(folder, {converted: ["small/train/0000.parquet", "large/train/0000.parquet"]})
    connect(monkeypatch, hub)
    with pytest.raises(DataError, match="config=NAME from large, small"):
        load("hf:someone/pets")
    assert len(load("hf:someone/pets?config=small").train) == 4
    assert hub.asked == [("someone/pets", "small/train/0000.parquet", converted)]


def test_hub_failures_say_what_to_check(tmp_path, monkeypatch):
    connect(monkeypatch, Hub(tmp_path, {}))
    with pytest.raises(DataError, match="no parquet files"):
        load("hf:someone/pets")

    def offline(*args, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr(Hub, "list_repo_files", offline)
    with pytest.raises(DataError, match="ConnectionError"):
        load("hf:someone/pets")


def test_columns_without_images_are_refused(tmp_path):
    write(tmp_path / "train-0.parquet", noise(3), [0, 1, 2])
    with pytest.raises(DataError, match="column 'fine_label' holds int64, expected images"):
        load(f"parquet:{tmp_path}?image=fine_label")
    pq.write_table(pa.table({"picture": pa.array([b""], pa.binary())}), tmp_path / "train-1.parquet")
    with pytest.raises(DataError, match=r"train-1\.parquet has no column 'img', which .*train-0\.parquet has"):
        load(f"parquet:{tmp_path}")


def test_no_rows(tmp_path):
    pq.write_table(pa.table({"img": pa.array([], _IMAGE)}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=f"{tmp_path.name}: no images in the train split"):
        load(f"parquet:{tmp_path}")


def test_where_a_large_set_cannot_be_unpacked_a_remedy_is_named(tmp_path, monkeypatch):
    write(tmp_path / "train.parquet", noise(3), [0, 1, 2])
    (tmp_path / "file").touch()
    monkeypatch.setattr(parquet, "_SPILL_SHARE", 0)
    monkeypatch.setenv("RESIDUA_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"unpacked into .*file/arrow, where they cannot .* set RESIDUA_DATA"):
        load(f"parquet:{tmp_path}")
