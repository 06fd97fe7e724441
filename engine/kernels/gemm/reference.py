"""The kernels of gemm.small_batch in plain torch: the same names and arguments (except for tuning), in float32."""

import torch

from engine.kernels.pointwise.reference import gated, rms_norm


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    wide_offset: float | None = None,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    block: int = 0,
) -> torch.Tensor:
    """gemm.small_batch.gemv."""
    if block and scale is not None:
        rows, inner = weight.shape
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :inner]
        weight, scale = weight.float() * spread, None
    if norm is not None:
        normed = rms_norm(x, *norm, wide_offset=wide_offset)
        assert isinstance(normed, torch.Tensor)
        x = normed
    y = small_batch_gemm(x, weight, bias, scale=scale)
    if gate is not None:
        first, second = y.chunk(2, -1)
        y = gated(first, second, gate)
    return y if residual is None else residual.copy_(residual.float() + y.float())


def small_batch_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """gemm.small_batch.small_batch_gemm."""
    y = x.float() @ weight.float().T
    if scale is not None:
        y = y * scale.float()
    if x_scale is not None:
        y = y * x_scale.float()[:, None]
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype or x.dtype)
