"""Vision transformer whose shortcuts may fade. Parameter names are timm's and facebookresearch/mae's."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from residua.nn.attention import attention
from residua.nn.shortcut import Decay, Shortcuts
from residua.nn.stream import Step, Tap, scaled, walk

SIZES: dict[str, dict[str, int]] = {
    "nano": {"embed_dim": 128, "depth": 6, "num_heads": 4},
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}


def pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def patch_grid(img_size: int | tuple[int, int], patch_size: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches, or a clear error."""
    (height, width), (ph, pw) = pair(img_size), pair(patch_size)
    if min(ph, pw) < 1:
        raise ValueError(f"patch size {ph} x {pw} must be positive")
    if height < ph or width < pw:
        raise ValueError(f"image size {height} x {width} is smaller than one patch ({ph} x {pw}): use smaller patches")
    if height % ph or width % pw:
        near = (round(height / ph) * ph, round(width / pw) * pw)
        raise ValueError(
            f"image size {height} x {width} is not divisible by patch size {ph} x {pw}; {near[0]} x {near[1]} would be"
        )
    return height // ph, width // pw


def expect_images(images: Tensor, in_chans: int, img_size: tuple[int, int] | None = None) -> None:
    """A batch of images, of this size where one is given, or a clear error."""
    if images.ndim != 4 or images.shape[1:] != (in_chans, *(img_size or images.shape[2:])):
        expected = ", ".join(map(str, ("batch", in_chans, *(img_size or ("h", "w")))))
        raise ValueError(f"images of shape {tuple(images.shape)} given; expected ({expected})")


def sincos_positions(grid: tuple[int, int], dim: int) -> Tensor:
    """Fixed 2-D sine-cosine positions with a zero row for the class token, (1, 1 + rows * cols, dim)."""
    if dim % 4:
        raise ValueError(f"embed_dim is {dim}; sine-cosine positions need a multiple of 4")
    omega = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, cols = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    angles = [axis.reshape(-1, 1) * omega for axis in (cols, rows)]
    table = torch.cat([wave(a) for a in angles for wave in (torch.sin, torch.cos)], dim=1)
    return torch.cat([torch.zeros(1, dim), table.float()]).unsqueeze(0)


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, C, H, W) -> (B, N, ph * pw * C), patches in row order, channels innermost."""
    b, c, height, width = images.shape
    ph, pw = patch_size
    grid = images.reshape(b, c, height // ph, ph, width // pw, pw)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, ph * pw * c)


def unpatchify(patches: Tensor, patch_size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Inverse of `patchify`: (B, N, ph * pw * C) -> (B, C, H, W)."""
    (ph, pw), (rows, cols) = patch_size, grid
    x = patches.reshape(patches.shape[0], rows, cols, ph, pw, -1)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(patches.shape[0], -1, rows * ph, cols * pw)


