"""Curves along training hold their numbers."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from residua.evaluate.dynamics import Correlation
from residua.report import curves


def test_a_group_is_the_mean_of_its_runs_with_a_band() -> None:
    groups = {
        "alpha_min 0.8": [{1.0: 10.0, 2.0: 20.0}, {1.0: 12.0, 2.0: 26.0, 3.0: 9.0}],
        "alpha_min 1": [{1.0: 5.0}],
        "none": [],
    }
    axes = curves.epoch_curves("kNN", groups).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[1, 11], [2, 23]])
    np.testing.assert_array_equal(axes.lines[1].get_xydata(), [[1, 5]])
    band = axes.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band.tolist()} >= {(1, 10), (1, 12), (2, 20), (2, 26)}
    assert axes.get_ylabel() == "kNN (%)"


def test_gains_by_step_end_in_a_hollow_marker() -> None:
    panels = {"first": {"a": {10.0: 1.0, 20.0: 2.0}, "b": {10.0: -1.0}}, "second": {"b": {100.0: 4.0}}}
    figure = curves.step_curves("gain", panels, {"first": {"a": (30.0, 5.0)}})
    first, second = figure.axes
    zero, a, end, b = first.lines
    assert list(zero.get_ydata()) == [0, 0]
    np.testing.assert_array_equal(a.get_xydata(), [[10, 1], [20, 2], [30, 5]])
    assert list(a.get_markevery()) == [0, 1]
    np.testing.assert_array_equal(end.get_xydata(), [[30, 5]])
    assert end.get_markerfacecolor() == "none"
    assert b.get_color() == second.lines[1].get_color() != a.get_color()
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xscale() == "linear"
    assert (first.get_title(), second.get_title(), first.get_xlabel()) == ("first", "second", "training steps")
    assert first.get_ylabel() == "gain (points)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "end of the run"]


def test_correlations_are_filled_where_they_are_sure_and_left_out_where_undefined() -> None:
    found = [Correlation(1, 3, 0.9, 0.3), Correlation(2, 9, -0.95, 0.001), Correlation(3, 2, math.nan, math.nan)]
    axes = curves.correlation_curve(found, "rank", "probe").axes[0]
    points = {float(line.get_xdata()[0]): line.get_markerfacecolor() for line in axes.lines[2:]}
    assert points == {1.0: "none", 2.0: "#0072b2"}


def test_sizes_lie_along_and_scores_up_with_a_dot_for_each_of_several_runs() -> None:
    groups = {"alpha_min 1": [(16, 30.0), (8, 10.0), (8, 20.0)], "alpha_min 0.7": [(8, 40.0)]}
    axes = curves.size_curves("accuracy", groups).axes[0]
    mean, dots, other = axes.lines
    np.testing.assert_array_equal(mean.get_xydata(), [[8, 15], [16, 30]])
    assert sorted(map(tuple, dots.get_xydata().tolist())) == [(8, 10), (8, 20)]
    np.testing.assert_array_equal(other.get_xydata(), [[8, 40]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("residual blocks", "accuracy (%)")


def test_the_score_to_quote_is_framed_at_its_layer_and_noise() -> None:
    values = {2: {"t=0.1": 10.0, "t=0.2": 20.0, "t=0.4": 30.0}, 5: {"t=0.1": 60.0, "t=0.2": 50.0, "t=0.4": 40.0}}
    figure = curves.noise_heatmap(values, (5, "t=0.1"), "probe (%)")
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), [[10, 20, 30], [60, 50, 40]])
    (frame,) = axes.patches
    assert (frame.get_xy(), frame.get_width(), frame.get_height()) == ((-0.5, 0.5), 1, 1)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.1", "0.2", "0.4"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["2", "5"]
    assert [t.get_text() for t in axes.texts] == ["10.0", "20.0", "30.0", "60.0", "50.0", "40.0"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("noise level t", "layer")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_norms_are_a_line_per_block_and_an_axes_per_run(count: int) -> None:
    runs = {f"$run_{i}": {0: {1.0: 1.0, 2.0: 2.0}, 1: {1.0: 3.0, 2.0: 100.0}} for i in range(count)}
    figure = curves.norm_curves(runs)
    figure.draw_without_rendering()
    shown = [axes for axes in figure.axes if axes.lines]
    assert len(shown) == count
    np.testing.assert_array_equal(shown[0].lines[1].get_ydata(), [3, 100])
    assert shown[0].get_yscale() == "log"
    assert len({to_hex(line.get_color()) for line in shown[0].lines}) == 2
