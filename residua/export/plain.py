"""What the weights of an encoder compute, in PyTorch alone: checks run this text without this package."""

import torch
import torch.nn.functional as F
from torch import Tensor


def tokens(state: dict[str, Tensor], images: Tensor, heads: int, eps: float, branch_scale: float = 1.0) -> Tensor:
    """Images (B, C, H, W) -> tokens (B, 1 + N, D): `x <- alpha_k x + f_k(x)` over attention and MLP in turn."""
    w = {name.removeprefix("encoder."): value for name, value in state.items() if not name.startswith("decoder.")}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    patch = w["patch_embed.proj.weight"]
    x = F.conv2d(images, patch, w["patch_embed.proj.bias"], stride=patch.shape[2:]).flatten(2).transpose(1, 2)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], dim=1) + w["pos_embed"]
    for k, alpha in enumerate(w["shortcut.alpha"]):
        block = f"blocks.{k // 2}"
        if k % 2 == 0:
            qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").unflatten(-1, (3, heads, -1))
            mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
            f = linear(mixed.transpose(1, 2).flatten(2), f"{block}.attn.proj")
        else:
            f = linear(F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
        x = alpha * x + branch_scale * f
    return norm(x, "norm") if "norm.weight" in w else x
