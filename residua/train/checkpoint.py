"""Runs on disk: atomic checkpoints, metrics, and `residua.load`.

runs/NAME/
  config.yaml  metrics.jsonl  evaluation.json  report.html
  environment.json      when training began (UTC) and was last resumed; versions, hardware and folder of that last time
  checkpoints/step-0001000/
    model.safetensors   weights, with everything needed to rebuild the model in its header
    model.json          the same description, for people
    ema.safetensors     where a moving average is kept
    training.pt         optimiser state and step: only --resume reads it
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from residua.adapt import is_name, open_model
from residua.adapt.encoder import create_model
from residua.adapt.folder import (
    EACH,
    FINAL_NORM,
    HALVES,
    assumed,
    config_of,
    img_size_in,
    norms_of,
    preprocessing_in,
)
from residua.adapt.names import read_weights
from residua.data import Preprocessing
from residua.data.autoencoder import LatentSpace
from residua.disk import readable, sync
from residua.nn import MAE, Classifier, Network
from residua.nn.diffusion import VP, Flow, make_process, process_config
from residua.nn.weights import infer_config, load_weights, translate


class CheckpointError(ValueError):
    """A checkpoint that is missing, broken, or of something else."""


# ---------------------------------------------------------------- writing


def description(model: nn.Module, step: int | None = None) -> dict[str, Any]:
    """What rebuilds a model: its `create_model` keywords, its preprocessing, names of classes; of a diffusion model
    also its process, the autoencoder whose latents it knows, and the share of labels that it was not told."""
    from residua import __version__

    pre, process, space = (getattr(model, name, None) for name in ("preprocessing", "process", "autoencoder"))
    diffusion = {"process": process and process_config(process), "autoencoder": space and space.to_dict()}
    diffusion["label_dropout"] = getattr(model, "label_dropout", None)
    return {
        "residua": __version__,
        "model": model.config,
        "preprocessing": pre and pre.to_dict(),
        "classes": getattr(model, "classes", None),
        **(diffusion if process else {}),
        "step": step,
    }


def save_model(
    model: nn.Module, path: Path, *, weights: dict[str, Tensor] | None = None, step: int | None = None
) -> None:
    """One self-describing safetensors file."""
    state = {k: v.detach().cpu().contiguous() for k, v in (weights or model.state_dict()).items()}
    with readable(path):
        save_file(state, path, metadata={"residua": json.dumps(description(model, step)), "format": "pt"})


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    done = [p for p in (run / "checkpoints").glob("step-*") if (p / "model.json").exists()]
    return sorted(done, key=lambda p: (len(p.name), p.name))  # by number, beyond seven digits too


def write_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    training: dict[str, Any],
    ema: dict[str, Tensor] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint so that it is there whole or not at all, then drop the oldest beyond `keep` (0 = none)."""
    folder = run / "checkpoints"
    final, unfinished = folder / f"step-{step:07d}", folder / f".unfinished-{step:07d}"

    def fill() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_model(model, unfinished / "model.safetensors", step=step)
        if ema is not None:
            save_model(model, unfinished / "ema.safetensors", weights=ema, step=step)
        with (unfinished / "training.pt").open("wb") as opened:  # of a file that it opens itself it hides what failed
            torch.save(training, opened)
        (unfinished / "model.json").write_text(json.dumps(description(model, step), indent=1))
        for file in unfinished.iterdir():
            sync(file)
        if final.exists():  # the same step again, after a resume
            shutil.rmtree(final)
        unfinished.rename(final)
        sync(folder)

    guard_writes(fill, run, lambda: shutil.rmtree(unfinished, ignore_errors=True))
    if keep:
        for old in checkpoints(run)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def guard_writes(write: Callable[[], None], run: Path, clean: Callable[[], None] = lambda: None) -> None:
    """Turn a full or read-only disk into a sentence that says what is still there."""
    try:
        write()
    except (OSError, SafetensorError, RuntimeError) as error:
        clean()
        done = checkpoints(run)
        kept = f"the last good checkpoint is {done[-1]}" if done else "no checkpoint was written yet"
        raise CheckpointError(
            f"cannot write to {run}: {_cause(error)}. Free some space or choose another --out; {kept} (continue with "
            "--resume)"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What the disk said, where another error came of it."""
    causes = [error]
    while causes[-1].__context__ is not None:
        causes.append(causes[-1].__context__)
    return next((cause for cause in causes if isinstance(cause, OSError)), error)


# ---------------------------------------------------------------- reading


def load(path: str | Path, *, ema: bool = True, weights: str | Path | None = None) -> Network:
    """A model from a run, a checkpoint, one safetensors file, published weights, or of another library by name.

    Published are `mae_pretrain_vit_*.pth`, folders or files of transformers' ViTMAE and ViT, and files of U-ViT and
    SiT. The model comes in evaluation mode with `model.preprocessing` set (ImageNet's, with a warning, for a lone file
    of weights that does not say), a diffusion model with `model.process` too.
    Where a run kept a moving average it is that, unless `ema=False`. Names are those of `residua.adapt.open_model`:
    `timm:vit_small_patch16_224`, with published weights, a file's, or `weights="random"`.

    >>> model = residua.load("runs/2026-11-15-shapes")
    >>> tokens = residua.nn.encoder_of(model)(model.preprocessing("photo.jpg")[None])
    """
    if is_name(path):
        named: Any = open_model(str(path), weights)
        return named
    if weights is not None:
        raise CheckpointError(f"weights are for models of other libraries by name; {path} brings its own")
    file = weights_file(Path(path).expanduser(), ema=ema)
    described = _read_description(file)
    if described is not None:
        model: Any = _build(described, file)
        load_weights(model, load_file(file), what=str(file))
    else:
        written = config_of(file.parent)
        state, config = _published(file, written)
        config |= _beyond_shapes(written, config)
        if not config.get("final_norm", True):
            state = {key: value for key, value in state.items() if not key.startswith("encoder.norm.")}
        model = create_model(**config)
        load_weights(model, state, what=str(file))
        _set_each_eps(model, written.get(EACH, ()))
        model.preprocessing = _preprocessing(file, config)
        if config["name"] == "uvit" and config["in_chans"] == 3:  # its latent models have a schedule of their own
            model.process = VP()
        if config["name"] == "sit":  # published for time from noise to data, so their velocity points the other way
            model.process = Flow(backwards=True)
            with torch.no_grad():
                model.final_layer.linear.weight.neg_()
                model.final_layer.linear.bias.neg_()
    if isinstance(model, MAE | Classifier):
        model.encoder.preprocessing = model.preprocessing
    return model.eval()


def _published(file: Path, written: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of other projects under our names, and the model that their shapes show."""
    raw, act = read_state(file), written.get("hidden_act", "gelu")
    if act != "gelu":
        raise CheckpointError(
            f"{file}: its activation is {act}, ours GELU; transformers:{file.parent} opens it as it is"
        )
    try:
        state = translate(raw)
        return state, infer_config(state, _heads(written), img_size_in(written))
    except Exception as error:  # whatever damaged settings make of themselves
        raise CheckpointError(f"{file}: {error}") from error


def _heads(written: dict[str, Any]) -> int | None:
    """Attention heads, which shapes do not show: as config.json says, or timm of its architecture."""
    options, name = written.get("model_args"), written.get("architecture")
    found = options.get("num_heads") if isinstance(options, dict) else None
    found = written.get("num_attention_heads") or found
    if found is None and isinstance(name, str):
        import timm  # slow to import

        if not timm.is_model(name):
            return None
        with torch.device("meta"):
            blocks: Any = getattr(timm.create_model(name), "blocks", None)
        found = getattr(getattr(next(iter(blocks or ()), None), "attn", None), "num_heads", None)
    return found


def model_config(path: str | Path) -> dict[str, Any]:
    """What model weights are of, as keywords of `create_model`: from their header, or read off their shapes."""
    file = weights_file(Path(path).expanduser())
    described = _read_description(file)
    return _published(file, config_of(file.parent))[1] if described is None else _described(described, file)


def _described(described: dict[str, Any], file: Path) -> dict[str, Any]:
    """The keywords of `create_model` in a header."""
    config = described.get("model")
    # `weights` is no part of an architecture: it would have others fetched, or read from another file
    if not isinstance(config, dict) or "name" not in config or "weights" in config:
        raise CheckpointError(f"{file} is none of our files, or broken: its header describes no model")
    return config


def _build(described: dict[str, Any], file: Path) -> Any:
    """The model that a header describes, with what belongs to it beside its weights."""
    config = _described(described, file)
    try:
        model = create_model(**config)
        _attach(model, described)
    except Exception as error:  # whatever a damaged description makes of itself
        raise CheckpointError(f"{file} describes a model that cannot be built: {error}") from error
    return model


def _attach(model: Any, described: dict[str, Any]) -> None:
    """What belongs to a model beside its weights."""
    if described.get("preprocessing"):
        model.preprocessing = Preprocessing.from_dict(described["preprocessing"])
    if described.get("classes"):
        model.classes = described["classes"]
    if described.get("label_dropout") is not None:
        model.label_dropout = described["label_dropout"]
    if described.get("process"):
        model.process = make_process(**described["process"])
        model.in_pixels = not described.get("autoencoder")
    if described.get("autoencoder"):
        model.autoencoder = LatentSpace(**described["autoencoder"])


def weights_file(path: Path, *, ema: bool = True) -> Path:
    """The file that a run, checkpoint or model folder keeps its weights in."""
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}")
    if (path / "checkpoints").is_dir():
        done = checkpoints(path)
        if not done:
            raise CheckpointError(f"the run {path} has no complete checkpoint yet")
        path = done[-1]
    names = ("model.safetensors", "pytorch_model.bin")
    for name in ("ema.safetensors", *names) if ema else names:
        if (path / name).exists():
            return path / name
    raise CheckpointError(f"{path} holds no run and no weights (looked for checkpoints/ and {', '.join(names)})")


