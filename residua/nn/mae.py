"""Masked autoencoder (He et al. 2022) around a ViT with fading shortcuts, with a plain or a U-shaped decoder."""

from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.nn.shortcut import Decay
from residua.nn.stream import Tap
from residua.nn.vit import (
    Block,
    ViT,
    expect_images,
    init_weights,
    pair,
    patch_grid,
    patchify,
    sincos_positions,
    stream_dtype,
    unpatchify,
    zero_init_branches,
)

DecoderKind = Literal["ushape", "plain"]

DECODERS: dict[str, dict[str, int]] = {
    "nano": {"decoder_embed_dim": 64, "decoder_depth": 3, "decoder_num_heads": 2},
    "tiny": {"decoder_embed_dim": 192, "decoder_depth": 8, "decoder_num_heads": 6},
    "small": {"decoder_embed_dim": 256, "decoder_depth": 8, "decoder_num_heads": 8},
    "base": {"decoder_embed_dim": 512, "decoder_depth": 8, "decoder_num_heads": 16},
    "large": {"decoder_embed_dim": 512, "decoder_depth": 8, "decoder_num_heads": 16},
}


class Encoded(NamedTuple):
    """What the encoder hands to the decoder. `ids_keep` holds the visible patches in the order of `latent`."""

    latent: Tensor
    """(B, 1 + V, D): class token and visible tokens after the last block (and final norm, if any)."""
    mask: Tensor
    """(B, N): 1 where a patch is hidden."""
    ids_keep: Tensor
    """(B, V)"""
    skips: list[Tensor]
    """Streams (B, 1 + V, D) for the decoder blocks, in the decoder's order; empty for the plain decoder."""


def random_masking(noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor]:
    """Keep the patches of smallest noise (B, N): their indices (B, V) by rising noise, and the mask (B, N)."""
    b, n = noise.shape
    keep = int(n * (1 - mask_ratio))
    ids_keep = noise.argsort(dim=1, stable=True)[:, :keep]
    return ids_keep, torch.ones(b, n, device=noise.device).scatter(1, ids_keep, 0.0)


def restore(visible: Tensor, mask_token: Tensor, ids_keep: Tensor, n: int) -> Tensor:
    """Put visible tokens (B, 1 + V, D) in image order and the mask token (D) elsewhere: (B, 1 + n, D)."""
    b, _, d = visible.shape
    index = F.pad(ids_keep + 1, (1, 0)).unsqueeze(-1).expand(-1, -1, d)
    canvas = mask_token.to(visible.dtype).expand(b, 1 + n, d)
    return canvas.scatter(1, index, visible)


def one_prefix(x: Tensor, prefix: int) -> Tensor:
    """Tokens with the one class token that the decoder expects: others are left out, a missing one is the mean."""
    if prefix == 1:
        return x
    return torch.cat([x[:, :1] if prefix else x.mean(1, keepdim=True), x[:, prefix:]], dim=1)


