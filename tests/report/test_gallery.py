"""Each picture as a figure, from models, runs or names, for anyone's own use."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import residua
from residua.data import Splits
from residua.nn import MAE, create_model
from residua.report import figures, gallery, pictures
from residua.train.checkpoint import write_checkpoint
from residua.train.config import Pretrain

DATA = "shapes?n=40&size=16&test=30&classes=3"


def make(patch_size: int = 4, **options: Any) -> MAE:
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "decoder_embed_dim": 16, "decoder_depth": 1}
    model = create_model("mae_vit", img_size=16, patch_size=patch_size, decoder_num_heads=1,
                         **{"zero_init": False, **sizes, **options})  # fmt: skip
    assert isinstance(model, MAE)
    return model


@pytest.fixture(scope="module")
def splits() -> Splits:
    return residua.data.load(DATA)


def sheet(figure: Any) -> np.ndarray:
    figure.draw_without_rendering()
    return np.asarray(figure.axes[0].images[0].get_array())


def rows(figure: Any) -> list[str]:
    return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_reconstructions_have_the_papers_layout_and_one_mask(splits: Splits) -> None:
    ours, baseline = make(alpha_min=0.7), make()
    torch.nn.init.normal_(baseline.decoder.pred.bias, std=2.0)
    figure = gallery.reconstructions({"ours": ours, "baseline": baseline}, splits, count=3)
    assert rows(figure) == ["truth", "masked", "ours", "baseline"]
    picture, gap = sheet(figure)[..., :3], figures._gap(16)
    at = {name: picture[i * (16 + gap) : i * (16 + gap) + 16, :16] for i, name in enumerate(rows(figure))}
    visible = np.isclose(at["truth"], at["masked"], atol=1e-6).all(-1)
    assert visible.mean() == pytest.approx(0.25)
    for name in ("ours", "baseline"):
        np.testing.assert_allclose(at[name][visible], at["truth"][visible], atol=1e-5)
        assert not np.allclose(at[name][~visible], at["truth"][~visible], atol=0.02)
    assert not np.allclose(at["ours"][~visible], at["baseline"][~visible], atol=0.02)


def test_models_with_statistics_of_their_own_see_the_same_picture(splits: Splits) -> None:
    first, second = make(norm_pix=False), make(norm_pix=False)
    first.preprocessing = residua.data.Preprocessing((16, 16), (0.5,) * 3, (0.25,) * 3)
    second.preprocessing = residua.data.Preprocessing((16, 16), (0.1,) * 3, (0.5,) * 3)
    images = first.preprocessing([splits.train.read(0)])
    again = pictures.renormalize(images, first.preprocessing, second.preprocessing)
    torch.testing.assert_close(again, second.preprocessing([splits.train.read(0)]))
    picture, gap = sheet(gallery.reconstructions({"a": first, "b": second}, splits, count=1))[..., :3], figures._gap(16)
    truth, masked, _, b = (picture[i * (16 + gap) : i * (16 + gap) + 16] for i in range(4))
    visible = np.isclose(truth, masked, atol=1e-6).all(-1)
    np.testing.assert_allclose(b[visible], truth[visible], atol=1e-5)


def test_what_cannot_share_a_mask_or_reconstruct_is_refused(splits: Splits) -> None:
    with pytest.raises(ValueError, match="one mask cannot serve"):
        gallery.reconstructions({"a": make(), "b": make(patch_size=8)}, splits)
    with pytest.raises(TypeError, match="encoder alone"):
        gallery.reconstructions({"a": make().encoder}, splits)
    with pytest.raises(ValueError, match="no model"):
        gallery.patch_maps({}, splits)


@pytest.mark.parametrize(("basis", "label"), [("components", "principal components"), ("spectral", "spectral")])
def test_feature_maps_say_what_they_show(splits: Splits, basis: Any, label: str) -> None:
    figure = gallery.patch_maps({"a": make(), "b": make(patch_size=8).encoder}, splits, count=4, basis=basis, block=0)
    assert rows(figure) == ["image", "a", "b"]
    assert label in figure.axes[0].get_title(loc="left")
    assert "block 0" in figure.axes[0].get_title(loc="left")


def test_attention_of_every_head(splits: Splits) -> None:
    model = make()
    assert rows(gallery.attention(model, splits, count=2)) == ["image", "model"]
    assert rows(gallery.attention(model, splits, count=2, heads="each")) == ["image", "head 0", "head 1"]
    both = gallery.attention({"a": model, "b": model}, splits, count=2, heads="each")
    assert rows(both)[1:] == ["a, head 0", "a, head 1", "b, head 0", "b, head 1"]


def test_the_plane_of_a_run_by_its_path_and_data_by_its_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, make(), {})
    figure = gallery.tsne({"run": tmp_path}, DATA, limit=30)
    assert "silhouette" in figure.axes[0].get_title()
    unlabelled = residua.data.load(DATA)
    unlabelled.train.labels = unlabelled.test.labels = None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="no labels"):
        gallery.tsne(make(), unlabelled)


def test_neighbours_of_a_file_and_of_a_number(tmp_path: Path, splits: Splits) -> None:
    """A file that is in the data finds itself first; a number finds others only."""
    assert splits.test is not None
    Image.fromarray(splits.test.read(7)).save(tmp_path / "query.png")
    model = make()
    picture = sheet(gallery.neighbors(model, splits, [tmp_path / "query.png", 7], k=3))[..., :3]
    truth, gap = splits.test.read(7) / 255, figures._gap(16)
    first = slice(16 + 5, 32 + 5)  # after the query and a third of its width
    np.testing.assert_allclose(picture[:16, :16], truth, atol=1e-5)
    np.testing.assert_allclose(picture[:16, first], truth, atol=1e-5)
    below = slice(16 + gap, 32 + gap)
    np.testing.assert_allclose(picture[below, :16], truth, atol=1e-5)
    assert not np.allclose(picture[below, first], truth, atol=0.02)
    # the file's second neighbour is the number's first
    np.testing.assert_allclose(picture[:16, 37 + gap : 53 + gap], picture[below, first], atol=1e-5)


def test_norms_along_training_of_a_run(tmp_path: Path, splits: Splits) -> None:
    Pretrain().override(data=DATA, steps=4, epochs=2.0).save(tmp_path / "config.yaml")
    for step in (1, 2, 4):
        write_checkpoint(tmp_path, step, make(), {}, keep=0)
    axes = gallery.norms({"run": tmp_path}, splits).axes[0]
    assert len(axes.lines) == 2, "a line per block"
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0.5, 1.0, 2.0])
    (tmp_path / "empty").mkdir()
    Pretrain().override(data=DATA, steps=4, epochs=2.0).save(tmp_path / "empty/config.yaml")
    with pytest.raises(ValueError, match="no checkpoints"):
        gallery.norms([tmp_path / "empty"], splits)