def read_state(file: Path) -> dict[str, Tensor]:
    """A state dict from safetensors, or from a PyTorch file read without running any code in it."""
    try:
        return read_weights(file)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def load_training(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "training.pt", map_location="cpu", weights_only=True)


def read_checkpoint(checkpoint: Path, *, ema: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, their moving average (nothing where none is kept) and training state, to go on from."""
    try:
        averaged = load_file(checkpoint / "ema.safetensors") if ema else {}
        return load_file(checkpoint / "model.safetensors"), averaged, load_training(checkpoint)
    except Exception as error:  # whatever damaged files make of themselves
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} is damaged or not complete: {error}. Remove that folder, and --resume goes on from the "
        "checkpoint before it, or from the start"
    )


def check_model(checkpoint: Path, model: nn.Module, *, ema: bool) -> None:
    """Refuse to go on with another model than the one that a checkpoint is of, or without its moving average."""
    now, then = json.loads(json.dumps(description(model))), _read_description(checkpoint / "model.safetensors") or {}
    own, saved = (part.get("model", {}) | {"process": part.get("process")} for part in (now, then))
    differ = [f"{k} is {own[k]} there, {saved[k]} in {checkpoint.name}" for k in own if saved.get(k, own[k]) != own[k]]
    if not ema and (checkpoint / "ema.safetensors").exists():
        differ.append(f"ema is off there, {checkpoint.name} has a moving average")
    if differ:
        raise CheckpointError(
            f"config.yaml of {checkpoint.parents[1]} is not what it was: {'; '.join(differ)}. Put it back as it was, "
            "or start a new run"
        )


def initialize(model: nn.Module, path: str | Path) -> None:
    """Start `model` from other weights of its architecture; where they have no decoder, a warning says so.

    Alphas are the model's own, but for learned ones, which go on from those of the weights.
    """
    file = weights_file(Path(path).expanduser())
    state = {k: v for k, v in translate(read_state(file)).items() if k.startswith(("encoder.", "decoder."))}
    own = model.state_dict()
    alone = not any(k.startswith("decoder.") for k in state)
    unused = any(k.startswith("encoder.norm.") and k not in own for k in state)
    anew = {k: v for k, v in own.items() if alone and k.startswith("encoder.norm.") and k not in state}
    state |= anew  # a final norm that the other does without
    if "encoder.shortcut.alpha" not in dict(model.named_parameters()):  # a schedule: this run's, not the other's
        state.pop("encoder.shortcut.alpha", None)
    load_weights(model, state, what=str(file), encoder_only=alone)
    if alone:
        norm = ", but for its final norm" if unused else ", with a new final norm" if anew else ""
        warnings.warn(
            f"{file}: encoder taken{norm}; it has no decoder, so this model's starts anew",
            stacklevel=2,
        )


def _read_description(file: Path) -> dict[str, Any] | None:
    if file.suffix != ".safetensors":
        return None
    try:
        with safe_open(file, framework="pt") as handle:
            written = (handle.metadata() or {}).get("residua")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is broken or cut short: {error}") from error
    try:
        described = json.loads(written) if written else None
    except ValueError as error:
        raise CheckpointError(f"{file} is broken: its header is no JSON: {error}") from error
    if described is not None and not isinstance(described, dict):
        raise CheckpointError(f"{file} is none of our files, or broken: its header describes no model")
    return described


def _set_each_eps(model: Any, values: Sequence[float]) -> None:
    """Of folded weights that one eps for all norms is not right for."""
    encoder = getattr(model, "encoder", model)
    if values:
        for norm, eps in zip(norms_of(encoder, encoder.norm), values):
            norm.eps = eps


def _beyond_shapes(written: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """What config.json knows beyond the shapes: transformers', or one of our exports."""
    sizes: dict[str, Any] = {}
    if "layer_norm_eps" in written or "model_type" in written:
        sizes["norm_eps"] = eps = written.get("layer_norm_eps", 1e-12)
        if not isinstance(eps, int | float) or not eps > 0:
            raise CheckpointError(f"layer_norm_eps in its config.json is {eps}, expected a positive number")
    if written.get(FINAL_NORM) is False:
        sizes["final_norm"] = False
    if written and known["name"] == "mae_vit":
        sizes |= {
            "decoder_num_heads": written.get("decoder_num_attention_heads", 16),
            "mask_ratio": written.get("mask_ratio") or 0.75,  # 0: to look at whole images
            "norm_pix": written.get("norm_pix_loss", False),
        }
    return sizes


def _preprocessing(file: Path, config: dict[str, Any]) -> Preprocessing | None:
    """Of weights that are not ours: as their folder says, or ImageNet's where nothing does."""
    found = preprocessing_in(file.parent, config["img_size"], config["in_chans"])
    if found is not None:
        return found
    if config["name"] in ("uvit", "sit") and config["in_chans"] == 3:
        return Preprocessing(config["img_size"], HALVES, HALVES)
    return assumed(file, config["img_size"], config["in_chans"])
