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
