"""Experts whose weights stay packed in fp4, or in int8 with scales for groups or zero points; x in 16 bits.

    fp4    uint8 [E, N, K / 2], two codes in a byte; scales of groups are e4m3 or, as uint8, powers of two
           (pointwise/e2m1.py), and each output may have a factor
    int8   int8 [E, N, K]; a scale for each output and group, and a zero point (int8) if they are not symmetric
    few    each (token, expert) pair is a row of its own, multiplied in float32
    many   blocks of pairs on tensor cores: weights become numbers of x's dtype in registers, which is exact for fp4
"""

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.packed.matmul import spread
from engine.kernels.gemm.packed.weight import pair_distance
from engine.kernels.moe.tiles import MatrixTiles, is_int8
from engine.kernels.pointwise.e2m1 import from_e2m1, group_scale
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import kernel, wait_for_previous

_BYTES_EACH = 512  # of a row that a program of one warp reads at a time
_ROWS_EACH = 8
_PART = 16  # bytes of a row that a thread sums by itself, at most


@triton.jit
def _lower(codes, FP4: tl.constexpr):
    """The numbers of int8 codes, or those of the lower halves of bytes."""
    if FP4:
        return from_e2m1(codes & 15)
    else:
        return codes.to(tl.float32)


@triton.jit
def _column(b, PAIR: tl.constexpr, FP4: tl.constexpr):
    """The column of (the lower half of) byte b of a row."""
    if FP4:
        return b // PAIR * (2 * PAIR) + b % PAIR
    else:
        return b


