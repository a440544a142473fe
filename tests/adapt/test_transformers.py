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


# ---------------------------------------------------------------- blocks written out: norms, projections, softmax


def ln(norm: Any, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() + norm.bias


def linear(layer: Any, x: Tensor) -> Tensor:
    """Also the one of GPT-2, whose weight lies the other way round."""
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
    return x @ weight.T + (0 if layer.bias is None else layer.bias)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, seen: Tensor | None = None, turn: Any = None
) -> Tensor:
    """(B, T, D) each; `seen` (B, T, T) says which token looks at which, `turn` rotates queries and keys by place."""
    width = q.shape[-1] // heads
    q, k, v = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in (q, k, v))
    q, k = (q, k) if turn is None else (turn(q), turn(k))
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / width**0.5
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).flatten(2)


def rotation(cos: Tensor, sin: Tensor) -> Callable[[Tensor], Tensor]:
    """Places as complex numbers; tokens before the first place keep theirs."""
    half = cos.shape[-1] // 2
    places = torch.complex(cos[..., :half].double(), sin[..., :half].double())

    def turn(x: Tensor) -> Tensor:
        first, x = x.split((x.shape[-2] - places.shape[-2], places.shape[-2]), -2)
        z = torch.complex(x[..., :half], x[..., half:]) * places
        return torch.cat([first, torch.cat([z.real, z.imag], -1)], -2)

    return turn


def looks_at(causal: bool) -> Tensor:
    """Which tokens of `inputs` see which: none sees padding, none of a decoder what comes later."""
    seen = inputs("bert")["attention_mask"].bool()[:, None].expand(2, 7, 7)
    return seen & torch.ones(7, 7, dtype=torch.bool).tril() if causal else seen


def projected(a: Any, x: Tensor, heads: int, **how: Any) -> Tensor:
    return linear(a.o_proj, softmax_attention(*(linear(p, x) for p in (a.q_proj, a.k_proj, a.v_proj)), heads, **how))


def hand_vit(b: Any, alpha: Tensor, x: Tensor, places: Any) -> Tensor:
    x = alpha[0] * x + projected(b.attention, ln(b.layernorm_before, x), 4)
    hidden = nn.functional.gelu(linear(b.mlp.fc1, ln(b.layernorm_after, x)))
    return alpha[1] * x + linear(b.mlp.fc2, hidden)


def hand_dino(b: Any, alpha: Tensor, x: Tensor, places: Any) -> Tensor:
    turn = None if places is None else rotation(*places)
    x = alpha[0] * x + b.layer_scale1.lambda1 * projected(b.attention, ln(b.norm1, x), 4, turn=turn)
    first, second = (b.mlp.fc1, b.mlp.fc2) if hasattr(b.mlp, "fc1") else (b.mlp.up_proj, b.mlp.down_proj)
    return alpha[1] * x + b.layer_scale2.lambda1 * linear(second, nn.functional.gelu(linear(first, ln(b.norm2, x))))


def hand_gpt2(b: Any, alpha: Tensor, x: Tensor, places: Any) -> Tensor:
    q, k, v = linear(b.attn.c_attn, ln(b.ln_1, x)).chunk(3, -1)
    x = alpha[0] * x + linear(b.attn.c_proj, softmax_attention(q, k, v, 4, seen=looks_at(causal=True)))
    hidden = linear(b.mlp.c_fc, ln(b.ln_2, x))
    hidden = hidden / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    return alpha[1] * x + linear(b.mlp.c_proj, hidden)


def hand_llama(b: Any, alpha: Tensor, x: Tensor, places: Any) -> Tensor:
    def rms(norm: Any, x: Tensor) -> Tensor:  # in float32 whatever the stream is, as the library has it
        y = x.float()
        return norm.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.variance_epsilon)).double()

    turn = rotation(*(table[:, None] for table in places))
    x = alpha[0] * x + projected(b.self_attn, rms(b.input_layernorm, x), 4, seen=looks_at(causal=True), turn=turn)
    y = rms(b.post_attention_layernorm, x)
    gate = linear(b.mlp.gate_proj, y)
    return alpha[1] * x + linear(b.mlp.down_proj, gate * torch.sigmoid(gate) * linear(b.mlp.up_proj, y))


