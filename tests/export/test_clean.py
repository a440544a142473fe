"""How far two outputs are from each other, and what a check of weights says."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from residua.data import Preprocessing, load
from residua.export import ExportError
from residua.export.clean import Checked, real_images, relative


def test_the_difference_is_that_of_the_worst_image_by_its_own_size() -> None:
    ours = torch.tensor([[1.0, -2.0], [100.0, 50.0], [0.0, 0.0]])
    theirs = ours + torch.tensor([[0.0, 0.5], [1.0, 0.0], [0.0, 0.0]])
    assert relative(ours, theirs) == pytest.approx(0.25)
    assert relative(ours[1:], theirs[1:]) == pytest.approx(0.01)
    assert relative(ours[2:], theirs[2:]) == 0
    assert relative(ours[2:], torch.ones(1, 2)) > 1e30
    with pytest.raises(ExportError, match=r"the export computes \(3, 1\), expected \(3, 2\)"):
        relative(ours, theirs[:, :1])


def test_what_is_no_number_differs_from_everything() -> None:
    """Wherever it comes: the largest of several differences must not lose it."""
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    theirs[1, 2] = torch.nan
    assert relative(ours, theirs) == relative(theirs, ours) == float("inf")
    assert Checked({"tokens": {1: relative(ours[:1], theirs[:1]), 2: relative(ours, theirs)}}, {}).largest > 1


def test_many_tensors_are_one_line_and_outputs_one_each() -> None:
    few = Checked({"logits": {1: 1e-7, 7: 2e-7}, "features": {1: 3e-7}}, {})
    assert few.largest == 3e-7
    assert few.summary() == {"logits": "1.0e-07 (batch of 1), 2.0e-07 (batch of 7)", "features": "3.0e-07 (batch of 1)"}
    many = Checked({"tokens": {14: 5e-7}} | {f"w{i}": {14: i * 1e-8} for i in range(6)}, {})
    assert many.summary() == {"6 tensors of weights": "5.0e-08", "tokens": "5.0e-07 (batch of 14)"}


def test_images_are_called_what_they_are(tmp_path: Path) -> None:
    """Those for testing where there are some, else those for training."""
    pre = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "images").mkdir()
    for i in range(20):
        Image.new("RGB", (16, 16), (10 * i, 0, 0)).save(tmp_path / "images" / f"{i:02d}.png")
    for data, kind in (("shapes?n=20&size=16&test=15", "test"), (f"folder:{tmp_path}/images", "training")):
        (tmp_path / "config.yaml").write_text(f"data: {data}")
        splits = load(data, img_size=16)
        images, said = real_images(tmp_path, pre)
        assert said == f"14 {kind} images of {data}"
        part = splits.test if kind == "test" else splits.train
        assert part is not None
        torch.testing.assert_close(images[[0, -1]], pre([part.read(0, 16), part.read(len(part) - 1, 16)]))
