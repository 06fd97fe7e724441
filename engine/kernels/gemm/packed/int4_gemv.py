"""GEMMs of one or two rows with an int4 weight: y [M, N] = x [M, K] W [N, K]ᵀ, W as weight.py describes it, in
integers (int4_fixed.py).

As in small_batch.py, the operations around the GEMM are fused: a norm before it, a gate or the residual after it. Until
the previous kernel ends, the memory would be idle, so a program loads into registers, before it waits, what that kernel
does not write: W and its scales, of the first block of columns (with REPEAT, of the first block of rows).

REPEAT: a program computes several blocks of rows, one after another, with x in fixed point in its registers. So it
converts x once, which costs a thread as much as multiplying nine rows of W.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.packed.int4_fixed import (
    CHUNK,
    WORDS_IN_CHUNK,
    chunk_sums,
    first_columns,
    fixed_point,
    load_words,
    of_chunks,
    sum_chunk,
)
from engine.kernels.gemm.packed.weight import MIDDLE, Packed, pair_distance
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import interpreted, kernel, wait_for_previous, wait_in_order

MOST_ROWS = 2
_WIDE = 8 * 5 * 132
_WORDS = tl.constexpr(WORDS_IN_CHUNK)


class Int4Tiles(NamedTuple):
    """A program computes `repeat` times BLOCK_N outputs, and reads BLOCK_W words of each at a time: whole rows where it
    repeats."""

    block_n: int
    block_w: int
    warps: int
    repeat: int


@triton.jit
def _wait(IN_ORDER: tl.constexpr, PDL: tl.constexpr):
    if IN_ORDER:
        wait_in_order(PDL)
    else:
        wait_for_previous(PDL)


@triton.jit
def _of_all_columns(
    at_ptr, n, n_live, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr, ALL: tl.constexpr
):
    """`of_chunks` for all columns: a tuple of one tensor for each BLOCK_W words; empty without a pointer."""
    found = ()
    if at_ptr is not None:
        for start in tl.static_range(0, K // 8, BLOCK_W):
            found = found + (of_chunks(at_ptr, n, n_live, start, K, GROUP, BLOCK_W, ALL),)  # noqa: RUF005 - Triton's tuples
    return found


@triton.jit
def _bias(bias_ptr, n, n_live):
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n_live, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _residual(residual_ptr, n, n_live, M, y_stride, ROWS: tl.constexpr):
    """This program's part of the residual stream, to which it adds its result; empty without a pointer."""
    before = ()
    if residual_ptr is not None:
        for m in tl.static_range(ROWS):
            before = before + (tl.load(residual_ptr + m * y_stride + n, mask=n_live & (m < M), other=0.0),)  # noqa: RUF005
    return before


@triton.jit
def _factors(norm_ptr, squares, eps, K: tl.constexpr, ROWS: tl.constexpr):
    """What the norm multiplies each row's results with: last, so that no multiplication waits for it."""
    found = ()
    for m in tl.static_range(ROWS):
        factor = 1.0
        if norm_ptr is not None:
            factor = tl.rsqrt(tl.sum(squares[m], 0) / K + eps)
        found = found + (factor,)  # noqa: RUF005
    return found


