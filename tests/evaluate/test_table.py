import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from residua.data import DataError, Preprocessing, Splits
from residua.data.errors import DataWarning
from residua.data.feed import Feed
from residua.evaluate import extract
from residua.evaluate.table import write_table
from residua.nn import ViT


def test_the_file_holds_what_extract_returns(vit: ViT, noise: Splits, tmp_path: Path) -> None:
    out = write_table(
        vit, noise, tmp_path / "new" / "f.parquet", layers=[0, 2], readout="cls", batch_size=8, row_group=16
    )
    feats = extract(vit, noise, layers=[0, 2], readout="cls", batch_size=8)
    assert feats.test is not None
    table = pq.read_table(out)
    assert table.column_names == ["id", "split", "label", "class", "layer_0", "layer_2"]
    assert table["id"].to_pylist() == feats.train.ids + feats.test.ids
    assert table["split"].to_pylist() == ["train"] * 50 + ["test"] * 21
    assert table["label"].to_pylist() == torch.cat([feats.train.targets, feats.test.targets]).tolist()
    assert table["class"].to_pylist()[:4] == ["a", "b", "c", "a"]
    for layer in (0, 2):
        stored = np.stack(table[f"layer_{layer}"].to_numpy())
        assert stored.dtype == np.float32
        expected = torch.cat([feats.train.layer(layer), feats.test.layer(layer)])
        np.testing.assert_array_equal(stored, expected.numpy())


def test_rows_are_written_as_they_come_and_the_file_says_how_it_was_made(
    vit: ViT, noise: Splits, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    file = pq.ParquetFile(write_table(vit, noise, tmp_path / "f.parquet", batch_size=8, row_group=16, splits=("train",),
                                progress=lambda *now: told.append(now)))  # fmt: skip
    assert told[-7:] == [("reading images", done, 50) for done in (8, 16, 24, 32, 40, 48, 50)]
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [16, 16, 16, 2]
    about = json.loads(file.schema_arrow.metadata[b"residua"])
    assert (about["readout"], about["layers"], about["data"]) == ("tokens", [2], "noise")
    assert about["preprocessing"]["img_size"] == [16, 16]


def test_images_that_are_left_out_are_told(vit: ViT, tmp_path: Path) -> None:
    for k in range(5):
        Image.fromarray(np.full((16, 16, 3), 40 * k, np.uint8)).save(tmp_path / f"{k}.png")
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:60])
    with pytest.warns(DataWarning, match=r"1 of 5 train images cannot be read and are skipped: 2\.png"):
        out = write_table(vit, f"folder:{tmp_path}", tmp_path / "f.parquet", on_bad_image="skip")
    assert pq.read_table(out)["id"].to_pylist() == ["0.png", "1.png", "3.png", "4.png"]


def test_a_model_that_stretches_images_is_fed_whole_ones(vit: ViT, tmp_path: Path) -> None:
    """Resident images and streamed ones, and those of `model.preprocessing`, are the same."""
    y, x = np.mgrid[:40, :400] / 60
    Image.fromarray((np.stack([np.sin(x), np.cos(y), np.sin(x + y)], 2) * 100 + 128).astype(np.uint8)).save(
        tmp_path / "0.png"
    )
    vit.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, crop_mode="squash")
    table = pq.read_table(write_table(vit, f"folder:{tmp_path}", tmp_path / "f.parquet"))
    with torch.no_grad():
        expected = vit.eval().forward_features(vit.preprocessing([tmp_path / "0.png"])).mean(1)
    np.testing.assert_allclose(np.stack(table["layer_2"].to_numpy()), expected.numpy(), atol=0.02)


def test_without_labels_the_column_is_empty(vit: ViT, noise: Splits, tmp_path: Path) -> None:
    noise.train.labels = noise.train.classes = None
    table = pq.read_table(write_table(vit, Splits("noise", noise.train), tmp_path / "f.parquet"))
    assert table["label"].null_count == table["class"].null_count == 50


def test_failure_leaves_no_file_and_keeps_the_old_one(vit: ViT, noise: Splits, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "f.parquet"
    out.write_text("old")

    def broken(images, tap=None):
        raise RuntimeError("no")

    monkeypatch.setattr(vit, "forward_features", broken)
    with pytest.raises(RuntimeError, match="no"):
        write_table(vit, noise, out)
    assert [p.name for p in tmp_path.iterdir()] == ["f.parquet"]
    assert out.read_text() == "old"
    with pytest.raises(DataError, match="none of the splits"):
        write_table(vit, Splits("noise", noise.train), out, splits=("test",))


def test_feeds_are_closed_and_others_files_let_be(vit: ViT, noise: Splits, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "f.parquet.part").write_text("of another process")
    closed, close = [], Feed.close
    monkeypatch.setattr(Feed, "close", lambda feed: (closed.append(feed.source.split), close(feed)))
    assert write_table(vit, noise, tmp_path / "f.parquet") == tmp_path / "f.parquet"
    assert closed == ["train", "test"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.parquet", "f.parquet.part"]
    assert (tmp_path / "f.parquet.part").read_text() == "of another process"
