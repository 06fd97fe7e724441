"""How a GPU keeps the experts of a quantised checkpoint: stacked in the form that the kernels of kernels/moe/ read.

    form     weight                    scale
    rows     e4m3 [E, out, in]         [E, out]
    blocks   e4m3 [E, out, in]         [E, blocks of the matrices of an expert, one after another, ⌈in / 128⌉]
    int4     uint8 [E, out, in / 2]    [E, out, groups], as the checkpoint has them; likewise `zero`,
                                       if the format has zero points

Experts of any other format are dequantised while they load; the memory plan counts them so.
"""

from collections.abc import Sequence

import torch
from torch import nn

from engine.kernels.gemm.packed.weight import Packed
from engine.kernels.moe.tiles import SCALE_BLOCK, Form
from engine.layers.quant.base import ExpertLayer
from engine.layers.weight_memory import for_good


def stack(layer: ExpertLayer, matrices: Sequence[Packed], form: Form) -> None:
    """Give the layer its matrices, which are in the order of its outputs."""
    with for_good():
        values = torch.cat([matrix.values.view(torch.uint8) for matrix in matrices]).view(matrices[0].values.dtype)
        step = SCALE_BLOCK if form == "blocks" else 1
        scale = torch.cat([matrix.scale[::step] for matrix in matrices])
        scale = scale if form == "int4" else scale.float()
        zeros = [matrix.zero for matrix in matrices if matrix.zero is not None]
        zero = torch.cat(zeros).view(layer.num_experts, layer.out_features, -1) if zeros else None
    weight = values.view(layer.num_experts, layer.out_features, -1)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    scale = scale.view(layer.num_experts, -1, scale.shape[1])
    layer.scale = nn.Parameter(scale.squeeze(2) if form == "rows" else scale, requires_grad=False)
    if zero is not None:
        layer.zero = nn.Parameter(zero, requires_grad=False)
