"""A vision transformer with a head: what fine-tuning trains."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from residua.nn.vit import ViT

Readout = Literal["tokens", "patches", "cls"]


def pool(tokens: Tensor, readout: Readout, prefix: int = 1) -> Tensor:
    """Tokens (B, T, D) -> float32 features (B, D)."""
    match readout:
        case "cls":
            if prefix == 0:
                raise ValueError("there is no class token: read tokens or patches instead")
            return tokens[:, 0].float()
        case "patches":
            if tokens.shape[1] <= prefix:
                raise ValueError(f"of {tokens.shape[1]} tokens {prefix} come before the patches: read tokens instead")
            return tokens[:, prefix:].mean(1, dtype=torch.float32)
        case _:
            return tokens.mean(1, dtype=torch.float32)


class Classifier(nn.Module):
    """Encoder, read-out, LayerNorm, linear layer: `logits = model(images)`.

    The norm stands after the read-out, as in MAE's fine-tuning, and takes the place of the encoder's final norm.
    """

    def __init__(self, encoder: ViT, num_classes: int, readout: Readout = "patches") -> None:
        super().__init__()
        if readout not in get_args(Readout):
            raise ValueError(f"readout is {readout!r}; choose one of {', '.join(get_args(Readout))}")
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}; it must be at least 1")
        if encoder.final_norm:
            raise ValueError("a classifier brings its own norm: build the encoder with final_norm=False")
        self.encoder, self.num_classes = encoder, num_classes
        self.readout: Readout = readout
        self.norm = nn.LayerNorm(encoder.embed_dim, eps=encoder.norm_eps)
        self.head = nn.Linear(encoder.embed_dim, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=2e-5)
        nn.init.zeros_(self.head.bias)
        self.preprocessing: Any = None
        self.classes: list[str] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` that build this network again."""
        encoder = {key: value for key, value in self.encoder.config.items() if key != "final_norm"}
        return encoder | {"num_classes": self.num_classes, "readout": self.readout}

    @property
    def embed_dim(self) -> int:
        return self.encoder.embed_dim

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.encoder.set_grad_checkpointing(enable)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Which parameters make a layer, in timm's words: embedding, each block, and the head with its norm."""
        return {"stem": r"^encoder\.(?:\w+_token|patch_embed|pos_embed|norm_pre)", "blocks": r"^encoder\.blocks\.(\d+)"}

    def pooled(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Features (B, D) that the head sees. `keep` (B, 2 * depth) scales branches image by image."""
        tokens = self.encoder.forward_features(images, keep=keep)
        return self.norm(pool(tokens, self.readout, self.encoder.num_prefix_tokens))

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits (B, classes)."""
        return self.head(self.pooled(images, keep))
