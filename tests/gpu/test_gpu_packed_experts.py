"""Whole models whose experts stay packed: a GPU's scores are those of the CPU, which multiplies with the numbers that
the codes stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kit import checkpoint, model_of, on_cpu, on_gpu
from gpu_scores import lost
from test_gpu_stored_experts import quantised

from engine.layers.moe import ExpertLinear

pytestmark = pytest.mark.gpu

Write = Callable[[torch.Tensor], dict[str, torch.Tensor]]
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def in_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As compressed-tensors stores a matrix: int8, and a scale for each output."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127.5).bfloat16()
    return {"weight": (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}


def in_words(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same codes, four in a word."""
    found = in_int8(weight)
    codes = (found["weight"].long() + 128).unflatten(1, (-1, 4))
    words = (codes << torch.arange(0, 32, 8)).sum(2).to(torch.int32)
    return {"weight_packed": words, "weight_scale": found["weight_scale"], "weight_shape": torch.tensor(weight.shape)}


def config_of(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


# name -> (writer, configuration, the type of the experts' codes, the error: activations may be rounded otherwise)
FORMATS: dict[str, tuple[Write, dict[str, Any], torch.dtype, float]] = {
    "w8a16": (in_words, config_of("pack-quantized", WEIGHTS), torch.int8, 2e-2),
    "w8a8": (in_int8, config_of("int-quantized", WEIGHTS, BY_TOKEN), torch.int8, 5e-2),
}


@pytest.mark.parametrize("sequences", [4, 16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5-moe", "gemma4-26b"])
def test_checkpoints(family: str, name: str, sequences: int, tmp_path: Path) -> None:
    write, config, codes, most = FORMATS[name]
    model = quantised(checkpoint(tmp_path / family, family), write, config)
    ours = on_gpu(model, max_num_seqs=sequences)
    assert {m.weight.dtype for m in model_of(ours).modules() if isinstance(m, ExpertLinear)} == {codes}
    found = lost(ours, on_cpu(model))
    print(f"{family}, {name}, {sequences} sequences: prompts {found[0]:.2e}, answers {found[1]:.2e}")
    assert max(found) < most, found


@pytest.mark.parametrize(("quantization", "codes"), [("int8", torch.int8), ("int4", torch.uint8)])
@pytest.mark.parametrize("family", ["qwen3-moe", "gemma4-26b"])
def test_while_they_load(family: str, quantization: str, codes: torch.dtype, tmp_path: Path) -> None:
    """The CPU quantises alike; only the GPU has the head in fp8 beside int4."""
    model = checkpoint(tmp_path / family, family)
    ours = on_gpu(model, quantization=quantization, quantized_activations="none", max_num_seqs=16)
    assert {m.weight.dtype for m in model_of(ours).modules() if isinstance(m, ExpertLinear)} == {codes}
    found = lost(ours, on_cpu(model, quantization=quantization))
    print(f"{family}, {quantization}: prompts {found[0]:.2e}, answers {found[1]:.2e}")
    assert max(found) < (3e-2 if quantization == "int8" else 6e-2), found
