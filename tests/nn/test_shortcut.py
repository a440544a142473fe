"""Schedules against the published values and formulas; the scaled add against a plain residual add."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import residua
from residua.nn.shortcut import SQRT_HALF, Decay, Shortcuts, scaled_add

# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("sublayers", "alpha_min", "published"),
    [
        (24, 0.5, "6.1e-04"), (24, 0.6, "3.6e-03"), (24, 0.7, "1.8e-02"),
        (26, 0.6, "2.2e-03"), (26, 0.7, "1.3e-02"), (26, 0.8, "6.1e-02"),
    ],
)  # fmt: skip
def test_published_products(sublayers: int, alpha_min: float, published: str) -> None:
    assert f"{float(residua.alphas(sublayers // 2, alpha_min).prod()):.1e}" == published


@pytest.mark.parametrize("alpha_min", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 12, 24])
def test_linear_falls_evenly_from_one_to_exactly_alpha_min(depth: int, alpha_min: float) -> None:
    alphas = residua.alphas(depth, alpha_min)
    k = 2 * depth
    assert alphas.shape == (k,)
    assert alphas[0] == 1
    assert float(alphas[-1]) == alpha_min
    expected = [1 - (1 - alpha_min) * i / (k - 1) for i in range(k)]
    torch.testing.assert_close(alphas, torch.tensor(expected, dtype=torch.float64))


def test_per_block_is_inclusive_and_shared_by_sublayers() -> None:
    blocks = residua.alphas(5, 0.6, per="block")
    torch.testing.assert_close(blocks, torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6], dtype=torch.float64))
    steps = Decay(0.6, per="block").alphas(5)
    assert torch.equal(steps[0::2], blocks)
    assert torch.equal(steps[1::2], blocks)


def test_literal_never_reaches_alpha_min() -> None:
    literal = residua.alphas(4, 0.6, "literal", per="block")
    torch.testing.assert_close(literal, torch.tensor([1.0, 0.9, 0.8, 0.7], dtype=torch.float64))


def test_cosine_formula() -> None:
    expected = [0.6 + 0.4 * (1 + math.cos(math.pi * k / 23)) / 2 for k in range(24)]
    torch.testing.assert_close(residua.alphas(12, 0.6, "cosine"), torch.tensor(expected, dtype=torch.float64))


def test_constant() -> None:
    assert residua.alphas(3, 0.8, "constant").tolist() == [0.8] * 6


@pytest.mark.parametrize(("branch", "first"), [("attn", 0), ("mlp", 1)])
def test_one_branch_keeps_the_full_schedules_values(branch: Any, first: int) -> None:
    full, one = residua.alphas(6, 0.5), residua.alphas(6, 0.5, branches=branch)
    assert torch.equal(one[first::2], full[first::2])
    assert (one[1 - first :: 2] == 1).all()


@pytest.mark.parametrize(("until", "active"), [(0.5, 6), (6, 6), (1.0, 12), (0.25, 3), (2, 2)])
def test_until_fades_the_first_steps_only(until: float, active: int) -> None:
    alphas = residua.alphas(6, 0.4, until=until)
    expected = [1 - 0.6 * k / (active - 1) for k in range(active)]
    torch.testing.assert_close(alphas[:active], torch.tensor(expected, dtype=torch.float64))
    assert (alphas[active:] == 1).all()


def test_a_share_of_the_depth_is_rounded_to_whole_steps() -> None:
    assert torch.equal(residua.alphas(25, 0.4, until=0.58), residua.alphas(25, 0.4, until=29))  # 28.999999999999996
    assert torch.equal(residua.alphas(6, 0.4, until=0.3), residua.alphas(6, 0.4, until=4))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"schedule": "cosine"}, {"schedule": "constant"}, {"per": "block"}, {"branches": "attn"},
        {"branches": "mlp", "schedule": "cosine"}, {"until": 0.5}, {"until": 9, "branches": "mlp"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("alpha_eff", [0.9, 0.05])
def test_alpha_eff_is_the_product(options: dict[str, Any], alpha_eff: float) -> None:
    alphas = Decay(alpha_eff=alpha_eff, **options).alphas(12)
    assert float(alphas.prod()) == pytest.approx(alpha_eff, rel=1e-9)
    assert 0 <= float(alphas.min()) < 1


def test_alpha_eff_of_a_schedule_gives_back_its_alpha_min() -> None:
    product = float(residua.alphas(12, 0.6).prod())
    assert Decay(alpha_eff=product).target(12) == pytest.approx(0.6, rel=1e-12)


def test_controls() -> None:
    both, branch = Decay(control="both"), Decay(control="branch")
    assert both.alphas(3).tolist() == [math.sqrt(0.5)] * 6
    assert both.branch_scale == branch.branch_scale == math.sqrt(0.5)
    assert branch.alphas(3).tolist() == [1.0] * 6
    assert Decay(0.5).branch_scale == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alpha_min": -0.1}, "alpha_min is -0.1"),
        ({"alpha_min": 1.1}, "alpha_min is 1.1"),
        ({"alpha_min": math.nan}, "alpha_min is nan"),
        ({"alpha_eff": 0.0}, "alpha_eff is 0.0"),
        ({"alpha_eff": 1.5}, "alpha_eff is 1.5"),
        ({"alpha_eff": math.nan}, "alpha_eff is nan"),
        ({"alpha_eff": 0.5, "alpha_min": 0.5}, "not both"),
        ({"until": 0.0}, "until is 0.0"),
        ({"until": -3}, "until is -3"),
        ({"until": 2.7}, "until is 2.7"),
        ({"until": math.inf}, "until is inf"),
        ({"until": math.nan}, "until is nan"),
        ({"schedule": "exponential"}, "linear, literal, cosine, constant, learned"),
        ({"per": "head"}, "sublayer, block"),
        ({"branches": "norm"}, "both, attn, mlp"),
        ({"control": "shortcut"}, "none, branch, both"),
        ({"control": "both", "alpha_min": 0.5}, "control sets the shortcuts itself"),
        ({"schedule": "learned", "alpha_eff": 0.5}, "learned"),
        ({"schedule": "learned", "branches": "attn"}, "learned.* leave branches at both"),
        ({"schedule": "learned", "until": 0.5}, "learned.* leave until at None"),
        ({"control": "both", "branches": "mlp"}, "control.* leave branches at both"),
        ({"control": "branch", "schedule": "cosine"}, "control.* leave schedule at linear"),
    ],
)
def test_out_of_range_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Decay(**options)


def test_what_only_a_depth_can_refuse() -> None:
    with pytest.raises(ValueError, match="until=9 is beyond the last of 8 steps"):
        residua.alphas(4, 0.5, until=9)
    with pytest.raises(ValueError, match=r"until=0\.01 leaves 0 of 8 steps"):
        residua.alphas(4, 0.5, until=0.01)
    with pytest.raises(ValueError, match=r"until=0\.125 leaves 1 of 8 steps"):
        residua.alphas(4, 0.5, until=0.125)
    with pytest.raises(ValueError, match="depth is 0"):
        residua.alphas(0, 0.5)
    with pytest.raises(ValueError, match="out of reach"):  # literal l/L ends above zero
        Decay(alpha_eff=1e-9, schedule="literal").alphas(2)
    with pytest.raises(ValueError, match="attention and MLP"):
        residua.alphas(4, 0.5, per="block", branches="attn")


def test_annealing_moves_alpha_min_linearly() -> None:
    shortcut = Shortcuts(Decay(0.6), depth=4)
    for strength, alpha_min in ((0.0, 1.0), (0.5, 0.8), (0.25, 0.9), (1.0, 0.6)):
        shortcut.set_strength(strength)
        assert torch.equal(shortcut.alpha, residua.alphas(4, alpha_min).float())
    for strength in (-0.1, 1.1):
        with pytest.raises(ValueError, match="strength"):
            shortcut.set_strength(strength)


def test_fixed_alphas_are_no_parameters_and_learned_ones_are() -> None:
    assert not list(Shortcuts(Decay(0.6), 3).parameters())
    learned = Shortcuts(Decay(schedule="learned"), 3)
    assert [p.tolist() for p in learned.parameters()] == [[1.0] * 6]


# ---------------------------------------------------------------- the scaled add


class Net(nn.Module):
    """Three residual steps over (B, D), with a scaled or with a plain add."""

    def __init__(self, plain: bool, decay: Decay = Decay(0.5)) -> None:  # noqa: B008
        super().__init__()
        self.plain = plain
        self.shortcut = Shortcuts(decay, depth=3, sublayers=1)
        self.branches = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for branch, alpha in zip(self.branches, self.shortcut.alpha.unbind(0)):
            x = x + branch(x) if self.plain else scaled_add(x, branch(x), alpha)
        return x


def pair_of_nets(decay: Decay) -> tuple[Net, Net]:
    scaled, plain = Net(plain=False, decay=decay), Net(plain=True, decay=decay)
    plain.load_state_dict(scaled.state_dict())
    return scaled, plain


@dataclass
class Operations(TorchDispatchMode):
    """Names of the operators that run a kernel."""

    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_value_is_alpha_x_plus_f() -> None:
    x, f, alpha = torch.randn(64), torch.randn(64), torch.tensor(0.37)
    exact = 0.37 * x.double() + f.double()
    torch.testing.assert_close(scaled_add(x, f, alpha).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_one_is_bit_for_bit_a_plain_add(dtype: torch.dtype) -> None:
    x, f = torch.randn(2, 4096).to(dtype).requires_grad_(), torch.randn(2, 4096).to(dtype).requires_grad_()
    scaled = scaled_add(x, f, torch.tensor(1.0))
    plain = x + f
    assert torch.equal(scaled, plain)
    g = torch.randn_like(plain)
    for ours, theirs in zip(torch.autograd.grad(scaled, (x, f), g), torch.autograd.grad(plain, (x, f), g)):
        assert torch.equal(ours, theirs)


def test_a_forward_pass_runs_as_many_operators_as_plain_adds() -> None:
    scaled, plain = pair_of_nets(Decay(0.5))
    x, counted = torch.randn(8, 24), []
    for net in (scaled, plain):
        with Operations() as seen:
            net(x)
        counted.append(seen.names)
    assert len(counted[0]) == len(counted[1])
    adds = [name for name in counted[1] if name.startswith("aten.add.")]
    assert len(adds) == 3  # the plain adds were really counted


def kept_bytes(run: Callable[[], Tensor], own: nn.Module) -> int:
    """Bytes kept for the backward pass, the module's own parameters and buffers left out."""
    tensors = [*own.parameters(), *own.buffers()]
    known = {t.untyped_storage().data_ptr() for t in tensors}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
    del y
    return sum(kept.values())


