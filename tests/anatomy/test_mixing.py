"""Equation 4: what is written into a stream sums to the stream, and shares do not depend on how it is written down."""

import pytest
import torch

import residua
from residua.export.fold import fold_vit
from residua.nn.stream import residual_part


@pytest.fixture
def vit():
    torch.manual_seed(0)
    model = residua.create_model("vit", img_size=8, patch_size=4, embed_dim=12, depth=3, num_heads=2, alpha_min=0.6)
    return model.double()


@pytest.fixture
def images():
    return torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_mixing_matrix_is_products_of_alphas(vit, images) -> None:
    W = residua.mixing(vit, images).W
    alphas = residua.stream(vit).alphas.double()
    for k in range(7):
        for i in range(7):
            expected = float(alphas[i:k].prod()) if i <= k else 0.0
            assert float(W[k, i]) == pytest.approx(expected, abs=1e-12)
    assert float(W[-1, 0]) == pytest.approx(residua.stream(vit).alpha_eff)


@pytest.mark.parametrize("centred", [True, False])
def test_shares_by_the_definition(vit, images, centred: bool) -> None:
    """Written out term by term, for patches alone."""
    mix = residua.mixing(vit, images, centred=centred)
    x = vit.requires_grad_(False).embed(images)
    terms = [x]
    for k, step in enumerate(vit.steps()):
        f = step.branch(x)
        x = step.alpha * x + f
        terms = [step.alpha * t for t in terms] + [f]
        for i, t in enumerate(terms):
            own, all_ = t[:, 1:], x[:, 1:]
            if centred:
                own, all_ = own - own.mean(0), all_ - all_.mean(0)
            share = float((own * all_).sum() / all_.square().sum())
            assert float(mix.shares[k + 1, i]) == pytest.approx(share, abs=1e-10)
    torch.testing.assert_close(mix.shares.sum(1), torch.ones(7, dtype=torch.float64))
    assert mix.echo == pytest.approx(float(mix.shares[-1, :3].sum()))  # the embedding and two of six sublayers
    assert mix.embedding == float(mix.shares[-1, 0])
    assert mix.depth == pytest.approx(sum(i * float(c) for i, c in enumerate(mix.shares[-1])) / 6)


def test_the_folded_network_is_made_of_the_same(vit, images) -> None:
    """Folding decay into weights changes W, to ones, and no share."""
    faded = residua.mixing(vit, images)
    plain = residua.create_model(**{**vit.config, "alpha_min": 1.0}).double()
    folded = fold_vit(vit)
    plain.load_state_dict(folded.state, strict=False)
    for norm, eps in zip((n for b in plain.blocks for n in (b.norm1, b.norm2)), folded.exact, strict=False):
        norm.eps = eps
    ordinary = residua.mixing(plain, images)
    assert bool((torch.ones(7, 7, dtype=torch.float64).tril() == ordinary.W).all())
    torch.testing.assert_close(ordinary.shares, faded.shares)


def test_batches_do_not_matter(vit, images, monkeypatch) -> None:
    whole = residua.mixing(vit, images)
    monkeypatch.setattr("residua.anatomy.mixing._BATCH", 2)
    torch.testing.assert_close(residua.mixing(vit, images).shares, whole.shares)


def test_an_autoencoder_is_its_encoder_and_keeps_its_mode(images) -> None:
    model = residua.create_model("mae_vit_nano", img_size=8, patch_size=4, alpha_min=0.7).train()
    mix = residua.mixing(model, images.float())
    assert mix.names[:3] == ["embedding", "blocks.0.attn", "blocks.0.mlp"]
    assert model.training
    assert len(mix.figure().axes) == 1
    torch.testing.assert_close(mix.shares, residua.mixing(residual_part(model), images.float()).shares)


def test_a_model_that_lies_is_found_out(vit, images) -> None:
    """The stream is scaled behind the back of its description."""
    before = residua.mixing(vit, images).shares
    real = vit.steps

    def lying():
        steps = real()
        object.__setattr__(steps[2], "__class__", type("Lie", (type(steps[2]),), {"__call__": _doubled}))
        return steps

    vit.steps = lying
    with pytest.raises(ValueError, match="instead of 1"):
        residua.mixing(vit, images)
    vit.steps = real
    torch.testing.assert_close(residua.mixing(vit, images).shares, before)


def _doubled(self, x):
    return 2 * (self.alpha * x + self.branch(x))


def test_refusals_say_why(vit, images) -> None:
    with pytest.raises(ValueError, match="two images or more"):
        residua.mixing(vit, images[:1])
    assert residua.mixing(vit, images[:1], centred=False).shares.shape == (7, 7)
    mlp = residua.create_model("resmlp", img_size=8, depth=4, width=8).double()
    with pytest.raises(ValueError, match=r"blocks\.0 is not x <- alpha x \+ f\(x\) alone"):
        residua.mixing(mlp, images)
    vit.blocks[0].mlp.fc2.bias.data[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        residua.mixing(vit, images)
