import pytest
import torch

from residua.evaluate.adamw import _batches, _Recorded, _schedule, _Step, cosine, fit_adamw, fit_rows, row_width

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def problem(n: int = 2000, d: int = 24, classes: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.randint(classes, (n,))
    x = 0.7 * torch.randn(classes, d)[y] + torch.randn(n, d)
    return (x - x.mean(0)) / x.std(0), y


def accuracy(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = params.float().flatten(2)
    scores = (x.float() @ flat[0, :-1] + flat[0, -1]).unflatten(1, params.shape[2:])
    return 100 * (scores.argmax(2) == y[:, None]).float().mean(0)


LR, WD = torch.tensor([[1e-3, 1e-2]]), torch.zeros(1, 2)


def test_half_precision_is_as_accurate_as_float32() -> None:
    x, y = problem(4000)
    train, test = (x[None, None, :2000], y[:2000]), (x[2000:], y[2000:])
    found = [
        accuracy(fit_adamw(train[0].to(dtype), train[1], 8, LR, WD, epochs=20, batch_size=64), *test)
        for dtype in (torch.float32, torch.float16)
    ]
    assert found[0].min() > 60
    torch.testing.assert_close(*found, atol=0.3, rtol=0)


def test_some_images_of_a_set_are_that_set() -> None:
    x, y = problem(300)
    views = torch.stack([x, x + 1])
    images = torch.randperm(300)[:200].sort().values
    rows = torch.cat([views.flatten(0, 1), torch.ones(600, 1)], 1)[None]
    options = {"epochs": 3, "batch_size": 50, "seed": 2}
    some = fit_rows(rows, y, images, 8, LR, WD, **options)
    torch.testing.assert_close(some, fit_adamw(views[None, :, images], y[images], 8, LR, WD, **options))


def test_batches_are_those_of_tensor_split() -> None:
    place, real = _batches(23, 5)
    parts = [row[keep].tolist() for row, keep in zip(place, real)]
    assert parts == [part.tolist() for part in torch.arange(23).tensor_split(5)]


def test_a_recorded_step_counts_on_the_device_and_fills_batches_up(monkeypatch) -> None:
    """The recording itself needs a GPU; all around it does not."""

    def call(function, device):
        for _ in range(3):
            function()
        return function, None

    monkeypatch.setattr("residua.evaluate.adamw.record", call)
    x, y = problem(103)
    rows = torch.cat([x, torch.ones(103, 1)], 1)[None]
    step = _Step(rows, 8, LR, WD)
    recorded = _Recorded(step, _schedule(103, 4, 3, 0.2), 103, 4)
    assert not step.params.any()
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        order = torch.randperm(103, generator=generator)
        torch.randint(1, (103,), generator=generator)
        recorded.epoch(order, y[order])
    expected = fit_adamw(x[None, None], y, 8, LR, WD, epochs=3, batch_size=26, warmup=0.2, seed=5)
    torch.testing.assert_close(step.params, expected, atol=1e-6, rtol=1e-4)


def test_rows_in_half_precision_are_as_wide_as_tensor_cores_want() -> None:
    assert row_width(768, torch.float16) == 776
    assert row_width(767, torch.float16) == 768
    assert row_width(768, torch.float32) == 769


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_the_heads_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    x, y = problem(4000)
    train, test = (x[None, None, :2000], y[:2000]), (x[2000:], y[2000:])
    options = {"epochs": 20, "batch_size": 64}
    here = accuracy(fit_adamw(*train, 8, LR, WD, **options), *test)
    runs = [fit_adamw(train[0].cuda().to(dtype), train[1].cuda(), 8, LR, WD, **options) for _ in range(2)]
    assert torch.equal(*runs)
    torch.testing.assert_close(accuracy(runs[0].cpu(), *test), here, atol=0.8, rtol=0)


@pytest.mark.parametrize("total", [1, 5, 7, 20, 33])
def test_the_rate_rises_to_its_peak_and_no_further(total: int) -> None:
    factors = [cosine(step, total, 0.1) for step in range(total)]
    assert max(factors) <= 1.0
    assert factors[round(0.1 * total) :] == sorted(factors[round(0.1 * total) :], reverse=True)