def test_nothing_more_is_kept_for_backward() -> None:
    scaled, plain = pair_of_nets(Decay(0.5))
    x = torch.randn(128, 24, requires_grad=True)
    assert kept_bytes(lambda: scaled(x), scaled) == kept_bytes(lambda: plain(x), plain) > 0
    learned = Net(plain=False, decay=Decay(schedule="learned"))
    learning = kept_bytes(lambda: learned(x), learned)
    assert learning >= kept_bytes(lambda: plain(x), plain)  # the measure sees what a learned alpha has to keep


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    graphs = torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1)
    with graphs, torch._functorch.config.patch(enable_autograd_cache=False):  # a cached graph generates no kernel
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_in_both_directions_there_is_no_extra_kernel() -> None:
    from torch._inductor import metrics

    layer = nn.Linear(24, 24)
    x = torch.randn(16, 24, requires_grad=True)

    def plain(x: Tensor) -> Tensor:
        return x + layer(F.gelu(x))

    def scaled(x: Tensor) -> Tensor:
        return scaled_add(x, layer(F.gelu(x)), alpha)

    alpha, counts, kept = torch.tensor(0.6), [], []
    for step in (plain, scaled):
        metrics.reset()
        compiled = torch.compile(step)
        compiled(x).sum().backward()
        counts.append(metrics.generated_kernel_count)
        kept.append(kept_bytes(lambda f=compiled: f(x), layer) - (alpha.nbytes if step is scaled else 0))
    assert counts[0] == counts[1] > 0
    assert kept[0] == kept[1] > 0


