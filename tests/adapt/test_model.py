"""Models of one's own, however put together, wrapped or called: no block is missed, counted twice or misplaced."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import residua
from residua.adapt import Foreign, shortcuts, untrained
from residua.data import Preprocessing


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **size | options).eval()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Called(nn.Module):
    """Blocks of timm, called in an order of its own."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.patch, self.blocks, self.order = nn.Conv2d(3, 16, 8, 8), vit().blocks, order

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        for i in self.order:
            x = self.blocks[i](x)
        return x


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def alphas(model: nn.Module, *given: Any) -> list[float]:
    return [float(step.alpha) for step in residua.stream(model, *given)]


def evenly(n: int) -> Any:
    return pytest.approx(torch.linspace(1, 0.5, n).tolist())


def test_a_block_that_two_parents_share_is_one_block() -> None:
    a, b, c = vit().blocks
    model = nn.Sequential(nn.Sequential(a, b), nn.Sequential(c, a))
    residua.fade(model, alpha_min=0.5)
    assert alphas(model) == evenly(6)
    assert len(residua.stream(model, torch.randn(1, 4, 16))) == 8  # a runs twice


def test_an_example_tells_the_order_of_known_blocks(images: Tensor) -> None:
    model = Called(2, 0, 1)
    residua.fade(model, alpha_min=0.2)  # in the order of the modules
    residua.fade(model, alpha_min=0.5, example=images)
    assert alphas(model, images) == evenly(6)
    assert [step.name for step in residua.stream(model)][::2] == ["blocks.2.attn", "blocks.0.attn", "blocks.1.attn"]


def test_layers_are_numbered_as_they_are_called(images: Tensor) -> None:
    model: Any = Called(2, 0)
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    taps: dict[str, Tensor] = {}
    last = Foreign(model).forward_features(images, taps.__setitem__)
    assert list(taps) == ["blocks.0.mlp", "blocks.1.mlp"]
    first = model.blocks[2](model.patch(images).flatten(2).mT)
    torch.testing.assert_close(taps["blocks.0.mlp"], first)
    torch.testing.assert_close(last, model.blocks[0](first))


def test_a_stream_is_bound_by_name(images: Tensor) -> None:
    for named, given in zip(residua.stream(vit(), x=images), residua.stream(vit(), images), strict=True):
        assert named.input is not None
        assert torch.equal(named.input, given.input)


def test_a_dict_holds_named_arguments_or_is_the_batch() -> None:
    class Batch(nn.Sequential):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["x"])

    x = torch.randn(2, 8)
    for model, example in ((nn.Sequential(Block(), Block()), {"input": x}), (Batch(Block(), Block()), {"x": x})):
        assert alphas(residua.fade(model, alpha_min=0.5, example=example)) == evenly(2)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_model_is_the_model_inside(wrap: Any, images: Tensor) -> None:
    own = residua.create_model("mae_vit_tiny", img_size=32, patch_size=8, depth=2)
    for model in (own, vit()):
        wrapped = wrap(model)
        assert residua.fade(wrapped, alpha_min=0.5) is wrapped
        assert [step.name for step in residua.stream(wrapped)] == [step.name for step in residua.stream(model)]
        assert alphas(wrapped) == alphas(model)
        assert shortcuts(wrapped).alpha.min() == 0.5
        residua.unfade(wrapped)
        assert set(alphas(model)) == {1.0}


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapped_model_has_the_layers_of_the_model_inside(wrap: Any, images: Tensor) -> None:
    from torchvision.models import VisionTransformer

    stock: Any = VisionTransformer(32, 8, 2, 2, 16, 32).eval()
    for model in (vit(reg_tokens=4), stock):
        model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
        plain, wrapped = Foreign(model), Foreign(wrap(model))
        assert wrapped.num_prefix_tokens == plain.num_prefix_tokens > 0
        assert torch.equal(wrapped.forward_features(images), plain.forward_features(images))


def test_what_was_compiled_before_is_seen_all_the_same(images: Tensor) -> None:
    model = vit()
    model.compile(backend="eager")
    model(images)
    assert len(residua.stream(model, images)) == 6


def test_fading_all_after_a_part_reaches_the_rest() -> None:
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    x = torch.randn(2, 8)
    residua.fade(model[0], alpha_min=0.5, example=x)
    assert len(residua.stream(model, x)) == 4
    residua.fade(model, alpha_min=0.5, example=x)
    assert alphas(model) == evenly(4)
    residua.unfade(model)
    assert shortcuts(model[0]) is None


def test_a_model_without_weights_keeps_its_alphas() -> None:
    with torch.device("meta"):
        model = vit()
    residua.fade(model, alpha_min=0.5)
    assert alphas(model) == evenly(6)
    assert alphas(model.to_empty(device="cpu")) == evenly(6)


def test_the_untrained_twin_fades_as_far() -> None:
    model = vit()
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    residua.fade(model, alpha_min=0.5)
    shortcuts(model).set_strength(0.4)
    twin = untrained(model)
    assert alphas(twin) == alphas(model)
    shortcuts(twin).set_strength(1.0)
    assert min(alphas(model)) == pytest.approx(0.8)


def test_known_blocks_fade_on_meta_whatever_the_example() -> None:
    with torch.device("meta"):
        model = vit()
    residua.fade(model, alpha_min=0.5, example=torch.zeros(1, 3, 32, 32))
    assert float(shortcuts(model).alpha[-1]) == 0.5
