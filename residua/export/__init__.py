"""Models out: to stock libraries, with decay folded into the weights; to programs; to the Hub.

    result = residua.export("runs/2026-11-15-shapes", "timm", "shapes-timm")
    print(result.exports[0][0].snippet, result.largest)

Every export is loaded again in a process of its own, without this package, and compared on real images.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from residua.adapt import is_name, is_own, unwrapped
from residua.callable import Command, command
from residua.data.errors import did_you_mean
from residua.export import graph, hub, plain, stock
from residua.export.clean import Checked, Export, check, real_images, relative
from residua.export.fold import ExportError, Folded, fold_resnet, fold_vit
from residua.missing import pip_install
from residua.nn import MAE, Classifier, ResNet, ViT
from residua.train.checkpoint import load, save_model, weights_file

__all__ = ["TARGETS", "Checked", "Export", "ExportError", "Folded", "Result", "fold_resnet", "fold_vit", "write"]

Writer = Callable[[nn.Module, Path, Tensor, str], Export]


def to_safetensors(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """One file with our names, alphas included, that `residua.load` reads; `plain.tokens` runs an encoder's."""
    save_model(model, out / "model.safetensors")
    wanted = {
        name: (f"state[{name!r}].reshape(1, -1)", value.detach().reshape(1, -1))
        for name, value in model.state_dict().items()
    }
    prelude = ""
    encoder = model.encoder if isinstance(model, MAE) else model
    if isinstance(encoder, ViT) and stock.is_plain(encoder):
        prelude = inspect.getsource(plain)
        call = f"tokens(state, images, {encoder.num_heads}, {encoder.norm_eps}, {encoder.shortcut.decay.branch_scale})"
        wanted["tokens"] = (call, encoder(images))
    alpha = next(name for name in wanted if name.endswith("shortcut.alpha"))
    loading = f"from safetensors.torch import load_file\nstate = load_file({where})"
    return Export(
        "safetensors", out, ["model.safetensors"], loading, f"alphas = state[{alpha!r}]", {"images": images}, wanted,
        ("safetensors", "torch"), batches=(len(images),), prelude=prelude,
    )  # fmt: skip


