"""How a foreign model fades: nothing of it changes but what its blocks compute, and all of that can be undone."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import residua
from residua.adapt import Foreign, blocks_of, shortcuts, tapped
from residua.adapt.block import ALPHA, Faded, Kind, Part, computed_by, install, refused
from residua.nn.shortcut import Decay


def vit(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    size: dict[str, Any] = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    return timm.create_model("vit_tiny_patch16_224", **size | kwargs).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def alphas(model: nn.Module) -> Tensor:
    return shortcuts(model).alpha


def test_a_faded_model_has_the_same_parameters_buffers_on_disk_and_classes_by_name(images: Tensor) -> None:
    model = vit()
    names, state = [n for n, _ in model.named_parameters()], list(model.state_dict())
    residua.fade(model, alpha_min=0.5)
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == state
    assert isinstance(model.blocks[0], timm.models.vision_transformer.Block)
    assert type(model.blocks[0]).__name__ == "Block"
    assert computed_by(model.blocks[0]) == "timm.models.vision_transformer.Block"
    torch.testing.assert_close(alphas(model), torch.tensor([1.0, 5 / 6, 4 / 6, 0.5]))


def test_state_dicts_travel_both_ways(images: Tensor) -> None:
    faded, plain, other = residua.fade(vit(), alpha_min=0.5), vit(), vit()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    faded.load_state_dict(other.state_dict())
    plain.load_state_dict(faded.state_dict())
    assert torch.equal(plain(images), other(images))
    assert not torch.equal(faded(images), other(images))


def test_copies_and_pickles_fade_too_and_apart(images: Tensor) -> None:
    model = residua.fade(vit(), alpha_min=0.5)
    out = model(images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.blocks[0]) is type(model.blocks[0])
        assert torch.equal(twin(images), out)
        residua.unfade(twin)
        assert torch.equal(twin(images), vit()(images))
        assert torch.equal(model(images), out)


def test_a_copy_of_compiled_blocks_runs_on_its_own_weights(images: Tensor) -> None:
    model = residua.fade(vit(), alpha_min=0.5)
    for block in model.blocks:
        block.compile(backend="eager")
    before = model(images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for parameter in twin.blocks.parameters():
            nn.init.zeros_(parameter)
        alpha_eff = float(alphas(twin).prod())
        embedded = twin.norm_pre(twin._pos_embed(twin.patch_embed(images)))
        torch.testing.assert_close(twin.forward_features(images), twin.norm(alpha_eff * embedded))
        assert torch.equal(model(images), before)


def test_half_precision_keeps_alphas_exact_and_the_stream_half(images: Tensor) -> None:
    model = residua.fade(vit(), alpha_min=0.3)
    before = alphas(model).clone()
    model.bfloat16()
    assert alphas(model).dtype == torch.float32
    assert torch.equal(alphas(model), before)
    out = model(images.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), residua.fade(vit(), alpha_min=0.3)(images), rtol=0.1, atol=0.05)
    assert torch.equal(alphas(model.to("meta").to_empty(device="cpu")), before)


def test_training_in_autocast_reaches_every_parameter(images: Tensor) -> None:
    model, exact = (residua.fade(vit(), alpha_min=0.5).train() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        model(images).float().square().mean().backward()
    exact(images).square().mean().backward()
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() <= 0.1 * b.grad.norm()


def test_autocast_leaves_the_stream_as_the_plain_model_has_it(images: Tensor) -> None:
    plain, faded = vit(), residua.fade(vit(), alpha_min=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(images), faded(images))
    stock, ours = vit().bfloat16(), residua.fade(vit(), alpha_min=1.0).bfloat16()
    kinds: set[torch.dtype] = set()
    with torch.autocast("cpu", torch.bfloat16), tapped(ours, lambda _, x: kinds.add(x.dtype)):
        assert torch.equal(stock(images.bfloat16()), ours(images.bfloat16()))
    assert kinds == {torch.bfloat16}


def test_gradient_checkpointing_changes_nothing(images: Tensor) -> None:
    grads = []
    for recompute in (False, True):
        model = residua.fade(vit(), alpha_min=0.5).train()
        model.set_grad_checkpointing(recompute)
        model(images).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def one_step(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Weights after a step on a mean over images."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images).square().mean().backward()
    optimiser.step()
    return [p.detach().clone() for p in model.parameters()]


def work(rank: int, images: Tensor, store: str) -> None:
    """One of two processes: half of the images, and the weights that it ends with."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/meet", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(residua.fade(vit(), alpha_min=0.5).train())
    torch.save(one_step(wrapped, images.chunk(2)[rank]), f"{store}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_two_processes_take_the_step_of_one(tmp_path: Any) -> None:
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.multiprocessing.start_processes(work, (images, str(tmp_path)), nprocs=2, start_method="spawn")
    alone = one_step(residua.fade(vit(), alpha_min=0.5).train(), images)
    plain = one_step(vit().train(), images)
    for rank in (0, 1):
        for mine, theirs in zip(torch.load(f"{tmp_path}/{rank}.pt"), alone, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert not all(torch.allclose(a, b) for a, b in zip(alone, plain, strict=True))


def test_schedules_reach_the_blocks() -> None:
    for decay in (
        dict(alpha_min=0.6, per="block"),
        dict(alpha_min=0.6, branches="attn"),
        dict(alpha_min=0.6, until=0.5),
        dict(alpha_min=0.6, schedule="cosine"),
        dict(alpha_eff=0.1),
        dict(control="both"),
    ):
        model = residua.fade(vit(), **decay)
        torch.testing.assert_close(alphas(model), Decay(**decay).alphas(2, 2).float())
        torch.testing.assert_close(residua.stream(model).alphas, alphas(model))
    with pytest.raises(ValueError, match="learned"):
        residua.fade(vit(), schedule="learned")


def test_controls_scale_the_branch(images: Tensor) -> None:
    model = residua.fade(vit(), control="branch")
    block, x = model.blocks[0], torch.randn(2, 5, 32)
    y = x + block.attn(block.norm1(x)) * 0.5**0.5
    torch.testing.assert_close(block(x), y + block.mlp(block.norm2(y)) * 0.5**0.5)
    x = residua.stream(model, images)[-1].input
    assert x is not None
    torch.testing.assert_close(model.forward_head(model.norm(residua.stream(model, images)[-1](x))), model(images))


def test_annealing_moves_alphas_from_one_to_their_target(images: Tensor) -> None:
    plain, model = vit(), residua.fade(vit(), alpha_min=0.4)
    target = alphas(model).clone()
    shortcuts(model).set_strength(0.0)
    assert torch.equal(model(images), plain(images))
    shortcuts(model).set_strength(0.5)
    torch.testing.assert_close(alphas(model), (1 + target) / 2)
    shortcuts(model).set_strength(1.0)
    torch.testing.assert_close(alphas(model), target)
    with pytest.raises(ValueError, match="strength"):
        shortcuts(model).set_strength(1.5)
    assert shortcuts(plain) is None


def test_fading_again_replaces_and_unfading_leaves_no_trace(images: Tensor) -> None:
    model = vit()
    out, inside = model(images), set(vars(model.blocks[0]))
    residua.fade(residua.fade(model, alpha_min=0.2), alpha_min=0.5)
    assert torch.equal(model(images), residua.fade(vit(), alpha_min=0.5)(images))
    residua.unfade(model)
    assert torch.equal(model(images), out)
    assert set(vars(model.blocks[0])) == inside
    assert not any(name.startswith("residua") for name, _ in model.named_buffers())


def test_compiled_and_annealed_without_compiling_again(images: Tensor) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    model = residua.fade(vit(embed_dim=16), alpha_min=0.5)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for strength in (1.0, 0.3):
        shortcuts(model).set_strength(strength)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_a_stream_bound_to_images_is_the_model_step_by_step(images: Tensor) -> None:
    model = residua.fade(vit(), alpha_min=0.5)
    bound = residua.stream(model, images)
    assert [step.name for step in bound] == ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"]
    x = bound[0].input
    assert x is not None
    for step in bound:
        torch.testing.assert_close(step.input, x)
        x = step.alpha * x + step.branch(x)
    torch.testing.assert_close(model.norm(x), model.forward_features(images))


def test_the_stream_of_a_plain_model_leaves_it_plain(images: Tensor) -> None:
    model = vit()
    assert residua.stream(model).alpha_eff == 1.0
    assert not any(isinstance(module, Faded) for module in model.modules())


def test_a_subclass_with_a_forward_of_its_own_is_another_kind() -> None:
    class Mine(timm.models.vision_transformer.Block):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return torch.relu(super().forward(x))

    model = vit(block_fn=Mine)
    with pytest.raises(ValueError, match=r"blocks\.0.*Mine.*post-activation"):
        residua.fade(model, alpha_min=0.5)


def test_what_cannot_fade_says_so() -> None:
    block = vit().blocks[0]
    with pytest.raises(ValueError, match="a Block cannot fade: because"):
        install(block, refused("because"), torch.ones(2))
    block.forward = lambda x: x
    with pytest.raises(ValueError, match="replaced on the instance"):
        install(block, Kind(lambda b: [Part("", lambda x: x)]), torch.ones(1))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("branch_first", [False, True])
def test_a_sum_has_the_layout_of_the_blocks_own(branch_first: bool, autocast: bool) -> None:
    class Turned(nn.Module):
        def branch(self, x: Tensor) -> Tensor:
            return x.mT.contiguous().sin().mT  # its rows are last in memory

        def forward(self, x: Tensor) -> Tensor:
            return self.branch(x) + x if branch_first else x + self.branch(x)

    block, x = Turned(), torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = block(x)
        install(block, Kind(lambda b: [Part("", b.branch, branch_first=branch_first)]), torch.tensor([0.5]))
        faded = block(x)
    assert faded.stride() == plain.stride()
    torch.testing.assert_close(faded, 0.5 * x + x.sin())


@pytest.mark.parametrize("stride", [1, 2])
def test_steps_have_what_a_block_does_to_its_shortcut_and_to_the_sum(stride: int) -> None:
    torch.manual_seed(0)
    block = timm.models.resnet.BasicBlock(4, 4, stride, downsample=nn.Conv2d(4, 4, 1, 2) if stride == 2 else None)
    model, x = nn.Sequential(block, timm.models.resnet.BasicBlock(4, 4)).eval(), torch.randn(2, 4, 6, 6)
    residua.fade(model, control="both")
    kept = x if block.downsample is None else block.downsample(x)
    branch = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(x)))))
    wanted = torch.relu(0.5**0.5 * (kept + branch))
    torch.testing.assert_close(block(x), wanted)
    first, second = residua.stream(model, x)
    torch.testing.assert_close(first(x), wanted)
    assert second.input is not None
    torch.testing.assert_close(second.input, wanted)


