"""Weights under other projects' names: the original masked autoencoder's, transformers' and DINO's."""

import argparse
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import residua
from residua.nn import MAE, ViT, encoder_of
from residua.nn.weights import infer_config, load_weights, translate, unwrap
from residua.train.checkpoint import CheckpointError, initialize

pytestmark = pytest.mark.filterwarnings("ignore:.*does not say how images are prepared")
WIDTH, DEPTH = 64, 2  # published names leave no trace of the heads: 64 channels each
SMALL = {
    "img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 1,
    "decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 1,
}  # fmt: skip


def published(decoder: bool) -> dict[str, Tensor]:
    """A state dict as in mae_pretrain_vit_*.pth: names written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 17, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, 4, 4),
        "patch_embed.proj.bias": (WIDTH,),
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
    }

    def block(prefix: str, d: int) -> dict[str, tuple[int, ...]]:
        sizes = {
            "norm1.weight": (d,), "norm1.bias": (d,), "norm2.weight": (d,), "norm2.bias": (d,),
            "attn.qkv.weight": (3 * d, d), "attn.qkv.bias": (3 * d,), "attn.proj.weight": (d, d),
            "attn.proj.bias": (d,), "mlp.fc1.weight": (4 * d, d), "mlp.fc1.bias": (4 * d,),
            "mlp.fc2.weight": (d, 4 * d), "mlp.fc2.bias": (d,),
        }  # fmt: skip
        return {f"{prefix}.{name}": size for name, size in sizes.items()}

    for i in range(DEPTH):
        shapes |= block(f"blocks.{i}", WIDTH)
    if decoder:
        shapes |= {
            "mask_token": (1, 1, 32), "decoder_pos_embed": (1, 17, 32),
            "decoder_embed.weight": (32, WIDTH), "decoder_embed.bias": (32,),
            "decoder_norm.weight": (32,), "decoder_norm.bias": (32,),
            "decoder_pred.weight": (48, 32), "decoder_pred.bias": (48,),
            **block("decoder_blocks.0", 32),
        }  # fmt: skip
    return {name: 0.2 * torch.randn(size) for name, size in shapes.items()}


def save(state: dict[str, Tensor], folder: Path) -> Path:
    path = folder / "mae_pretrain_vit_small.pth"
    torch.save({"model": state}, path)
    return path


def published_features(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """What timm's ViT makes of the encoder's weights."""
    from timm.models.vision_transformer import VisionTransformer

    twin = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=WIDTH, depth=DEPTH, num_heads=1, num_classes=0, global_pool=""
    ).eval()
    twin.load_state_dict({k: v for k, v in state.items() if not k.startswith(("decoder", "mask"))})
    return twin(images)


@pytest.mark.parametrize("decoder", [False, True])
def test_published_files_load_for_evaluation(tmp_path: Path, decoder: bool) -> None:
    state = published(decoder)
    model = residua.load(save(state, tmp_path))
    assert isinstance(model, MAE if decoder else ViT)
    assert not model.training
    images = torch.randn(2, 3, 16, 16)
    features = encoder_of(model)(images)
    torch.testing.assert_close(features, published_features(state, images), rtol=1e-5, atol=1e-5)
    assert model.preprocessing.img_size == (16, 16)
    assert model.preprocessing.mean == (0.485, 0.456, 0.406)
    assert encoder_of(model).preprocessing is model.preprocessing
    if decoder:
        assert torch.equal(model.decoder.blocks[0].mlp.fc1.weight, state["decoder_blocks.0.mlp.fc1.weight"])
        assert torch.equal(model.decoder.token, state["mask_token"])


def test_a_published_encoder_starts_a_u_shaped_autoencoder(tmp_path: Path) -> None:
    state = published(decoder=False)
    model = residua.create_model("mae_vit", **SMALL, alpha_min=0.7)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    initialize(model, save(state, tmp_path))
    assert torch.equal(model.encoder.blocks[1].attn.qkv.weight, state["blocks.1.attn.qkv.weight"])
    assert torch.equal(model.encoder.cls_token, state["cls_token"])
    after = model.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before if k.startswith("decoder."))
    assert torch.equal(after["encoder.shortcut.alpha"], before["encoder.shortcut.alpha"])
    assert torch.isfinite(model(torch.randn(2, 3, 16, 16))[0])
    with pytest.raises(ValueError, match=r"different architecture: decoder\."):
        initialize(model, save(published(decoder=True), tmp_path))


def test_a_published_decoder_starts_an_equal_one(tmp_path: Path) -> None:
    state = published(decoder=True)
    model = residua.create_model("mae_vit", **SMALL, decoder="plain")
    initialize(model, save(state, tmp_path))
    assert torch.equal(model.decoder.pred.weight, state["decoder_pred.weight"])
    assert torch.equal(model.encoder.norm.weight, state["norm.weight"])


def test_another_image_size_keeps_its_own_positions(tmp_path: Path) -> None:
    state = published(decoder=False)
    model = residua.create_model("mae_vit", **SMALL | {"img_size": 24})
    positions = model.encoder.pos_embed.clone()
    initialize(model, save(state, tmp_path))
    assert torch.equal(model.encoder.pos_embed, positions)
    assert torch.equal(model.encoder.blocks[0].mlp.fc2.bias, state["blocks.0.mlp.fc2.bias"])


# ---------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def vitmae() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.ViTMAEConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, decoder_hidden_size=24, decoder_num_hidden_layers=1, decoder_num_attention_heads=3,
        decoder_intermediate_size=48, mask_ratio=0.5, norm_pix_loss=True, layer_norm_eps=1e-6,
    )  # fmt: skip
    model = transformers.ViTMAEForPreTraining(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_transformers_folder_loads_with_its_settings(vitmae: Any, tmp_path: Path, kind: str) -> None:
    vitmae.save_pretrained(tmp_path)
    if kind == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    ours = residua.load(tmp_path)
    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    with torch.no_grad():
        theirs = vitmae(images, noise=noise)
        loss, pred, mask = ours(images, noise)
    assert torch.equal(mask, theirs.mask)
    torch.testing.assert_close(pred, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-5, atol=1e-5)


def test_what_a_transformers_folder_leaves_out_is_as_transformers_has_it(vitmae: Any, tmp_path: Path) -> None:
    vitmae.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_norm_eps", "norm_pix_loss", "mask_ratio"):
        said.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs, ours = type(vitmae).from_pretrained(tmp_path).eval(), residua.load(tmp_path)
    assert isinstance(ours, MAE)
    assert (ours.encoder.norm_eps, ours.norm_pix, ours.mask_ratio) == (1e-12, False, 0.75)
    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(images, noise)[0], theirs(images, noise=noise).loss, rtol=1e-5, atol=1e-5)


def on_disk(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that published transformers checkpoints have on disk, from those of version 5 in memory."""
    rules = [
        ("vit.layers.", "vit.encoder.layer."),
        (".attention.q_proj.", ".attention.attention.query."),
        (".attention.k_proj.", ".attention.attention.key."),
        (".attention.v_proj.", ".attention.attention.value."),
        (".attention.o_proj.", ".attention.output.dense."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    ]
    out = {}
    for name, value in state.items():
        for new, old in rules:
            name = name.replace(new, old)
        out[name] = value
    return out


def test_names_in_memory_and_on_disk_are_the_same_weights(vitmae: Any) -> None:
    memory = vitmae.state_dict()
    disk = on_disk(memory)
    assert "vit.encoder.layer.0.attention.attention.query.weight" in disk
    ours, same = translate(memory), translate(disk)
    assert ours.keys() == same.keys()
    assert all(torch.equal(ours[k], same[k]) for k in ours)
    assert {k.split(".")[0] for k in ours} == {"encoder", "decoder"}
    assert ours["encoder.blocks.1.attn.qkv.weight"].shape == (96, 32)


def test_vitmae_starts_an_autoencoder(vitmae: Any, tmp_path: Path) -> None:
    vitmae.save_pretrained(tmp_path)
    sizes = {
        **SMALL,
        "embed_dim": 32,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "decoder_embed_dim": 24,
        "decoder_num_heads": 3,
    }
    model = residua.create_model("mae_vit", **sizes, decoder="plain", alpha_min=0.8)
    initialize(model, tmp_path)
    expected = translate(vitmae.state_dict())
    for name in ("encoder.blocks.1.mlp.fc1.weight", "encoder.cls_token", "encoder.pos_embed", "decoder.pred.weight"):
        assert torch.equal(model.state_dict()[name], expected[name])


@pytest.mark.parametrize("pooler", [True, False])
def test_a_folder_of_a_plain_vit(tmp_path: Path, pooler: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=24, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = transformers.ViTModel(config, add_pooling_layer=pooler).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    theirs.save_pretrained(tmp_path)
    ours = residua.load(tmp_path)
    assert isinstance(ours, ViT)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = theirs(images).last_hidden_state
        torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what is refused


def dino(prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An encoder as published, and the same under DINO's names while it trains: below a projection head."""
    encoder = published(decoder=False)
    head = {
        "mlp.0.weight": (8, WIDTH),
        "mlp.0.bias": (8,),
        "last_layer.weight_g": (9, 1),
        "last_layer.weight_v": (9, 8),
    }
    above = prefix.removesuffix("backbone.")
    heads = {f"{above}head.{name}": torch.randn(size) for name, size in head.items()}
    return encoder, {f"{prefix}{name}": value for name, value in encoder.items()} | heads


@pytest.mark.parametrize("prefix", ["", "backbone.", "module.backbone.", "module."])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@torch.no_grad()
def test_dino_encoders_load_and_their_heads_are_dropped(tmp_path: Path, prefix: str, suffix: str) -> None:
    from safetensors.torch import save_file

    encoder, state = dino(prefix)
    path = tmp_path / f"dino_deitsmall16_pretrain.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    images = torch.randn(2, 3, 16, 16)
    model: Any = residua.load(path)
    assert isinstance(model, ViT)
    torch.testing.assert_close(model(images), published_features(encoder, images), rtol=1e-4, atol=1e-4)
    start: Any = residua.create_model("mae_vit", **SMALL)
    initialize(start, path)
    assert torch.equal(start.encoder.blocks[1].mlp.fc2.weight, encoder["blocks.1.mlp.fc2.weight"])


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_names_of_compiled_models_are_read(tmp_path: Path, prefix: str, suffix: str) -> None:
    from safetensors.torch import save_file

    from residua.adapt.names import read_weights

    encoder = published(decoder=False)
    state, path = {f"{prefix}{name}": value for name, value in encoder.items()}, tmp_path / f"vit.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save({"model": state}, path)
    model: Any = residua.load(path)
    assert torch.equal(model.blocks[1].mlp.fc2.weight, encoder["blocks.1.mlp.fc2.weight"])
    assert set(read_weights(path)) == set(encoder)
    inner = {name.replace("blocks.", "blocks._orig_mod."): value for name, value in encoder.items()}
    assert set(translate(inner)) == {f"encoder.{name}" for name in encoder}


@torch.no_grad()
def test_a_classifier_that_norms_what_it_pools_brings_its_encoder(tmp_path: Path) -> None:
    """As MAE's fine-tuned ones do, whose encoders end without a norm."""
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1}
    twin = timm.create_model("vit_tiny_patch16_224", global_pool="avg", num_classes=5, **sizes).eval()
    torch.save({"model": twin.state_dict()}, tmp_path / "finetuned.pth")
    model: Any = residua.load(tmp_path / "finetuned.pth")
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), twin.forward_features(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("token", "said"), [({"reg_tokens": 4}, "cls_token, reg_token"), ({"class_token": False}, "no token")]
)
def test_other_tokens_than_a_class_token_are_named(tmp_path: Path, token: dict[str, Any], said: str) -> None:
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 1}
    twin = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="avg", **sizes, **token)
    torch.save(twin.state_dict(), tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match=f"these weights have {said}, where"):
        residua.load(tmp_path / "vit.pth")