TARGETS: dict[str, tuple[Writer, str]] = {
    "timm": (stock.to_timm, "local-dir:{}"),
    "transformers": (stock.to_transformers, "{}"),
    "transformers-mae": (stock.to_vitmae, "{}"),
    "torchvision": (stock.to_torchvision, "{}/model.safetensors"),
    "onnx": (graph.to_onnx, "{}/model.onnx"),
    "torch-export": (graph.to_torch_export, "{}/model.pt2"),
    "safetensors": (to_safetensors, "{}/model.safetensors"),
}
"""Target -> what writes it, and what its loading is given. `hub` is several of them."""
FILES = (*stock.FILES, *graph.FILES)
"""What the targets write. A hub folder has more: a card, and two folders."""
NEEDS = {
    "transformers": ("transformers",),
    "transformers-mae": ("transformers",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}


@dataclass(frozen=True)
class Result:
    """What `write` wrote and how far it is from the model."""

    out: Path
    images: str
    """What it was compared on."""
    exports: list[tuple[Export, Checked]]
    notes: tuple[str, ...] = ()
    rounding: float | None = None
    """How far the model is from itself in float64 on the same images: no copy in float32 can promise to be closer."""

    @property
    def largest(self) -> float:
        return max((checked.largest for _, checked in self.exports), default=0.0)


@torch.no_grad()
def write(
    model: str | Path | nn.Module,
    to: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    ema: bool = True,
    license: str = "unknown",
    name: str | None = None,
) -> Result:
    """Write a model, or that of a run, for another library, load it there and compare.

    `name` is what a Hub folder is called there, OWNER/NAME; its card then loads from the Hub.
    """
    if to != "hub" and to not in TARGETS:
        raise ExportError(f"no target {to!r}; {did_you_mean(to, [*TARGETS, 'hub'])}")
    _installed(to)
    if name is not None:
        hub.check_name(name)
    if is_name(model) or (isinstance(model, nn.Module) and not is_own(model)):
        what = model if isinstance(model, str) else f"a {type(model).__name__}"
        raise ExportError(f"{what} is its own library's model already: what was trained here is exported")
    run = None if isinstance(model, nn.Module) else Path(model).expanduser()
    place = Path(out).expanduser() if out else default_out(run, to)
    if place.is_dir() and any(place.iterdir()) and not overwrite:
        raise ExportError(f"{place} exists: choose another --out, or --overwrite")
    if place.is_file():
        raise ExportError(f"{place} is a file: choose another --out")
    if (place / "checkpoints").is_dir() and (place / "config.yaml").exists():
        raise ExportError(f"{place} is a run, which an export would overwrite: choose another --out")
    inner = copy.deepcopy(unwrapped(model)) if isinstance(model, nn.Module) else load(model, ema=ema)
    network: Any = inner.cpu().float().eval()
    images, source = real_images(run, stock.preprocessing_of(network))
    notes = () if to == "safetensors" else stock.unprepared(network)
    with _writing(place), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=place.parent) as home:
        draft = Path(home) / "export"
        draft.mkdir()
        if to == "hub":
            exports, more = _hub(network, run, draft, place, images, source, license, name, ema)
            notes += more
        else:
            exports = [_one(to, network, draft, place, images)]
        rounding = _rounding(network, images)
        _move(draft, place)
    return Result(place, source, exports, notes, rounding)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """A folder for `place` to lie in; a full or read-only disk becomes a sentence."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # not the disk's: libraries call theirs so, too
            raise
        raise ExportError(f"cannot write to {place}: {error}. Free some space or choose another --out") from error


def default_out(run: Path | None, to: str) -> Path:
    """RUN/export/TARGET, or export/TARGET for weights elsewhere."""
    return (run if run is not None and (run / "checkpoints").is_dir() else Path()) / "export" / to


def _move(draft: Path, place: Path) -> None:
    """Put a checked export where it was asked for; of an earlier one there no file stays that would be read."""
    if not place.exists():
        draft.rename(place)
        return
    new = [file.relative_to(draft) for file in draft.rglob("*") if file.is_file()]
    for file in new:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(draft / file, place / file)
    for file in _written(place):
        if file.relative_to(place) not in new:
            file.unlink()
            if file.parent != place and not any(file.parent.iterdir()):
                file.parent.rmdir()
    if (place / "checkpoints").is_dir() and not any((place / "checkpoints").iterdir()):
        (place / "checkpoints").rmdir()


def _written(place: Path) -> list[Path]:
    """The files in a folder that exports write, but for a card."""
    found = [folder / name for folder in (place, place / "transformers") for name in FILES]
    for step in place.glob("checkpoints/step-*"):
        files = sorted(step.iterdir())
        found += files if [file.name for file in files] == ["model.json", "model.safetensors"] else []
    return [file for file in found if file.exists()]


def _one(
    to: str, model: nn.Module, draft: Path, place: Path, images: Tensor, inside: str = ""
) -> tuple[Export, Checked]:
    """Written to and checked in `draft`, or in a folder inside it; what is returned speaks of `place`, its home."""
    more = f", subfolder={inside!r}" if inside else ""
    there, here = _where(to, draft) + more, _where(to, place) + more
    written = TARGETS[to][0](model, draft / inside, images, there)
    checked = check(written)
    return replace(written, folder=place / inside, loading=written.loading.replace(there, here)), checked


def _hub(
    model: nn.Module,
    run: Path | None,
    draft: Path,
    place: Path,
    images: Tensor,
    source: str,
    license: str,
    name: str | None,
    ema: bool,
) -> tuple[list[tuple[Export, Checked]], tuple[str, ...]]:
    """Stock weights in front, transformers' in a folder of their own, ours under `checkpoints`."""
    exports: list[tuple[Export, Checked]] = []
    shown: list[tuple[Export, Checked]] = []
    notes: list[str] = []
    stocks = [("torchvision", "")] if isinstance(model, ResNet) else []
    if isinstance(model, MAE | ViT | Classifier):
        stocks = [("timm", ""), ("transformers", "transformers")]
        if not _has(("transformers",)):
            notes.append(f"without weights for transformers, which is not installed: {pip_install('transformers')}")
            stocks.pop()
    if not stocks:
        notes.append(f"no stock library has a {type(model).__name__}: the folder holds our checkpoint and the card")
    for to, inside in stocks:
        folder = draft / inside
        folder.mkdir(exist_ok=True)
        try:
            written, checked = _one(to, model, draft, place, images, inside)
        except ExportError as error:
            for file in stock.FILES:
                (folder / file).unlink(missing_ok=True)
            if inside:
                folder.rmdir()
            notes.append(f"without weights for {to}: {error}")
            continue
        exports.append((written, checked))
        if name is not None:  # the card loads from there
            there = {"timm": repr(f"hf-hub:{name}"), "transformers": repr(name)}
            fetched = there.get(to, f"huggingface_hub.hf_hub_download({name!r}, 'model.safetensors')")
            loading = written.loading.replace(_where(to, place), fetched)
            loading = f"import huggingface_hub; {loading}" if to == "torchvision" else loading
            written = replace(written, loading=loading)
        shown.append((written, checked))
    step = _step(run, ema)
    hub.write_checkpoint(model, draft, step)
    hub.write_card(draft, place, model, run, shown, source, license, name, step)
    return exports, tuple(notes)


def _rounding(model: nn.Module, images: Tensor) -> float | None:
    """Of what reads images alone; of a classifier its encoder, as read-outs are float32 whatever the weights are."""
    program = graph.Program(model.encoder if isinstance(model, Classifier) else model).eval()
    if len(program.inputs) > 1:
        return None
    single, double = program(images), copy.deepcopy(program).double()(images.double())
    single, double = (value[0] if isinstance(value, tuple) else value for value in (single, double))
    return relative(double, single)


def _where(to: str, folder: Path) -> str:
    return repr(TARGETS[to][1].format(folder))


def _step(run: Path | None, ema: bool) -> int:
    if run is None:
        return 0
    digits = weights_file(run, ema=ema).parent.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else 0


def _has(modules: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


def _installed(to: str) -> None:
    modules = NEEDS.get(to, ())
    if not _has(modules):
        raise ExportError(f"--to {to} needs {', '.join(modules)}: {pip_install(*modules)}")


sys.modules[__name__].__class__ = Command


def __getattr__(name: str) -> Any:
    """`residua.export.export` is what `residua.export` calls."""
    if name == "export":
        return command(name)
    raise AttributeError(f"module 'residua.export' has no attribute {name!r}")
