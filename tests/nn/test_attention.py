"""Attention against its formula; the GPU kernels against PyTorch's, run on the CPU by Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from residua.nn import attention as module

INTERPRETED = """
import sys
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from residua.nn import attention as A

@triton.jit
def probe(out, N):
    for i in range(0, N, 16):
        tl.store(out + i, 1.0)

try:
    probe[(1,)](torch.zeros(16), 16)
except Exception as error:  # some releases of Triton cannot interpret a loop with the numpy installed
    print("unusable:", error)
    sys.exit()

torch.manual_seed(0)
for n in (1, 5, 17, 50, 65, 128):
    for d in (16, 32, 64):
        qkv = torch.randn(2, n, 3, 2, d, requires_grad=True)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        want = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        grad = torch.randn(want.shape)
        want.backward(grad)
        packed = qkv.detach()
        out, dqkv = torch.full(want.shape, torch.nan), torch.full(qkv.shape, torch.nan)
        A._launch(A._forward_kernel, packed, out)
        A._launch(A._backward_kernel, packed, grad, dqkv)
        torch.testing.assert_close(out, want.detach(), rtol=1e-5, atol=1e-5, msg=lambda m: f"forward {n} {d}: {m}")
        torch.testing.assert_close(dqkv, qkv.grad, rtol=1e-5, atol=1e-5, msg=lambda m: f"backward {n} {d}: {m}")
        print("equal", n, d)
"""


@pytest.mark.skipif(module.triton is None, reason="Triton is not installed")
def test_kernels_equal_pytorch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # in a file: Triton reads a kernel's source
        [sys.executable, "-c", "import sys, runpy, tempfile, pathlib\n"
         "path = pathlib.Path(tempfile.mkdtemp()) / 'interpreted.py'\n"
         "path.write_text(sys.stdin.read())\n"
         "runpy.run_path(str(path), run_name='__main__')"],
        input=INTERPRETED, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    if done.stdout.startswith("unusable"):
        pytest.skip(f"Triton's interpreter does not work here: {done.stdout}")
    assert done.stdout.count("equal") == 18


@pytest.mark.parametrize("n", [1, 7, 300])
def test_on_the_cpu_it_is_the_formula(n: int) -> None:
    qkv = torch.randn(2, n, 3, 4, 16)
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / 16**0.5
    exact = torch.einsum("bhij,bhjd->bihd", torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True), v)
    torch.testing.assert_close(module.attention(qkv).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(module.triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("backward", [False, True])
def test_the_two_tiles_hold_all_keys(backward: bool) -> None:
    for n in range(1, module.MAX_TOKENS + 1):
        tiles = module._tiles(n, backward)
        main, tail = tiles["MAIN"], tiles["TAIL"]
        assert main + tail >= n
        assert main & (main - 1) == 0 == tail & (tail - 1)
        assert min(main, tail, tiles["BLOCK_M"]) >= 16
        assert main + tail < 2 * n + 32  # and waste little
