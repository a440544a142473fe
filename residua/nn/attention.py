"""Self-attention from packed queries, keys and values, with a kernel for the short sequences of masked autoencoders.

General fused kernels walk long sequences in tiles; at 17 to 65 tokens most of a tile is empty and the packed
gradients must be put together afterwards. Here one program owns one head of one image: keys and values stay on chip,
the backward pass recomputes the softmax, and nothing but `qkv`, the output and their gradients touches memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch: the general path serves
    triton = None

MAX_TOKENS = 128  # at 197 PyTorch's was faster on an H200
HEAD_DIMS = (16, 32, 64)


def attention(qkv: Tensor) -> Tensor:
    """`softmax(q k^T / sqrt(d)) v` for packed (B, N, 3, H, d); the result is (B, N, H, d)."""
    if _short(qkv):
        return short_attention(qkv.contiguous())
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _short(qkv: Tensor) -> bool:
    return (
        triton is not None
        and qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and qkv.shape[1] <= MAX_TOKENS
        and qkv.shape[4] in HEAD_DIMS
    )


if triton is not None:
    # Keys come in two tiles, the largest power of two within N and a TAIL for the rest (65 = 64 + 1 costs 80, not
    # 128); BLOCK_M queries are handled at a time. tl.dot wants 16 rows at least.

    @triton.jit
    def _forward_kernel(
        qkv, out, scale, N, H: tl.constexpr, D: tl.constexpr,
        BLOCK_M: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    ):  # fmt: skip
        image = (tl.program_id(0) // H).to(tl.int64)
        head = tl.program_id(0) % H
        row = 3 * H * D
        base = qkv + image * N * row + head * D
        d = tl.arange(0, D)[None, :]
        n0, n1 = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
        k0 = tl.load(base + H * D + n0[:, None] * row + d, mask=(n0 < N)[:, None], other=0.0)
        v0 = tl.load(base + 2 * H * D + n0[:, None] * row + d, mask=(n0 < N)[:, None], other=0.0)
        k1 = tl.load(base + H * D + n1[:, None] * row + d, mask=(n1 < N)[:, None], other=0.0)
        v1 = tl.load(base + 2 * H * D + n1[:, None] * row + d, mask=(n1 < N)[:, None], other=0.0)
        for start in range(0, N, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            queries = (m < N)[:, None]
            q = tl.load(base + m[:, None] * row + d, mask=queries, other=0.0)
            s0 = tl.where((n0 < N)[None, :], tl.dot(q, tl.trans(k0)) * scale, float("-inf"))
            s1 = tl.where((n1 < N)[None, :], tl.dot(q, tl.trans(k1)) * scale, float("-inf"))
            top = tl.maximum(tl.max(s0, 1), tl.max(s1, 1))[:, None]
            e0, e1 = tl.exp(s0 - top), tl.exp(s1 - top)
            o = tl.dot(e0.to(v0.dtype), v0) + tl.dot(e1.to(v1.dtype), v1)
            o = o / (tl.sum(e0, 1) + tl.sum(e1, 1))[:, None]
            place = out + image * N * H * D + head * D + m[:, None] * (H * D) + d
            tl.store(place, o.to(out.dtype.element_ty), mask=queries)

    @triton.jit
    def _backward_kernel(
        qkv, grad, dqkv, scale, N, H: tl.constexpr, D: tl.constexpr,
        BLOCK_M: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    ):  # fmt: skip
        image = (tl.program_id(0) // H).to(tl.int64)
        head = tl.program_id(0) % H
        row = 3 * H * D
        base = image * N * row + head * D
        d = tl.arange(0, D)[None, :]
        n0, n1 = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
        at0, at1 = n0[:, None] * row + d, n1[:, None] * row + d
        in0, in1 = (n0 < N)[:, None], (n1 < N)[:, None]
        k0 = tl.load(qkv + base + H * D + at0, mask=in0, other=0.0)
        v0 = tl.load(qkv + base + 2 * H * D + at0, mask=in0, other=0.0)
        k1 = tl.load(qkv + base + H * D + at1, mask=in1, other=0.0)
        v1 = tl.load(qkv + base + 2 * H * D + at1, mask=in1, other=0.0)
        dk0, dv0 = tl.zeros([MAIN, D], tl.float32), tl.zeros([MAIN, D], tl.float32)
        dk1, dv1 = tl.zeros([TAIL, D], tl.float32), tl.zeros([TAIL, D], tl.float32)
        for start in range(0, N, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            queries = (m < N)[:, None]
            q = tl.load(qkv + base + m[:, None] * row + d, mask=queries, other=0.0)
            do = tl.load(grad + image * N * H * D + head * D + m[:, None] * (H * D) + d, mask=queries, other=0.0)
            # the softmax again: cheaper than keeping it
            s0 = tl.where((n0 < N)[None, :], tl.dot(q, tl.trans(k0)) * scale, float("-inf"))
            s1 = tl.where((n1 < N)[None, :], tl.dot(q, tl.trans(k1)) * scale, float("-inf"))
            top = tl.maximum(tl.max(s0, 1), tl.max(s1, 1))[:, None]
            e0, e1 = tl.exp(s0 - top), tl.exp(s1 - top)
            total = (tl.sum(e0, 1) + tl.sum(e1, 1))[:, None]
            p0, p1 = e0 / total, e1 / total
            # ds = p (dp - <p, dp>)
            dp0, dp1 = tl.dot(do, tl.trans(v0)), tl.dot(do, tl.trans(v1))
            mean = (tl.sum(p0 * dp0, 1) + tl.sum(p1 * dp1, 1))[:, None]
            ds0 = (p0 * (dp0 - mean) * scale).to(k0.dtype)
            ds1 = (p1 * (dp1 - mean) * scale).to(k1.dtype)
            dv0 += tl.dot(tl.trans(p0.to(do.dtype)), do)
            dv1 += tl.dot(tl.trans(p1.to(do.dtype)), do)
            dk0 += tl.dot(tl.trans(ds0), q)
            dk1 += tl.dot(tl.trans(ds1), q)
            dq = tl.dot(ds0, k0) + tl.dot(ds1, k1)
            tl.store(dqkv + base + m[:, None] * row + d, dq.to(dqkv.dtype.element_ty), mask=queries)
        low = dqkv.dtype.element_ty
        tl.store(dqkv + base + H * D + at0, dk0.to(low), mask=in0)
        tl.store(dqkv + base + 2 * H * D + at0, dv0.to(low), mask=in0)
        tl.store(dqkv + base + H * D + at1, dk1.to(low), mask=in1)
        tl.store(dqkv + base + 2 * H * D + at1, dv1.to(low), mask=in1)

    # queries at a time and warps, forward and backward, by size of the main tile; from sweeps on an H200 at 17, 50, 65
    # and 197 tokens, the last standing in for 128
    _SHAPES = {16: (16, 1, 16, 1), 32: (64, 4, 64, 4), 64: (32, 2, 32, 2), 128: (32, 2, 16, 4)}

    def _tiles(n: int, backward: bool) -> dict[str, int]:
        """Tile sizes and warps for n tokens."""
        main = max(16, triton.next_power_of_2(n + 1) // 2)
        tail = max(16, triton.next_power_of_2(max(n - main, 1)))
        block, warps = _SHAPES[main][2:] if backward else _SHAPES[main][:2]
        return {"BLOCK_M": block, "MAIN": main, "TAIL": tail, "num_warps": warps}

    def _launch(kernel: Any, qkv: Tensor, *tensors: Tensor) -> None:
        b, n, _, h, d = qkv.shape
        kernel[(b * h,)](qkv, *tensors, d**-0.5, n, H=h, D=d, **_tiles(n, kernel is _backward_kernel))

    # opaque to the compiler: traced, one call site's number of warps was applied to all

    @torch.library.custom_op("residua::short_attention", mutates_args=())
    def short_attention(qkv: Tensor) -> Tensor:
        """The kernel path of `attention`: contiguous bf16 or fp16 `qkv` on a GPU, at most 128 tokens."""
        b, n, _, h, d = qkv.shape
        out = qkv.new_empty(b, n, h, d)
        _launch(_forward_kernel, qkv, out)
        return out

    @short_attention.register_fake
    def _(qkv: Tensor) -> Tensor:
        b, n, _, h, d = qkv.shape
        return qkv.new_empty(b, n, h, d)

    @torch.library.custom_op("residua::short_attention_backward", mutates_args=())
    def _short_attention_backward(qkv: Tensor, grad: Tensor) -> Tensor:
        dqkv = torch.empty_like(qkv)
        _launch(_backward_kernel, qkv, grad, dqkv)
        return dqkv

    @_short_attention_backward.register_fake
    def _(qkv: Tensor, grad: Tensor) -> Tensor:
        return torch.empty_like(qkv)

    def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx: Any, grad: Tensor) -> Tensor:
        return _short_attention_backward(*ctx.saved_tensors, grad.contiguous())

    short_attention.register_autograd(_backward, setup_context=_keep)
