"""The benchmark of recurrent layers, and the sizes of the models that it is for."""

import argparse
import json

import pytest

from engine.bench import floor
from engine.bench.author import delta
from engine.core.kv.spec import StateLayer
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

CONFIGS = floor.CONFIGS
TINY = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(("state", "size"), [("auto", 4), ("bfloat16", 2)])
def test_rows(tmp_path, state, size):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    args = argparse.Namespace(device="cpu", model=tmp_path, batches=[3], prompts=[70], search=False)
    args.mamba_ssm_cache_dtype = state
    one, prompt = delta.run(args)
    assert one["state"] == {2: "bfloat16", 4: "float32"}[size]
    assert one["tb_s"] == pytest.approx(2 * 3 * 4 * 32 * 16 * size / (one["us"] / 1e6) / 1e12, abs=6e-4)
    assert prompt["us_per_1k_tokens"] == pytest.approx(prompt["us"] / 0.07, rel=0.01)


@pytest.mark.parametrize(("name", "tensors", "mib"), [("qwen3.6-27b", 851, 144), ("qwen3.6-35b-a3b", 693, 60)])
def test_reference_models_have_the_published_sizes(name, tensors, mib):
    """Text tensors, and the states of a sequence in float32."""
    config = ModelConfig.load(CONFIGS / name)
    model = model_class(config)(config, 16)
    assert len(model.weights()) == tensors
    states = [layer for layer in model.cache_layers() if isinstance(layer, StateLayer)]
    assert sum(4 * s[0] * s[1] * s[2] for s in (layer.shapes[0] for layer in states)) == mib << 20


def test_the_floor_counts_states_twice(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = ModelConfig.load(tmp_path)
    weights = model_class(config)(config, 16).weights()
    read = sum(2 * t.numel() for name, t in weights.items() if not name.endswith("embed_tokens.weight"))
    state, newest_inputs = 4 * 4 * 32 * 16, 2 * 4 * (2 * 2 * 16 + 4 * 32)
    assert floor.bytes_per_token(tmp_path) == read + 3 * 2 * (state + newest_inputs)
    assert floor.bytes_per_token(tmp_path, "bfloat16") == read + 3 * 2 * (state // 2 + newest_inputs)
    assert floor.bytes_per_token(tmp_path, device="cuda") == read + 3 * 2 * (state // 2 + newest_inputs)
