"""Self-attention from packed queries, keys and values, with a kernel for the short sequences of masked autoencoders.

General fused kernels walk long sequences in tiles; at 17 to 197 tokens most of a tile is empty and the packed
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

MAX_TOKENS = 256
MAX_HEAD_DIM = 64


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
        and qkv.shape[4] in (16, 32, 64)
    )


if triton is not None:
    # tl.dot wants at least 16 rows; BLOCK_N covers all keys, BLOCK_M queries are handled at a time

    @triton.jit
    def _forward_kernel(
        qkv, out, scale, N, H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
    ):  # fmt: skip
        image = (tl.program_id(0) // H).to(tl.int64)
        head = tl.program_id(0) % H
        row = 3 * H * D
        base = qkv + image * N * row + head * D
        d = tl.arange(0, D)
        n = tl.arange(0, BLOCK_N)
        keys = (n < N)[:, None]
        k = tl.load(base + H * D + n[:, None] * row + d[None, :], mask=keys, other=0.0)
        v = tl.load(base + 2 * H * D + n[:, None] * row + d[None, :], mask=keys, other=0.0)
        for start in range(0, N, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            queries = (m < N)[:, None]
            q = tl.load(base + m[:, None] * row + d[None, :], mask=queries, other=0.0)
            s = tl.dot(q, tl.trans(k)) * scale
            s = tl.where((n < N)[None, :], s, float("-inf"))
            e = tl.exp(s - tl.max(s, 1)[:, None])
            o = tl.dot(e.to(v.dtype), v) / tl.sum(e, 1)[:, None]
            place = out + image * N * H * D + head * D + m[:, None] * (H * D) + d[None, :]
            tl.store(place, o.to(out.dtype.element_ty), mask=queries)

    @triton.jit
    def _backward_kernel(
        qkv, grad, dqkv, scale, N, H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
    ):  # fmt: skip
        image = (tl.program_id(0) // H).to(tl.int64)
        head = tl.program_id(0) % H
        row = 3 * H * D
        start_of = image * N * row + head * D
        d = tl.arange(0, D)
        n = tl.arange(0, BLOCK_N)
        keys = (n < N)[:, None]
        at_keys = n[:, None] * row + d[None, :]
        k = tl.load(qkv + start_of + H * D + at_keys, mask=keys, other=0.0)
        v = tl.load(qkv + start_of + 2 * H * D + at_keys, mask=keys, other=0.0)
        dk = tl.zeros([BLOCK_N, D], dtype=tl.float32)
        dv = tl.zeros([BLOCK_N, D], dtype=tl.float32)
        for start in range(0, N, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            queries = (m < N)[:, None]
            at_queries = m[:, None] * row + d[None, :]
            q = tl.load(qkv + start_of + at_queries, mask=queries, other=0.0)
            do = tl.load(
                grad + image * N * H * D + head * D + m[:, None] * (H * D) + d[None, :], mask=queries, other=0.0
            )
            s = tl.dot(q, tl.trans(k)) * scale
            s = tl.where((n < N)[None, :], s, float("-inf"))
            e = tl.exp(s - tl.max(s, 1)[:, None])
            p = e / tl.sum(e, 1)[:, None]
            dp = tl.dot(do, tl.trans(v))
            ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
            p_low, ds_low = p.to(k.dtype), ds.to(k.dtype)
            dv += tl.dot(tl.trans(p_low), do)
            dk += tl.dot(tl.trans(ds_low), q)
            dq = tl.dot(ds_low, k)
            tl.store(dqkv + start_of + at_queries, dq.to(dqkv.dtype.element_ty), mask=queries)
        tl.store(dqkv + start_of + H * D + at_keys, dk.to(dqkv.dtype.element_ty), mask=keys)
        tl.store(dqkv + start_of + 2 * H * D + at_keys, dv.to(dqkv.dtype.element_ty), mask=keys)

    def _blocks(n: int) -> dict[str, int]:
        """Tile sizes and warps for n tokens."""
        block_n = max(16, triton.next_power_of_2(n))
        block_m = min(block_n, 64)
        return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": {16: 1, 32: 1, 64: 4, 128: 4, 256: 8}[block_n]}

    def _launch(kernel: Any, qkv: Tensor, *tensors: Tensor) -> None:
        b, n, _, h, d = qkv.shape
        kernel[(b * h,)](qkv, *tensors, d**-0.5, n, H=h, D=d, **_blocks(n))

    @torch.library.triton_op("residua::short_attention", mutates_args={})
    def short_attention(qkv: Tensor) -> Tensor:
        """The kernel path of `attention`: contiguous bf16 or fp16 `qkv` on a GPU, at most 256 tokens."""
        b, n, _, h, d = qkv.shape
        out = torch.empty(b, n, h, d, dtype=qkv.dtype, device=qkv.device)
        _launch(torch.library.wrap_triton(_forward_kernel), qkv, out)
        return out

    @torch.library.triton_op("residua::short_attention_backward", mutates_args={})
    def _short_attention_backward(qkv: Tensor, grad: Tensor) -> Tensor:
        dqkv = torch.empty_like(qkv)
        _launch(torch.library.wrap_triton(_backward_kernel), qkv, grad, dqkv)
        return dqkv

    def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx: Any, grad: Tensor) -> Tensor:
        return _short_attention_backward(*ctx.saved_tensors, grad.contiguous())

    short_attention.register_autograd(_backward, setup_context=_keep)
