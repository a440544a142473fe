"""Models of other libraries are read layer by layer, like encoders of our own."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import timm
import torch
import torchvision
from torch import nn

import residua
from residua.adapt import Foreign, encoder_of, open_model, untrained
from residua.adapt.foreign import as_tokens
from residua.cli import main
from residua.data import Preprocessing, Splits
from residua.evaluate import extract
from residua.evaluate.suite import evaluate

TINY: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def small(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return open_model(name, pretrained=False, **options)


def test_layers_of_a_timm_transformer(digits: Splits) -> None:
    model = small("timm:test_vit", img_size=32)
    found = extract(model, digits, layers="all", readout=("tokens", "cls", "patches"), limit=12, splits=("test",))
    assert found.test is not None
    source = residua.evaluate.features.pick_split(digits, "test", 12, 0)
    assert source is not None
    images = model.preprocessing([source.read(i, 32) for i in range(12)])  # grey digits become coloured
    with torch.no_grad():
        last, inner = model.forward_intermediates(images, return_prefix_tokens=True, output_fmt="NLC")
        tokens = torch.cat([inner[0][1], inner[0][0]], 1)
    torch.testing.assert_close(found.test.layer(0), tokens.mean(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.test.of("cls").last, last[:, 0], atol=1e-4, rtol=1e-4)
    prefix = model.num_prefix_tokens
    torch.testing.assert_close(found.test.of("patches").last, last[:, prefix:].mean(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"), [("timm:test_resnet", {}), ("timm:test_convnext", {}), ("torchvision:resnet18", {})]
)
def test_maps_are_averaged_over_positions(name: str, options: dict[str, Any], digits: Splits) -> None:
    model = small(name, **options)
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    seen: list[torch.Tensor] = []
    block = Foreign(model).located[-2].block
    handle = block.register_forward_hook(lambda _, __, out: seen.append(out))
    found = extract(model, digits, layers="all", limit=5, splits=("test",))
    handle.remove()
    assert found.test is not None
    layers = found.test.layers
    torch.testing.assert_close(found.test.layer(layers[-2]), seen[-1].mean((2, 3)), atol=1e-5, rtol=1e-5)
    assert len({found.test.layer(i).shape[1] for i in layers}) > 1  # stages of several widths
    with pytest.raises(ValueError, match="no class token"):
        extract(model, digits, readout="cls", limit=5)


@pytest.mark.parametrize("name", ["cait_xxs24_224", "xcit_nano_12_p8_224"])
def test_a_class_token_that_joins_late_is_in_the_last_layer_alone(name: str, digits: Splits) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, depth=2, embed_dim=32, num_heads=2).eval()
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    seen: list[torch.Tensor] = []
    handle = Foreign(model).located[0].block.register_forward_hook(lambda _, __, out: seen.append(out))
    found = extract(model, digits, layers="all", readout="patches", limit=5, splits=("test",))
    handle.remove()
    assert found.test is not None
    torch.testing.assert_close(found.test.layer(0), seen[-1].mean(1), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="class token joins after its blocks"):
        extract(model, digits, layers="all", readout="cls", limit=5)
    assert extract(model, digits, readout="cls", limit=5, splits=("test",)).test is not None


def test_channels_last_is_recognised() -> None:
    x = torch.randn(2, 5, 6, 16)
    assert torch.equal(as_tokens(x, {16}), x.flatten(1, 2))
    assert torch.equal(as_tokens(x.permute(0, 3, 1, 2), {16}), x.flatten(1, 2))


def test_a_map_as_high_as_it_is_wide_in_channels_goes_by_the_model() -> None:
    x = torch.randn(2, 16, 16, 16)
    assert torch.equal(as_tokens(x, {16}, channels_last=True), x.flatten(1, 2))
    assert torch.equal(as_tokens(x, {16}), x.flatten(2).transpose(1, 2))
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), img_size=384, num_classes=0).eval()
    swin.preprocessing = residua.data.Preprocessing((384, 384), (0.5,) * 3, (0.5,) * 3)
    images, seen = torch.randn(1, 3, 384, 384), {}
    with torch.no_grad():
        Foreign(swin).forward_features(images, seen.__setitem__)
        first = swin.layers[0](swin.patch_embed(images))
    torch.testing.assert_close(seen["blocks.0.mlp"], first.flatten(1, 2))
    model = small("timm:swin_tiny_patch4_window7_224", img_size=56, window_size=7, embed_dim=12, num_heads=(1, 2, 2, 2))
    assert Foreign(model).widths() == [12] * 2 + [24] * 2 + [48] * 6 + [96] * 2


@pytest.mark.parametrize(
    ("name", "prefix"), [("vit", 1), ("vit_mae", 1), ("deit", 2), ("dinov3_vit", 3), ("siglip_vision_model", 0)]
)
def test_layers_of_transformers(name: str, prefix: int) -> None:
    pytest.importorskip("transformers")
    more = {"num_register_tokens": 2} if name == "dinov3_vit" else {}
    model = small(f"transformers:{name}", **TINY, **more)
    encoder = encoder_of(model)
    assert (encoder.depth, encoder.num_prefix_tokens) == (2, prefix)
    x, taps = torch.randn(2, 3, 16, 16), {}
    with torch.no_grad():
        last = encoder.forward_features(x, taps.__setitem__)
        again = encoder.forward_features(x)
    assert torch.equal(last, again)  # nothing is hidden, nothing shuffled
    assert last.shape == (2, prefix + 16, 16)
    assert [*taps] == ["blocks.0.mlp", "blocks.1.mlp"]
    with torch.no_grad():
        given = {"noise": torch.arange(16.0).expand(2, -1)} if name == "vit_mae" else {}
        theirs = model(x, output_hidden_states=True, **given)
    torch.testing.assert_close(last, theirs.last_hidden_state)
    torch.testing.assert_close(taps["blocks.0.mlp"], theirs.hidden_states[1])


def test_transformers_read_images_of_another_size_with_interpolated_positions() -> None:
    pytest.importorskip("transformers")
    model, x = small("transformers:vit", **TINY), torch.randn(2, 3, 24, 16)
    with torch.no_grad():
        found, theirs = encoder_of(model)(x), model(x, interpolate_pos_encoding=True).last_hidden_state
    assert found.shape == (2, 1 + 6 * 4, 16)
    torch.testing.assert_close(found, theirs)


def test_a_masked_autoencoder_keeps_its_ratio() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**TINY, mask_ratio=0.5)).eval()
    model.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    encoder, x = encoder_of(model), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert encoder(x).shape == (2, 17, 16)
        assert torch.equal(encoder(x.flip(0)), encoder(x).flip(0))
    assert model.config.mask_ratio == 0.5


def test_one_channel_is_repeated_for_a_model_of_colours() -> None:
    encoder, x = encoder_of(small("timm:test_vit", img_size=32)), torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(encoder(x), encoder(x.repeat(1, 3, 1, 1)))


def test_vectors_are_one_token_and_sequences_stay() -> None:
    x = torch.randn(2, 8)
    assert torch.equal(as_tokens(x), x[:, None])
    x = torch.randn(2, 5, 8)
    assert as_tokens(x, {5}) is x


def test_fading_changes_features_and_their_cache(digits: Splits, tmp_path: Path) -> None:
    model = small("timm:test_vit", img_size=32)
    plain = extract(model, digits, limit=6, cache=tmp_path).train.last
    residua.fade(model, alpha_min=0.3)
    faded = extract(model, digits, limit=6, cache=tmp_path).train.last
    assert not torch.allclose(faded, plain)
    residua.unfade(model)
    assert torch.equal(extract(model, digits, limit=6, cache=tmp_path).train.last, plain)


def test_untrained_twins() -> None:
    model = residua.fade(small("timm:test_vit", img_size=32), alpha_min=0.5)
    twin = untrained(model)
    torch.testing.assert_close(residua.stream(twin).alphas, residua.stream(model).alphas)
    assert not torch.equal(twin.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)  # type: ignore[union-attr,index]
    unnamed: Any = timm.create_model("test_resnet")
    unnamed.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    other: Any = untrained(unnamed)
    first = [next(m for m in part.modules() if isinstance(m, nn.Conv2d)).weight for part in (other, unnamed)]
    assert not torch.equal(*first)
    assert all(m.weight.any() for m in other.modules() if isinstance(m, nn.BatchNorm2d))  # no branch is silent


def test_every_weight_of_a_twin_is_drawn_anew() -> None:
    """Also tables and tokens, which no layer owns; of a model that fades, the twin fades alike and the model stays."""
    torch.manual_seed(0)
    model: Any = timm.create_model("test_vit", img_size=32)
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    alphas = residua.stream(residua.fade(model, alpha_min=0.5)).alphas
    twin: Any = untrained(model)
    for name, value in twin.named_parameters():
        if value.ndim > 1:
            assert 0.001 < value.std() < 1, name
    torch.testing.assert_close(residua.stream(twin).alphas, alphas)
    torch.testing.assert_close(residua.stream(model).alphas, alphas)
    assert all(bool((p == 3).all()) for p in model.parameters())


def test_twins_have_branches_and_need_no_files(tmp_path: Path) -> None:
    """timm lets the last norm of a branch start at zero; a folder that a model came from may be gone."""
    named: Any = small("timm:test_resnet")
    assert not all(m.weight.any() for m in named.modules() if isinstance(m, nn.BatchNorm2d))
    twin: Any = untrained(named)
    assert all(m.weight.any() for m in twin.modules() if isinstance(m, nn.BatchNorm2d))
    transformers = pytest.importorskip("transformers")
    transformers.ViTModel(transformers.ViTConfig(**TINY), add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text('{"size": {"height": 16}}')
    model: Any = open_model(f"transformers:{tmp_path / 'vit'}")
    shutil.rmtree(tmp_path / "vit")
    assert not torch.equal(untrained(model).state_dict()["embeddings.cls_token"], model.embeddings.cls_token)


def test_counting_widths_leaves_running_statistics_alone() -> None:
    model: Any = small("timm:test_resnet").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Foreign(model).widths()
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_layers_of_torchvisions_transformer() -> None:
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    model: Any = torchvision.models.VisionTransformer(**sizes).eval()
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    model.preprocessing = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3)
    encoder, images = encoder_of(model), torch.randn(2, 3, 16, 16)
    assert (encoder.depth, encoder.num_prefix_tokens) == (2, 1)
    tokens = torch.cat([model.class_token.expand(2, -1, -1), model._process_input(images)], 1)
    torch.testing.assert_close(encoder(images), model.encoder(tokens))
    torch.testing.assert_close(model.heads(encoder(images)[:, 0]), model(images))


def test_a_model_must_say_what_images_it_takes(digits: Splits) -> None:
    with pytest.raises(ValueError, match=r"set model\.preprocessing"):
        evaluate(timm.create_model("test_vit"), digits)


def test_evaluate_all_layers(digits: Splits) -> None:
    model = small("timm:test_resnet")
    model.preprocessing = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3)
    report = evaluate(model, digits, probe="lbfgs", layers="all", limit=60, neighbors=0, k=5)
    subjects = {score.subject for score in report.scores}
    assert subjects == {"model", "random init", "pixels"}
    assert len([s for s in report.scores if s.metric == "linear probe" and s.subject == "model"]) == len(report.layers)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--weights", "random", "--data", "digits", "--img-size", "32", "--device", "cpu"]
    score = ["--layers", "all", "--probe", "none", "--limit", "40", "--no-cache", "--out", "scores.json"]
    assert main(["evaluate", "timm:test_vit", *common, *score]) in (0, None)
    scores = json.loads(Path("scores.json").read_text())
    assert scores["layers"] == list(range(6))
    assert main(["embed", "timm:test_resnet", *common, "--layers", "0", "3"]) in (0, None)
    table = pq.read_table("features.parquet")
    widths = Foreign(open_model("timm:test_resnet", pretrained=False)).widths()
    assert [len(table[f"layer_{i}"][0]) for i in (0, 3)] == [widths[0], widths[3]]
    assert main(
        ["anatomy", "timm:test_vit", *common, "--top", "3", "--images", "2", "--split", "test", "--token", "0"]
    ) in (0, None)
    assert Path("anatomy-timm-test_vit/anatomy.html").exists()


def test_what_cannot_be_read_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*args: str) -> str:
        assert main(["evaluate", *args, "--data", "digits", "--device", "cpu"]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "near it are test_vit" in refused("timm:test_vitt")
    size = refused("timm:test_vit", "--weights", "random", "--img-size", "33")
    assert "timm:test_vit does not run on images of 33 x 33: Input height (33) should be divisible" in size
    (tmp_path / "bad.pt").write_text("no weights")
    assert "bad.pt cannot be read as weights" in refused("timm:test_vit", "--weights", str(tmp_path / "bad.pt"))
    assert "no residual blocks" in refused("torchvision:vgg11", "--weights", "random", "--img-size", "64")
    pytest.importorskip("transformers")
    assert "GPT2Model reads text" in refused("transformers:gpt2", "--weights", "random")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_read(dtype: torch.dtype, digits: Splits) -> None:
    model = small("timm:test_vit", img_size=32)
    plain = extract(model, digits, limit=6, splits=("test",)).test
    found = extract(model.to(dtype), digits, limit=6, splits=("test",)).test
    assert plain is not None
    assert found is not None
    torch.testing.assert_close(found.last, plain.last, atol=0.05, rtol=0.05)


class Own(nn.Module):
    """A class token, two registers, four patches, and a configuration that is not one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.num_register_tokens = nn.Conv2d(1, 8, 4, 4), 2
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.registers = nn.Parameter(torch.randn(1, 2, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.preprocessing = Preprocessing((8, 8), (0.5,), (0.5,), 1)
        self.config = SimpleNamespace(image_size=16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        prefix = [token.expand(len(images), -1, -1) for token in (self.cls_token, self.registers)]
        return self.body(torch.cat([*prefix, self.patch(images).flatten(2).mT], 1))


def test_a_model_of_ones_own_with_registers() -> None:
    encoder, images = Foreign(Own().eval()), torch.randn(2, 1, 8, 8)
    assert encoder.num_prefix_tokens == 3
    torch.testing.assert_close(encoder.forward_features(images), encoder.model(images))


def test_layers_of_pieces_of_images_are_refused_and_the_last_is_read(digits: Splits) -> None:
    model = small("timm:mobilevit_xxs", img_size=64)
    with pytest.raises(ValueError, match="pieces of 2 images"):
        extract(model, digits, layers="all", limit=2, splits=("test",))
    found = extract(model, digits, limit=2, splits=("test",)).test
    assert found is not None
    assert len(found.last) == 2
