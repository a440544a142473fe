"""What programs are called with, and what is said of them."""

from typing import Any

import pytest
import torch

import residua
from residua.export import graph
from residua.nn.diffusion import VP, Flow

SIZES = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "process", "times"),
    [("sit", None, lambda t: t), ("uvit", VP(), lambda t: 999 * t), ("sit", Flow(backwards=True), lambda t: 1 - t)],
)
def test_a_diffusion_model_is_tried_at_times_that_it_knows(name: str, process: Any, times: Any) -> None:
    model: Any = residua.create_model(name, **SIZES)
    model.process = process
    images = torch.rand(14, 3, 8, 8)
    given = graph.inputs_of(graph.Program(model), images)
    assert list(given) == ["x", "t"]
    assert given["x"] is images
    torch.testing.assert_close(given["t"], times(torch.linspace(0.02, 0.98, 14)))


def test_every_label_is_tried_and_none() -> None:
    model = residua.create_model("sit", **SIZES, in_chans=3, num_classes=4)
    program = graph.Program(model)
    given = graph.inputs_of(program, torch.rand(14, 3, 8, 8))
    assert program.inputs == tuple(given) == ("x", "t", "y")
    assert given["y"].unique().tolist() == [0, 1, 2, 3, 4]  # the last stands for no label
    torch.testing.assert_close(program(*given.values()), model(*given.values()))
    assert graph._notes(model) == ()


def test_a_model_of_latents_is_tried_on_noise() -> None:
    model: Any = residua.create_model("sit", **SIZES, in_chans=4)
    model.autoencoder = object()
    x = graph.inputs_of(graph.Program(model), torch.rand(300, 3, 64, 64))["x"]
    assert x.shape == (300, 4, 8, 8)
    assert abs(float(x.mean())) < 0.02
    assert float(x.std()) == pytest.approx(1, abs=0.02)
    assert graph._notes(model) == ("compared on noise in place of latents",)
    vit = residua.create_model("vit", **SIZES)
    assert graph._notes(vit) == ("the image size is fixed, the number of images is not",)
