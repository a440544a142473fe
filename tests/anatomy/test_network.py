"""The laws on networks: blocks bound as the forward pass has them, and derivatives that are those of the network."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import residua
from residua.anatomy import Block, NotDifferentiable, alignment, dense_jacobian, jacobian, jacobian_svd, measure
from residua.anatomy.network import bind, block_of, twin_of
from residua.nn.stream import Step


@pytest.fixture
def vit():
    torch.manual_seed(0)
    return residua.create_model("vit", img_size=8, patch_size=4, embed_dim=12, depth=3, num_heads=2, alpha_min=0.6)


def test_blocks_are_the_steps_and_their_jacobians_those_of_the_network(vit) -> None:
    vit = vit.double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    bound = bind(vit, x)
    assert [b.name for b in bound.blocks] == [step.name for step in residua.stream(vit)]
    assert bound.left_out == []
    block = bound.blocks[3]
    step = residua.stream(vit)[3]
    whole = dense_jacobian(step.__call__, block.x)  # of alpha x + f(x)
    eye = torch.eye(whole.shape[1], dtype=whole.dtype)
    torch.testing.assert_close(dense_jacobian(block.branch, block.x), whole - block.alpha * eye)
    torch.testing.assert_close(bound.end, step_through(vit, x))


def step_through(vit, x):
    stream = vit.embed(x)
    for step in vit.steps():
        stream = step(stream)
    return stream


def test_one_token_is_a_block_of_the_whole_jacobian(vit) -> None:
    vit = vit.double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    whole = dense_jacobian(bind(vit, x).blocks[0].branch, bind(vit, x).blocks[0].x)
    bound = bind(vit, x, token=1)
    part = bound.blocks[0]
    torch.testing.assert_close(dense_jacobian(part.branch, part.x), whole[:, 12:24, 12:24])
    assert [block.alpha for block in bound.blocks] == vit.shortcut.alpha.tolist()
    torch.testing.assert_close(bound.end, step_through(vit, x)[:, 1])


def test_post_activation_blocks_are_masked() -> None:
    torch.manual_seed(0)
    net = residua.create_model("resnet18", img_size=8, num_classes=3, width=4, stages=(3, 1, 1, 1), alpha_min=0.7)
    net = net.double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    bound = bind(net, x)
    assert [b.name for b in bound.blocks] == ["layer1.0", "layer1.1", "layer1.2"]
    assert bound.left_out == ["layer2.0", "layer3.0", "layer4.0"]
    torch.testing.assert_close(bound.end, residua.stream(net, x)[3].input)
    block, step = bound.blocks[1], residua.stream(net)[1]
    pre = block.alpha * block.x + step.branch(block.x)
    on = (pre > 0).flatten(1).double()
    out = dense_jacobian(lambda z: F.relu(block.alpha * z + step.branch(z)), block.x)
    # d out / dx = diag(on) (alpha I + dF): the masked branch is what is left without the shortcut
    eye = torch.eye(on.shape[1], dtype=on.dtype)
    torch.testing.assert_close(
        dense_jacobian(block.branch, block.x), out - block.alpha * on[:, :, None] * eye, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("name", ["vit", "resmlp"])
def test_the_jacobian_of_a_step_is_that_of_what_it_adds(name: str) -> None:
    torch.manual_seed(0)
    size = {"patch_size": 4, "embed_dim": 12, "num_heads": 2} if name == "vit" else {"width": 12}
    net = residua.create_model(name, img_size=8, depth=2, alpha_min=0.6, **size).double().eval().requires_grad_(False)
    step = residua.stream(net, torch.randn(2, 3, 8, 8, dtype=torch.float64))[-1]
    assert step.input is not None
    summed = step.alpha * step.input + step.branch(step.input)
    passed = summed > 0 if name == "resmlp" else torch.ones_like(summed)
    kept = step.alpha * torch.diag_embed(passed.flatten(1).double())  # what the shortcut has in the whole
    expected = dense_jacobian(step.__call__, step.input) - kept
    torch.testing.assert_close(dense_jacobian(step, step.input), expected)
    torch.testing.assert_close(jacobian_svd(step, step.input, 5).S, torch.linalg.svdvals(expected)[:, :5])


def test_blocks_that_change_the_shape_are_masked_by_their_projection() -> None:
    torch.manual_seed(0)
    net = residua.create_model("resconv_down", img_size=8, num_classes=3, depth=4, width=4, alpha_min=0.7)
    net = net.double().eval()
    step = residua.stream(net, torch.randn(2, 3, 8, 8, dtype=torch.float64))[2]
    block = block_of(step)
    out = step(step.input)
    on = (out > 0).flatten(1).double()
    whole, kept = dense_jacobian(step.__call__, block.x), dense_jacobian(step.shortcut, block.x)
    assert whole.shape == (2, 8 * 4 * 4, 4 * 8 * 8)
    expected = whole - block.alpha * on[:, :, None] * kept
    torch.testing.assert_close(dense_jacobian(block.branch, block.x), expected, rtol=1e-9, atol=1e-11)
    found = jacobian_svd(block.branch, block.x, 5, method="lanczos")
    torch.testing.assert_close(found.S, torch.linalg.svdvals(expected)[:, :5])
    laws = bind(net, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert laws.left_out == ["blocks.2", "blocks.3"]
    assert jacobian_svd(laws.others[0].branch, laws.others[0].x, 5).converged.all()


def test_alignment_of_a_network_leaves_it_alone_and_scales_with_the_gauge(vit) -> None:
    vit.train()
    before = {k: v.clone() for k, v in vit.state_dict().items()}
    images = torch.randn(3, 3, 8, 8)
    laws = alignment(vit, images, k=5, classes=2)
    assert vit.training
    assert vit.cls_token.dtype == torch.float32
    assert all(torch.equal(v, before[k]) for k, v in vit.state_dict().items())
    assert laws.S.shape == (3, 6, 5)
    assert laws.converged == 1
    first = bind(vit.double().eval(), images.double()).blocks[0]
    torch.testing.assert_close(laws.S[:, 0], jacobian_svd(first.branch, first.x, 5).S)
    other = alignment(vit.float(), images, k=5, gauge="J/alpha")
    alphas = torch.tensor(laws.alphas, dtype=torch.float64)
    torch.testing.assert_close(other.S, laws.S / alphas[:, None], rtol=1e-5, atol=1e-9)
    assert set(laws.verdicts()) == {"RA1", "RA2", "RA3", "RA4"}
    assert "RA3" not in other.verdicts()
    own = laws.diagonal.diagonal(dim1=1, dim2=2)  # a block along its own vectors is diagonal
    torch.testing.assert_close(own, torch.ones_like(own), rtol=1e-9, atol=0)
    assert float(laws.coupling.diagonal(dim1=1, dim2=2).max()) < 1e-6


def test_a_block_without_derivative_is_named() -> None:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy().round())

    x = torch.randn(2, 6)
    with pytest.raises(NotDifferentiable, match="block second: the map cannot be differentiated"):
        measure([Block("first", torch.tanh, x), Block("second", rounded, x)], x, k=2)


def test_grids_are_the_same_by_matrices_and_by_products(vit, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 8, 8)
    formed = alignment(vit, images, k=5)
    monkeypatch.setattr(jacobian, "DENSE_ENTRIES", 0)
    applied = alignment(vit, images, k=5)
    torch.testing.assert_close(applied.S, formed.S)
    torch.testing.assert_close(applied.grid, formed.grid, rtol=0, atol=1e-6)
    torch.testing.assert_close(applied.swapped, formed.swapped, rtol=0, atol=1e-6)


def test_wrong_inputs(vit) -> None:
    with pytest.raises(ValueError, match=r"no residual blocks found.* x \+ F\(x\)"):
        alignment(torch.nn.Linear(2, 2), torch.randn(1, 2))
    net = residua.create_model("resnet18", img_size=8, num_classes=3, width=4)
    post = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    with pytest.raises(ValueError, match=r"cannot be read as x \+ F\(x\): .*post-norm"):
        alignment(post, torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match=r"0.mlp: its sum passes through a norm .*\(post-norm\)"):
        block_of(Step("0.mlp", nn.Identity(), torch.ones(()), after=nn.LayerNorm(8), input=torch.randn(1, 5, 8)))
    with pytest.raises(ValueError, match="precision is 'half'"):
        alignment(vit, torch.randn(1, 3, 8, 8), precision="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token 0 was asked for"):
        alignment(net, torch.randn(1, 3, 8, 8), token=0)
    with pytest.raises(ValueError, match="token 5 was asked for; there are 5, 0 to 4"):
        alignment(vit, torch.randn(1, 3, 8, 8), token=5)
    with pytest.raises(ValueError, match="at least two"):
        alignment(residua.create_model("resnet18", img_size=8, width=4, stages=(1, 1, 1, 1)), torch.randn(1, 3, 8, 8))


def test_the_number_of_classes_is_the_networks_or_that_of_the_labels(vit) -> None:
    net = residua.create_model("resmlp", img_size=4, num_classes=5, depth=3, width=12)
    images, labels = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 2])
    assert alignment(net, images, labels, k=6).classes == 5  # these images are of three of them
    assert alignment(net, images, k=6).classes == 5
    assert alignment(net, images, labels, k=6, classes=2).classes == 2
    assert alignment(vit, torch.randn(4, 3, 8, 8), labels, k=5).classes == 3
    assert alignment(vit, torch.randn(4, 3, 8, 8), k=5).classes is None
    with pytest.raises(ValueError, match="no images"):
        alignment(net, images[:0], k=5)


KINDS: dict[str, dict[str, Any]] = {
    "resmlp": {"depth": 3, "width": 40},
    "resconv": {"depth": 2, "width": 4},
    "resconv_down": {"depth": 4, "width": 4},
    "resnet18": {"width": 4, "stages": (2, 1, 1, 1)},
    "resnet50": {"width": 4, "stages": (1, 2, 1, 1)},
    "vit": {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "zero_init": False},
    "uvit": {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "zero_init": False},
}


@pytest.mark.parametrize("alpha_min", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_every_block_of_every_network_against_a_dense_decomposition(kind: str, alpha_min: float) -> None:
    torch.manual_seed(1)
    net = residua.create_model(kind, img_size=8, alpha_min=alpha_min, **KINDS[kind]).double().eval()
    context = [torch.tensor([100.0, 500.0]).double()] if kind == "uvit" else []
    bound = bind(net, torch.randn(2, 3, 8, 8, dtype=torch.float64), *context)
    for block in [*bound.blocks, *bound.others]:
        k = 5
        found, dense = jacobian_svd(block.branch, block.x, k, method="lanczos"), dense_jacobian(block.branch, block.x)
        u, s, vh = torch.linalg.svd(dense, full_matrices=False)
        torch.testing.assert_close(found.S, s[:, :k], rtol=1e-6, atol=1e-9)
        mine = found.U.flatten(2), found.V.flatten(2)
        near = 1e-5 * float(s.max())
        torch.testing.assert_close(mine[1] @ dense.mT, found.S[..., None] * mine[0], rtol=0, atol=near)
        torch.testing.assert_close(mine[0] @ dense, found.S[..., None] * mine[1], rtol=0, atol=near)
        for b in range(2):
            gaps = s[b, :k] - s[b, 1 : k + 1]
            top = int(gaps.argmax()) + 1  # above the widest gap a subspace is well defined
            for own, exact in zip(mine, (u.mT, vh)):
                a, e = own[b, :top], exact[b, :top]
                torch.testing.assert_close(a.T @ a, e.T @ e, rtol=0, atol=1e-4)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Told(nn.Module):
    """Somebody's network that takes whole numbers beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(4, 6), nn.Sequential(*(Residual() for _ in range(3)))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.blocks(x + self.embed(t))


