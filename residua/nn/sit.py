"""SiT (Ma et al. 2024), the diffusion transformer of Peebles and Xie 2023, whose shortcuts may fade.

Parameter names are the original's.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.nn.conditioning import check_batch, label_index, time_embedding
from residua.nn.shortcut import Decay, Shortcuts
from residua.nn.stream import Skip, Step, Tap, scaled, walk
from residua.nn.vit import (
    Attention,
    Mlp,
    PatchEmbed,
    init_weights,
    pair,
    patch_grid,
    patchify,
    sincos_positions,
    stream_dtype,
    unpatchify,
)

SITS: dict[str, dict[str, int]] = {
    "nano": {"embed_dim": 128, "depth": 4, "num_heads": 4},
    "tiny": {"embed_dim": 192, "depth": 8, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "xlarge": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
}
FREQUENCIES = 256  # width of the sinusoidal time embedding


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`x (1 + scale) + shift` for tokens (B, N, D) and conditioning (B, 1, D)."""
    return torch.addcmul(shift, x, 1 + scale)


def _modulation(dim: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(dim, parts * dim))


class TimeEmbedder(nn.Module):
    """Sinusoids of the time through two linear layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, waves: Tensor) -> Tensor:
        """(B, 256) -> (B, D)."""
        return self.mlp(waves)


class LabelEmbedder(nn.Module):
    """One vector a class, and one for "no label"."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, y: Tensor) -> Tensor:
        """(B,) -> (B, D)."""
        return self.embedding_table(y)


