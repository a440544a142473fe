"""Blocks found by structure, however they are called and wherever they stand: what fades is what the steps say."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import residua
from residua.adapt import blocks_of
from residua.adapt.generic import strangers
from residua.nn.shortcut import Decay


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Biased(Added):
    """x + F(x) with a context, of which it hands on a part."""

    def forward(self, x: Tensor, bias: Tensor, gain: float) -> Any:
        return [x + self.f(x) * bias * gain, bias]


class Chain(nn.Module):
    """Modules one after another, called in a way of its own."""

    def __init__(self, call: Callable[..., Any], *blocks: nn.Module) -> None:
        super().__init__()
        self.call, self.blocks = call, nn.ModuleList(blocks)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x, *context)
        return x


CALLS: list[Callable[..., Any]] = [
    lambda block, x, bias: block(x, bias, 2.0)[0],
    lambda block, x, bias: block(x, bias, gain=2.0)[0],
    lambda block, x, bias: block(gain=2.0, bias=bias, x=x)[0],
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("decay", [{}, {"alpha_min": 0.5}, {"control": "branch"}, {"control": "both"}])
def test_steps_are_what_the_blocks_compute(call: Any, decay: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, bias = Chain(call, Biased(), Biased()), torch.randn(2, 5, 8), torch.randn(2, 5, 1)
    if decay:
        residua.fade(model, **decay, example=(x, bias))
    spec = Decay(**decay)
    steps = residua.stream(model, x, bias)
    y = x
    for block, alpha, step in zip(model.blocks, spec.alphas(2, 1).float(), steps, strict=True):
        torch.testing.assert_close(step.input, y)
        branch = spec.branch_scale * block.f(y) * bias * 2.0
        torch.testing.assert_close(step.branch(y), branch)
        y = alpha * y + branch
        torch.testing.assert_close(step(step.input), y)
    torch.testing.assert_close(model(x, bias), y)
    assert type(model.blocks[0](x, bias, 2.0)) is list


def test_every_check_has_the_context_of_the_run() -> None:
    class Caching(Added):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x)
            assert len(cache) <= 2, "no room"
            return x + self.f(x)

    model = Chain(lambda block, x: block(x, []), Caching(), Caching())
    assert len(blocks_of(model, torch.randn(2, 5, 8))) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_any_precision_are_found(dtype: torch.dtype) -> None:
    assert len(blocks_of(nn.Sequential(Added(), Added()).to(dtype), torch.randn(2, 5, 8, dtype=dtype))) == 2


def test_names_that_begin_alike_are_told_apart() -> None:
    known = timm.models.vision_transformer.Block(8, 2)
    for first, others in (("block1", ("block10", "block11")), ("block10", ("block1", "block2"))):
        model = nn.Sequential()
        for name, block in ((first, known), *((name, Added()) for name in others)):
            model.add_module(name, block)
        assert [at.name for at in blocks_of(model, torch.randn(2, 5, 8))] == [first, *others]


def test_known_blocks_stay_what_fades_where_their_surroundings_add_too() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.f = timm.models.vision_transformer.Block(8, 2), nn.Linear(8, 8)
            self.own = Added()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(self.own(self.block(x)))

    with pytest.warns(UserWarning, match=r"4 blocks fade; Stage \(0\), Stage \(1\) add activations too"):
        located = blocks_of(nn.Sequential(Stage(), Stage()), torch.randn(2, 5, 8))
    assert [at.name for at in located] == ["0.block", "0.own", "1.block", "1.own"]


def test_what_blocks_share_is_inside_of_them() -> None:
    class Outer(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.f = shared, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(self.shared(x))

    model: Any = Chain(lambda block, x: block(x))
    model.first = Added()  # listed before the blocks that use it
    model.blocks = nn.ModuleList([Outer(model.first), Outer(model.first)])
    model = nn.Sequential(model.first, model)
    assert [at.name for at in blocks_of(model, torch.randn(2, 5, 8))] == ["1.blocks.0", "1.blocks.1"]


def test_modules_without_parameters_are_not_in_the_way() -> None:
    class Bend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    model = nn.Sequential(Added(), Bend(), Added())
    assert [at.name for at in blocks_of(model, torch.randn(2, 5, 8))] == ["0", "2"]


def test_a_shortcut_scaled_in_evaluation_alone_is_refused() -> None:
    class Late(Added):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return (x if self.training else 0.7 * x) + self.f(x)

    with pytest.raises(ValueError, match=r"returns 0\.7 x"):
        blocks_of(nn.Sequential(Late(), Late(), Added(), Added()), torch.randn(2, 5, 8))


def test_strangers_are_what_could_be_blocks() -> None:
    def made(name: str, *children: nn.Module) -> nn.Module:
        """A module of a class of that name."""
        module = type(name, (nn.Module,), {})()
        for i, child in enumerate(children):
            module.add_module(str(i), child)
        return module

    table = made("Table")
    table.table = nn.Parameter(torch.zeros(8))
    pair = {
        "block1": made("Stranger", nn.Linear(8, 8)),
        "block2": made("Stranger", nn.Linear(8, 8)),
        "block10": made("Known", made("Within", nn.Linear(8, 8)), made("Within", nn.Linear(8, 8))),
        "stage1": made("Stage", made("Known", nn.Linear(8, 8))),
        "stage2": made("Stage", made("Known", nn.Linear(8, 8))),
        "alone": made("Alone", nn.Linear(8, 8)),
    }
    model = nn.ModuleDict(pair)
    for i in range(2):
        for name in ("PatchMerging2d", "ClassBlock"):
            model[f"{name}{i}"] = made(name, nn.Linear(8, 8))
        model[f"norm{i}"] = made("NormAct", nn.LayerNorm(8), nn.GELU())
        model[f"pool{i}"] = made("Pool", nn.AvgPool1d(2))
        model[f"table{i}"] = type(table)()
        model[f"table{i}"].table = nn.Parameter(torch.zeros(8))
        model[f"row{i}"] = nn.Sequential(nn.Linear(8, 8))
    assert strangers(model, ["block10", "stage1.0", "stage2.0"]) == ["Stranger"]
