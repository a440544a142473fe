"""The laws on blocks that are known: what they should say, and how it is said."""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from residua.anatomy import Block, NotDifferentiable, measure, straightness
from residua.anatomy.alignment import Gauge, Path


def linear(name: str, a: Tensor, x: Tensor) -> Block:
    return Block(name, lambda z: z @ a.T, x)


@pytest.fixture
def aligned() -> tuple[list[Block], Tensor]:
    """One symmetric direction of strengths 1 / (3 + i): steps of equal length along a line."""
    u = torch.zeros(8, dtype=torch.float64)
    u[2] = 1.0
    h = 3 * u.expand(4, 8) * torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64)[:, None]
    blocks = []
    for i in range(5):
        a = torch.outer(u, u) / (3 + i)
        blocks.append(linear(f"b{i}", a, h))
        h = h + h @ a.T
    return blocks, h


def test_a_perfectly_aligned_network_keeps_every_law(aligned: tuple[list[Block], Tensor]) -> None:
    laws = measure(*aligned, k=3, classes=1)
    mean = {name: value for name, (value, _) in laws.scalars().items()}
    assert mean["RA1 line shape"] == pytest.approx(1)
    assert mean["RA1 variation of steps"] == pytest.approx(0, abs=1e-12)
    assert mean["RA2 diagonal share"] == pytest.approx(1)
    assert mean["RA2 overlap of first C"] == pytest.approx(1)
    assert mean["RA2 left and right"] == pytest.approx(1)
    assert mean["RA3 energy beyond C"] == pytest.approx(0, abs=1e-12)
    assert (mean["RA4 slope"], mean["RA4 R^2"]) == (pytest.approx(1), pytest.approx(1))
    assert all(holds for holds, _ in laws.verdicts().values())
    torch.testing.assert_close(laws.grid[..., 0, 0], laws.swapped[..., 0, 0])


@pytest.mark.parametrize("gauge", ["J", "J/alpha"])
def test_every_number_is_its_definition(gauge: Gauge) -> None:
    """On blocks that differ from sample to sample, against NumPy, one sample and one pair of blocks at a time."""
    g, alphas, k, c = torch.Generator().manual_seed(0), (0.9, 0.5, 0.7, 0.8), 3, 2
    matrices = torch.randn(4, 2, 5, 5, generator=g, dtype=torch.float64)  # 4 blocks, 2 samples
    h, points, blocks = torch.randn(2, 5, generator=g, dtype=torch.float64), [], []
    for i, (a, alpha) in enumerate(zip(matrices, alphas)):
        blocks.append(Block(f"b{i}", lambda z, a=a: (a @ z[..., None])[..., 0], h, alpha))
        points.append(h)
        h = alpha * h + (a @ h[..., None])[..., 0]
    points.append(h)
    laws = measure(blocks, h, k=k, classes=c, gauge=gauge)

    scale = np.ones(4) if gauge == "J" else 1 / np.array(alphas)
    left = np.ones(5) if gauge == "J" else np.cumprod((1.0, *alphas))
    grids = np.zeros((2, 2, 4, 4, k, k))
    for b in range(2):
        jacobians = matrices[:, b].numpy() * scale[:, None, None]
        u, s, v = zip(*((u[:, :k], s[:k], vh[:k].T) for u, s, vh in map(np.linalg.svd, jacobians)))
        np.testing.assert_allclose(laws.S[b], s)
        for i in range(4):
            energy = s[i] ** 2 / (s[i] ** 2).sum()
            np.testing.assert_allclose(laws.beyond[b, i], energy[c:].sum())
            np.testing.assert_allclose(laws.ratio[b, i], s[i][c] / s[i][0])
            np.testing.assert_allclose(laws.rank[b, i], -(energy * np.log(energy)).sum())
            np.testing.assert_allclose(laws.left_right[b, i], abs(u[i][:, 0] @ v[i][:, 0]))
            for j in range(4):
                seen = u[j].T @ jacobians[i] @ v[j]
                grids[:, b, i, j] = abs(seen), abs(v[j].T @ jacobians[i] @ u[j])
                np.testing.assert_allclose(laws.diagonal[b, i, j], (np.diag(seen) ** 2).sum() / (seen**2).sum())
                np.testing.assert_allclose(
                    laws.coupling[b, i, j], np.linalg.norm(seen - np.diag(s[i])) / np.linalg.norm(s[i]), atol=1e-12
                )
                for found, w, count in ((laws.overlap, v, k), (laws.overlap_left, u, k), (laws.overlap_classes, v, c)):
                    shared = w[i][:, :count].T @ w[j][:, :count]
                    np.testing.assert_allclose(found[b, i, j], (shared**2).sum() / count)
        inverse = np.array([1 / own[0] for own in s])
        np.testing.assert_allclose(laws.slope[b], np.polyfit(range(4), inverse, 1)[0])
        np.testing.assert_allclose(laws.r2[b], np.corrcoef(range(4), inverse)[0, 1] ** 2)
        steps = np.diff([point[b].numpy() / own for point, own in zip(points, left)], axis=0)
        lengths = np.linalg.norm(steps, axis=1)
        np.testing.assert_allclose(laws.path.line_shape[b], 4 / np.linalg.norm((steps / lengths[:, None]).sum(0)))
        np.testing.assert_allclose(laws.path.variation[b], np.std(lengths) / np.mean(lengths))
    np.testing.assert_allclose(laws.grid, grids[0].mean(0), atol=1e-12)
    np.testing.assert_allclose(laws.swapped, grids[1].mean(0), atol=1e-12)


