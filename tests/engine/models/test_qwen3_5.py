"""Qwen3.5: logits and greedy tokens equal transformers' however sequences are cut into steps and share them."""

import random

import numpy as np
import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_oracle import run
from tiny_llama import save_byte_tokenizer

from engine.config import EngineConfig
from engine.core.kv.spec import StateLayer
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest, FinishReason
from engine.embedding import finished
from engine.errors import ConfigError, ModelError
from engine.kernels.attention.reference import AttentionBatch
from engine.layers.context import ForwardContext, StateBatch, forward_context
from engine.layers.gated_delta import GatedDeltaNet
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear
from engine.models.config.model import ModelConfig
from engine.models.config.qwen3_5 import read_qwen3_5
from engine.models.loading.loader import load_weights, quantize
from engine.models.registry import model_class
from engine.worker.startup.build import build_engine

VOCAB, PAGE, PAGES_EACH = 320, 16, 12
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 48}
SHAPES = {
    "dense": {},
    "tied": {"tie_word_embeddings": True, "linear_num_value_heads": 2, "num_key_value_heads": 1},
    "wide_conv": {"linear_conv_kernel_dim": 6, "layer_types": ["full_attention", "linear_attention"] * 2},
    "multimodal": {"num_hidden_layers": 5, "linear_num_value_heads": 6, "head_dim": 64},
    "experts": EXPERTS,
    "multimodal_experts": EXPERTS,
    "next": EXPERTS,
    "next_partly_dense": EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False,
                                    "linear_num_value_heads": 6},
}


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory):
    import transformers

    made = {}

    def make(shape):
        if shape not in made:
            settings = TEXT | SHAPES[shape]
            family = "Qwen3_5Moe" if "num_experts" in settings else "Qwen3_5"
            family = "Qwen3Next" if shape.startswith("next") else family
            torch.manual_seed(2)
            if shape.startswith("multimodal"):
                vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                          "out_hidden_size": 64, "num_position_embeddings": 16}
                config = getattr(transformers, f"{family}Config")(text_config=settings, vision_config=vision)
                model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
            else:
                config = getattr(transformers, f"{family}Config" if family == "Qwen3Next" else f"{family}TextConfig")
                config = config(**settings)
                model = getattr(transformers, f"{family}ForCausalLM")(config)
            with torch.no_grad():  # these start as zeros or ones: dropping them must show
                for name, parameter in model.named_parameters():
                    if "norm" in name or "dt_bias" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
                    elif name.endswith("mlp.gate.weight"):
                        parameter.normal_()
            made[shape] = tmp_path_factory.mktemp(shape)
            model.save_pretrained(made[shape], save_original_format=shape != "multimodal_experts")
            save_byte_tokenizer(made[shape])
        return made[shape]

    return make


class Steps:
    """A loaded model with caches of its own: runs steps of several sequences, each with a slot and pages."""

    def __init__(self, model_dir, num_seqs, state_dtype="auto"):
        config = ModelConfig.load(model_dir)
        self.model = model_class(config)(config, 512).eval()
        self.model.set_state_dtype(state_dtype, "cpu")
        with torch.inference_mode():
            load_weights(self.model, model_dir)
        for layer, module in zip(self.model.cache_layers(), self.model.cache_modules(), strict=True):
            if isinstance(layer, StateLayer):  # whatever a slot's last owner left: a new one must not see it
                assert isinstance(module, GatedDeltaNet)
                module.state = tuple(
                    torch.full((num_seqs + 1, *shape), torch.nan, dtype=getattr(torch, dtype))
                    for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
                )
            else:
                shape = (num_seqs * PAGES_EACH, PAGE, layer.num_kv_heads, layer.head_dim)
                module.k_cache, module.v_cache = torch.zeros(2, *shape)
        self.block_table = torch.arange(num_seqs * PAGES_EACH, dtype=torch.int32).view(num_seqs, -1)
        self.slots = torch.randperm(num_seqs + 1)[:num_seqs]

    @torch.inference_mode()
    def run(self, step):
        """step: [(sequence, position of its first token, tokens)] -> logits of each."""
        rows, starts, tokens = (list(column) for column in zip(*step, strict=True))
        counts = torch.tensor([len(t) for t in tokens])
        q_starts = counts.cumsum(0) - counts
        positions = torch.cat([torch.arange(s, s + len(t)) for s, t in zip(starts, tokens, strict=True)])
        owner = torch.tensor(rows).repeat_interleave(counts)
        context = ForwardContext(
            positions,
            self.block_table[owner, positions // PAGE].long() * PAGE + positions % PAGE,
            AttentionBatch.build(q_starts.tolist(), starts, counts.tolist(), rows, self.block_table, PAGE),
            state=StateBatch(self.slots[rows], torch.tensor(starts) == 0, q_starts, counts),
        )
        with forward_context(context):
            hidden = self.model(torch.tensor([t for part in tokens for t in part]))
        return self.model.logits(hidden).split(counts.tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(qwen_dir, shape):
    """Whatever the steps: three sequences in random chunks, of which several may be in a step."""
    model_dir, rng = qwen_dir(shape), random.Random(shape)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (3, 70, 131)]
    steps = Steps(model_dir, len(prompts))
    found = [[] for _ in prompts]
    at = [0] * len(prompts)
    while any(a < len(p) for a, p in zip(at, prompts, strict=True)):
        step = []
        for i in rng.sample(range(len(prompts)), rng.randrange(1, len(prompts) + 1)):
            chunk = prompts[i][at[i] : at[i] + rng.choice([1, 1, 2, 5, 30, 64, 100])]
            if chunk:
                step.append((i, at[i], chunk))
                at[i] += len(chunk)
        for (i, *_), logits in zip(step, steps.run(step) if step else (), strict=True):
            found[i].append(logits)
    for prompt, logits in zip(prompts, found, strict=True):
        expected = oracle.logits(model_dir, prompt)
        torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-3, atol=5e-4)


