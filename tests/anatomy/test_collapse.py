"""Neural collapse where it is known, and against its definition."""

import numpy as np
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


def test_nc2_to_nc4_are_their_definitions_for_whatever_numbers_classes_have() -> None:
    g = torch.Generator().manual_seed(2)
    known = torch.tensor([1, 3, 4, 7])
    y = known[torch.cat([torch.arange(4), torch.randint(4, (60,), generator=g)])]
    x = torch.randn(8, 6, generator=g, dtype=torch.float64)[y] + torch.randn(64, 6, generator=g, dtype=torch.float64)
    w = 2 + torch.randn(9, 6, generator=g, dtype=torch.float64)
    decisions = (x @ w[known].T).argmax(1)
    found = neural_collapse(x, y, weight=w, decisions=known[decisions])

    means = np.stack([x[y == c].mean(0).numpy() for c in known])
    centred = means - means.mean(0)
    lengths = np.linalg.norm(centred, axis=1)
    assert found.nc2_norms == pytest.approx(np.sqrt(np.mean((lengths - lengths.mean()) ** 2)) / lengths.mean())
    cosines = [centred[i] @ centred[j] / lengths[i] / lengths[j] for i in range(4) for j in range(i)]
    assert found.nc2_angles == pytest.approx(np.mean([abs(cos + 1 / 3) for cos in cosines]))
    rows = w[known].numpy() - w[known].numpy().mean(0)
    rows, centred = rows / np.sqrt((rows**2).sum()), centred / np.sqrt((centred**2).sum())
    assert found.nc3 == pytest.approx(np.sqrt(((rows - centred) ** 2).sum()))
    nearest = [int(np.argmin(((means - own.numpy()) ** 2).sum(1))) for own in x]
    share = np.mean([a == int(b) for a, b in zip(nearest, decisions)])
    assert 0.2 < share < 0.9  # the two do differ
    assert found.nc4 == pytest.approx(100 * share)
    assert (found.classes, found.samples) == (4, 64)


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
