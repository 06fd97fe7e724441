"""Whole models whose experts are quantised in the checkpoint: a GPU keeps them so, and its scores are those of the CPU,
which multiplies with the numbers that they stand for."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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


def in_int4(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """As compressed-tensors packs a matrix: eight codes in a word, the first in the lowest bits."""
    groups = weight.float().unflatten(1, (-1, group))
    scale = (groups.abs().amax(2) / 7.5).bfloat16()
    codes = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7).long().add(8).flatten(1)
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(2)
    return {"weight_packed": words.to(torch.int32), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


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


BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def w4a16(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip


def quantised(model: Path, write: Callable[[torch.Tensor], dict[str, torch.Tensor]], config: dict[str, Any]) -> Path:
    tensors = {}
    for name, tensor in each_expert_alone(load_file(model / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        wanted = module.endswith(("_proj", "in_proj_z")) or "in_proj_qkv" in module
        if wanted and tensor.dim() == 2 and not any(part in name for part in KEPT):
            tensors |= {f"{module}.{kind}": part for kind, part in write(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, model / "model.safetensors")
    raw = json.loads((model / "config.json").read_text())
    raw["quantization_config"] = config
    (model / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("sequences", [4, 16])
@pytest.mark.parametrize("activations", ["none", "auto"])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3.5-moe", "gemma4-26b"])
def test_block_fp8(family: str, activations: str, sequences: int, tmp_path: Path) -> None:
    """Up to four sequences: the kernels for few tokens, with the shared expert or beside the dense MLP."""
    check(quantised(checkpoint(tmp_path / family, family), in_blocks, BLOCK_FP8), activations, sequences, FP8)


@pytest.mark.parametrize("sequences", [4, 16])
@pytest.mark.parametrize("activations", ["none", "auto"])
@pytest.mark.parametrize(("family", "group"), [("qwen3-moe", 128), ("qwen3.5-moe", 128), ("gemma4-26b", 32)])
def test_int4(family: str, group: int, activations: str, sequences: int, tmp_path: Path) -> None:
    model = quantised(checkpoint(tmp_path / family, family), partial(in_int4, group=group), w4a16(group))
    check(model, activations, sequences, torch.uint8)


def check(model: Path, activations: str, sequences: int, dtype: torch.dtype) -> None:
    ours = on_gpu(model, quantized_activations=activations, max_num_seqs=sequences)
    assert {m.weight.dtype for m in model_of(ours).modules() if isinstance(m, ExpertLinear)} == {dtype}
    found = lost(ours, on_cpu(model))
    print(f"{model.name}, {activations}, {sequences} sequences: prompts {found[0]:.2e}, answers {found[1]:.2e}")
    assert max(found) < (2e-2 if activations == "none" else 1e-1), found