def test_states_in_bfloat16_change_little(qwen_dir):
    """A prompt in chunks, then token by token: some 100 times a state is rounded."""
    model_dir, rng = qwen_dir("dense"), random.Random(1)
    prompt = [rng.randrange(3, VOCAB) for _ in range(180)]
    found = []
    for dtype in ("float32", "bfloat16"):
        steps, at, logits = Steps(model_dir, 1, dtype), 0, []
        for count in [64, 20] + [1] * 96:
            logits += steps.run([(0, at, prompt[at : at + count])])
            at += count
        found.append(torch.cat(logits))
    expected = oracle.logits(model_dir, prompt)
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=5e-4)
    assert 0 < (found[1] - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize(
    ("said", "wanted", "device", "dtype", "expected"),
    [
        (None, "auto", "cpu", torch.bfloat16, "float32"),
        (None, "auto", "cuda", torch.bfloat16, "bfloat16"),
        (None, "auto", "cuda", torch.float16, "float32"),
        ("float32", "auto", "cuda", torch.bfloat16, "float32"),
        ("bfloat16", "auto", "cpu", torch.float32, "bfloat16"),
        ("float32", "bfloat16", "cpu", torch.float32, "bfloat16"),
        ("bfloat16", "float32", "cuda", torch.bfloat16, "float32"),
    ],
)
def test_the_dtype_of_states(said, wanted, device, dtype, expected):
    config = ModelConfig.parse({"architectures": ["Qwen3_5ForCausalLM"], **TEXT, "mamba_ssm_dtype": said})
    torch.set_default_dtype(dtype)
    try:
        model = model_class(config)(config, 16)
    finally:
        torch.set_default_dtype(torch.float32)
    model.set_state_dtype(wanted, device)
    layers = [layer for layer in model.cache_layers() if isinstance(layer, StateLayer)]
    assert {layer.dtypes for layer in layers} == {(expected, str(dtype).removeprefix("torch."))}


def test_the_flag_reaches_memory_and_plan(qwen_dir):
    found = {}
    for dtype in ("auto", "bfloat16"):
        core = engine(qwen_dir("dense"), mamba_ssm_cache_dtype=dtype)
        spec = core.runner.cache.spec
        found[dtype] = spec.slot_bytes
        assert {states[0].dtype for states in core.runner.cache.states.values()} == {
            getattr(torch, spec.state_dtypes)
        }
        assert f"recurrent layers, in {spec.state_dtypes}" in core.info()["memory_plan"]
    assert found["auto"] - found["bfloat16"] == 3 * 2 * 4 * 16 * 24
    with pytest.raises(ConfigError, match="--mamba-ssm-cache-dtype fp8 is not available"):
        engine(qwen_dir("dense"), mamba_ssm_cache_dtype="fp8")


def test_both_forms_of_experts_are_tested(qwen_dir):
    stacked, each = (load_file(qwen_dir(s) / "model.safetensors") for s in ("multimodal_experts", "experts"))
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in stacked
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in each


def test_the_drafter_is_left_out_and_the_log_says_so(qwen_dir, tmp_path, caplog):
    source = qwen_dir("multimodal")
    weights = load_file(source / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    config = ModelConfig.load(tmp_path)
    with caplog.at_level("INFO"):
        load_weights(model_class(config)(config, 16), tmp_path)
    assert "mtp.fc" in caplog.text
    assert "model.visual" in caplog.text
    save_file(weights | {"model.language_model.layers.0.linear_attn.bias": torch.zeros(3)},
              tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"linear_attn\.bias"):
        load_weights(model_class(config)(config, 16), tmp_path)


def test_what_decides_about_states_and_experts_keeps_its_precision():
    config = ModelConfig.parse({"architectures": ["Qwen3_5MoeForCausalLM"], **TEXT, **EXPERTS})
    model = model_class(config)(config, 16)
    quantize(model, "fp8")
    kept = {
        name.split(".", 2)[2] for name, module in model.named_modules()
        if isinstance(module, Linear | ExpertLinear) and not module.method.converts and name != "lm_head"
    }  # fmt: skip
    assert kept == {"mixer.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"}


def test_reference_models_have_the_tensors_of_their_checkpoints():
    """Qwen3.6-35B-A3B is published with 693 text tensors: 3, 18 in each recurrent layer, 15 in each other."""
    raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": TEXT | EXPERTS | {
        "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": None}}
    config = ModelConfig.parse(raw)
    names = model_class(config)(config, 16).weights()
    assert len(names) == 693
    assert names["model.language_model.layers.7.mlp.experts.gate_up_proj"].shape == (256, 64, 64)
    assert names["model.language_model.layers.0.linear_attn.conv1d.weight"].shape == (2 * 2 * 16 + 4 * 24, 1, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types must name 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must name 4 layers"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) is not a multiple"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be a positive number"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype must be float32 or bfloat16, found 'float8'"),
        ({"mamba_ssm_dtype": 16}, "mamba_ssm_dtype must be float32 or bfloat16, found 16"),
        (EXPERTS | {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ],
)
def test_bad_configs_are_refused(fields, message):
    raw = {"architectures": ["Qwen3_5ForCausalLM"], **TEXT, **fields}
    with pytest.raises(ModelError, match=message):
        config = ModelConfig.parse(raw)
        model_class(config)(config, 16)


