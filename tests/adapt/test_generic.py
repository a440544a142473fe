"""Blocks found by structure: over many architectures each is faded and recomputed by hand, or refused with a reason."""

import copy
import warnings
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import residua
from residua.adapt import blocks_of
from residua.adapt import model as adapted
from residua.adapt.block import ALPHA, INDEX, Faded, plain_class

BLOCKS = {
    "coat_lite_tiny": 8,
    "convit_tiny": 12,
    "cpubone_nano": 9,
    "cs3darknet_focus_s": 9,
    "csatv2": 18,
    "deit_tiny_patch16_224": 12,
    "edgenext_xx_small": 12,
    "efficientformerv2_s0": 14,
    "efficientvit_b0": 11,
    "efficientvit_m0": 38,
    "eva02_tiny_patch14_224": 12,
    "fasternet_t0": 13,
    "gcvit_xxtiny": 23,
    "ghostnet_050": 11,
    "ghostnetv3_050": 11,
    "gmlp_ti16_224": 30,
    "inception_next_atto": 12,
    "levit_128s": 9,
    "mobilenetv3_small_050": 7,
    "mobilevit_xxs": 12,
    "mobilevitv2_050": 10,
    "mvitv2_tiny": 7,
    "nest_tiny": 12,
    "pvt_v2_b0": 8,
    "resnetv2_18": 5,
    "starnet_s050": 6,
    "swiftformer_xs": 16,
    "test_convnext": 9,
    "test_mambaout": 6,
    "test_vit": 6,
    "tinynet_e": 3,
    "visformer_tiny": 15,
    "xcit_nano_12_p8_224": 12,
}
"""How many blocks of each are x + F(x), counted in their source: not those that change the shape of the stream."""
LARGE = {
    "csatv2", "efficientformerv2_s0", "efficientvit_m0", "gcvit_xxtiny", "gmlp_ti16_224", "mvitv2_tiny", "nest_tiny",
    "visformer_tiny",
}  # fmt: skip
"""Those that take seconds: with the long list."""

