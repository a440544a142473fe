"""Models of other libraries by name: `timm:vit_small_patch16_224`, `torchvision:resnet18`, `transformers:FOLDER`.

| prefix | then | without weights |
|---|---|---|
| `timm:` | a model of timm, with a tag or not: `vit_base_patch16_224.mae`; `local-dir:FOLDER` | `pretrained=False` |
| `torchvision:` | a model of torchvision | `pretrained=False` |
| `transformers:` | a folder, or a repository of the Hub | `pretrained=False`, also by type alone: `transformers:vit` |
| `diffusers:` | a folder, or a repository of the Hub | `pretrained=False` |

Python code that a folder or repository brings is never run, and there is no option that would.
"""

from __future__ import annotations

import argparse
import difflib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from residua.data import Preprocessing
from residua.missing import pip_install
from residua.nn.weights import unprefixed, unwrap

from .folder import assumed, config_of, from_processor, from_timm, preprocessing_in, set_norms

LIBRARIES = ("timm", "torchvision", "transformers", "diffusers")
SOURCE = "residua_source"
"""Attribute of an opened model: the keywords of `open_model` that open the same architecture again."""


def is_name(name: object) -> bool:
    """Is this a model of another library, by name?"""
    return isinstance(name, str) and name.partition(":")[0] in LIBRARIES and ":" in name


def open_model(
    name: str, weights: str | Path | None = None, pretrained: bool | None = None, **options: Any
) -> nn.Module:
    """A model by name, in evaluation mode, with `model.preprocessing` where it takes images.

    Its weights: published ones, from the Hub or the cache (the default); those of a file (`weights`: safetensors, or a
    PyTorch file, read without running any code in it); or random ones (`pretrained=False`, also `weights="random"`).
    `options` go to the library's constructor: `img_size=64, num_classes=10`.

    >>> model = open_model("timm:vit_small_patch16_224")
    >>> model = open_model("torchvision:resnet18", weights="resnet18.safetensors")
    """
    library, _, inner = name.partition(":")
    if not is_name(name) or not inner:
        raise ValueError(f"{name!r} names no model: give one of {', '.join(f'{x}:NAME' for x in LIBRARIES)}")
    if weights == "random":
        weights, pretrained = None, False
    file = None if weights is None else Path(weights).expanduser()
    if file is not None and not file.is_file():
        raise ValueError(f"there are no weights at {file}")
    if file is not None and pretrained:
        raise ValueError("weights of a file or published ones (pretrained=True): give one of the two")
    if _TRUST in options:
        raise _own_code(name)
    published = file is None if pretrained is None else pretrained
    openers: dict[str, Callable[..., nn.Module]] = {
        "timm": _timm, "torchvision": _torchvision, "transformers": _transformers, "diffusers": _diffusers,
    }  # fmt: skip
    module = _library(library, name)
    with _without_code(name) if library == "transformers" else nullcontext():
        model = openers[library](module, inner, published, **options)
        if file is not None:
            _load(model, file, name)
    set_norms(model, written(library, inner, model))
    setattr(model, SOURCE, {"name": name, **options})
    return model.eval()


def written(library: str, name: str, model: Any = None) -> dict[str, Any]:
    """The `config.json` that a model of timm or transformers was opened by; empty where there is none."""
    if library == "transformers":
        return model.config.to_dict()
    kind, _, where = name.partition(":")
    if library == "timm" and kind == "local-dir":
        return config_of(Path(where))
    if library == "timm" and kind in ("hf-hub", "hf_hub"):
        from huggingface_hub import hf_hub_download

        repository, _, revision = where.partition("@")
        return config_of(Path(hf_hub_download(repository, "config.json", revision=revision or None)).parent)
    return {}


