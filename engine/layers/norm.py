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


class WideRMSNorm(RMSNorm):
    """(offset + w) * x / rms(x), all in float32 and rounded once: Gemma's, and with an offset of 1 Qwen3.5's too.

    (Llama's kind rounds before it multiplies by w. In bf16 the two differ in the last bit.)
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__(size, eps)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, consumer: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual.add_(x)
        return self(residual), residual


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension: the norm without a weight."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
