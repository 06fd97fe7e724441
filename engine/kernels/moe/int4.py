"""Experts whose weights stay packed in int4 (gemm/packed/weight.py): products of few tokens and of many.

    weight   uint8 [E, N, K / 2], two codes in a byte; a scale for each output and group of columns, and
             a zero point (uint8) if the format is not symmetric
    few      each (token, expert) pair is a row of its own, multiplied in integers (gemm/packed/int4_gemv.py)
    many     blocks of pairs on tensor cores. Groups of 128: x in e4m3, codes as e4m3 numbers, which are exact
             (gemm/packed/group_scaled.py); smaller groups, zero points, or x in 16 bits: weights are rounded to
             x's dtype in registers
"""

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.packed.group_scaled import E4M3_UNIT, as_e4m3_pairs
from engine.kernels.gemm.packed.int4_fixed import (
    WORDS_IN_CHUNK,
    chunk_sums,
    first_columns,
    fixed_point,
    load_words,
    of_chunks,
    sum_chunk,
)
from engine.kernels.gemm.packed.matmul import spread
from engine.kernels.gemm.packed.weight import MIDDLE, pair_distance
from engine.kernels.moe.tiles import MatrixTiles
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import interpreted, kernel, wait_for_previous

_IN_CHUNK = tl.constexpr(WORDS_IN_CHUNK)
_WORDS_EACH = 128  # words of a row that a program of one warp reads at a time
_ROWS_EACH = 8


