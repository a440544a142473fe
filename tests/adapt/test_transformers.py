"""Layers of transformers fade like blocks of our own, and nothing else about them changes."""

import ast
import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residua
from residua import adapt
from residua.adapt.block import ALPHA
from residua.adapt.transformers_blocks import ALIKE, KINDS, qualified

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION = {**SIZE, "image_size": 16, "patch_size": 4}
TEXT = {**SIZE, "vocab_size": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
DECODER = {f"decoder_{k}": v // 2 if k == "hidden_size" else v for k, v in SIZE.items()}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTModel", "ViTConfig", VISION),
    "mae": ("ViTMAEForPreTraining", "ViTMAEConfig", {**VISION, **DECODER}),
    "dinov2": ("Dinov2Model", "Dinov2Config", {**VISION, "layerscale_value": 0.7}),
    "registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", VISION),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {**VISION, "num_register_tokens": 2}),
    "deit": ("DeiTModel", "DeiTConfig", VISION),
    "beit": ("BeitModel", "BeitConfig", {**VISION, "use_relative_position_bias": True}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**TEXT, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED),
    "bert": ("BertModel", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT),
}
LAST = {"attention": ("o_proj", "c_proj", "out_proj", "dense"), "mlp": ("fc2", "down_proj", "c_proj", "weights_out")}
COMPILED = ("vit", "llama")
every = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> nn.Module:
    cls, config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options)).eval()
    for p in model.parameters():  # tokens and positions at zero would hide mistakes
        if p.requires_grad:
            nn.init.normal_(p, std=0.2)
    return model


