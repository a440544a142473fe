"""Counts of work and memory against what can be counted by hand."""

import json
import os
import time
from datetime import datetime

import pytest
import torch
from torch import Tensor, nn

from residua.nn.vit import Attention
from residua.train import machine


class Toy(nn.Module):
    """loss = sum (x W^T)^2 for an input of 12 and an output of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5, bias=False)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor]:
        return (self.layer(images).square().sum(),)


def test_flops_are_those_of_the_matrix_products() -> None:
    toy = Toy()
    forward, weight_gradient = 2 * 12 * 5, 2 * 12 * 5  # the input needs no gradient
    assert machine.training_flops(toy, torch.randn(7, 12), torch.randn(7, 1)) == forward + weight_gradient
    assert toy.layer.weight.grad is None


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attn(tokens).square().sum()


def test_attention_counts_as_its_products() -> None:
    t, d = 6, 16
    qkv, proj = 2 * (2 * t * d * 3 * d), 3 * (2 * t * d * d)  # the input needs no gradient
    products = 3 * 2 * (2 * t * t * d)  # queries and keys, weights and values; backward is twice the work
    assert machine.training_flops(Attending(), torch.randn(1, t, d)) == qkv + proj + products


def test_activation_bytes_are_input_and_product() -> None:
    kept = machine.activation_bytes(Toy(), torch.randn(7, 12), torch.randn(7, 1))
    images = 7 * 12 * 4  # one image is a view of all
    assert kept in (images + 5 * 4, 12 * 4 + 5 * 4)
    assert machine.activation_bytes(Toy(), torch.randn(1, 12), torch.randn(1, 1)) == (12 + 5) * 4


def test_parameters_are_counted() -> None:
    assert machine.count_parameters(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))) == 12 + 4 + 8


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10G", 70e12), ("NVIDIA A10", 125e12), ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12), ("NVIDIA RTX A6000", 155e12), ("NVIDIA GeForce RTX 4090", 165e12),
        ("Some future chip", None),
    ],
)  # fmt: skip
def test_peaks_by_name(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    gpu = torch.device("cuda")
    assert machine.peak_flops(gpu, "bf16") == peak
    assert machine.peak_flops(gpu, "fp32") is None
    assert machine.peak_flops(torch.device("cpu"), "bf16") is None
    assert machine.device_name(gpu) == name.removeprefix("NVIDIA ")


def test_autocast_is_on_for_bf16_alone() -> None:
    a = torch.randn(2, 2)
    with machine.autocast(torch.device("cpu"), "bf16"):
        assert (a @ a).dtype == torch.bfloat16
    with machine.autocast(torch.device("cpu"), "fp32"):
        assert (a @ a).dtype == torch.float32


def test_environment_is_plain_values() -> None:
    written = json.loads(json.dumps(machine.environment()))
    assert written["torch"] == torch.__version__
    assert written["residua"]
    assert written["cwd"] == os.getcwd()


def test_now_is_a_time_of_day_that_means_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    earliest = int(time.time())
    told = machine.now()
    monkeypatch.undo()
    time.tzset()
    assert told.endswith("+00:00")
    assert earliest <= datetime.fromisoformat(told).timestamp() <= time.time()
