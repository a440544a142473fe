"""Counter-based randomness: a number is a pure function of (seed, stream, epoch, image index, lane).

Nothing is drawn in sequence, so an image gets the same crop whichever process, batch or device it lands on,
and a resumed run needs no generator state. The hash is splitmix64's finaliser (Steele, Lea, Flood 2014) in
wrap-around int64 arithmetic, identical on CPU and GPU and transparent to `torch.compile`.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """Hash of a state and the next word."""
    # Xor comes first: a product with a plain counter would be folded by the compiler, in unbounded integers.
    x = (state ^ word) * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


@torch.compiler.assume_constant_result
def _key(seed: int, stream: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(seed: int, epoch: Tensor | int, index: Tensor, n: int, stream: str) -> Tensor:
    """`n` independent uniforms in [0, 1) for every image of a batch: float32, shape (B, n).

    `index` is (B,) int64; `epoch` an int or a (B,) tensor (a batch may straddle the border of an epoch).
    Different `stream` names ("crop", "flip", "mask") give unrelated numbers.
    """
    index = index.to(torch.int64)
    if not isinstance(epoch, Tensor):
        epoch = torch.full_like(index, epoch)
    state = _absorb(_absorb(index, _key(seed, stream)), epoch.to(index))
    bits = _absorb(state[:, None], torch.arange(n, device=index.device))
    return _shift(bits, 40).to(torch.float32) * 2.0**-24