@triton.jit
def _store(
    y_ptr, sums, up_sums, factors, bias, up_bias, before, residual_ptr, n, n_live, M, y_stride, ROWS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    dtype = y_ptr.dtype.element_ty
    for m in tl.static_range(ROWS):
        y = (tl.sum(sums[m], 1) * factors[m] + bias).to(dtype)
        if GATE is not None:  # rounded where separate kernels would round
            y = activated(y.to(tl.float32), GATE).to(dtype).to(tl.float32)
            y = (y * (tl.sum(up_sums[m], 1) * factors[m] + up_bias).to(dtype).to(tl.float32)).to(dtype)
        if residual_ptr is not None:
            y = (y.to(tl.float32) + before[m].to(tl.float32)).to(dtype)
        tl.store(y_ptr + m * y_stride + n, y, mask=n_live & (m < M))


@kernel
def _int4_gemv_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, M, x_stride, y_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, GATE: tl.constexpr, IN_ORDER: tl.constexpr,
    DP4A: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = K // 8
    CHUNKS: tl.constexpr = BLOCK_W // _WORDS
    ALL: tl.constexpr = N % BLOCK_N == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words = tl.arange(0, BLOCK_W)
    n_live = n < N
    w_at = w_ptr + n[:, None].to(tl.int64) * WORDS + words[None, :]
    up_at = w_at + N * WORDS
    w = load_words(w_at, n_live, words, 0, WORDS, BLOCK_W, ALL)
    up = w
    if GATE is not None:
        up = load_words(up_at, n_live, words, 0, WORDS, BLOCK_W, ALL)
    scales = _of_all_columns(scale_ptr, n, n_live, K, GROUP, BLOCK_W, ALL)
    zeros = _of_all_columns(zero_ptr, n, n_live, K, GROUP, BLOCK_W, ALL)
    bias = _bias(bias_ptr, n, n_live)
    up_scales = scales
    up_zeros = zeros
    up_bias = bias
    if GATE is not None:
        up_scales = _of_all_columns(scale_ptr, N + n, n_live, K, GROUP, BLOCK_W, ALL)
        up_zeros = _of_all_columns(zero_ptr, N + n, n_live, K, GROUP, BLOCK_W, ALL)
        up_bias = _bias(bias_ptr, N + n, n_live)
    _wait(IN_ORDER, PDL)
    before = _residual(residual_ptr, n, n_live, M, y_stride, ROWS)
    sums = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([BLOCK_N, CHUNKS], tl.float32),)  # noqa: RUF005
        squares = squares + (tl.zeros([CHUNKS], tl.float32),)  # noqa: RUF005
    up_sums = sums
    for start in tl.static_range(0, WORDS, BLOCK_W):
        next_w = w
        next_up = up
        if start + BLOCK_W < WORDS:  # load the next block while this one is multiplied
            next_w = load_words(w_at, n_live, words, start + BLOCK_W, WORDS, BLOCK_W, ALL)
            if GATE is not None:
                next_up = load_words(up_at, n_live, words, start + BLOCK_W, WORDS, BLOCK_W, ALL)
        scale = scales[start // BLOCK_W].to(tl.float32)
        up_scale = up_scales[start // BLOCK_W].to(tl.float32)
        zero = MIDDLE
        up_zero = MIDDLE
        if zero_ptr is not None:
            zero = zeros[start // BLOCK_W].to(tl.int32)
            up_zero = up_zeros[start // BLOCK_W].to(tl.int32)
        chunk = start // _WORDS + tl.arange(0, CHUNKS)
        at = first_columns(chunk, PAIR)
        live = chunk < WORDS // _WORDS
        so_far, up_so_far, squares_so_far = sums, up_sums, squares
        sums, up_sums, squares = (), (), ()
        for m in tl.static_range(ROWS):
            x, unit, square = fixed_point(x_ptr + m * x_stride, norm_ptr, offset, at, live & (m < M), PAIR, DP4A)
            total = sum_chunk(x, DP4A)
            added = chunk_sums(w, x, total, zero, scale, unit, DP4A)
            sums = sums + (so_far[m] + added,)  # noqa: RUF005
            if GATE is not None:
                added = chunk_sums(up, x, total, up_zero, up_scale, unit, DP4A)
            up_sums = up_sums + (up_so_far[m] + added,)  # noqa: RUF005
            squares = squares + (squares_so_far[m] + square,)  # noqa: RUF005
        w = next_w
        up = next_up
    factors = _factors(norm_ptr, squares, eps, K, ROWS)
    _store(y_ptr, sums, up_sums, factors, bias, up_bias, before, residual_ptr, n, n_live, M, y_stride, ROWS, GATE)


@kernel
def _int4_rows_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr, M, x_stride, y_stride, eps, offset,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, REPEAT: tl.constexpr, GATE: tl.constexpr,
    IN_ORDER: tl.constexpr, DP4A: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for REPEAT blocks of whole rows."""
    WORDS: tl.constexpr = K // 8
    CHUNKS: tl.constexpr = BLOCK_W // _WORDS
    tl.static_assert(WORDS <= BLOCK_W)
    n = tl.program_id(0) * (BLOCK_N * REPEAT) + tl.arange(0, BLOCK_N)
    words = tl.arange(0, BLOCK_W)
    w_at = w_ptr + n[:, None].to(tl.int64) * WORDS + words[None, :]
    n_live = n < N
    w = load_words(w_at, n_live, words, 0, WORDS, BLOCK_W, False)
    scale = of_chunks(scale_ptr, n, n_live, 0, K, GROUP, BLOCK_W, False)
    if zero_ptr is not None:
        zero = of_chunks(zero_ptr, n, n_live, 0, K, GROUP, BLOCK_W, False)
    if GATE is not None:
        up = load_words(w_at + N * WORDS, n_live, words, 0, WORDS, BLOCK_W, False)
        up_scale = of_chunks(scale_ptr, N + n, n_live, 0, K, GROUP, BLOCK_W, False)
        if zero_ptr is not None:
            up_zero = of_chunks(zero_ptr, N + n, n_live, 0, K, GROUP, BLOCK_W, False)
    _wait(IN_ORDER, PDL)
    chunk = tl.arange(0, CHUNKS)
    at = first_columns(chunk, PAIR)
    xs = ()
    units = ()
    totals = ()
    squares = ()
    for m in tl.static_range(ROWS):
        live = (chunk < WORDS // _WORDS) & (m < M)
        x, unit, square = fixed_point(x_ptr + m * x_stride, norm_ptr, offset, at, live, PAIR, DP4A)
        xs = xs + (x,)  # noqa: RUF005
        units = units + (unit,)  # noqa: RUF005
        totals = totals + (sum_chunk(x, DP4A),)  # noqa: RUF005
        squares = squares + (square,)  # noqa: RUF005
    factors = _factors(norm_ptr, squares, eps, K, ROWS)
    for i in tl.range(0, REPEAT, num_stages=1):
        before = _residual(residual_ptr, n, n < N, M, y_stride, ROWS)
        bias = _bias(bias_ptr, n, n < N)
        up_bias = bias
        # load the next block while this one is multiplied
        next_n = n + BLOCK_N
        next_live = (next_n < N) & (i + 1 < REPEAT)
        w_at += BLOCK_N * WORDS
        next_w = load_words(w_at, next_live, words, 0, WORDS, BLOCK_W, False)
        next_scale = of_chunks(scale_ptr, next_n, next_live, 0, K, GROUP, BLOCK_W, False)
        if zero_ptr is not None:
            next_zero = of_chunks(zero_ptr, next_n, next_live, 0, K, GROUP, BLOCK_W, False)
        if GATE is not None:
            up_bias = _bias(bias_ptr, N + n, n < N)
            next_up = load_words(w_at + N * WORDS, next_live, words, 0, WORDS, BLOCK_W, False)
            next_up_scale = of_chunks(scale_ptr, N + next_n, next_live, 0, K, GROUP, BLOCK_W, False)
            if zero_ptr is not None:
                next_up_zero = of_chunks(zero_ptr, N + next_n, next_live, 0, K, GROUP, BLOCK_W, False)
        sums = ()
        up_sums = ()
        for m in tl.static_range(ROWS):
            middle = MIDDLE
            if zero_ptr is not None:
                middle = zero.to(tl.int32)
            added = chunk_sums(w, xs[m], totals[m], middle, scale.to(tl.float32), units[m], DP4A)
            sums = sums + (added,)  # noqa: RUF005
            if GATE is not None:
                if zero_ptr is not None:
                    middle = up_zero.to(tl.int32)
                added = chunk_sums(up, xs[m], totals[m], middle, up_scale.to(tl.float32), units[m], DP4A)
            up_sums = up_sums + (added,)  # noqa: RUF005
        _store(y_ptr, sums, up_sums, factors, bias, up_bias, before, residual_ptr, n, n < N, M, y_stride, ROWS, GATE)
        n = next_n
        w = next_w
        scale = next_scale
        if zero_ptr is not None:
            zero = next_zero
        if GATE is not None:
            up = next_up
            up_scale = next_up_scale
            if zero_ptr is not None:
                up_zero = next_up_zero


def supports(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether `gemv` multiplies activations of `dtype` with this weight (apart from the order of its columns)."""
    whole_chunks = packed.group % CHUNK == 0 and packed.shape[1] % CHUNK == 0
    return packed.kind == "int4" and dtype in (torch.bfloat16, torch.float16) and whole_chunks


def gemv(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    wide_offset: float | None = None,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
    in_order: bool = False,
    tiles: Int4Tiles | None = None,
) -> torch.Tensor:
    """small_batch.gemv for up to MOST_ROWS rows and a weight that passes `supports`; columns of x in packed order."""
    rows, inner = x.shape
    assert rows <= MOST_ROWS
    x = aligned(x)
    outputs = packed.shape[0] // (1 if gate is None else 2)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    norm_weight, eps = (None, 0.0) if norm is None else (aligned(norm[0]), norm[1])
    tiles = tiles or tiles_for(rows, outputs, inner, gated=gate is not None)
    block_w = max(WORDS_IN_CHUNK, min(tiles.block_w, triton.next_power_of_2(inner // 8)))
    repeat = tiles.repeat if block_w * 8 >= inner else 1
    arguments = (
        (triton.cdiv(outputs, tiles.block_n * repeat),), x, packed.values.view(torch.int32), packed.scale, packed.zero,
        bias, norm_weight, residual, y, rows, x.stride(0), y.stride(0), eps, wide_offset or None,
    )  # fmt: skip
    constants = {
        "N": outputs, "K": inner, "GROUP": packed.group, "MIDDLE": MIDDLE[packed.kind],
        "PAIR": pair_distance(packed.group), "ROWS": triton.next_power_of_2(rows), "BLOCK_N": tiles.block_n,
        "BLOCK_W": block_w, "GATE": gate, "IN_ORDER": in_order, "DP4A": not interpreted(),
    }  # fmt: skip
    if repeat == 1:
        _int4_gemv_kernel(*arguments, **constants, num_warps=tiles.warps)
    else:
        _int4_rows_kernel(*arguments, **constants, REPEAT=repeat, num_warps=tiles.warps)
    return y


def tiles_for(rows: int, outputs: int, inner: int, *, gated: bool) -> Int4Tiles:
    """A thread holds a chunk of each row; fastest with the shapes of an 8B model on an H100 (docs/performance.md).

    Gate and up: few programs that repeat, all of them resident at once. Others: blocks of eight rows, which spread
    converting x more widely, where five of them remain for each multiprocessor."""
    if rows > 1:
        return Int4Tiles(8, 512, 4, 1)
    if gated:
        return Int4Tiles(4, 512, 4, 6)
    if inner > 4096:
        return Int4Tiles(4, 256, 2, 1)
    return Int4Tiles(8 if outputs >= _WIDE else 4, 512, 4, 1)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied if it is not aligned for reading eight numbers at a time."""
    rows_apart = x.stride(0) if x.ndim > 1 else 0
    return x.clone(memory_format=torch.contiguous_format) if rows_apart % 8 or x.data_ptr() % 16 else x