def _library(library: str, name: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise ValueError(f"{name} needs {library}, which is not installed: {pip_install(library)}") from error


def _unknown(library: str, name: str, known: list[str]) -> ValueError:
    longer = [other for other in known if other.startswith(name)]
    near = longer[:4] or difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    return ValueError(f"{library} has no model {name!r}" + (f"; near it are {', '.join(near)}" if near else ""))


def _published(name: str, make: Callable[[], Any]) -> Any:
    """Published weights, or a sentence that says what else to do."""
    try:
        return make()
    except Exception as error:  # every library has its own ways of not reaching the Hub
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{name}: its published weights cannot be had here ({first[:200]}). Give a local file (--weights FILE, in "
            "Python weights=...; of an encoder --encoder-weights FILE) or ask for random weights (--weights random, in "
            "Python pretrained=False)"
        ) from error


# ---------------------------------------------------------------- timm and torchvision


def _timm(timm: Any, name: str, published: bool, **options: Any) -> nn.Module:
    elsewhere = name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
    if not elsewhere and not timm.is_model(name.partition(".")[0]):
        raise _unknown("timm", name, timm.list_models())

    def make() -> nn.Module:
        try:
            return timm.create_model(name, pretrained=published, **options)
        except TypeError:
            if "img_size" not in options:
                raise
            return timm.create_model(name, pretrained=published, **{k: options[k] for k in options if k != "img_size"})

    model = _published(f"timm:{name}", make) if published else make()
    config = timm.data.resolve_model_data_config(model)
    channels, *side = config["input_size"]
    size = options.get("img_size") or getattr(getattr(model, "patch_embed", None), "img_size", None) or side
    shape: Any = size if isinstance(size, int) else tuple(size)
    model.preprocessing = from_timm(config, shape, options.get("in_chans", channels))
    return model


def _torchvision(torchvision: Any, name: str, published: bool, **options: Any) -> nn.Module:
    models = torchvision.models
    if name not in models.list_models():
        raise _unknown("torchvision", name, models.list_models())
    choices = models.get_model_weights(name)
    best = choices.DEFAULT if len(choices) else None

    def make() -> nn.Module:
        quiet = {"init_weights": True} if name in ("googlenet", "inception_v3") and not published else {}
        return models.get_model(name, weights=best if published else None, **quiet, **options)

    model = _published(f"torchvision:{name}", make) if published else make()
    view: Any = best.transforms() if best is not None else None
    if hasattr(view, "crop_size"):
        side = options.get("image_size") or view.crop_size[0]
        crop = view.crop_size[0] / max(view.resize_size[0], view.crop_size[0])
        kind = getattr(view.interpolation, "value", "bilinear")
        model.preprocessing = Preprocessing(
            (side, side), view.mean, view.std, crop_pct=crop, interpolation=kind if kind == "bicubic" else "bilinear"
        )
    return model


# ---------------------------------------------------------------- transformers and diffusers

_TRUST = "trust_remote_code"
"""Named in every error of transformers about code that a folder brings."""


def _own_code(name: str) -> ValueError:
    return ValueError(
        f"{name}: the code that a folder or repository brings is not run here, and this model asks for "
        "it. If you trust it, build the model in Python and pass the module in place of its name"
    )


@contextmanager
def _without_code(name: str) -> Iterator[None]:
    """transformers' refusals of a folder's code in words of ours. Where a model is made of others (a vision tower), it
    would ask on the terminal whether to run their code, whatever it was told of the whole: given no time for an answer,
    it refuses."""
    code: Any = import_module("transformers.dynamic_module_utils")
    before, code.TIME_OUT_REMOTE_CODE = code.TIME_OUT_REMOTE_CODE, 0
    try:
        yield
    except Exception as error:
        if _TRUST in f"{error} {error.__cause__}":
            raise _own_code(name) from error
        raise
    finally:
        code.TIME_OUT_REMOTE_CODE = before


def _transformers(transformers: Any, name: str, published: bool, **options: Any) -> nn.Module:
    folder = Path(name).expanduser()
    if folder.exists() and not (folder / "config.json").exists():
        raise ValueError(f"transformers:{name}: {folder} holds no config.json")
    where = str(folder) if folder.exists() else name
    if folder.exists() or "/" in name:
        described, _ = _published(f"transformers:{name}", lambda: transformers.PretrainedConfig.get_config_dict(where))
        if _kernel_in(described):
            raise _own_code(f"transformers:{name}")
    if published:
        opened = transformers.AutoModel.from_pretrained
        model = _published(f"transformers:{name}", lambda: _unpooled(opened, where, trust_remote_code=False, **options))
    else:
        types = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
        if not folder.exists() and name in types:
            config = types[name](**options)
        elif not folder.exists() and "/" not in name:
            raise _unknown("transformers", name, list(types))
        else:
            config = _published(
                f"transformers:{name}",
                lambda: transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **options),
            )
        model = _unpooled(transformers.AutoModel.from_config, config, trust_remote_code=False)
    model = getattr(model, "vision_model", model)  # of two towers, the one that sees images
    if hasattr(model.config, "mask_ratio"):
        model.config.mask_ratio = 0.0  # ViTMAE would hide patches in evaluation too
    size = getattr(model.config, "image_size", None)
    if size is not None:
        shape = tuple(size) if isinstance(size, list | tuple) else (size, size)
        model.preprocessing = _processor(folder, shape, getattr(model.config, "num_channels", 3), transformers, where)
    return model


