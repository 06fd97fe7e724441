"""A layer of experts to measure: random weights with a model's shapes, without the rest of the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.kernels.moe.tiles import Shape
from engine.kernels.tuning.rows import Row
from engine.layers.activation import Gate
from engine.layers.moe import SparseMLP
from engine.layers.quant.fp8 import FP8, quantize_weight
from engine.models.config.fields import get_size
from engine.models.config.model import read_json
from engine.models.loading.loader import quantize

if TYPE_CHECKING:
    from engine.kernels.moe.decode import DenseBranch

_INPUTS = 8  # inputs that take turns: each chooses other experts


@dataclass(slots=True)
class Subject:
    """One layer with random weights and a model's shapes."""

    model: str
    quantization: str
    layer: SparseMLP
    shape: Shape
    dense: "DenseBranch | None"  # the dense branch, which only a search runs
    width: int
    widened: bool = False  # fp8 weights on a GPU without fp8 tensor cores

    @property
    def matrix_shape(self) -> Shape:
        """The shape by which the kernels on tensor cores choose their tiles."""
        return self.shape._replace(widened=self.widened)

    @property
    def facts(self) -> Row:
        return {"bench": "moe", "engine": "atoll", "model": self.model, "quantization": self.quantization}


def make_subject(config: Path, device: torch.device, quantization: str) -> Subject:
    raw = read_json(config / "config.json")
    layer, shape = make_layer(raw, device, fp8=quantization == "fp8")
    width, factor = dense_branch_of(raw)
    dense = None
    if width and device.type == "cuda":
        from engine.kernels.moe.decode import DenseBranch

        def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            values = torch.randn(rows, columns, device=device).mul_(0.02).bfloat16()
            return quantize_weight(values) if shape.itemsize == 1 else (values, None)

        first, second = weight(2 * width, shape.hidden), weight(shape.hidden, width)
        dense = DenseBranch(*first, *second, layer.gate.weight[:1] if factor else None)
    widened = shape.itemsize == 1 and device.type == "cuda" and not _has_fp8_units(device)
    return Subject(config.name, quantization, layer, shape, dense, width, widened)


def _has_fp8_units(device: torch.device) -> bool:
    from engine.kernels.runtime.launcher import target_of

    return target_of(device).fp8_units


def make_layer(raw: dict[str, Any], device: torch.device, *, fp8: bool) -> tuple[SparseMLP, Shape]:
    """Random weights with a model's shapes: a router that uses all experts equally, and the experts."""
    shape, gate = read_shape(raw, 1 if fp8 else 2)
    dtype = torch.bfloat16
    layer = SparseMLP(shape.hidden, shape.inner, shape.num_experts, shape.top_k)
    layer.experts.gate = gate
    generator = torch.Generator(device=device).manual_seed(0)
    if fp8:
        quantize(layer, "fp8")
    for module in (layer.gate, layer.experts.gate_up_proj, layer.experts.down_proj):
        weight = torch.empty(module.weight.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.finalize()
    layer.experts.finalize()
    if fp8 and layer.experts.down_proj.weight.dtype != FP8:
        shape = shape._replace(itemsize=2)
    return layer, shape


def inputs_for(layer: SparseMLP, shape: Shape, tokens: int) -> list[torch.Tensor]:
    device = layer.gate.weight.device
    generator = torch.Generator(device=device).manual_seed(1)
    wide = torch.randn(_INPUTS, tokens, shape.hidden, device=device, generator=generator)
    return list(wide.to(layer.gate.weight.dtype))


def read_shape(raw: dict[str, Any], itemsize: int = 2) -> tuple[Shape, Gate]:
    """The shape of the layers with experts, for any family's config.json. Raises ModelError with the field's name."""
    raw = raw.get("text_config") or raw
    experts = "num_experts" if "num_experts" in raw else "num_local_experts"
    top_k = "top_k_experts" if "top_k_experts" in raw else "num_experts_per_tok"
    inner = "moe_intermediate_size" if "moe_intermediate_size" in raw else "intermediate_size"
    act = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
    shape = Shape(
        get_size(raw, experts), get_size(raw, top_k), get_size(raw, "hidden_size"), get_size(raw, inner), itemsize
    )
    return shape, "gelu_tanh" if "gelu" in act else "silu"


def has_experts(raw: dict[str, Any]) -> bool:
    """Whether a config.json describes a mixture of experts."""
    raw = raw.get("text_config") or raw
    return bool(raw.get("num_experts") or raw.get("num_local_experts"))


def dense_branch_of(raw: dict[str, Any]) -> tuple[int, bool]:
    """Width of the dense branch (0: none), and whether it is multiplied by a sigmoid."""
    raw = raw.get("text_config") or raw
    if raw.get("enable_moe_block"):
        return get_size(raw, "intermediate_size"), False
    shared = raw.get("shared_expert_intermediate_size") or 0
    return shared, shared > 0
