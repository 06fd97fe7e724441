"""The inputs of a linear layer: plain activations, fp8 activations, or activations that are still to be normalised."""

from typing import NamedTuple

import torch


class QuantizedRows(NamedTuple):
    """fp8 activations, written by the norm or gate before a GEMM, which would otherwise have to quantise them
    itself."""

    values: torch.Tensor  # [T, K] e4m3
    scale: torch.Tensor   # [T] float32
    dtype: torch.dtype    # of the original activations, and of the result
    plain: torch.Tensor | None = None  # [T, K] unquantised, if a layer with unquantised weights reads them, too

    @classmethod
    def of(cls, x: torch.Tensor) -> "QuantizedRows":
        from engine.kernels.pointwise.quantize import quantize_rows

        return cls(*quantize_rows(x), x.dtype)


class UnnormedRows(NamedTuple):
    """Activations before their RMS norm: the skinny GEMM applies the norm itself."""

    values: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [K] of the norm
    eps: float
    offset: float | None = None  # of a WideRMSNorm, which multiplies by offset + weight

    def normed(self) -> torch.Tensor:
        """The rows after the norm, for layers that cannot apply it."""
        from engine.kernels.pointwise.norm import rms_norm

        return rms_norm(self.values, self.weight, self.eps, wide_offset=self.offset)


Activations = torch.Tensor | QuantizedRows | UnnormedRows