def test_a_small_budget_changes_no_number(aligned: tuple[list[Block], Tensor]) -> None:
    small, large = (measure(*aligned, k=3, classes=1, budget=budget) for budget in (1e-9, 2.0))
    torch.testing.assert_close(small.grid, large.grid)
    torch.testing.assert_close(small.swapped, large.swapped)
    torch.testing.assert_close(small.S, large.S)


def test_scalars_are_means_over_pairs_of_different_blocks_with_the_deviation_over_samples() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=g, dtype=torch.float64)
    blocks = [Block(f"b{i}", lambda z, i=i: torch.sin((1 + i) * z.roll(i, 1)) * z, x) for i in range(3)]
    laws = measure(blocks, 2 * x, k=3, classes=1)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    between = {
        "RA2 diagonal share": laws.diagonal, "RA2 coupling": laws.coupling, "RA2 subspace overlap": laws.overlap,
        "RA2 subspace overlap, left": laws.overlap_left, "RA2 overlap of first C": laws.overlap_classes,
    }  # fmt: skip
    own = {name: [np.mean([float(table[b, i, j]) for i, j in pairs]) for b in range(3)]
           for name, table in between.items()}  # fmt: skip
    single = {"RA2 left and right": laws.left_right, "RA3 entropy rank": laws.rank, "RA3 energy beyond C": laws.beyond,
              "RA3 s_{C+1} / s_1": laws.ratio}  # fmt: skip
    own |= {name: table.mean(1).tolist() for name, table in single.items()}
    own |= {"RA1 line shape": laws.path.line_shape.tolist(), "RA1 variation of steps": laws.path.variation.tolist()}
    own |= {"RA4 slope": laws.slope.tolist(), "RA4 R^2": laws.r2.tolist()}
    assert laws.scalars().keys() == own.keys()
    for name, values in own.items():
        assert laws.scalars()[name] == pytest.approx((np.mean(values), np.std(values, ddof=1))), name


@pytest.mark.parametrize(
    ("law", "change", "holds"),
    [
        ("RA1", {"path": (1.09, 0.29)}, True), ("RA1", {"path": (1.11, 0.0)}, False),
        ("RA1", {"path": (1.0, 0.31)}, False), ("RA2", {"diagonal": 0.81}, True), ("RA2", {"diagonal": 0.79}, False),
        ("RA3", {"beyond": 0.049}, True), ("RA3", {"beyond": 0.051}, False), ("RA4", {"r2": 0.81}, True),
        ("RA4", {"r2": 0.79}, False), ("RA4", {"slope": -1.0}, False),
    ],
)  # fmt: skip
def test_a_law_holds_up_to_its_threshold(
    aligned: tuple[list[Block], Tensor], law: str, change: dict[str, Any], holds: bool
) -> None:
    laws = measure(*aligned, k=3, classes=1)
    assert laws.verdicts()[law][0]
    for name, value in change.items():
        before = getattr(laws, name)
        if name == "path":
            new: Any = Path(*(torch.full_like(before.line_shape, own) for own in value))
        else:
            new = torch.full_like(before, value)
        laws = replace(laws, **{name: new})
    assert laws.verdicts()[law][0] is holds


def test_exchanged_vectors_show_where_left_and_right_differ() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 6, 6, generator=g, dtype=torch.float64)
    x = torch.randn(1, 6, generator=g, dtype=torch.float64)
    laws = measure([linear("a", a, x), linear("b", b, x)], x, k=2)
    u, _, vh = torch.linalg.svd(b)
    expected = (vh[:2] @ a @ u[:, :2]).abs()  # V_b^T J_a U_b
    torch.testing.assert_close(laws.swapped[0, 1], expected)
    torch.testing.assert_close(laws.grid[0, 1], (u[:, :2].T @ a @ vh[:2].T).abs())


