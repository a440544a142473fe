"""Pages and figures of anatomies: they say what was measured, and are whole."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import residua
from residua.anatomy import blobs, measure, solve
from residua.anatomy.alignment import ujm_blocks
from residua.anatomy.counterfactual import Case, Outcome, Point, mean_s1, points
from residua.anatomy.study import Look, Moment, study
from residua.report import anatomy as drawing
from residua.report.counterfactual import PANELS, counterfactual_page, depth_power, four_laws, laws_that_hold


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


def outcome(series: str, x: float, seed: int, laws: dict[str, Any], gauge: str = "J") -> Outcome:
    return Outcome(Case(series, x, seed, {"model": "resmlp", "data": "digits"}), 97.0, {gauge: laws})


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
    outcomes = [outcome("shortcuts", x, 0, laws, "J/alpha") for x in (8.0, 16.0)]
    html = counterfactual_page("shortcut", "depth", outcomes, "train", tmp_path / "c.html").read_text()
    assert "Bars: spread over blocks. Gauge J/alpha." in html


def test_spreads_are_over_networks_where_there_are_several(found: Any) -> None:
    laws = found.parts[0].laws.to_dict()
    other = laws | {"scalars": {"RA4 slope": {"mean": laws["scalars"]["RA4 slope"]["mean"] + 2, "spread": 9.0}}}
    (one,) = points([outcome("a", 1, 0, laws)], "a", "RA4 slope")
    assert one.spread == laws["scalars"]["RA4 slope"]["spread"]
    (two,) = points([outcome("a", 1, 0, laws), outcome("a", 1, 1, other)], "a", "RA4 slope")
    assert two.mean == pytest.approx(one.mean + 1)
    assert two.spread == pytest.approx(2**0.5)
    (s1,) = mean_s1([outcome("a", 1, 0, laws)], "a", "J")
    assert s1.mean == pytest.approx(sum(row[0] for row in laws["singular_values"]) / 4)
    alone = laws | {"singular_values": [[3.0, 1.0]]}
    assert mean_s1([outcome("a", 1, 0, alone)], "a", "J") == [Point(1, 3.0, 0.0)]


def test_inversely_with_depth_is_a_power_of_minus_one() -> None:
    assert depth_power([Point(d, 3 / d, 0) for d in (4.0, 8.0, 32.0)]) == pytest.approx(-1)
    assert depth_power([Point(4.0, 1.0, 0.0)]) is None


def test_the_line_after_the_classes_lies_between_the_last_of_them_and_the_next() -> None:
    axes = drawing.singular_values(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), classes=2).axes[0]
    (line,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert list(line.get_xdata()) == [2.5, 2.5]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1, 4], [2, 3], [3, 2], [4, 1]])


def test_classes_are_named_by_their_numbers() -> None:
    figure = drawing.trajectories(torch.rand(3, 4, 2), torch.tensor([2, 0, 2, 0]), ["cat", "dog", "eel"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["cat", "eel"]


def test_the_page_draws_means_over_samples_and_both_grids(
    found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, grids = [], []
    singular_values, alignment_grid = drawing.singular_values, drawing.alignment_grid
    monkeypatch.setattr(drawing, "singular_values", lambda *a: values.append(a) or singular_values(*a))
    monkeypatch.setattr(drawing, "alignment_grid", lambda *a: grids.append(a) or alignment_grid(*a))
    drawing.anatomy_page(found, "a", tmp_path / "a.html")
    for i, part in enumerate(found.parts):
        torch.testing.assert_close(values[i][0], part.laws.S.mean(0))
        assert values[i][1] == 3
        for (grid, _, title), own, text in zip(
            grids[2 * i :], (part.laws.grid, part.laws.swapped), ("|U_j' J_i V_j|", "|V_j' J_i U_j|")
        ):
            torch.testing.assert_close(grid, own)
            assert title == text


def test_tables_say_what_holds_and_how_far_the_last_layer_has_collapsed(found: Any, tmp_path: Path) -> None:
    html = drawing.anatomy_page(found, "a", tmp_path / "a.html").read_text()
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in re.findall(r"<tr>.*?</tr>", html)]
    verdicts = [part.laws.verdicts() for part in found.parts]
    assert not all(holds for holds, _ in verdicts[0].values())  # of random weights
    for law in verdicts[0]:
        (row,) = [row for row in rows if row[0] == law]
        assert row[3:] == ["yes" if own[law][0] else "no" for own in verdicts]
    for part in found.parts:
        c = part.collapse["blocks.3"]
        numbers = (c.nc1, c.nc2_norms, c.nc2_angles, c.nc3, c.nc4, part.accuracy)
        assert [part.split, str(c.samples), *(f"{v:.3g}" for v in numbers)] in rows


def test_checkpoints_lie_at_their_scores_or_where_there_are_none_at_their_steps(found: Any) -> None:
    laws = found.parts[0].laws
    for scores, at in (((40.0, 70.0), [40, 70]), ((40.0, None), [2, 4])):
        moments = [Moment(step, score, laws) for step, score in zip((2, 4), scores)]
        axes = drawing.along_training(moments, "test accuracy (%)").axes[0]
        assert list(axes.lines[0].get_xdata()) == at
        assert axes.lines[0].get_ydata() == pytest.approx([laws.scalars()["RA2 coupling"][0]] * 2)
        assert axes.get_xlabel() == ("step" if None in scores else "test accuracy (%)")


def test_laws_that_hold_in_some_networks_are_counted() -> None:
    def network(*holds: bool) -> dict[str, Any]:
        return {"verdicts": {f"RA{i}": {"holds": own} for i, own in enumerate(holds, start=1)}}

    assert laws_that_hold([network(True, False, True), network(True, False, False)]) == "RA1, RA3 1/2"
    assert laws_that_hold([network(False)]) == "none"


def test_dotted_lines_are_the_thresholds_of_the_verdicts(found: Any) -> None:
    said = {law: text for law, (_, text) in found.parts[0].laws.verdicts().items()}
    said["RA3"] = said["RA3"].replace("5 %", "0.05")
    for number, threshold in PANELS.items():
        assert threshold is None or f"{threshold:g}" in said[number[:3]]
    assert sum(threshold is not None for threshold in PANELS.values()) == 5