def hand_bert(b: Any, alpha: Tensor, x: Tensor, places: Any) -> Tensor:
    """Post-norm: LN(alpha x + f(x))."""
    a = b.attention
    y = softmax_attention(*(linear(p, x) for p in (a.self.query, a.self.key, a.self.value)), 4, looks_at(causal=False))
    x = ln(a.output.LayerNorm, alpha[0] * x + linear(a.output.dense, y))
    hidden = nn.functional.gelu(linear(b.intermediate.dense, x))
    return ln(b.output.LayerNorm, alpha[1] * x + linear(b.output.dense, hidden))


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "vit": hand_vit, "mae": hand_vit, "deit": hand_vit, "dinov2": hand_dino, "registers": hand_dino,
    "dinov3": hand_dino, "gpt2": hand_gpt2, "llama": hand_llama, "mistral": hand_llama, "bert": hand_bert,
    "roberta": hand_bert,
}  # fmt: skip


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


def faded_calls(name: str) -> list[Any]:
    """Calls of the blocks of a faded model in float64; the schedule is checked on the way."""
    model = residua.fade(build(name).double(), alpha_min=0.5)
    given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs(name).items()}
    calls = calls_of(model, given)
    assert len(calls) == 2
    alphas = torch.cat([getattr(block, ALPHA) for block, *_ in calls])
    torch.testing.assert_close(alphas, residua.alphas(2, 0.5).float())
    return calls


@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_faded_blocks_match_a_reference_by_hand(name: str) -> None:
    for block, x, _, kwargs, out in faded_calls(name):
        wanted = BY_HAND[name](block, getattr(block, ALPHA).double(), x, kwargs.get("position_embeddings"))
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in BY_HAND])
@torch.no_grad()
def test_faded_kin_match_their_own_blocks_branch_by_branch(name: str) -> None:
    for block, x, args, kwargs, out in faded_calls(name):
        wanted = prenorm(block, getattr(block, ALPHA), x, *args, **kwargs)
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@torch.no_grad()
def test_a_bound_stream_keeps_no_keys_and_values(name: str) -> None:
    """The model makes a cache unless told not to; a step that added to it would see its tokens twice."""
    model, ids = build(name), torch.randint(0, 64, (2, 7))
    given = model(ids, output_hidden_states=True).hidden_states
    steps = residua.stream(model, ids)
    for x, step in zip(given, steps[::2]):
        assert step.input is not None
        torch.testing.assert_close(step.input, x)
    x = steps[1].input
    torch.testing.assert_close(steps[0](steps[0].input), x)  # as often as one likes
    torch.testing.assert_close(steps[0](steps[0].input), x)


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck", "x", "y"])
def test_convolutional_layers_fade_before_their_activation(layer_type: str) -> None:
    size = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": layer_type}
    resnet = layer_type in ("basic", "bottleneck")
    config = transformers.ResNetConfig(**size) if resnet else transformers.RegNetConfig(**size, groups_width=4)
    torch.manual_seed(0)
    model = (transformers.ResNetModel if resnet else transformers.RegNetModel)(config).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(images).last_hidden_state
        assert torch.equal(residua.fade(model, alpha_min=1.0)(images).last_hidden_state, plain)
        seen = [(block, x, out) for block, x, _, _, out in calls_of(residua.fade(model, 0.4), {"pixel_values": images})]
        for (block, x, out), alpha in zip(seen, torch.linspace(1, 0.4, 4), strict=True):
            torch.testing.assert_close(out, torch.relu(alpha * block.shortcut(x) + block.layer(x)))
        assert [step.name for step in residua.stream(model)][-1] == "encoder.stages.1.layers.1"
        assert torch.equal(residua.unfade(model)(images).last_hidden_state, plain)


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