class TanhMlp(Mlp):
    """Two linear layers with the tanh approximation of GELU between, as diffusion transformers have it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SiTBlock(nn.Module):
    """Two branches `gate * f(norm(x) (1 + scale) + shift)`; shift, scale and gate come from the conditioning."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, eps: float, skip: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.mlp = TanhMlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = _modulation(dim, 6)
        self.skip = nn.Linear(dim, dim) if skip else None

    def branches(self, c: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Attention and MLP under a conditioning (B, D)."""
        m = self.adaLN_modulation(c).unsqueeze(1).chunk(6, dim=-1)
        return partial(self.attn_branch, *m[:3]), partial(self.mlp_branch, *m[3:])

    def attn_branch(self, shift: Tensor, scale: Tensor, gate: Tensor, x: Tensor) -> Tensor:
        return gate * self.attn(modulate(self.norm1(x), shift, scale))

    def mlp_branch(self, shift: Tensor, scale: Tensor, gate: Tensor, x: Tensor) -> Tensor:
        return gate * self.mlp(modulate(self.norm2(x), shift, scale))

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        """`x + W skip + b`."""
        assert self.skip is not None
        return x + self.skip(skip)


class FinalLayer(nn.Module):
    """Conditioned norm and a linear layer to patches."""

    def __init__(self, dim: int, patch_dim: int, eps: float) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.linear = nn.Linear(dim, patch_dim)
        self.adaLN_modulation = _modulation(dim, 2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class SiT(nn.Module):
    """A transformer over patches, its norms and gates set by time and label (adaLN-Zero): `model(x_t, t, y)`.

    Steps are `x <- alpha x + gate f(norm(x) (1 + scale) + shift)`; decay runs over all `2 depth` sublayers. With
    `skips`, block `depth - 1 - i` takes the output of block i in, `x <- x + W skip + b`, for i in the first half;
    without, and with `alpha_min=1`, it is the original. `num_classes` makes it class-conditional, with one more label
    for "none".
    """

    num_prefix_tokens = 0
    pos_embed: Tensor

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 2,
        in_chans: int = 4,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        num_classes: int | None = None,
        skips: bool = True,
        zero_init: bool = True,
        decay: Decay | None = None,
    ) -> None:
        super().__init__()
        if depth < 1 or in_chans < 1 or (num_classes is not None and num_classes < 1):
            raise ValueError(f"depth {depth}, in_chans {in_chans} and num_classes {num_classes} must be at least 1")
        self.img_size, self.patch_size = pair(img_size), pair(patch_size)
        self.grid = patch_grid(img_size, patch_size)
        self.in_chans, self.embed_dim, self.depth, self.num_heads = in_chans, embed_dim, depth, num_heads
        self.mlp_ratio, self.norm_eps, self.num_classes = mlp_ratio, norm_eps, num_classes
        self.skips, self.zero_init = skips, zero_init
        self.grad_checkpointing = False
        self.preprocessing: Any = None

        self.shortcut = Shortcuts(decay or Decay(), depth)
        self.x_embedder = PatchEmbed(self.patch_size, in_chans, embed_dim)
        self.t_embedder = TimeEmbedder(embed_dim)
        self.y_embedder = None if num_classes is None else LabelEmbedder(num_classes, embed_dim)
        self.register_buffer("pos_embed", sincos_positions(self.grid, embed_dim)[:, 1:].clone())
        self.blocks = nn.ModuleList(
            SiTBlock(embed_dim, num_heads, mlp_ratio, norm_eps, skip=skips and self._mirror(i) is not None)
            for i in range(depth)
        )
        self.final_layer = FinalLayer(embed_dim, self.patch_size[0] * self.patch_size[1] * in_chans, norm_eps)
        self._init_weights()

    def _mirror(self, i: int) -> int | None:
        """The block of the first half that block i takes in, where it is of the second; None otherwise."""
        return self.depth - 1 - i if 2 * i >= self.depth + self.depth % 2 else None

    def _init_weights(self) -> None:
        """As the original: Xavier, narrow embeddings; every gate and the prediction zero at first."""
        init_weights(self)
        for name, parameter in self.named_parameters():
            if name.startswith(("t_embedder", "y_embedder")) and name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02)
            elif self.zero_init and name.endswith("adaLN_modulation.1.weight"):
                nn.init.zeros_(parameter)
        if self.zero_init:
            nn.init.zeros_(self.final_layer.linear.weight)

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        names = "img_size patch_size in_chans embed_dim depth num_heads mlp_ratio norm_eps num_classes skips zero_init"
        fields = {name: getattr(self, name) for name in names.split()}
        return {"name": "sit", **fields, **asdict(self.shortcut.decay)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each sublayer in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Noisy images (B, C, H, W) -> stream (B, N, D); time and label enter the steps instead."""
        check_batch(x, t, self.in_chans, self.img_size)
        stream = self.x_embedder(patchify(x, self.patch_size)) + self.pos_embed
        return stream.to(stream_dtype(stream))

    def condition(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Times (B,) and labels (B,) -> conditioning (B, D)."""
        rows = label_index(y, self.num_classes, t)
        c = self.t_embedder(time_embedding(t, FREQUENCIES).to(self.pos_embed.dtype))
        return c if self.y_embedder is None else c + self.y_embedder(rows)

    def steps(self, t: Tensor | None = None, y: Tensor | None = None) -> list[Step]:
        """Two steps a block, attention, then MLP, under the conditioning of a batch.

        Without times they can be listed, but not computed.
        """
        return self._steps(None if t is None else self.condition(t, y))

    def _steps(self, c: Tensor | None) -> list[Step]:
        alpha = iter(self.shortcut.alpha.unbind(0))
        blocks: Any = self.blocks
        steps = []
        for i, block in enumerate(blocks):
            attn, mlp = (_unbound, _unbound) if c is None else block.branches(c)
            skip = None if block.skip is None else Skip(f"blocks.{self._mirror(i)}.mlp", block.join)
            steps.append(Step(f"blocks.{i}.attn", attn, next(alpha), skip=skip))
            steps.append(Step(f"blocks.{i}.mlp", mlp, next(alpha)))
        return scaled(steps, self.shortcut.decay.branch_scale)

    def _run(self, x: Tensor, t: Tensor, y: Tensor | None, tap: Tap | None) -> tuple[Tensor, Tensor]:
        """Tokens (B, N, D) after the last block, and the conditioning (B, D)."""
        stream, c = self.embed(x, t), self.condition(t, y)
        return walk(self._steps(c), stream, tap, None, recompute=self.grad_checkpointing), c

    def forward_features(self, x: Tensor, t: Tensor, y: Tensor | None = None, tap: Tap | None = None) -> Tensor:
        """Tokens (B, N, D) after the last block; the final norm belongs to the prediction."""
        return self._run(x, t, y, tap)[0]

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Noisy images (B, C, H, W), the process's time input (B,), labels (B,) -> prediction (B, C, H, W).

        Labels left out are "no label", as is the label `num_classes`.
        """
        tokens, c = self._run(x, t, y, None)
        return unpatchify(self.final_layer(tokens, c), self.patch_size, self.grid)


def _unbound(x: Tensor) -> NoReturn:
    raise RuntimeError("this branch depends on time and label: bind them, residua.stream(model, x_t, t, y)")
