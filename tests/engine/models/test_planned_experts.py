"""Experts of quantised checkpoints are planned at the size that a GPU keeps them in."""

import pytest
import quantized_files as files
from test_quantized_families import BENCH, published

from engine.config import EngineConfig
from engine.layers.linear import Linear
from engine.layers.moe import ExpertLinear
from engine.models.registry import empty_model
from engine.plan import weight_bytes

LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 256, 2048, 512
NUMBERS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH
OUTPUTS = LAYERS * EXPERTS * (2 * WIDTH + HIDDEN)
KEPT = ["re:.*self_attn.*", "re:.*linear_attn.*", "re:.*shared_expert.*", "re:.*mlp.gate$", "lm_head"]
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP4 = {"num_bits": 4, "type": "float"}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def planned(tmp_path, quantization):
    model = published(tmp_path, "qwen3.6-35b-a3b", quantization, num_hidden_layers=LAYERS)
    if quantization is not None:
        stored = [m for m in model.modules() if isinstance(m, ExpertLinear)]
        assert len(stored) == 2 * LAYERS
    return weight_bytes(EngineConfig(tmp_path))[0]


def compressed(layout, weights, inputs=None):
    return files.compressed_tensors(layout, weights, inputs, ignore=KEPT)


@pytest.mark.parametrize(("quantization", "kept"), [
    (compressed("pack-quantized", files.ints(8, 0)), NUMBERS + 4 * OUTPUTS),
    (compressed("int-quantized", INT8, BY_TOKEN), NUMBERS + 4 * OUTPUTS),
    (compressed("int-quantized", INT8 | {"symmetric": False}), NUMBERS + (2 + 1) * OUTPUTS),
    (compressed("pack-quantized", files.ints(8, 128)), NUMBERS + NUMBERS // 128 * 2),
    (compressed("pack-quantized", files.ints(8, 16)), 2 * NUMBERS),  # the kernels have no such groups: dequantised
    (compressed("nvfp4-pack-quantized", FP4 | {"strategy": "tensor_group", "group_size": 16}),
     NUMBERS // 2 + NUMBERS // 16 + 4 * OUTPUTS),
    (compressed("mxfp4-pack-quantized", FP4 | {"strategy": "group", "group_size": 32}), NUMBERS // 2 + NUMBERS // 32),
], ids=["w8a16", "w8a8", "zero points", "groups", "odd groups", "nvfp4", "mxfp4"])  # fmt: skip
def test_bytes_of_experts(tmp_path, quantization, kept):
    assert planned(tmp_path, None) - planned(tmp_path, quantization) == 2 * NUMBERS - kept


@pytest.mark.parametrize(("name", "bits"), [("int8", 8 + 32 / 1024), ("int4", 4 + 16 / 128)])
def test_experts_that_become_integers_while_they_load(name, bits):
    """They are nearly all of this model's weights."""
    sizes = [weight_bytes(EngineConfig(BENCH / "qwen3.6-35b-a3b", quantization=each))[0] for each in (None, name)]
    model = empty_model(BENCH / "qwen3.6-35b-a3b")
    stacks = [m for m in model.modules() if isinstance(m, ExpertLinear)]
    experts = sum(m.num_experts * m.in_features * m.out_features for m in stacks)
    saved = (sizes[0] - sizes[1]) / experts
    assert saved > 2 - bits / 8
    assert saved < 1.15 * (2 - bits / 8)


@pytest.mark.parametrize(("name", "bits"), [("nvfp4", 4 + 8 / 16), ("mxfp4", 4 + 8 / 32)])
def test_linear_layers_in_fp4(tmp_path, name, bits):
    """A scale of a group is one byte, and NVFP4 has a float32 for each output."""
    sizes = []
    for quantization in (None, files.FORMATS[name][0]):
        model = published(tmp_path, "qwen3-8b", quantization)
        sizes.append(weight_bytes(EngineConfig(tmp_path))[0])
    linears = [m for m in model.modules() if isinstance(m, Linear) and m.quantizable]
    kept = sum(m.out_features * (m.in_features * bits / 8 + (4 if name == "nvfp4" else 0)) for m in linears)
    assert sizes[0] - sizes[1] == sum(2 * m.out_features * m.in_features for m in linears) - kept
