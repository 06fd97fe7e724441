"""The benchmark of routed experts: shapes of every family's config.json, and what it counts. (On a tiny layer.)"""

import argparse
import json

import pytest

from engine.bench import floor
from engine.bench.author import moe
from engine.kernels.moe.tiles import Shape
from engine.kernels.tuning import experts_layer
from engine.models.config.model import ModelConfig
from engine.models.registry import model_class

CONFIGS = floor.CONFIGS
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32}


@pytest.mark.parametrize("raw, shape, gate", [
    (TINY, Shape(8, 2, 64, 32, 2), "silu"),
    ({"text_config": TINY}, Shape(8, 2, 64, 32, 2), "silu"),
    ({"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 16, "intermediate_size": 48},
     Shape(4, 2, 16, 48, 2), "silu"),
    ({"num_experts": 4, "top_k_experts": 3, "hidden_size": 16, "intermediate_size": 48, "moe_intermediate_size": 8,
      "hidden_activation": "gelu_pytorch_tanh"}, Shape(4, 3, 16, 8, 2), "gelu_tanh"),
])
def test_shapes_of_each_family(raw, shape, gate):
    assert experts_layer.read_shape(raw) == (shape, gate)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_rows(tmp_path, quantization):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    args = argparse.Namespace(device="cpu", model=tmp_path, tokens=[1, 40], quantization=quantization)
    one, many = moe.run(args)
    assert (one["active_experts"], many["active_experts"]) == (2, 8)
    bytes_read = 2 * 3 * 64 * 32 * (1 if quantization == "fp8" else 2)
    assert one["tb_s"] == pytest.approx(bytes_read / (one["us"] / 1e6) / 1e12, abs=6e-4)
    assert many["tflop_s"] == pytest.approx(2 * 40 * 2 * 3 * 64 * 32 / (many["us"] / 1e6) / 1e12, abs=6e-3)


@pytest.mark.parametrize("name, width, factor", [
    ("gemma4-26b-a4b", 2112, False), ("qwen3.6-35b-a3b", 512, True), ("qwen3-30b-a3b", 0, False),
])
def test_the_dense_branch(name, width, factor):
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    assert experts_layer.dense_branch_of(raw) == (width, factor)


def test_qwen3_30b_a3b_has_the_published_size():
    config = ModelConfig.load(CONFIGS / "qwen3-30b-a3b")
    weights = model_class(config)(config, 16).weights()
    assert sum(tensor.numel() for tensor in weights.values()) == 30_532_122_624


def test_bytes_of_a_token_count_its_experts_alone():
    """Qwen3-30B-A3B: of 30.5 B parameters a token reads 3.35 B, less the embedding."""
    expected = 3_353_032_704 - 151936 * 2048
    assert floor.bytes_per_token(CONFIGS / "qwen3-30b-a3b") == 2 * expected
