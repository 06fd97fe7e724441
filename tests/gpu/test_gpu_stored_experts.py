"""Whole models whose experts are quantised in the checkpoint: a GPU keeps them so, and its scores are those of the CPU,
which multiplies with the numbers that they stand for."""

import json
from pathlib import Path

import pytest
import torch
from gpu_kit import checkpoint, model_of, on_cpu, on_gpu
from gpu_scores import lost
from safetensors.torch import load_file, save_file

from engine.layers.moe import ExpertLinear
from engine.layers.quant.fp8 import FP8, FP8_MAX

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("fp8 needs compute capability 8.9", allow_module_level=True)

BLOCK = 128
KEPT = ("router", "per_layer", "in_proj_a", "in_proj_b")


def in_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As Qwen publishes a matrix: e4m3, and a scale for each 128 x 128 numbers."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns].to(FP8)
    return {"weight": values.contiguous(), "weight_scale_inv": scale}


def each_expert_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or "experts" not in name:
            found[name] = tensor
            continue
        place, _, kind = name.rpartition(".")
        for i, expert in enumerate(tensor):
            halves = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            parts = zip(("gate_proj", "up_proj") if len(halves) == 2 else (kind,), halves, strict=True)
            found |= {f"{place}.{i}.{part}.weight": matrix.contiguous() for part, matrix in parts}
    return found


def in_block_fp8(model: Path) -> Path:
    tensors = {}
    for name, tensor in each_expert_alone(load_file(model / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        quantised = module.endswith(("_proj", "in_proj_z")) or "in_proj_qkv" in module
        if quantised and tensor.dim() == 2 and not any(part in name for part in KEPT):
            tensors |= {f"{module}.{kind}": part for kind, part in in_blocks(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, model / "model.safetensors")
    raw = json.loads((model / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("sequences", [4, 16])
@pytest.mark.parametrize("activations", ["none", "auto"])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5-moe", "gemma4-26b"])
def test_block_fp8(family: str, activations: str, sequences: int, tmp_path: Path) -> None:
    """Up to four sequences: the kernels for few tokens, with the shared expert or beside the dense MLP."""
    model = in_block_fp8(checkpoint(tmp_path / family, family))
    steps = {"max_num_seqs": sequences, "max_num_batched_tokens": 256}
    ours = on_gpu(model, quantized_activations=activations, **steps)
    assert {m.weight.dtype for m in model_of(ours).modules() if isinstance(m, ExpertLinear)} == {FP8}
    found = lost(ours, on_cpu(model))
    print(f"{family}, {activations}, {sequences} sequences: prompts {found[0]:.2e}, answers {found[1]:.2e}")
    assert max(found) < (2e-2 if activations == "none" else 1e-1), found
