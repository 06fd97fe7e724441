"""GEMM with a weight of bytes, fp8 or int8, for any number of rows: y [M, N] = (x [M, K] W [N, K]ᵀ) · scales.

For GPUs where the library has no such GEMM, and for output heads in int8. If there are fp8 units, x is fp8 like W, with
a scale for each row; otherwise (before compute capability 8.9, and with an int8 weight) x stays as it is, and W is
widened to x's dtype on its way to the tensor cores. As in gemm.small_batch, the weight's rows take the wide side of the
tile, so that a few rows of x are padded to 16 at most.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.runtime.launcher import kernel, shared_memory, wait_for_previous

_GROUP = 8  # row blocks that use the same part of the weight while it is in the L2 cache
_MANY_OUTPUTS = 1 << 15  # enough for each multiprocessor to get several tiles of 128 outputs


class ScaledTiles(NamedTuple):
    """A program multiplies BLOCK_N rows of the weight with BLOCK_M rows of x, BLOCK_K columns at a time."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@kernel
def _scaled_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    IN_GROUP: tl.constexpr = GROUP * ((N + BLOCK_N - 1) // BLOCK_N)
    first_block = tl.program_id(0) // IN_GROUP * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_block, GROUP)
    in_group = tl.program_id(0) % IN_GROUP
    m = (first_block + in_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = in_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = (n < N)[:, None]
    m_mask = (m < M)[None, :]
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K != 0:
            k_live = k < K - at
            w = tl.load(w_at + at, mask=n_mask & k_live[None, :], other=0.0)
            x = tl.load(x_at + at, mask=m_mask & k_live[:, None], other=0.0)
        else:
            w = tl.load(w_at + at, mask=n_mask, other=0.0)
            x = tl.load(x_at + at, mask=m_mask, other=0.0)
        if x_scale_ptr is None:
            w = widened(w, x.dtype)
        acc = tl.dot(w, x, acc)
    acc = acc * tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
    if x_scale_ptr is not None:
        acc = acc * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None].to(tl.float32)
    y_at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_mask & m_mask)


def scaled_tiles(rows: int, outputs: int, x_bytes: int, shared: int) -> ScaledTiles:
    """Tiles by rule, for `rows` of x with `x_bytes` per element and `shared` bytes of shared memory.

    The pipeline has as many stages as fit. A few rows with many outputs are bound by reading the weight: there each
    program takes half of the memory, so that two share a multiprocessor.
    """
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    if x_bytes > 1 and block_m < 128 and outputs >= _MANY_OUTPUTS:
        stages = (shared // 2 - 1024) // (128 * (128 + block_m * x_bytes))
        return ScaledTiles(block_m, 128, 128, 4, max(2, min(4, stages)))
    block_n = 128 if block_m == 128 else 64
    block_k = 64 if x_bytes > 1 and block_m == 128 else 128
    stages = (shared - 1024) // (block_k * (block_n + block_m * x_bytes))
    return ScaledTiles(block_m, block_n, block_k, 8 if block_m == 128 else 4, max(2, min(4, stages)))


def scaled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: ScaledTiles | None = None,
) -> torch.Tensor:
    """x [M, K] (rows may be strided), weight [N, K] e4m3 or int8, scale [N], bias [N] -> [M, N] in `dtype` or x's.

    With x_scale [M], x is e4m3 as well.
    """
    (rows, inner), outputs = x.shape, weight.shape[0]
    tiles = tiles or scaled_tiles(rows, outputs, x.element_size(), shared_memory(x.device))
    block_m, block_n, block_k, warps, stages = tiles
    y = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    _scaled_kernel(
        (triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n),), x, weight, x_scale, scale, bias, y, rows,
        x.stride(0), N=outputs, K=inner, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=_GROUP,
        STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