def _kernel_in(described: Any) -> bool:
    """Whether a `config.json` names code of a repository that is to compute attention or experts, at any depth."""
    if isinstance(described, dict):
        named = (value for key, value in described.items() if isinstance(value, str) and key.endswith("implementation"))
        return any("/" in value for value in named) or any(map(_kernel_in, described.values()))
    return isinstance(described, list) and any(map(_kernel_in, described))


def _unpooled(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Without the layer that pools tokens, where the class knows to leave it out: nothing reads it, and weights that do
    not bring it would leave it random, another one each time."""
    try:
        return make(*args, **{"add_pooling_layer": False, **options})
    except TypeError:
        return make(*args, **options)


def _processor(
    folder: Path, size: tuple[int, int], channels: int, transformers: Any, where: str
) -> Preprocessing | None:
    """As the model's preprocessor_config.json has it; without one, ImageNet's with a note; of a mere type, [-1, 1]."""
    if folder.exists():
        return preprocessing_in(folder, size, channels) or assumed(folder, size, channels)
    if "/" not in where:
        return from_processor({}, size, channels)
    try:
        found = transformers.AutoImageProcessor.from_pretrained(where, trust_remote_code=False).to_dict()
    except Exception as error:  # the weights are here, a processor is not
        why = str(error).strip().partition("\n")[0][:200]
        own = _TRUST in str(error)
        return assumed(where, size, channels, "its image processor is code, which is not run here" if own else why)
    return from_processor(found, size, channels)


def _diffusers(diffusers: Any, name: str, published: bool, **options: Any) -> nn.Module:
    folder = Path(name).expanduser()
    if not folder.exists() and "/" not in name:
        raise ValueError(f"diffusers:{name}: there is no such folder")
    if folder.exists():
        part, file = _denoiser_in(name)
    else:
        part, file = _published(f"diffusers:{name}", lambda: _denoiser_of(name))
    described = config_of(file.parent)
    kind = described.get("_class_name")
    cls: Any = getattr(diffusers, kind, None) if isinstance(kind, str) else None
    is_model = isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and hasattr(cls, "load_config")
    if not is_model:  # a pipeline may run code that lies in its folder
        raise ValueError(
            f"diffusers:{name}: its config.json names no model of diffusers, but {kind!r}: pipelines, schedulers and "
            "everything else are not opened"
        )
    if not published:
        return cls.from_config({**described, **options})
    where = {"subfolder": part} if part else {}
    source = str(folder) if folder.exists() else name
    return _published(f"diffusers:{name}", lambda: cls.from_pretrained(source, **where, **options))


_DENOISERS = ("transformer", "unet", "")
"""Where a pipeline has the network; or the folder is the network's own."""


def _denoiser_in(name: str) -> tuple[str, Path]:
    """Part of a folder, and its settings."""
    found = ((part, Path(name).expanduser() / part / "config.json") for part in _DENOISERS)
    first = next(((part, file) for part, file in found if file.is_file()), None)
    if first is None:
        raise ValueError(f"diffusers:{name}: it holds no config.json, nor does a folder transformer or unet in it")
    return first


def _denoiser_of(name: str) -> tuple[str, Path]:
    """The same of a repository of the Hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError

    missing: list[Exception] = []
    for part in _DENOISERS:
        try:
            return part, Path(hf_hub_download(name, "config.json", subfolder=part or None))
        except EntryNotFoundError as error:
            missing.append(error)
    # a Hub that was not reached says more than a file that is not there
    raise next((error for error in missing if isinstance(error, LocalEntryNotFoundError)), missing[0])


# ---------------------------------------------------------------- weights of a file


def _load(model: nn.Module, file: Path, name: str) -> None:
    """Weights of a file, all but a classifier's: one of another size is left out."""
    state = read_weights(file)
    if hasattr(model, "config") and hasattr(type(model), "from_pretrained") and name.startswith("transformers:"):
        return _load_transformers(model, state, file)
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    own, head = model.state_dict(), _head(model)
    shapes = {key: x.shape for key, x in own.items() if not key.startswith(head)}
    same = set(state) == set(own) and all(state[key].shape == shape for key, shape in shapes.items())
    if adapt is not None and not same:  # other names, or positions of another image size
        state = adapt(state, model)
    fits = {key: x for key, x in state.items() if key in own and x.shape == own[key].shape}
    lacking = [key for key in shapes if key not in fits]
    if lacking:
        some = ", ".join(lacking[:4]) + (", ..." if len(lacking) > 4 else "")
        raise ValueError(f"{file} does not fit {name}: it lacks {some}, or has them in other shapes")
    model.load_state_dict(fits, strict=False)
    return None


def _load_transformers(model: Any, state: dict[str, Tensor], file: Path) -> None:
    """By the library itself, which knows what tensors were called in earlier versions."""
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # which we tell below
    found, report = _unpooled(type(model).from_pretrained, None, config=model.config, state_dict=state, **options)
    lacking = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    lacking = {key for key in lacking if not key.startswith(("pooler", "classifier"))}
    if lacking:
        some = ", ".join(sorted(lacking)[:4]) + (", ..." if len(lacking) > 4 else "")
        raise ValueError(f"{file} does not fit {type(model).__name__}: it lacks {some}, or has them in other shapes")
    model.load_state_dict(found.state_dict())


def _head(model: nn.Module) -> tuple[str, ...]:
    """How the names of a classifier's parameters begin."""
    named = getattr(model, "default_cfg", {}).get("classifier") or ()
    names = (named,) if isinstance(named, str) else tuple(named)
    return tuple(f"{name}." for name in (*names, "head", "heads", "fc", "classifier"))


def read_weights(file: Path) -> dict[str, Tensor]:
    """A state dict from safetensors, or from a PyTorch file without running code in it."""
    try:
        if file.suffix == ".safetensors":
            return unprefixed(load_file(file))
        with torch.serialization.safe_globals([argparse.Namespace]):  # the settings that training files keep beside
            content = unwrap(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ValueError(f"{file} cannot be read as weights: {_why_unreadable(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise ValueError(f"{file} holds no state dict of tensors")
    return unprefixed(content)


def _why_unreadable(error: Exception) -> str:
    """One line for a file of weights that does not open; PyTorch's own says how to run the code in it."""
    if isinstance(error, pickle.UnpicklingError):
        return "it holds other things than tensors, which are not loaded as they may run code, or it is broken"
    return str(error).strip().partition("\n")[0] or type(error).__name__
