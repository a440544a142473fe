"""Spectral embedding of patches: which patches of which images belong together, as a few numbers per patch.

After Zhang, Yunis and Maire (2024): one graph over all patches of all images, sparse, weighted by cosine
similarity; the leading eigenvectors of its random walk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from .featureset import as_matrix, full_precision
from .knn import top

_TILE = {"cpu": 2**24, "cuda": 2**30}  # similarities held at once
_DENSE = 512  # graphs no larger than this are solved densely


class Affinity(NamedTuple):
    """The graph's edges, before it is made symmetric."""

    row: np.ndarray
    col: np.ndarray
    weight: np.ndarray


_NO_EDGES = Affinity(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def spectral_embedding(
    features: Any,
    k: int,
    *,
    intra: int = 50,
    inter: int = 50,
    threshold: float = 0.1,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Tensor:
    """The leading `k` eigenvectors of the patch graph: (N, P, D) features of P patches in N images -> (N, P, k).

    Each patch is joined to its `intra` nearest patches in its own image and its `inter` nearest in the others,
    by cosine similarity; similarities <= `threshold` are dropped. `W = max(A, A^T)` with row sums `d`; the
    eigenvectors are those of the random walk `D^-1 W`, D = diag(d), with the largest eigenvalues, largest
    first. The constant vector, always its first, says nothing of the images and is neither returned nor counted.

    Each eigenvector has mean square 1 over the patches, and its largest entry is positive. A patch that is
    similar to none is 0 everywhere. `seed` starts the solver.

    >>> spectral_embedding(tokens, 3)  # (N, P, 3), to be shown as red, green and blue
    """
    if intra < 0 or inter < 0 or intra + inter == 0:
        raise ValueError(f"intra = {intra} and inter = {inter}: a patch needs neighbours")
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold = {threshold}: weights must be positive, give a similarity from 0 to below 1")
    x = _patches(features, k)
    n, p, _ = x.shape
    x = F.normalize(x.float().to(device or x.device), dim=2)
    edges = _merge(_neighbours_within(x, min(intra, p - 1)), _neighbours_across(x, min(inter, (n - 1) * p)))
    keep = edges.weight > threshold
    a = sparse.csr_matrix((edges.weight[keep], (edges.row[keep], edges.col[keep])), shape=(n * p, n * p))
    vectors = random_walk_eigenvectors(a.maximum(a.T), k, seed)
    return torch.from_numpy(vectors).float().unflatten(0, (n, p))


def random_walk_eigenvectors(w: sparse.csr_matrix, k: int, seed: int = 0) -> np.ndarray:
    """Leading eigenvectors of `D^-1 W` but the constant one: (n, k), each of mean square 1.

    W (n, n) is symmetric and non-negative. `S = D^-1/2 W D^-1/2` is symmetric too and has `D^1/2` times the
    eigenvectors sought; the constant one becomes `q = D^1/2 1 / |D^1/2 1|` and is moved to the other end of the
    spectrum, exactly, by taking `S - 2 q q^T`.
    """
    degree = np.asarray(w.sum(1)).ravel()
    joined = np.flatnonzero(degree > 0)
    if len(joined) <= k + 1:
        raise ValueError(
            f"only {len(joined)} of {len(degree)} patches are similar to another one: too few for {k} eigenvectors; "
            "use more images or a lower threshold"
        )
    root = np.sqrt(degree[joined])
    d = sparse.diags_array(1 / root)
    s = (d @ w[joined][:, joined] @ d).tocsr()
    vectors = np.zeros((len(degree), k))
    vectors[joined] = _leading(s, root / np.linalg.norm(root), k, seed) / root[:, None]
    vectors /= np.sqrt(np.mean(vectors**2, axis=0))
    return vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(k)])


def _leading(s: sparse.csr_matrix, q: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Eigenvectors of `s - 2 q q^T` with the k largest eigenvalues, largest first: (n, k)."""
    n = len(q)
    if n <= max(_DENSE, 4 * k):
        return np.linalg.eigh(s.toarray() - 2 * np.outer(q, q))[1][:, ::-1][:, :k]
    deflated = LinearOperator(s.shape, matvec=lambda x: s @ x - 2 * q * (q @ x), dtype=np.float64)
    start = np.random.default_rng(seed).standard_normal(n)
    try:
        values, vectors = eigsh(deflated, k, which="LA", v0=start, ncv=max(4 * k, 40), tol=1e-5, maxiter=1000)
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"the eigenvectors of {n:,} patches did not converge ({len(error.eigenvalues)} of {k} did): "
            "the graph falls into too many pieces; try another seed, more neighbours or a lower threshold"
        ) from error
    return vectors[:, np.argsort(-values)]


@full_precision()
def _neighbours_within(x: Tensor, count: int) -> Affinity:
    """Edges to the nearest patches of the same image; x (N, P, D) of unit vectors."""
    n, p, _ = x.shape
    parts = [_NO_EDGES]
    images = max(1, _TILE.get(x.device.type, 2**24) // p**2)
    for start in range(0, n if count else 0, images):
        block = x[start : start + images]
        similarity = block @ block.transpose(1, 2)
        similarity.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        value, index = similarity.topk(count, dim=2)
        first = p * torch.arange(start, start + len(block), device=x.device)
        parts.append(_edges(value.flatten(0, 1), (index + first[:, None, None]).flatten(0, 1), start * p))
    return _merge(*parts)


@full_precision()
def _neighbours_across(x: Tensor, count: int) -> Affinity:
    """Edges to the nearest patches of all other images."""
    n, p, _ = x.shape
    flat = x.flatten(0, 1)
    parts = [_NO_EDGES]
    rows = max(1, _TILE.get(x.device.type, 2**24) // len(flat))
    for start in range(0, len(flat) if count else 0, rows):
        block = flat[start : start + rows]
        similarity = block @ flat.T
        row = torch.arange(len(block), device=x.device)
        similarity.view(len(block), n, p)[row, (start + row) // p] = -torch.inf
        parts.append(_edges(*top(similarity, count), start))
    return _merge(*parts)


def _edges(value: Tensor, index: Tensor, first: int) -> Affinity:
    """From the neighbours (rows, count) of patches `first`, `first + 1`, ..."""
    row = np.repeat(np.arange(first, first + len(index)), index.shape[1])
    return Affinity(row, index.flatten().cpu().numpy(), value.flatten().double().cpu().numpy())


def _merge(*parts: Affinity) -> Affinity:
    return Affinity(*(np.concatenate(column) for column in zip(*parts)))


def _patches(features: Any, k: int) -> Tensor:
    x = torch.as_tensor(features)
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"expected (images, patches, dimensions), got shape {tuple(x.shape)}")
    as_matrix(x.flatten(0, 1), "patch features")
    if not 1 <= k < x.shape[0] * x.shape[1] - 1:
        raise ValueError(f"{k} eigenvectors were asked for from {x.shape[0] * x.shape[1]} patches")
    return x