def test_what_others_networks_take_is_not_taken_for_labels() -> None:
    torch.manual_seed(0)
    x, net = torch.randn(2, 6), Told()
    found = [alignment(net, x, torch.tensor([t, t]), k=2) for t in (0, 3)]
    assert found[0].classes is None
    with pytest.raises(ValueError, match=r"Sequential cannot be called with .* classes="):
        alignment(net.blocks, x, torch.tensor([0, 1]), k=2)
    assert not torch.allclose(found[0].S, found[1].S)


def test_a_network_that_does_nothing_yet_is_said_to() -> None:
    net = nn.Sequential(*(Residual() for _ in range(3)))
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(ValueError, match="every Jacobian is zero"):
        alignment(net, torch.randn(2, 6), k=2)


def test_a_block_with_nan_is_named() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Residual() for _ in range(3)))
    images = torch.randn(2, 6)
    residua.fade(net, alpha_min=1.0, example=images)  # its blocks are known from then on
    net[1].fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"block 1: .*are there NaN in the weights"):
        alignment(net, images, k=2)


SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}


def test_a_masked_autoencoder_of_transformers_sees_whole_images_in_order() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformers.ViTMAEModel(transformers.ViTMAEConfig(image_size=16, mask_ratio=0.75, **SMALL)).eval()
    images = torch.randn(2, 3, 16, 16)
    first, again = (alignment(net, images, k=3, token=5) for _ in range(2))
    assert torch.equal(first.S, again.S)
    block = bind(twin_of(net, "float64"), images.double()).blocks[0]
    assert block.x.shape == (2, 17, 12)
    patches = net.double().embeddings.patch_embeddings(images.double())
    torch.testing.assert_close(block.x[:, 1:], patches + net.embeddings.position_embeddings[:, 1:])
    assert net.config.mask_ratio == 0.75


def test_a_transformer_of_transformers_takes_other_image_sizes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformers.ViTModel(transformers.ViTConfig(image_size=8, **SMALL)).eval()
    assert bind(net, torch.randn(1, 3, 8, 8)).end.shape == (1, 5, 12)
    images = torch.randn(1, 3, 8, 16)
    own = net(images, interpolate_pos_encoding=True, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(bind(net, images).end, own)


def test_a_language_model_is_measured_at_its_tokens() -> None:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=8)).eval()
    tokens = torch.randint(20, (2, 5))
    laws = alignment(model, tokens, k=3)
    step = residua.stream(model.double(), tokens)[1]
    assert step.input is not None
    own = dense_jacobian(step.branch, step.input.detach())
    torch.testing.assert_close(laws.S[:, 1], torch.linalg.svdvals(own)[:, :3])