def stream_dtype(x: Tensor) -> torch.dtype:
    """Under autocast the residual stream runs in the autocast type: half the memory traffic of float32."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class PatchEmbed(nn.Module):
    """Patches to tokens. Kept as a convolution's weight, computed as a matrix product over given patches."""

    def __init__(self, patch_size: tuple[int, int], in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, N, ph * pw * C) -> (B, N, D)."""
        return F.linear(patches, self.proj.weight.permute(0, 2, 3, 1).flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} is not divisible by {num_heads} heads")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, d // self.num_heads)
        return self.proj(attention(qkv).reshape(b, n, d))


class Mlp(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm transformer block: two branches, to be added to the stream by whoever owns the stream."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = True, eps: float = 1e-6):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, qkv_bias)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def attn_branch(self, x: Tensor) -> Tensor:
        return self.attn(self.norm1(x))

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x))

    def forward(self, x: Tensor) -> Tensor:
        """The block with ordinary shortcuts."""
        x = x + self.attn_branch(x)
        return x + self.mlp_branch(x)


def init_weights(module: nn.Module) -> None:
    """Xavier-uniform matrices (a patch embedding counts as one), zero biases."""
    for m in module.modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(m.weight.data.flatten(1))
            if m.bias is not None:
                nn.init.zeros_(m.bias)


def zero_init_branches(blocks: Any) -> None:
    """Zero the last weight of every branch, so that the network starts as its shortcuts alone."""
    for block in blocks:
        nn.init.zeros_(block.attn.proj.weight)
        nn.init.zeros_(block.mlp.fc2.weight)


class ViT(nn.Module):
    """Class token, fixed 2-D sine-cosine positions, pre-norm blocks with fading shortcuts, optional final norm."""

    num_prefix_tokens = 1
    pos_embed: Tensor

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        final_norm: bool = True,
        zero_init: bool = False,
        decay: Decay | None = None,
    ) -> None:
        super().__init__()
        if depth < 1 or in_chans < 1:
            raise ValueError(f"depth {depth} and in_chans {in_chans} must be at least 1")
        self.img_size, self.patch_size = pair(img_size), pair(patch_size)
        self.grid = patch_grid(img_size, patch_size)
        self.in_chans, self.embed_dim, self.depth, self.num_heads = in_chans, embed_dim, depth, num_heads
        self.mlp_ratio, self.norm_eps, self.final_norm, self.zero_init = (
            mlp_ratio,
            norm_eps,
            final_norm,
            zero_init,
        )
        self.grad_checkpointing = False
        self.preprocessing: Any = None

        self.shortcut = Shortcuts(decay or Decay(), depth)
        self.patch_embed = PatchEmbed(self.patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.register_buffer("pos_embed", sincos_positions(self.grid, embed_dim))
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio, eps=norm_eps) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps) if final_norm else nn.Identity()

        init_weights(self)
        nn.init.normal_(self.cls_token, std=0.02)
        if zero_init:
            zero_init_branches(self.blocks)

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        names = "img_size patch_size in_chans embed_dim depth num_heads mlp_ratio norm_eps final_norm zero_init"
        fields = {name: getattr(self, name) for name in names.split()}
        return {"name": "vit", **fields, **asdict(self.shortcut.decay)}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each sublayer in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """(1, 1 + N, D) for a grid of patches, interpolated where it is not the one trained on."""
        if grid == self.grid:
            return self.pos_embed
        return resample_abs_pos_embed(self.pos_embed, list(grid), list(self.grid), num_prefix_tokens=1)

    def embed_patches(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Patches (B, N, P) and their positions -> stream (B, 1 + N, D) with the class token first."""
        cls = (self.cls_token + self.pos_embed[:, :1]).expand(patches.shape[0], -1, -1)
        x = torch.cat([cls, self.patch_embed(patches) + positions], dim=1)
        return x.to(stream_dtype(x))

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> stream (B, 1 + N, D) before the first step."""
        expect_images(images, self.in_chans)
        grid = patch_grid((images.shape[2], images.shape[3]), self.patch_size)
        return self.embed_patches(patchify(images, self.patch_size), self.positions(grid)[:, self.num_prefix_tokens :])

    def steps(self) -> list[Step]:
        """Two steps a block: attention, then MLP."""
        branches: list[tuple[str, Callable[[Tensor], Tensor]]] = []
        blocks: Any = self.blocks
        for i, block in enumerate(blocks):
            branches += [(f"blocks.{i}.attn", block.attn_branch), (f"blocks.{i}.mlp", block.mlp_branch)]
        steps = [Step(name, f, alpha) for (name, f), alpha in zip(branches, self.shortcut.alpha.unbind(0))]
        return scaled(steps, self.shortcut.decay.branch_scale)

    def run(self, x: Tensor, tap: Tap | None = None, keep: Tensor | None = None) -> Tensor:
        """Carry a stream through every step; the final norm is not applied.

        `keep` (B, 2 * depth) scales the branches image by image: drop path, with the draws made by the caller.
        """
        return walk(self.steps(), x, tap, keep, recompute=self.grad_checkpointing)

    def forward_features(self, images: Tensor, tap: Tap | None = None, keep: Tensor | None = None) -> Tensor:
        """Images -> tokens (B, 1 + N, D) after the last block and, where there is one, the final norm."""
        return self.norm(self.run(self.embed(images), tap, keep))

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images)
