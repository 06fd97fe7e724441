"""A layer of experts to measure: random weights in a model's shapes, without the rest of the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.bench import floor, report
from engine.kernels.moe.tiles import Shape
from engine.layers.moe import SparseMLP
from engine.layers.quant.fp8 import FP8, quantize_weight
from engine.models.config.model import read_json
from engine.models.loading.loader import quantize

if TYPE_CHECKING:
    from engine.kernels.moe.decode import Beside

_INPUTS = 8  # that take turns: each chooses other experts


@dataclass(slots=True)
class Subject:
    """One layer: random weights in a model's shapes."""

    model: str
    quantization: str
    layer: SparseMLP
    shape: Shape
    beside: "Beside | None"  # the MLP beside the experts, which only a search runs
    width: int

    @property
    def facts(self) -> report.Row:
        return {"bench": "moe", "engine": "atoll", "model": self.model, "quantization": self.quantization}


def make_subject(config: Path, device: torch.device, quantization: str) -> Subject:
    raw = read_json(config / "config.json")
    layer, shape = make_layer(raw, device, fp8=quantization == "fp8")
    width, factor = floor.beside_experts(raw)
    beside = None
    if width and device.type == "cuda":
        from engine.kernels.moe.decode import Beside

        def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            values = torch.randn(rows, columns, device=device).mul_(0.02).bfloat16()
            return quantize_weight(values) if shape.itemsize == 1 else (values, None)

        first, second = weight(2 * width, shape.hidden), weight(shape.hidden, width)
        beside = Beside(*first, *second, layer.gate.weight[:1] if factor else None)
    return Subject(config.name, quantization, layer, shape, beside, width)


def make_layer(raw: dict[str, Any], device: torch.device, *, fp8: bool) -> tuple[SparseMLP, Shape]:
    """Random weights in a model's shapes: a router that uses all experts alike, and the experts."""
    shape, gate = floor.read_shape(raw, 1 if fp8 else 2)
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
