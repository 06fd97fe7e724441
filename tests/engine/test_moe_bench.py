"""The benchmark of routed experts: shapes of every family's config.json, and what it counts. (On a tiny layer.)"""

import argparse
import json
from pathlib import Path

import pytest

from engine.bench import floor, moe
from engine.kernels.moe_tiles import Shape, Tiles, tiles_for
from engine.models.config import ModelConfig
from engine.models.registry import model_class

CONFIGS = Path(moe.__file__).parent / "configs"
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
    assert floor.read_shape(raw) == (shape, gate)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_rows(tmp_path, quantization):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    args = argparse.Namespace(device="cpu", model=tmp_path, tokens=[1, 40], quantization=quantization, search=False)
    one, many = moe.run(args)
    assert (one["active_experts"], many["active_experts"]) == (2, 8)
    bytes_read = 2 * 3 * 64 * 32 * (1 if quantization == "fp8" else 2)
    assert one["tb_s"] == pytest.approx(bytes_read / (one["us"] / 1e6) / 1e12, abs=6e-4)
    assert many["tflop_s"] == pytest.approx(2 * 40 * 2 * 3 * 64 * 32 / (many["us"] / 1e6) / 1e12, abs=6e-3)


def test_candidates_change_one_kernel_and_fit():
    shared = 227 << 10
    for tokens in (1, 16, 4096):
        start = tiles_for(Shape(128, 8, 2048, 768, 2), tokens, shared)
        for name, other in (("gate_up", "down"), ("down", "gate_up")):
            found = list(moe.candidates(start, name, 2, shared))
            assert len(found) > 5
            assert len(set(found)) == len(found)
            for tiles in found:
                assert isinstance(tiles, Tiles)
                assert (tiles.rows, getattr(tiles, other)) == (start.rows, getattr(start, other))


def test_qwen3_30b_a3b_has_the_published_size():
    config = ModelConfig.load(CONFIGS / "qwen3-30b-a3b")
    weights = model_class(config)(config, 16).weights()
    assert sum(tensor.numel() for tensor in weights.values()) == 30_532_122_624


def test_bytes_of_a_token_count_its_experts_alone():
    """Qwen3-30B-A3B: of 30.5 B parameters a token reads 3.35 B, less the embedding."""
    expected = 3_353_032_704 - 151936 * 2048
    assert floor.bytes_per_token(CONFIGS / "qwen3-30b-a3b") == 2 * expected
