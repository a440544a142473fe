import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from residua.evaluate import spectral_embedding
from residua.evaluate.spectral import random_walk_eigenvectors


def clusters(n: int, p: int, k: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of k kinds: features (n, p, 16) and kinds (n, p)."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(k, (n, p), generator=g)
    return torch.randn(k, 16, generator=g)[y] + noise * torch.randn(n, p, 16, generator=g), y


def by_definition(x: np.ndarray, k: int, intra: int, inter: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """(eigenvalues, eigenvectors) of the random walk, patch by patch and dense; the constant one first."""
    n, p, d = x.shape
    flat = x.reshape(-1, d) / np.linalg.norm(x.reshape(-1, d), axis=1, keepdims=True)
    similarity = flat @ flat.T
    a = np.zeros_like(similarity)
    for i, row in enumerate(similarity):
        image = np.arange(n * p) // p
        own = [j for j in np.argsort(-row) if image[j] == image[i] and j != i][:intra]
        other = [j for j in np.argsort(-row) if image[j] != image[i]][:inter]
        a[i, own + other] = row[own + other]
    a[a <= threshold] = 0
    w = np.maximum(a, a.T)
    values, vectors = np.linalg.eig(w / w.sum(1, keepdims=True))
    order = np.argsort(-values.real)[: k + 1]
    return values.real[order], vectors.real[:, order]


@pytest.mark.parametrize(
    ("n", "p", "intra", "inter"), [(6, 9, 4, 5), (1, 30, 8, 50), (12, 1, 50, 5), (6, 9, 0, 9), (30, 25, 6, 6)]
)
def test_is_the_random_walk_of_the_nearest_neighbour_graph(n: int, p: int, intra: int, inter: int) -> None:
    x = torch.randn(n, p, 3).double() + 0.5
    found = spectral_embedding(x, 2, intra=intra, inter=inter).double().flatten(0, 1).numpy()
    values, vectors = by_definition(x.numpy(), 2, intra, inter, 0.1)
    assert values[0] == pytest.approx(1)
    assert values[1] < 1 - 1e-6  # connected, so that the eigenvectors are unique
    for mine, theirs in zip(found.T, vectors[:, 1:].T):
        cosine = mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs)
        assert abs(cosine) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose((found**2).mean(0), 1, rtol=1e-5)
    assert all(column[np.abs(column).argmax()] > 0 for column in found.T)


@pytest.mark.parametrize("noise", [0.05, 0.4])
def test_known_clusters_are_recovered_across_images(noise: float) -> None:
    x, y = clusters(30, 36, 5, noise)
    vectors = spectral_embedding(x, 4)
    guess = KMeans(5, n_init=10, random_state=0).fit_predict(vectors.flatten(0, 1).numpy())
    assert adjusted_rand_score(y.flatten(), guess) > 0.99


def test_pieces_are_told_apart_even_where_nothing_joins_them() -> None:
    w = sparse.block_diag([np.ones((400, 400)), np.ones((300, 300)), np.ones((200, 200))]).tocsr()
    vectors = random_walk_eigenvectors(w, 2)
    pieces = np.split(vectors, [400, 700])
    assert max(float(np.ptp(piece, axis=0).max()) for piece in pieces) < 1e-4
    means = np.array([piece.mean(0) for piece in pieces])
    assert min(np.linalg.norm(means[i] - means[j]) for i, j in [(0, 1), (0, 2), (1, 2)]) > 1
    assert np.abs(np.array([400, 300, 200]) * np.array([400, 300, 200]) @ means).max() < 1  # no constant among them


def test_scale_does_not_matter_and_seeds_only_start_the_solver() -> None:
    x, _ = clusters(20, 36, 4, 0.5)
    found = spectral_embedding(x, 3)
    torch.testing.assert_close(spectral_embedding(x * (1 + 9 * torch.rand(20, 36, 1)), 3), found, atol=1e-3, rtol=0)
    torch.testing.assert_close(spectral_embedding(x, 3, seed=1), found, atol=1e-3, rtol=0)
    assert torch.equal(spectral_embedding(x, 3), found)


def test_chunks_do_not_change_the_graph(monkeypatch) -> None:
    x, _ = clusters(12, 10, 3, 0.5)
    found = spectral_embedding(x, 3)
    monkeypatch.setattr("residua.evaluate.spectral._TILE", {"cpu": 1})
    torch.testing.assert_close(spectral_embedding(x, 3), found, atol=1e-5, rtol=0)


def test_a_patch_that_resembles_none_is_zero() -> None:
    x, _ = clusters(10, 16, 3, 0.3)
    x[..., -1] = 0
    x[4, 7] = torch.eye(16)[-1]
    found = spectral_embedding(x, 2)
    assert not found[4, 7].any()
    assert (found.abs().sum(2) == 0).sum() == 1


def test_wrong_inputs() -> None:
    with pytest.raises(ValueError, match="images, patches, dimensions"):
        spectral_embedding(torch.randn(10, 4), 2)
    with pytest.raises(ValueError, match="images, patches, dimensions"):
        spectral_embedding(torch.randn(0, 4, 4), 2)
    with pytest.raises(ValueError, match="from 6 patches"):
        spectral_embedding(torch.randn(2, 3, 4), 5)
    with pytest.raises(ValueError, match="NaN"):
        spectral_embedding(torch.full((3, 4, 5), torch.nan), 2)
    with pytest.raises(ValueError, match="needs neighbours"):
        spectral_embedding(torch.randn(3, 4, 5), 2, intra=0, inter=0)
    with pytest.raises(ValueError, match="too few"):
        spectral_embedding(torch.eye(12).view(3, 4, 12), 2)
    for wrong in ({"intra": -1}, {"inter": -1}):
        with pytest.raises(ValueError, match="needs neighbours"):
            spectral_embedding(torch.randn(3, 4, 5), 2, **wrong)
    for threshold in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"threshold = .* from 0 to below 1"):
            spectral_embedding(torch.randn(3, 4, 5), 2, threshold=threshold)
