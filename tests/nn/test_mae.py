"""The masked autoencoder against transformers', its U-shaped decoder against a plain definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import residua
from residua.nn import MAE
from residua.nn.mae import Encoded, SkipFusion, one_prefix, random_masking, restore
from residua.nn.vit import patchify
from residua.nn.weights import load_weights, translate

SMALL = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2,
    "decoder_embed_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2,
}  # fmt: skip


def build(**options: Any) -> MAE:
    model = residua.create_model("mae_vit", **SMALL | options)
    assert isinstance(model, MAE)
    return model


def shaken(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


# ---------------------------------------------------------------- the autoencoder of He et al.


@pytest.mark.parametrize("norm_pix", [True, False])
@pytest.mark.parametrize("mask_ratio", [0.75, 0.4])
def test_equals_transformers(norm_pix: bool, mask_ratio: float) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=128, decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, mask_ratio=mask_ratio, norm_pix_loss=norm_pix, layer_norm_eps=1e-6,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = shaken(transformers.ViTMAEForPreTraining(config))
    ours = build(depth=3, decoder="plain", norm_pix=norm_pix, mask_ratio=mask_ratio).eval()
    kept = load_weights(ours, translate(theirs.state_dict()), what="transformers")
    assert kept == ["encoder.shortcut.alpha"]

    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    with torch.no_grad():
        expected = theirs(images, noise=noise)
        latent = theirs.vit(images, noise=noise).last_hidden_state
        loss, pred, mask = ours(images, noise)
        encoded = ours.forward_encoder(images, noise)
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert torch.equal(mask, expected.mask)
    torch.testing.assert_close(encoded.latent, latent, **close)
    torch.testing.assert_close(pred, expected.logits, **close)
    torch.testing.assert_close(loss, expected.loss, **close)
    torch.testing.assert_close(ours.forward_loss(images, ours.forward_decoder(encoded), mask), loss)


def test_the_same_gradients_as_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=64, norm_pix_loss=True, layer_norm_eps=1e-6,
    )  # fmt: skip
    theirs = shaken(transformers.ViTMAEForPreTraining(config))
    ours = build(decoder="plain").eval()
    load_weights(ours, translate(theirs.state_dict()), what="transformers")
    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    ours(images, noise)[0].backward()
    theirs(images, noise=noise).loss.backward()
    grads = {name: torch.zeros_like(t) for name, t in theirs.state_dict().items()}
    grads |= {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    grads = translate(grads)
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------- masking and loss


@pytest.mark.parametrize(("n", "ratio", "visible"), [(16, 0.75, 4), (49, 0.75, 12), (196, 0.75, 49), (10, 0.6, 4)])
def test_as_many_patches_stay_as_the_ratio_says(n: int, ratio: float, visible: int) -> None:
    noise = torch.rand(5, n)
    ids_keep, mask = random_masking(noise, ratio)
    assert ids_keep.shape == (5, visible)
    assert (mask.sum(1) == n - visible).all()
    for row in range(5):
        smallest = sorted(range(n), key=lambda i, row=row: float(noise[row, i]))[:visible]
        assert ids_keep[row].tolist() == smallest
        assert (mask[row, smallest] == 0).all()


@pytest.mark.parametrize("ratio", [0.0, 1.0, 0.99, -0.5])
def test_a_ratio_that_hides_none_or_all_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="mask_ratio"):
        build(mask_ratio=ratio)


def test_the_variance_of_one_value_is_refused() -> None:
    with pytest.raises(ValueError, match="one value has no variance"):
        build(img_size=4, patch_size=1, in_chans=1)
    loss = build(img_size=4, patch_size=1, in_chans=1, norm_pix=False)(torch.randn(2, 1, 4, 4))[0]
    assert loss.isfinite()


def test_restore_puts_tokens_back_in_image_order() -> None:
    visible, ids_keep = torch.randn(2, 4, 8), torch.tensor([[3, 0, 5], [1, 2, 4]])
    token = torch.randn(8)
    out = restore(visible, token, ids_keep, 6)
    for b in range(2):
        assert torch.equal(out[b, 0], visible[b, 0])
        for place in range(6):
            where = ids_keep[b].tolist()
            expected = visible[b, 1 + where.index(place)] if place in where else token
            assert torch.equal(out[b, 1 + place], expected)


def test_the_decoder_gets_one_class_token_whatever_the_encoder_has() -> None:
    tokens = torch.randn(2, 7, 8)
    for prefix, first in ((0, tokens.sum(1) / 7), (1, tokens[:, 0]), (3, tokens[:, 0])):
        found = one_prefix(tokens, prefix)
        torch.testing.assert_close(found[:, 0], first)
        assert torch.equal(found[:, 1:], tokens[:, prefix:])


@pytest.mark.parametrize("norm_pix", [True, False])
def test_loss_is_the_mean_over_hidden_patches_only(norm_pix: bool) -> None:
    model = build(norm_pix=norm_pix)
    images, pred = torch.randn(2, 3, 16, 16), torch.randn(2, 16, 48)
    images[1] *= 1e-3  # flat patches, where eps is as large as the variance
    mask = (torch.rand(2, 16) < 0.7).float()
    target = patchify(images, (4, 4)).double()
    if norm_pix:
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    errors = [
        ((pred[b, i].double() - target[b, i]) ** 2).mean() for b in range(2) for i in range(16) if mask[b, i] == 1
    ]
    loss = model.forward_loss(images, pred, mask)
    assert float(loss) == pytest.approx(float(sum(errors) / len(errors)), rel=1e-5)
    elsewhere = pred + 100 * (1 - mask)[..., None] * torch.randn_like(pred)
    assert torch.equal(model.forward_loss(images, elsewhere, mask), loss)


def test_hidden_pixels_do_not_reach_the_encoder() -> None:
    model = shaken(build())
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    encoded = model.forward_encoder(images, noise)
    pixels = F.interpolate(encoded.mask.reshape(2, 1, 4, 4), scale_factor=4)
    other = model.forward_encoder(images + pixels * torch.randn_like(images), noise)
    assert torch.equal(encoded.latent, other.latent)


def test_wrong_images_are_refused() -> None:
    model = build()
    for shape in ((2, 1, 16, 16), (2, 3, 20, 16), (3, 16, 16)):
        with pytest.raises(ValueError, match=r"given; expected \(batch, 3, 16, 16\)"):
            model(torch.randn(shape))
    with pytest.raises(ValueError, match="choose 'ushape' or 'plain'"):
        build(decoder="unet")


@pytest.mark.parametrize("norm_pix", [True, False])
def test_reconstruct_keeps_what_was_visible(norm_pix: bool) -> None:
    model = shaken(build(norm_pix=norm_pix))
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    filled, mask = model.reconstruct(images, noise)
    assert mask.shape == (2, 1, 16, 16)
    assert mask.sum() == 2 * 12 * 16
    visible = (mask == 0).expand_as(images)
    assert torch.equal(filled[visible], images[visible])
    loss, _, hidden = model(images, noise)
    # in normalised pixels, what was filled in has the loss that was reported
    target, got = patchify(images, (4, 4)), patchify(filled, (4, 4))
    if norm_pix:
        std = (target.var(-1, keepdim=True) + 1e-6).sqrt()
        got, target = (got - target.mean(-1, keepdim=True)) / std, (target - target.mean(-1, keepdim=True)) / std
    error = (got - target).square().mean(-1)
    torch.testing.assert_close((error * hidden).sum() / hidden.sum(), loss)
    assert torch.equal(patchify(mask, (4, 4))[..., 0], hidden)


@pytest.mark.parametrize("decoder", ["ushape", "plain"])
@pytest.mark.parametrize("channels", [1, 4])
def test_any_channels_and_sides(decoder: Any, channels: int) -> None:
    model = build(img_size=(24, 16), patch_size=(8, 4), in_chans=channels, decoder=decoder, mask_ratio=0.5)
    loss, pred, _ = model(torch.randn(2, channels, 24, 16))
    assert pred.shape == (2, 12, 8 * 4 * channels)
    loss.backward()
    assert torch.isfinite(loss)
    filled, _ = model.reconstruct(torch.randn(2, channels, 24, 16))
    assert filled.shape == (2, channels, 24, 16)


# ---------------------------------------------------------------- the U-shaped decoder


def fuse_as_defined(fusion: SkipFusion, x: Tensor, skip: Tensor, ids_keep: Tensor) -> Tensor:
    """Put back in image order, concatenate, Linear, SiLU, Linear, add."""
    b, n = x.shape[0], x.shape[1]
    full = fusion.mask_token.expand(b, n, -1).clone()
    full[:, 0] = skip[:, 0]
    for row in range(b):
        full[row, 1 + ids_keep[row]] = skip[row, 1:]
    return x + fusion.fc2(F.silu(fusion.fc1(torch.cat([x, full], dim=-1))))


def test_skip_fusion_is_its_definition() -> None:
    fusion = shaken(SkipFusion(16, 24))
    x, skip = torch.randn(3, 10, 16), torch.randn(3, 5, 24)
    ids_keep = torch.stack([torch.randperm(9)[:4] for _ in range(3)])
    torch.testing.assert_close(
        fusion(x, skip, ids_keep), fuse_as_defined(fusion, x, skip, ids_keep), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("depth", "decoder_depth", "blocks"),
    [(12, 8, [11, 9, 7, 5, 3, 1]), (12, 4, [11, 9, 7, 5]), (6, 3, [5, 3, 1]), (2, 2, [1]), (5, 4, [4, 2, 0])],
)
def test_skips_come_from_every_other_block_deepest_first(depth: int, decoder_depth: int, blocks: list[int]) -> None:
    model = shaken(build(depth=depth, decoder_depth=decoder_depth, alpha_min=0.8))
    assert model.skip_blocks == blocks
    images, taps = torch.randn(2, 3, 16, 16), {}
    encoded = model.forward_encoder(images, tap=taps.__setitem__)
    assert len(encoded.skips) == len(model.decoder.skips) == len(blocks)
    for skip, block in zip(encoded.skips, blocks):
        assert torch.equal(skip, taps[f"blocks.{block}.mlp"])
    assert torch.equal(encoded.latent, taps[f"blocks.{depth - 1}.mlp"])  # no final norm


def test_u_shaped_decoder_is_its_definition() -> None:
    model = shaken(build(depth=4, decoder_depth=3))
    images = torch.randn(2, 3, 16, 16)
    encoded = model.forward_encoder(images)
    d = model.decoder
    start = d.pos_embed.clone()
    start[:, :1] += d.token
    x = d.embed(start).expand(2, -1, -1)
    for i, block in enumerate(d.blocks):
        if i < 2:
            x = fuse_as_defined(d.skips[i], x, encoded.skips[i], encoded.ids_keep)
        x = block(x)
    expected = d.pred(d.norm(x))[:, 1:]
    torch.testing.assert_close(model.forward_decoder(encoded), expected, rtol=1e-5, atol=1e-5)


def test_the_u_shaped_decoder_sees_nothing_but_skips() -> None:
    model = shaken(build())
    encoded = model.forward_encoder(torch.randn(2, 3, 16, 16))
    other = Encoded(torch.randn_like(encoded.latent), encoded.mask, encoded.ids_keep, encoded.skips)
    assert torch.equal(model.forward_decoder(encoded), model.forward_decoder(other))
    other = encoded._replace(skips=[torch.randn_like(s) for s in encoded.skips])
    assert not torch.allclose(model.forward_decoder(encoded), model.forward_decoder(other), atol=1e-3)


def test_zero_init() -> None:
    model = build(alpha_min=0.5)  # on by itself with the U-shaped decoder
    images = torch.randn(2, 3, 16, 16)
    last = [*model.encoder.blocks, *model.decoder.blocks]
    assert all((b.attn.proj.weight == 0).all() and (b.mlp.fc2.weight == 0).all() for b in last)
    assert all((s.fc2.weight == 0).all() for s in model.decoder.skips)
    encoded = model.forward_encoder(images)
    step = float(residua.alphas(2, 0.5).prod())
    taps: dict[str, Tensor] = {}
    model.forward_encoder(images, torch.rand(2, 16), tap=taps.__setitem__)
    torch.testing.assert_close(taps["blocks.1.mlp"], step * taps["embed"])
    pred = model.forward_decoder(encoded)
    assert torch.equal(pred, model.decoder.pred.bias.expand_as(pred))
    off = build(zero_init=False)
    assert all((b.attn.proj.weight != 0).any() and (b.mlp.fc2.weight != 0).any() for b in off.encoder.blocks)
    plain = build(decoder="plain")  # Xavier throughout
    assert (plain.decoder.pred.weight != 0).any()
    assert all((b.attn.proj.weight != 0).any() for b in [*plain.encoder.blocks, *plain.decoder.blocks])


@pytest.mark.parametrize("decoder", ["ushape", "plain"])
def test_tokens_start_with_maes_deviation(decoder: Any) -> None:
    model = build(decoder=decoder, embed_dim=512, decoder_embed_dim=512)
    tokens = [model.encoder.cls_token, model.decoder.token, *(skip.mask_token for skip in model.decoder.skips)]
    assert len(tokens) == (3 if decoder == "ushape" else 2)
    assert all(0.016 < float(token.detach().std()) < 0.024 for token in tokens)


@pytest.mark.parametrize("decoder", ["ushape", "plain"])
def test_every_parameter_learns(decoder: Any) -> None:
    model = shaken(build(decoder=decoder, depth=4, alpha_min=0.9))
    model(torch.randn(4, 3, 16, 16))[0].backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not (p.grad != 0).any()]
    assert unused == []


@pytest.mark.parametrize("decoder", ["ushape", "plain"])
def test_gradients_lie_in_memory_as_their_parameters(decoder: Any) -> None:
    """Several processes share gradients in place, and warn of others."""
    model = shaken(build(decoder=decoder))
    model(torch.randn(4, 3, 16, 16))[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.stride() != p.stride()] == []


@pytest.mark.parametrize("options", [{"alpha_eff": 0.2}, {"decoder": "plain", "norm_pix": False}])
def test_config_builds_the_model_again(options: dict[str, Any]) -> None:
    model = shaken(build(**options))
    again = residua.create_model(**model.config).eval()
    again.load_state_dict(model.state_dict())
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    for ours, theirs in zip(again(images, noise), model(images, noise)):
        assert torch.equal(ours, theirs)


def test_noise_defaults_to_fresh_chance() -> None:
    model, images = build(), torch.randn(4, 3, 16, 16)
    draw: Callable[[], Tensor] = lambda: model(images)[2]  # noqa: E731
    assert not torch.equal(draw(), draw())
