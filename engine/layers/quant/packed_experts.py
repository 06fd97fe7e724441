"""How a GPU keeps the experts of a quantised checkpoint: stacked in the form that the kernels of kernels/moe/ read.

    form     weight                    scale
    rows     e4m3 [E, out, in]         [E, out]
             int8 [E, out, in]         likewise
    blocks   e4m3 [E, out, in]         [E, blocks of the matrices of an expert, one after another, ⌈in / 128⌉]
    int4     uint8 [E, out, in / 2]    [E, out, groups], as the checkpoint has them; likewise `zero`,
                                       if the format has zero points
    int8     int8 [E, out, in]         the same; zero points are int8, too
    fp4      uint8 [E, out, in / 2]    [E, out, groups], e4m3 or powers of two; NVFP4 has factors [E, out]

Experts of any other format are dequantised while they load; the memory plan counts them so.
"""

from collections.abc import Sequence

import torch
from torch import nn

from engine.kernels.gemm.packed.weight import MIDDLE, Packed, joined_tensors
from engine.kernels.moe.tiles import SCALE_BLOCK, Form
from engine.layers.quant.base import ExpertLayer
from engine.layers.weight_memory import for_good


def stack(layer: ExpertLayer, matrices: Sequence[Packed], form: Form) -> None:
    """Give the layer its matrices, which are in the order of its outputs."""
    with for_good():
        values = joined_tensors([matrix.values for matrix in matrices])
        step = SCALE_BLOCK if form == "blocks" else 1
        scale = joined_tensors([matrix.scale[::step] for matrix in matrices])
        scale = scale.float() if form in ("rows", "blocks") else scale
        zeros = [matrix.zero for matrix in matrices if matrix.zero is not None]
        zero = torch.cat(zeros).view(layer.num_experts, layer.out_features, -1) if zeros else None
        factors = [_factor(matrix) for matrix in matrices if matrix.factor is not None]
        factor = torch.cat(factors).view(layer.num_experts, -1) if factors else None
    if matrices[0].kind == "int8":
        values, zero = _signed(values), None if zero is None else _signed(zero)
    weight = values.view(layer.num_experts, layer.out_features, -1)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    scale = scale.view(layer.num_experts, -1, scale.shape[1])
    layer.scale = nn.Parameter(scale.squeeze(2) if form == "rows" else scale, requires_grad=False)
    if zero is not None:
        layer.zero = nn.Parameter(zero, requires_grad=False)
    if factor is not None:
        layer.factor = nn.Parameter(factor, requires_grad=False)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """In place: codes whose middle is 128, as int8."""
    return codes.bitwise_xor_(MIDDLE["int8"]).view(torch.int8)


def _factor(matrix: Packed) -> torch.Tensor:
    assert matrix.factor is not None
    return 1 / matrix.factor if matrix.divides else matrix.factor
