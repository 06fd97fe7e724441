"""Building blocks of kernels that stream the rows of a weight past a few vectors. Several blocks [.., BLOCK_K] are in
flight at a time, and each thread keeps its own partial sums until the end.

The vector form of dense layers (small_batch.py) has a separate loop, which loads one block ahead: its tiles were tuned
with that loop, so merging the two would mean tuning all tiles again.
"""

import triton
import triton.language as tl

from engine.kernels.pointwise.e4m3 import widened


@triton.jit
def block(w_at, live, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [i BLOCK_K, (i + 1) BLOCK_K) of some rows of a weight, zeros outside; w_at points to the rows' starts."""
    if (i + 1) * BLOCK_K > K:
        live = live & (tl.arange(0, BLOCK_K)[None, None, :] < K - i * BLOCK_K)
    return tl.load(w_at + i * BLOCK_K, mask=live, other=0.0)


@triton.jit
def first_blocks(w_at, live, K: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):
    """The first DEPTH blocks, requested together."""
    blocks = ()
    for i in tl.static_range(DEPTH):
        if i * BLOCK_K < K:
            blocks = blocks + (block(w_at, live, i, K, BLOCK_K),)  # noqa: RUF005 - Triton's tuples
    return blocks


@triton.jit
def within_threads(products, PART: tl.constexpr):
    """[A, B, K] -> [A, B, K / PART]: sums of PART neighbours, which one thread holds."""
    return tl.sum(
        tl.reshape(products, [products.shape[0], products.shape[1], products.shape[2] // PART, PART]), 3
    )


@triton.jit
def times_rows(
    blocks, w_at, live, x_ptr, norm_ptr, M, x_stride, eps, offset,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Rows [A, B] of a weight times each row of x [M, K]: a tuple of [A, B] float32. `blocks` are the first blocks.

    With a norm, x is normalised on the fly, by offset + weight. CACHE: the cache modifier for loads of x.
    """
    A: tl.constexpr = blocks[0].shape[0]
    B: tl.constexpr = blocks[0].shape[1]
    PART: tl.constexpr = 128 // blocks[0].dtype.primitive_bitwidth
    k_range = tl.arange(0, BLOCK_K)
    sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([A, B, BLOCK_K // PART], tl.float32),)  # noqa: RUF005
        squares = squares + (tl.zeros([BLOCK_K], tl.float32),)  # noqa: RUF005
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        if (i + DEPTH) * BLOCK_K < K:
            blocks = blocks + (block(w_at, live, i + DEPTH, K, BLOCK_K),)  # noqa: RUF005
        w = widened(blocks[i], tl.float32)
        k = i * BLOCK_K + k_range
        if norm_ptr is not None:
            norm = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + offset
        added = ()
        so_far = squares
        squares = ()
        for m in tl.static_range(ROWS):
            x = tl.load(x_ptr + m * x_stride + k, mask=(k < K) & (m < M), other=0.0, cache_modifier=CACHE)
            x = x.to(tl.float32)
            squares = squares + (so_far[m] + x * x,)  # noqa: RUF005
            if norm_ptr is not None:
                x = x * norm
            added = added + (sums[m] + within_threads(w * x[None, None, :], PART),)  # noqa: RUF005
        sums = added
    results = ()
    for m in tl.static_range(ROWS):
        y = tl.sum(sums[m], 2)
        if norm_ptr is not None:  # apply the row's norm last, so that no multiplication waits for it
            y = y * tl.rsqrt(tl.sum(squares[m], 0) / K + eps)
        results = results + (y,)  # noqa: RUF005
    return results


@triton.jit
def halves(y):
    """[2, B] -> its two rows."""
    first = tl.arange(0, 2)[:, None] == 0
    return tl.sum(tl.where(first, y, 0.0), 0), tl.sum(tl.where(first, 0.0, y), 0)
