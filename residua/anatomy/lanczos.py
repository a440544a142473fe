"""Block Golub-Kahan-Lanczos bidiagonalisation with thick restarts, for a batch of matrices that are only applied.

Right vectors Q and left vectors P grow by turns, `J Q = P T` and `J^T P = Q T^T + (next block)`, both kept orthonormal
in full. The triplets of the small T are those of J on the subspace: `J v = s u` holds exactly, and `J^T u - s v` is the
share of u in the last block of P, so errors cost nothing to know. Blocks are small, because what a subspace of given
size can tell apart grows with the number of blocks in it; several vectors in a block find values that are repeated.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 4  # vectors; as many copies of a repeated value are found at once
CHECK = 6  # rounds between looks at the small matrix
PROOF = 8  # rounds from fresh vectors at the end, that would find more copies
_SEED = 7_919_477  # a stream of its own: vectors drawn like a network's weights would lie among its singular vectors


class Operator(Protocol):
    """J and J^T of every sample, applied to (B, p, size) vectors."""

    x: Tensor
    in_size: int
    out_size: int

    def push(self, v: Tensor) -> Tensor: ...

    def pull(self, u: Tensor) -> Tensor: ...


class Transposed:
    """J^T in place of J."""

    def __init__(self, operator: Operator) -> None:
        self.x, self.push, self.pull = operator.x, operator.pull, operator.push
        self.in_size, self.out_size = operator.out_size, operator.in_size


def lanczos(operator: Operator, k: int, tol: float, rounds: int, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """The k largest triplets of every sample, U (B, k, out), S (B, k), V (B, k, in), and the rounds it took.

    It stops when all of `|J^T u - s v|` are within `tol` of the largest value and fresh vectors, orthogonal to what was
    found, show nothing larger than the k-th; or after `rounds` rounds, of one product each with J and J^T.
    """
    if operator.in_size > operator.out_size:
        u, s, v, used = lanczos(Transposed(operator), k, tol, rounds, seed)
        return v, s, u, used
    space = Subspace(operator, k, seed)
    often = CHECK if operator.x.device.type == "cpu" else 4 * CHECK  # small matrices are no work for a GPU
    proven: int | None = None  # the round in which all had converged for the first time
    while True:
        space.grow()
        last = (space.rounds >= rounds and space.size >= k) or space.size >= space.whole
        proof = proven is not None and space.rounds == proven + PROOF
        if not (last or proof or space.full or space.rounds % often == 0) or space.size < k:
            continue
        found = u, s, v, error = space.ritz()
        # a value that is zero to rounding has nothing left to converge to
        done = bool(((error[:, :k] <= tol * s[:, :1]) | (s[:, :k] <= tol * s[:, :1])).all())
        if last or (done and proven is not None and space.rounds >= proven + PROOF):
            left, right = space.vectors(u[..., :k], v[..., :k])
            return left, s[:, :k].to(operator.x), right, space.rounds
        if done and proven is None:
            proven = space.rounds
            space.restart(*found[:3], keep=k, fresh=True)
        elif space.full:
            space.restart(*found[:3], keep=(space.most + k) // 2)


class Subspace:
    """Q (B, size, in), P (B, size, out), T (B, size, size), and the block that comes next."""

    def __init__(self, operator: Operator, k: int, seed: int) -> None:
        self.operator, x = operator, operator.x
        self.whole = operator.in_size
        self.most = min(self.whole, max(8 * k, 160))
        self.generator = torch.Generator().manual_seed(_SEED + seed)
        self.q = x.new_empty(len(x), self.most, operator.in_size)
        self.p = x.new_empty(len(x), self.most, operator.out_size)
        self.t = x.new_zeros(len(x), self.most, self.most, dtype=torch.float64)
        self.size = self.rounds = self.last = 0
        self.next = self._random()
        self.coupling = self.t[:, :0, :0]

    @property
    def full(self) -> bool:
        return self.size + self.next.shape[1] > self.most

    def grow(self) -> None:
        """One block more on both sides."""
        start, self.size = self.size, self.size + self.next.shape[1]
        own = slice(start, self.size)
        self.q[:, own] = self.next
        image = self.operator.push(self.next)
        self.p[:, own], on_old = self._orthonormal(image, self.p[:, :start], self.last)
        self.t[:, :start, own] = on_old.mT
        self.t[:, own, own] = (image @ self.p[:, own].mT).mT.double()
        image = self.operator.pull(self.p[:, own])
        new, _ = self._orthonormal(image, self.q[:, : self.size], self.size - start)
        self.next = new[:, : self.whole - self.size]
        self.coupling = (image @ self.next.mT).double()
        self.last = self.size - start
        self.rounds += 1

    def ritz(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Triplets of T, as combinations (B, size, i) of P and Q, and the errors `|J^T u - s v|` (B, i)."""
        u, s, vh = torch.linalg.svd(self.t[:, : self.size, : self.size].cpu())
        share = u[:, self.size - self.last :].mT @ self.coupling.cpu()
        return u, s, vh.mT, share.norm(dim=-1)

    def vectors(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Such combinations as vectors."""
        p, q = self.p[:, : self.size], self.q[:, : self.size]
        return u.mT.to(p) @ p, v.mT.to(q) @ q

    def restart(self, u: Tensor, s: Tensor, v: Tensor, keep: int, fresh: bool = False) -> None:
        """Cut the subspace to its leading triplets; `fresh`: and go on from random vectors."""
        self.p[:, :keep], self.q[:, :keep] = self.vectors(u[..., :keep], v[..., :keep])
        self.t.zero_()
        self.t[:, :keep, :keep] = torch.diag_embed(s[:, :keep]).to(self.t)
        self.size, self.last = keep, 0
        if fresh:
            self.next = self._orthonormal(self._random(), self.q[:, :keep])[0][:, : self.whole - keep]

    def _random(self) -> Tensor:
        x, shape = self.operator.x, (min(BLOCK, self.whole), self.whole)
        rows = torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(x)
        return self._orthonormal(rows.expand(len(x), *shape), self.q[:, :0])[0]

    def _orthonormal(self, rows: Tensor, against: Tensor, recent: int = 0) -> tuple[Tensor, Tensor]:
        """Rows made orthonormal and orthogonal to others, and what they had of these.

        What is left of a row is as exact as it is large, so it is done again while too little is left (Kahan's rule).
        Most of what a row of Lanczos has of others it has of the `recent` ones: taken away first, that makes once do.
        Where nothing but rounding is left, a random direction takes the row's place: rounding can lie in a part of the
        space that is used up, such as the outputs that a mask leaves alive.
        """
        own = against[:, against.shape[1] - recent :]
        whole = rows.norm(dim=-1, keepdim=True)
        near = rows @ own.mT
        rows = rows - near @ own
        first: Tensor | None = None
        tiny = torch.finfo(rows.dtype).tiny
        for _ in range(5):
            share = rows @ against.mT
            first = share if first is None else first
            before = rows.norm(dim=-1).amax(-1)
            rows = rows - share @ against
            lost = rows.norm(dim=-1, keepdim=True) <= (100 * torch.finfo(rows.dtype).eps * whole).clamp_min(tiny)
            again = bool(lost.any())
            if again:
                noise = torch.randn(rows.shape, generator=self.generator, dtype=torch.float64).to(rows)
                rows = torch.where(lost, noise / noise.norm(dim=-1, keepdim=True), rows / whole.clamp_min(tiny))
            rows, left = self._normal(rows)
            whole = torch.ones_like(whole)
            if not again and bool((left > 0.5 * before).all()):
                break
        assert first is not None
        first[:, :, first.shape[2] - recent :] += near
        return rows, first.double()

    def _normal(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Orthonormal rows, and the least (B,) that one of them had beside the others.

        By Cholesky's decomposition of their products; by QR where that is too inexact.
        """
        exact = rows.double()
        lower, failed = torch.linalg.cholesky_ex(exact @ exact.mT)
        pivots = lower.diagonal(dim1=-2, dim2=-1)
        if not failed.any() and bool((pivots.amin(-1) > 1e-4 * pivots.amax(-1)).all()):
            eye = torch.eye(rows.shape[1], dtype=exact.dtype, device=rows.device)
            inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
            return (inverse @ exact).to(rows), pivots.amin(-1).to(rows)
        rows = rows / rows.norm(dim=-1, keepdim=True)
        return torch.linalg.qr(rows.mT)[0].mT, rows.new_zeros(len(rows))
