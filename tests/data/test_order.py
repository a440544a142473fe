"""Which images make up a step."""

from collections import Counter

import pytest
import torch

from residua.data.order import Order


@pytest.mark.parametrize(("images", "batch"), [(10, 4), (7, 7), (100, 32), (5, 16), (9, 1)])
def test_every_image_once_an_epoch_across_batch_borders(images: int, batch: int) -> None:
    order = Order(images, batch, seed=3)
    steps = -(-4 * images // batch)  # four epochs at least
    seen = torch.cat(list(order.batches(0, steps)))
    epochs = torch.cat([order.epoch_of(step) for step in range(steps)])
    for epoch in range(4):
        assert sorted(seen[epochs == epoch].tolist()) == list(range(images))
    assert torch.equal(epochs, torch.arange(steps * batch) // images)


def test_batches_are_full_and_epochs_differ() -> None:
    order = Order(50, 16, seed=0)
    assert all(len(batch) == 16 for batch in order.batches(0, 20))
    whole = Order(50, 50, seed=0)
    assert not torch.equal(whole.indices(0), whole.indices(1))
    assert not torch.equal(whole.indices(0), Order(50, 50, seed=1).indices(0))


@pytest.mark.parametrize("start", [0, 1, 5, 13, 29])
def test_any_step_can_be_the_first(start: int) -> None:
    continuing, fresh = Order(23, 8, seed=5), Order(23, 8, seed=5)
    all_steps = list(continuing.batches(0, 40))
    for step, batch in enumerate(fresh.batches(start, 40), start):
        assert torch.equal(batch, all_steps[step])
        assert torch.equal(fresh.epoch_of(step), continuing.epoch_of(step))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_partition_every_batch(world: int) -> None:
    alone = Order(25, 12, seed=2)
    ranks = [Order(25, 12, seed=2, rank=rank, world=world) for rank in range(world)]
    for step in range(12):
        parts = [rank.indices(step) for rank in ranks]
        assert {len(part) for part in parts} == {12 // world}
        assert torch.equal(torch.cat(parts), alone.indices(step))
        assert torch.equal(torch.cat([r.epoch_of(step) for r in ranks]), alone.epoch_of(step))


def test_permutations_are_uniform_over_places() -> None:
    """Image 0 comes first about as often as any other."""
    first = Counter(int(Order(4, 4, seed=seed).indices(0)[0]) for seed in range(800))
    assert all(140 < first[i] < 260 for i in range(4))  # 200 expected, standard deviation 12


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="batch size 10 cannot be shared by 4 processes: use a multiple of 4"):
        Order(100, 10, seed=0, world=4)
