"""The unconstrained Jacobians model: its known outcomes, measured by the code that measures networks."""

import pytest
import torch
import torch.nn.functional as F

from residua.anatomy.alignment import measure, ujm_blocks
from residua.anatomy.ujm import blobs, objective, path, solve


@pytest.mark.parametrize("depth", [2, 8, 32])
def test_with_weight_penalty_all_jacobians_are_one_rank_one_projection(depth: int) -> None:
    model = solve(*blobs(), depth, penalty="weights")
    assert model.gradient < 1e-8
    laws = measure(*ujm_blocks(model), k=4, classes=1)
    s = laws.S[0]
    assert float(s[:, 1].max() / s[:, 0].min()) < 1e-3  # rank one
    assert float(s[:, 0].max() / s[:, 0].min() - 1) < 1e-3  # equal
    assert 2.0 < depth * float(s[0, 0]) < 4.0  # roughly 1 / L in total depth
    assert float(laws.left_right.min()) == pytest.approx(1, abs=1e-3)
    assert float(laws.coupling.max()) < 1e-3  # all u and v equal
    assert float(laws.path.line_shape.max()) == pytest.approx(1, abs=1e-3)
    lengths = model.path().diff(dim=0).norm(dim=-1)  # steps are geometric
    ratios = lengths[1:] / lengths[:-1]
    torch.testing.assert_close(ratios, (1 + s[0, 0]).expand_as(ratios), rtol=1e-3, atol=0)
    assert model.accuracy() == 100


@pytest.mark.parametrize("depth", [4, 16])
def test_with_kinetic_penalty_steps_are_equal_and_values_fall_inversely(depth: int) -> None:
    model = solve(*blobs(), depth, penalty="kinetic")
    laws = measure(*ujm_blocks(model), k=4, classes=1)
    s = laws.S[0]
    assert float(s[:, 1].max() / s[:, 0].min()) < 1e-3
    assert float(laws.path.variation.max()) < 1e-3
    assert float(laws.path.line_shape.max()) == pytest.approx(1, abs=1e-3)
    uv = float(laws.left_right[0, 0])
    assert 0.8 < uv < 0.92
    assert float(laws.slope[0]) == pytest.approx(uv, abs=1e-3)
    assert all(abs(float(own) - uv) < 1e-3 for own in laws.left_right[0])
    assert laws.overlap_classes is not None
    assert float(laws.overlap_classes.min()) > 1 - 1e-3  # one v for all blocks
    assert float(laws.r2[0]) == pytest.approx(1, abs=1e-3)
    assert all(holds for holds, _ in laws.verdicts().values())


def test_several_classes_have_as_many_directions_less_one() -> None:
    model = solve(*blobs(dim=8, count=60, classes=4), 6, penalty="weights")
    assert model.accuracy() == 100
    laws = measure(*ujm_blocks(model), k=6, classes=4)
    assert laws.beyond is not None
    assert float(laws.beyond.max()) < 1e-6  # at most C
    assert float(laws.S[0, 0, 2] / laws.S[0, 0, 0]) > 0.5  # three of them are used
    assert float(laws.S[0, 0, 3] / laws.S[0, 0, 0]) < 1e-3


def test_the_objective_is_its_definition() -> None:
    x, y = blobs(dim=3, count=7, seed=2)
    j, w = 0.1 * torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    h1 = x + x @ j[0].T
    h2 = h1 + h1 @ j[1].T
    assert torch.equal(path(j, x)[2], h2)
    fit = torch.log(1 + torch.exp(-y * (h2 @ w))).mean() + 0.5 * 0.2 * (w @ w)
    weights = 0.5 * 0.3 * (j**2).sum()
    kinetic = 0.3 * 2 / 2 * ((h1 - x).square().sum(1) + (h2 - h1).square().sum(1)).mean()
    torch.testing.assert_close(objective(j, w, x, y, "weights", 0.3, 0.2), fit + weights)
    torch.testing.assert_close(objective(j, w, x, y, "kinetic", 0.3, 0.2), fit + kinetic)
    many = torch.randn(4, 3, dtype=torch.float64)
    label = torch.arange(7) % 4
    expected = F.cross_entropy(h2 @ many.T, label) + 0.1 * many.square().sum()
    torch.testing.assert_close(objective(j, many, x, label, "weights", 0.0, 0.2), expected)


def test_wrong_inputs() -> None:
    x, y = blobs()
    with pytest.raises(ValueError, match="must be positive"):
        solve(x, y, 4, lam_w=0)
    with pytest.raises(ValueError, match="'weights' or 'kinetic'"):
        solve(x, y, 4, penalty="l1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="span"):
        solve(x[:3], y[:3], 4)
    with pytest.raises(ValueError, match="span"):
        blobs(dim=10, count=5)
    with pytest.raises(ValueError, match="dimensions"):
        blobs(dim=3, count=40, classes=4)


def test_one_class_is_refused() -> None:
    for count in (0, 1):
        with pytest.raises(ValueError, match="give at least 2"):
            blobs(classes=count)
