"""GEMMs of a few rows with a large weight: y [M, N] = x [M, K] W [N, K]ᵀ, bound by reading W once.

Vector form, up to 4 rows (with a large weight, tensor cores win from the second row on: layers/linear.py). A program
holds BLOCK_N rows of W in registers and multiplies them by each row of x. Each thread keeps its own partial sums, which
are reduced across threads once, at the end. Many small programs keep much of W in flight. No kernel writes weights, so
the first block is requested before the kernel waits for its predecessor. The operations around a GEMM in a decoder
layer are fused, because a kernel launch costs as much as reading a megabyte of weights:

    before   RMS norm of x: y = (W (x * weight)ᵀ) / |x|, so every program computes |x| for itself while it multiplies
    after    the gate of a gated MLP, y = act(x Wgᵀ) * (x Wuᵀ), with Wg above Wu;  or the residual, r += x Wᵀ

Tensor-core form, up to 128 rows, with a deep asynchronous pipeline. The weight's rows take the wide side of the tile,
so few rows of x are padded to 16 at most.

fp8 and int8 weights have a scale per output channel. The vector form widens them in registers; on tensor cores fp8
weights meet x in fp8, with a scale per row (pointwise.quantize).
"""

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.tiles import GemmShape, vector_tiles
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import (
    interpreted,
    kernel,
    shared_memory,
    target_of,
    wait_for_previous,
    wait_in_order,
)

PRODUCT_ROWS = (1, 2, 4, 16, 32, 64, 128)  # the most rows of each kernel variant
_AHEAD = 1024    # bytes of each weight row that a program prefetches before it waits for its input
_MATRIX_THREADS = tl.constexpr(128)
VECTOR_ROWS = 4  # the most in vector form


@triton.jit
def _row(x_ptr, M, x_stride, k, K, m: tl.constexpr, WHOLE: tl.constexpr):
    """x[m, k], zeros outside. The variant for four rows also serves three: then row m may not exist."""
    if WHOLE and m < 3:
        return tl.load(x_ptr + m * x_stride + k)
    else:
        return tl.load(x_ptr + m * x_stride + k, mask=(k < K) & (m < M), other=0.0)


