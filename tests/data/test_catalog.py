import numpy as np
import pytest
from PIL import Image

from residua.data import DataError, load


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar1000", "did you mean 'cifar100' or 'cifar10'"),
        ("shape", "'shapes'"),
        ("qwertz", "known: shapes, digits"),
        ("folder", "write folder:PATH"),
        ("hf:", "write hf:NAME"),
        ("digits:here", "takes no path"),
        ("shapes?sise=3", "did you mean 'size'"),
        ("shapes?clases=3", "did you mean 'classes'?"),
        ("shapes?n=many", "expected a whole number"),
        ("digits?n=3", "unknown option 'n'; known: classes, train"),
    ],
)
def test_wrong_spellings_are_explained(spec, message):
    with pytest.raises(DataError) as caught:
        load(spec)
    assert message in str(caught.value)


def test_a_bare_folder_is_recognised(tmp_path):
    with pytest.raises(DataError, match=f"write 'folder:{tmp_path}'"):
        load(str(tmp_path))


def test_imagenet_folders(tmp_path):
    for split, wnid in (("train", "n01"), ("train", "n02"), ("val", "n01"), ("val", "n02")):
        (tmp_path / split / wnid).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / split / wnid / "x.JPEG")
    splits = load(f"imagenet:{tmp_path}")
    assert (splits.name, splits.train.classes) == ("imagenet", ["n01", "n02"])
    assert splits.test.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="does not exist"):
        load(f"imagenet:{tmp_path}/nowhere")


def test_the_first_classes_of_any_labelled_source():
    whole, part = load("digits"), load("digits?classes=3")
    assert part.train.classes == part.test.classes == ["0", "1", "2"]
    for name in ("train", "test"):
        kept = getattr(whole, name).labels < 3
        assert getattr(part, name).labels.tolist() == getattr(whole, name).labels[kept].tolist()
        assert np.array_equal(getattr(part, name).array(), getattr(whole, name).array()[kept])
    assert whole.train.classes == [str(i) for i in range(10)]
    assert load("shapes?n=40&classes=2&size=16").train.classes == load("shapes?n=40&classes=2&size=16").test.classes
    with pytest.raises(DataError, match="expected 1 to 10"):
        load("digits?classes=11")
    with pytest.raises(DataError, match="whole number"):
        load("digits?classes=few")


def test_fewer_training_images_of_any_source():
    whole, part = load("digits"), load("digits?train=200")
    kept = [i for i, image in enumerate(whole.train.array()) if (part.train.array() == image).all((1, 2, 3)).any()]
    assert len(part.train) == 200 == len(kept)
    assert np.array_equal(part.train.array(), whole.train.array()[kept])
    assert part.train.labels.tolist() == whole.train.labels[kept].tolist()
    assert kept[-1] > 1000, "drawn from all of them, not the first"
    assert set(part.train.labels) == set(range(10))
    assert np.array_equal(part.test.array(), whole.test.array())
    assert np.array_equal(load("digits?train=200").train.array(), part.train.array())
    assert set(map(bytes, load("digits?train=100").train.array())) < set(map(bytes, part.train.array()))
    few = load("digits?classes=3&train=50")
    assert len(few.train) == 50
    assert set(few.train.labels) == {0, 1, 2} == set(few.test.labels)
    assert len(load("shapes?n=40&size=16&train=7&classes=2").train) == 7


@pytest.mark.parametrize(
    ("count", "message"), [("0", "expected 1 to 1,4"), ("5000", "expected 1 to 1,4"), ("x", "whole")]
)
def test_numbers_of_training_images_that_cannot_be_had(count, message):
    with pytest.raises(DataError, match=message):
        load(f"digits?train={count}")
