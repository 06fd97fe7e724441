"""Layers on a CPU whose packed weight multiplies by itself: integers (kernels/gemm/cpu_int8.py, cpu_integers.py)."""

from typing import Protocol

import torch
from torch import nn

from engine.kernels.runtime.cpu_threads import num_threads
from engine.layers.quant.base import Gemm, LinearLayer
from engine.layers.quant.unquantized import threads_for


class PackedOnCpu(Protocol):
    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N] in x's dtype, with the layer's bias."""
        ...


def use_on_cpu(layer: LinearLayer, packed: PackedOnCpu, *, keep_weight: bool) -> None:
    """Multiply with this, instead of the weight as it was loaded."""
    layer.packed, layer.gemm = packed, Gemm(_multiply)
    layer.threads = torch.get_num_threads()
    if not keep_weight:
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def _multiply(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    with num_threads(threads_for(layer, x)):  # the rest of a small step runs on one
        return layer.packed(x)
