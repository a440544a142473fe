"""Tables and pictures of a segmentation that is made by hand."""

import math
from typing import Any

import numpy as np
import torch

from residua.data.arrays import ArraySource
from residua.evaluate.report import NOTHING
from residua.evaluate.segmentation import Segmentation, SegmentScore, enlarge, palette


def by_hand(pixels: np.ndarray, **changes: Any) -> Segmentation:
    """Of images (N, h, w, C): patches (2, 4), at 8 x 16 px, with three classes; -1 occurs."""
    rng = np.random.default_rng(0)
    score = SegmentScore(40.0, 60.0, {"a": 10.0, "b": math.nan, "c": 70.0})
    values: dict[str, Any] = {
        "data": "x", "split": "train", "n_images": len(pixels), "without_mask": 0, "layer": 1, "img_size": (8, 16),
        "seed": 0, "classes": ["a", "b", "c"], "absent": [], "count_absent": False, "settings": {},
        "scores": {"model": score, "random init": SegmentScore(20.0, 30.0, score.iou)},
        "labels": torch.from_numpy(rng.integers(-1, 3, (len(pixels), 2, 4))),
        "eigenvectors": torch.zeros(len(pixels), 2, 4, 3),
        "truth": list(rng.integers(-1, 3, (len(pixels), 8, 16))),
        "source": ArraySource("x", "train", pixels, labels=None, classes=None),
    }  # fmt: skip
    return Segmentation(**(values | changes))


def test_the_table_has_the_commonest_classes_first_and_at_most_thirty() -> None:
    names = [f"c{i}" for i in range(32)]
    iou = {name: float(i) for i, name in enumerate(names)} | {"c31": math.nan}
    truth = [np.repeat(np.arange(-1, 32), np.arange(100, 133))[None]]  # ignored ones and class 31 fill most pixels
    pixels = np.zeros((1200, 1, 1, 3), np.uint8)
    found = by_hand(pixels, classes=names, truth=truth, scores={"model": SegmentScore(40.0, 60.0, iou)}).table()
    first, own = (list(column.cells) for column in found.columns)
    assert first == ["mIoU", "pixels right", *(f"IoU c{i}" for i in range(31, 1, -1))]
    assert own[:4] == ["40.0 %", "60.0 %", NOTHING, "30.0 %"]
    assert found.title == "x, 1,200 train images at 8 x 16 px, layer 1"
    assert [column.header for column in by_hand(pixels).table().columns] == ["", "model", "random init"]


def test_the_picture_shows_image_truth_and_segments_of_the_same_images() -> None:
    gray = np.arange(12, dtype=np.uint8) * 20
    found = by_hand(np.broadcast_to(gray[:, None, None, None], (12, 8, 16, 3)).copy())
    sheet, colors = found.picture(count=3), palette(3)
    assert sheet.shape == (3 * 68 - 4, 3 * 132 - 4, 3)
    for column, i in enumerate((0, 5, 11)):
        image, truth, segments = (
            sheet[68 * row : 68 * row + 64, 132 * column : 132 * column + 128] for row in range(3)
        )
        assert (image == gray[i]).all()
        assert np.array_equal(truth, colors[enlarge(found.truth[i], (64, 128))])
        assert np.array_equal(segments, colors[enlarge(found.labels[i].numpy(), (64, 128))])
    assert (sheet[64:68] == 255).all()
    assert (colors[-1] == 255).all()  # of a cluster without a class
    assert len(np.unique(colors, axis=0)) == 4


def test_the_picture_cuts_images_as_the_model_does() -> None:
    wide = np.full((1, 64, 512, 3), 100, np.uint8)
    wide[:, :, :128], wide[:, :, 384:] = 50, 200
    square: dict[str, Any] = {"img_size": (16, 16), "labels": torch.zeros(1, 4, 4, dtype=torch.long)}
    for options, left, right in (
        ({}, 100, 100),
        ({"crop_mode": "squash"}, 50, 200),
        ({"crop_mode": "squash", "crop_pct": 0.4}, 100, 100),
    ):
        image = by_hand(wide, **square, **options).picture()[:128]
        assert abs(int(image[64, 4, 0]) - left) <= 1
        assert abs(int(image[64, -5, 0]) - right) <= 1


def test_pictures_of_other_images_than_coloured_bytes() -> None:
    ramp = np.linspace(0, 1, 16, dtype=np.float32)
    grey = np.broadcast_to(np.rint(255 * ramp)[None, None, :, None], (1, 8, 16, 1)).astype(np.uint8)
    image = by_hand(grey).picture()[:64]
    assert image[0, 0].tolist() == [0, 0, 0]
    assert image[0, -1].tolist() == [255, 255, 255]
    many = np.concatenate([grey, np.full_like(grey, 10), np.full_like(grey, 20), 255 - grey], 3)
    for channels in (3, 4):
        assert by_hand(many[..., :channels]).picture()[0, 0].tolist() == [0, 10, 20]
    dim = np.broadcast_to((5 + 0.01 * ramp)[None, None, :, None], (1, 8, 16, 3)).astype(np.float32)
    image = by_hand(dim).picture()[:64]
    assert (image[0, 0, 0], image[0, -1, 0]) == (0, 255)  # from their darkest to their brightest


def test_plain_values_are_fit_for_json() -> None:
    found = by_hand(np.zeros((2, 8, 16, 3), np.uint8)).to_dict()
    assert found["scores"]["model"] == {"miou": 40.0, "accuracy": 60.0, "iou": {"a": 10.0, "b": None, "c": 70.0}}
    assert (found["layer"], found["classes"], found["img_size"]) == (1, ["a", "b", "c"], (8, 16))
    assert found["palette"] == ["#" + bytes(color).hex() for color in palette(3)[:3]]
    assert set(found).isdisjoint({"labels", "eigenvectors", "truth", "source"})
