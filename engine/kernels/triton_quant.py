"""fp8 activations: one scale a row (token), so that an outlier token costs no other one its precision.

A row is divided by scale = max(|x|) / 448, 448 being e4m3's largest number. With the weight's scale per output channel
both factors leave the product: y = (x8 W8ᵀ) · scale_x[:, None] · scale_w[None, :], which torch._scaled_mm computes.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import kernel, wait_for_previous


@triton.jit
def row_to_fp8(x):
    """A row x [N] in float32 -> (fp8 [N], scale). A row of zeros has a tiny scale, not 0."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    return (x / scale).to(tl.float8e4nv), scale


@kernel
def _quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, x_stride, K, KP: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, KP)
    mask = k < K
    x = tl.load(x_ptr + row * x_stride + k, mask=mask, other=0.0).to(tl.float32)
    quantized, scale = row_to_fp8(x)
    tl.store(out_ptr + row * K + k, quantized, mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] (rows may be strided) -> (e4m3 [T, K], scale [T] float32) with x ≈ e4m3 * scale. Needs sm89."""
    rows, inner = x.shape
    out, scale = empty_rows(rows, inner, x.device)
    padded = triton.next_power_of_2(inner)
    _quantize_rows_kernel((rows,), x, out, scale, x.stride(0), inner, KP=padded, num_warps=warps_for(padded))
    return out, scale


def empty_rows(rows: int, inner: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the result of `quantize_rows`."""
    out = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=device)
    return out, torch.empty(rows, dtype=torch.float32, device=device)


def warps_for(padded: int) -> int:
    """Warps of a program that holds a whole row of `padded` numbers: 16 numbers a thread while that is possible."""
    return min(16, max(1, padded // 512))
