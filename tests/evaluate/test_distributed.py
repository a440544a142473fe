import torch

from residua.evaluate.distributed import gather_rows, world


def test_one_process_sorts_its_rows_and_keeps_each_once() -> None:
    rows = torch.randn(2, 4, 3)
    number, sorted_rows = gather_rows(torch.tensor([7, 1, 3, 1]), rows[:, [0, 1, 2, 1]])
    assert world() == (0, 1)
    assert number.tolist() == [1, 3, 7]
    assert torch.equal(sorted_rows, rows[:, [1, 2, 0]])
