"""The gate of a gated MLP."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 I] (gate beside up) -> [T, I]."""
    if gate_up.is_cuda:
        from engine.kernels import triton_fused

        return triton_fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
