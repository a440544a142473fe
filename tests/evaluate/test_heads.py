import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from residua.evaluate.heads import _objective, fit_adamw, fit_lbfgs, gradient, logits


def test_gradient_is_autograds() -> None:
    params = torch.randn(2, 6, 3, 4, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(2, 11, 5, dtype=torch.float64), torch.randint(4, (11,))
    scores = logits(params, x)
    for layer in range(2):
        for r in range(3):
            head = params[layer, :-1, r], params[layer, -1, r]
            torch.testing.assert_close(scores[layer, :, r], x[layer] @ head[0] + head[1])
    loss = sum(F.cross_entropy(scores[layer, :, r], y, reduction="sum") for layer in range(2) for r in range(3))
    expected = torch.autograd.grad(loss, params)[0]
    torch.testing.assert_close(gradient(scores.detach().softmax(-1), x, y), expected)


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_adamw_heads_train_as_torchs_would_one_by_one(warmup: float) -> None:
    n, d, classes, epochs, batch = 90, 5, 4, 4, 25
    x, y = torch.randn(2, 1, n, d), torch.randint(classes, (n,))
    lr = torch.tensor([[1e-1, 1e-2], [3e-2, 1e-3]])
    wd = torch.tensor([[0.0, 0.5], [0.1, 0.0]])
    params = fit_adamw(x, y, classes, lr, wd, epochs=epochs, batch_size=batch, warmup=warmup, seed=3)

    for layer in range(2):
        for r in range(2):
            generator = torch.Generator().manual_seed(3)
            head = torch.nn.Linear(d, classes)
            for p in head.parameters():
                torch.nn.init.zeros_(p)
            optimizer = torch.optim.AdamW(head.parameters(), float(lr[layer, r]), weight_decay=float(wd[layer, r]))
            total = epochs * 4
            ramp = warmup * total
            for step in range(total):
                if step % 4 == 0:
                    order = torch.randperm(n, generator=generator)
                    torch.randint(1, (n,), generator=generator)
                share = (step + 1) / ramp if step < ramp else (step - ramp) / (total - ramp)
                factor = share if step < ramp else (1 + math.cos(math.pi * share)) / 2
                optimizer.param_groups[0]["lr"] = float(lr[layer, r]) * factor
                rows = order.tensor_split(4)[step % 4]
                optimizer.zero_grad()
                F.cross_entropy(head(x[layer, 0, rows]), y[rows]).backward()
                optimizer.step()
            torch.testing.assert_close(params[layer, :-1, r], head.weight.T.detach(), atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(params[layer, -1, r], head.bias.detach(), atol=2e-5, rtol=1e-4)


def test_adamw_draws_among_the_views() -> None:
    y = torch.randint(2, (200,))
    good = F.one_hot(y, 2).float() - 0.5
    empty = torch.zeros_like(good)
    lr, wd = torch.tensor([[1e-1]]), torch.tensor([[0.0]])

    def accuracy(views: list[torch.Tensor]) -> float:
        params = fit_adamw(torch.stack(views)[None], y, 2, lr, wd, epochs=5, batch_size=50)
        return float((logits(params, good[None])[0, :, 0].argmax(1) == y).float().mean())

    assert accuracy([empty, good]) == 1.0
    assert accuracy([empty, empty]) < 0.7


@pytest.mark.parametrize("penalty", [1e-1, 1e-3, 1e-4])
def test_lbfgs_finds_scikit_learns_optimum(penalty: float) -> None:
    rng = np.random.default_rng(0)
    n, d, classes = 600, 12, 5
    y = rng.integers(classes, size=n)
    mixing = rng.normal(size=(d, d)) * np.geomspace(1, 0.1, d)
    x = (rng.normal(size=(classes, d))[y] + rng.normal(size=(n, d))) @ mixing
    x = (x - x.mean(0)).astype(np.float32)
    other = LogisticRegression(C=1 / (n * penalty), tol=1e-10, max_iter=20_000).fit(x.astype(np.float64), y)
    features, target = torch.from_numpy(x)[None], torch.from_numpy(y)
    params = fit_lbfgs(features, target, classes, torch.tensor([[penalty]]), tolerance=1e-12)
    mine = logits(params, features)[0, :, 0].softmax(1)
    np.testing.assert_allclose(mine.numpy(), other.predict_proba(x), atol=2e-3)
    quick = fit_lbfgs(features, target, classes, torch.tensor([[penalty]]))
    best = objective(params, features, target, penalty)
    assert objective(quick, features, target, penalty) < 1.002 * best


def objective(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, penalty: float) -> float:
    loss = F.cross_entropy(logits(params, x)[0, :, 0].double(), y)
    return float(loss + penalty / 2 * params[0, :-1].double().square().sum())


def test_what_lbfgs_minimises_is_summed_over_all_chunks_of_images() -> None:
    """With 5,000 classes a chunk has 256 images."""
    n, d, classes, penalty = 600, 3, 5000, 0.1
    z, y = torch.randn(n, d, dtype=torch.float64), torch.randint(classes, (n,))
    p = torch.randn(d + 1, classes, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(d + 1, 1, dtype=torch.float64) + 0.5
    w = scale * p
    expected = F.cross_entropy(z @ w[:-1] + w[-1], y) + penalty / 2 * w[:-1].square().sum()
    loss, grad = _objective(p.detach(), z, y, scale, penalty)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, p)[0])


def test_lbfgs_heads_do_not_depend_on_their_neighbours() -> None:
    x, y = torch.randn(2, 300, 6), torch.randint(3, (300,))
    x[1] *= 0.01
    x -= x.mean(1, keepdim=True)
    penalties = torch.tensor([[1e-3, 1e-1], [1e-1, 1e-3]])
    together = fit_lbfgs(x, y, 3, penalties, tolerance=1e-12)
    for layer in range(2):
        for r in range(2):
            alone = fit_lbfgs(x[layer : layer + 1], y, 3, penalties[layer : layer + 1, r : r + 1], tolerance=1e-12)
            scores = logits(together, x)[layer, :, r].softmax(1)
            torch.testing.assert_close(
                scores, logits(alone, x[layer : layer + 1])[0, :, 0].softmax(1), atol=1e-4, rtol=0
            )


def test_lbfgs_copes_with_constant_and_repeated_features() -> None:
    x, y = torch.randn(200, 3), torch.randint(3, (200,))
    x -= x.mean(0)
    doubled = torch.cat([x, x, torch.zeros(200, 2)], 1)[None]
    params = fit_lbfgs(doubled, y, 3, torch.tensor([[0.0]]), tolerance=1e-12)
    plain = fit_lbfgs(x[None], y, 3, torch.tensor([[0.0]]), tolerance=1e-12)
    assert torch.isfinite(params).all()
    torch.testing.assert_close(
        logits(params, doubled).softmax(-1), logits(plain, x[None]).softmax(-1), atol=1e-3, rtol=0
    )
