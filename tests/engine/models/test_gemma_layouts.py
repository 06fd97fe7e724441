"""What Gemma checkpoints look like on disk: names, shapes and sizes of the released models, and where files differ."""

import json
import logging

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gemma import SHAPES, engine, greedy, run, save_tiny_gemma

from engine.errors import ModelError
from engine.models.config.model import ModelConfig
from engine.models.gemma4 import Gemma4ForCausalLM
from engine.models.registry import model_class

GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
    "max_position_embeddings": 131072, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
LARGE = {"attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144}
SMALL = {"hidden_size_per_layer_input": 256, "num_attention_heads": 8, "sliding_window": 512}
RELEASED = {
    "E2B": GEMMA4 | SMALL | {
        "num_hidden_layers": 35, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "hidden_size": 1536, "num_key_value_heads": 1, "intermediate_size": 6144, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True},
    "E4B": GEMMA4 | SMALL | {
        "num_hidden_layers": 42, "hidden_size": 2560, "num_key_value_heads": 2, "intermediate_size": 10240,
        "num_kv_shared_layers": 18},
    "12B": GEMMA4 | LARGE | {
        "architectures": ["Gemma4UnifiedForCausalLM"], "num_hidden_layers": 48, "hidden_size": 3840,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1,
        "intermediate_size": 15360},
    "26B": GEMMA4 | LARGE | {
        "num_hidden_layers": 30, "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "intermediate_size": 2112, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704},
    "31B": GEMMA4 | LARGE | {
        "num_hidden_layers": 60, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "intermediate_size": 21504},
}  # fmt: skip


def empty_model(raw):
    config = ModelConfig.parse(raw)
    return model_class(config)(config, 64)


@pytest.mark.parametrize(
    ("name", "billions", "tensors", "full_kv", "window_kv"),
    [
        ("E2B", 4.629, 35 * 14 + 15 * 3 + 5, 6_144, 12_288),
        ("E4B", 7.463, 42 * 14 + 24 * 3 + 5, 16_384, 40_960),
        ("12B", 11.907, 48 * 13 + 40 + 2, 16_384, 327_680),
        ("26B", 25.233, 30 * 13 + 25 + 30 * 8 + 2, 20_480, 204_800),
        ("31B", 30.697, 60 * 13 + 50 + 2, 81_920, 819_200),
    ],
)
def test_sizes_of_the_released_models(name, billions, tensors, full_kv, window_kv):
    """Parameters of the text model, tensors on disk, and bytes of bf16 keys and values a token."""
    model = empty_model(RELEASED[name])
    weights = model.weights()
    assert len(weights) == tensors
    assert sum(w.numel() for w in weights.values()) / 1e9 == pytest.approx(billions, abs=0.0006)
    cached = {True: 0, False: 0}
    for layer in model.cache_layers():
        if layer.kv_from is None:
            cached[layer.window is None] += 2 * layer.num_kv_heads * layer.head_dim * 2
    assert cached == {True: full_kv, False: window_kv}


def of_layer(model, number):
    start = f"model.layers.{number}."
    return {n.removeprefix(start): tuple(w.shape) for n, w in model.weights().items() if n.startswith(start)}


COMMON = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]


def norms(hidden, *more):
    return {f"{name}.weight": (hidden,) for name in (*COMMON, *more)} | {"layer_scalar": (1,)}


def mlp(hidden, inner):
    return {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner)}  # fmt: skip


def attention(hidden, heads, kv, dim, *names):
    widths = {"q": heads, "k": kv, "v": kv}
    found = {f"self_attn.{name}_proj.weight": (widths[name] * dim, hidden) for name in names}
    found |= {f"self_attn.{name}_norm.weight": (dim,) for name in names if name != "v"}
    return found | {"self_attn.o_proj.weight": (hidden, heads * dim)}


def test_names_and_shapes_of_dense_layers():
    model = empty_model(RELEASED["31B"])
    rest = norms(5376) | mlp(5376, 21504)
    assert of_layer(model, 0) == rest | attention(5376, 32, 16, 256, "q", "k", "v")
    assert of_layer(model, 5) == rest | attention(5376, 32, 4, 512, "q", "k")
    outside = {n: tuple(w.shape) for n, w in model.weights().items() if ".layers." not in n}
    assert outside == {"model.embed_tokens.weight": (262144, 5376), "model.norm.weight": (5376,)}


