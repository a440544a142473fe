import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from residua.data import Splits
from residua.evaluate import nearest_neighbors, neighbor_images
from residua.evaluate.knn import top_similar
from residua.evaluate.neighbors import neighbors_of


def test_equals_scikit_learn() -> None:
    x = torch.randn(300, 8)
    found = nearest_neighbors(x, n_queries=20, k=5, seed=1)
    other = NearestNeighbors(n_neighbors=6, metric="cosine", algorithm="brute").fit(x.numpy())
    distance, index = other.kneighbors(x[found.queries].numpy())
    assert found.indices.tolist() == index[:, 1:].tolist()
    np.testing.assert_allclose(found.similarity.numpy(), 1 - distance[:, 1:], atol=1e-5)
    assert len(found.queries.unique()) == 20


def test_an_image_is_never_its_own_neighbour_even_among_duplicates() -> None:
    x = torch.randn(3, 4).repeat(10, 1)
    found = nearest_neighbors(x, n_queries=30, k=4)
    assert found.indices.shape == (30, 4)
    assert not (found.indices == found.queries[:, None]).any()
    assert torch.equal(found.indices % 3, (found.queries[:, None] % 3).expand(-1, 4))


def test_many_queries_are_compared_in_parts(monkeypatch) -> None:
    x = torch.randn(50, 4)
    whole, among = nearest_neighbors(x, n_queries=50, k=49), neighbors_of(x, x, 50)
    sizes = []
    monkeypatch.setattr("residua.evaluate.neighbors.tile", lambda _: (8, 20))
    monkeypatch.setattr(
        "residua.evaluate.neighbors.top_similar", lambda q, *rest: (sizes.append(len(q)), top_similar(q, *rest))[1]
    )
    assert torch.equal(nearest_neighbors(x, n_queries=50, k=49).indices, whole.indices)
    assert torch.equal(neighbors_of(x, x, 50).indices, among.indices)
    assert among.queries.tolist() == list(range(50))
    assert max(sizes) == 8


def test_queries_follow_the_seed() -> None:
    x = torch.randn(50, 4)
    assert torch.equal(nearest_neighbors(x, seed=1).queries, nearest_neighbors(x, seed=1).queries)
    assert not torch.equal(nearest_neighbors(x, seed=1).queries, nearest_neighbors(x, seed=2).queries)


def test_images_stand_beside_their_query(digits: Splits) -> None:
    found = nearest_neighbors(torch.randn(10, 4), n_queries=3, k=2)
    rows = torch.arange(10) + 100
    images = neighbor_images(digits.train, found, img_size=8, index=rows)
    assert images.shape == (3, 3, 1, 8, 8)
    query = digits.train.read(100 + int(found.queries[1]))
    second = digits.train.read(100 + int(found.indices[1, 1]))
    np.testing.assert_allclose(images[1, 0, 0].numpy(), query[..., 0] / 255, atol=1e-6)
    np.testing.assert_allclose(images[1, 2, 0].numpy(), second[..., 0] / 255, atol=1e-6)
    same = neighbor_images(digits.train.subset(rows.tolist()), found, img_size=8)
    assert torch.equal(same, images)


def test_too_few_images() -> None:
    with pytest.raises(ValueError, match="among 5 images"):
        nearest_neighbors(torch.randn(5, 3), n_queries=2, k=5)
    for wrong in ({"n_queries": 0, "k": 2}, {"n_queries": 6, "k": 2}, {"n_queries": 2, "k": 0}):
        with pytest.raises(ValueError, match="among 5 images"):
            nearest_neighbors(torch.randn(5, 3), **wrong)
    with pytest.raises(ValueError, match="0 neighbours"):
        neighbors_of(torch.randn(2, 3), torch.randn(5, 3), k=0)
    with pytest.raises(ValueError, match="queries: 1 of 2 rows hold NaN"):
        neighbors_of(torch.tensor([[1.0], [torch.nan]]), torch.randn(5, 1), k=1)


def test_neighbours_of_queries_from_elsewhere_are_those_of_greatest_cosine() -> None:
    torch.manual_seed(0)
    bank, queries = torch.randn(40, 6), torch.randn(3, 6)
    found = neighbors_of(queries, bank, k=5)
    cosine = torch.cosine_similarity(queries[:, None], bank[None], dim=2)
    value, index = cosine.topk(5, dim=1)
    assert torch.equal(found.indices, index)
    assert found.queries.tolist() == [0, 1, 2]
    torch.testing.assert_close(found.similarity, value)
    with pytest.raises(ValueError, match="41 neighbours"):
        neighbors_of(queries, bank, k=41)
    with pytest.raises(ValueError, match="made by one model"):
        neighbors_of(queries[:, :3], bank)
