"""Heads and dimensions of a Gated DeltaNet layer, and what its kernels demand of their tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and dimensions of a layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def constants(self) -> dict[str, int]:
        return {"HK": self.key_heads, "HV": self.value_heads, "K": self.key_dim, "V": self.value_dim}


def check_contiguous(
    conv_weight: torch.Tensor, state: torch.Tensor, conv_state: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise unless everything but the slots is contiguous."""
    assert conv_weight.is_contiguous()
    assert state[0].is_contiguous()
    assert conv_state[0].is_contiguous()
    assert out.is_contiguous()
