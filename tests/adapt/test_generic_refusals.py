"""What stands around and inside of blocks found by structure: which module is the block, and which is in the way."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import residua
from residua.adapt import blocks_of

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Given(nn.Module):
    """A module that computes what it is told, of its linear layer and other modules."""

    def __init__(self, compute: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.compute, self.f = compute, nn.Linear(8, 8)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.compute(self, *args)


class Added(Given):
    def __init__(self) -> None:
        super().__init__(lambda self, x: x + self.f(x))


class Outer(Given):
    """Another class."""


def names(*modules: nn.Module) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [at.name for at in blocks_of(nn.Sequential(*modules), X)]


def refusal(*modules: nn.Module) -> str:
    with pytest.raises(ValueError, match="cannot be read as") as refused:
        blocks_of(nn.Sequential(*modules), X)
    return str(refused.value)


def test_a_row_of_blocks_is_its_blocks() -> None:
    def row() -> nn.Module:
        return Outer(lambda self, x: self.b(self.a(x)), a=Added(), b=Added())

    assert names(row(), row()) == ["0.a", "0.b", "1.a", "1.b"]


def test_what_adds_something_of_its_own_is_the_block() -> None:
    def outer() -> nn.Module:
        return Outer(lambda self, x: x + self.f(self.a(x)), a=Added())

    assert names(outer(), outer()) == ["0", "1"]
    with pytest.warns(UserWarning, match=r"2 blocks fade; Outer \(0\) add activations too"):
        assert [at.name for at in blocks_of(nn.Sequential(outer(), Added()), X)] == ["0.a", "1"]


def test_blocks_are_listed_as_they_are_called_and_what_is_not_called_last() -> None:
    known = timm.models.vision_transformer.Block(8, 2)
    model = Outer(lambda self, x: self.first(self.second(x)), idle=known, first=Added(), second=Added())
    assert [at.name for at in blocks_of(model, X)] == ["second", "first", "idle"]


def test_a_norm_around_blocks_is_not_in_their_way() -> None:
    two = nn.Sequential(Added(), Added())
    assert names(Outer(lambda self, x: self.norm(self.two(x)), two=two, norm=nn.LayerNorm(8))) == ["0.two.0", "0.two.1"]
    assert names(Added(), nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)), Added()) == ["0", "2"]


def test_what_a_block_has_inside_is_its_own_affair() -> None:
    def post() -> nn.Module:
        return Given(lambda self, x: torch.relu(x + self.f(x)))

    def block() -> nn.Module:
        return Outer(lambda self, x: x + self.f(self.inner(x)), inner=post())

    assert names(block(), block()) == ["0", "1"]


def test_two_streams_inside_of_a_block_or_without_weights_are_let_be() -> None:
    def attention() -> nn.Module:
        heads = Given(lambda self, q, k: (self.f(q), self.f(k)))
        return Outer(lambda self, x: x + self.f(sum(self.heads(x, x + 1))), heads=heads)

    assert names(attention(), attention()) == ["0", "1"]

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return self.act(q), self.act(k)

    rotating = Outer(lambda self, x: self.f(self.turn(x, self.f(x))[0]), turn=Rotated())
    assert names(rotating, Added(), Added()) == ["1", "2"]


def test_two_streams_around_known_blocks_are_let_be() -> None:
    known = timm.models.vision_transformer.Block(8, 2)
    two = Given(lambda self, x, z: (self.known(x), self.f(z)), known=known)
    assert names(Outer(lambda self, x: self.two(x, x + 1)[0], two=two), Added(), Added()) == ["0.two.known", "1", "2"]


def test_two_streams_that_cross_are_refused() -> None:
    crossing = Given(lambda self, x, z: (self.f(z), x * self.f(z)))
    assert "0.two, a" in (why := refusal(Outer(lambda self, x: self.two(x, x + 1)[0], two=crossing), Added(), Added()))
    assert "2 streams" in why


def test_the_innermost_module_at_fault_is_named() -> None:
    bent = Given(lambda self, x: torch.relu(x + self.f(x)))
    around = Outer(lambda self, x: self.bent(x), bent=bent)
    assert "0.bent, a" in refusal(around, nn.Sequential(Added(), Added()))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.999])
def test_one_of_a_class_that_differs_is_refused(share: float) -> None:
    class Scaled(Given):
        def __init__(self, share: float) -> None:
            super().__init__(lambda self, x: share * x + self.f(x))

    why = refusal(Scaled(1.0), Scaled(1.0), Scaled(share))
    assert "2, a" in why
    assert "others of its class map x to x + F(x), and this one does not: its shortcut is scaled already" in why
    assert f"returns {share:g} x" in why


@pytest.mark.parametrize(
    ("shortcut", "reason"),
    [
        (functional.silu, "post-activation, silu"),
        (functional.gelu, "post-activation, gelu"),
        (torch.sinh, "is not the identity"),
    ],
)
def test_other_shortcuts_are_refused(shortcut: Any, reason: str) -> None:
    assert reason in refusal(Outer(lambda self, x: shortcut(x + self.f(x))), Added(), Added())


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8), (5, 1)])
def test_a_learned_scale_of_any_shape_is_seen(shape: tuple[int, ...]) -> None:
    class Gated(Outer):
        def __init__(self) -> None:
            super().__init__(lambda self, x: self.gate * x + self.f(x))
            self.gate = nn.Parameter(torch.ones(shape))

    assert "a parameter scales its shortcut" in refusal(Gated(), Added(), Added())


def test_statistics_of_a_norm_without_weights_are_no_shortcut() -> None:
    def normed() -> nn.Module:
        norm = nn.BatchNorm1d(5, affine=False)
        nn.init.ones_(norm.running_mean)  # type: ignore[arg-type]
        return Outer(lambda self, x: x + self.norm(self.f(x)), norm=norm).eval()

    assert names(normed(), normed()) == ["0", "1"]


def test_looking_for_blocks_draws_no_random_numbers() -> None:
    def dropping() -> nn.Module:
        return Outer(lambda self, x: x + self.drop(self.f(x)), drop=nn.Dropout(0.5))

    modules, before = (dropping(), dropping()), torch.get_rng_state()
    assert names(*modules) == ["0", "1"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("count", "told"), [(3, "Outer (4) add"), (4, "Outer (4) and 1 more add")])
def test_of_many_sums_three_are_named(count: int, told: str) -> None:
    others = [Outer(lambda self, x: self.f(x) + self.f(x)) for _ in range(count)]
    with pytest.warns(UserWarning, match=re.escape(f"2 blocks fade; Outer (2), Outer (3), {told}")):
        residua.stream(nn.Sequential(Added(), Added(), *others), X)