@kernel
def _pairs_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, experts_ptr, y_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, PAIR: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, GATE: tl.constexpr, DP4A: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = K // 8
    CHUNKS: tl.constexpr = BLOCK_W // _IN_CHUNK
    HALVES: tl.constexpr = 1 if GATE is None else 2
    ALL: tl.constexpr = N % BLOCK_N == 0
    wait_for_previous(PDL)
    pair = tl.program_id(0)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    words = tl.arange(0, BLOCK_W)
    n_live = n < N
    w_at = w_ptr + expert * (HALVES * N * WORDS) + n[:, None] * WORDS + words[None, :]
    scale_at = scale_ptr + expert * (HALVES * N * (K // GROUP))
    x_at = x_ptr + pair // SHARE * x_stride
    sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    up_sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK_W):
        w = load_words(w_at, n_live, words, start, WORDS, BLOCK_W, ALL)
        scale = of_chunks(scale_at, n, n_live, start, K, GROUP, BLOCK_W, ALL).to(tl.float32)
        if GATE is not None:
            up = load_words(w_at + N * WORDS, n_live, words, start, WORDS, BLOCK_W, ALL)
            up_scale = of_chunks(scale_at, N + n, n_live, start, K, GROUP, BLOCK_W, ALL).to(tl.float32)
        zero = MIDDLE
        up_zero = MIDDLE
        if zero_ptr is not None:
            zero_at = zero_ptr + expert * (HALVES * N * (K // GROUP))
            zero = of_chunks(zero_at, n, n_live, start, K, GROUP, BLOCK_W, ALL).to(tl.int32)
            if GATE is not None:
                up_zero = of_chunks(zero_at, N + n, n_live, start, K, GROUP, BLOCK_W, ALL).to(tl.int32)
        chunk = start // _IN_CHUNK + tl.arange(0, CHUNKS)
        at, live = first_columns(chunk, PAIR), chunk < WORDS // _IN_CHUNK
        in_bytes, unit, _ = fixed_point(x_at, None, None, at, live, PAIR, DP4A)
        total = sum_chunk(in_bytes, DP4A)
        sums += chunk_sums(w, in_bytes, total, zero, scale, unit, DP4A)
        if GATE is not None:
            up_sums += chunk_sums(up, in_bytes, total, up_zero, up_scale, unit, DP4A)
    y = tl.sum(sums, 1)
    if GATE is not None:
        y = activated(y, GATE) * tl.sum(up_sums, 1)
    tl.store(y_ptr + pair * N + n, y.to(y_ptr.dtype.element_ty), mask=n_live)


def pairs_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, experts: torch.Tensor,
    out: torch.Tensor, share: int, *, gate: str | None,
) -> None:  # fmt: skip
    """out [pairs, N] = each pair's row of x (number pair // share) times its expert's weight, with the gate applied."""
    outputs, inner = out.shape[1], weight.shape[2] * 2
    group = inner // scale.shape[2]
    rows = _ROWS_EACH // (1 if gate is None else 2)
    _pairs_kernel(
        (out.shape[0], triton.cdiv(outputs, rows)), x, weight.view(torch.int32), scale, zero, experts, out,
        x.stride(0), N=outputs, K=inner, GROUP=group, MIDDLE=MIDDLE["int4"], PAIR=pair_distance(group), SHARE=share,
        BLOCK_N=rows, BLOCK_W=min(_WORDS_EACH, max(4, triton.next_power_of_2(inner // 8))), GATE=gate,
        DP4A=not interpreted(), num_warps=1,
    )  # fmt: skip


@triton.jit
def _of_groups(scale_at, n, n_live, at, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales (or zero points) of outputs n for BLOCK_K columns from `at` on: [BLOCK_N, groups among them]."""
    GROUPS: tl.constexpr = K // GROUP
    group = at // GROUP + tl.arange(0, max(1, BLOCK_K // GROUP))
    mask = n_live[:, None] & (group < GROUPS)[None, :]
    return tl.load(scale_at + n[:, None] * GROUPS + group[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rounded(codes, scales, zeros, dtype: tl.constexpr):
    """The numbers of one half of the bytes."""
    middle = 8.0
    if zeros is not None:
        middle = spread(zeros, codes.shape[1])
    return ((codes.to(tl.float32) - middle) * spread(scales, codes.shape[1])).to(dtype)


@kernel
def _grouped_int4_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, zero_ptr, order_ptr, blocks_ptr, y_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PAIR: tl.constexpr, UNIT: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 1 if GATE is None else 2
    WIDTH: tl.constexpr = K // 2
    wait_for_previous(PDL)
    block = blocks_ptr + 3 * tl.program_id(1)
    rows = tl.load(block + 2)
    if rows == 0:
        return
    expert = tl.load(block).to(tl.int64)
    m = tl.arange(0, ROWS)
    pair = tl.load(order_ptr + tl.load(block + 1) + m, mask=m < rows, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BLOCK_K // 2)
    n_live = n < N
    column = b // PAIR * (2 * PAIR) + b % PAIR
    w_at = w_ptr + expert * (HALVES * N * WIDTH) + n[:, None] * WIDTH + b[None, :]
    x_at = x_ptr + (pair // SHARE)[None, :] * x_stride + column[:, None]
    scale_at = scale_ptr + expert * (HALVES * N * (K // GROUP))
    scale = _of_groups(scale_at, n, n_live, 0, K, GROUP, BLOCK_K)
    zero = None
    up_zero = None
    if zero_ptr is not None:
        zero_at = zero_ptr + expert * (HALVES * N * (K // GROUP))
        zero = _of_groups(zero_at, n, n_live, 0, K, GROUP, BLOCK_K)
        if GATE is not None:
            up_zero = _of_groups(zero_at, N + n, n_live, 0, K, GROUP, BLOCK_K)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if GATE is not None:
        up_scale = _of_groups(scale_at, N + n, n_live, 0, K, GROUP, BLOCK_K)
        up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        next_scale = _of_groups(scale_at, n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)  # loaded ahead
        if GATE is not None:
            next_up_scale = _of_groups(scale_at, N + n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)
        if zero_ptr is not None:
            next_zero = _of_groups(zero_at, n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)
            if GATE is not None:
                next_up_zero = _of_groups(zero_at, N + n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:  # a mask would keep the loads narrow
            w = tl.load(w_at + at // 2)
            x = tl.load(x_at + at)
            far = tl.load(x_at + at + PAIR)
            if GATE is not None:
                u = tl.load(w_at + N * WIDTH + at // 2)
        else:
            live = column < K - at
            w = tl.load(w_at + at // 2, mask=n_live[:, None] & live[None, :], other=0)
            x = tl.load(x_at + at, mask=live[:, None], other=0.0)
            far = tl.load(x_at + at + PAIR, mask=live[:, None], other=0.0)
            if GATE is not None:
                u = tl.load(w_at + N * WIDTH + at // 2, mask=n_live[:, None] & live[None, :], other=0)
        if x_scale_ptr is None:
            acc = tl.dot(_rounded(w & 15, scale, zero, x.dtype), x, acc)
            acc = tl.dot(_rounded(w >> 4, scale, zero, x.dtype), far, acc)
            if GATE is not None:
                up = tl.dot(_rounded(u & 15, up_scale, up_zero, x.dtype), x, up)
                up = tl.dot(_rounded(u >> 4, up_scale, up_zero, x.dtype), far, up)
        else:
            low, high = as_e4m3_pairs(w, FAST)
            product = tl.dot(high, far, tl.dot(low, x))
            acc += product * scale
            if GATE is not None:
                low, high = as_e4m3_pairs(u, FAST)
                product = tl.dot(high, far, tl.dot(low, x))
                up += product * up_scale
        scale = next_scale
        if GATE is not None:
            up_scale = next_up_scale
        if zero_ptr is not None:
            zero = next_zero
            if GATE is not None:
                up_zero = next_up_zero
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + pair // SHARE)[None, :] * UNIT
        acc = acc * x_scale
        if GATE is not None:
            up = up * x_scale
    if GATE is not None:
        acc = activated(acc, GATE) * up
    mask = n_live[:, None] & (m < rows)[None, :]
    tl.store(y_ptr + pair[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_product(
    x: torch.Tensor, x_scale: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None,
    order: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, share: int, rows: int, tiles: MatrixTiles, *,
    gate: str | None,
) -> None:  # fmt: skip
    """As group_scaled.grouped_product. With zero points, x is in 16 bits."""
    outputs, inner = out.shape[1], weight.shape[2] * 2
    group = inner // scale.shape[2]
    assert x_scale is None or (group % tiles.block_k == 0 and zero is None)
    _grouped_int4_kernel(
        (triton.cdiv(outputs, tiles.block_n), blocks.shape[0]), x, weight, x_scale, scale, zero, order, blocks,
        out, x.stride(0), N=outputs, K=inner, GROUP=group, PAIR=pair_distance(group), UNIT=E4M3_UNIT, SHARE=share,
        ROWS=rows, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GATE=gate, STAGES=tiles.stages, FAST=not interpreted(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