def test_of_dinos_two_networks_the_teacher_is_read(tmp_path: Path) -> None:
    teacher, below_teacher = dino("backbone.")
    _, below_student = dino("module.backbone.")
    path = tmp_path / "dino_deitsmall16_pretrain_full_checkpoint.pth"
    content = {"student": below_student, "teacher": below_teacher, "epoch": 100, "optimizer": {"state": {}}}
    torch.save(content | {"args": argparse.Namespace(arch="deit_small")}, path)
    model: Any = residua.load(path)
    assert torch.equal(model.blocks[1].mlp.fc2.weight, teacher["blocks.1.mlp.fc2.weight"])
    state = translate(unwrap(content))
    assert set(state) == {f"encoder.{name}" for name in teacher}
    assert torch.equal(state["encoder.norm.weight"], teacher["norm.weight"])
    del content["teacher"]
    assert set(translate(unwrap(content))) == set(state)
    assert unwrap({"model": teacher}) is teacher
    assert unwrap(teacher) is teacher
    assert unwrap([1]) == [1]


def test_another_architecture_is_named(tmp_path: Path) -> None:
    file = save(published(decoder=False), tmp_path)
    wide = residua.create_model("mae_vit", **SMALL | {"embed_dim": 128, "num_heads": 2})
    with pytest.raises(ValueError, match=r"mae_pretrain_vit_small.pth holds a different architecture.*\(1, 1, 64\)"):
        initialize(wide, file)
    deep = residua.create_model("mae_vit", **SMALL | {"depth": 3})
    with pytest.raises(ValueError, match=r"different architecture.*blocks.2.*missing"):
        initialize(deep, file)
    shallow = residua.create_model("mae_vit", **SMALL | {"depth": 1})
    before = {k: v.clone() for k, v in shallow.state_dict().items()}
    with pytest.raises(ValueError, match=r"different architecture.*blocks.1.*no place"):
        initialize(shallow, file)
    assert all(torch.equal(v, before[k]) for k, v in shallow.state_dict().items())  # and nothing was loaded


