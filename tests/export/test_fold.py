"""Folding is exact, in float64 and with the right eps; and what cannot be folded is refused."""

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn

from residua.adapt.encoder import TimmViT
from residua.adapt.folder import norms_of
from residua.export import ExportError, fold_resnet, fold_vit
from residua.nn import Decay, ResNet, ViT, create_model

SHORTCUTS = {
    "linear": {"alpha_min": 0.6},
    "cosine": {"alpha_min": 0.5, "schedule": "cosine"},
    "effective": {"alpha_eff": 3e-3},
    "attention": {"alpha_min": 0.6, "branches": "attn"},
    "early": {"alpha_min": 0.6, "until": 0.5},
    "learned": {"schedule": "learned"},
    "branch": {"control": "branch"},
    "both": {"control": "both"},
    "ordinary": {},
}


def vit(final_norm: bool, **shortcuts: Any) -> ViT:
    """Random weights everywhere, branches as large as the stream; learned alphas of both signs."""
    torch.manual_seed(0)
    model: Any = create_model("vit", img_size=16, patch_size=4, embed_dim=32, depth=6, num_heads=2,
                              final_norm=final_norm, **shortcuts).double().eval()  # fmt: skip
    for name, value in model.named_parameters():
        if not name.startswith("shortcut"):
            nn.init.normal_(value, std=0.2)
    if shortcuts.get("schedule") == "learned":
        with torch.no_grad():
            model.shortcut.alpha.copy_(0.4 + torch.rand(12))[3] = -0.7
    return model


def ordinary(model: ViT, state: dict[str, Tensor], eps: tuple[float, ...]) -> ViT:
    """A ViT with shortcuts of 1, the folded weights, and an eps for every norm."""
    twin: Any = create_model(**{k: v for k, v in model.config.items() if k in SIZES}).double().eval()
    twin.load_state_dict(state | {"shortcut.alpha": torch.ones(2 * model.depth)})
    for k, block in enumerate(twin.blocks):
        block.norm1.eps, block.norm2.eps = eps[2 * k], eps[2 * k + 1]
    if model.final_norm:
        twin.norm.eps = eps[-1]
    return twin


SIZES = (
    "name", "img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "norm_eps",
    "final_norm",
)  # fmt: skip


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("shortcuts", SHORTCUTS.values(), ids=SHORTCUTS)
@torch.no_grad()
def test_with_an_eps_for_every_norm_the_networks_are_equal(shortcuts: dict[str, Any], final_norm: bool) -> None:
    model = vit(final_norm, **shortcuts)
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    tokens = model(images)
    folded = fold_vit(model)
    assert apart(tokens, ordinary(model, folded.state, folded.exact)(images)) < 1e-11
    if shortcuts:  # folding did something
        unfolded = {name: value for name, value in model.state_dict().items() if "shortcut" not in name}
        assert apart(tokens, ordinary(model, unfolded, folded.exact)(images)) > 1e-2


@torch.no_grad()
def test_gauges_differ_by_what_is_left_of_the_input() -> None:
    model = vit(False, alpha_min=0.6)
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    left = model.shortcut.alpha.double().prod()
    true, free = fold_vit(model), fold_vit(model, true_scale=False)
    assert apart(model(images), ordinary(model, true.state, true.exact)(images)) < 1e-11
    assert apart(model(images), left * ordinary(model, free.state, free.exact)(images)) < 1e-11
    assert free.eps == model.norm_eps
    assert true.eps == pytest.approx(model.norm_eps * left.item() ** 2)
    assert (true.left, free.left) == (1.0, pytest.approx(left.item()))


