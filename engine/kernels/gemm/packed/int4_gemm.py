"""GEMMs of 3 to MOST_ROWS rows with an int4 weight on tensor cores: y [M, N] = x [M, K] W [N, K]ᵀ.

A byte becomes two 16-bit floats at 1.4 instructions a number. Each half is put into the mantissa of a float whose last
mantissa bit is worth one (128 in bf16, 1024 in fp16); then that float, plus the zero point if there is one, is
subtracted. The result, q - zero, is exact. Each group's product is scaled in float32.

A few rows are bound by reading W. So K is cut into SPLIT parts, one or two for each warp, which are read at the same
time: this keeps enough of W in flight even with few outputs. With more rows, all warps share what is read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.packed.weight import MIDDLE, Packed, pair_distance
from engine.kernels.runtime.launcher import interpreted, kernel, shared_memory, wait_for_previous

MOST_ROWS = 256
_MANY_OUTPUTS = 16384  # enough programs for every multiprocessor without cutting K
_MOST_BYTES = 64  # bytes of a row of W that are read at a time


class Tiles(NamedTuple):
    """A program computes BLOCK_N outputs of BLOCK_M rows, SPLIT parts of K at a time. With a split, BLOCK_M holds all
    rows; without one, several programs share them."""

    block_n: int
    block_m: int
    split: int
    warps: int
    stages: int


@triton.jit
def _halves(codes, zero, TYPE: tl.constexpr, FAST: tl.constexpr):
    """Bytes of two codes each -> q - zero of the lower halves, and of the upper halves, in TYPE. `zero`: uint8, shaped
    like `codes`."""
    if not FAST:
        low = (codes & 15).to(tl.float32) - zero.to(tl.float32)
        high = (codes >> 4).to(tl.float32) - zero.to(tl.float32)
        return low.to(TYPE), high.to(TYPE)
    elif TYPE == tl.bfloat16:  # noqa: SIM300
        as_bf16: tl.constexpr = """{ .reg .b32 l, h, e, o, y, z;
            mov.b32 e, 0x43434343; mov.b32 o, 0x3F803F80; prmt.b32 y, $5, e, 0x4140; prmt.b32 z, $5, e, 0x4342;
            and.b32 l, $4, 0x0F0F0F0F; shr.u32 h, $4, 4; and.b32 h, h, 0x0F0F0F0F;
            prmt.b32 $0, l, e, 0x4140; prmt.b32 $1, l, e, 0x4342;
            prmt.b32 $2, h, e, 0x4140; prmt.b32 $3, h, e, 0x4342;
            neg.bf16x2 y, y; neg.bf16x2 z, z;
            fma.rn.bf16x2 $0, $0, o, y; fma.rn.bf16x2 $1, $1, o, z;
            fma.rn.bf16x2 $2, $2, o, y; fma.rn.bf16x2 $3, $3, o, z; }"""
        return tl.inline_asm_elementwise(
            as_bf16, "=&r,=&r,=&r,=&r,r,r", [codes, zero], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        as_fp16: tl.constexpr = """{ .reg .b32 l, h, e, y, z;
            mov.b32 e, 0x64646464; prmt.b32 y, $5, e, 0x4140; prmt.b32 z, $5, e, 0x4342;
            and.b32 l, $4, 0x0F0F0F0F; shr.u32 h, $4, 4; and.b32 h, h, 0x0F0F0F0F;
            prmt.b32 $0, l, e, 0x4140; prmt.b32 $1, l, e, 0x4342;
            prmt.b32 $2, h, e, 0x4140; prmt.b32 $3, h, e, 0x4342;
            sub.f16x2 $0, $0, y; sub.f16x2 $1, $1, z; sub.f16x2 $2, $2, y; sub.f16x2 $3, $3, z; }"""
        return tl.inline_asm_elementwise(
            as_fp16, "=&r,=&r,=&r,=&r,r,r", [codes, zero], (tl.float16, tl.float16), True, 4
        )


@kernel
def _int4_split_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, y_ptr, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, PAIR: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = K // SPLIT  # columns
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    wait_for_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    w = tl.arange(0, BLOCK_W)
    part = tl.arange(0, SPLIT)
    n_live = (n < N)[None, :, None]
    m_live = (m < M)[None, None, :]
    w_at = w_ptr + n[None, :, None].to(tl.int64) * (K // 2) + (part * (PART // 2))[:, None, None] + w[None, None, :]
    column = (part * PART)[:, None, None] + (w // PAIR * (2 * PAIR) + w % PAIR)[None, :, None]
    x_at = x_ptr + m[None, None, :].to(tl.int64) * x_stride + column
    group_at = n[None, :].to(tl.int64) * GROUPS
    acc = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, PART // 2, BLOCK_W, num_stages=STAGES):
        if N % BLOCK_N == 0:  # a mask would keep the loads narrow
            codes = tl.load(w_at + at)
        else:
            codes = tl.load(w_at + at, mask=n_live, other=0)
        group = group_at + ((part * PART + at * 2) // GROUP)[:, None]
        some = (n < N)[None, :] & (part < SPLIT)[:, None]
        scale = tl.load(scale_ptr + group, mask=some, other=0.0).to(tl.float32)
        zero = tl.full([SPLIT, BLOCK_N, BLOCK_W], MIDDLE, tl.uint8)
        if zero_ptr is not None:
            of_group = tl.load(zero_ptr + group, mask=some, other=0)
            zero = tl.broadcast_to(of_group[:, :, None], [SPLIT, BLOCK_N, BLOCK_W])
        low, high = _halves(codes, zero, x_ptr.dtype.element_ty, FAST)
        product = tl.dot(low, tl.load(x_at + at * 2, mask=m_live, other=0.0))
        product = tl.dot(high, tl.load(x_at + at * 2 + PAIR, mask=m_live, other=0.0), product)
        acc += product * scale[:, :, None]
    y_at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, tl.sum(acc, 0).to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@kernel
def _int4_tile_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, y_ptr, M, x_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, PAIR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    wait_for_previous(PDL)
    n = tl.program_id(0) % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) // ACROSS * BLOCK_M + tl.arange(0, BLOCK_M)
    w = tl.arange(0, BLOCK_W)
    n_live = n < N
    m_live = (m < M)[None, :]
    w_at = w_ptr + n[:, None].to(tl.int64) * (K // 2) + w[None, :]
    x_at = x_ptr + m[None, :].to(tl.int64) * x_stride + (w // PAIR * (2 * PAIR) + w % PAIR)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in tl.range(0, K // 2, BLOCK_W, num_stages=STAGES):
        if N % BLOCK_N == 0:  # a mask would keep the loads narrow
            codes = tl.load(w_at + at)
        else:
            codes = tl.load(w_at + at, mask=n_live[:, None], other=0)
        group = n.to(tl.int64) * GROUPS + at * 2 // GROUP
        scale = tl.load(scale_ptr + group, mask=n_live, other=0.0).to(tl.float32)
        zero = tl.full([BLOCK_N, BLOCK_W], MIDDLE, tl.uint8)
        if zero_ptr is not None:
            of_group = tl.load(zero_ptr + group, mask=n_live, other=0)
            zero = tl.broadcast_to(of_group[:, None], [BLOCK_N, BLOCK_W])
        low, high = _halves(codes, zero, x_ptr.dtype.element_ty, FAST)
        product = tl.dot(low, tl.load(x_at + at * 2, mask=m_live, other=0.0))
        product = tl.dot(high, tl.load(x_at + at * 2 + PAIR, mask=m_live, other=0.0), product)
        acc += product * scale[:, None]
    y_at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=n_live[:, None] & m_live)


def block_bytes(group: int) -> int:
    """Bytes of a row of W that are read at a time: a power of two, within one group. 0 if the group's size allows
    none."""
    size = _MOST_BYTES
    while (group // 2) % size:
        size //= 2
    return size if size >= 16 and group % 2 == 0 else 0  # tensor cores multiply 16 columns at a time


def supports(packed: Packed, dtype: torch.dtype) -> bool:
    """Whether `gemm` multiplies activations of `dtype` with this weight."""
    size = block_bytes(packed.group)
    whole_blocks = size > 0 and packed.shape[1] % (2 * size) == 0
    return packed.kind == "int4" and dtype in (torch.bfloat16, torch.float16) and whole_blocks


def tiles_for(rows: int, outputs: int, blocks: int, block_w: int, shared: int) -> Tiles:
    """Tiles for `rows` of x and a weight of `outputs` rows, each of `blocks` blocks of `block_w` bytes, if a program
    may have `shared` bytes of shared memory: the fastest or nearly the fastest that were tried with the shapes of an 8B
    model on an H100 (docs/performance.md)."""
    block_m = max(8, triton.next_power_of_2(rows))
    if rows <= 16 or (rows <= 32 and outputs < _MANY_OUTPUTS):
        tiles = Tiles(32, block_m, 8 if rows <= 8 else 4, 4, 3 if rows <= 8 else 4)
        while blocks % tiles.split:
            tiles = tiles._replace(split=tiles.split // 2)
    else:
        block_m = min(block_m, 64 if rows <= 128 else 128)
        tiles = Tiles(64, block_m, 1, 4, 4 if block_m <= 64 else 3)
    while tiles.stages > 2 and _shared_bytes(tiles, block_w) > shared:
        tiles = tiles._replace(stages=tiles.stages - 1)
    while tiles.split > 1 and _shared_bytes(tiles, block_w) > shared:
        tiles = tiles._replace(split=tiles.split // 2)
    return tiles if tiles.split > 1 else tiles._replace(block_m=max(16, tiles.block_m))


def _shared_bytes(tiles: Tiles, block_w: int) -> int:
    return 1024 + tiles.stages * tiles.split * block_w * (tiles.block_n + 4 * tiles.block_m)


def gemm(x: torch.Tensor, packed: Packed, tiles: Tiles | None = None) -> torch.Tensor:
    """Up to MOST_ROWS rows: x [M, K], columns in packed order (rows may be strided), and a weight that passes
    `supports` -> [M, N] in x's dtype."""
    rows, (outputs, inner) = x.shape[0], packed.shape
    block_w = block_bytes(packed.group)
    tiles = tiles or tiles_for(rows, outputs, inner // (2 * block_w), block_w, shared_memory(x.device))
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    across = triton.cdiv(outputs, tiles.block_n)
    constants = {
        "N": outputs, "K": inner, "GROUP": packed.group, "MIDDLE": MIDDLE[packed.kind],
        "PAIR": pair_distance(packed.group), "BLOCK_N": tiles.block_n, "BLOCK_M": tiles.block_m, "BLOCK_W": block_w,
        "STAGES": tiles.stages, "FAST": not interpreted(), "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    operands = (x, packed.values, packed.scale, packed.zero, y, rows, x.stride(0))
    if tiles.split > 1:
        _int4_split_kernel((across,), *operands, SPLIT=tiles.split, **constants)
    else:
        _int4_tile_kernel((across * triton.cdiv(rows, tiles.block_m),), *operands, **constants)
    return y