def test_weights_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "resnet.pth"
    torch.save({"conv1.weight": torch.zeros(4, 3, 7, 7), "fc.bias": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"no weights of a vision transformer.*conv1.weight"):
        residua.load(path)
    torch.save([1, 2, 3], path)
    with pytest.raises(CheckpointError, match="no state dict of tensors"):
        residua.load(path)
    path.write_bytes(b"not weights at all")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        residua.load(path)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_malicious_file_is_refused_and_runs_nothing(tmp_path: Path, writer: str) -> None:
    trap, path = tmp_path / "ran", tmp_path / "mae_pretrain_vit_base.pth"
    content = {"model": {"cls_token": Malicious(trap)}}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    for read in (residua.load, lambda p: initialize(residua.create_model("mae_vit", **SMALL), p)):
        with pytest.raises(CheckpointError, match="cannot be read as weights"):
            read(path)
    assert not trap.exists()
    torch.load(path, weights_only=False) if writer == "torch" else pickle.loads(path.read_bytes())
    assert trap.exists()  # the trap was armed


def test_sizes_are_read_off_the_shapes() -> None:
    config = infer_config(translate(published(decoder=True)))
    assert config["img_size"] == (16, 16)
    assert config["patch_size"] == (4, 4)
    assert (config["embed_dim"], config["depth"], config["num_heads"], config["mlp_ratio"]) == (64, 2, 1, 4.0)
    assert (config["decoder"], config["decoder_embed_dim"], config["decoder_depth"]) == ("plain", 32, 1)


def test_positions_that_are_no_square_are_not_guessed() -> None:
    state = published(decoder=False)
    state["pos_embed"] = torch.randn(1, 1 + 6, WIDTH)
    with pytest.raises(ValueError, match="6 positions"):
        infer_config(translate(state))


def test_a_lone_encoder_takes_an_autoencoders_weights() -> None:
    mae = residua.create_model("mae_vit", **SMALL, decoder="plain")
    vit = residua.create_model("vit", **{k: v for k, v in SMALL.items() if not k.startswith("decoder")})
    load_weights(vit, translate(mae.state_dict()), what="mae")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(vit(images), mae.encoder(images))
