"""What a sweep shows: ranks that mean something, tables, intervals only where there are any."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from residua.cli.sweep import _print
from residua.recipes.summary import Summary, compare, mean_and_interval
from residua.report.page import Cell
from residua.report.sweep import difference_rows, numeric_setting, score_rows, setting_curves, sweep_page

from .conftest import Checked

SCORES = {
    "kNN (k 20, T 0.07)": ("%", 26.6), "linear probe (simple)": ("%", 39.2), "entropy rank": ("nats", 3.25),
    "RankMe": ("", 130.3), "training loss": ("", 0.525),
}  # fmt: skip
ONE = [{"alpha_min": alpha} for alpha in ("1.0", "0.8", "0.7")]
TWO = [{"alpha_min": alpha, "mask_ratio": ratio} for alpha in ("1.0", "0.8", "0.7") for ratio in ("0.5", "0.75")]
PLAIN = {"alpha_min": "1.0"}


def summaries(groups: list[dict[str, str]], seeds: int = 3, labels: bool = True) -> list[Summary]:
    """Of a pretraining sweep: accuracies that fall from group to group, so that places are 1, 2, 3, ..."""
    found = []
    for place, group in enumerate(groups, start=1):
        for score, (unit, value) in SCORES.items():
            by_seed = {str(seed): value * (1 + 0.01 * seed**2 - 0.02 * place) for seed in range(seeds)}
            rank = place if unit == "%" else None
            if labels or unit != "%":
                about = mean_and_interval(list(by_seed.values()))
                found.append(Summary(group, score, unit, *about, by_seed, 5_600_000, rank))
    return found


def page_of(tmp_path: Path, found: list[Summary], baseline: dict[str, str] | None = None) -> str:
    return " ".join(Checked(sweep_page(tmp_path, found, {}, [], baseline).read_text()).text.split())


def test_without_labels_there_is_no_rank_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = summaries(ONE, labels=False)
    _print(found, {})
    for text in (capsys.readouterr().out, page_of(tmp_path, found)):
        assert "no rank: without labels there is only the loss, which does not rank features" in text
        assert "rank: by" not in text
    assert "rank" not in score_rows(found)[0]
    assert "rank" in score_rows(summaries(ONE))[0]


def test_differences_come_with_the_number_of_their_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(summaries(ONE[:1], seeds=4) + summaries(ONE[1:2], seeds=4) + summaries(ONE[2:], seeds=2), PLAIN)
    _print(found, PLAIN)
    printed = re.sub(r"[^\w.\n]+", " ", capsys.readouterr().out.partition("difference to")[2])
    assert re.search(r"score alpha_min n difference\s+kNN[^\n]* 0.8 4 [^\n]*\n 0.7 2 ", printed)
    page = sweep_page(tmp_path, found, {}, [], PLAIN).read_text().partition("Against the baseline")[2]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in re.findall(r"<tr>.*?</tr>", page)]
    assert [row[:2] for row in rows] == [["alpha_min", "n"], ["0.8", "4"], ["0.7", "2"]]


@pytest.mark.parametrize("groups", [ONE, ONE[:1], TWO, TWO[:4], [{}]])
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("baseline", [{}, PLAIN])
def test_no_number_is_broken_at_80_columns(
    groups: list[dict[str, str]], seeds: int, baseline: dict[str, str],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = compare(summaries(groups, seeds), baseline) if baseline else summaries(groups, seeds)
    monkeypatch.setenv("COLUMNS", "80")
    _print(found, baseline)
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line[:1] in "┏┃│└"]
    assert max(map(len, rows)) <= 80
    for s in found:
        assert any(str(s) in row and all(f" {value} │" in row for value in s.settings.values()) for row in rows)
        assert not s.difference or f" {s.difference_text()} │" in printed


def test_a_single_seed_has_no_bars_and_says_so(tmp_path: Path) -> None:
    several, alone = summaries(ONE), summaries(ONE, seeds=1)
    mixed = summaries(ONE[:2]) + summaries(ONE[2:], seeds=1)
    for found, bars in ((several, 3), (alone, 0), (mixed, 2)):
        figure = setting_curves(found, "RankMe", "alpha_min")
        assert figure is not None
        axes = figure.axes[0]
        caps = [line for line in axes.lines if line.get_marker() == "_"]
        assert [len(line.get_xdata()) for line in caps] == ([bars, bars] if bars else [])
        assert all(math.isfinite(y) for line in caps for y in line.get_ydata())
        assert len(axes.lines[0].get_xdata()) == 3
    assert "RankMe: mean and 95 % interval over seeds." in page_of(tmp_path, several)
    assert "RankMe: one seed." in page_of(tmp_path, alone)
    assert "interval over seeds." not in page_of(tmp_path, alone)
    assert "RankMe: mean and 95 % interval over seeds; one seed where there is no bar." in page_of(tmp_path, mixed)
    page = page_of(tmp_path, compare(mixed, PLAIN), PLAIN)
    assert "RankMe: difference to the baseline, mean and 95 % interval over seeds; one seed where" in page


def value_of(cell: str | Cell) -> object:
    return cell if isinstance(cell, str) else cell.value


def test_every_number_stands_in_the_row_of_its_setting_and_the_column_of_its_score() -> None:
    found = compare(summaries(ONE), PLAIN)
    of = {(s.settings["alpha_min"], s.score): s for s in found}
    header, rows, _ = score_rows(found)
    assert header == [
        "alpha_min",
        "seeds",
        "images seen",
        "rank",
        *(f"{s} ({u})" if u else s for s, (u, _) in SCORES.items()),
    ]
    for place, row in enumerate(rows, start=1):
        alpha = ONE[place - 1]["alpha_min"]
        assert [value_of(cell) for cell in row] == [
            alpha, "3", 5_600_000, place, *(of[alpha, score].mean for score in SCORES)
        ]  # fmt: skip
        assert [cell.text for cell in row[4:] if isinstance(cell, Cell)] == [str(of[alpha, score]) for score in SCORES]
    _, rows, _ = difference_rows(found)
    for row, group in zip(rows, ONE[1:], strict=True):
        own = [of[group["alpha_min"], score].difference for score in SCORES]
        assert [value_of(cell) for cell in row] == [group["alpha_min"], 3, *(d.mean for d in own if d)]
        assert all(d and d.mean < 0 for d in own)


def test_ranks_are_those_of_the_probe() -> None:
    found = [replace(s, rank=4 - s.rank) if s.rank and s.score.startswith("kNN") else s for s in summaries(ONE)]
    header, rows, _ = score_rows(found)
    assert [value_of(row[header.index("rank")]) for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("of", ["score", "difference"])
def test_curves_hold_the_numbers_of_one_score(of: Any) -> None:
    found = compare(summaries(TWO), PLAIN)
    figure = setting_curves(found, "RankMe", "alpha_min", of)
    assert figure is not None
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    for ratio in ("0.5", "0.75"):
        own = [s for s in found if s.score == "RankMe" and s.settings["mask_ratio"] == ratio]
        values = {float(s.settings["alpha_min"]): s if of == "score" else s.difference for s in own}
        expected = [[alpha, point.mean] for alpha, point in sorted(values.items()) if point]
        assert lines[f"mask_ratio {ratio}"] == expected
        assert len(expected) == (3 if of == "score" else 2)


def test_scores_are_drawn_against_a_budget_where_there_is_one() -> None:
    groups = [{"alpha_min": a, "steps": n} for a in ("1.0", "0.8", "0.7") for n in ("1000", "2000")]
    assert numeric_setting(summaries(groups)) == "steps"
    assert numeric_setting(summaries(TWO)) == "alpha_min"  # of two that are no budget, the one with more values
    assert numeric_setting(summaries([{"schedule": "linear"}, {"schedule": "cosine"}])) is None


def test_a_score_that_is_no_number_is_not_taken_for_one_seed(tmp_path: Path) -> None:
    found = summaries(ONE)
    found[-1] = replace(found[-1], mean=math.nan, ci95=math.nan)
    assert "training loss: mean and 95 % interval over seeds." in page_of(tmp_path, found)


def test_scores_of_fewer_seeds_show_in_the_number_of_seeds() -> None:
    found = summaries(ONE[:2])
    found[-1] = replace(found[-1], by_seed=dict(list(found[-1].by_seed.items())[:2]))
    header, rows, _ = difference_rows(compare(found, PLAIN))
    assert [cell.text for cell in (row[header.index("n")] for row in rows) if not isinstance(cell, str)] == ["2 to 3"]