@triton.jit
def _add_products(sums, w, xs, ROWS: tl.constexpr, PART: tl.constexpr):
    """sums[m] + w x[m] for each row m: w [BLOCK_N, BLOCK_K]; sums [BLOCK_N, BLOCK_K / PART] add up PART neighbours,
    which one thread holds."""
    wide = widened(w, tl.float32)
    result = ()
    for m in tl.static_range(ROWS):
        products = tl.reshape(wide * xs[m][None, :], [w.shape[0], w.shape[1] // PART, PART])
        result = result + (sums[m] + tl.sum(products, 2),)  # noqa: RUF005 - Triton's tuples
    return result


@triton.jit
def _vector_product(
    program, x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, M, x_stride, y_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, GATE: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = min(128 // w_ptr.dtype.element_ty.primitive_bitwidth, BLOCK_K)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_live = n < N
    w_at = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    up_at = w_at + N * K
    mask = n_live[:, None] & (k < K)[None, :]
    w = tl.load(w_at, mask=mask, other=0.0)
    up = w
    if GATE is not None:
        up = tl.load(up_at, mask=mask, other=0.0)
    # Requested now because they are needed at the end, where each load would wait for the memory.
    scale, bias = _of_outputs(scale_ptr, bias_ptr, n, n_live, BLOCK)
    up_scale = scale
    up_bias = bias
    if GATE is not None:
        up_scale, up_bias = _of_outputs(scale_ptr, bias_ptr, N + n, n_live, BLOCK)
    scales = _of_blocks(scale_ptr, program * BLOCK_N, K, BLOCK_K, BLOCK)
    up_scales = scales
    if GATE is not None:
        up_scales = _of_blocks(scale_ptr, N + program * BLOCK_N, K, BLOCK_K, BLOCK)
    if IN_ORDER:
        wait_in_order(PDL)
    else:
        wait_for_previous(PDL)
    before = ()
    if residual_ptr is not None:  # y is the residual stream: each program adds to its own part
        for m in tl.static_range(ROWS):
            before = before + (tl.load(residual_ptr + m * y_stride + n, mask=n_live & (m < M), other=0.0),)  # noqa: RUF005
    sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // PART], tl.float32),)  # noqa: RUF005
        squares = squares + (tl.zeros([BLOCK_K], tl.float32),)  # noqa: RUF005
    up_sums = sums
    for at in tl.static_range(0, K, BLOCK_K):
        next_w = w
        next_up = up
        if at + BLOCK_K < K:  # load the next block while this one is multiplied
            mask = n_live[:, None] & (k < K - at - BLOCK_K)[None, :]
            next_w = tl.load(w_at + at + BLOCK_K, mask=mask, other=0.0)
            if GATE is not None:
                next_up = tl.load(up_at + at + BLOCK_K, mask=mask, other=0.0)
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + at + k, mask=at + k < K, other=0.0).to(tl.float32) + offset
        xs = ()
        so_far = squares
        squares = ()
        for m in tl.static_range(ROWS):
            x = _row(x_ptr, M, x_stride, at + k, K, m, K % BLOCK_K == 0).to(tl.float32)
            squares = squares + (so_far[m] + x * x,)  # noqa: RUF005
            if norm_ptr is not None:
                x = x * norm
            xs = xs + (x,)  # noqa: RUF005
        own = _in_blocks(xs, scales, at // BLOCK_K, ROWS, BLOCK)
        sums = _add_products(sums, w, own, ROWS, PART)
        w = next_w
        if GATE is not None:
            own = _in_blocks(xs, up_scales, at // BLOCK_K, ROWS, BLOCK)
            up_sums = _add_products(up_sums, up, own, ROWS, PART)
            up = next_up
    dtype = y_ptr.dtype.element_ty
    for m in tl.static_range(ROWS):
        factor = 1.0
        if norm_ptr is not None:  # apply the row's norm last, so that no multiplication waits for it
            factor = tl.rsqrt(tl.sum(squares[m], 0) / K + eps)
        y = (tl.sum(sums[m], 1) * factor * scale + bias).to(dtype)
        if GATE is not None:  # rounded where separate kernels would round
            y = activated(y.to(tl.float32), GATE).to(dtype)
            y = y * (tl.sum(up_sums[m], 1) * factor * up_scale + up_bias).to(dtype)
        if residual_ptr is not None:
            y = (y.to(tl.float32) + before[m].to(tl.float32)).to(dtype)
        tl.store(y_ptr + m * y_stride + n, y, mask=n_live & (m < M))


@triton.jit
def _of_blocks(scale_ptr, first, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of all columns in the block of outputs that begin at `first`, one tensor for each BLOCK_K columns.
    Like W they do not depend on the previous kernel. Loaded where they are used, each would wait for the memory. A
    thread keeps one number of each tensor, because its neighbouring columns share a scale."""
    scales = ()
    if BLOCK > 0:
        GROUPS: tl.constexpr = (K + BLOCK - 1) // BLOCK
        for at in tl.static_range(0, K, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            scale = tl.load(scale_ptr + first // BLOCK * GROUPS + k // BLOCK, mask=k < K, other=0.0)
            scales = scales + (scale,)  # noqa: RUF005 - Triton's tuples
    return scales


@triton.jit
def _in_blocks(xs, scales, at: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of x, multiplied by the scales of their columns: cheaper than scaling W, because a program's outputs
    share them. Without blocks, x as it is."""
    if BLOCK == 0:
        return xs
    else:
        result = ()
        for m in tl.static_range(ROWS):
            result = result + (xs[m] * scales[at],)  # noqa: RUF005
        return result


@triton.jit
def _of_outputs(scale_ptr, bias_ptr, n, n_live, BLOCK: tl.constexpr):
    """Scales and biases of outputs n, float32; without them 1 and 0, which cost nothing."""
    scale = 1.0
    bias = 0.0
    if scale_ptr is not None and BLOCK == 0:
        scale = tl.load(scale_ptr + n, mask=n_live, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
    return scale, bias


@kernel
def _vector_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, M, x_stride, y_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, GATE: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _vector_product(
        tl.program_id(0), x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, M, x_stride, y_stride,
        eps, offset, N, K, ROWS, BLOCK_N, BLOCK_K, BLOCK, GATE, IN_ORDER, PDL,
    )


@triton.jit
def _ask_for_rows(w_ptr, first, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch the first AHEAD bytes of W's rows from `first` on into the L2 cache, while the previous kernel still
    runs and leaves the memory idle. Every GPU with programmatic dependent launch has this instruction, too."""
    thread = tl.arange(0, _MATRIX_THREADS)
    share: tl.constexpr = AHEAD * BLOCK_N // _MATRIX_THREADS
    row = tl.minimum(first + thread % BLOCK_N, N - 1).to(tl.int64)
    size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = w_ptr.to(tl.int64) + row * (K * size) + thread // BLOCK_N * share
    ask: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l,r", [address, tl.full([_MATRIX_THREADS], share, tl.int32)], tl.int32, False, 1)


@kernel
def _matrix_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, M, x_stride, y_stride,
    N: tl.constexpr, K: tl.constexpr, MP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FP8: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and AHEAD > 0:
        _ask_for_rows(w_ptr, tl.program_id(0) * BLOCK_N, N, K, BLOCK_N, AHEAD)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, MP)
    # Requested before the loop: after it, the program would wait for the memory once more.
    if FP8:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)
    wait_for_previous(PDL)
    if FP8:
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
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
        acc = tl.dot(w, x, acc)
    if FP8:
        acc = acc * scale[:, None] * x_scale[None, :]
    if BIAS:
        acc = acc + bias[:, None].to(tl.float32)
    y_at = y_ptr + m[None, :] * y_stride + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_mask & m_mask)


def _ahead(row_bytes: int, block_n: int) -> int:
    """Bytes of each row to prefetch: the same for all threads, a multiple of 16."""
    bytes_each = min(_AHEAD, row_bytes)
    return 0 if interpreted() or row_bytes % 16 or bytes_each * block_n % (16 * 128) else bytes_each


def _matrix_tiles(padded_rows: int, fp8: bool, shared: int) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, stages) for 4 warps, tuned on an H100 for the shapes of an 8B model; fewer stages where shared
    memory is small."""
    return 64, 256 if fp8 else 128, min(6, (shared - 1024) // (256 * (64 + padded_rows)))


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
    in_order: bool = False,
    block: int = 0,
    tiles: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Up to VECTOR_ROWS rows: x [M, K] (rows may be strided), weight [N, K], scale [N] of an fp8 or int8 weight,
    bias [N] -> [M, N] in x's dtype.

    block: of an fp8 weight with a scale for each `block` x `block` numbers, scale [N / block, K / block].

    norm: (weight [K], eps) of an RMS norm of x before the GEMM; `wide_offset` as in pointwise.norm.rms_norm.
    gate: the result is this activation of the first half of the outputs times the second half, [M, N / 2].
    residual: [M, N]; the product is added to it in place, and it is returned.
    in_order: the next kernel starts only when all results older than this kernel's are complete, so it may read those
    without waiting.
    """
    rows, inner = x.shape
    assert rows <= VECTOR_ROWS
    out_features = weight.shape[0] // (1 if gate is None else 2)
    y = torch.empty(rows, out_features, dtype=x.dtype, device=x.device) if residual is None else residual
    norm_weight, eps = (None, 0.0) if norm is None else norm
    gemm = GemmShape(weight.shape[0], inner, weight.element_size(), gate is not None, norm is not None, block)
    padded = triton.next_power_of_2(rows)
    block_n, block_k, warps = tiles or vector_tiles(gemm, padded, target_of(x.device))
    _vector_kernel(
        (triton.cdiv(out_features, block_n),), x, weight, scale, bias, norm_weight, residual, y, rows,
        x.stride(0), y.stride(0), eps, wide_offset or 0.0, N=out_features, K=inner,
        ROWS=padded, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK=block, GATE=gate, IN_ORDER=in_order, num_warps=warps,
    )  # fmt: skip
    return y


def small_batch_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Up to 128 rows: x [M, K] (rows may be strided), weight [N, K], bias [N] -> [M, N] in `dtype` or x's.

    x and weight have the same dtype. If it is fp8, both have scales: x_scale [M] and scale [N].
    """
    rows, inner = x.shape
    out_features = weight.shape[0]
    fp8 = weight.element_size() == 1
    y = torch.empty(rows, out_features, dtype=dtype or x.dtype, device=x.device)
    padded = max(16, triton.next_power_of_2(rows))
    block_n, block_k, stages = tiles or _matrix_tiles(padded, fp8, shared_memory(x.device))
    _matrix_kernel(
        (triton.cdiv(out_features, block_n),), x, weight, x_scale, scale, bias, y, rows, x.stride(0), y.stride(0),
        N=out_features, K=inner, MP=padded, BLOCK_N=block_n, BLOCK_K=block_k,
        FP8=fp8, BIAS=bias is not None, STAGES=stages, AHEAD=_ahead(inner * weight.element_size(), block_n),
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y
