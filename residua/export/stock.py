"""Stock networks out: timm, transformers and torchvision load these folders without this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from residua.adapt.encoder import TimmViT
from residua.adapt.folder import CROP, CROP_MODE, EACH, FINAL_NORM
from residua.adapt.names import written
from residua.data import Preprocessing
from residua.data.augment import uncropped
from residua.disk import readable
from residua.export.clean import Export
from residua.export.fold import ExportError, Folded, fold_resnet, fold_vit, single_eps_difference
from residua.nn import MAE, Classifier, ResNet, ViT, encoder_of

FILES = ("model.safetensors", "config.json", "preprocessor_config.json")
TIMM_EPS = 1e-6  # what timm's LayerNorm has unless told
_TIMM = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}
_POOLS: dict[str, dict[str, Any]] = {
    "tokens": {"global_pool": "avg", "pool_include_prefix": True},
    "patches": {"global_pool": "avg"},
    "cls": {"global_pool": "token"},
}
CLOSE = 1e-5
"""A larger difference through one eps for all norms, and each is told its own."""
_RESAMPLE = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # Pillow's numbers


# ---------------------------------------------------------------- timm


def to_timm(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """`model.safetensors` and `config.json`, as on the Hub. `where` is the first argument of `create_model`."""
    encoder = _vit(model, "timm")
    classifier = model if isinstance(model, Classifier) else None
    folded = fold_vit(encoder, None if classifier is None else False)  # a head norms what it reads, at any scale
    state, (architecture, args) = dict(folded.state), _timm_model(encoder)
    distilled = isinstance(encoder, TimmViT) and "dist_token" in encoder.tokens  # whose pooling is its own
    pool = _POOLS["cls" if distilled else "tokens"]
    if classifier is not None and isinstance(encoder, TimmViT):
        _readable(classifier, encoder, architecture)
    if classifier is None:  # model(images) is then the mean of all tokens, the default read-out
        args |= {"num_classes": 0, "fc_norm": False, "final_norm": not isinstance(encoder.norm, nn.Identity), **pool}
    else:
        args |= {"num_classes": classifier.num_classes, "fc_norm": True, **_POOLS[classifier.readout]}
        state |= _prefixed("fc_norm.", classifier.norm) | _prefixed("head.", classifier.head)
        state["fc_norm.weight"] *= _sign(encoder)
    pre = preprocessing_of(model)
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": args["num_classes"],
        "num_features": encoder.embed_dim,
        "global_pool": args["global_pool"],
        "model_args": args,
        "num_attention_heads": encoder.num_heads,  # for our own reader, as is the eps; timm looks at model_args
        "layer_norm_eps": folded.eps,
        "pretrained_cfg": {
            "input_size": [pre.in_chans, *pre.img_size],
            "fixed_input_size": True,
            "interpolation": pre.interpolation,
            "crop_pct": pre.crop_pct,
            "crop_mode": pre.crop_mode,
            "mean": list(pre.mean),
            "std": list(pre.std),
            "num_classes": args["num_classes"],
            "pool_size": None,
            "first_conv": "patch_embed.proj" if pre.in_chans == 3 else None,
            "classifier": "head",
        },
    }
    if classifier is not None and classifier.classes:
        config["label_names"] = classifier.classes
    apart = single_eps_difference(encoder, folded, images)
    if apart > CLOSE:
        config[EACH] = folded.exact
    _write(out, state, config)
    told_once = "layer_norm_eps" in _folder(encoder)  # an export of ours, whose eps timm does not know
    stock_eps = encoder.norm_eps if isinstance(encoder, TimmViT) and not told_once else TIMM_EPS
    told = f", norm_layer=lambda *a, **k: torch.nn.LayerNorm(*a, eps={folded.eps:.3g}, **k)"
    eps = "" if folded.eps == stock_eps or apart > CLOSE else told
    loading = f"import timm, torch\nmodel = timm.create_model({where}, pretrained=True{eps}).eval()"
    more_notes = _eps_notes(folded, stock_eps) if eps else ()
    if apart > CLOSE:
        last = "norm" if classifier is None else "fc_norm"
        norms = f"[n for b in model.blocks for n in (b.norm1, b.norm2)] + [model.{last}]"
        loading, more_notes = f"{loading}\n{_each_eps(norms, folded)}", _each_note(folded, apart)
    if pre.img_size[0] != pre.img_size[1] and pre.crop_mode == "center" and pre.interpolation != "bilinear":
        more_notes += (
            "the transform of timm before 1.0.31 resizes by bilinear interpolation where inputs are not square, "
            f"whatever its configuration says: this model's images were resized by {pre.interpolation}",
        )
    libraries = ("timm", "torch")
    if classifier is not None:
        wanted = {"logits": ("logits", classifier(images))}
        computing = "logits = model(images)"
        left = encoder.shortcut.alpha_eff
        notes: tuple[str, ...] = (
            () if left == 1 else (f"forward_features comes divided by alpha_eff = {left:.3g}; logits do not",)
        )
        notes += more_notes
        return Export("timm", out, _files(out), loading, computing, {"images": images}, wanted, libraries, notes)
    tokens = encoder(images)
    wanted = {"tokens": ("tokens", tokens)}
    computing = "tokens = model.forward_features(images)"
    if not distilled:
        wanted["mean of tokens"] = ("model(images)", tokens.mean(1))
        computing += "  # model(images) is their mean"
    return Export("timm", out, _files(out), loading, computing, {"images": images}, wanted, libraries, more_notes)


def _readable(classifier: Classifier, encoder: TimmViT, architecture: str) -> None:
    """ExportError for a head that timm's network of that name has no place for."""
    reason = None
    if "dist_token" in encoder.tokens:
        reason = "has two heads and no norm before them"
    elif classifier.readout == "cls" and "cls_token" not in encoder.tokens:
        reason = "has no class token to read"
    if reason:
        raise ExportError(f"timm's {architecture} {reason}: --to onnx, torch-export or safetensors")


