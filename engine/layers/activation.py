"""The gate of a gated MLP."""

from typing import Literal

import torch
import torch.nn.functional as F

from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.linear import Linear, MergedLinear

Gate = Literal["silu", "gelu_tanh", "sigmoid"]


class GatedLinear(MergedLinear):
    """Gate and up projection of a gated MLP, fused: act(x Wgᵀ) * (x Wuᵀ)."""

    def __init__(self, in_features: int, inner: int, *, bias: bool = False, gate: Gate = "silu") -> None:
        super().__init__(in_features, [inner, inner], bias=bias)
        self.gate: Gate = gate

    def gated(self, x: Activations, consumer: Linear) -> torch.Tensor | QuantizedRows:
        """[T, in] -> [T, inner], in the form that `consumer`, the next GEMM, reads."""
        if isinstance(x, UnnormedRows):
            return self._vector_gemm(x.values, norm=(x.weight, x.eps), wide_offset=x.offset, gate=self.gate)
        if isinstance(x, torch.Tensor) and self.in_vector_form(x.shape[0]):
            return self._vector_gemm(x, gate=self.gate)
        if isinstance(x, QuantizedRows) and self.gemm.fused_fp8 is not None:
            y = self.gemm.fused_fp8(self, x, gate=self.gate)
            if y is not None:
                return QuantizedRows.of(y) if consumer.wants_fp8(y.shape[0]) else y
        gate, up = self(x).chunk(2, dim=-1)
        return gate_mul(gate, up, self.gate, consumer)


def gate_mul(gate: torch.Tensor, up: torch.Tensor, kind: Gate, consumer: Linear) -> torch.Tensor | QuantizedRows:
    """act(gate) * up, both [T, N], in the form that `consumer`, the next GEMM, reads. May overwrite `up`."""
    if gate.is_cuda:
        from engine.kernels.pointwise import fused

        if consumer.wants_fp8(gate.shape[0]):
            quantized = fused.gate_mul(gate, up, kind, quantize=True)
            return QuantizedRows(*quantized, gate.dtype)
        return fused.gate_mul(gate, up, kind)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    return (F.gelu(gate, approximate="tanh") if kind == "gelu_tanh" else gate.sigmoid()).mul_(up)
