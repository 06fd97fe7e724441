"""The gate of a gated MLP."""

from typing import Literal

import torch
import torch.nn.functional as F

from engine.layers.linear import Activations, Linear, MergedLinear, QuantizedRows, UnnormedRows

Gate = Literal["silu", "gelu_tanh"]


class GatedLinear(MergedLinear):
    """The first two products of a gated MLP and the gate: act(x Wgᵀ) * (x Wuᵀ)."""

    def __init__(self, in_features: int, inner: int, *, bias: bool = False, gate: Gate = "silu") -> None:
        super().__init__(in_features, [inner, inner], bias=bias)
        self.gate: Gate = gate

    def gated(self, x: Activations, consumer: Linear) -> torch.Tensor | QuantizedRows:
        """[T, in] -> [T, inner], in the form that `consumer`, the product after it, reads."""
        if isinstance(x, UnnormedRows):
            return self._in_vector_form(x.values, norm=(x.weight, x.eps), wide_offset=x.offset, gate=self.gate)
        if isinstance(x, torch.Tensor) and self.in_vector_form(x.shape[0]):
            return self._in_vector_form(x, gate=self.gate)
        gate_up = self(x)
        if self.gate == "gelu_tanh":
            return gelu_tanh_mul(gate_up)
        return silu_mul(gate_up, quantize=consumer.wants_fp8(gate_up.shape[0]), upcoming=consumer.weight)


def silu_mul(
    gate_up: torch.Tensor, *, quantize: bool = False, upcoming: torch.Tensor | None = None
) -> torch.Tensor | QuantizedRows:
    """silu(gate) * up of [T, 2 I] (gate beside up) -> [T, I]; `quantize` only on a GPU. `upcoming`: the weight that it
    meets next."""
    if gate_up.is_cuda:
        from engine.kernels import triton_fused

        if quantize:
            return QuantizedRows(*triton_fused.silu_mul(gate_up, quantize=True, upcoming=upcoming), gate_up.dtype)
        return triton_fused.silu_mul(gate_up, upcoming=upcoming)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of [T, 2 I] (gate beside up) -> [T, I], gelu by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
