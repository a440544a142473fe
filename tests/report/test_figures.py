"""Figures draw for every number of channels, and nothing in a name can break them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from residua.evaluate.maps import Projection
from residua.report import figures, pictures

HOSTILE = ["_hidden", "$\\frac{", "<b>&", "a" * 200]


def draw(figure: Figure) -> Figure:
    figure.draw_without_rendering()
    return figure


def labels_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_every_run_is_in_the_legend_whatever_its_name() -> None:
    records = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    figure = draw(figures.loss_curves(dict.fromkeys(HOSTILE, records)))
    shown = labels_of(figure)
    assert len(shown) == 4
    assert [s.strip("\u200b") for s in shown[:3]] == HOSTILE[:3]
    assert len(shown[3]) < 30


def test_a_run_without_loss_is_left_out() -> None:
    figure = draw(figures.loss_curves({"a": [{"step": 1, "loss": 1.0}], "b": [{"step": 1}], "c": []}))
    assert len(figure.axes[0].lines) == 1


def test_depth_curves_hold_the_numbers_and_baselines_are_reference_lines() -> None:
    runs = {"a": {2: 3.0, 0: 1.0, 1: 2.0}, "b": {0: 5.0}}
    axes = draw(figures.depth_curves("kNN", runs, {"random init": {0: 0.5, 1: 0.4}, "pixels": 7.0})).axes[0]
    drawn = [(line.get_xdata(), line.get_ydata()) for line in axes.lines]
    np.testing.assert_array_equal(drawn[0], ([0, 1, 2], [1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(drawn[2], ([0, 1], [0.5, 0.4]))
    np.testing.assert_array_equal(axes.lines[3].get_ydata(), [7.0, 7.0])
    assert [line.get_color() for line in axes.lines[2:]] == [figures.REFERENCE] * 2
    assert axes.get_ylabel() == "kNN (%)"


def test_losses_stand_at_their_steps_and_spectra_below_one() -> None:
    axes = figures.loss_curves({"a": [{"step": 10, "loss": 1.0}, {"step": 40, "loss": 0.5}]}).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[10, 1], [40, 0.5]])
    axes = figures.depth_curves("kNN", {"a": {3: 1.0, 11: 2.0}}).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[3, 1], [11, 2]])
    axes = figures.spectrum_curves({"a": [8.0, 4.0, 2.0, 0.0]}).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[1, 1], [2, 0.5], [3, 0.25]])


def test_cells_of_a_map_lie_over_the_pixels_they_stand_for() -> None:
    maps = np.random.rand(1, 2, 4, 3)
    sheet = figures.feature_maps(np.zeros((1, 8, 8, 3)), {"a": maps}).axes[0].images[0].get_array()
    assert sheet is not None
    np.testing.assert_allclose(sheet[8 + figures._gap(8) :, :, :3], maps[0].repeat(4, 0).repeat(2, 1))


def test_a_run_has_one_colour_on_all_figures() -> None:
    loss = figures.loss_curves({n: [{"step": 1, "loss": 1.0}] for n in "ab"})
    depth = figures.depth_curves("rank", {"a": {0: 1.0}, "b": {0: 2.0}}, unit="nats")
    alpha = figures.alpha_schedule({"a": [1, 0.9], "b": [1, 1]})
    colours = [[line.get_color() for line in f.axes[0].lines] for f in (loss, depth, alpha)]
    assert colours[0] == colours[1] == colours[2] == list(figures.PALETTE[:2])


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_pictures_draw_for_any_number_of_channels(channels: int) -> None:
    images = pictures.displayable(torch.rand(4, channels, 12, 16))
    assert images.shape == (4, 12, 16, 3)
    draw(figures.reconstructions({"truth": images, "masked": images, "$a_": images}))
    draw(figures.feature_maps(images, {"a": np.random.rand(4, 3, 4, 3)}))
    draw(figures.attention_maps(images, {"a": np.random.rand(4, 3, 4)}, "attention"))
    draw(figures.neighbor_grid(images[None].repeat(3, 0)))
    draw(figures.neighbor_rows({"a": images[None].repeat(3, 0), "$b_": images[None].repeat(3, 0)}))
    assert ("channel" in pictures.channels_note(channels)) == (channels in (2, 5))


def test_a_sheet_holds_its_pictures_pixel_for_pixel() -> None:
    rows = {name: np.random.rand(3, 8, 8, 3) for name in ("truth", "model")}
    sheet = figures.reconstructions(rows).axes[0].images[0].get_array()
    assert sheet is not None
    gap = figures._gap(8)
    np.testing.assert_allclose(sheet[8 + gap :, 8 + gap : 16 + gap, :3], rows["model"][1])
    assert (sheet[8] == 0).all(), "gaps are transparent"


def test_sixteen_bit_pixels_are_stretched_to_their_range() -> None:
    dim = torch.rand(2, 1, 4, 4) * 0.01 + 0.2
    limits = dim.amin((0, 2, 3), keepdim=True), dim.amax((0, 2, 3), keepdim=True)
    shown = pictures.displayable(dim, limits)
    assert shown.min() == 0
    assert shown.max() == pytest.approx(1)


def test_rows_of_neighbours_hold_a_query_and_its_neighbours_per_model() -> None:
    found = {name: np.random.rand(3, 4, 9, 9, 3) for name in "ab"}
    figure = draw(figures.neighbor_rows(found, queries=2))
    sheet = figure.axes[0].images[0].get_array()
    assert sheet is not None
    gap, apart = figures._gap(9), 3
    np.testing.assert_allclose(sheet[:9, :9, :3], found["a"][0, 0])
    second = 9 + gap + apart
    np.testing.assert_allclose(sheet[9 + gap : 18 + gap, second : second + 9, :3], found["b"][0, 1])
    np.testing.assert_allclose(sheet[-9:, :9, :3], found["b"][1, 0])  # the second query
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["a", "b", "a", "b"]


def test_attention_is_bright_where_it_is_great() -> None:
    weights = np.zeros((1, 2, 2))
    weights[0, 1, 0] = 0.4
    sheet = figures.attention_maps(np.zeros((1, 8, 8, 3)), {"a": weights}).axes[0].images[0].get_array()
    assert sheet is not None
    light = sheet[8 + figures._gap(8) :, :, :3].sum(-1)
    assert light[4:, :4].min() > 2
    assert light[:4].max() < 0.1
    with pytest.raises(ValueError, match="did training diverge"):
        figures.attention_maps(np.zeros((1, 8, 8, 3)), {"a": weights * np.nan})


def test_the_plane_shows_every_image_and_both_scores() -> None:
    labels = np.arange(30) % 3
    plane = Projection(np.random.rand(30, 2), labels, ["_a", "b", "$c"], 0.125, -0.5)
    figure = draw(figures.class_plane(dict.fromkeys("pqrs", plane)))
    shown = [axes for axes in figure.axes if axes.lines]
    assert len(shown) == 4
    assert sum(len(line.get_xdata()) for line in shown[0].lines) == 30
    assert shown[1].get_title() == "q\nsilhouette 0.125\nin the plane -0.500"
    assert len(labels_of(figure)) == 3


def test_a_saved_figure_is_on_white(tmp_path: Path) -> None:
    path = figures.save(figures.alpha_schedule({"a": [1.0, 0.9]}), tmp_path / "new" / "alphas.png", dpi=50)
    assert Image.open(path).convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
