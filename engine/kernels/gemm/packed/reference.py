"""The kernels of this room in plain torch: the same names and arguments (except for tuning), in float32."""

from dataclasses import replace
from typing import Any

import torch

from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm.packed.weight import MIDDLE, Packed, dequantize, unpack_pairs


def matmul(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """matmul.matmul."""
    return small_batch_gemm(x, packed)


def gemv(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None, **around: Any) -> torch.Tensor:
    """int4_gemv.gemv."""
    return gemm_reference.gemv(x, dequantize(replace(packed, columns=None), torch.float32), None, bias, **around)


def small_batch_gemm(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """matmul.small_batch_gemm."""
    return (x.float() @ unpacked(packed, x.dtype).float().T).to(x.dtype)


def unpacked(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """matmul.unpacked."""
    return dequantize(replace(packed, columns=None), dtype)


def group_scaled(packed: Packed) -> Packed:
    """group_scaled.group_scaled."""
    return packed


def gemm(x: torch.Tensor, x_scale: torch.Tensor, packed: Packed, *, dtype: torch.dtype) -> torch.Tensor:
    """group_scaled.gemm."""
    return ((x.float() @ dequantize(packed, torch.float32).T) * x_scale[:, None]).to(dtype)


def as_e4m3(packed: Packed) -> torch.Tensor:
    """group_scaled.as_e4m3."""
    codes = unpack_pairs(packed.values, packed.group).float() - MIDDLE["int4"]
    return (codes / 512).to(torch.float8_e4m3fn)
