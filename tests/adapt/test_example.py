"""What is noted of one run of a model: its calls, its sums, and the model as it was."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.adapt.example import arguments, count_streams, default_sizes, evaluating, record, stream_name, uncached

X, Y, Z = torch.randn(2, 3), torch.randn(2, 4), torch.randn(2, 3)
IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "out", "streams"),
    [
        ((X,), X + 1, 1),
        ((X, Y), (X + 1, Y + 1), 2),
        ((X, Y), [Y + 1, X + 1], 2),
        (([X, Y],), [X + 1, Y + 1], 2),
        ((X, Y), (X + 1, Y), 1),  # handed on
        ((X, Z), (Z, X + 1), 1),  # handed on, of the stream's shape
        ((X, Y), (X + 1, X + 2), 1),
        ((X, Z), (X + 1, Z + 1, X + 2), 1),  # more than it takes
        ((X, IDS), (X + 1, IDS + 1), 1),
    ],
)
def test_streams_are_counted(given: Any, out: Any, streams: int) -> None:
    assert count_streams(given, out) == streams


class Apply(nn.Module):
    """A module that does what it is told."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f, self.inner = f, nn.Identity()

    def forward(self, x: Any, *context: Any, **named: Any) -> Any:
        return self.f(self.inner(x), *context, **named)


class Root(nn.Module):
    def __init__(self, forward: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Pair(NamedTuple):
    x: Tensor


@pytest.mark.parametrize(
    ("f", "x", "keeps"),
    [
        (lambda x: x + 1, X, True),
        (lambda x: (x + 1, 0), X, True),
        (lambda x: [x + 1], X, True),
        (lambda x: Pair(x + 1), X, False),
        (lambda x: (), X, False),
        (lambda x: x[:1], X, False),
        (lambda x: x.double(), X, False),
        (lambda x: x + 1, IDS, False),
    ],
)
def test_a_candidate_gives_back_what_it_took(f: Any, x: Tensor, keeps: bool) -> None:
    calls, _ = record(Root(lambda self, x: self.a(x), a=Apply(f)), x)
    assert calls["a"].keeps == keeps


@pytest.mark.parametrize("sizes", [(5, 4), (4, 5)])
def test_it_does_so_in_every_call(sizes: tuple[int, int]) -> None:
    model = Root(lambda self, x: [self.a(x[:, :size]) for size in sizes], a=Apply(lambda x: x[:, :4]))
    calls, _ = record(model, torch.randn(2, 5))
    assert not calls["a"].keeps


def test_first_calls_are_kept_in_the_order_of_their_begin() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x, 1), grown=X), 2)

    calls, sums = record(Root(run, b=Apply(lambda x, grown: x + grown), a=Apply(lambda x, i: x * i)), X)
    assert sorted(calls, key=lambda name: calls[name].order) == ["a", "a.inner", "b", "b.inner"]
    assert calls["a"].args == (1,)
    assert sums == []  # of matrices none is told


def test_streams_given_by_name_count() -> None:
    two = Apply(lambda x, other: (x + 1, other + 1))
    calls, _ = record(Root(lambda self, x: self.a(x, other=x[:, :1]), a=two), X)
    assert calls["a"].streams == 2


def test_a_run_that_failed_leaves_nothing_behind() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 32:
                raise ValueError("32 pixels")
            return x + x

    def run(self: Any, x: Tensor) -> Tensor:
        y = self.picky(self.early(self.conv(x)))
        return y + y

    model: Any = Root(run, conv=nn.Conv2d(3, 4, 1), early=Apply(lambda x: x + x), picky=Picky()).double()
    model.default_cfg = {"input_size": (3, 32, 32)}
    calls, sums = record(model)
    assert calls["conv"].x.shape == (2, 3, 32, 32)
    assert calls["conv"].x.dtype == torch.float64
    assert sums == ["early", "picky", ""]
    model.default_cfg = {"input_size": (3, 48, 48)}
    with pytest.raises(ValueError, match=r"does not run on images \(3, 48, 48\): pass example= \(32 pixels\)"):
        record(model)


def test_a_model_that_fails_is_left_as_it_was() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not self.a.training
        raise KeyError("mine")

    model = Root(run, a=nn.Linear(3, 3), b=nn.Linear(3, 3).eval())
    with pytest.raises(KeyError, match="mine"):
        record(model, X)
    assert [module.training for module in (model, model.a, model.b)] == [True, True, False]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_sums_in_place_are_told_too() -> None:
    _, sums = record(Root(lambda self, x: self.a(x), a=Apply(lambda x: x.sin().add_(x))), torch.randn(2, 3, 4))
    assert sums == ["a"]


def test_evaluation_ends_where_it_fails() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).eval())
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_faded_block_calls_its_stream_as_before() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.f(hidden)

    model = residua.fade(nn.Sequential(Block(), Block()), alpha_min=0.5, example=X)
    assert stream_name(model[0]) == "hidden"  # type: ignore[index]


def test_an_example_is_a_batch_a_tuple_or_named() -> None:
    model = Root(None)
    assert arguments(model, X) == ((X,), {})
    assert arguments(model, (X, Y)) == ((X, Y), {})
    assert arguments(model, {"x": X}) == ((), {"x": X})
    assert arguments(model, {"other": X}) == (({"other": X},), {})
    assert arguments(nn.Bilinear(1, 1, 1), {"input1": X}) == ((), {"input1": X})


def test_caches_are_declined_where_there_are_some() -> None:
    class Cached(nn.Module):
        def forward(self, x: Tensor, use_cache: bool = True) -> None: ...

    class Open(nn.Module):
        def forward(self, x: Tensor, **named: Any) -> None: ...

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> None: ...

    for cls, caches, given in (
        (Cached, True, {"use_cache": False}),
        (Open, True, {"use_cache": False}),
        (Closed, True, {}),
        (Cached, False, {}),
    ):
        model: Any = cls()
        model.config = SimpleNamespace(use_cache=caches)
        assert uncached(model) == given


SMALL = (3, 96, 96)


@pytest.mark.parametrize(
    ("says", "sizes"),
    [
        ({}, []),
        ({"pretrained_cfg": {"input_size": (3, 64, 48)}}, [SMALL, (3, 64, 48)]),
        ({"default_cfg": {"input_size": (1, 64, 48)}}, [(1, 96, 96), (1, 64, 48)]),
        ({"pretrained_cfg": SimpleNamespace(input_size=(3, 64, 48))}, [SMALL, (3, 64, 48)]),
        ({"config": SimpleNamespace(image_size=64)}, [SMALL, (3, 64, 64)]),
        ({"config": SimpleNamespace(image_size=[64, 48], num_channels=4)}, [(4, 96, 96), (4, 64, 48)]),
        (
            {"config": SimpleNamespace(image_size=64), "patch_embed": SimpleNamespace(img_size=(32, 16))},
            [(3, 32, 16), (3, 64, 64)],
        ),
    ],
)
def test_sizes_to_try_are_those_that_the_model_names(says: dict[str, Any], sizes: list[Any]) -> None:
    model = Root(None)
    for name, value in says.items():
        setattr(model, name, value)
    assert default_sizes(model) == sizes
