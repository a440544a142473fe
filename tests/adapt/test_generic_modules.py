"""Modules of one's own that are easily taken for what they are not."""

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.adapt import blocks_of


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def test_layers_of_one_weight_a_channel_are_no_shortcuts() -> None:
    class Side(nn.Module):
        def __init__(self, kernel: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=8, bias=False)
            self.bn = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x))

    class BnAct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x).relu()

    class Sides(nn.Module):
        """Kernels of two sizes side by side."""

        def __init__(self) -> None:
            super().__init__()
            self.act, self.sides = BnAct(), nn.ModuleList([Side(3), Side(1)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(x)
            return self.sides[0](x) + self.sides[1](x)

    class Residual(Sides):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    model = nn.Sequential(Sides(), Residual(), Residual()).eval()
    with pytest.warns(UserWarning, match=r"2 blocks fade; Sides \(0\) add activations too"):
        assert [at.name for at in blocks_of(model, torch.randn(2, 8, 6, 6))] == ["1", "2"]


def test_batch_norm_asks_for_several_samples() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x))

    model = nn.Sequential(Normed(), Normed())
    with pytest.raises(ValueError, match="several samples"):
        residua.stream(model, torch.randn(1, 8))
    assert len(residua.stream(model, torch.randn(2, 8))) == 2


def test_what_is_handed_on_is_no_stream() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return x + self.linear(x) * bias, bias

    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Biased(), Biased()])

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            for block in self.blocks:
                x, bias = block(x, bias)
            return x

    assert len(residua.stream(Biases(), torch.randn(2, 5, 8), torch.randn(2, 5, 1))) == 2


def test_what_adds_something_of_its_own_is_no_shortcut() -> None:
    """A text pooled into the stream: the sum keeps the stream as it is, and does not depend on it."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, 8)

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            return x + self.project(text.mean(1, keepdim=True))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled, self.blocks = Pooled(), nn.Sequential(Residual(), Residual())

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            return self.blocks(self.pooled(x, text))

    given = (torch.randn(2, 5, 8), torch.randn(2, 3, 6))
    assert [at.name for at in blocks_of(Model(), given)] == ["blocks.0", "blocks.1"]


def test_a_table_of_positions_may_end_in_dropout() -> None:
    class Embedded(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.table, self.dropout = nn.Parameter(torch.randn(*shape)), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(x + self.table)

    x = torch.randn(2, 5, 8)
    for shape in ((5, 8), (8,)):
        model = nn.Sequential(Embedded(*shape), Added(), Added()).eval()
        residua.fade(model, alpha_min=0.5, example=x)
        y = x + model[0].table
        y = y + model[1].f(y)
        torch.testing.assert_close(model(x), 0.5 * y + model[2].f(y))
