"""Checkpoints that the compressed-tensors library wrote: its numbers, and transformers' tokens."""

import oracle
import pytest
import quantized_files as files
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from test_oracle import run
from test_quantized_checkpoints import WIDE, linears, loaded

from engine.config import EngineConfig
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.worker.startup.build import build_engine

FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
SCHEMES = {
    "w4a16": ("pack-quantized", PackedQuantizationCompressor, files.ints(4, 32), None),
    "w4a16 asymmetric": ("pack-quantized", PackedQuantizationCompressor, files.ints(4, 64, symmetric=False), None),
    "w4a16 by channel": ("pack-quantized", PackedQuantizationCompressor, files.ints(4, 0), None),
    "w8a16": ("pack-quantized", PackedQuantizationCompressor, files.ints(8, 32), None),
    "w2a16": ("pack-quantized", PackedQuantizationCompressor, files.ints(2, 32), None),
    "w8a8": ("int-quantized", IntQuantizationCompressor, files.ints(8, 0), files.INT8_INPUTS),
    "fp8 dynamic": ("float-quantized", FloatQuantizationCompressor, FP8 | {"strategy": "channel"}, files.FP8_INPUTS),
    "fp8 block": ("float-quantized", FloatQuantizationCompressor,
                  FP8 | {"strategy": "block", "block_structure": [128, 128]}, None),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4PackedCompressor,
              FP4 | {"strategy": "tensor_group", "group_size": 16}, None),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4PackedCompressor, FP4 | {"strategy": "group", "group_size": 32}, None),
}  # fmt: skip


def by_library(compressor, weights, inputs):
    """A writer that leaves everything to the library."""
    scheme = QuantizationScheme(targets=["Linear"], weights={"symmetric": True, **weights}, input_activations=inputs)
    args = scheme.weights

    def write(weight):
        weight = torch.tensor(weight)
        out, inner = weight.shape
        if args.strategy == "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -inner % wide, 0, -out % high))
            blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
        else:
            blocks = weight.unflatten(1, (-1, args.group_size or inner))
        whole = (448 * 6 / weight.abs().max()).reshape(1) if args.strategy == "tensor_group" else None
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=whole)
        state = {"weight": weight, "weight_scale": scale.to(torch.float32), "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        stored = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(stored), scheme)["weight"]
        return stored, numbers.float().numpy()

    return write


@pytest.fixture(scope="module")
def written(tiny_llama_dir, tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            layout, compressor, weights, inputs = SCHEMES[name]
            config = files.compressed_tensors(layout, weights, inputs)
            writer = files.of_layers(by_library(compressor, weights, inputs))
            made[name] = files.save(tiny_llama_dir("gqa", **WIDE), tmp_path_factory.mktemp("ct"), config, writer)
        return made[name]

    return make


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_are_the_librarys(written, name):
    packed = written(name)
    ours, plain = loaded(packed), loaded(packed.parent / "plain")
    for module, linear in linears(ours).items():
        if name == "nvfp4":  # the library unpacks it in bfloat16, scales too
            torch.testing.assert_close(linear.weight, linears(plain)[module].weight, rtol=2**-7, atol=0)
        else:
            assert torch.equal(linear.weight, linears(plain)[module].weight), module


# transformers 5.23 refuses packed zero points, and multiplies nvfp4 in bfloat16 only.
@pytest.mark.parametrize("name", ["w4a16", "w4a16 by channel", "w8a16", "w8a8", "fp8 dynamic", "fp8 block"])
def test_greedy_tokens_are_those_of_transformers(written, name):
    packed = written(name)
    core = build_engine(EngineConfig(packed, device="cpu", dtype="float32", max_model_len=128))
    prompts = [tuple(range(5, 5 + n)) for n in (3, 17, 40)]
    requests = [EngineRequest(str(i), list(p), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
                for i, p in enumerate(prompts)]  # fmt: skip
    tokens, _ = run(core, requests)
    for i, prompt in enumerate(prompts):
        assert tokens[str(i)] == oracle.greedy(packed, prompt, 12)
