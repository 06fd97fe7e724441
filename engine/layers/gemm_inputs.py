"""What a linear layer reads: plain activations, activations in fp8, or activations that still have to be normalised."""

from typing import NamedTuple

import torch


class QuantizedRows(NamedTuple):
    """Activations in fp8: written in passing by the norm or gate before a GEMM that would quantise them anyway."""

    values: torch.Tensor  # [T, K] e4m3
    scale: torch.Tensor   # [T] float32
    dtype: torch.dtype    # of the original activations, and of the result
    plain: torch.Tensor | None = None  # [T, K] unquantised, where a layer that keeps its precision reads them too


class UnnormedRows(NamedTuple):
    """Activations before their RMS norm: the skinny GEMM applies the norm itself."""

    values: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [K] of the norm
    eps: float
    offset: float | None = None  # of a WideRMSNorm, which multiplies by offset + weight


Activations = torch.Tensor | QuantizedRows | UnnormedRows