REASONS = {
    "coat_tiny": "ParallelBlock, .*4 streams",
    "densenet121": "no residual blocks",
    "dla46x_c": "DlaBottleneck, .*post-activation",
    "dpn48b": "no residual blocks",
    "efficientvim_m1": "EfficientViMBlock, .*gating",
    "ese_vovnet19b_slim": "no residual blocks",
    "fastvit_t8": "MobileOneBlock, .*post-activation",
    "lcnetv2_small": "no residual blocks",
    "hrnet_w18_small": "HighResolutionModule, .*2 streams",
    "regnetx_002": "Bottleneck, .*post-activation",
    "repvit_m1": "RepViTBlock, .*others of its class",
    "rexnet_100": "no residual blocks",
    "swinv2_cr_tiny_224": "SwinTransformerV2CrBlock, .*post-norm",
    "test_resnet": "BasicBlock, .*post-activation, relu",
    "tiny_vit_5m_224": "MBConv, .*post-activation, gelu",
    "tnt_s_legacy_patch16_224": "Block, .*2 streams",
}
NAMES = """
botnet26t_256 caformer_s18 cait_xxs24_224 coat_tiny coatnet_nano_rw_224 coatnext_nano_rw_224 convformer_s18
convit_tiny convmixer_768_32 convnextv2_atto cpubone_nano crossvit_9_240 crossvit_tiny_240 cs3darknet_focus_s
csatv2 davit_tiny deit3_small_patch16_224 deit_tiny_patch16_224 densenet121 dla34 dla46x_c dpn48b eca_nfnet_l0
ecaresnet26t edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_es efficientnet_lite0
efficientnetv2_rw_t efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim eva02_tiny_patch14_224
fasternet_t0 fastvit_sa12 fastvit_t8 fbnetc_100 focalnet_tiny_srf gcresnet33ts gcvit_xxtiny gernet_s
ghostnet_050 gmlp_ti16_224 halonet_h1 hardcorenas_b hgnet_tiny hgnetv2_b0 hiera_tiny_224 hieradet_small
hrnet_w18_small iformer_t inception_next_atto inception_v3 inception_v4 lambda_resnet26t lcnetv2_small
legacy_seresnet18 legacy_xception levit_128s levit_conv_128s lowformer_b0 maxvit_pico_rw_256
maxxvit_rmlp_nano_rw_256 mixer_s32_224 mixnet_s mnasnet_small mobilenetv2_035 mobilenetv3_small_050
mobilenetv4_conv_small mobileone_s0 mobilevit_xxs mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0 nfnet_l0
pit_ti_224 pit_xs_224 poolformer_s12 pvt_v2_b0 rdnet_tiny regnetx_002 regnetz_b16 repghostnet_050 repvgg_a0
repvit_m1 res2next50 resmlp_12_224 resnest14d resnetrs50 resnetv2_18 rexnet_100 sehalonet33ts selecsls42
semnasnet_075 sequencer2d_s seresnext26t_32x4d shvit_s1 skresnet18 spnasnet_100 starnet_s050 swiftformer_xs
swin_s3_tiny_224 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 test_byobnet
test_convnext test_mambaout test_nfnet test_resnet test_vit tiny_vit_5m_224 tinynet_e tnt_s_legacy_patch16_224
tresnet_m twins_pcpvt_small twins_svt_small visformer_tiny vit_relpos_small_patch16_224
vit_srelpos_small_patch16_224 vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p
xcit_nano_12_p8_224
"""
LONG = NAMES.split()


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model with random weights everywhere, and the smallest images of a few sizes that it runs on."""
    torch.manual_seed(0)
    for size in (64, 128, None):
        for kwargs in ({"img_size": size} if size else {}, {}):
            try:
                model = timm.create_model(name, **kwargs).eval()
                pixels = size or model.pretrained_cfg["input_size"][-1]
                images = torch.randn(2, model.pretrained_cfg["input_size"][0], pixels, pixels)
                with torch.no_grad():
                    for parameter in model.parameters():
                        if not parameter.any():
                            parameter.normal_(std=0.05)
                    model(images)
                return model, images
            except (RuntimeError, AssertionError, TypeError, ValueError):
                continue
    raise AssertionError(f"{name} runs on no size")


def by_hand(model: nn.Module, alphas: dict[str, float]) -> nn.Module:
    """A plain copy that fades by hooks: what a block returns, less (1 - alpha) of what it was given."""
    plain = residua.unfade(copy.deepcopy(model))
    for name, alpha in alphas.items():

        def hook(_: Any, args: Any, kwargs: Any, out: Any, alpha: float = alpha) -> Any:
            x = args[0] if args else next(iter(kwargs.values()))
            first = (out if isinstance(out, Tensor) else out[0]) - (1 - alpha) * x
            return first if isinstance(out, Tensor) else type(out)((first, *out[1:]))

        plain.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    return plain


def verify(model: nn.Module, images: Tensor) -> int:
    """Fade a model and recompute it by hand; number of its blocks."""
    state, names = model(images), list(model.state_dict())
    located = blocks_of(model, images)
    within = {inner for at in located for child in at.block.children() for inner in child.modules()}
    assert not any(at.block in within for at in located), "blocks inside blocks"
    residua.fade(model, alpha_min=1.0, example=images)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(images), state, rtol=0, atol=0)
    residua.fade(model, alpha_min=0.5)
    alphas = {at.name: float(getattr(at.block, ALPHA)) for at in located}
    assert list(alphas.values()) == pytest.approx(torch.linspace(1, 0.5, len(alphas)).tolist())
    out, expected = model(images), by_hand(model, alphas)(images)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.equal(out, state)
    torch.testing.assert_close(residua.unfade(model)(images), state, rtol=0, atol=0)
    return len(located)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kind is known: everything must be found."""
    monkeypatch.setattr(adapted, "KINDS", {})


