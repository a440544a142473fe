"""U-ViT (Bao et al. 2023, "All are Worth Words") whose shortcuts may fade. Parameter names are the original's."""

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.nn.conditioning import check_batch, label_index, time_embedding
from residua.nn.shortcut import Decay, Shortcuts
from residua.nn.stream import Skip, Step, Tap, scaled, walk
from residua.nn.vit import (
    Block,
    PatchEmbed,
    pair,
    patch_grid,
    patchify,
    stream_dtype,
    unpatchify,
    zero_init_branches,
)

UVITS: dict[str, dict[str, int]] = {
    "nano": {"embed_dim": 128, "depth": 4, "num_heads": 4},
    "tiny": {"embed_dim": 256, "depth": 8, "num_heads": 4},
    "small": {"embed_dim": 512, "depth": 12, "num_heads": 8},
    "mid": {"embed_dim": 768, "depth": 16, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 20, "num_heads": 16},
    "huge": {"embed_dim": 1152, "depth": 28, "num_heads": 16},
}
"""`depth` counts the blocks of both halves; the middle block comes on top."""


class OutBlock(Block):
    """A block of the second half: a stream of the first half joins its input."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, qkv_bias: bool, eps: float) -> None:
        super().__init__(dim, num_heads, mlp_ratio, qkv_bias, eps)
        self.skip_linear = nn.Linear(2 * dim, dim)

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        """`W [x; skip] + b`, as two products: nothing is concatenated, and nothing more is kept for backward."""
        w_stream, w_skip = self.skip_linear.weight.chunk(2, dim=1)
        return F.linear(x, w_stream, self.skip_linear.bias) + F.linear(skip, w_skip)


class UViT(nn.Module):
    """A transformer over label, time and patches, with long skips between its halves: `model(x_t, t, y)`.

    `depth / 2` blocks, a middle block, `depth / 2` blocks that each take the stream of their mirror image in,
    `x <- W [x; skip] + b`; final norm, linear layer to patches, 3 x 3 convolution. Decay runs over all `2 (depth + 1)`
    sublayers. `num_classes` makes it class-conditional, with one more label for "none". `alpha_min=1` with
    `zero_init=False` is the original, initial weights included.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 2,
        in_chans: int = 3,
        embed_dim: int = 512,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-5,
        num_classes: int | None = None,
        mlp_time_embed: bool = False,
        final_conv: bool = True,
        zero_init: bool = True,
        decay: Decay | None = None,
    ) -> None:
        super().__init__()
        if depth < 2 or depth % 2:
            raise ValueError(f"depth is {depth}; two equal halves need an even number (the middle block is extra)")
        if in_chans < 1 or (num_classes is not None and num_classes < 1):
            raise ValueError(
                f"in_chans {in_chans} and num_classes {num_classes} must be at least 1 (or None: no labels)"
            )
        self.img_size, self.patch_size = pair(img_size), pair(patch_size)
        self.grid = patch_grid(img_size, patch_size)
        self.in_chans, self.embed_dim, self.depth, self.num_heads = in_chans, embed_dim, depth, num_heads
        self.mlp_ratio, self.norm_eps, self.num_classes = mlp_ratio, norm_eps, num_classes
        self.mlp_time_embed, self.final_conv, self.zero_init = mlp_time_embed, final_conv, zero_init
        self.num_prefix_tokens = 1 if num_classes is None else 2
        self.grad_checkpointing = False
        self.preprocessing: Any = None

        self.shortcut = Shortcuts(decay or Decay(), depth + 1)
        self.patch_embed = PatchEmbed(self.patch_size, in_chans, embed_dim)
        self.time_embed = _time_mlp(embed_dim) if mlp_time_embed else nn.Identity()
        self.label_emb = None if num_classes is None else nn.Embedding(num_classes + 1, embed_dim)
        tokens = self.num_prefix_tokens + self.grid[0] * self.grid[1]
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, embed_dim))
        size = (embed_dim, num_heads, mlp_ratio, False, norm_eps)  # queries, keys and values without bias
        self.in_blocks = nn.ModuleList(Block(*size) for _ in range(depth // 2))
        self.mid_block = Block(*size)
        self.out_blocks = nn.ModuleList(OutBlock(*size) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.decoder_pred = nn.Linear(embed_dim, self.patch_size[0] * self.patch_size[1] * in_chans)
        self.final_layer = nn.Conv2d(in_chans, in_chans, 3, padding=1) if final_conv else nn.Identity()
        self._init_weights()

    def _init_weights(self) -> None:
        """As the original: normal matrices and positions of width 0.02, torch's own for the rest."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
        if self.zero_init:
            zero_init_branches(block for _, block in self._blocks())

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        names = "img_size patch_size in_chans embed_dim depth num_heads mlp_ratio norm_eps num_classes mlp_time_embed"
        fields = {name: getattr(self, name) for name in f"{names} final_conv zero_init".split()}
        return {"name": "uvit", **fields, **asdict(self.shortcut.decay)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each sublayer in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def _blocks(self) -> list[tuple[str, Any]]:
        first: Any = self.in_blocks
        last: Any = self.out_blocks
        return [
            *((f"in_blocks.{i}", block) for i, block in enumerate(first)),
            ("mid_block", self.mid_block),
            *((f"out_blocks.{i}", block) for i, block in enumerate(last)),
        ]

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Noisy images (B, C, H, W), times (B,), labels (B,) -> stream (B, T, D): label, time, patches."""
        check_batch(x, t, self.in_chans, self.img_size)
        rows = label_index(y, self.num_classes, t)
        time = self.time_embed(time_embedding(t, self.embed_dim).to(self.pos_embed.dtype))
        tokens = [time.unsqueeze(1), self.patch_embed(patchify(x, self.patch_size))]
        if self.label_emb is not None:
            tokens.insert(0, self.label_emb(rows).unsqueeze(1))
        stream = torch.cat(tokens, dim=1) + self.pos_embed
        return stream.to(stream_dtype(stream))

    def steps(self, *context: Any) -> list[Step]:
        """Two steps a block: attention, then MLP. Time and label are tokens, so steps do not depend on them."""
        alpha = iter(self.shortcut.alpha.unbind(0))
        half = self.depth // 2
        steps = []
        for i, (name, block) in enumerate(self._blocks()):
            skip = Skip(f"in_blocks.{self.depth - i}.mlp", block.join) if i > half else None
            steps.append(Step(f"{name}.attn", block.attn_branch, next(alpha), skip=skip))
            steps.append(Step(f"{name}.mlp", block.mlp_branch, next(alpha)))
        return scaled(steps, self.shortcut.decay.branch_scale)

    def forward_features(self, x: Tensor, t: Tensor, y: Tensor | None = None, tap: Tap | None = None) -> Tensor:
        """Tokens (B, T, D) after the last block and the final norm, in the order label, time, patches."""
        return self.norm(walk(self.steps(), self.embed(x, t, y), tap, None, recompute=self.grad_checkpointing))

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        """Noisy images (B, C, H, W), the process's time input (B,), labels (B,) -> prediction (B, C, H, W).

        Labels left out are "no label", as is the label `num_classes`.
        """
        tokens = self.forward_features(x, t, y)[:, self.num_prefix_tokens :]
        return self.final_layer(unpatchify(self.decoder_pred(tokens), self.patch_size, self.grid))


def _time_mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
