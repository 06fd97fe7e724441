"""RMS normalisation, alone and with the residual stream's addition before it."""

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Linear, QuantizedRows, empty_parameter


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x²) + eps), statistics in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            from engine.kernels.triton_fused import rms_norm

            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, consumer: Linear
    ) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor]:
        """(norm(x + residual), x + residual): the two things a pre-norm layer needs. Consumes `residual`.

        The first is in the form that `consumer`, the product that follows, reads.
        """
        if x.is_cuda:
            from engine.kernels.triton_fused import rms_norm

            kept = x if residual is None else residual
            if consumer.wants_fp8(x.shape[0]):
                return QuantizedRows(*rms_norm(x, self.weight, self.eps, residual, quantize=True), x.dtype), kept
            return rms_norm(x, self.weight, self.eps, residual), kept
        if residual is None:
            return self(x), x
        residual = residual.add_(x)
        return self(residual), residual
