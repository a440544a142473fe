"""Neural collapse where it is known, and against its definition."""

import pytest
import torch
from torch import Tensor

from residua.anatomy.collapse import neural_collapse


def simplex(classes: int, dim: int) -> Tensor:
    """Vertices of a simplex: equally long, equally far apart."""
    q = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    return (torch.eye(classes, dtype=torch.float64) - 1 / classes) @ q[:classes]


def test_perfect_collapse() -> None:
    means = simplex(5, 12)
    y = torch.arange(50) % 5
    x = means[y] + 3.0
    found = neural_collapse(x, y, weight=7 * means, decisions=y)
    assert found.nc1 == pytest.approx(0, abs=1e-12)
    assert found.nc2_norms == pytest.approx(0, abs=1e-7)
    assert found.nc2_angles == pytest.approx(0, abs=1e-7)
    assert found.nc3 == pytest.approx(0, abs=1e-7)
    assert found.nc4 == 100


def test_nc1_is_its_definition() -> None:
    g = torch.Generator().manual_seed(1)
    y = torch.randint(4, (80,), generator=g)
    x = torch.randn(4, 10, generator=g, dtype=torch.float64)[y] + 0.5 * torch.randn(
        80, 10, generator=g, dtype=torch.float64
    )
    means = torch.stack([x[y == c].mean(0) for c in range(4)])
    s_w = sum((x[y == c] - means[c]).T @ (x[y == c] - means[c]) for c in range(4)) / 80
    centred = means - means.mean(0)
    s_b = centred.T @ centred / 4
    expected = torch.trace(s_w @ torch.linalg.pinv(s_b, rtol=1e-9))
    assert neural_collapse(x, y).nc1 == pytest.approx(float(expected), rel=1e-9)
    q = torch.linalg.qr(torch.randn(10, 10, generator=g, dtype=torch.float64))[0]
    assert neural_collapse(5 * x @ q + 2, y).nc1 == pytest.approx(float(expected), rel=1e-9)  # rotation, scale, shift


def test_departures_show_where_they_are() -> None:
    means = simplex(4, 8)
    y = torch.arange(40) % 4
    longer = means * torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)[:, None]
    assert neural_collapse(longer[y], y).nc2_norms > 0.1
    flipped = neural_collapse(means[y], y, weight=-means, decisions=(y + 1) % 4)
    assert flipped.nc3 == pytest.approx(2)
    assert flipped.nc4 == 0
    assert neural_collapse(means[y], y).nc3 is None


def test_wrong_inputs() -> None:
    x, y = torch.randn(10, 4), torch.arange(10) % 2
    with pytest.raises(ValueError, match="one class"):
        neural_collapse(x, torch.zeros(10, dtype=torch.long))
    with pytest.raises(ValueError, match="NaN"):
        neural_collapse(x * torch.nan, y)
    with pytest.raises(ValueError, match="does not fit"):
        neural_collapse(x, y, weight=torch.randn(2, 5))
    with pytest.raises(ValueError, match="one sample"):
        neural_collapse(x, torch.arange(10))
    with pytest.raises(ValueError, match="collapsed"):
        neural_collapse(torch.ones(10, 4), y)
