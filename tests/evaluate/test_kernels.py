import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from residua.evaluate import kernels

INTERPRETED = """
import torch
from residua.evaluate.kernels import adamw, adamw_triton, softmax_gradient, softmax_gradient_triton

torch.manual_seed(0)
for classes, dtype in ((7, torch.float32), (33, torch.float16), (1100, torch.float32)):
    scores = (4 * torch.randn(2, 5, 3, classes)).to(dtype)
    scores[0, 0, 0, 1] = 70000.0  # infinite in float16
    labels = torch.tensor([1, 0, -1, 6, 2])
    expected = softmax_gradient(scores.clone(), labels)
    torch.testing.assert_close(softmax_gradient_triton(scores, labels), expected, atol=1e-3, rtol=1e-3)
    assert not scores[:, 2].any()

shape = 2, 6, 3, 7
params, m, grad = torch.randn(shape), torch.randn(shape), torch.randn(shape)
v, rate, shrink = torch.rand(shape), torch.rand(2, 3), torch.rand(2, 3)
low, now = torch.zeros(shape, dtype=torch.float16), torch.tensor([0.7, 2.0, 5.0, 0.1])
other = [a.clone() for a in (params, m, v, grad, low)]
adamw_triton(params, m, v, grad, low, rate, shrink, now)
adamw(*other, rate, shrink, now.tolist())
for mine, theirs in zip((params, m, v), other):
    torch.testing.assert_close(mine, theirs)
assert torch.equal(low, params.half())
"""


@pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")
def test_kernels_compute_what_pytorch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-"], input=INTERPRETED, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_softmax_gradient_is_autograds_and_zero_without_a_label() -> None:
    scores, labels = torch.randn(2, 5, 3, 4, requires_grad=True), torch.tensor([1, 0, -1, 3, 2])
    loss = F.cross_entropy(scores.permute(0, 2, 1, 3).flatten(0, 2), labels.repeat(6), ignore_index=-1, reduction="sum")
    expected = torch.autograd.grad(loss, scores)[0]
    torch.testing.assert_close(kernels.softmax_gradient(scores.detach().clone(), labels), expected)


def test_logits_beyond_float16_stay_finite() -> None:
    scores = torch.tensor([[[[float("inf"), 0.0, -float("inf")]]]], dtype=torch.float16)
    assert kernels.softmax_gradient(scores, torch.tensor([0])).tolist() == [[[[0, 0, 0]]]]
