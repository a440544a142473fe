"""Pictures of features: one basis for all images, and numbers that scikit-learn and hand agree on."""

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score

from residua.data import Splits
from residua.data.arrays import ArraySource
from residua.evaluate import CollapsedError
from residua.evaluate.features import preprocessing_of
from residua.evaluate.maps import (
    choose_images,
    feature_norms,
    patch_colors,
    patch_features,
    principal_rgb,
    project,
    project_classes,
    sample_images,
    spectral_rgb,
)
from residua.nn import MAE, ViT, stream


def test_patch_features_are_the_stream_after_a_block(vit: ViT) -> None:
    images = torch.rand(2, 3, 16, 16)
    taps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        last = vit.forward_features(images, tap=taps.__setitem__)
    torch.testing.assert_close(patch_features(vit, images), last[:, 1:])
    torch.testing.assert_close(patch_features(vit, images, block=1), taps["blocks.1.mlp"][:, 1:])
    torch.testing.assert_close(patch_features(vit, images, block=-3), taps["blocks.0.mlp"][:, 1:])
    for block in (3, -4):
        with pytest.raises(ValueError, match=f"no block {block}"):
            patch_features(vit, images, block=block)
    vit.train()
    patch_features(vit, images)
    assert vit.training, "the model is left as it was"


def test_norms_are_those_of_the_stream_before_any_final_norm(vit: ViT) -> None:
    images = torch.rand(2, 3, 16, 16)
    vit.train()
    found = feature_norms(vit, images)
    assert vit.training, "the model is left as it was"
    with torch.no_grad():
        bound = stream(vit, images)
        by_hand = {i: bound[2 * i + 2].input.norm(dim=-1).mean().item() for i in (0, 1)}
        by_hand[2] = bound[5](bound[5].input).norm(dim=-1).mean().item()
    assert found == pytest.approx(by_hand)


def test_principal_colours_follow_the_principal_direction() -> None:
    """Features along one line: the first component is their place on it, in one basis for all images."""
    place = torch.linspace(0, 1, 40).reshape(4, 10)
    colours = principal_rgb(place[..., None] * torch.tensor([3.0, -4.0, 0.0, 0.0]))
    first = colours[..., 0].flatten()
    assert abs(np.corrcoef(first, place.flatten())[0, 1]) > 0.999
    assert first.min() == 0
    assert first.max() == 1
    assert (np.diff(first) <= 0).all(), "the largest entry of the direction, -4, is made positive"
    assert not np.isnan(colours).any(), "directions without spread have a colour too"
    np.testing.assert_allclose(
        principal_rgb(place[..., None] * torch.tensor([0.0, 9.0]) + 100.0)[..., 0], colours[::-1, ::-1, 0], atol=1e-6
    )


def test_components_are_of_centred_features() -> None:
    u, v = torch.rand(2, 5, 20)
    first = principal_rgb(torch.stack([100 + u, 3 * v], 2))[..., 0].flatten()
    assert np.corrcoef(first, v.flatten())[0, 1] > 0.99


def test_the_outer_hundredths_are_clipped() -> None:
    first = principal_rgb(torch.arange(1001.0).view(7, 143, 1))[..., 0].flatten()
    np.testing.assert_allclose(first, ((np.arange(1001) - 10) / 980).clip(0, 1), atol=1e-9)


def test_narrow_features_still_have_three_colours() -> None:
    colours = principal_rgb(torch.rand(2, 5, 1))
    assert colours.shape == (2, 5, 3)
    assert colours[..., 0].any()
    assert not colours[..., 1:].any()


def test_spectral_colours_tell_two_kinds_of_patches_apart_in_all_images() -> None:
    torch.manual_seed(0)
    kind = torch.arange(12) % 2
    centres = torch.tensor([[1.0, 0.2, 0.0, 0.0], [0.2, 1.0, 0.0, 0.0]])
    features = centres[kind].expand(4, 12, 4) + 0.05 * torch.randn(4, 12, 4)
    first = spectral_rgb(features)[..., 0]
    assert abs(first[:, kind == 0].mean() - first[:, kind == 1].mean()) > 0.7
    assert first[:, kind == 0].std() < 0.2
    assert first[:, kind == 1].std() < 0.2


def test_colours_stand_where_their_patches_stand(vit: ViT) -> None:
    images = torch.rand(3, 3, 16, 20)
    assert patch_colors(vit, images).shape == (3, 4, 5, 3)
    for block in (0, -1):
        features = patch_features(vit, images, block)
        for basis, colours in (("components", principal_rgb(features)), ("spectral", spectral_rgb(features))):
            found = patch_colors(vit, images, basis, block)  # type: ignore[arg-type]
            np.testing.assert_array_equal(found, colours.reshape(3, 4, 5, 3))
    with pytest.raises(ValueError, match="unknown basis"):
        patch_colors(vit, images, basis="wavelets")  # type: ignore[arg-type]