class SkipFusion(nn.Module):
    """Adds an encoder stream to the decoder's: `x + W2 silu(W1 [x; skip] + b1) + b2`, W2 zero at first.

    W1 acts on the visible tokens before they are put back in image order, and once on the mask token, which is
    in encoder width: the same function as concatenating first, for a quarter of the work at mask ratio 0.75.
    """

    def __init__(self, dim: int, skip_dim: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(skip_dim))
        self.fc1 = nn.Linear(dim + skip_dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.dim = dim

    def forward(self, x: Tensor, skip: Tensor, ids_keep: Tensor) -> Tensor:
        w_stream, w_skip = self.fc1.weight[:, : self.dim], self.fc1.weight[:, self.dim :]
        hidden = restore(F.linear(skip, w_skip), F.linear(self.mask_token, w_skip), ids_keep, x.shape[1] - 1)
        return x + self.fc2(F.silu(F.linear(x, w_stream, self.fc1.bias) + hidden))


class Decoder(nn.Module):
    """Ordinary transformer blocks over all patches. Plain: latent and mask tokens in. U-shaped: skips in."""

    pos_embed: Tensor

    def __init__(
        self,
        kind: DecoderKind,
        grid: tuple[int, int],
        encoder_dim: int,
        patch_dim: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        skips: int,
        mlp_ratio: float,
        norm_eps: float,
        zero_init: bool,
    ) -> None:
        super().__init__()
        self.kind = kind
        ushape = kind == "ushape"
        self.embed = nn.Linear(embed_dim if ushape else encoder_dim, embed_dim)
        # one learned token: the class token of the U-shaped decoder, the mask token of the plain one
        self.token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.register_buffer("pos_embed", sincos_positions(grid, embed_dim))
        self.skips = nn.ModuleList(SkipFusion(embed_dim, encoder_dim) for _ in range(skips))
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio, eps=norm_eps) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        self.pred = nn.Linear(embed_dim, patch_dim)

        init_weights(self)
        nn.init.normal_(self.token, std=0.02)
        fusions: Any = self.skips
        for fusion in fusions:
            nn.init.normal_(fusion.mask_token, std=0.02)
        if zero_init:
            zero_init_branches(self.blocks)
            nn.init.zeros_(self.pred.weight)
            for fusion in fusions:
                nn.init.zeros_(fusion.fc2.weight)

    def start(self, encoded: Encoded) -> Tensor:
        """The decoder's stream before its first block, (B, 1 + N, D)."""
        b, n = encoded.mask.shape
        if self.kind == "ushape":
            # [0]: without it the token's gradient is a view of all positions', which several processes warn of
            x = self.embed(self.pos_embed + F.pad(self.token[0], (0, 0, 0, n)))
            return x.to(stream_dtype(x)).expand(b, -1, -1)
        x = restore(self.embed(encoded.latent), self.token[0, 0], encoded.ids_keep, n) + self.pos_embed
        return x.to(stream_dtype(x))

    def forward(self, encoded: Encoded) -> Tensor:
        """Predicted patches (B, N, P)."""
        x = self.start(encoded)
        for i, block in enumerate(self.blocks):
            if i < len(self.skips):
                x = self.skips[i](x, encoded.skips[i], encoded.ids_keep)
            x = block(x)
        return self.pred(self.norm(x[:, 1:]))


