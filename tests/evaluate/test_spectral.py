import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from residua.evaluate import spectral_embedding
from residua.evaluate.knn import top
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


def test_fifty_neighbours_of_each_kind_above_a_tenth_unless_told() -> None:
    x = torch.randn(3, 60, 3).double() + 0.5
    for options, settings in (({}, (50, 50, 0.1)), ({"threshold": 0.6}, (50, 50, 0.6))):
        found = spectral_embedding(x, 1, **options).flatten().double().numpy()
        theirs = by_definition(x.numpy(), 1, *settings)[1][:, 1]
        assert abs(found @ theirs) / np.linalg.norm(found) / np.linalg.norm(theirs) == pytest.approx(1, abs=1e-5)


def test_a_similarity_at_the_threshold_is_dropped() -> None:
    x = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])[None]
    found = spectral_embedding(x, 1, threshold=0.5)[0]
    assert not found[0].any()
    assert found[1:].any()
    assert spectral_embedding(x, 1, threshold=0.49)[0, 0].any()


@pytest.mark.parametrize("n", [30, 600])
def test_a_walk_on_a_path_has_cosines(n: int) -> None:
    """Eigenvalues cos(pi j / (n - 1)), which lie close together on a long path: solved densely and by iteration."""
    ones = np.ones(n - 1)
    found = random_walk_eigenvectors(sparse.diags_array([ones, ones], offsets=[-1, 1]).tocsr(), 3)
    for j, mine in enumerate(found.T, 1):
        cosine = np.cos(np.pi * j * np.arange(n) / (n - 1))
        assert abs(mine @ cosine) / np.linalg.norm(mine) / np.linalg.norm(cosine) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("n", [6, 600])
def test_the_constant_is_left_out_where_all_other_eigenvalues_are_negative(n: int) -> None:
    """Every patch joined to every other: eigenvalues 1 and -1 / (n - 1)."""
    found = random_walk_eigenvectors(sparse.csr_matrix(np.ones((n, n)) - np.eye(n)), 2)
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-9)


def test_many_eigenvectors() -> None:
    k = 45
    rng = np.random.default_rng(0)
    points = rng.normal(size=(600, 2))
    near = np.exp(-((points[:, None] - points) ** 2).sum(2))
    w = np.where(near > 0.6, near, 0) - np.eye(600)
    w = w[w.sum(1) > 0][:, w.sum(1) > 0]
    walk = w / w.sum(1, keepdims=True)
    found = random_walk_eigenvectors(sparse.csr_matrix(w), k)
    values = (found * (walk @ found)).sum(0) / (found**2).sum(0)
    np.testing.assert_allclose(walk @ found, values * found, atol=1e-3)
    np.testing.assert_allclose(values, np.sort(np.linalg.eigvals(walk).real)[::-1][1 : k + 1], atol=1e-5)


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


def test_where_eigenvalues_are_equal_the_seed_chooses_and_repeats() -> None:
    """Four kinds that nothing joins: any mixture of their indicators is an eigenvector."""
    x = torch.eye(4)[torch.arange(640) % 4].view(40, 16, 4)
    found = spectral_embedding(x, 2, seed=1)
    assert torch.equal(spectral_embedding(x, 2, seed=1), found)
    assert (spectral_embedding(x, 2, seed=2) - found).abs().max() > 0.1


@pytest.mark.parametrize("held", [1, 300])
def test_chunks_do_not_change_the_graph_and_hold_no_more_than_they_may(monkeypatch, held: int) -> None:
    x, _ = clusters(12, 10, 3, 0.5)
    found = spectral_embedding(x, 3)
    sizes = []
    monkeypatch.setattr("residua.evaluate.spectral._TILE", {"cpu": held})
    monkeypatch.setattr("residua.evaluate.spectral.top", lambda s, k: (sizes.append(s.numel()), top(s, k))[1])
    torch.testing.assert_close(spectral_embedding(x, 3), found, atol=1e-5, rtol=0)
    assert max(sizes) <= max(held, 120)  # one patch at least


def test_a_solver_that_does_not_converge_says_what_to_try(monkeypatch) -> None:
    def gives_up(*_, **__):
        raise ArpackNoConvergence("", np.ones(1), np.ones((600, 1)))

    monkeypatch.setattr("residua.evaluate.spectral.eigsh", gives_up)
    with pytest.raises(RuntimeError, match=r"1 of 3 did.*another seed, more neighbours or a lower threshold"):
        spectral_embedding(clusters(20, 36, 4, 0.5)[0], 3)


def test_a_patch_that_resembles_none_is_zero() -> None:
    x, _ = clusters(10, 16, 3, 0.3)
    x[..., -1] = 0
    x[4, 7] = torch.eye(16)[-1]
    found = spectral_embedding(x, 2)
    assert not found[4, 7].any()
    torch.testing.assert_close(found.square().mean((0, 1)), torch.ones(2))  # over all patches, this one too
    assert (found.abs().sum(2) == 0).sum() == 1


def test_wrong_inputs() -> None:
    with pytest.raises(ValueError, match="images, patches, dimensions"):
        spectral_embedding(torch.randn(10, 4), 2)
    with pytest.raises(ValueError, match="images, patches, dimensions"):
        spectral_embedding(torch.randn(0, 4, 4), 2)
    with pytest.raises(ValueError, match="from 6 patches"):
        spectral_embedding(torch.randn(2, 3, 4), 5)
    with pytest.raises(ValueError, match="0 eigenvectors"):
        spectral_embedding(torch.randn(2, 3, 4), 0)
    with pytest.raises(ValueError, match="NaN"):
        spectral_embedding(torch.full((3, 4, 5), torch.nan), 2)
    with pytest.raises(ValueError, match="needs neighbours"):
        spectral_embedding(torch.randn(3, 4, 5), 2, intra=0, inter=0)
    for wrong in ({"intra": -1}, {"inter": -1}):
        with pytest.raises(ValueError, match="needs neighbours"):
            spectral_embedding(torch.randn(3, 4, 5), 2, **wrong)
    for threshold in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"threshold = .* from 0 to below 1"):
            spectral_embedding(torch.randn(3, 4, 5), 2, threshold=threshold)
    with pytest.raises(ValueError, match="too few"):
        spectral_embedding(torch.eye(12).view(3, 4, 12), 2)
    joined = torch.cat([torch.rand(5, 12), torch.eye(12)[5:]])  # five patches alike
    joined[:5, 5:] = 0
    assert spectral_embedding(joined[None], 3).shape == (1, 12, 3)
    with pytest.raises(ValueError, match=r"only 5 of 12 patches .* too few for 4 eigenvectors"):
        spectral_embedding(joined[None], 4)
    assert spectral_embedding(torch.rand(2, 3, 4), 4).shape == (2, 3, 4)  # the most of six patches