def _timm_model(encoder: ViT) -> tuple[str, dict[str, Any]]:
    """The name of an architecture of timm, and the arguments that make it this one."""
    sizes = {"img_size": list(encoder.img_size), "patch_size": list(encoder.patch_size), "in_chans": encoder.in_chans}
    if isinstance(encoder, TimmViT):
        name, folder = encoder.source["encoder"].removeprefix("timm:"), _folder(encoder)
        return folder.get("architecture", name).partition(".")[0], folder.get("model_args", {}) | sizes
    own = {"embed_dim": encoder.embed_dim, "depth": encoder.depth, "num_heads": encoder.num_heads}
    return _TIMM.get(encoder.embed_dim, "vit_base_patch16_224"), sizes | own | {"mlp_ratio": encoder.mlp_ratio}


def _folder(encoder: ViT) -> dict[str, Any]:
    """What `config.json` says where an encoder of timm came from a folder, here or on the Hub; else nothing."""
    return written("timm", encoder.source["encoder"].removeprefix("timm:")) if isinstance(encoder, TimmViT) else {}


def _eps_notes(folded: Folded, stock_eps: float) -> tuple[str, ...]:
    return (f"create_model must be told the eps, {folded.eps:.3g}, which config.json cannot hold: with timm's own, "
            f"{stock_eps:g}, the features are wrong",)  # fmt: skip


def _each_eps(norms: str, folded: Folded) -> str:
    """A line of Python that gives every norm its own eps."""
    return f"for norm, eps in zip({norms}, [{', '.join(f'{eps:.6g}' for eps in folded.exact)}]): norm.eps = eps"


def _each_note(folded: Folded, apart: float) -> tuple[str, ...]:
    return (f"every norm is given an eps of its own: with {folded.eps:.3g} for all, the only one that a configuration "
            f"could hold, tokens differ by {apart:.1e}",)  # fmt: skip


# ---------------------------------------------------------------- transformers


