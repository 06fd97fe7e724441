"""Products of a few rows with a large weight: y [M, N] = x [M, K] W [N, K]ᵀ for M up to 64, bound by reading W once.

Each program streams BLOCK_N rows of W past all M rows of x through a deep asynchronous pipeline. The weight's rows take
the wide side of the matrix unit, so M needs no padding beyond 16. fp8 weights are widened in registers and scaled per
output channel at the end.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import kernel


@kernel
def _gemv_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, M, x_stride, y_stride,
    N: tl.constexpr, K: tl.constexpr, MP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, MP)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, MP], tl.float32)
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x_at = x_ptr + m[None, :] * x_stride + k[:, None]
    n_mask = (n < N)[:, None]
    m_mask = (m < M)[None, :]
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K != 0:
            k_live = k < K - at
            w = tl.load(w_at + at, mask=n_mask & k_live[None, :], other=0.0)
            x = tl.load(x_at + at, mask=m_mask & k_live[:, None], other=0.0)
        else:
            if N % BLOCK_N == 0:
                w = tl.load(w_at + at)
            else:
                w = tl.load(w_at + at, mask=n_mask, other=0.0)
            x = tl.load(x_at + at, mask=m_mask, other=0.0)
        acc = tl.dot(w.to(x.dtype), x, acc)
    if SCALED:
        acc = acc * tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        acc = acc + tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None].to(tl.float32)
    y_at = y_ptr + m[None, :] * y_stride + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_mask & m_mask)


def tiles(out_features: int, inner: int, fp8: bool) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, stages), all with 4 warps: wide tiles where there are enough of them for every
    multiprocessor, long ones for few outputs (measured on an H100 with the shapes of an 8B model, one row)."""
    if out_features >= 6144:
        return 64, 128, 5 if fp8 else 4
    if fp8:
        return 32, 256, 4
    return (16, 512, 3) if inner >= 8192 else (32, 128, 5)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    block_n: int = 0,
    block_k: int = 0,
    num_warps: int = 4,
    stages: int = 0,
) -> torch.Tensor:
    """x [M, K] (rows may be strided), weight [N, K], scale [N] of an fp8 weight, bias [N] -> [M, N] in x's dtype.

    M <= 64. Without a choice of tiles: the fastest of a search on an H100.
    """
    rows, inner = x.shape
    out_features = weight.shape[0]
    if not block_n:
        block_n, block_k, stages = tiles(out_features, inner, weight.element_size() == 1)
    y = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    _gemv_kernel(
        (triton.cdiv(out_features, block_n),), x, weight, scale, bias, y, rows, x.stride(0), y.stride(0),
        N=out_features, K=inner, MP=max(16, triton.next_power_of_2(rows)), BLOCK_N=block_n, BLOCK_K=block_k,
        SCALED=scale is not None, BIAS=bias is not None, STAGES=stages, num_warps=num_warps, num_stages=stages,
    )  # fmt: skip
    return y
