"""Attention weights against softmax(q k^T) by hand, and against what attention does with values."""

import pytest
import torch

from residua.evaluate.attention_maps import attention_weights, class_attention
from residua.nn import MAE, ViT


@pytest.mark.parametrize("block", [0, 1, 2])
def test_weights_are_softmax_of_q_k(vit: ViT, block: int) -> None:
    """By hand, a head and a pair of tokens at a time."""
    images = torch.rand(2, 3, 16, 16)
    found = attention_weights(vit, images, block)
    taps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        vit.forward_features(images, tap=taps.__setitem__)
        x = taps["embed" if block == 0 else f"blocks.{block - 1}.mlp"]
        owner = vit.blocks[block]
        q, k, _ = owner.attn.qkv(owner.norm1(x)).split(32, dim=-1)
    assert found.shape == (2, 2, 17, 17)
    for head in range(2):
        part = slice(16 * head, 16 * head + 16)
        for image, query in ((0, 0), (1, 9)):
            scores = torch.stack([q[image, query, part] @ k[image, t, part] / 4 for t in range(17)])
            by_hand = scores.exp() / scores.exp().sum()
            torch.testing.assert_close(found[image, head, query], by_hand)


def test_weights_times_values_are_the_blocks_own_attention(vit: ViT) -> None:
    images = torch.rand(2, 3, 16, 16)
    taps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        vit.forward_features(images, tap=taps.__setitem__)
        x, block = taps["blocks.1.mlp"], vit.blocks[2]
        v = block.attn.qkv(block.norm1(x)).split(32, dim=-1)[2].unflatten(-1, (2, 16)).transpose(1, 2)
        mixed = (attention_weights(vit, images) @ v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attn.proj(mixed), block.attn_branch(x))


def test_the_class_tokens_map_stands_where_the_patches_stand(mae: MAE) -> None:
    images = torch.rand(3, 1, 8, 12)  # 4 x 6 patches
    weights = attention_weights(mae, images)
    mean = class_attention(mae, images)
    assert mean.shape == (3, 4, 6)
    torch.testing.assert_close(mean.sum((1, 2)), 1 - weights.mean(1)[:, 0, 0])
    torch.testing.assert_close(class_attention(mae, images, head=1)[0, 2, 3], weights[0, 1, 0, 1 + 2 * 6 + 3])
    torch.testing.assert_close(class_attention(mae, images, head=0)[0, 2, 3], weights[0, 0, 0, 1 + 2 * 6 + 3])
    for head in (2, -1):
        with pytest.raises(ValueError, match=f"no head {head}: the block has 2, 0 to 1"):
            class_attention(mae, images, head=head)
    with pytest.raises(ValueError, match="no block 5"):
        class_attention(mae, images, block=5)