@triton.jit
def _sums(codes, x, far, scale_at, zero_at, E8M0: tl.constexpr, FP4: tl.constexpr, PART: tl.constexpr, live):
    """Products of rows of codes with x, summed over PART bytes each and multiplied by their scales."""
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1] // PART, PART]
    products = _lower(codes, FP4) * x[None, :]
    if FP4:
        products += from_e2m1(codes >> 4) * far[None, :]
    sums = tl.sum(tl.reshape(products, SHAPE), 2)
    if zero_at is not None:
        of_x = tl.sum(tl.reshape(x, [codes.shape[1] // PART, PART]), 1)
        sums -= tl.load(zero_at, mask=live, other=0).to(tl.float32) * of_x[None, :]
    return sums * group_scale(tl.load(scale_at, mask=live, other=0.0), E8M0)


@kernel
def _packed_pairs_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, factor_ptr, experts_ptr, y_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, FP4: tl.constexpr, E8M0: tl.constexpr, GROUP: tl.constexpr,
    PAIR: tl.constexpr, PART: tl.constexpr, SHARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    IN_BYTE: tl.constexpr = 2 if FP4 else 1
    WIDTH: tl.constexpr = K // IN_BYTE
    GROUPS: tl.constexpr = K // GROUP
    HALVES: tl.constexpr = 1 if GATE is None else 2
    PARTS: tl.constexpr = BLOCK_W // PART
    wait_for_previous(PDL)
    pair = tl.program_id(0)
    first = tl.load(experts_ptr + pair).to(tl.int64) * (HALVES * N)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BLOCK_W)
    n_live = (n < N)[:, None]
    w_at = w_ptr + (first + n)[:, None] * WIDTH + b[None, :]
    groups_at = (first + n)[:, None] * GROUPS
    x_at = x_ptr + pair // SHARE * x_stride
    sums = tl.zeros([BLOCK_N, PARTS], tl.float32)
    up = tl.zeros([BLOCK_N, PARTS], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK_W):
        inside = b < WIDTH - start
        codes = tl.load(w_at + start, mask=n_live & inside[None, :], other=0)
        if GATE is not None:
            more = tl.load(w_at + N * WIDTH + start, mask=n_live & inside[None, :], other=0)
        column = _column(start + b, PAIR, FP4)
        x = tl.load(x_at + column, mask=inside, other=0.0).to(tl.float32)
        far = x
        if FP4:
            far = tl.load(x_at + column + PAIR, mask=inside, other=0.0).to(tl.float32)
        part = start + tl.arange(0, PARTS) * PART
        live = n_live & (part < WIDTH)[None, :]
        at = groups_at + (part * IN_BYTE // GROUP)[None, :]
        zero_at = None
        if zero_ptr is not None:
            zero_at = zero_ptr + at
        sums += _sums(codes, x, far, scale_ptr + at, zero_at, E8M0, FP4, PART, live)
        if GATE is not None:
            at += N * GROUPS
            if zero_ptr is not None:
                zero_at = zero_ptr + at
            up += _sums(more, x, far, scale_ptr + at, zero_at, E8M0, FP4, PART, live)
    y = tl.sum(sums, 1)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + first + n, mask=n < N, other=0.0)
    if GATE is not None:
        upper = tl.sum(up, 1)
        if factor_ptr is not None:
            upper *= tl.load(factor_ptr + first + N + n, mask=n < N, other=0.0)
        y = activated(y, GATE) * upper
    tl.store(y_ptr + pair * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def pairs_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None,
    factor: torch.Tensor | None, experts: torch.Tensor, out: torch.Tensor, share: int, *, gate: str | None,
) -> None:  # fmt: skip
    """As int4.pairs_product."""
    outputs, width = out.shape[1], weight.shape[2]
    constants = _constants(weight, scale)
    part = min(_PART, constants["GROUP"] // 2) if constants["FP4"] else _PART
    rows = _ROWS_EACH // (1 if gate is None else 2)
    _packed_pairs_kernel(
        (out.shape[0], triton.cdiv(outputs, rows)), x, weight, scale, zero, factor, experts, out, x.stride(0),
        N=outputs, **constants, PART=part, SHARE=share, BLOCK_N=rows,
        BLOCK_W=min(_BYTES_EACH, triton.next_power_of_2(width)), GATE=gate, num_warps=1,
    )  # fmt: skip


@triton.jit
def _of_groups(at_ptr, n, n_live, at, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The scales (or zero points) of outputs n for BLOCK_K columns from `at` on, as they are stored."""
    GROUPS: tl.constexpr = K // GROUP
    group = at // GROUP + tl.arange(0, max(1, BLOCK_K // GROUP))
    mask = n_live[:, None] & (group < GROUPS)[None, :]
    return tl.load(at_ptr + n[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)


@triton.jit
def _numbers(numbers, scale, zero, dtype: tl.constexpr):
    if zero is not None:
        numbers -= zero
    return (numbers * scale).to(dtype)


@kernel
def _grouped_packed_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, factor_ptr, order_ptr, blocks_ptr, y_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, FP4: tl.constexpr, E8M0: tl.constexpr, GROUP: tl.constexpr,
    PAIR: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 1 if GATE is None else 2
    IN_BYTE: tl.constexpr = 2 if FP4 else 1
    WIDTH: tl.constexpr = K // IN_BYTE
    BLOCK_W: tl.constexpr = BLOCK_K // IN_BYTE
    wait_for_previous(PDL)
    block = blocks_ptr + 3 * tl.program_id(1)
    rows = tl.load(block + 2)
    if rows == 0:
        return
    m = tl.arange(0, ROWS)
    pair = tl.load(order_ptr + tl.load(block + 1) + m, mask=m < rows, other=0).to(tl.int64)
    first = tl.load(block).to(tl.int64) * (HALVES * N)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BLOCK_W)
    n_live = n < N
    column = _column(b, PAIR, FP4)
    w_at = w_ptr + (first + n)[:, None] * WIDTH + b[None, :]
    x_at = x_ptr + (pair // SHARE)[None, :] * x_stride + column[:, None]
    scale = _of_groups(scale_ptr, first + n, n_live, 0, K, GROUP, BLOCK_K)
    zero = scale
    up_zero = scale
    if zero_ptr is not None:
        zero = _of_groups(zero_ptr, first + n, n_live, 0, K, GROUP, BLOCK_K)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if GATE is not None:
        up_scale = _of_groups(scale_ptr, first + N + n, n_live, 0, K, GROUP, BLOCK_K)
        up = tl.zeros([BLOCK_N, ROWS], tl.float32)
        if zero_ptr is not None:
            up_zero = _of_groups(zero_ptr, first + N + n, n_live, 0, K, GROUP, BLOCK_K)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:  # a mask would keep the loads narrow
            w = tl.load(w_at + at // IN_BYTE)
            if GATE is not None:
                u = tl.load(w_at + N * WIDTH + at // IN_BYTE)
        else:
            inside = n_live[:, None] & (column < K - at)[None, :]
            w = tl.load(w_at + at // IN_BYTE, mask=inside, other=0)
            if GATE is not None:
                u = tl.load(w_at + N * WIDTH + at // IN_BYTE, mask=inside, other=0)
        if K % BLOCK_K == 0:
            x = tl.load(x_at + at)
        else:
            x = tl.load(x_at + at, mask=(column < K - at)[:, None], other=0.0)
        of_bytes = spread(group_scale(scale, E8M0), BLOCK_W)
        minus = None
        if zero_ptr is not None:
            minus = spread(zero, BLOCK_W)
        acc = tl.dot(_numbers(_lower(w, FP4), of_bytes, minus, x.dtype), x, acc)
        if GATE is not None:
            up_of_bytes = spread(group_scale(up_scale, E8M0), BLOCK_W)
            if zero_ptr is not None:
                minus = spread(up_zero, BLOCK_W)
            up = tl.dot(_numbers(_lower(u, FP4), up_of_bytes, minus, x.dtype), x, up)
        if FP4:
            if K % BLOCK_K == 0:
                x = tl.load(x_at + at + PAIR)
            else:
                x = tl.load(x_at + at + PAIR, mask=(column < K - at)[:, None], other=0.0)
            acc = tl.dot(_numbers(from_e2m1(w >> 4), of_bytes, None, x.dtype), x, acc)
            if GATE is not None:
                up = tl.dot(_numbers(from_e2m1(u >> 4), up_of_bytes, None, x.dtype), x, up)
        scale = _of_groups(scale_ptr, first + n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)  # loaded ahead
        if zero_ptr is not None:
            zero = _of_groups(zero_ptr, first + n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)
        if GATE is not None:
            up_scale = _of_groups(scale_ptr, first + N + n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)
            if zero_ptr is not None:
                up_zero = _of_groups(zero_ptr, first + N + n, n_live, at + BLOCK_K, K, GROUP, BLOCK_K)
    if factor_ptr is not None:
        acc *= tl.load(factor_ptr + first + n, mask=n_live, other=0.0)[:, None]
        if GATE is not None:
            up *= tl.load(factor_ptr + first + N + n, mask=n_live, other=0.0)[:, None]
    if GATE is not None:
        acc = activated(acc, GATE) * up
    mask = n_live[:, None] & (m < rows)[None, :]
    tl.store(y_ptr + pair[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None,
    factor: torch.Tensor | None, order: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, share: int, rows: int,
    tiles: MatrixTiles, *, gate: str | None,
) -> None:  # fmt: skip
    """As group_scaled.grouped_product, with x in 16 bits."""
    outputs = out.shape[1]
    _grouped_packed_kernel(
        (triton.cdiv(outputs, tiles.block_n), blocks.shape[0]), x, weight, scale, zero, factor, order, blocks, out,
        x.stride(0), N=outputs, **_constants(weight, scale), SHARE=share, ROWS=rows, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, GATE=gate, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _constants(weight: torch.Tensor, scale: torch.Tensor) -> dict[str, int | bool]:
    fp4 = not is_int8(weight)
    inner = weight.shape[2] * (2 if fp4 else 1)
    group = inner // scale.shape[2]
    return {
        "K": inner, "FP4": fp4, "E8M0": scale.dtype == torch.uint8, "GROUP": group, "PAIR": pair_distance(group),
    }  # fmt: skip
