"""Building blocks of kernels that stream the rows of a weight past a few vectors. Several blocks [.., BLOCK_K] are in
flight at a time, and each thread keeps its own partial sums until the end.

An fp8 weight with a scale for each GROUP x GROUP numbers: the rows of a program lie in one such block, so they share
their scales, which multiply the sums of a thread. A scale is loaded as one number, together with the columns that it
belongs to: a vector of them would be exchanged between threads before each product.

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
def scales_at(scale_ptr, first, K: tl.constexpr, GROUP: tl.constexpr):
    """Where the scales of the block of rows that has row `first` are; nothing that is used if GROUP is 0."""
    if GROUP > 0:
        return scale_ptr + first // GROUP * ((K + GROUP - 1) // GROUP)
    else:
        return first  # Triton 3.6 cannot return None


@triton.jit
def scales_of_block(
    scale_at, i: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The scales of columns [i BLOCK_K, (i + 1) BLOCK_K), a tuple with one for each group. With HALVES = 2, each is
    followed by the scale of the rows N further on, whose blocks are numbered from zero."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    scales = ()
    for column in tl.static_range(i * BLOCK_K, (i + 1) * BLOCK_K, min(BLOCK_K, GROUP)):
        at = scale_at + min(column // GROUP, GROUPS - 1)
        scales = scales + (tl.load(at),)  # noqa: RUF005
        if HALVES == 2:
            scales = scales + (tl.load(at + (N + GROUP - 1) // GROUP * GROUPS),)  # noqa: RUF005
    return scales


@triton.jit
def first_scales(
    scale_at, HALVES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The scales of the first DEPTH blocks; nothing if GROUP is 0."""
    scales = ()
    if GROUP > 0:
        for i in tl.static_range(DEPTH):
            if i * BLOCK_K < K:
                scales = scales + scales_of_block(scale_at, i, HALVES, N, K, BLOCK_K, GROUP)
    return scales


@triton.jit
def _of_group(scales, at: tl.constexpr, HALVES: tl.constexpr):
    """A scale for rows [HALVES, ..]."""
    if HALVES == 1:
        return scales[at]
    else:
        return tl.where(tl.arange(0, 2)[:, None, None] == 0, scales[2 * at], scales[2 * at + 1])


@triton.jit
def of_parts(
    scales, i: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr
):
    """The scales of block i, one for each PART columns: [HALVES, 1, BLOCK_K / PART]."""
    PER_BLOCK: tl.constexpr = max(1, BLOCK_K // GROUP)
    part = tl.arange(0, BLOCK_K // PART)[None, None, :]
    wide = tl.zeros([HALVES, 1, BLOCK_K // PART], tl.float32) + _of_group(scales, i * PER_BLOCK, HALVES)
    for g in tl.static_range(1, PER_BLOCK):
        wide = tl.where(part >= g * (GROUP // PART), _of_group(scales, i * PER_BLOCK + g, HALVES), wide)
    return wide


@triton.jit
def within_threads(products, PART: tl.constexpr):
    """[A, B, K] -> [A, B, K / PART]: sums of PART neighbours, which one thread holds."""
    return tl.sum(
        tl.reshape(products, [products.shape[0], products.shape[1], products.shape[2] // PART, PART]), 3
    )


@triton.jit
def times_rows(
    blocks, w_at, live, scales, scale_at, x_ptr, norm_ptr, M, x_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Rows [A, B] of a weight times each row of x [M, K]: a tuple of [A, B] float32. `blocks` are the first blocks, and
    `scales` their scales, if GROUP is not 0. A is 1, or 2 for rows that are N apart.

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
            if GROUP > 0:
                scales = scales + scales_of_block(scale_at, i + DEPTH, A, N, K, BLOCK_K, GROUP)
        w = widened(blocks[i], tl.float32)
        if GROUP > 0:
            scale = of_parts(scales, i, A, BLOCK_K, PART, GROUP)
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
            product = within_threads(w * x[None, None, :], PART)
            if GROUP > 0:
                product = product * scale
            added = added + (sums[m] + product,)  # noqa: RUF005
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
