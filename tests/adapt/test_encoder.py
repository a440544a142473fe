"""A vision transformer of timm as the encoder of a masked autoencoder."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import residua
from residua.adapt.encoder import TimmViT, check, create_model, model_data, open_encoder
from residua.cli import main
from residua.evaluate import suite
from residua.nn import MAE
from residua.train import Pretrain, fit, prepare
from residua.train import checkpoint as ckpt
from residua.train.finetune_config import open_start

SMALL: dict[str, Any] = {"decoder_embed_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2}
# class token; two of them; registers; positions for patches only; no prefix at all
KINDS = {
    "vit_tiny_patch16_224": 1,
    "deit_tiny_distilled_patch16_224": 2,
    "vit_wee_patch16_reg1_gap_256": 1,
    "deit3_small_patch16_224": 1,
    "vit_medium_patch16_gap_256": 0,
}
QUICK: dict[str, Any] = {
    "data": "shapes", "encoder": "timm:test_vit", "img_size": 16, "patch_size": 4, "batch_size": 8, "cpu": True,
    "decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2, "workers": 0, "alpha_min": 0.6, "anneal": 0.5,
}  # fmt: skip


def randomise(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.1)


@pytest.mark.parametrize("name", KINDS)
def test_features_are_timms(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8}
    encoder = open_encoder(f"timm:{name}", **sizes).eval()
    randomise(encoder)
    assert encoder.num_prefix_tokens == KINDS[name]
    plain: Any = timm.create_model(name, num_classes=0, **sizes).eval()
    lacking, extra = plain.load_state_dict(encoder.state_dict(), strict=False)  # the same names
    assert extra == ["shortcut.alpha"]
    assert all(key.startswith(("attn_pool.", "fc_norm.")) for key in lacking)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), plain.forward_features(x), atol=1e-4, rtol=1e-4)
        assert len(residua.stream(encoder, x)) == 2 * len(plain.blocks)
        assert encoder(torch.randn(1, 3, 48, 32)).shape[1] == KINDS[name] + 24  # positions are interpolated


@pytest.mark.parametrize("shortcuts", [{"alpha_min": 0.5}, {"control": "branch"}, {"control": "both"}])
def test_fading_is_that_of_the_blocks(shortcuts: dict[str, Any]) -> None:
    torch.manual_seed(0)
    encoder = open_encoder("timm:test_vit", img_size=32, patch_size=8, **shortcuts).eval()
    randomise(encoder)
    plain: Any = timm.create_model("test_vit", num_classes=0, img_size=32, patch_size=8).eval()
    plain.load_state_dict(encoder.state_dict(), strict=False)
    residua.fade(plain, **shortcuts)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), plain.forward_features(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "vit_medium_patch16_gap_256"])
@pytest.mark.parametrize("decoder", ["plain", "ushape"])
def test_autoencoder_hides_patches_from_it(name: str, decoder: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "decoder": decoder, "zero_init": False, **SMALL}
    model: Any = create_model("mae_timm_vit", encoder=f"timm:{name}", **sizes)
    assert isinstance(model, MAE)
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    loss, pred, mask = model(images, noise)
    loss.backward()
    assert all(p.grad is not None for block in model.encoder.blocks for p in block.parameters())
    changed = images + mask.unflatten(1, (1, 4, 4)).repeat_interleave(8, 2).repeat_interleave(8, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(changed, noise)[1], pred)


def test_rebuilt_from_its_configuration() -> None:
    model: Any = create_model(
        "mae_timm_vit", encoder="timm:test_vit", img_size=32, patch_size=8, alpha_min=0.7, **SMALL
    )
    twin: Any = create_model(**model.config)
    assert twin.config == model.config
    twin.load_state_dict(model.state_dict())
    lone: Any = create_model(**model.encoder.config)
    assert isinstance(lone, TimmViT)
    assert lone.config == model.encoder.config
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied.state_dict(), model.state_dict())
    with torch.no_grad():  # a copy walks its own blocks
        for p in model.encoder.parameters():
            p.zero_()
    assert copied.encoder.located[0].block is copied.encoder.blocks[0]


def test_trained_weights_keep_their_branches_and_bring_their_preprocessing(tmp_path: Path) -> None:
    """Branches start at zero under a U-shaped decoder unless the encoder is trained, or told otherwise."""
    torch.manual_seed(0)
    source = timm.create_model("test_vit", img_size=32, num_classes=0)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    made: dict[str, Any] = {"encoder": "timm:test_vit", "img_size": 32, **SMALL}

    def branch(**options: Any) -> Tensor:
        model: Any = create_model("mae_timm_vit", **made, **options)
        decoder.append(bool(model.decoder.blocks[0].mlp.fc2.weight.any()))
        return model.encoder.blocks[2].mlp.fc2.weight

    decoder: list[bool] = []
    assert not branch().any()
    assert branch(zero_init=False).any()
    assert branch(decoder="plain").any()
    assert torch.equal(branch(weights=str(tmp_path / "w.pth")), source.blocks[2].mlp.fc2.weight)
    assert decoder == [False, True, True, False]  # which is never trained before
    assert open_encoder("timm:test_vit", img_size=32).preprocessing is None  # nothing that it was trained with
    found = open_encoder("timm:test_vit", img_size=32, weights=str(tmp_path / "w.pth"))
    assert found.preprocessing.mean == timm.data.resolve_model_data_config(source)["mean"]


def test_a_classifier_around_it_norms_once() -> None:
    """Before its head; the encoder's own norm is left out."""
    model: Any = create_model("timm_vit", encoder="timm:test_vit", img_size=32, num_classes=3, readout="cls")
    assert isinstance(model.encoder.norm, torch.nn.Identity)
    assert (model.readout, model(torch.randn(2, 3, 32, 32)).shape) == ("cls", (2, 3))
    lone: Any = create_model("timm_vit", encoder="timm:test_vit", img_size=32)
    assert isinstance(lone.norm, torch.nn.LayerNorm)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_base_patch16_rope_224", "positions of their own"),
        ("eva02_tiny_patch14_224", "positions of their own"),
        ("swin_tiny_patch4_window7_224", "a SwinTransformer is no plain sequence"),
        ("vit_small_r26_s32_224", "pass a network of their own"),
        ("vit_small_patch16_18x2_224", "not attention, then MLP"),
        ("resnet18", "no vision transformer"),
    ],
)
def test_refusals_say_why(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"timm:{name} cannot be the encoder of a masked autoencoder: .*{reason}"):
        open_encoder(f"timm:{name}")