@torch.no_grad()
def test_one_eps_is_what_is_left_of_the_difference() -> None:
    """The same fold with a vanishing eps is exact; the eps we choose beats the library's default."""
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)

    def single(norm_eps: float, eps: float | None = None) -> float:
        model = vit(False, alpha_eff=3e-3)
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
            norm.eps = norm_eps
        model.norm_eps = norm_eps
        folded = fold_vit(model)
        return apart(model(images), ordinary(model, folded.state, (eps or folded.eps,) * 13)(images))

    assert single(1e-6) < 1e-5
    assert single(1e-14) < 1e-12
    assert single(1e-6, eps=1e-6) > 10 * single(1e-6)


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("more", [{}, {"pre_norm": True}, {"embed_norm_layer": "layernorm"}, {"norm_layer": "rmsnorm"}])
@torch.no_grad()
def test_encoders_of_timm_fold_wherever_their_stream_begins(more: dict[str, Any], final_norm: bool) -> None:
    """As a sum of embeddings, behind a norm of it, or of normed patches: what is folded runs in timm's own network."""
    torch.manual_seed(0)
    made = {"img_size": 16, "patch_size": 8, "num_classes": 0, **more}
    source: Any = timm.create_model("test_vit", **made)
    options: Any = {"final_norm": final_norm, "zero_init": False, "decay": Decay(alpha_min=0.5)}
    encoder = TimmViT(source, {"encoder": "timm:test_vit"}, **options).double().eval()
    for value in encoder.parameters():
        nn.init.normal_(value, std=0.3)
    folded = fold_vit(encoder)
    twin: Any = timm.create_model("test_vit", **made, final_norm=final_norm).double().eval()
    twin.load_state_dict(folded.state)
    for norm, eps in zip(norms_of(twin, twin.norm), folded.exact):
        norm.eps = eps
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert apart(encoder(images), twin.forward_features(images)) < 1e-11


def resnet(block: str, **shortcuts: Any) -> ResNet:
    torch.manual_seed(0)
    model: Any = create_model("resnet", img_size=64, block=block, stages=(2, 1, 3, 2), num_classes=5, small_stem=False,
                              **shortcuts).double()  # fmt: skip
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.eval()


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
@pytest.mark.parametrize("name", ["linear", "learned", "branch", "both"])
@torch.no_grad()
def test_a_resnet_folds_exactly_and_every_stage_keeps_its_scale(block: str, name: str) -> None:
    from torchvision.models import resnet as stock

    model = resnet(block, **SHORTCUTS[name])
    if name == "learned":
        model.shortcut.alpha.copy_(0.4 + torch.rand(8))[2] = -0.5  # a projection carries any sign
    kind: Any = stock.BasicBlock if block == "basic" else stock.Bottleneck
    twin = stock.ResNet(kind, [2, 1, 3, 2], num_classes=5).double().eval()
    twin.load_state_dict(fold_resnet(model).state)
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}
    for i in range(1, 5):
        getattr(twin, f"layer{i}").register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(f"layer{i}", out))
    logits = twin(images)
    model.forward_features(images, tap=ours.__setitem__)
    assert apart(model(images), logits) < 1e-12
    for i, last in enumerate((1, 0, 2, 1), 1):
        assert apart(ours[f"layer{i}.{last}"], seen[f"layer{i}"]) < 1e-12


def test_what_cannot_be_folded_is_refused() -> None:
    with pytest.raises(ExportError, match=r"step 11 has alpha = 0"):
        fold_vit(vit(True, alpha_min=0.0))
    with pytest.raises(ExportError, match=r"alpha_eff is 2.2e-15"):
        fold_vit(vit(True, alpha_min=0.06, schedule="constant"))
    model = resnet("basic", schedule="learned")
    with torch.no_grad():
        model.shortcut.alpha[4] = -0.5
    with pytest.raises(ExportError, match=r"step 4 has learned alpha = -0.5: relu"):
        fold_resnet(model)
    source: Any = timm.create_model("test_vit", img_size=16, block_fn=ResPostBlock)
    unnormed = TimmViT(source, {"encoder": "timm:mine"}, final_norm=True, zero_init=False, decay=Decay(alpha_min=0.5))
    with pytest.raises(ExportError, match=r"timm:mine cannot be folded: its ResPostBlock does not norm .*torch-export"):
        fold_vit(unnormed)
