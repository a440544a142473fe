"""`?classes=`: some classes of a set, by number, by a file of names, or by a list of the package."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import residua.data
from residua.data import DataError, load

LIST = (Path(residua.data.__file__).parent / "classes" / "tiny-imagenet-100.txt").read_text().split()
WNIDS = [*LIST, *(f"n1{k:07d}" for k in range(100))]  # 200, sorted


def picture(split: str, k: int) -> bytes:
    """Another one for every class and split."""
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), (k, split == "val", 7), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def class_folders(root: Path) -> str:
    for split in ("train", "val"):
        for k, wnid in enumerate(WNIDS):
            (root / split / wnid).mkdir(parents=True)
            (root / split / wnid / f"{wnid}_0.png").write_bytes(picture(split, k))
    return f"folder:{root}"


def archive(root: Path) -> str:
    """As tiny-imagenet-200.zip unpacks."""
    lines = []
    for split in ("train", "val", "test"):
        (root / split / "images").mkdir(parents=True)
    (root / "train" / "images").rmdir()
    (root / "test" / "images" / "test_0.png").write_bytes(picture("train", 0))
    for k, wnid in enumerate(WNIDS):
        (root / "train" / wnid / "images").mkdir(parents=True)
        (root / "train" / wnid / "images" / f"{wnid}_0.png").write_bytes(picture("train", k))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.png\t0\t0\t3\t3\n")
        name = f"val_{(37 * k) % 200}.png"  # in no order of classes
        (root / "val" / "images" / name).write_bytes(picture("val", k))
        lines.append(f"{name}\t{wnid}\t0\t0\t3\t3\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return f"folder:{root}"


def parquet(root: Path) -> str:
    """As on the Hugging Face Hub: WordNet ids name the classes in the schema."""
    root.mkdir()
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": WNIDS}}
    schema = {"huggingface": json.dumps({"info": {"features": features}})}
    for split, name in (("train", "train"), ("val", "valid")):
        images = [{"bytes": picture(split, k), "path": None} for k in range(200)]
        table = pa.table({"image": images, "label": list(range(200))}).replace_schema_metadata(schema)
        pq.write_table(table, root / f"{name}-00000-of-00001.parquet")
    return f"parquet:{root}"


def held(source) -> dict[int, int]:
    """Class by label -> number of the picture; each class has one."""
    return {int(label): int(source.read(i)[0, 0, 0]) for i, label in enumerate(source.labels)}


@pytest.mark.parametrize("made", [class_folders, archive, parquet])
def test_the_100_classes_of_the_records_are_picked_from_all_200_of_tiny_imagenet(made, tmp_path):
    spec = made(tmp_path / "set")
    assert len(load(spec).train.classes) == 200
    splits = load(f"{spec}?classes=tiny-imagenet-100")
    for part, is_test in ((splits.train, 0), (splits.test, 1)):
        assert part.classes == LIST == sorted(LIST)
        assert held(part) == {k: k for k in range(100)}
        assert {int(part.read(i)[0, 0, 1]) for i in range(100)} == {is_test}
    assert held(load(f"{spec}?classes=tiny-imagenet-100").train) == held(load(f"{spec}?classes=100").train)


def test_the_list_is_of_100_wordnet_ids():
    assert len(set(LIST)) == 100
    assert all(len(wnid) == 9 and wnid[0] == "n" and wnid[1:].isdecimal() for wnid in LIST)


@pytest.mark.parametrize(("name", "text"), [
    ("some.txt", "{2}\n\n {0} \n{1}\n"),
    ("some.json", '["{2}", "{0}", "{1}"]'),
    ("words.json", '{{"{2}": "goose", "{0}": "cat", "{1}": "koala"}}'),
])  # fmt: skip
def test_classes_are_numbered_in_the_order_of_the_file(name, text, tmp_path):
    spec, chosen = class_folders(tmp_path / "set"), [150, 3, 199]
    (tmp_path / name).write_text(text.format(WNIDS[3], WNIDS[199], WNIDS[150]))
    splits = load(f"{spec}?classes={tmp_path / name}")
    assert splits.train.classes == splits.test.classes == [WNIDS[k] for k in chosen]
    assert held(splits.train) == held(splits.test) == dict(enumerate(chosen))
    few = load(f"{spec}?classes={tmp_path / name}&train=2")
    assert held(few.train).items() < held(splits.train).items()
    assert held(few.test) == held(splits.test)


def test_the_order_of_classes_changes_the_fingerprint_and_a_number_of_them_does_not(tmp_path):
    spec = class_folders(tmp_path / "set")
    for name, order in (("up", (3, 5)), ("down", (5, 3)), ("again", (3, 5))):
        (tmp_path / name).write_text("\n".join(WNIDS[k] for k in order))
    up, down, again = (
        load(f"{spec}?classes={tmp_path / name}").train.fingerprint() for name in ("up", "down", "again")
    )
    assert up == again != down
    whole = load(spec).train
    assert load(f"{spec}?classes=5").train.fingerprint() == whole.subset(range(5)).fingerprint()


@pytest.mark.parametrize(("file", "text", "message"), [
    ("nowhere.txt", None, "expected a whole number, a file of class names, or tiny-imagenet-100"),
    ("empty.txt", "\n", "names no class"),
    ("twice.txt", f"{WNIDS[0]}\n{WNIDS[1]}\n{WNIDS[0]}\n", f"names {WNIDS[0]} more than once"),
    ("others.txt", f"{WNIDS[0]}\ngoldfish\n", r"1 of the 2 classes to keep \(goldfish\)"),
    ("numbers.json", "[1, 2]", "holds no list of class names"),
    ("cut.json", "[\"n0", "not a readable list of class names"),
    ("bytes.txt", b"\xff\xfe\x00", "not a readable list of class names"),
])  # fmt: skip
def test_lists_that_cannot_be_used(file, text, message, tmp_path):
    for wnid in WNIDS[:3]:
        (tmp_path / "set" / wnid).mkdir(parents=True)
        for k in range(2):
            (tmp_path / "set" / wnid / f"{k}.png").write_bytes(picture("train", k))
    if text is not None:
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        load(f"folder:{tmp_path / 'set'}?classes={tmp_path / file}")


def test_a_name_that_two_classes_have_is_not_chosen(tmp_path):
    root = tmp_path / "set"
    parquet(root)
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["crane", "crane", *WNIDS[2:]]}}
    for file in root.glob("*.parquet"):
        table = pq.read_table(file)
        schema = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(schema), file)
    (tmp_path / "birds.txt").write_text("crane\n")
    with pytest.raises(DataError, match="not the name of one class"):
        load(f"parquet:{root}?classes={tmp_path / 'birds.txt'}")


@pytest.mark.parametrize("line", ["val_0.png", "val_0.png\tn99999999\t0\t0\t3\t3"])
def test_tables_of_tiny_imagenet_that_cannot_be_used(line, tmp_path):
    archive(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt"):
        load(f"folder:{tmp_path}")