@pytest.mark.usefixtures("unknown")
@pytest.mark.filterwarnings("ignore:.*stay as they are")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in BLOCKS])
@torch.no_grad()
def test_blocks_are_found_and_fade(name: str) -> None:
    assert verify(*build(name)) == BLOCKS[name]


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("name", REASONS)
def test_blocks_that_cannot_fade_are_refused_by_name(name: str) -> None:
    model, images = build(name)
    with pytest.raises(ValueError, match=REASONS[name]):
        residua.fade(model, alpha_min=0.5, example=images)
    assert not any(isinstance(module, Faded) for module in model.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", ["known", "unknown"])
@pytest.mark.parametrize("name", LONG)
@torch.no_grad()
def test_the_long_list(name: str, kinds: str, request: pytest.FixtureRequest) -> None:
    model, images = build(name)
    if kinds == "unknown":
        request.getfixturevalue("unknown")
    located, refused = [], ""
    try:
        located = blocks_of(model, images)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "cannot be read as x + F(x)" in refused or "no residual blocks" in refused
        return
    if any(not at.kind.whole for at in located):
        before = model(images)
        assert torch.equal(residua.fade(model, alpha_min=1.0, example=images)(images), before)
        assert not torch.equal(residua.fade(model, alpha_min=0.5)(images), before)
        assert torch.equal(residua.unfade(model)(images), before)
    else:
        assert verify(model, images) >= 2


class Mine(nn.Module):
    """x + F(x) with a second output, its stream given by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, *, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(hidden) * self.scale * mask
        return hidden + y, y.mean()


class Backwards(nn.Module):
    """Its blocks are listed last first; the first is called twice; a table of positions is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = Mine(8), Mine(8)
        self.early, self.late = Positions(), Positions()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], 1)
        x = self.early(x)
        for block in (self.first, self.first, self.last):
            x, _ = block(hidden=x, mask=mask)
        return self.late(x)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Bent(nn.Module):
    """Not residual in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.f, self.norm = how, nn.Linear(8, 8), nn.LayerNorm(8)
        self.gate = nn.Parameter(torch.zeros(8))
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.f(self.norm(x)))
        match self.how:
            case "relu":
                return torch.relu(x + y)
            case "norm":
                return self.norm(x + self.f(x))
            case "scaled":
                return 0.7 * x + y
            case "learned":
                return self.gate * x + y
            case "in place":
                return x.add_(y)
            case "dropout":
                return nn.functional.dropout(x + y, 0.5, self.training)
        return y


def test_a_module_of_ones_own() -> None:
    torch.manual_seed(0)
    model, x = Backwards().eval(), torch.randn(2, 5, 8)
    before = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        residua.fade(model, alpha_min=0.5, example=x)
    assert [at.name for at in blocks_of(model)] == ["first", "last"]
    assert [float(getattr(b, ALPHA)) for b in (model.first, model.last)] == [1.0, 0.5]
    y = x + model.early.table
    for block, alpha in ((model.first, 1.0), (model.first, 1.0), (model.last, 0.5)):
        y = alpha * y + block.inner(y) * block.scale
    torch.testing.assert_close(model(x), y + model.late.table)
    assert [step.name for step in residua.stream(model, x)] == ["first", "first", "last"]
    adapted.shortcuts(model).set_strength(0.5)
    assert [float(getattr(b, ALPHA)) for b in (model.first, model.last)] == [1.0, 0.75]
    assert torch.equal(residua.unfade(model)(x), before)
    assert not hasattr(model.first, INDEX)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("relu", "1, a .*Bent, .*post-activation, relu"),
        ("norm", "post-norm"),
        ("scaled", r"returns 0.7 x"),
        ("learned", "a parameter scales its shortcut"),
        ("in place", "changes its input in place"),
        ("dropout", "training changes it"),
        ("none", "no residual blocks"),
    ],
)
def test_modules_that_are_not_residual_are_refused(how: str, reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Bent(how), Bent(how))
    with pytest.raises(ValueError, match=reason):
        residua.fade(model, alpha_min=0.5, example=torch.randn(2, 5, 8))
    assert [type(m) for m in model] == [nn.Linear, Bent, Bent]


def test_without_an_example_the_error_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="pass example="):
        residua.fade(Backwards(), alpha_min=0.5)


def test_torchs_own_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 8)
    assert verify(model, x) == 2
    post = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    with pytest.raises(ValueError, match="post-norm"):
        residua.fade(post, alpha_min=0.5, example=x)


def test_blocks_known_and_unknown_fade_in_the_order_of_their_calls() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.ModuleList(timm.models.vision_transformer.Block(8, 2) for _ in range(2))
            self.early = nn.ModuleList(Mine(8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.early:
                x, _ = block(hidden=x, mask=torch.ones(1))
            for block in self.late:
                x = block(x)
            return x

    model, x = Mixed().eval(), torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match=r"Mine were not looked into.*example="):
        assert [at.name for at in blocks_of(model)] == ["late.0", "late.1"]
    residua.fade(model, alpha_min=0.5, example=x)
    assert [at.name for at in blocks_of(model)] == ["early.0", "early.1", "late.0", "late.1"]
    torch.testing.assert_close(residua.stream(model).alphas, torch.linspace(1, 0.5, 6))
    assert plain_class(model.late[0]) is timm.models.vision_transformer.Block


def test_shortcuts_that_stay_are_named() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(8, 8), Bent("plain"), Added(), Added())

        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks(x)
            return y + torch.sin(y)

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x)

    with pytest.warns(UserWarning, match=r"2 blocks fade; Whole \(itself\) .* stay as they are"):
        residua.fade(Whole(), alpha_min=0.5, example=torch.randn(2, 5, 8))


def test_finding_leaves_the_model_as_it_was() -> None:
    model, images = build("mobilenetv3_small_050")
    model.train()
    model.bn1.eval() if hasattr(model, "bn1") else None
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        located = blocks_of(model, images)
    assert len(located) == 7
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_weights_says_what_it_needs() -> None:
    with torch.device("meta"):
        model = Backwards()
    with pytest.raises(ValueError, match="on meta"):
        residua.stream(model, torch.randn(2, 5, 8, device="meta"))


def test_sums_outside_of_modules_are_told_what_to_become() -> None:
    class Inline(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = x + module(x)
            return x

    with pytest.raises(ValueError, match="make the sum a module of its own"):
        residua.stream(nn.Sequential(Inline(nn.Linear(8, 8), nn.Linear(8, 8))), torch.randn(2, 8))
