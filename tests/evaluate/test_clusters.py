import json
import math
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.cluster import KMeans
from sklearn.metrics import jaccard_score

from residua import cli
from residua.data import BadImage, DataError, Splits, load
from residua.data.errors import DataWarning
from residua.data.masks import with_masks
from residua.evaluate.clusters import (
    ColorReader,
    PatchReader,
    cluster_patches,
    confusion,
    read_truth,
    score_clusters,
    segment,
)
from residua.evaluate.features import pick_split, preprocessing_of
from residua.evaluate.reading import View
from residua.evaluate.segmentation import enlarge, palette
from residua.evaluate.spectral import spectral_embedding
from residua.evaluate.suite import untrained
from residua.nn import ViT
from residua.train.checkpoint import write_checkpoint

SHAPES = "shapes?n=40&size=16&classes=3&test=30"
NAMES = ["a", "b", "c"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve images, left half red and right half blue but for noise, with palette masks of classes 0 and 4."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(12):
        edge = rng.integers(6, 26)
        truth = np.zeros((32, 32), np.uint8)
        truth[:, edge:] = 4
        image = np.where(truth[..., None] == 4, [30, 60, 220], [220, 40, 30]) + rng.integers(-20, 20, (32, 32, 3))
        truth[:2] = 255
        Image.fromarray(image.astype(np.uint8)).save(tmp_path / f"images/{i}.jpg", quality=95)
        mask = Image.fromarray(truth)
        mask.putpalette(rng.integers(0, 256, 768, dtype=np.uint8).tobytes())
        mask.save(tmp_path / f"masks/{i}.png")
    return tmp_path


def test_a_case_by_hand() -> None:
    table = np.array([[0, 6, 0], [3, 1, 0], [0, 1, 5]])  # clusters by classes
    score, classes = score_clusters(table, NAMES)
    assert classes.tolist() == [1, 0, 2]
    assert score.iou == pytest.approx({"a": 100 * 3 / 4, "b": 100 * 6 / 8, "c": 100 * 5 / 6})
    assert score.miou == float(score) == pytest.approx(100 * (3 / 4 + 6 / 8 + 5 / 6) / 3)
    assert score.accuracy == pytest.approx(100 * 14 / 16)


def test_the_matching_goes_by_iou_not_by_pixels() -> None:
    """Large classes would else take the clusters that small ones fill."""
    score, classes = score_clusters(np.array([[20, 0], [30, 9]]), ["large", "small"])
    assert classes.tolist() == [0, 1]
    assert score.iou == pytest.approx({"large": 100 * 20 / 50, "small": 100 * 9 / 39})


@pytest.mark.parametrize("seed", range(20))
def test_the_matching_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, 4, 300), rng.integers(0, 4, 300)
    guess = np.where(rng.random(300) < 0.4, (truth + 1) % 4, guess)
    table = np.zeros((4, 4), int)
    np.add.at(table, (guess, truth), 1)
    best = max(jaccard_score(truth, np.array(p)[guess], average="macro") for p in permutations(range(4)))
    assert score_clusters(table, list("abcd"))[0].miou == pytest.approx(100 * best)


def test_classes_that_do_not_occur_are_left_out_or_count_nothing() -> None:
    table = np.array([[8, 0, 0], [0, 6, 0], [2, 0, 0]])
    score, _ = score_clusters(table, NAMES)
    assert score.miou == pytest.approx((80 + 100) / 2)
    assert math.isnan(score.iou["c"])
    with_absent, _ = score_clusters(table, NAMES, ["d", "e"])
    assert with_absent.miou == pytest.approx((80 + 100) / 4)
    assert with_absent.iou["d"] == 0
    nowhere, _ = score_clusters(np.diag([8, 6, 0]), NAMES)  # nor is there a pixel of the third cluster
    assert nowhere.miou == 100
    assert math.isnan(nowhere.iou["c"])


def test_patch_labels_are_compared_pixel_by_pixel() -> None:
    patches = np.array([[0, 1], [2, 0]])
    big = enlarge(patches, (4, 6))
    assert big.tolist() == [[0, 0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 0, 0, 0]] * 2
    assert enlarge(patches, (3, 3)).tolist() == [[0, 1, 1], [2, 0, 0], [2, 0, 0]]
    assert enlarge(patches, (1, 1)).shape == (1, 1)
    truth = big.copy()
    truth[0, 0] = -1  # ignored
    truth[3, 5] = 1
    expected = np.zeros((3, 3), int)
    np.add.at(expected, (big[truth >= 0], truth[truth >= 0]), 1)
    assert confusion(torch.tensor(patches)[None], [truth], 3).tolist() == expected.tolist()