def inputs(name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    if MODELS[name][2].get("image_size"):
        images = {"pixel_values": torch.randn(2, 3, 16, 16)}
        return {**images, "noise": torch.rand(2, 16)} if name == "mae" else images
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    cached = {"use_cache": False} if "CausalLM" in MODELS[name][0] or name == "gpt2" else {}
    return {"input_ids": torch.randint(3, 64, (2, 7)), "attention_mask": mask, **cached}


def output(model: nn.Module, given: dict[str, Any]) -> Tensor:
    out = model(**given)
    return next(getattr(out, k) for k in ("logits", "last_hidden_state") if getattr(out, k, None) is not None)


def calls_of(model: nn.Module, given: dict[str, Any]) -> list[tuple[nn.Module, Tensor, tuple[Any, ...], Any, Tensor]]:
    """Block, stream, other arguments and output of every call."""
    seen: list[Any] = []
    blocks = [at.block for at in adapt.blocks_of(model)]
    handles = [
        b.register_forward_hook(lambda m, a, k, out: seen.append((m, a[0], a[1:], k, out)), with_kwargs=True)
        for b in blocks
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    return seen


def silenced(block: nn.Module, part: str) -> Callable[..., Tensor]:
    """The library's own block with one branch at zero: its last linear layer has no weights."""
    twin = copy.deepcopy(block)
    adapt.unfade(twin)
    attention = next(m for n, m in twin.named_children() if "att" in n)
    branch: Any = attention if part == "attention" else twin.mlp  # type: ignore[union-attr]
    linears = [m for m in branch.modules() if hasattr(m, "weight") and m.weight.ndim == 2]
    last = linears[-1]
    assert any(n.endswith(LAST[part]) for n, m in branch.named_modules() if m is last), [*branch.named_modules()]
    with torch.no_grad():
        last.weight.zero_()
        if getattr(last, "bias", None) is not None:
            last.bias.zero_()
    return twin


def prenorm(block: nn.Module, alphas: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`alpha x + f(x)` twice, each f taken from the library's block with the other branch silenced."""
    for alpha, other in zip(alphas.double(), ("mlp", "attention"), strict=True):
        x = alpha * x + (silenced(block, other)(x, *args, **kwargs) - x)
    return x


def bert(block: Any, alphas: Tensor, x: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Post-norm by hand, in evaluation mode."""
    first, second = alphas.double()
    attended, _ = block.attention.self(x, attention_mask=attention_mask)
    x = block.attention.output.LayerNorm(first * x + block.attention.output.dense(attended))
    return block.output.LayerNorm(second * x + block.output.dense(block.intermediate(x)))


@every
def test_names_and_bits_are_kept(name: str) -> None:
    model, given = build(name), inputs(name)
    names, cls = list(model.state_dict()), [type(m) for m in model.modules()]
    with torch.no_grad():
        plain = output(model, given)
        residua.fade(model, alpha_min=1.0)
        assert torch.equal(output(model, given), plain)
        residua.fade(model, alpha_min=0.5)
        assert list(model.state_dict()) == names
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in build(name).named_parameters()]
        assert not torch.allclose(output(model, given), plain, atol=1e-3)
        residua.unfade(model)
        assert [type(m) for m in model.modules()] == cls
        assert torch.equal(output(model, given), plain)


@every
def test_faded_blocks_match_a_reference(name: str) -> None:
    model = residua.fade(build(name).double(), alpha_min=0.5)
    given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs(name).items()}
    calls = calls_of(model, given)
    assert len(calls) == 2
    alphas = torch.cat([getattr(block, ALPHA) for block, *_ in calls])
    torch.testing.assert_close(alphas, residua.alphas(2, 0.5).float())
    reference = bert if "bert" in name else prenorm
    for block, x, args, kwargs, out in calls:
        with torch.no_grad():
            wanted = reference(block, getattr(block, ALPHA), x, *args, **kwargs)
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["vit", "gpt2", "bert"])
def test_training(name: str) -> None:
    model, given = residua.fade(build(name), alpha_min=0.5).train(), inputs(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for option in ("attention_dropout", "dropout_prob"):
            if hasattr(module, option):
                setattr(module, option, 0.0)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        output(model, given).square().mean().backward()
        blocks = [at.block for at in adapt.blocks_of(model)]
        return [p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None]

    wanted = gradients()
    assert len(wanted) == sum(len(list(at.block.parameters())) for at in adapt.blocks_of(model))
    assert all(g.abs().sum() > 0 for g in wanted if g.ndim > 1)
    model.gradient_checkpointing_enable()
    for mine, theirs in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["vit", "mae", "gpt2", "llama", "bert"])
def test_hidden_states(name: str) -> None:
    model, given = residua.fade(build(name), alpha_min=0.5), inputs(name)
    calls = calls_of(model, given)
    with torch.no_grad():
        states = model(**given, output_hidden_states=True).hidden_states
    assert len(states) == 3
    torch.testing.assert_close(states[0], calls[0][1])
    torch.testing.assert_close(states[1], calls[0][4])


@pytest.mark.parametrize("name", ["mae", "bert"])
def test_saved_models_are_plain(name: str, tmp_path: Path) -> None:
    plain = build(name)
    residua.fade(copy.deepcopy(plain), alpha_min=0.5).save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(plain).from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.equal(output(loaded, inputs(name)), output(plain, inputs(name)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache(name: str) -> None:
    model = residua.fade(build(name), alpha_min=0.5)
    prompt = torch.randint(3, 64, (2, 5))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(prompt, use_cache=cache, **options) for cache in (True, False))  # type: ignore[operator]
    assert cached.shape == (2, 11)
    assert torch.equal(cached, whole)


def test_only_the_encoder_of_an_autoencoder_fades() -> None:
    names = [step.name for step in residua.stream(build("mae"))]
    assert names == [f"vit.layers.{i}.{part}" for i in (0, 1) for part in ("attention", "mlp")]


@pytest.mark.parametrize("name", ["bert", "llama", "beit"])
def test_a_bound_stream_walks_the_model(name: str) -> None:
    model, given = residua.fade(build(name), alpha_min=0.5), inputs(name)
    first, *rest = given
    calls = calls_of(model, given)
    with torch.no_grad():
        bound = residua.stream(model, given[first], **{k: given[k] for k in rest})
        torch.testing.assert_close(bound[-1](bound[-1].input), calls[-1][4])


def test_two_towers_are_refused() -> None:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION)
    model = transformers.CLIPModel(config)
    with pytest.raises(ValueError, match="several residual streams"):
        residua.fade(model)
    residua.fade(model.vision_model, alpha_min=0.5)
    assert len(residua.stream(model.vision_model)) == 4


def test_cross_attention_is_a_step_of_its_own() -> None:
    torch.manual_seed(0)
    cross = {"add_cross_attention": True, "is_decoder": True}
    for model in (
        transformers.BertModel(transformers.BertConfig(**TEXT, **cross)),
        transformers.GPT2Model(transformers.GPT2Config(**GPT2, **cross)),
    ):
        tokens, memory = torch.randint(3, 64, (2, 7)), torch.randn(2, 5, 32)
        with torch.no_grad():
            plain = model.eval()(tokens, encoder_hidden_states=memory).last_hidden_state
            residua.fade(model, alpha_min=1.0)
            assert torch.equal(model(tokens, encoder_hidden_states=memory).last_hidden_state, plain)
            with pytest.raises(ValueError, match="needs encoder_hidden_states"):
                model(tokens)
        assert len(residua.stream(model)) == 6


def _check_compiled(name: str, backend: str) -> None:
    model, given = residua.fade(build(name), alpha_min=0.5), inputs(name)
    with torch.no_grad():
        wanted = output(model, given)
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, backend=backend)
        torch.testing.assert_close(output(compiled, given), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", COMPILED)
def test_compile(name: str) -> None:
    _check_compiled(name, "aot_eager")


@pytest.mark.slow
@every
def test_compile_each(name: str) -> None:
    _check_compiled(name, "inductor")


def _forward(short: str, cls: str | None = None) -> str:
    """The code of a class's forward, without its docstring and with no name of its model."""
    package, name = short.split(".")
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "models" / package / f"modeling_{package}.py"
    body = next(n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == (cls or name))
    forward = next(f for f in body.body if isinstance(f, ast.FunctionDef) and f.name == "forward")
    code = [s for s in forward.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return ast.dump(ast.Module(code, []))


@pytest.mark.parametrize("first", ALIKE)
def test_kin_run_the_same_code(first: str) -> None:
    for other in ALIKE[first]:
        assert _forward(other) == _forward(first), other
        assert qualified(other) in KINDS
        if first == "bert.BertLayer":
            for part in ("SelfOutput", "Output"):
                assert _forward(other, other.split(".")[1].replace("Layer", part)) == _forward(first, f"Bert{part}")