def test_overlaps_are_of_right_and_of_left_subspaces() -> None:
    a, b = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.ones(1, 6, dtype=torch.float64)
    laws = measure([linear("a", a, x), linear("b", b, x)], x, k=2)
    (u_a, _, v_a), (u_b, _, v_b) = torch.linalg.svd(a), torch.linalg.svd(b)
    right, left = (v_a[:2] @ v_b[:2].T).square().sum() / 2, (u_a[:, :2].T @ u_b[:, :2]).square().sum() / 2
    assert laws.overlap[0, 0, 1].item() == pytest.approx(right.item())
    assert laws.overlap_left[0, 0, 1].item() == pytest.approx(left.item())
    assert laws.scalars()["RA2 subspace overlap, left"][0] == pytest.approx(left.item())


def test_the_figure_shows_what_was_measured(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    laws = measure([*blocks, Block("dead", lambda z: 0 * z, end)], end, k=3)
    figure = laws.figure()
    figure.savefig(io.BytesIO())  # zero singular values do not keep it from being drawn
    pairs, values, inverse = figure.axes[:3]
    np.testing.assert_allclose(pairs.images[0].get_array(), laws.diagonal.mean(0))
    assert [line.get_ydata()[0] for line in values.lines] == pytest.approx(laws.S[..., 0].mean(0).tolist())
    assert list(inverse.lines[0].get_ydata()) == pytest.approx([3, 4, 5, 6, 7, np.nan], nan_ok=True)
    assert "of J" in values.get_title()


def test_a_dead_block_leaves_all_numbers_finite(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    dead = Block("dead", lambda z: 0 * z, end)
    laws = measure([*blocks, dead], end, k=3, classes=1)
    for name, (mean, spread) in laws.scalars().items():
        assert torch.tensor([mean, spread]).isfinite().all(), name
    assert laws.scalars()["RA4 slope"][0] == pytest.approx(1)  # over the blocks that are alive
    assert float(laws.r2.min()) == pytest.approx(1)


def test_the_table_and_the_values_say_the_same(aligned: tuple[list[Block], Tensor]) -> None:
    laws = measure(*aligned, k=3, classes=1)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(laws.table("title"))
    text = console.export_text()
    for word in ("title", "RA1 line shape", "RA4 slope", "yes: line shape <= 1.1"):
        assert word in text
    values = json.loads(json.dumps(laws.to_dict()))
    assert values["blocks"] == ["b0", "b1", "b2", "b3", "b4"]
    assert values["inverse_s1"] == pytest.approx([3, 4, 5, 6, 7])
    assert values["scalars"]["RA4 slope"]["mean"] == pytest.approx(1)
    assert values["verdicts"]["RA3"]["holds"] is True
    assert torch.tensor(values["singular_values"]).shape == (5, 3)


def test_the_block_that_cannot_be_differentiated_is_named(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    hard = Block("hard", lambda z: torch.from_numpy(z.detach().numpy()), end)
    with pytest.raises(NotDifferentiable, match="block hard: the map cannot be differentiated"):
        measure([*blocks, hard], end, k=2)


def test_what_cannot_be_judged_is_said(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    two = measure(blocks[:2], blocks[2].x, k=3, classes=3)
    assert set(two.verdicts()) == {"RA1", "RA2"}
    assert two.unjudged() == {
        "RA3": "needs more than C = 3 triplets, has 3",
        "RA4": "a line through two blocks always fits",
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(two.table())
    assert "not judged: needs more than C = 3 triplets, has 3" in console.export_text()
    assert set(measure(blocks, end, k=3).unjudged()) == {"RA3"}


def test_a_gauge_that_does_not_exist_is_refused(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    with pytest.raises(ValueError, match="choose J or J/alpha"):
        measure(blocks, end, k=2, gauge="J/a")  # type: ignore[arg-type]
    without = [Block(b.name, b.branch, b.x, 0.0) for b in blocks]
    with pytest.raises(ValueError, match="has alpha 0"):
        measure(without, end, k=2, gauge="J/alpha")


def test_equal_singular_values_do_not_fall(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    u = torch.zeros(8, dtype=torch.float64)
    u[2] = 1.0
    same = [linear(b.name, torch.outer(u, u) * (0.5 - 1e-9 * i), b.x) for i, b in enumerate(blocks)]  # but for rounding
    laws = measure(same, end, k=3)
    assert laws.scalars()["RA4 R^2"][0] > 0.99
    assert not laws.verdicts()["RA4"][0]
    assert measure(blocks, end, k=3).verdicts()["RA4"][0]


def test_values_of_dead_blocks_are_fit_for_json(aligned: tuple[list[Block], Tensor]) -> None:
    blocks, end = aligned
    dead = Block("dead", lambda z: 0 * z, end)
    values = measure([*blocks, dead], end, k=3).to_dict()
    json.dumps(values, allow_nan=False)
    assert values["inverse_s1"][-1] is values["inverse_s1_spread"][-1] is None
    still = straightness(torch.ones(3, 2, 4))
    assert still.variation.tolist() == [0, 0]


def test_a_number_of_classes_that_cannot_be_is_refused(aligned: tuple[list[Block], Tensor]) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"classes is {wrong}"):
            measure(*aligned, k=3, classes=wrong)
