"""GEMM of fp8 activations with a weight that has a scale for each group of columns: y [M, N] = x [M, K] W [N, K]ᵀ.

    weight   fp8    e4m3, as DeepSeek and Qwen publish it: a scale for each row and each GROUP columns
             int4   two codes in a byte (weight.py), without zero points
    x        e4m3 with a scale for each row, as norms and gates write it (pointwise/quantize.py)

The codes of int4 become e4m3 numbers without rounding: q - 8 lies between -8 and 7, and with this exponent e4m3 counts
in steps of one. So fp8 tensor cores multiply both kinds of weight, at twice the rate of 16 bits, and int4 costs 1.3
instructions a number on top.

    acc += (x_g W_gᵀ) * scale[:, g]      for each step of STEP columns, in float32

Where a weight has too few outputs to fill the GPU, K is cut into SPLIT parts. The programs of a tile leave partial sums
in a workspace, and the one that arrives last adds them, always in the same order.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.packed.weight import Packed, pair_distance
from engine.kernels.runtime.counters import counters
from engine.kernels.runtime.launcher import interpreted, kernel, shared_memory, wait_for_previous

MANY_ROWS = 256  # a number of rows that stands for those from 129 to 512
STEP = 128  # columns that are multiplied at a time
E4M3_UNIT = 512  # int4's codes become multiples of 1 / 512, e4m3's smallest step
_BLOCK_ROWS = 128
_MANY_OUTPUTS = 12_800  # enough programs for every multiprocessor without cutting K
_FEW_OUTPUTS = 4608
_BAND = 8  # row blocks that use the same part of the weight while it is in the L2 cache


class GroupTiles(NamedTuple):
    """A program computes BLOCK_N outputs of BLOCK_M rows over one of SPLIT parts of K."""

    block_n: int
    block_m: int
    split: int
    warps: int
    stages: int


@triton.jit
def as_e4m3_pairs(codes, FAST: tl.constexpr):
    """Bytes of two int4 codes each -> (q - 8) / 512 of the lower halves, and of the upper halves, as e4m3."""
    if FAST:
        # For each byte: codes 8 to 15 are their lower three bits; codes 0 to 7 are negative, 0x88 less those bits.
        signed: tl.constexpr = """{ .reg .b32 l, h, s, n, m;
            and.b32 l, $2, 0x07070707; sub.u32 n, 0x88888888, l; shl.b32 s, $2, 4; prmt.b32 m, s, 0, 0xBA98;
            lop3.b32 $0, m, l, n, 0xCA;
            shr.u32 h, $2, 4; and.b32 h, h, 0x07070707; sub.u32 n, 0x88888888, h; prmt.b32 m, $2, 0, 0xBA98;
            lop3.b32 $1, m, h, n, 0xCA; }"""
        low, high = tl.inline_asm_elementwise(signed, "=&r,=&r,r", [codes], (tl.uint8, tl.uint8), True, 4)
    else:
        low = tl.where((codes & 8) != 0, codes & 7, 0x88 - (codes & 7))
        high = tl.where((codes & 128) != 0, (codes >> 4) & 7, 0x88 - ((codes >> 4) & 7))
    return low.to(tl.uint8).to(tl.float8e4nv, bitcast=True), high.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scales(scale_ptr, n, n_live, at, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The scales of outputs n for the step that begins at column `at`."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    place = (n // BLOCK_ROWS).to(tl.int64) * GROUPS + at // GROUP
    return tl.load(scale_ptr + place, mask=n_live & (at < K), other=0.0).to(tl.float32)


@kernel
def _group_scaled_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, PAIR: tl.constexpr,
    UNIT: tl.constexpr, STEP: tl.constexpr, BAND: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PAIR: 0 for an fp8 weight; of int4, the distance between the two columns of a byte."""
    IN_BYTE: tl.constexpr = 1 if PAIR == 0 else 2
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    IN_BAND: tl.constexpr = BAND * ACROSS
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    PART: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT * STEP  # columns
    wait_for_previous(PDL)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first_block = tile // IN_BAND * BAND
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_block, BAND)
    m = (first_block + tile % IN_BAND % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % IN_BAND // height * BLOCK_N + tl.arange(0, BLOCK_N)
    m_live = m < M
    n_live = n < N
    k = tl.arange(0, STEP // IN_BYTE)
    column = k
    if PAIR > 0:
        column = k // PAIR * (2 * PAIR) + k % PAIR
    w_at = w_ptr + n[:, None].to(tl.int64) * (K // IN_BYTE) + k[None, :]
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride + column[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = part * PART
    end = tl.minimum(begin + PART, K)
    scale = _scales(scale_ptr, n, n_live, begin, K, GROUP, BLOCK_ROWS)
    for at in tl.range(begin, end, STEP, num_stages=STAGES):
        next_scale = _scales(scale_ptr, n, n_live, at + STEP, K, GROUP, BLOCK_ROWS)
        if K % STEP == 0 and N % BLOCK_N == 0:  # a mask would keep the loads narrow
            w = tl.load(w_at + at // IN_BYTE)
        elif K % STEP == 0:
            w = tl.load(w_at + at // IN_BYTE, mask=n_live[:, None], other=0.0)
        else:
            w = tl.load(w_at + at // IN_BYTE, mask=n_live[:, None] & (column < K - at)[None, :], other=0.0)
        x_mask = m_live[None, :]
        if K % STEP != 0:
            x_mask = x_mask & (column < K - at)[:, None]
        x = tl.load(x_at + at, mask=x_mask, other=0.0)
        if PAIR == 0:
            product = tl.dot(w, x)
        else:
            low, high = as_e4m3_pairs(w, FAST)
            product = tl.dot(low, x)
            product = tl.dot(high, tl.load(x_at + at + PAIR, mask=x_mask, other=0.0), product)
        acc += product * scale[:, None]
        scale = next_scale
    mask = n_live[:, None] & m_live[None, :]
    if SPLIT > 1:
        own = n[:, None] * BLOCK_M + (tl.arange(0, BLOCK_M))[None, :]
        partial_at = partial_ptr + (tile % IN_BAND % height + first_block).to(tl.int64) * (SPLIT * N * BLOCK_M) + own
        tl.store(partial_at + part * (N * BLOCK_M), acc, mask=n_live[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1)
        if arrived != SPLIT - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(partial_at + i * (N * BLOCK_M), mask=n_live[:, None], other=0.0)
    if PAIR > 0:
        acc = acc * UNIT
    acc = acc * tl.load(x_scale_ptr + m, mask=m_live, other=0.0)[None, :]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + n, mask=n_live, other=0.0)[:, None].to(tl.float32)
    y_at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _codes_kernel(
    w_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    ACROSS: tl.constexpr = (K // 2 + BLOCK_W - 1) // BLOCK_W
    n = tl.program_id(0) // ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    w = tl.program_id(0) % ACROSS * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    live = (n < N) & (w < K // 2)
    low, high = as_e4m3_pairs(tl.load(w_ptr + n.to(tl.int64) * (K // 2) + w, mask=live, other=0), FAST)
    out = out_ptr + n.to(tl.int64) * K + w // PAIR * (2 * PAIR) + w % PAIR
    tl.store(out, low, mask=live)
    tl.store(out + PAIR, high, mask=live)


@dataclass(slots=True)
class GroupScaled:
    """A weight [N, K] for fp8 activations."""

    values: torch.Tensor  # uint8 [N, K / 2] of int4, packed with PAIR; else e4m3 [N, K]
    scale: torch.Tensor  # [N / block_rows, groups], of groups of `group` columns
    group: int
    block_rows: int  # rows of W that share their scales
    pair: int  # 0: fp8

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.values.shape
        return rows, width * (1 if self.pair == 0 else 2)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


def group_scaled(packed: Packed) -> GroupScaled | None:
    """The weight in this form, which shares its memory; None if `gemm` cannot multiply with it."""
    outputs, inner = packed.shape
    if packed.zero is not None or packed.columns is not None or inner % 16 or outputs % 16:
        return None
    if packed.kind not in ("fp8", "int4") or (packed.group % STEP and packed.group < inner):
        return None
    if packed.kind == "int4":
        if inner % STEP:
            return None
        return GroupScaled(packed.values, packed.scale, packed.group, 1, pair_distance(packed.group))
    if packed.block % _BLOCK_ROWS or outputs % _BLOCK_ROWS:
        return GroupScaled(packed.values, packed.scale, packed.group, 1, 0)
    return GroupScaled(packed.values, packed.scale[::_BLOCK_ROWS].float().contiguous(), packed.group, _BLOCK_ROWS, 0)


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Counters of programs that have left sums of a tile, or of half of it. The last program resets its own to zero."""
    return counters(device, 1 << 14)


def tiles_for(rows: int, weight: GroupScaled, shared: int) -> GroupTiles:
    """Tiles for `rows` of x: the fastest or nearly the fastest that were tried with the shapes of an 8B model on an
    H100 (docs/performance.md). One choice for all rows up to 16, 32, 64, 128, and more."""
    outputs = weight.shape[0]
    narrow = outputs < _MANY_OUTPUTS  # too few programs for every multiprocessor, unless K is cut
    block_m = next((size for size in (16, 32, 64) if rows <= size), 128)
    if weight.pair == 0:
        fp8_split = 4 if outputs <= _FEW_OUTPUTS else 2 if narrow else 1
        tiles = {
            16: GroupTiles(64, 16, fp8_split, 4, 5), 32: GroupTiles(64, 32, fp8_split, 4, 5),
            64: GroupTiles(64, 64, 4 if outputs <= _FEW_OUTPUTS else 2 if narrow else 1, 4, 5),
            128: GroupTiles(64, 64, 2 if narrow else 1, 4, 4) if rows <= 128 else GroupTiles(128, 128, 1, 8, 4),
        }[block_m]  # fmt: skip
    elif rows <= 128:
        tiles = {
            16: GroupTiles(64, 16, 8 if narrow else 1, 4, 3), 32: GroupTiles(64, 32, 8 if narrow else 1, 4, 3),
            64: GroupTiles(64, 64, 2, 4, 5) if narrow else GroupTiles(128, 64, 1, 8, 4),
            128: GroupTiles(128, 128, 4 if outputs <= _FEW_OUTPUTS else 2, 8, 4) if narrow
                 else GroupTiles(128, 64, 1, 8, 4),
        }[block_m]  # fmt: skip
    else:
        tiles = GroupTiles(128, 128, 2 if outputs <= _FEW_OUTPUTS and rows <= 512 else 1, 8, 4)
    while tiles.stages > 2 and _shared_bytes(tiles, weight.pair) > shared:
        tiles = tiles._replace(stages=tiles.stages - 1)
    while tiles.split > 1 and tiles.split * STEP > weight.shape[1]:
        tiles = tiles._replace(split=tiles.split // 2)
    return tiles


def _shared_bytes(tiles: GroupTiles, pair: int) -> int:
    return 1024 + tiles.stages * STEP * (tiles.block_n // (1 if pair == 0 else 2) + tiles.block_m)


def gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    tiles: GroupTiles | None = None,
) -> torch.Tensor:
    """x [M, K] e4m3 (rows may be strided) with x_scale [M] -> [M, N] in `dtype`."""
    rows, (outputs, inner) = x.shape[0], weight.shape
    tiles = tiles or tiles_for(rows, weight, shared_memory(x.device))
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    row_blocks = triton.cdiv(rows, tiles.block_m)
    programs = row_blocks * triton.cdiv(outputs, tiles.block_n)
    partial = arrived = None
    if tiles.split > 1:
        partial = torch.empty(row_blocks, tiles.split, outputs, tiles.block_m, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device)
    _group_scaled_kernel(
        (programs * tiles.split,), x, weight.values, x_scale, weight.scale, bias, y, partial, arrived, rows,
        x.stride(0), N=outputs, K=inner, GROUP=min(weight.group, inner), BLOCK_ROWS=weight.block_rows,
        PAIR=weight.pair, UNIT=E4M3_UNIT, STEP=STEP, BAND=_BAND, SPLIT=tiles.split, BLOCK_N=tiles.block_n,
        BLOCK_M=tiles.block_m, STAGES=tiles.stages, FAST=not interpreted(), num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return y


def as_e4m3(weight: GroupScaled) -> torch.Tensor:
    """int4 codes as e4m3 numbers (q - 8) / 512, [N, K], columns in the order of the activations."""
    outputs, inner = weight.shape
    out = torch.empty(outputs, inner, dtype=torch.float8_e4m3fn, device=weight.values.device)
    block_n, block_w = 32, 128
    grid = triton.cdiv(outputs, block_n) * triton.cdiv(inner // 2, block_w)
    _codes_kernel(
        (grid,), weight.values, out, N=outputs, K=inner, PAIR=weight.pair, BLOCK_N=block_n, BLOCK_W=block_w,
        FAST=not interpreted(), num_warps=4,
    )  # fmt: skip
    return out