def test_names_and_shapes_of_layers_with_experts():
    assert of_layer(empty_model(RELEASED["26B"]), 0) == (
        norms(2816, "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        | mlp(2816, 2112)
        | attention(2816, 16, 8, 256, "q", "k", "v")
        | {"router.proj.weight": (128, 2816), "router.scale": (2816,), "router.per_expert_scale": (128,),
           "experts.gate_up_proj": (128, 1408, 2816), "experts.down_proj": (128, 2816, 704)}
    )  # fmt: skip


def test_names_and_shapes_of_layers_that_share_keys():
    model = empty_model(RELEASED["E2B"])
    rest = norms(1536, "post_per_layer_input_norm") | {
        "per_layer_input_gate.weight": (256, 1536), "per_layer_projection.weight": (1536, 256)}
    assert of_layer(model, 13) == rest | mlp(1536, 6144) | attention(1536, 8, 1, 256, "q", "k", "v")
    assert of_layer(model, 14) == rest | mlp(1536, 6144) | attention(1536, 8, 1, 512, "q", "k", "v")
    assert of_layer(model, 33) == rest | mlp(1536, 12288) | attention(1536, 8, 1, 256, "q")
    assert of_layer(model, 34) == rest | mlp(1536, 12288) | attention(1536, 8, 1, 512, "q")
    outside = {n: tuple(w.shape) for n, w in model.weights().items() if ".layers." not in n}
    assert outside == {
        "model.embed_tokens.weight": (262144, 1536), "model.norm.weight": (1536,),
        "model.embed_tokens_per_layer.weight": (262144, 35 * 256),
        "model.per_layer_model_projection.weight": (35 * 256, 1536),
        "model.per_layer_projection_norm.weight": (256,)}  # fmt: skip
    sources = [layer.kv_from for layer in model.cache_layers()]
    assert sources == [None] * 15 + [14 if i % 5 == 4 else 13 for i in range(15, 35)]
    assert {c.kv_from for c in empty_model(RELEASED["E4B"]).cache_layers()} == {None, 22, 23}


# A text model inside of a multimodal checkpoint: architecture, where its tensors stand, what else is there.
LAYOUTS = {
    "gemma3": ("gemma3", "Gemma3ForConditionalGeneration", "language_model.model.",
               ["vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_soft_emb_norm"]),
    "gemma3_new": ("gemma3", "Gemma3ForConditionalGeneration", "model.language_model.",
                   ["model.vision_tower.x.weight"]),
    "gemma4": ("gemma4_e4b", "Gemma4ForConditionalGeneration", "model.language_model.",
               ["model.vision_tower.x.weight", "model.embed_vision.embedding_projection.weight",
                "model.audio_tower.layers.0.norm.weight", "model.embed_audio.embedding_projection.weight"]),
    "unified": ("gemma4_12b", "Gemma4UnifiedForConditionalGeneration", "model.language_model.",
                ["model.vision_embedder.x.weight", "model.embed_vision.embedding_projection.weight"]),
    "copy": ("gemma4_12b", "Gemma4ForConditionalGeneration", "model.", []),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_models_of_multimodal_checkpoints(tmp_path, layout, caplog):
    shape, architecture, prefix, others = LAYOUTS[layout]
    text, whole = tmp_path / "text", tmp_path / "whole"
    whole.mkdir()
    save_tiny_gemma(text, SHAPES[shape])
    config = json.loads((text / "config.json").read_text())
    tensors = {prefix + n.removeprefix("model."): t for n, t in load_file(text / "model.safetensors").items()}
    save_file(tensors | {name: torch.ones(3) for name in others}, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps({
        "architectures": [architecture], "text_config": config | {"architectures": None},
        "vision_config": {"hidden_size": 7, "model_type": "vision"}, "dtype": "float32",
    }))
    with caplog.at_level(logging.INFO):
        core = engine(whole)
    for name in others:
        assert name in caplog.text
    prompt = list(range(3, 50))
    tokens, _ = run(core, [greedy(prompt)])
    assert tokens["r"] == oracle.greedy(text, tuple(prompt), 16)


def changed(tmp_path, shape, change):
    """A checkpoint whose tensors `change` has worked on."""
    save_tiny_gemma(tmp_path, SHAPES[shape])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_unused_keys_of_sharing_layers_are_left_on_disk(tmp_path):
    def add(tensors):
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.9.self_attn.{name}.weight"] = torch.ones(32, 64)

    prompt = list(range(3, 50))
    tokens, _ = run(engine(changed(tmp_path, "gemma4_e2b", add)), [greedy(prompt)])
    assert tokens["r"] == oracle.greedy(tmp_path, tuple(prompt), 16)


def test_experts_may_be_a_matrix_each(tmp_path):
    def split(tensors):
        for i in range(6):
            both = tensors.pop(f"model.layers.{i}.experts.gate_up_proj")
            down = tensors.pop(f"model.layers.{i}.experts.down_proj")
            for e in range(8):
                parts = {"gate_proj": both[e, :32], "up_proj": both[e, 32:], "down_proj": down[e]}
                tensors.update({f"model.layers.{i}.experts.{e}.{n}.weight": t.contiguous() for n, t in parts.items()})

    prompt = list(range(3, 50))
    save_tiny_gemma(tmp_path / "stacked", SHAPES["gemma4_26b"])
    tokens, _ = run(engine(changed(tmp_path / "split", "gemma4_26b", split)), [greedy(prompt)])
    assert tokens["r"] == oracle.greedy(tmp_path / "stacked", tuple(prompt), 16)


@pytest.mark.parametrize(
    ("shape", "name", "tensor", "message"),
    [
        ("gemma4_31b", "model.layers.5.self_attn.v_proj.weight", torch.ones(64, 64), "holds tensor .*5.*v_proj"),
        ("gemma4_e2b", "model.layers.4.self_attn.k_proj.weight", None, "lacks tensor .*4.self_attn.k_proj"),
        ("gemma4_e2b", "model.layers.9.mlp.up_proj.weight", torch.ones(96, 64), "9.mlp.up_proj.weight has shape"),
        ("gemma4_31b", "model.layers.3.layer_scalar", None, "lacks tensor .*layer_scalar"),
        ("gemma3", "model.layers.3.self_attn.v_norm.weight", torch.ones(16), "holds tensor .*v_norm"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, shape, name, tensor, message):
    def change(tensors):
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    with pytest.raises(ModelError, match=message):
        engine(changed(tmp_path, shape, change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must name 60 layers"),
        ({"layer_types": ["chunked_attention"] * 60}, "layer_types"),
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 57}, "num_kv_shared_layers leaves no full_attention layer"),
        ({"num_global_key_value_heads": 5}, "full_attention layers cannot have 5 key heads"),
        ({"global_head_dim": 511}, "511 numbers"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "per_layer_config"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "different shapes"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have a block"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}}, "partial_rotary_factor"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8}, "top_k_experts"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input"),
        ({"text_config": [1]}, "text_config must be an object"),
    ],
)
def test_configs_are_refused_by_field(fields, message):
    with pytest.raises(ModelError, match=message):
        empty_model(RELEASED["31B"] | fields)


def test_fields_that_released_configs_leave_out():
    """Gemma 3's files name what differs from its class, in the older form."""
    config = ModelConfig.parse({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}})  # fmt: skip
    gemma = model_class(config)(config, 64).gemma
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106)
    assert [i for i, layer in enumerate(gemma.layers) if layer.window is None] == [5, 11, 17, 23, 29]
    assert gemma.layers[0].window == 1024
    assert gemma.attention_scale == 1 / 16
    assert gemma.ropes["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert gemma.ropes["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_gemma2_alternates():
    config = ModelConfig.parse({"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4})
    gemma = model_class(config)(config, 64).gemma
    assert [layer.window for layer in gemma.layers] == [4096, None, 4096, None]
    assert (gemma.attention_softcap, gemma.final_softcap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("hidden", "scale"), [(1536, 39.25), (2560, 50.5), (2816, 53.0), (3840, 62.0), (5376, 73.5)]
)
def test_embeddings_are_scaled_by_a_bf16_number(hidden, scale):
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = empty_model(RELEASED["31B"] | {"num_hidden_layers": 1, "hidden_size": hidden})
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(model, Gemma4ForCausalLM)
    assert model.embed_tokens.scale == scale
