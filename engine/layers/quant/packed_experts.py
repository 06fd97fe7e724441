"""How a GPU keeps the experts of a quantised checkpoint: stacked in the form that the kernels of kernels/moe/ read.

    form     weight                    scale
    rows     e4m3 [E, out, in]         [E, out]
    blocks   e4m3 [E, out, in]         [E, blocks of the matrices of an expert, one after another, ⌈in / 128⌉]

Experts of any other format are dequantised while they load; the memory plan counts them so.
"""

from collections.abc import Sequence

import torch
from torch import nn

from engine.kernels.gemm.packed_weight import Packed
from engine.kernels.moe.tiles import SCALE_BLOCK, Form
from engine.layers.quant.base import ExpertLayer
from engine.layers.weight_memory import for_good


def stack(layer: ExpertLayer, matrices: Sequence[Packed], form: Form) -> None:
    """Give the layer its matrices, which are in the order of its outputs."""
    with for_good():
        values = torch.cat([matrix.values.view(torch.uint8) for matrix in matrices]).view(matrices[0].values.dtype)
        step = SCALE_BLOCK if form == "blocks" else 1
        scale = torch.cat([matrix.scale[::step].float() for matrix in matrices])
    weight = values.view(layer.num_experts, layer.out_features, -1)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    scale = scale.view(layer.num_experts, -1, scale.shape[1])
    layer.scale = nn.Parameter(scale if form == "blocks" else scale.squeeze(2), requires_grad=False)


def stack_bytes(form: Form, count: int, inner: int) -> int:
    """GPU bytes of a matrix [count, inner] in the stack."""
    if form == "rows":
        return count * inner + 4 * count
    return count * inner + 4 * -(-count // SCALE_BLOCK) * -(-inner // SCALE_BLOCK)
