"""Qwen2 and Qwen3: greedy tokens equal transformers' however the work is cut and shared."""

import random

import oracle
import pytest
import torch
from safetensors.torch import load_file
from test_oracle import VOCAB, run, tiny_engine
from tiny_llama import save_byte_tokenizer

from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.errors import ModelError
from engine.models.config.model import ModelConfig

SHAPES = {
    "qwen2": {"model": "Qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
              "tie_word_embeddings": True},
    "qwen2_windowed": {"model": "Qwen2", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
                       "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    "qwen3": {"model": "Qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3_tied": {"model": "Qwen3", "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
                   "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory):
    import transformers

    made = {}

    def make(shape):
        if shape not in made:
            settings = dict(SHAPES[shape])
            family = settings.pop("model")
            config = getattr(transformers, f"{family}Config")(
                vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, initializer_range=0.25,
                max_position_embeddings=512, **settings,
            )
            torch.manual_seed(1)
            model = getattr(transformers, f"{family}ForCausalLM")(config).float()
            with torch.no_grad():  # biases start as zeros, norms as ones: dropping them must show
                for name, parameter in model.named_parameters():
                    if name.endswith("bias") or "norm" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            made[shape] = tmp_path_factory.mktemp(shape)
            model.save_pretrained(made[shape])
            save_byte_tokenizer(made[shape])
        return made[shape]

    return make


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [7, 33, 200])
def test_greedy_equals_transformers(qwen_dir, shape, budget):
    model_dir, rng = qwen_dir(shape), random.Random(budget)
    stems = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (5, 40, 70)]
    requests = [
        EngineRequest(f"r{i}", rng.choice(stems) + [9, 8, 7][: i % 4],
                      SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        for i in range(7)
    ]
    core = tiny_engine(model_dir, max_num_batched_tokens=budget, max_num_seqs=3)
    tokens, _ = run(core, requests, rng)
    for r in requests:
        assert tokens[r.request_id] == oracle.greedy(model_dir, tuple(r.prompt_token_ids), 16)


def test_the_checkpoints_hold_what_sets_the_families_apart(qwen_dir):
    qwen2, qwen3 = (load_file(qwen_dir(s) / "model.safetensors") for s in ("qwen2", "qwen3"))
    assert qwen2["model.layers.1.self_attn.k_proj.bias"].abs().max() > 0.1
    assert (qwen3["model.layers.1.self_attn.q_norm.weight"] - 1).abs().max() > 0.1


BASE = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512, "sliding_window": 100}


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": False, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "max_window_layers": 0}, 100),
        ({"use_sliding_window": True, "max_window_layers": 4}, None),
        ({"use_sliding_window": True, "max_window_layers": 2}, "mixed"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "mixed"),
        ({"layer_types": ["sliding_attention"] * 4}, 100),
        ({}, 100),
    ],
)
def test_a_window_is_uniform_or_refused(fields, window):
    if window == "mixed":
        with pytest.raises(ModelError, match="with and without a sliding window"):
            ModelConfig.parse(BASE | fields)
    else:
        assert ModelConfig.parse(BASE | fields).sliding_window == window
