"""GEMMs with a packed weight: y [M, N] = x [M, K] W [N, K]ᵀ, W as weight.py describes it.

    int4 and 16-bit x   one or two rows   int4_gemv.py: integers, four at a time
                        to MOST_ROWS      int4_gemm.py: tensor cores
    the others          to FEW_ROWS       here: tensor cores
    any                 more rows         W is unpacked to x's dtype, in temporary memory, and the library multiplies

Up to FEW_ROWS rows a GEMM is still bound by reading W. A program streams the packed codes of BLOCK_N outputs, converts
them to x's dtype in registers, and multiplies on the tensor cores. The two halves of a byte belong to columns that lie
PAIR apart: each half is multiplied separately, by its own columns of x, so nothing moves between threads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kernels.gemm.packed import int4_gemm, int4_gemv
from engine.kernels.gemm.packed.weight import MIDDLE, Packed, pair_distance
from engine.kernels.pointwise.e2m1 import from_e2m1, group_scale
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.runtime.launcher import kernel, shared_memory, wait_for_previous

FEW_ROWS = 64


class PackedTiles(NamedTuple):
    """A program computes BLOCK_N outputs, BLOCK_W packed bytes of each row at a time."""

    block_n: int
    block_w: int
    warps: int
    stages: int


@triton.jit
def _of_groups(at_ptr, n, n_live, at, GROUP: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr):
    """A per-group quantity (scale or zero point) for BLOCK_N outputs and SPAN columns from `at` on, STEP columns a
    byte: [BLOCK_N, groups in the span], or one per byte where neither groups nor spans divide the other."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    if GROUPS == 1 or GROUP % SPAN == 0:
        group = at // GROUP + tl.arange(0, 1)
    elif SPAN % GROUP == 0:
        group = at // GROUP + tl.arange(0, SPAN // GROUP)
    else:
        group = (at + tl.arange(0, SPAN // STEP) * STEP) // GROUP
    mask = n_live[:, None] & (group < GROUPS)[None, :]
    return tl.load(at_ptr + n[:, None].to(tl.int64) * GROUPS + group[None, :], mask=mask, other=0.0)


@triton.jit
def spread(each, BLOCK_W: tl.constexpr):
    """Repeat a per-group quantity for each byte: float32 [BLOCK_N, BLOCK_W]."""
    number: tl.constexpr = each.shape[1]
    rows: tl.constexpr = each.shape[0]
    wide = each.to(tl.float32)
    if number < BLOCK_W:
        wide = tl.reshape(tl.broadcast_to(wide[:, :, None], [rows, number, BLOCK_W // number]), [rows, BLOCK_W])
    return wide


@triton.jit
def _column(w, IN_WORD: tl.constexpr, PAIR: tl.constexpr):
    """The column of the lower half of byte `w` of a row."""
    if IN_WORD == 1:
        return w
    else:
        return w // PAIR * (2 * PAIR) + w % PAIR


@triton.jit
def _number(code, KIND: tl.constexpr):
    """The float32 values of codes of a kind, before the zero point is subtracted."""
    if KIND == "fp4":
        number = from_e2m1(code)
    elif KIND == "fp8":
        number = widened(code, tl.float32)
    else:
        number = code.to(tl.float32)
    return number


@kernel
def _packed_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, factor_ptr, y_ptr, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr,
    E8M0: tl.constexpr, DIVIDES: tl.constexpr, PAIR: tl.constexpr, MP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    IN_WORD: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    WIDTH: tl.constexpr = K // IN_WORD
    wait_for_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, MP)
    w = tl.arange(0, BLOCK_W)
    n_live = n < N
    m_mask = (m < M)[None, :]
    w_at = w_ptr + n[:, None].to(tl.int64) * WIDTH + w[None, :]
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride + _column(w, IN_WORD, PAIR)[:, None]
    acc = tl.zeros([BLOCK_N, MP], tl.float32)
    SPAN: tl.constexpr = BLOCK_W * IN_WORD
    scales = _of_groups(scale_ptr, n, n_live, 0, GROUP, K, SPAN, IN_WORD)
    zeros = scales
    if zero_ptr is not None:
        zeros = _of_groups(zero_ptr, n, n_live, 0, GROUP, K, SPAN, IN_WORD)
    for at in tl.range(0, WIDTH, BLOCK_W, num_stages=STAGES):
        if WIDTH % BLOCK_W == 0:  # a mask would keep the loads narrow
            live = tl.full([BLOCK_W], True, tl.int1)
        else:
            live = w < WIDTH - at
        if WIDTH % BLOCK_W == 0 and N % BLOCK_N == 0:
            codes = tl.load(w_at + at)
        else:
            codes = tl.load(w_at + at, mask=n_live[:, None] & live[None, :], other=0.0)
        column = at * IN_WORD
        scale = spread(group_scale(scales, E8M0), BLOCK_W)
        scales = _of_groups(scale_ptr, n, n_live, column + SPAN, GROUP, K, SPAN, IN_WORD)  # loaded ahead
        zero = MIDDLE
        if zero_ptr is not None:
            zero = spread(zeros, BLOCK_W)
            zeros = _of_groups(zero_ptr, n, n_live, column + SPAN, GROUP, K, SPAN, IN_WORD)
        x = tl.load(x_at + column, mask=m_mask & live[:, None], other=0.0)
        if IN_WORD == 1:
            acc = tl.dot(((_number(codes, KIND) - zero) * scale).to(x.dtype), x, acc)
        else:
            acc = tl.dot(((_number(codes & 15, KIND) - zero) * scale).to(x.dtype), x, acc)
            x = tl.load(x_at + column + PAIR, mask=m_mask & live[:, None], other=0.0)
            acc = tl.dot(((_number(codes >> 4, KIND) - zero) * scale).to(x.dtype), x, acc)
    if factor_ptr is not None:  # here, because codes times scales are exact in x's dtype without it
        factor = tl.load(factor_ptr + n, mask=n_live, other=1.0)[:, None]
        acc = acc / factor if DIVIDES else acc * factor
    y_at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_live[:, None] & m_mask)


@kernel
def _unpack_kernel(
    w_ptr, scale_ptr, zero_ptr, factor_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr,
    E8M0: tl.constexpr, DIVIDES: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    IN_WORD: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    WIDTH: tl.constexpr = K // IN_WORD
    wait_for_previous(PDL)
    across: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    n = tl.program_id(0) // across * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(0) % across * BLOCK_W
    w = at + tl.arange(0, BLOCK_W)
    n_live = n < N
    codes = tl.load(w_ptr + n[:, None].to(tl.int64) * WIDTH + w[None, :], mask=n_live[:, None] & (w < WIDTH)[None, :],
                    other=0.0)  # fmt: skip
    SPAN: tl.constexpr = BLOCK_W * IN_WORD
    scale = group_scale(_of_groups(scale_ptr, n, n_live, at * IN_WORD, GROUP, K, SPAN, IN_WORD), E8M0)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + n, mask=n_live, other=1.0)[:, None]
        scale = tl.math.div_rn(scale, factor) if DIVIDES else scale * factor
    scale = spread(scale, BLOCK_W)
    zero = MIDDLE
    if zero_ptr is not None:
        zero = spread(_of_groups(zero_ptr, n, n_live, at * IN_WORD, GROUP, K, SPAN, IN_WORD), BLOCK_W)
    dtype = y_ptr.dtype.element_ty
    y_at = y_ptr + n[:, None].to(tl.int64) * K + _column(w, IN_WORD, PAIR)[None, :]
    mask = n_live[:, None] & (w < WIDTH)[None, :]
    if IN_WORD == 1:
        tl.store(y_at, ((_number(codes, KIND) - zero) * scale).to(dtype), mask=mask)
    else:
        tl.store(y_at, ((_number(codes & 15, KIND) - zero) * scale).to(dtype), mask=mask)
        tl.store(y_at + PAIR, ((_number(codes >> 4, KIND) - zero) * scale).to(dtype), mask=mask)


def packed_tiles(rows: int, shared: int) -> PackedTiles:
    """Tiles for `rows` of x: the fastest or nearly the fastest that were tried with the shapes of an 8B model on an
    H100 (docs/performance.md)."""
    block_n, block_w = 64, 128
    padded = max(16, triton.next_power_of_2(rows))
    stages = (shared - 1024) // (block_w * (block_n + 4 * padded))
    return PackedTiles(block_n, block_w, 4, max(2, min(4, stages)))


def small_batch_gemm(x: torch.Tensor, packed: Packed, tiles: PackedTiles | None = None) -> torch.Tensor:
    """Up to FEW_ROWS rows: x [M, K] in the order of the packed columns (rows may be strided) -> [M, N] in x's dtype."""
    rows, (outputs, inner) = x.shape[0], packed.shape
    if tiles is None:
        tiles = packed_tiles(rows, shared_memory(x.device))
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _packed_kernel(
        (triton.cdiv(outputs, tiles.block_n),), x, packed.values, packed.scale, packed.zero, packed.factor, y, rows,
        x.stride(0), N=outputs, K=inner, **_constants(packed), MP=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=tiles.block_n, BLOCK_W=tiles.block_w, STAGES=tiles.stages,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def unpacked(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`, its columns in the order in which they are packed."""
    outputs, inner = packed.shape
    y = torch.empty(outputs, inner, dtype=dtype, device=packed.values.device)
    block_n, block_w = 16, 64
    grid = triton.cdiv(outputs, block_n) * triton.cdiv(packed.values.shape[1], block_w)
    _unpack_kernel(
        (grid,), packed.values, packed.scale, packed.zero, packed.factor, y, N=outputs, K=inner, **_constants(packed),
        BLOCK_N=block_n, BLOCK_W=block_w, num_warps=4,
    )  # fmt: skip
    return y


def _constants(packed: Packed) -> dict[str, Any]:
    return {
        "KIND": packed.kind, "GROUP": packed.group, "MIDDLE": MIDDLE.get(packed.kind, 0),
        "E8M0": packed.scale.dtype == torch.uint8, "DIVIDES": packed.divides, "PAIR": pair_distance(packed.group),
    }  # fmt: skip


def matmul(x: torch.Tensor, packed: Packed, *, batch_invariant: bool = False) -> torch.Tensor:
    """x [M, K] -> [M, N] in x's dtype, for any M. `batch_invariant`: one kernel and one order of summation for every
    M."""
    if packed.columns is not None:
        x = x.index_select(1, packed.columns)
    if batch_invariant:
        from engine.kernels.gemm import batch_invariant as invariant

        return invariant.matmul(x, unpacked(packed, x.dtype))
    rows = x.shape[0]
    if rows <= int4_gemv.MOST_ROWS and int4_gemv.supports(packed, x.dtype):
        return int4_gemv.gemv(x, packed)
    if rows <= int4_gemm.MOST_ROWS and int4_gemm.supports(packed, x.dtype):
        return int4_gemm.gemm(x, packed)
    if rows <= FEW_ROWS:
        return small_batch_gemm(x, packed)
    return F.linear(x, unpacked(packed, x.dtype))