def test_what_forward_returns_around_the_stream_is_kept() -> None:
    class Pair(nn.Module):
        def forward(self, hidden: Tensor, gain: float = 1.0) -> tuple[Tensor, int]:
            return (hidden + gain * hidden.sin()).tanh(), 7

    def parts(block: nn.Module, gain: float = 1.0) -> list[Part]:
        return [Part("", lambda x: gain * x.sin(), after=torch.tanh)]

    block, x = Pair(), torch.randn(2, 3)
    install(block, Kind(parts, stream="hidden", wrap=lambda b, y: (y, 7)), torch.tensor([0.5]))
    for out in (block(x, 2.0), block(x, gain=2.0), block(gain=2.0, hidden=x)):
        torch.testing.assert_close(out[0], (0.5 * x + 2 * x.sin()).tanh())
        assert out[1] == 7


def test_a_faded_block_is_moved_as_its_class_would_be() -> None:
    block = residua.fade(vit(), alpha_min=0.5).blocks[0]  # type: ignore[union-attr, index]
    assert block.double() is block
    block.to_empty(device="meta", recurse=False)
    assert not block.attn.qkv.weight.is_meta


def test_a_faded_class_is_called_as_before_and_alphas_stay_in_place() -> None:
    model = vit()
    name = type(model.blocks[0]).__module__, type(model.blocks[0]).__qualname__
    residua.fade(model, alpha_min=0.5)
    assert (type(model.blocks[0]).__module__, type(model.blocks[0]).__qualname__) == name
    buffer = getattr(model.blocks[1], ALPHA)  # what was compiled or recorded reads this very tensor
    residua.fade(model, alpha_min=0.2)
    assert getattr(model.blocks[1], ALPHA) is buffer
    torch.testing.assert_close(float(buffer[-1]), 0.2)