@pytest.mark.usefixtures("_fresh_compiler")
def test_annealing_does_not_recompile() -> None:
    model = residua.create_model("vit", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, alpha_min=0.5)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    images, outputs = torch.randn(2, 3, 8, 8), []
    for strength in (0.0, 0.3, 0.7, 1.0):
        model.shortcut.set_strength(strength)
        outputs.append(compiled(images))
        torch.testing.assert_close(outputs[-1], model(images))
    assert counter.frame_count == 1
    assert not torch.allclose(outputs[0], outputs[-1], atol=1e-3)  # and the new alphas were used


def test_learned_alphas_get_their_gradient() -> None:
    net = Net(plain=False, decay=Decay(schedule="learned"))
    x = torch.randn(8, 24)
    net(x).sum().backward()
    grad = net.shortcut.alpha.grad
    assert grad is not None
    # d sum(alpha_2 x_2 + f_2(x_2)) / d alpha_2 = sum(x_2), the stream before the last step
    before = x
    with torch.no_grad():
        for branch in list(net.branches)[:2]:
            before = before + branch(before)
    torch.testing.assert_close(grad[-1], before.sum())
    assert (grad != 0).all()


@pytest.mark.parametrize("schedule", ["linear", "learned"])
def test_under_autocast_the_stream_stays_in_bfloat16(schedule: Any) -> None:
    model = residua.create_model(
        "vit", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2,
        alpha_min=1.0 if schedule == "learned" else 0.5, schedule=schedule,
    )  # fmt: skip
    taps: dict[str, Tensor] = {}
    with torch.autocast("cpu", torch.bfloat16):
        model.forward_features(torch.randn(2, 3, 8, 8), tap=taps.__setitem__)
    assert len(taps) == 5
    assert {t.dtype for t in taps.values()} == {torch.bfloat16}


def test_sqrt_half() -> None:
    assert math.sqrt(0.5) == SQRT_HALF


@pytest.mark.parametrize(
    ("decay", "words"),
    [
        (Decay(alpha_min=0.5), "alpha_min 0.5 (alpha_eff 0.024)"),
        (Decay(alpha_min=0.5, schedule="literal"), "alpha_min 0.5 (alpha_eff 0.035)"),
        (Decay(alpha_min=0.5, branches="attn"), "alpha_min 0.5 (alpha_eff 0.19)"),
        (Decay(alpha_eff=0.01), "alpha_min 0.413 (alpha_eff 0.01)"),
        (Decay(schedule="learned"), "learned shortcuts (alpha_eff 1)"),
        (Decay(control="both"), "control: both scaled by sqrt(0.5)"),
    ],
)
def test_alpha_min_is_told_as_it_was_given_and_not_as_the_least_alpha(decay: Decay, words: str) -> None:
    assert Shortcuts(decay, 6).words() == words