class MAE(nn.Module):
    """Hide most patches, encode the rest, reconstruct the hidden ones; `loss, pred, mask = model(images)`.

    `decoder="plain"` with `alpha_min=1` is the autoencoder of He et al. The U-shaped decoder has no view of
    the encoder's output but through skips from every other encoder block, deepest first, starting with the last.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        decoder: DecoderKind = "ushape",
        decoder_embed_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        mask_ratio: float = 0.75,
        norm_pix: bool = True,
        zero_init: bool | None = None,
        decay: Decay | None = None,
        encoder: ViT | None = None,
    ) -> None:
        """`encoder`: one that is there already, whose sizes and shortcuts then hold."""
        super().__init__()
        if decoder not in ("ushape", "plain"):
            raise ValueError(f"decoder is {decoder!r}; choose 'ushape' or 'plain'")
        ushape = decoder == "ushape"
        zero_init = ushape if zero_init is None else zero_init
        self.encoder = encoder or ViT(
            img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio, norm_eps,
            final_norm=not ushape, zero_init=zero_init, decay=decay,
        )  # fmt: skip
        if encoder is not None:
            img_size, patch_size, in_chans = encoder.img_size, encoder.patch_size, encoder.in_chans
            embed_dim, depth = encoder.embed_dim, encoder.depth
        self.patch_size, self.mask_ratio, self.norm_pix = pair(patch_size), mask_ratio, norm_pix
        self.zero_init = zero_init
        grid = patch_grid(img_size, patch_size)
        n = grid[0] * grid[1]
        if not 0 < int(n * (1 - mask_ratio)) < n:
            raise ValueError(f"mask_ratio {mask_ratio} of {n} patches hides none or all: choose one strictly between")
        self.skip_blocks = list(range(depth - 1, -1, -2))[: min(decoder_depth, (depth + 1) // 2)] if ushape else []
        patch_dim = self.patch_size[0] * self.patch_size[1] * in_chans
        if norm_pix and patch_dim == 1:
            raise ValueError("a patch of one value has no variance to normalise: use larger patches or norm_pix=False")
        self.decoder = Decoder(
            decoder, grid, embed_dim, patch_dim, decoder_embed_dim, decoder_depth, decoder_num_heads,
            len(self.skip_blocks), mlp_ratio, norm_eps, zero_init,
        )  # fmt: skip
        self.decoder_size = (decoder_embed_dim, decoder_depth, decoder_num_heads)
        self.preprocessing: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        encoder = {k: v for k, v in self.encoder.config.items() if k not in ("final_norm", *asdict(Decay()))}
        width, depth, heads = self.decoder_size
        own = {
            "name": f"mae_{self.encoder.config['name']}",
            "zero_init": self.zero_init,
            "decoder": self.decoder.kind,
            "decoder_embed_dim": width,
            "decoder_depth": depth,
            "decoder_num_heads": heads,
            "mask_ratio": self.mask_ratio,
            "norm_pix": self.norm_pix,
        }
        return {**encoder, **own, **asdict(self.encoder.shortcut.decay)}

    @property
    def num_patches(self) -> int:
        return self.encoder.grid[0] * self.encoder.grid[1]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.encoder.set_grad_checkpointing(enable)

    def forward_encoder(self, images: Tensor, noise: Tensor | None = None, tap: Tap | None = None) -> Encoded:
        """Encode the visible patches. `noise` (B, N) decides which: those of smallest noise."""
        return self._encode(patchify(images, self.patch_size), noise, tap)

    def _encode(self, patches: Tensor, noise: Tensor | None, tap: Tap | None = None) -> Encoded:
        encoder = self.encoder
        if noise is None:
            noise = torch.rand(patches.shape[:2], device=patches.device)
        ids_keep, mask = random_masking(noise, self.mask_ratio)
        # only visible patches are embedded, and no gradient has to find its way back through the selection
        visible = patches.gather(1, ids_keep.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        x = encoder.embed_patches(visible, encoder.positions(encoder.grid)[0, encoder.num_prefix_tokens :][ids_keep])
        wanted = {f"blocks.{i}.mlp": slot for slot, i in enumerate(self.skip_blocks)}
        skips = [x] * len(wanted)

        def keep(name: str, stream: Tensor) -> None:
            if name in wanted:
                skips[wanted[name]] = stream
            if tap is not None:
                tap(name, stream)

        latent = encoder.norm(encoder.run(x, keep))
        latent, *skips = (one_prefix(stream, encoder.num_prefix_tokens) for stream in (latent, *skips))
        return Encoded(latent, mask, ids_keep, skips)

    def forward_decoder(self, encoded: Encoded) -> Tensor:
        """Predicted patches (B, N, ph * pw * C)."""
        return self.decoder(encoded)

    def forward_loss(self, images: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        """Mean squared error over the hidden patches."""
        return self._loss(patchify(images, self.patch_size), pred, mask)

    def _loss(self, target: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        target = target.float()
        if self.norm_pix:
            var, mean = torch.var_mean(target, dim=-1, keepdim=True)
            target = (target - mean) / (var + 1e-6).sqrt()
        error = (pred.float() - target).square().mean(dim=-1)
        return (error * mask).sum() / mask.sum()

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, predicted patches (B, N, P) and mask (B, N; 1 = hidden)."""
        expect_images(images, self.encoder.in_chans, self.encoder.img_size)
        patches = patchify(images, self.patch_size)
        encoded = self._encode(patches, noise)
        pred = self.forward_decoder(encoded)
        return self._loss(patches, pred, encoded.mask), pred, encoded.mask

    @torch.no_grad()
    def reconstruct(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Images with hidden patches filled in, un-normalised, and the mask as an image (B, 1, H, W)."""
        patches = patchify(images, self.patch_size)
        _, pred, mask = self(images, noise)
        if self.norm_pix:
            var, mean = torch.var_mean(patches, dim=-1, keepdim=True)
            pred = pred * (var + 1e-6).sqrt() + mean
        filled = torch.where(mask.unsqueeze(-1) > 0, pred.to(patches.dtype), patches)
        shown = mask.unsqueeze(-1).expand(-1, -1, self.patch_size[0] * self.patch_size[1])
        grid = self.encoder.grid
        return unpatchify(filled, self.patch_size, grid), unpatchify(shown, self.patch_size, grid)
