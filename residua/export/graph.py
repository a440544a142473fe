"""Programs out: ONNX and torch.export, of any network here, with its alphas as they are and any number of images."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.export.clean import IMAGES, Export
from residua.export.stock import preprocessing_of
from residua.nn import MAE, Classifier, ResNet, SiT, UniformNet, UViT, ViT

FILES = ("model.onnx", "model.pt2", "preprocessing.json")
OPSET = 23
"""Of ONNX: the newest that PyTorch's exporter writes; attention is one node from here on."""


class Program(nn.Module):
    """What is exported of a network: tokens of an encoder, logits and features of a classifier, a prediction."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model.encoder if isinstance(model, MAE) else model
        self.labels = isinstance(model, UViT | SiT) and model.num_classes is not None
        self.inputs: tuple[str, ...] = ("images",)
        if isinstance(model, UViT | SiT):
            self.inputs = ("x", "t", "y") if self.labels else ("x", "t")
        heads = isinstance(model, Classifier | ResNet | UniformNet)
        self.outputs = ("logits", "features") if heads else ("tokens",) if len(self.inputs) == 1 else ("prediction",)

    def forward(self, *given: Tensor) -> Any:
        net: Any = self.net
        if self.outputs[0] != "logits":
            return net(*given)
        features = net.pooled(*given)
        return net.head(features), features


def inputs_of(program: Program, images: Tensor) -> dict[str, Tensor]:
    """What the program is called with for images: for a diffusion model also times and labels."""
    if len(program.inputs) == 1:
        return {"images": images}
    net: Any = program.net
    chance = torch.Generator().manual_seed(0)
    if getattr(net, "autoencoder", None) is not None:
        images = torch.randn(len(images), net.in_chans, *net.img_size, generator=chance)
    t, process = torch.linspace(0.02, 0.98, len(images)), getattr(net, "process", None)
    given = {"x": images, "t": t if process is None else process.time_input(t)}
    if program.labels:
        given["y"] = torch.arange(len(images)) % (net.num_classes + 1)
    return given


def to_onnx(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """`model.onnx`, self-contained, with the preprocessing in its metadata and in `preprocessing.json`."""
    program, given, wanted, pre = _prepare(model, images)
    with _quiet():
        exported: Any = torch.onnx.export(
            program, _example(given), dynamo=True, input_names=list(program.inputs),
            output_names=list(program.outputs), dynamic_shapes=_dynamic(program), opset_version=OPSET,
            external_data=False, verbose=False,
        )  # fmt: skip
        exported.model.metadata_props["preprocessing"] = json.dumps(pre)
        exported.save(str(out / "model.onnx"), external_data=False)
    (out / "preprocessing.json").write_text(json.dumps(pre, indent=1))
    loading = f"import onnxruntime\nmodel = onnxruntime.InferenceSession({where})"
    fed = ", ".join(f'"{name}": {name}' for name in program.inputs)
    computing = f"{', '.join(program.outputs)}{',' * (len(program.outputs) == 1)} = model.run(None, {{{fed}}})"
    return Export("onnx", out, ["model.onnx", "preprocessing.json"], loading, computing, given, wanted,
                  ("onnxruntime",), _notes(model))  # fmt: skip


def to_torch_export(model: nn.Module, out: Path, images: Tensor, where: str) -> Export:
    """`model.pt2`: a program that PyTorch loads, runs and compiles ahead of time, beside `preprocessing.json`."""
    program, given, wanted, pre = _prepare(model, images)
    with _quiet():
        exported = torch.export.export(program, _example(given), dynamic_shapes=_dynamic(program), strict=False)
        content = io.BytesIO()  # writing itself, it ends the process on a full disk
        torch.export.save(exported, content, extra_files={"preprocessing.json": json.dumps(pre)})
    (out / "model.pt2").write_bytes(content.getvalue())
    (out / "preprocessing.json").write_text(json.dumps(pre, indent=1))
    loading = f"import torch\nmodel = torch.export.load({where}).module()"
    computing = f"{', '.join(program.outputs)} = model({', '.join(program.inputs)})"
    return Export("torch-export", out, ["model.pt2", "preprocessing.json"], loading, computing, given, wanted,
                  ("torch",), _notes(model))  # fmt: skip


def _prepare(
    model: nn.Module, images: Tensor
) -> tuple[Program, dict[str, Tensor], dict[str, tuple[str, Tensor]], dict[str, Any]]:
    program = Program(model).eval()
    given = inputs_of(program, images)
    values = program(*given.values())
    values = values if isinstance(values, tuple) else (values,)
    wanted = {name: (name, value) for name, value in zip(program.outputs, values)}
    return program, given, wanted, preprocessing_of(model).to_dict()


def _example(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(value[: IMAGES // 2] for value in given.values())


def _dynamic(program: Program) -> Any:
    batch = torch.export.Dim("batch", min=1)
    return (tuple({0: batch} for _ in program.inputs),)  # one for the starred argument


def _notes(model: nn.Module) -> tuple[str, ...]:
    if isinstance(model, MAE | ViT | Classifier):
        return ("the image size is fixed, the number of images is not",)
    latents = isinstance(model, UViT | SiT) and getattr(model, "autoencoder", None) is not None
    return ("compared on noise in place of latents",) if latents else ()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