def test_more_refusals_that_say_why() -> None:
    vit = timm.create_model("test_vit", pos_embed="none")
    with pytest.raises(ValueError, match="mine cannot be the encoder of a masked autoencoder: it adds no positions"):
        check(vit, "mine")
    with pytest.raises(ValueError, match=r"'vit_tiny_patch16_224' cannot be .*: give timm:NAME"):
        open_encoder("vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"timm:test_vit cannot be built with {'patch_size': 'large'}"):
        open_encoder("timm:test_vit", patch_size="large")


def test_images_of_published_weights_are_normalised_as_timm_says() -> None:
    for name in ("vit_base_patch16_224", "deit_tiny_patch16_224"):
        config: Any = timm.get_pretrained_cfg(name)
        pre = model_data(f"timm:{name}", 3)
        assert (pre.mean, pre.std) == (config.mean, config.std)
    assert model_data("timm:test_vit", 1).in_chans == 1


def test_settings_that_contradict() -> None:
    for given, reason in (
        ({"depth": 3}, "depth is 3, but timm:test_vit brings its own"),
        ({"encoder": None, "encoder_weights": "published"}, "there is no encoder"),
        ({"encoder": "torchvision:vit_b_16"}, "no vision transformer of timm"),
    ):
        with pytest.raises(ValueError, match=reason):
            prepare(Pretrain().override(**QUICK | given, steps=2, dry_run=True))


def weights(run: Path) -> dict[str, Tensor]:
    return ckpt.load_file(ckpt.checkpoints(run)[-1] / "model.safetensors")


def test_a_run_resumes_loads_and_is_evaluated(tmp_path: Path) -> None:
    whole = fit(prepare(Pretrain().override(**QUICK, steps=4, checkpoint_every=2, keep=0, out=str(tmp_path / "a"))))
    assert float(whole.encoder.shortcut.alpha[-1]) == pytest.approx(0.6)

    session = prepare(Pretrain().override(**QUICK, steps=4, checkpoint_every=2, keep=0, out=str(tmp_path / "b")))
    loop = session.loop()
    session.config.save(tmp_path / "b" / "config.yaml")
    for images in loop.batches(0, 2):
        loop.advance(images)
    loop.save()
    session.close()
    fit(prepare(Pretrain().override(out=str(tmp_path / "b"), resume=True, cpu=True, workers=0)))
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)

    model: Any = residua.load(tmp_path / "a")
    assert model.preprocessing.img_size == (16, 16)
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    report = suite.evaluate(model, "shapes", probe=None, limit=40, layers="all", neighbors=0)
    assert report.layers == list(range(model.encoder.depth))


def test_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a file under a new head, at another image size; of a network that is no ViT the error says so."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    trained: Any = timm.create_model("test_vit", num_classes=3)
    torch.save(trained.state_dict(), "trained.pt")
    given = ["--weights", "trained.pt", "--data", "shapes?n=32&test=16", "--img-size", "32", "--lr", "1e-9"]
    assert main(["finetune", "timm:test_vit", *given, "--steps", "1", "--cpu", "--out", "run"]) in (0, None)
    model: Any = residua.load("run")
    for name, value in model.encoder.state_dict().items():
        if name.startswith("blocks."):
            torch.testing.assert_close(value, trained.state_dict()[name], atol=1e-6, rtol=1e-6)
    assert model.preprocessing.img_size == (32, 32)
    assert model.preprocessing.mean == timm.data.resolve_model_data_config(trained)["mean"]
    with pytest.raises(ValueError, match=r"timm:test_resnet cannot be fine-tuned here: it is no vision transformer"):
        open_start("timm:test_resnet", "random")
    with pytest.raises(ValueError, match=r"weights is random, but vit_nano is no timm:NAME"):
        open_start("vit_nano", "random")


def test_a_trained_model_fades_while_it_goes_on(tmp_path: Path) -> None:
    """Weights of a file, ordinary shortcuts at first, and branches that are not set to zero."""
    torch.manual_seed(0)
    trained = timm.create_model("test_vit", num_classes=0, img_size=16, patch_size=4)
    file = tmp_path / "trained.pt"
    torch.save(trained.state_dict(), file)
    session = prepare(Pretrain().override(**QUICK | {"encoder_weights": str(file)}, steps=4, dry_run=True))
    own, theirs = session.model.encoder.state_dict(), trained.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in own if key in theirs)
    config = timm.data.resolve_model_data_config(trained)
    assert session.preprocessing.mean == config["mean"]
    loop = session.loop()
    seen = []
    for images in loop.batches(0, 4):
        loop.advance(images)
        seen.append(float(loop.shortcut.alpha[-1]))
    assert seen == pytest.approx([1.0, 0.8, 0.6, 0.6])