def test_a_refused_model_is_left_whole(images: Tensor) -> None:
    model = vit()
    before = model(images)
    model.blocks[1].forward = model.blocks[1].forward
    with pytest.raises(ValueError, match="replaced on the instance"):
        residua.fade(model, alpha_min=0.5)
    assert not any(isinstance(module, Faded) for module in model.modules())
    assert torch.equal(model(images), before)


@pytest.mark.parametrize("own", [False, True])
def test_a_stream_leaves_running_statistics_alone(own: bool) -> None:
    """In training too, where the steps are those of the model in training."""
    make = partial(residua.create_model, "resnet18", num_classes=3, width=8, img_size=32) if own else None
    model = (make() if make else timm.create_model("test_resnet")).train()
    residua.fade(model, alpha_min=0.5)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    images = torch.randn(4, 3, 32, 32)
    steps = residua.stream(model, images)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert float(steps[-1].alpha.detach()) == 0.5
    shortcuts(model).set_strength(0.0)
    assert float(steps[-1].alpha.detach()) == 1.0  # the model's own alphas, not copies
    steps[0](steps[0].input).sum().backward()
    model.eval()
    assert residua.stream(model, images)[0].input is not None


def test_what_identifies_a_model_tells_branch_scales_apart() -> None:
    from residua.data import Preprocessing

    model: Any = vit()
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    plain = Foreign(model).config
    assert Foreign(residua.fade(model, alpha_min=1.0)).config == plain
    scaled = Foreign(residua.fade(model, control="branch")).config
    assert scaled != plain
    assert Foreign(residua.unfade(model)).config == plain


def test_blocks_know_where_they_live() -> None:
    located = blocks_of(vit())
    assert [at.name for at in located] == ["blocks.0", "blocks.1"]
    assert not hasattr(located[0].block, ALPHA)
    assert [part.name for part in located[0].kind.parts(located[0].block)] == ["attn", "mlp"]
