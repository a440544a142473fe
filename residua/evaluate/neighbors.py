"""Which images a model finds alike: something to look at where there are no labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.data import Batch, Source, center_view
from residua.data.preprocess import to_canvas

from .featureset import as_matrix
from .knn import tile, top_similar


@dataclass(frozen=True)
class Neighbors:
    """Row numbers of some images and of those most similar to them, nearest first."""

    queries: Tensor  # (Q,)
    indices: Tensor  # (Q, k)
    similarity: Tensor  # (Q, k), cosine


def nearest_neighbors(features: Any, n_queries: int = 8, k: int = 8, seed: int = 0) -> Neighbors:
    """The `k` other images most similar (cosine) to each of `n_queries` images drawn by `seed`."""
    x = as_matrix(features)
    if not 1 <= k < len(x) or not 1 <= n_queries <= len(x):
        raise ValueError(f"{n_queries} queries with {k} neighbours each were asked for among {len(x)} images")
    queries = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:n_queries].to(x.device)
    bank = F.normalize(x.float(), dim=1)
    similarity, index = _nearest(bank[queries], bank, k + 1)
    other = index != queries[:, None]
    # where duplicates crowd the image itself out of its own list, the last entry goes instead
    other[other.all(1), -1] = False
    shape = (n_queries, k)
    return Neighbors(queries.cpu(), index[other].view(shape).cpu(), similarity[other].view(shape).cpu())


def neighbors_of(queries: Any, features: Any, k: int = 8) -> Neighbors:
    """The `k` rows of `features` most similar (cosine) to each row of `queries`, which need not be among them.

    `.queries` numbers the rows of `queries`, `.indices` those of `features`.
    """
    q, x = as_matrix(queries, "queries"), as_matrix(features)
    if not 1 <= k <= len(x):
        raise ValueError(f"{k} neighbours were asked for among {len(x)} images")
    if q.shape[1] != x.shape[1]:
        raise ValueError(f"queries have {q.shape[1]} dimensions, features {x.shape[1]}: were they made by one model?")
    similarity, index = _nearest(F.normalize(q.float(), dim=1), F.normalize(x.float(), dim=1).to(q.device), k)
    return Neighbors(torch.arange(len(q)), index.cpu(), similarity.cpu())


def _nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_similar` of any number of queries: as many at once as suit the device."""
    rows, columns = tile(bank.device)
    values, indices = zip(*(top_similar(part, bank, k, columns) for part in queries.split(rows)))
    return torch.cat(values), torch.cat(indices)


def neighbor_images(source: Source, neighbors: Neighbors, img_size: int = 64, index: Tensor | None = None) -> Tensor:
    """The pictures for a grid: (Q, 1 + k, C, h, w) in [0, 1], the query first in its row.

    `index` maps rows of the features to images of the source (`FeatureSet.index`) where they differ.
    """
    rows = torch.cat([neighbors.queries[:, None], neighbors.indices], 1)
    numbers = (rows if index is None else index[rows]).flatten().tolist()
    pixels, sizes = to_canvas([source.read(i, img_size) for i in numbers], img_size)
    mean, std = [0.0] * source.channels, [1.0] * source.channels
    images = center_view(Batch(pixels, sizes, torch.tensor(numbers)), img_size, mean, std)
    return images.unflatten(0, rows.shape)
