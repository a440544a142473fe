"""Times and labels as diffusion backbones take them."""

import math

import pytest
import torch

from residua.nn.conditioning import check_batch, drop_labels, label_index, time_embedding


@pytest.mark.parametrize("dim", [2, 8, 9])
def test_time_embedding_against_the_formula(dim: int) -> None:
    t = torch.tensor([0.0, 0.37, 999.0], dtype=torch.float64)
    got = time_embedding(t, dim)
    assert got.shape == (3, dim)
    half = dim // 2
    for b in range(3):
        for i in range(half):
            w = 10000 ** (-i / half)
            assert got[b, i].item() == pytest.approx(math.cos(t[b].item() * w), abs=1e-12)
            assert got[b, half + i].item() == pytest.approx(math.sin(t[b].item() * w), abs=1e-12)
    assert (got[:, 2 * half :] == 0).all()


def test_time_embedding_is_never_in_half_precision() -> None:
    assert time_embedding(torch.tensor([3.0], dtype=torch.bfloat16), 4).dtype == torch.float32
    assert torch.equal(time_embedding(torch.tensor([3]), 4), time_embedding(torch.tensor([3.0]), 4))


def test_labels_left_out_are_no_label() -> None:
    t = torch.rand(3)
    assert label_index(None, 10, t).tolist() == [10, 10, 10]
    assert label_index(torch.tensor([0, 9, 10]), 10, t).tolist() == [0, 9, 10]
    assert label_index(None, None, t) is None


def test_labels_of_every_kind_of_integer_serve() -> None:
    for kind in (torch.uint8, torch.int8, torch.int32, torch.int64):
        rows = label_index(torch.tensor([0, 9, 10], dtype=kind), 10, torch.rand(3))
        assert (rows.dtype, rows.tolist()) == (torch.long, [0, 9, 10])
    assert label_index(torch.tensor([255], dtype=torch.uint8), 1000, torch.rand(1)).tolist() == [255]


def test_dropping_follows_the_draws() -> None:
    y = torch.tensor([0, 1, 2, 3])
    draws = torch.tensor([0.05, 0.15, 0.95, 0.149])
    assert drop_labels(y, draws, 0.15, 10).tolist() == [10, 1, 2, 10]
    assert torch.equal(drop_labels(y, draws, 0.0, 10), y)
    share = (drop_labels(torch.zeros(20_000, dtype=torch.long), torch.rand(20_000), 0.1, 7) == 7).double().mean()
    assert float(share) == pytest.approx(0.1, abs=0.01)


def test_wrong_batches_are_refused() -> None:
    t = torch.rand(2)
    with pytest.raises(ValueError, match="unconditional model"):
        label_index(torch.tensor([0, 1]), None, t)
    with pytest.raises(ValueError, match=r"labels from 0 to 11 given; expected 0 to 9, or 10 for"):
        label_index(torch.tensor([0, 11]), 10, t)
    with pytest.raises(ValueError, match="labels from -1"):
        label_index(torch.tensor([-1, 1]), 10, t)
    with pytest.raises(ValueError, match="2 integers"):
        label_index(torch.tensor([0.0, 1.0]), 10, t)
    with pytest.raises(ValueError, match="2 integers"):
        label_index(torch.tensor([0]), 10, t)
    with pytest.raises(ValueError, match=r"torch\.bool given; expected 2 integers"):
        label_index(torch.tensor([True, False]), 10, t)
    with pytest.raises(ValueError, match=r"\(2, 4, 8, 8\) given; expected \(batch, 3, 8, 8\)"):
        check_batch(torch.zeros(2, 4, 8, 8), t, 3, (8, 8))
    with pytest.raises(ValueError, match=r"expected \(batch, 3, 8, 8\)"):
        check_batch(torch.zeros(2, 3, 8, 10), t, 3, (8, 8))
    with pytest.raises(ValueError, match=r"times of shape \(2, 1\) given for 2 images"):
        check_batch(torch.zeros(2, 3, 8, 8), t[:, None], 3, (8, 8))
