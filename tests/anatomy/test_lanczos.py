"""The iteration by itself, on matrices whose singular values are known."""

import pytest
import torch
from torch import Tensor

from residua.anatomy import jacobian_svd
from residua.anatomy.jacobian import Matrices
from residua.anatomy.lanczos import BLOCK, Subspace, lanczos


def matrices(*spectra: Tensor, out: int, inn: int) -> Tensor:
    """(B, out, in) of given singular values."""
    g = torch.Generator().manual_seed(0)
    made = []
    for values in spectra:
        u, v = (torch.linalg.qr(torch.randn(n, len(values), generator=g, dtype=torch.float64))[0] for n in (out, inn))
        made.append(u @ torch.diag(values.double()) @ v.T)
    return torch.stack(made)


@pytest.mark.parametrize(("out", "inn"), [(700, 500), (500, 700)])
def test_restarts_find_what_a_dense_decomposition_finds(out: int, inn: int) -> None:
    """Spectra that one subspace of 160 does not resolve, of several samples at once."""
    flat, edge = torch.linspace(2.0, 1.0, 500), 2 - torch.linspace(0, 1, 500) ** 0.5
    a = matrices(flat, edge, out=out, inn=inn)
    u, s, v, rounds = lanczos(Matrices(a), 15, 1e-10, 2000, 0)
    assert rounds > 160 // BLOCK  # there were restarts
    torch.testing.assert_close(s, torch.stack([flat, edge]).double()[:, :15], rtol=1e-9, atol=0)
    torch.testing.assert_close(v @ a.mT, s[..., None] * u, rtol=0, atol=1e-8)
    torch.testing.assert_close(u @ a, s[..., None] * v, rtol=0, atol=1e-8)
    for basis in (u, v):
        torch.testing.assert_close(basis @ basis.mT, torch.eye(15).double().expand(2, 15, 15), rtol=0, atol=1e-10)


def test_more_copies_of_a_value_than_a_block_holds() -> None:
    copies = 3 * BLOCK
    values = torch.cat([torch.full((copies,), 3.0), torch.full((copies,), 2.0), torch.linspace(1.5, 0.1, 300)])
    a = matrices(values, out=400, inn=400)
    _, s, _, _ = lanczos(Matrices(a), copies + 3, 1e-9, 2000, 0)
    torch.testing.assert_close(s[0], values[: copies + 3].double(), rtol=1e-8, atol=0)


def test_one_copy_more_than_a_block_holds_just_above_the_rest() -> None:
    """All that the block sees has converged before anything shows of the last copy: fresh vectors find it."""
    values = torch.cat([torch.full((BLOCK + 1,), 3.0), torch.linspace(2.9, 0.1, 295)])
    _, s, _, _ = lanczos(Matrices(matrices(values, out=300, inn=300)), BLOCK + 1, 1e-9, 2000, 0)
    torch.testing.assert_close(s[0], values[: BLOCK + 1].double(), rtol=1e-8, atol=0)


def test_fewer_directions_than_triplets() -> None:
    """Rank below k, rank zero, and a full rank, in one batch: vectors stay orthonormal."""
    low = torch.cat([torch.tensor([5.0, 3.0, 1.0]), torch.zeros(197)])
    a = matrices(low, torch.zeros(200), torch.linspace(1, 0.1, 200), out=210, inn=200)
    u, s, v, _ = lanczos(Matrices(a), 10, 1e-9, 2000, 0)
    torch.testing.assert_close(s[0], low[:10].double(), rtol=1e-8, atol=1e-12)
    assert s[1].abs().max() < 1e-12
    eye = torch.eye(10).double().expand(3, 10, 10)
    torch.testing.assert_close(v @ v.mT, eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(u @ u.mT, eye, rtol=0, atol=1e-9)


def test_bases_stay_orthonormal_and_the_small_matrix_exact() -> None:
    a = matrices(torch.linspace(2, 1, 300), out=300, inn=300)
    space = Subspace(Matrices(a), 10, seed=0)
    for _ in range(2):
        while not space.full:
            space.grow()
        q, p, n = space.q[:, : space.size], space.p[:, : space.size], space.size
        for basis in (q, p):
            torch.testing.assert_close(basis @ basis.mT, torch.eye(n).double()[None], rtol=0, atol=1e-12)
        torch.testing.assert_close(q @ a.mT, space.t[:, :n, :n].mT @ p, rtol=0, atol=1e-12)
        u, s, v, error = space.ritz()
        left, right = space.vectors(u, v)
        torch.testing.assert_close((left @ a - s[..., None] * right).norm(dim=-1), error, rtol=1e-6, atol=1e-12)
        space.restart(u, s, v, keep=50)


def test_single_precision_reaches_its_tolerance() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3, padding=1))
    x = torch.randn(2, 4, 12, 12)
    found = jacobian_svd(net, x, 10, method="lanczos")
    exact = jacobian_svd(net.double(), x.double(), 10, method="dense")
    assert found.converged.all()
    torch.testing.assert_close(found.S.double(), exact.S, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_masks_that_leave_few_outputs_alive(dtype: torch.dtype) -> None:
    """Directions run out on one side only, at another time in every sample, and what is left of them is rounding."""
    a = torch.randn(3, 300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 300**0.5
    for matrix, alive in zip(a, (11, 50, 290)):
        matrix[alive:] = 0
    a = a.to(dtype)
    u, s, v, _ = lanczos(Matrices(a), 8, 1e-9 if dtype == torch.float64 else 1e-5, 1000, 0)
    close = 1e-8 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(s, torch.linalg.svdvals(a)[:, :8], rtol=close, atol=close)
    torch.testing.assert_close(v @ a.mT, s[..., None] * u, rtol=0, atol=close)
    torch.testing.assert_close(u @ a, s[..., None] * v, rtol=0, atol=close)
    for basis in (u, v):
        torch.testing.assert_close(basis @ basis.mT, torch.eye(8, dtype=dtype).expand(3, 8, 8), rtol=0, atol=close)