def labelled(n: int = 200, classes: int = 12) -> ArraySource:
    pixels = np.zeros((n, 4, 4, 3), np.uint8)
    return ArraySource("x", "test", pixels, classes=list("abcdefghijkl")[:classes], labels=np.arange(n) % classes)


def test_chosen_images_are_of_ten_classes_equally_and_repeat_with_the_seed() -> None:
    source = labelled()
    rows = choose_images(source, 10, 60, seed=1)
    assert rows is not None
    assert source.labels is not None
    counts = np.unique(source.labels[rows], return_counts=True)[1]
    assert counts.tolist() == [6] * 10
    assert rows == choose_images(source, 10, 60, seed=1)
    assert rows != choose_images(source, 10, 60, seed=2)


def test_nothing_to_colour_without_two_classes() -> None:
    unlabelled = ArraySource("x", "test", np.zeros((20, 4, 4, 3), np.uint8), labels=None, classes=None)
    assert choose_images(unlabelled, 10, 60, 0) is None
    assert choose_images(labelled(classes=1), 10, 60, 0) is None
    assert choose_images(labelled(n=5), 10, 60, 0) is None
    assert choose_images(labelled(n=7, classes=2), 10, 60, 0) is None
    assert choose_images(labelled(n=8, classes=2), 10, 60, 0) == list(range(8))
    assert choose_images(labelled(n=12), 10, 60, 0) is None, "every image is alone in its class"
    none = labelled()
    none.labels = np.full(200, -1)
    assert choose_images(none, 10, 60, 0) is None


def test_unlabelled_images_are_no_class_and_images_are_drawn_within_theirs() -> None:
    source = labelled(classes=4)
    assert source.labels is not None
    source.labels[source.labels == 0] = -1
    rows = choose_images(source, 10, 50, seed=0)
    assert rows is not None
    assert rows == sorted(rows)
    assert np.unique(source.labels[rows], return_counts=True)[1].tolist() == [16] * 3  # no more than 50
    assert source.labels[rows].min() == 1
    assert {i for i in rows if source.labels[i] == 1} != set(np.flatnonzero(source.labels == 1)[:16].tolist())


def test_a_plane_of_few_points_and_without_names(mae: MAE, digits: Splits) -> None:
    """Of training images, where the test images have no labels."""
    assert digits.test is not None
    bare = digits.test.subset(range(20))
    bare.labels = None
    train = digits.train.subset(range(200))
    train.classes = None
    found = project_classes(mae, Splits("digits", train, bare), n_classes=3, limit=30)
    assert found is not None
    rows = choose_images(train, 3, 30, 0)
    assert train.labels is not None
    assert found.classes == [str(c) for c in np.unique(train.labels[rows])]
    with pytest.raises(CollapsedError, match="no plane"):  # branches at zero: the class token sees no image
        project_classes(mae, Splits("digits", train, bare), n_classes=3, limit=30, readout="cls")


def test_silhouette_is_scikit_learns_and_the_plane_repeats() -> None:
    torch.manual_seed(0)
    y = np.arange(60) % 3
    x = torch.randn(60, 8) + 6 * torch.eye(8)[y]
    found = project(x, y, ["a", "b", "c"])
    assert found.silhouette == pytest.approx(silhouette_score(x.numpy(), y), abs=1e-6)
    assert found.silhouette_plane == pytest.approx(silhouette_score(found.points, y))
    assert found.silhouette_plane > 0.5, "clusters far apart stay apart"
    np.testing.assert_array_equal(found.points, project(x, y, ["a", "b", "c"]).points)


def test_every_model_is_shown_the_same_test_images(mae: MAE, digits: Splits) -> None:
    found = [project_classes(mae, digits, n_classes=4, limit=40, seed=s) for s in (3, 3, 4)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[2] is not None
    assert len(found[0].labels) == 40
    assert len(found[0].classes) == 4
    assert found[0].classes == found[1].classes
    np.testing.assert_array_equal(found[0].labels, found[1].labels)
    assert digits.test is not None
    assert digits.test.labels is not None
    rows = choose_images(digits.test, 4, 40, 3)
    np.testing.assert_array_equal(np.array(found[0].classes)[found[0].labels], digits.test.labels[rows].astype(str))
    assert found[0].classes != found[2].classes


def test_sampled_images_are_the_models_input(mae: MAE, digits: Splits) -> None:
    images = sample_images(mae, digits, 5)
    assert images.shape == (5, 1, 8, 8)
    assert digits.test is not None
    last = len(digits.test) - 1
    numbers = [0, last // 4, last // 2, 3 * last // 4, last]  # spread over the test split
    torch.testing.assert_close(images, preprocessing_of(mae, digits.train)([digits.test.read(i) for i in numbers]))