def test_every_fourth_layer_has_attention_unless_the_config_says_otherwise():
    assert read_qwen3_5(TEXT | {"num_hidden_layers": 8}, {}).layers == (*["linear_attention"] * 3, "full_attention") * 2
    assert read_qwen3_5(TEXT | {"full_attention_interval": 2}, {}).layers == ("linear_attention", "full_attention") * 2
    assert read_qwen3_5(TEXT, {}).rope["partial_rotary_factor"] == 0.25
    assert read_qwen3_5(TEXT, {"partial_rotary_factor": 0.5}).rope["partial_rotary_factor"] == 0.5


def engine(model_dir, memory=1 << 21, **config):
    return build_engine(EngineConfig(
        model_dir, device="cpu", dtype="float32", max_model_len=192, block_size=PAGE, kv_cache_memory_bytes=memory,
        **config))  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [13, 200])
def test_embeddings_equal_transformers(qwen_dir, shape, budget):
    """Twice, so that the second prompt continues from the prefix cache where it may; beside an answer."""
    model_dir = qwen_dir(shape)
    prompt = [(i * 37) % 300 + 3 for i in range(70)]
    core = engine(model_dir, max_num_batched_tokens=budget, max_num_seqs=3)
    answer = EngineRequest("answer", prompt[:9], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    requests = [EngineRequest(f"{pooling}{n}", prompt, SamplingParams(), pooling=pooling)
                for n in range(2) for pooling in ("last", "mean")]
    _, last = run(core, [answer, *requests])
    for request in requests:
        expected = oracle.embedding(model_dir, prompt, request.pooling)
        np.testing.assert_allclose(finished(last[request.request_id].embedding), expected, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [7, 33, 200])
def test_greedy_equals_transformers(qwen_dir, shape, budget):
    """In random company, with aborts: nobody continues another one's state."""
    model_dir, rng = qwen_dir(shape), random.Random(budget)
    stems = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 40, 90)]
    requests = [
        EngineRequest(f"r{i}", rng.choice(stems) + [9, 8, 7][: i % 4],
                      SamplingParams(temperature=0, max_tokens=rng.randrange(1, 17), ignore_eos=True))
        for i in range(8)
    ]
    core = engine(model_dir, max_num_batched_tokens=budget, max_num_seqs=3, overlap=budget == 33)
    tokens, last = run(core, requests, rng, aborts=0.05)
    for r in requests:
        expected = oracle.greedy(model_dir, tuple(r.prompt_token_ids), 16)
        got = tokens[r.request_id]
        assert got == expected[: len(got)]
        assert last[r.request_id].finish_reason is FinishReason.ABORT or len(got) == r.params.max_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_start_their_states_anew(qwen_dir, overlap):
    model_dir = qwen_dir("dense")
    core = engine(model_dir, 255_000, max_num_batched_tokens=64, overlap=overlap)
    requests = [
        EngineRequest(f"r{i}", list(range(i + 3, i + 23)), SamplingParams(
            temperature=0, max_tokens=100, ignore_eos=True))
        for i in range(4)
    ]
    tokens, _ = run(core, requests)
    assert core.stats().num_preemptions > 0
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 100)
