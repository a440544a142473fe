"""What the run runs on: device, precision, peak rate, memory."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

# dense bf16 FLOP/s by datasheet; the first name found in the device's own name counts
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12,
    "A6000": 155e12, "RTX 6000 Ada": 364e12, "5090": 210e12, "4090": 165e12, "4080": 97e12, "3090": 71e12,
}  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return "Apple GPU" if device.type == "mps" else f"CPU ({torch.get_num_threads()} threads)"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak rate of the chip in bf16, where it is known; None otherwise."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def training_flops(model: nn.Module, *inputs: Tensor) -> float:
    """Matrix-product operations of one image, forward and backward, counted on the CPU.

    Attention counts as its two products, and twice that backward: of fused kernels, torch counts what they compute
    again, too, or nothing at all.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    def backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return 2 * sdpa_flop_count(q, k, v)

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    again = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    with FlopCounterMode(display=False, custom_mapping={fused: forward, again: backward}) as counter:
        _first_output(model, inputs).backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())


def activation_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes kept for the backward pass of one image in float32, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = _first_output(model, inputs)
    del loss
    return sum(kept.values())


def _first_output(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The model's output for one image as a number; in evaluation mode, so that no statistics move."""
    training = model.training
    out = model.eval()(*(x[:1] for x in inputs))
    model.train(training)
    return (out[0] if isinstance(out, tuple) else out).sum()


def now() -> str:
    """Date and time in UTC: 2026-11-15T09:30:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """Versions, hardware and the working folder, for the record."""
    import accelerate
    import timm
    import torchvision

    from residua import __version__

    gpu = torch.cuda.is_available()
    return {
        "residua": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "accelerate": accelerate.__version__,
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if gpu else [],
        "cuda": torch.version.cuda,
        "cwd": os.getcwd(),
    }
