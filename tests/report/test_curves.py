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