def to_transformers(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """A folder of ViTModel; of ViTForImageClassification for a classifier that reads the class token, as it does."""
    encoder = _vit(model, "transformers")
    head = model if isinstance(model, Classifier) and model.readout == "cls" else None
    _plain(encoder)
    folded = fold_vit(encoder, None if head is None else False)
    prefix = "vit." if head is not None else ""
    state = _renamed(folded.state, prefix)
    config = _vit_config(encoder, folded, "vit", "ViTForImageClassification" if head is not None else "ViTModel")
    if head is not None:
        state |= _prefixed("vit.layernorm.", head.norm) | _prefixed("classifier.", head.head)
        state["vit.layernorm.weight"] *= _sign(encoder)
        names = head.classes or [f"LABEL_{i}" for i in range(head.num_classes)]
        config["id2label"], config["label2id"] = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    elif not encoder.final_norm:  # a norm that only transformers applies, after what we read
        ones = torch.ones(encoder.embed_dim)
        state |= {"layernorm.weight": ones, "layernorm.bias": torch.zeros_like(ones)}
        config[FINAL_NORM] = False
    each, notes = _eps_of_norms(encoder, folded, images, config)
    _write(out, state, config)
    pre = preprocessing_of(model)
    write_processor(out, pre)
    height, width = pre.img_size
    if height != width and pre.crop_mode == "center":
        notes.append(f"transformers' processor stretches whole images to {height} x {width}: without the central crop "
                     f"of {pre.crop_pct:g} and the aspect ratio that the model was given")  # fmt: skip
    if head is not None:
        loading, computing = _auto("AutoModelForImageClassification", where), "logits = model(images).logits"
        wanted = {"logits": ("logits", head(images))}
    else:
        loading = _auto("AutoModel", where, ", add_pooling_layer=False")
        computing = "tokens = model(images).last_hidden_state"
        wanted = {"tokens": ("tokens", encoder(images))}
        if not encoder.final_norm:
            computing = "tokens = model(images, output_hidden_states=True).hidden_states[-1]"
            notes.append(
                "last_hidden_state has a LayerNorm that the model was not trained with: read hidden_states[-1]"
            )
        if isinstance(model, Classifier):
            notes.append(f"the head is left out: it reads {model.readout}, transformers' reads the class token")
    return Export("transformers", out, _files(out), loading + each, computing, {"images": images}, wanted,
                  ("transformers", "torch"), tuple(notes))  # fmt: skip


def to_vitmae(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """A folder of ViTMAEForPreTraining, decoder included."""
    if not isinstance(model, MAE):
        raise ExportError(
            f"transformers-mae is for masked autoencoders; this is a {type(model).__name__}: --to transformers"
        )
    if model.decoder.kind != "plain":
        raise ExportError("transformers' ViTMAE has no U-shaped decoder: --to transformers exports the encoder alone")
    encoder, decoder = model.encoder, model.decoder
    if encoder.img_size[0] != encoder.img_size[1] or encoder.patch_size[0] != encoder.patch_size[1]:
        raise ExportError("transformers' ViTMAE takes square images and patches only: --to transformers")
    _plain(encoder)
    folded = fold_vit(encoder)
    state = _renamed(folded.state, "vit.")
    own = {name: value.detach().cpu().float() for name, value in decoder.state_dict().items()}
    blocks = {name: value for name, value in own.items() if name.startswith("blocks.")}
    state |= {f"decoder.decoder_layers.{name}": value for name, value in _renamed(blocks, "", "").items()}
    state |= {f"decoder.decoder_{n}": v for n, v in own.items() if n not in blocks and n not in ("token", "pos_embed")}
    state |= {"decoder.mask_token": own["token"], "decoder.decoder_pos_embed": own["pos_embed"]}
    width, depth, heads = model.decoder_size
    config = _vit_config(encoder, folded, "vit_mae", "ViTMAEForPreTraining") | {
        "decoder_hidden_size": width, "decoder_num_hidden_layers": depth, "decoder_num_attention_heads": heads,
        "decoder_intermediate_size": int(width * encoder.mlp_ratio), "mask_ratio": model.mask_ratio,
        "norm_pix_loss": model.norm_pix,
    }  # fmt: skip
    each, notes = _eps_of_norms(encoder, folded, images, config)
    _write(out, state, config)
    write_processor(out, preprocessing_of(model))
    noise = torch.rand(len(images), model.num_patches, generator=torch.Generator().manual_seed(0))
    _, pred, _ = model(images, noise)
    loading = _auto("ViTMAEForPreTraining", where) + each
    computing = "out = model(images, noise=noise)  # out.loss, out.logits: predicted patches"
    wanted = {"predicted patches": ("out.logits", pred)}
    return Export("transformers-mae", out, _files(out), loading, computing, {"images": images, "noise": noise}, wanted,
                  ("transformers", "torch"), tuple(notes))  # fmt: skip


def is_plain(encoder: ViT) -> bool:
    """One class token with a position, biases, GELU, and nothing that only some networks of timm have?"""
    if not isinstance(encoder, TimmViT):
        return True
    block: Any = encoder.blocks[0]
    embed: Any = encoder.patch_embed
    extras = (encoder.norm_pre, embed.norm, block.ls1, getattr(block.attn, "q_norm", nn.Identity()))
    tokens = encoder.tokens == ["cls_token"] and not encoder.no_embed_class
    layers = block.attn.qkv.bias is not None and type(getattr(block.mlp, "act", None)) is nn.GELU
    return tokens and layers and all(type(extra) is nn.Identity for extra in extras)


def _plain(encoder: ViT) -> None:
    if isinstance(encoder, TimmViT) and not is_plain(encoder):
        raise ExportError(
            f"transformers' ViT has no place for all that {encoder.source['encoder']} has: it knows one class token, "
            "biases everywhere, GELU, no scales or further norms; --to timm"
        )


def _eps_of_norms(encoder: ViT, folded: Folded, images: Tensor, config: dict[str, Any]) -> tuple[str, list[str]]:
    """A line that gives every norm its own eps, and a word about it, where the one of `config.json` is not enough."""
    apart = single_eps_difference(encoder, folded, images)
    if apart <= CLOSE:
        return "", []
    config[EACH] = folded.exact
    norms = "[m for m in model.modules() if type(m).__name__ == 'LayerNorm']"
    return f"\n{_each_eps(norms, folded)}", [*_each_note(folded, apart)]


def _vit_config(encoder: ViT, folded: Folded, kind: str, architecture: str) -> dict[str, Any]:
    def whole(size: tuple[int, int]) -> int | list[int]:
        return size[0] if size[0] == size[1] else list(size)

    return {
        "architectures": [architecture], "model_type": kind, "image_size": whole(encoder.img_size),
        "patch_size": whole(encoder.patch_size), "num_channels": encoder.in_chans, "hidden_size": encoder.embed_dim,
        "num_hidden_layers": encoder.depth, "num_attention_heads": encoder.num_heads,
        "intermediate_size": int(encoder.embed_dim * encoder.mlp_ratio), "hidden_act": "gelu",
        "layer_norm_eps": folded.eps, "qkv_bias": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "dtype": "float32", "torch_dtype": "float32",
    }  # fmt: skip


_OUTSIDE = {
    "cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight", "norm.bias": "layernorm.bias",
}  # fmt: skip
_INSIDE = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
}  # fmt: skip


def _renamed(state: dict[str, Tensor], prefix: str, layers: str = "encoder.layer.") -> dict[str, Tensor]:
    """timm's names -> those that transformers has on disk, in every version."""
    out = {}
    for name, value in state.items():
        if not name.startswith("blocks."):
            out[prefix + _OUTSIDE[name]] = value
            continue
        _, number, inner = name.split(".", 2)
        inner, part = inner.rsplit(".", 1)
        if inner == "attn.qkv":
            for word, third in zip(("query", "key", "value"), value.chunk(3)):
                out[f"{prefix}{layers}{number}.attention.attention.{word}.{part}"] = third
        else:
            out[f"{prefix}{layers}{number}.{_INSIDE[inner]}.{part}"] = value
    return out


def _auto(kind: str, where: str, more: str = "") -> str:
    return f"from transformers import {kind}\nmodel = {kind}.from_pretrained({where}{more}).eval()"


def write_processor(out: Path, pre: Preprocessing) -> None:
    """`preprocessor_config.json`. Square inputs: shorter side, then the centre, unless the model stretches images;
    others are stretched."""
    height, width = pre.img_size
    tall, wide = (uncropped(side, pre.crop_pct) for side in pre.img_size)
    config: dict[str, Any] = {
        "do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255,
        "image_mean": list(pre.mean), "image_std": list(pre.std), "resample": _RESAMPLE.get(pre.interpolation, 3),
        CROP: pre.crop_pct, CROP_MODE: pre.crop_mode,
    }  # fmt: skip
    if pre.crop_mode == "squash" and pre.crop_pct < 1:
        config |= {"image_processor_type": "DeiTImageProcessor", "size": {"height": tall, "width": wide},
                   "do_center_crop": True, "crop_size": {"height": height, "width": width}}  # fmt: skip
    elif height == width and pre.crop_mode == "center":
        config |= {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": tall},
                   "do_center_crop": True, "crop_size": {"height": height, "width": width},
                   "do_convert_rgb": pre.in_chans == 3}  # fmt: skip
    else:
        config |= {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    (out / "preprocessor_config.json").write_text(json.dumps(config, indent=1))


# ---------------------------------------------------------------- torchvision


def to_torchvision(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """A state dict for torchvision's ResNet, and `config.json`. The small stem is the known change of two layers."""
    if not isinstance(model, ResNet):
        raise ExportError(f"torchvision's networks that we train are ResNets; this is a {type(model).__name__}: "
                          "--to timm or transformers for a ViT, onnx for any")  # fmt: skip
    if model.width != 64:
        raise ExportError(f"torchvision's ResNet starts with 64 channels, this one with {model.width}: --to onnx")
    folded = fold_resnet(model)
    block = "BasicBlock" if model.block == "basic" else "Bottleneck"
    pre = preprocessing_of(model)
    config = {"library": "torchvision", "block": block, "layers": list(model.stages), "num_classes": model.num_classes,
              "in_chans": model.in_chans, "small_stem": model.small_stem, "classes": model.classes,
              "preprocessing": pre.to_dict()}  # fmt: skip
    _write(out, folded.state, config)
    made = f"resnet.ResNet(resnet.{block}, {list(model.stages)}, num_classes={model.num_classes})"
    stem = ""
    if model.small_stem or model.in_chans != 3:
        conv = f"{model.in_chans}, 64, {'3, 1, 1' if model.small_stem else '7, 2, 3'}, bias=False"
        stem = f"model.conv1 = torch.nn.Conv2d({conv})" + ("; model.maxpool = torch.nn.Identity()" * model.small_stem)
        stem = f"; {stem}"
    imports = "import torch; from torchvision.models import resnet; from safetensors.torch import load_file"
    loading = f"{imports}\nmodel = {made}{stem}; model.load_state_dict(load_file({where})); model.eval()"
    stages = "model.layer4(model.layer3(model.layer2(model.layer1({}))))"
    maps = stages.format("model.maxpool(model.relu(model.bn1(model.conv1(images))))")
    wanted = {"logits": ("logits", model(images)), "maps": (maps, model.forward_features(images))}
    notes = ("the stem for small images is no stock one: the snippet puts it in",) if model.small_stem else ()
    return Export("torchvision", out, _files(out), loading, "logits = model(images)", {"images": images}, wanted,
                  ("torchvision", "torch", "safetensors"), notes)  # fmt: skip


# ---------------------------------------------------------------- shared


def preprocessing_of(model: Any) -> Preprocessing:
    """The model's own, or halves for one that has none."""
    if getattr(model, "preprocessing", None) is not None:
        return model.preprocessing
    part = getattr(model, "encoder", model)
    half = (0.5,) * part.in_chans
    return Preprocessing(part.img_size, half, half, in_chans=part.in_chans)


def unprepared(model: Any) -> tuple[str, ...]:
    """A word about a model that has no preprocessing."""
    if getattr(model, "preprocessing", None) is not None:
        return ()
    return ("the model does not say how images are prepared: mean 0.5 and std 0.5 are written, which may be wrong; set "
            "model.preprocessing before the export",)  # fmt: skip


def _vit(model: nn.Module, target: str) -> ViT:
    try:
        return encoder_of(model)
    except TypeError:
        other = "--to torchvision or onnx" if isinstance(model, ResNet) else "--to onnx, torch-export or safetensors"
        raise ExportError(f"{target} has no network like this {type(model).__name__}: {other}") from None


def _sign(encoder: ViT) -> float:
    return 1.0 if encoder.shortcut.alpha_eff > 0 else -1.0


def _prefixed(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {prefix + name: value.detach().cpu().float().clone() for name, value in module.state_dict().items()}


def _write(out: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    with readable(out / "model.safetensors"):
        save_file({k: v.contiguous() for k, v in state.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))


def _files(out: Path) -> list[str]:
    return [name for name in FILES if (out / name).exists()]