def test_known_clusters_become_segments_that_match_fully() -> None:
    g = torch.Generator().manual_seed(0)
    kinds = torch.randint(4, (25, 6, 6), generator=g)
    features = torch.randn(4, 12, generator=g)[kinds] + 0.1 * torch.randn(25, 6, 6, 12, generator=g)
    clusters, vectors = cluster_patches(features.flatten(1, 2), 4)
    truth = [enlarge(image.numpy(), (24, 30)) for image in kinds]
    score, classes = score_clusters(confusion(clusters.unflatten(1, (6, 6)), truth, 4), list("abcd"))
    assert score.miou == pytest.approx(100)
    assert torch.equal(classes[clusters].unflatten(1, (6, 6)), kinds)
    assert vectors.shape == (25, 36, 3)


@pytest.mark.parametrize("k", [2, 5])
def test_clusters_are_scikit_learns_of_the_first_eigenvectors(k: int) -> None:
    """Of features without clusters, where the start matters; at least three eigenvectors come for a picture."""
    clusters, vectors = cluster_patches(torch.randn(12, 16, 8), k, seed=3)
    points = vectors[..., : k - 1].flatten(0, 1).double().numpy()
    assert vectors.shape == (12, 16, max(k - 1, 3))
    assert clusters.flatten().tolist() == KMeans(k, n_init=10, random_state=3).fit_predict(points).tolist()


def test_the_seed_starts_the_solver_too() -> None:
    kinds = torch.eye(4)[torch.arange(640) % 4].view(40, 16, 4)  # nothing joins them: eigenvalues are equal
    assert torch.equal(cluster_patches(kinds, 2, seed=1)[1], spectral_embedding(kinds, 3, seed=1))


def test_settings_reach_the_images_and_the_clusters(vit: ViT, monkeypatch) -> None:
    seen = []

    def noted(*args, device: torch.device, **options):
        seen.append(options)
        return cluster_patches(*args, device=device, **options)

    monkeypatch.setattr(sys.modules[cluster_patches.__module__], "cluster_patches", noted)
    options = {"intra": 7, "inter": 5, "threshold": 0.2, "seed": 3}
    result = segment(vit, SHAPES, max_images=6, img_size=(24, 16), baselines=False, **options)
    expected = pick_split(load(SHAPES), "test", 6, seed=3)
    assert expected is not None
    assert [result.source.identify(i) for i in range(6)] == [expected.identify(i) for i in range(6)]
    assert seen == [options]
    assert result.truth[0].shape == (16, 10)  # columns 2.67 to 13.33 are seen
    assert (result.img_size, result.labels.shape, result.layer) == ((24, 16), (6, 6, 4), 2)
    segment(vit, SHAPES, max_images=6, baselines=False)
    assert seen[1] == {"intra": 50, "inter": 50, "threshold": 0.1, "seed": 0}


def test_the_baseline_is_the_untrained_encoder_at_the_same_block(vit: ViT) -> None:
    options = {"max_images": 20, "layer": 0, "seed": 3}
    both = segment(vit, SHAPES, **options)
    alone = segment(vit, SHAPES, baselines=False, **options)
    assert torch.equal(both.eigenvectors, alone.eigenvectors)
    other = segment(untrained(vit, 3), SHAPES, baselines=False, **options)
    assert both.scores["random init"] == other.scores["model"] != alone.scores["model"]


def test_patch_readers(vit: ViT) -> None:
    vit.eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(PatchReader(vit, 2)(images), vit.forward_features(images)[:, 1:])
        seen = {}
        vit.forward_features(images, tap=lambda name, x: seen.update({name: x}))
        assert torch.equal(PatchReader(vit, 0)(images), seen["blocks.0.mlp"][:, 1:])
    colors = ColorReader((4, 4))(images)
    torch.testing.assert_close(colors[1, 6, :3], images[1, :, 4:8, 8:12].mean((1, 2)))
    assert (colors[..., 3] == 1).all()


