"""Models of transformers whose blocks are found by their structure."""

import pytest
import torch
from torch import nn

import residua
from residua import adapt

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def staged(name: str) -> nn.Module:
    if name == "convnext":
        config = transformers.ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32], image_size=32)
        model = transformers.ConvNextModel(config)
    else:  # one of whose modules is called with nothing
        sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [1, 2]}
        model = transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=4))
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model.eval()


@pytest.mark.parametrize("name", ["convnext", "swin"])
@torch.no_grad()
def test_a_model_in_stages_fades_again_and_is_read(name: str) -> None:
    model, x = staged(name), torch.randn(2, 3, 32, 32)
    before = model(x).last_hidden_state
    residua.fade(model, 1.0, example=x)
    torch.testing.assert_close(model(x).last_hidden_state, before)
    blocks = [at.name for at in adapt.blocks_of(model)]
    residua.fade(model, 0.5, example=x)
    halved = model(x).last_hidden_state
    residua.fade(model, 0.8)
    steps = residua.stream(model)
    torch.testing.assert_close(steps.alphas, torch.linspace(1, 0.8, len(blocks)))
    assert [step.name for step in steps] == blocks
    assert len(residua.stream(model, x)) == len(blocks)
    residua.fade(model, 0.5)
    assert torch.equal(model(x).last_hidden_state, halved)
    assert not torch.allclose(halved, before)
    residua.unfade(model)
    assert torch.equal(model(x).last_hidden_state, before)


def test_layers_of_unknown_kinds_are_looked_at_without_a_cache() -> None:
    config = transformers.Olmo2Config(**TEXT, attn_implementation="eager")  # adds a mask that a cache outgrows
    model = transformers.Olmo2Model(config).eval()
    tokens = torch.randint(3, 64, (2, 7))
    assert [step.name for step in residua.stream(model, tokens)] == ["layers.0", "layers.1"]
    with torch.no_grad():
        plain = model(tokens).last_hidden_state
        assert torch.equal(residua.fade(model, 1.0, example=tokens)(tokens).last_hidden_state, plain)
