"""Activations in 8 bits: one scale per row (token), so that an outlier token does not cost other tokens precision.

A row is divided by scale = max(|x|) / 448; 448 is e4m3's largest number. As the weight has a scale per output channel,
both scales can be applied after the GEMM: y = (x8 W8ᵀ) · scale_x[:, None] · scale_w[None, :], as torch._scaled_mm
computes it. In int8 (W8A8 checkpoints) scale = max(|x|) / 127.5, as in compressed-tensors.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel, wait_for_previous


@triton.jit
def load_row(row_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """A row [N] as a tuple of blocks [BLOCK], zeros after its end.

    With a single block of the next power of two, up to half of the threads would idle. N is a constant because the
    compiler must know its divisors to load 16 bytes at a time under a mask.
    """
    i = tl.arange(0, BLOCK)
    row = ()
    for at in tl.static_range(0, N, BLOCK):
        row = row + (tl.load(row_ptr + at + i, mask=at + i < N, other=0.0),)  # noqa: RUF005 - Triton's tuples
    return row


@triton.jit
def store_row(row, row_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for at in tl.static_range(0, N, BLOCK):
        tl.store(row_ptr + at + i, row[at // BLOCK], mask=at + i < N)


@triton.jit
def store_row_as_fp8(row, row_ptr, scale_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Store a row and its scale. The scale of a row of zeros is tiny, not 0."""
    i = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for at in tl.static_range(0, N, BLOCK):
        largest = tl.maximum(largest, tl.abs(row[at // BLOCK].to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / 448.0
    inverse = 1.0 / scale
    for at in tl.static_range(0, N, BLOCK):
        tl.store(row_ptr + at + i, (row[at // BLOCK].to(tl.float32) * inverse).to(tl.float8e4nv), mask=at + i < N)
    tl.store(scale_ptr, scale)


def blocks_for(size: int) -> tuple[int, int]:
    """(BLOCK, warps) of a program that holds a row of `size` numbers.

    One block with 16 elements per thread if that leaves few threads idle; else the fewest warps with at most 40
    elements per thread, loaded 8 at a time.
    """
    padded = triton.next_power_of_2(size)
    if padded <= 1024 or size > padded * 7 // 8:
        return padded, min(16, max(1, padded // 512))
    warps = next((w for w in (4, 8) if size <= 5 * 256 * w), 16)
    return 256 * warps, warps


@kernel
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = load_row(x_ptr + row * x_stride, N, BLOCK)
    store_row_as_fp8(x, out_ptr + row * N, scale_ptr + row, N, BLOCK)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] (rows may be strided) -> (e4m3 [T, K], scale [T] float32) with x ≈ e4m3 * scale. Needs sm_89."""
    rows, inner = x.shape
    out, scale = empty_rows(rows, inner, x.device)
    block, warps = blocks_for(inner)
    _quantize_rows_kernel((rows,), x, out, scale, x.stride(0), N=inner, BLOCK=block, num_warps=warps)
    return out, scale


@kernel
def _quantize_rows_to_int8_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = load_row(x_ptr + row * x_stride, N, BLOCK)
    i = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    nothing = tl.zeros([BLOCK], tl.float32)  # NaN if the row holds a NaN or an infinity; then so is the scale
    for at in tl.static_range(0, N, BLOCK):
        wide = x[at // BLOCK].to(tl.float32)
        largest = tl.maximum(largest, tl.abs(wide))
        nothing += wide * 0.0
    scale = tl.maximum(tl.math.div_rn(tl.max(largest, 0), 127.5), 1e-12) + tl.sum(nothing, 0)
    for at in tl.static_range(0, N, BLOCK):
        y = tl.math.div_rn(x[at // BLOCK].to(tl.float32), scale)
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23 leaves no fraction: rounded to nearest, ties to even
        y = tl.where(y > 127.0, 127.0, tl.where(y < -128.0, -128.0, y))
        tl.store(out_ptr + row * N + at + i, tl.where(y == y, y, 0.0).to(tl.int8), mask=at + i < N)
    tl.store(scale_ptr + row, scale)


def quantize_rows_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] (rows may be strided) -> (int8 [T, K], scale [T] float32) with x ≈ int8 * scale."""
    rows, inner = x.shape
    out = torch.empty(rows, inner, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, warps = blocks_for(inner)
    _quantize_rows_to_int8_kernel((rows,), x, out, scale, x.stride(0), N=inner, BLOCK=block, num_warps=warps)
    return out, scale


def empty_rows(rows: int, inner: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised tensors for the result of `quantize_rows`."""
    out = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=device)
    return out, torch.empty(rows, dtype=torch.float32, device=device)