def test_shapes_from_end_to_end(vit: ViT, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    vit.train()
    result = segment(vit, SHAPES, max_images=20, layer=1, seed=3)
    assert vit.training
    assert torch.equal(torch.get_rng_state(), state)
    assert list(result.scores) == ["model", "random init", "patch colours"]
    assert result.classes == ["background", "disc", "triangle", "square"]
    assert (result.n_images, result.layer, result.split, result.img_size) == (20, 1, "test", (16, 16))
    assert result.labels.shape == (20, 4, 4)
    assert result.eigenvectors.shape == (20, 4, 4, 3)
    assert all(5 < s.miou < 100 and set(s.iou) == set(result.classes) for s in result.scores.values())
    own, again = result.scores["model"], segment(vit, SHAPES, max_images=20, layer=1, seed=3, baselines=False)
    assert again.scores == {"model": own}
    recomputed = np.concatenate([enlarge(p.numpy(), (16, 16)).ravel() for p in result.labels])
    assert own.accuracy == pytest.approx(100 * np.mean(recomputed == np.concatenate([t.ravel() for t in result.truth])))
    stored = json.loads(result.save(tmp_path / "new" / "s.json").read_text())
    assert stored["scores"]["model"]["miou"] == own.miou
    assert stored["settings"] == {"intra": 50, "inter": 50, "threshold": 0.1, "ignore_index": 255}
    picture = np.asarray(Image.open(result.save_picture(tmp_path / "s.png", count=5)))
    assert picture.shape == (3 * 132 - 4, 5 * 132 - 4, 3)
    shown = picture[264:392, :128][16::32, 16::32]
    assert np.array_equal(shown, palette(4)[result.labels[0].numpy()])
    text = result.table()
    assert text.row_count == 2 + 4
    assert "4 clusters" in str(text.caption)


def test_truth_is_cut_as_the_model_sees_the_image(vit: ViT, tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.fromarray(np.zeros((20, 40, 3), np.uint8)).save(tmp_path / "images/x.png")
    bands = np.tile(np.arange(80, dtype=np.uint8) // 8, (40, 1))  # at twice the resolution
    Image.fromarray(bands).save(tmp_path / "masks/x.png")
    data = load(f"folder:{tmp_path}/images")
    view = View(preprocessing_of(vit, data.train))
    (found,), names, absent = read_truth(with_masks(data.train, tmp_path / "masks"), view, 255)
    assert names == ["2", "3", "4", "5", "6", "7"]
    assert np.array_equal(found + 2, bands[:, 20:60])
    whole = View(replace(view.preprocessing, crop_mode="squash"))
    assert np.array_equal(read_truth(with_masks(data.train, tmp_path / "masks"), whole, 255)[0][0], bands)
    half = View(replace(view.preprocessing, crop_pct=0.5))
    (found,), names, _ = read_truth(with_masks(data.train, tmp_path / "masks"), half, 255)
    assert np.array_equal(found + int(names[0]), bands[10:30, 30:50])
    assert absent == []


@pytest.mark.parametrize("turned", [False, True])
def test_of_pixels_on_the_edge_those_belong_whose_larger_part_is_seen(vit: ViT, tmp_path: Path, turned: bool) -> None:
    """A mask of five columns, of which the central crop shows 0.96 to 4.04."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    image, mask = np.zeros((12, 20, 3), np.uint8), np.tile(np.arange(5, dtype=np.uint8), (3, 1))
    Image.fromarray(image.transpose(1, 0, 2) if turned else image).save(tmp_path / "images/x.png")
    Image.fromarray(mask.T.copy() if turned else mask).save(tmp_path / "masks/x.png")
    data = load(f"folder:{tmp_path}/images")
    view = View(preprocessing_of(vit, data.train))
    (found,), names, _ = read_truth(with_masks(data.train, tmp_path / "masks"), view, 255)
    assert names == ["1", "2", "3"]
    assert (found.T if turned else found).tolist() == [[0, 1, 2]] * 3


def test_a_mask_may_show_as_many_classes_as_a_byte_has_and_more_than_the_data_names(vit: ViT, tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "images/x.png")
    images = load(f"folder:{tmp_path}/images").train
    view, values = View(preprocessing_of(vit, images)), np.arange(1024, dtype=np.uint16).reshape(32, 32)
    np.save(tmp_path / "masks/x.npy", values % 256)
    assert read_truth(with_masks(images, tmp_path / "masks"), view, None)[1] == [str(i) for i in range(256)]
    np.save(tmp_path / "masks/x.npy", values % 257)
    with pytest.raises(DataError, match="257 different values"):
        read_truth(with_masks(images, tmp_path / "masks"), view, None)
    shapes = load(SHAPES).test
    assert shapes is not None
    shapes.classes = ["disc", "triangle"]
    assert read_truth(shapes, view, 255)[1] == ["background", "disc", "triangle", "3"]


def test_a_folder_with_palette_masks(vit: ViT, pictures: Path) -> None:
    result = segment(vit, f"folder:{pictures}/images", masks=pictures / "masks", img_size=32)
    assert result.classes == ["0", "4"]
    assert result.scores["patch colours"].miou > 80  # red and blue; edges run through patches
    assert (result.truth[0][:2] == -1).all()
    assert (result.truth[0][2:] >= 0).all()


def test_images_without_a_mask_are_left_out_and_counted(vit: ViT, pictures: Path) -> None:
    for i in range(3):
        (pictures / f"masks/{i}.png").unlink()
    result = segment(vit, f"folder:{pictures}/images", masks=pictures / "masks", baselines=False)
    assert (result.n_images, result.without_mask) == (9, 3)


def test_unreadable_images_are_left_out_if_told(vit: ViT, pictures: Path) -> None:
    (pictures / "images/3.jpg").write_bytes(b"")
    whole = (pictures / "images/5.jpg").read_bytes()
    (pictures / "images/5.jpg").write_bytes(whole[: len(whole) // 2])
    data = f"folder:{pictures}/images"
    with pytest.raises(BadImage):
        segment(vit, data, masks=pictures / "masks", baselines=False)
    with pytest.warns(DataWarning, match=r"2 of 12 train images cannot be read and are skipped: 3\.jpg, 5\.jpg"):
        result = segment(vit, data, masks=pictures / "masks", baselines=False, on_bad_image="skip")
    assert result.n_images == len(result.truth) == len(result.labels) == 10
    shown = {result.source.identify(i) for i in range(10)}
    assert shown.isdisjoint({"3.jpg", "5.jpg"})
    assert len(shown) == 10
    result.picture()


def test_colour_masks_name_their_colours(vit: ViT, pictures: Path) -> None:
    for i in range(12):
        with Image.open(pictures / f"masks/{i}.png") as image:
            truth = np.asarray(image)
        colors = np.zeros((32, 32, 3), np.uint8)
        colors[truth == 4] = (0, 0, 255)  # the number 255, were it not a colour
        Image.fromarray(colors).save(pictures / f"masks/{i}.png")
    result = segment(vit, f"folder:{pictures}/images", masks=pictures / "masks", img_size=32)
    assert result.classes == ["#000000", "#0000ff"]
    assert result.scores["patch colours"].miou > 80
    assert (result.truth[0] >= 0).all()


def test_absent_classes(vit: ViT) -> None:
    data = load(SHAPES)
    assert data.test is not None
    few = data.test.subset(np.flatnonzero(data.test.labels == 1))
    options = {"max_images": None, "baselines": False}
    left_out = segment(vit, Splits("shapes", data.train, few), **options)
    assert left_out.classes == ["background", "triangle"]
    assert left_out.absent == ["disc", "square"]
    assert "left out of the mean: disc, square" in str(left_out.table().caption)
    counted = segment(vit, Splits("shapes", data.train, few), count_absent=True, **options)
    assert "counted as 0: disc, square" in str(counted.table().caption)
    assert counted.scores["model"].miou == pytest.approx(left_out.scores["model"].miou / 2)


def test_grey_images_have_brightness() -> None:
    bright = torch.tensor([-1.0, -0.9, 0.9, 1.0]).view(1, 1, 1, 4).expand(2, 1, 2, 4)
    colors = torch.nn.functional.normalize(ColorReader((1, 4))(bright)[0], dim=1)
    assert colors[0] @ colors[1] > 0.99 > colors[0] @ colors[2]


def test_wrong_inputs(vit: ViT, noise: Splits, pictures: Path) -> None:
    images, masks = f"folder:{pictures}/images", pictures / "masks"
    with pytest.raises(DataError, match="no pixel masks"):
        segment(vit, noise)
    with pytest.raises(DataError, match="no pixel masks"):
        segment(vit, Splits("none", noise.train, load(SHAPES).train.subset([])))
    with pytest.raises(ValueError, match=r"1 clusters: .* at least 2"):
        cluster_patches(torch.randn(3, 4, 5), 1)
    with pytest.raises(DataError, match="does not exist"):
        segment(vit, images, masks=pictures / "nowhere")
    (pictures / "empty").mkdir()
    with pytest.raises(DataError, match=r"none of the 12 images .* such as 0\.png"):
        segment(vit, images, masks=pictures / "empty")
    with pytest.raises(DataError, match="no test split"):
        segment(vit, images, masks=masks, split="test")
    with pytest.raises(ValueError, match="layers"):
        segment(vit, SHAPES, layer=7)
    with pytest.raises(ValueError, match="limit must be at least 1 image"):
        segment(vit, SHAPES, max_images=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1 image, got 0"):
        segment(vit, SHAPES, batch_size=0)


def test_masks_that_cannot_be_right(vit: ViT, pictures: Path) -> None:
    images, masks = f"folder:{pictures}/images", pictures / "masks"
    Image.fromarray(np.zeros((32, 40), np.uint8)).save(masks / "5.png")
    with pytest.raises(DataError, match=r"5.png is 40 x 32, its image 5.jpg 32 x 32.*not of another shape"):
        segment(vit, images, masks=masks)
    for i in range(12):
        Image.fromarray(np.full((32, 32), 255 * (i % 2), np.uint8)).save(masks / f"{i}.png")
    with pytest.raises(DataError, match=r"show 1 class; .*ignore_index=None"):
        segment(vit, images, masks=masks)
    assert segment(vit, images, masks=masks, ignore_index=None, baselines=False).classes == ["0", "255"]
    for i in range(12):
        Image.fromarray(np.zeros((32, 32), np.uint8)).save(masks / f"{i}.png")
    with pytest.raises(DataError, match=r"show 1 class; at least 2 are needed$"):
        segment(vit, images, masks=masks)
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(masks / "3.png")
    with pytest.raises(DataError, match="some hold colours"):
        segment(vit, images, masks=masks)
    for i in range(12):
        noisy = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noisy).save(masks / f"{i}.png")
    with pytest.raises(DataError, match="different values"):
        segment(vit, images, masks=masks)
    (masks / "3.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"3\.png"):
        segment(vit, images, masks=masks)


def test_the_command(vit: ViT, pictures: Path, capsys) -> None:
    weights = str(write_checkpoint(pictures / "run", 1, vit, {}) / "model.safetensors")
    (pictures / "masks/7.png").unlink()
    where = [f"--data=folder:{pictures}/images", f"--masks={pictures}/masks", "--max-images=8", "--device=cpu"]
    assert cli.main(["segment", weights, *where, "--out", str(pictures / "s.json")]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("mIoU", "random init", "patch colours", "1 images have no mask"))
    stored = json.loads((pictures / "s.json").read_text())
    assert (stored["n_images"], stored["classes"], stored["without_mask"]) == (8, ["0", "4"], 1)
    assert Image.open(pictures / "s.png").size[1] == 3 * 132 - 4
    assert cli.main(["segment", weights, *where, "--out", str(pictures)]) == 2
    assert "is a folder: name the file to write" in capsys.readouterr().err
    assert cli.main(["segment", weights, *where, "--out", f"{pictures}/s.json/s.json"]) == 2
    said = capsys.readouterr()
    assert "nothing can be written to" in said.err
    assert "mIoU" not in said.out  # told before the work
    assert cli.main(["segment", weights, *where, "--out", f"{pictures}/s.png"]) == 2
    assert "name the JSON file; the picture lands beside it" in capsys.readouterr().err
    (pictures / "images/2.jpg").write_bytes(b"")
    assert cli.main(["segment", weights, *where[:2], "--device=cpu"]) == 2
    assert "it is empty" in capsys.readouterr().err
    assert cli.main(["segment", weights, *where[:2], "--device=cpu", "--on-bad-image=skip"]) == 0
    assert "1 of 11 train images cannot be read" in capsys.readouterr().out
    assert cli.main(["segment", weights, "--data", f"folder:{pictures}/images"]) == 2
    assert "no pixel masks" in capsys.readouterr().err
    assert cli.main(["segment", weights]) == 2
    assert "--data" in capsys.readouterr().err


def test_the_command_of_a_run(vit: ViT, pictures: Path) -> None:
    run = pictures / "run"
    write_checkpoint(run, 1, vit, {})
    args = ["segment", str(run), f"--data=folder:{pictures}/images", f"--masks={pictures}/masks", "--device=cpu"]
    assert cli.main([*args, "--no-baselines", "--out", f"{pictures}/new/s.json"]) == 0
    assert (pictures / "new/s.png").exists()
    assert not (run / "segmentation.json").exists()
    for ignored, classes in ((-1, ["0", "4", "255"]), (0, ["4", "255"])):
        assert cli.main([*args, "--no-baselines", f"--ignore-index={ignored}"]) == 0
        assert json.loads((run / "segmentation.json").read_text())["classes"] == classes
    (run / "config.yaml").write_text(f"data: folder:{pictures}/images\non_bad_image: skip\n")
    (pictures / "images/2.jpg").write_bytes(b"")
    assert cli.main([*args, "--no-baselines"]) == 0  # as the run did
    assert json.loads((run / "segmentation.json").read_text())["n_images"] == 11
