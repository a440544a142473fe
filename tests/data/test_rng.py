import pytest
import torch
from scipy import stats

from residua.data import rng


def test_a_number_depends_only_on_its_own_coordinates():
    index = torch.arange(1000)
    whole = rng.uniform(3, 7, index, 5, "crop")
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rng.uniform(3, 7, index[order], 5, "crop"), whole[order])
    assert torch.equal(rng.uniform(3, 7, index[17:18], 3, "crop"), whole[17:18, :3])


def test_epoch_may_differ_within_a_batch():
    index, epoch = torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 1])
    mixed = rng.uniform(0, epoch, index, 4, "mask")
    assert torch.equal(mixed[:3], rng.uniform(0, 0, index[:3], 4, "mask"))
    assert torch.equal(mixed[3:], rng.uniform(0, 1, index[3:], 4, "mask"))


def test_values_stay_what_they_are():
    """Guards resumed runs against a silent change of the hash (reference: plain Python integers)."""
    mask = (1 << 64) - 1

    def absorb(state: int, word: int) -> int:
        x = (state ^ word) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    key = rng._key(11, "flip") & mask
    for index, epoch, lane in ((0, 0, 0), (5, 1, 3), (1_281_166, 799, 21)):
        bits = absorb(absorb(absorb(index, key), epoch), lane)
        drawn = rng.uniform(11, epoch, torch.tensor([index]), 22, "flip")[0, lane].item()
        assert drawn == (bits >> 40) / 2**24


def test_uniform():
    for seed in range(3):
        u = rng.uniform(seed, seed, torch.arange(20_000), 5, "crop")
        assert u.min() >= 0
        assert u.max() < 1
        assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4


def test_independent_of_neighbouring_lanes_indices_epochs_seeds_and_streams():
    index = torch.arange(50_000)
    base = rng.uniform(0, 0, index, 2, "crop")
    others = [
        base[:, 1],
        base[:, 0].roll(1),
        rng.uniform(0, 1, index, 1, "crop")[:, 0],
        rng.uniform(1, 0, index, 1, "crop")[:, 0],
        rng.uniform(0, 0, index, 1, "flip")[:, 0],
    ]
    for other in others:
        cells = stats.contingency.crosstab((base[:, 0] * 16).long().numpy(), (other * 16).long().numpy()).count
        assert stats.chi2_contingency(cells).pvalue > 1e-4


def test_large_and_negative_seeds_are_fine():
    index = torch.tensor([0, 2**62])
    for seed in (-1, 2**63, 2**70):
        assert rng.uniform(seed, 0, index, 3, "x").shape == (2, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_draws_the_same_numbers():
    index = torch.arange(1000) * 7919
    assert torch.equal(rng.uniform(4, 9, index.cuda(), 22, "crop").cpu(), rng.uniform(4, 9, index, 22, "crop"))
