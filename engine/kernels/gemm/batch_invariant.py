"""The GEMM of `--batch-invariant`: a token's result has the same bits, whatever else is in the step.

The usual kernel depends on the number of rows (vector form for a few, tensor cores for more, the library for many), and
with it the order of summation. Here tiles have one size for any number of rows, and the inner dimension is never split,
so the order of summation depends only on the shape of the weight. A row of a tile never depends on the other rows,
because tensor cores compute each output from its own row and column.

The counterpart for attention is attention.batch_invariant.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.runtime.launcher import kernel, shared_memory, wait_for_previous

_ROWS = 64     # rows of x, and outputs, in a program's tile
_OUTPUTS = 64
_INNER_BYTES = 256


@kernel
def _product_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    # Consecutive programs read the same weights.
    blocks = tl.cdiv(M, BLOCK_M)
    m = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
    n_mask = (n < N)[:, None]
    m_mask = (m < M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_live = k < K - at
        w = tl.load(w_at + at, mask=n_mask & k_live[None, :], other=0.0)
        x = tl.load(x_at + at, mask=m_mask & k_live[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if scale_ptr is not None:
        acc = acc * tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        acc = acc * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None].to(tl.float32)
    y_at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_mask & m_mask)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] (rows may be strided), weight [N, K], bias [N] -> [M, N] in `dtype` or x's, for any M.

    x and weight have the same dtype; if it is fp8, `scales` are the float32 scales of x [M] and of the weight [N].
    """
    (rows, inner), outputs = x.shape, weight.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    x_scale, scale = (None, None) if scales is None else scales
    itemsize = x.element_size()
    block_k = _INNER_BYTES // itemsize
    stages = max(2, min(4, (shared_memory(x.device) - 1024) // ((_ROWS + _OUTPUTS) * _INNER_BYTES)))
    grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, _OUTPUTS),)
    _product_kernel(
        grid, x, weight, x_scale, scale, bias, y, rows, x.stride(0), N=outputs, K=inner, BLOCK_M=_ROWS,
        BLOCK_N=_OUTPUTS, BLOCK_K=block_k, STAGES=stages, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y
