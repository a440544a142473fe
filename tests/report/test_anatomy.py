"""Pages and figures of anatomies: they say what was measured, and are whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

import residua
from residua.anatomy import blobs, measure, solve
from residua.anatomy.alignment import ujm_blocks
from residua.anatomy.counterfactual import Case, Outcome, Point, mean_s1, points
from residua.anatomy.study import Look, study
from residua.report import anatomy as drawing
from residua.report.counterfactual import counterfactual_page, depth_power, four_laws


@pytest.fixture(scope="module")
def found() -> Any:
    torch.manual_seed(0)
    model = residua.create_model("resmlp", img_size=8, in_chans=1, num_classes=3, depth=4, width=12, alpha_min=0.8)
    return study(model.eval(), residua.data.load("digits?classes=3"), look=Look(k=6, images=3, per_class=2))


def test_the_page_has_every_law_with_its_threshold_and_every_picture(found: Any, tmp_path: Path) -> None:
    html = drawing.anatomy_page(found, "a <run>", tmp_path / "anatomy.html").read_text()
    assert "Anatomy of a &lt;run&gt;" in html
    for law, statement in drawing.LAWS.items():
        assert law in html
        assert statement in html
    for text in ("line shape &lt;= 1.1", "On train images", "On test images", "NC2 angles", "J, the branch"):
        assert text in html
    assert html.count("<svg") == 2 * 5 + 1  # paths, values, 1 / s_1 and two grids of each split; collapse
    mean, spread = found.parts[0].laws.scalars()["RA1 line shape"]
    assert f"{mean:.3f} ± {spread:.3f}" in html
    assert "http://" not in html.replace("http://www.w3.org", "")


def test_paths_are_drawn_from_start_to_end(found: Any) -> None:
    part = found.parts[0]
    figure = drawing.trajectories(part.paths, part.labels, found.classes)
    lines = [line.get_xydata() for line in figure.axes[0].lines]
    paths = [line for line in lines if len(line) == 5]
    assert len(paths) == 6
    starts = {tuple(point) for line in lines if len(line) != 5 for point in line.round(9)}
    assert {tuple(path[0].round(9)) for path in paths} == starts
    assert drawing.trajectories(part.paths).axes[0].lines


def test_the_grid_shows_each_row_over_its_largest(found: Any) -> None:
    laws = found.parts[0].laws
    sheet = drawing.alignment_grid(laws.grid, laws.names, "t").axes[0].images[0].get_array()
    k = laws.S.shape[-1]
    assert sheet.shape == (4 * (k + 1) - 1,) * 2
    own = laws.grid[2] / laws.grid[2].max()
    torch.testing.assert_close(torch.from_numpy(sheet.filled()[2 * (k + 1) :][:k, :k]), own[0])


def test_deep_networks_are_thinned() -> None:
    figure = drawing.alignment_grid(torch.rand(40, 40, 2, 2), [str(i) for i in range(40)], "t")
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()][::15] == ["0", "39"]


def test_the_line_is_fitted_to_living_blocks() -> None:
    figure = drawing.inverse_values({"a": ([1.0, 2.0, 1e300, 4.0], [0.0] * 4)})
    (line,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert line.get_ydata() == pytest.approx([1, 2, 4])


def test_the_unconstrained_model_has_a_page(tmp_path: Path) -> None:
    model = solve(*blobs(dim=4, count=12), 3, penalty="kinetic")
    html = drawing.ujm_page(model, measure(*ujm_blocks(model), k=3, classes=1), tmp_path / "ujm.html").read_text()
    assert "3 blocks, kinetic penalty" in html
    assert html.count("<svg") == 5


def outcome(series: str, x: float, seed: int, laws: dict[str, Any]) -> Outcome:
    return Outcome(Case(series, x, seed, {"model": "resmlp", "data": "digits"}), 97.0, {"J": laws})


def test_the_four_laws_side_by_side(found: Any, tmp_path: Path) -> None:
    laws = found.parts[0].laws.to_dict()
    outcomes = [outcome(s, x, 0, laws) for s in ("shortcuts", "no shortcuts") for x in (8.0, 16.0)]
    figure = four_laws(outcomes, "depth")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:4] == ["RA1 line shape", "RA2 diagonal share", "RA3 energy beyond C", "RA4 R^2"]
    html = counterfactual_page("shortcut", "depth", outcomes, "train", tmp_path / "c.html").read_text()
    assert "Against the total depth" in html
    assert "no shortcuts" in html
    assert html.count("<svg") == 3


def test_spreads_are_over_networks_where_there_are_several(found: Any) -> None:
    laws = found.parts[0].laws.to_dict()
    other = laws | {"scalars": {"RA4 slope": {"mean": laws["scalars"]["RA4 slope"]["mean"] + 2, "spread": 9.0}}}
    (one,) = points([outcome("a", 1, 0, laws)], "a", "RA4 slope")
    assert one.spread == laws["scalars"]["RA4 slope"]["spread"]
    (two,) = points([outcome("a", 1, 0, laws), outcome("a", 1, 1, other)], "a", "RA4 slope")
    assert two.mean == pytest.approx(one.mean + 1)
    assert two.spread == pytest.approx(2**0.5)
    (s1,) = mean_s1([outcome("a", 1, 0, laws)], "a")
    assert s1.mean == pytest.approx(sum(row[0] for row in laws["singular_values"]) / 4)


def test_inversely_with_depth_is_a_power_of_minus_one() -> None:
    assert depth_power([Point(d, 3 / d, 0) for d in (4.0, 8.0, 32.0)]) == pytest.approx(-1)
    assert depth_power([Point(4.0, 1.0, 0.0)]) is None
