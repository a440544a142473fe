import torch
import torch.distributed as dist

from residua.evaluate import distributed
from residua.evaluate.distributed import agree, gather_rows, world


def test_one_process_sorts_its_rows_and_keeps_each_once() -> None:
    rows = torch.randn(2, 4, 3)
    number, sorted_rows = gather_rows(torch.tensor([7, 1, 3, 1]), rows[:, [0, 1, 2, 1]])
    assert world() == (0, 1)
    assert number.tolist() == [1, 3, 7]
    assert torch.equal(sorted_rows, rows[:, [1, 2, 0]])
    number, sorted_rows = gather_rows(torch.tensor([7, 1, 3, 0]), rows)
    assert number.tolist() == [0, 1, 3, 7]
    assert torch.equal(sorted_rows, rows[:, [3, 1, 2, 0]])


def test_what_one_process_lacks_is_not_there(monkeypatch) -> None:
    other = torch.tensor([1, 1, 0, 0], dtype=torch.int32)
    reductions = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.SUM: torch.add}
    monkeypatch.setattr(distributed, "world", lambda: (0, 2))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda mine, op: mine.copy_(reductions[op](mine, other)))
    assert agree([True, False, True, False]) == [True, False, False, False]
