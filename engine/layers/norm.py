"""RMS normalisation, alone or after adding to the residual stream."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.gemm_inputs import Activations, QuantizedRows, UnnormedRows
from engine.layers.linear import Linear
from engine.layers.weight_memory import empty_parameter

# Longest row whose norm is fused into the small-batch GEMM. Every program of that GEMM repeats the norm, so for longer
# rows a separate norm kernel is cheaper.
_LONGEST_FUSED_NORM = 4096


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x²) + eps), statistics in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    wide_offset: float | None = None  # of a WideRMSNorm

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """norm(x), or norm(x + residual) with the sum left in `residual`."""
        if x.is_cuda and x.ndim == 2:
            from engine.kernels.pointwise.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, residual, wide_offset=self.wide_offset)
        if residual is not None:
            x = residual.add_(x)
        return self._plain(x)

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, consumer: Linear, *others: Linear
    ) -> tuple[Activations, torch.Tensor]:
        """h = x + residual -> (norm(h), h), as pre-norm layers need it. Overwrites `residual`. Either summand may be
        missing.

        norm(h) has the form that `consumer`, the next GEMM, reads; other readers must accept it, too.
        """
        if x is None or residual is None:
            x, residual = x if residual is None else residual, None
            assert x is not None
            small = x.shape[-1] <= _LONGEST_FUSED_NORM
            if small and all(product.in_vector_form(x.shape[0]) for product in (consumer, *others)):
                return UnnormedRows(x, self.weight, self.eps, self.wide_offset), x
        kept = x if residual is None else residual
        if consumer.wants_fp8(x.shape[0]):
            from engine.kernels.pointwise.norm import rms_norm

            plain = None
            if not all(product.wants_fp8(x.shape[0]) for product in others):
                plain = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            rows = rms_norm(
                x, self.weight, self.eps, residual, wide_offset=self.wide_offset, quantize=True, plain=plain
            )
            return QuantizedRows(*rows, x.dtype, plain), kept
        return self(x, residual), kept


class Consumer(Protocol):
    """What reads a norm's result."""

    def wants_fp8(self, rows: int) -> bool: ...


class WideRMSNorm(RMSNorm):
    """(offset + w) * x / rms(x), all in float32 and rounded once: Gemma's, and with an offset of 1 Qwen3.5's too.

    (Llama's norm rounds before it multiplies by w. In bf16 the two differ in the last bit.)
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__(size, eps)
        self.offset = self.wide_offset = offset

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)

    def onto(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        following: Sequence["WideRMSNorm"],
        *consumers: Consumer | None,
        branch: tuple["WideRMSNorm", torch.Tensor, "WideRMSNorm"] | None = None,
        scalar: torch.Tensor | None = None,
    ) -> list[Activations]:
        """residual = (residual + norm(x)) * scalar, in place, then the norms `following`: everything between one GEMM
        and the next in layers that normalise a GEMM's output.

        branch: (norm_1, y, norm_2); then norm_1(x) + norm_2(y) takes the place of x. Returns the following norms of the
        residual, or the residual if there are none; the first two in the forms that their `consumers` read. All norms
        have the same eps and offset.
        """
        if x.is_cuda:
            return self._onto_on_gpu(residual, x, following, consumers, branch, scalar)
        if branch is not None:
            norm_1, y, norm_2 = branch
            x = norm_1(x) + norm_2(y)
        residual.add_(self(x))
        if scalar is not None:
            residual.mul_(scalar)
        return [norm(residual) for norm in following] or [residual]

    def _onto_on_gpu(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        following: Sequence["WideRMSNorm"],
        consumers: Sequence[Consumer | None],
        branch: tuple["WideRMSNorm", torch.Tensor, "WideRMSNorm"] | None,
        scalar: torch.Tensor | None,
    ) -> list[Activations]:
        from engine.kernels.pointwise.norm import post_norm

        weights = None if branch is None else (branch[0].weight, branch[1], branch[2].weight)
        quantize = [consumer is not None and consumer.wants_fp8(x.shape[0]) for consumer in consumers]
        found = post_norm(
            x, self.weight, residual, [norm.weight for norm in following], self.eps, self.offset, branch=weights,
            scalar=scalar, quantize=quantize,
        )  # fmt: skip
        rows: list[Activations] = [QuantizedRows(*each, x.dtype) if isinstance(each, tuple) else each for each in found]
        return rows or [residual]


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension: the norm without a weight."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
