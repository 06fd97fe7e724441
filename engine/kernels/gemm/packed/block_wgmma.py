"""GEMM of many rows of fp8 activations with an fp8 weight in blocks of 128 x 128, for Hopper.

    x [M, K], W [N, K] -> y [M, N]
    y[m, n] = x_scale[m] * sum over steps of 128 columns of (scale[n / 128, step] * (x Wᵀ)[m, n, step])

Tensor cores add up in registers, so a step with a scale of its own seems to want registers of its own. Here there is
one set: after each step it is multiplied by that step's scale over the next step's, and after the last step by its
scale.

One program of twelve warps runs on each multiprocessor and computes tile after tile of 192 rows and 256 outputs. Each
four warps, a part, multiply 64 of the rows. While one part scales its sums, the tensor cores work for the others. The
last part also asks the TMA unit for the next x and W whenever all parts have read a stage of shared memory:

    xs [stages x parts, 64, 128]    full    a barrier for each stage: x and W have arrived
    ws [stages, 256, 128]           empty   ... all parts have read them
    ys [parts, 64, 128]             half of a part's results on their way to memory

The last row blocks may have low tiles, of 128 rows, in which the last part only loads. They let all programs end at
about the same time: 8,192 rows and 5,120 outputs are 6.5 waves of high tiles, but six waves of high and one of low.

Two kernels that would follow can be part of this one, so that less is written and read again:

    gate    W is Wg above Wu of an MLP, and y = act(x Wgᵀ) * (x Wuᵀ). A tile has 128 outputs of each, which a thread
            holds side by side.
    onto    y is added to what stands in memory: the residual stream.
"""

# Gluon's annotations describe what its compiler sees, not what a kernel's source says:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import functools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels.gemm.packed.group_scaled import GroupScaled
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import gpu_is_absent, interpreted, kernel_in_gluon, target_of

BLOCK = 128  # numbers with one scale, down and across; also the columns of a step
_PART = 64   # rows: what one instruction of four warps multiplies
_PARTS = 3
_BLOCK_M, _BLOCK_N = _PARTS * _PART, 256
_LOW_M = _BLOCK_M - _PART
_MOST_LOW = 12  # row blocks of low tiles
_BAND = 11   # row blocks that use the same part of the weight while it is in the L2 cache
_STAGES = 3
_REGISTERS = 168  # of a thread: as many as 65,536 allow for 384 threads
_MOST_RATIO = 2.0**60  # of two scales in a row of blocks: the sums in between stay finite
_LEAST_USE = 0.8  # of the multiprocessors' time; with less, the library is as fast


@gluon.jit
def _place(
    tile, tiles, high, N: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    """The first row and the first column of y of a tile, and whether it is a low one. N, BLOCK_N: columns of y, of a
    tile."""
    ACROSS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    IN_BAND: gl.constexpr = BAND * ACROSS
    is_low = tile >= high * ACROSS
    band = gl.where(is_low, high, tile // IN_BAND * BAND)  # its first row block
    blocks = gl.where(is_low, tiles // ACROSS - high, gl.minimum(high - band, BAND))
    place = tile - band * ACROSS
    block = place % blocks
    m = band * (PARTS * ROWS) + block * gl.where(is_low, (PARTS - 1) * ROWS, PARTS * ROWS)
    return m, place // blocks * BLOCK_N, is_low


@gluon.jit
def _load(
    x_desc, w_desc, xs, ws, full, stage, m, n, k, is_low, APART: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Ask for the x and W of a step. APART: outputs from a tile's left half to its right half, or 0: neighbours."""
    arrived = full.index(stage)
    LAST: gl.constexpr = PARTS - 1
    if is_low:
        mbarrier.expect(arrived, (LAST * ROWS + BLOCK_N) * STEP)
    else:
        mbarrier.expect(arrived, (PARTS * ROWS + BLOCK_N) * STEP)
        tma.async_copy_global_to_shared(x_desc, [m + LAST * ROWS, k], arrived, xs.index(PARTS * stage + LAST))
    for part in gl.static_range(LAST):
        tma.async_copy_global_to_shared(x_desc, [m + part * ROWS, k], arrived, xs.index(PARTS * stage + part))
    if APART == 0:
        tma.async_copy_global_to_shared(w_desc, [n, k], arrived, ws.index(stage))
    else:
        left = ws.index(stage).slice(0, BLOCK_N // 2)
        right = ws.index(stage).slice(BLOCK_N // 2, BLOCK_N // 2)
        tma.async_copy_global_to_shared(w_desc, [n, k], arrived, left)
        tma.async_copy_global_to_shared(w_desc, [n + APART, k], arrived, right)


@gluon.jit
def _store(y_desc, ys, y, m, n):
    tma.store_wait(0)  # for what was in ys before
    ys.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [m, n], ys)


@gluon.jit
def _ask_l2(y_ptr, m, n, M, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Let the L2 cache read what a part's results will be added to."""
    LINE: gl.constexpr = 1024 // y_ptr.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
    lines: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    row = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, lines))[:, None]
    column = n + gl.arange(0, COLUMNS // LINE, layout=gl.SliceLayout(0, lines))[None, :] * LINE
    at = y_ptr + gl.minimum(row, M - 1).to(gl.int64) * N + gl.minimum(column, N - LINE)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _add(y_ptr, ys, y, m, n, M, N: gl.constexpr):
    """As `_store`, but added to what stands there: both are rounded to y's dtype, and so is their sum."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = m + gl.arange(0, ys.shape[0], layout=gl.SliceLayout(1, wide))[:, None]
    column = n + gl.arange(0, ys.shape[1], layout=gl.SliceLayout(0, wide))[None, :]
    at = y_ptr + row.to(gl.int64) * N + column
    live = (row < M) & (column < N)
    before = gl.load(at, mask=live, other=0.0)
    ys.store(y)
    gl.store(at, (before.to(gl.float32) + ys.load(wide).to(gl.float32)).to(ys.dtype), mask=live)


@gluon.jit
def _multiply(
    x_desc, w_desc, y_desc, xs, ws, ys, full, empty, x_scale_ptr, ratio_ptr, bias_ptr, y_ptr, M, tiles, high,
    PART: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, STEP: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr,
    ONTO: gl.constexpr,
):  # fmt: skip
    """What the four warps of a part do."""
    HALF: gl.constexpr = BLOCK_N // 2
    APART: gl.constexpr = 0 if GATE is None else N // 2
    UP: gl.constexpr = HALF if GATE is None else APART  # from the left half of a tile to its right half
    WIDTH: gl.constexpr = N if GATE is None else N // 2  # columns of y
    ADVANCE: gl.constexpr = BLOCK_N if GATE is None else HALF  # columns of y in a tile
    STEPS: gl.constexpr = K // STEP
    LOADS: gl.constexpr = PART == PARTS - 1  # it comes last to the end of a step, so it waits for no other part
    LAST_BLOCK: gl.constexpr = N // STEP - 1
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, sums))
    programs = gl.num_programs(0)
    m, n, is_low = _place(gl.program_id(0), tiles, high, WIDTH, PARTS, ROWS, ADVANCE, BAND)
    left_ratio = gl.load(ratio_ptr + n // STEP * STEPS)
    right_ratio = gl.load(ratio_ptr + gl.minimum((n + UP) // STEP, LAST_BLOCK) * STEPS)
    stage = 0
    phase = 0
    # Tile and columns whose x and W are asked for next: STAGES steps ahead.
    ahead_tile = gl.program_id(0)
    ahead_m = m
    ahead_n = n
    ahead_low = is_low
    ahead_k = STAGES * STEP
    if LOADS:
        for i in gl.static_range(STAGES):
            _load(x_desc, w_desc, xs, ws, full, i, m, n, i * STEP, is_low, APART, PARTS, ROWS, BLOCK_N, STEP)
    for tile in range(gl.program_id(0), tiles, programs):
        next_m, next_n, next_low = _place(
            gl.minimum(tile + programs, tiles - 1), tiles, high, WIDTH, PARTS, ROWS, ADVANCE, BAND
        )
        left_at = n // STEP * STEPS
        right_at = gl.minimum((n + UP) // STEP, LAST_BLOCK) * STEPS
        next_left_at = next_n // STEP * STEPS
        next_right_at = gl.minimum((next_n + UP) // STEP, LAST_BLOCK) * STEPS
        rows = m + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
        x_scale = gl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, sums)
        for step in range(STEPS):
            # The next step's ratios, early, because loading them takes about as long as a step.
            last = step == STEPS - 1
            next_left = gl.load(ratio_ptr + gl.where(last, next_left_at, left_at + step + 1))
            next_right = gl.load(ratio_ptr + gl.where(last, next_right_at, right_at + step + 1))
            if ONTO and step == STEPS - STAGES:
                _ask_l2(y_ptr, m + PART * ROWS, n, M, N, ROWS, BLOCK_N)
            mbarrier.wait(full.index(stage), phase)
            if not LOADS or not is_low:
                w = ws.index(stage).permute((1, 0))
                acc = warpgroup_mma(xs.index(PARTS * stage + PART), w, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(stage), count=1)
                acc = acc * gl.where(column < STEP, left_ratio, right_ratio)[None, :]
            else:
                mbarrier.arrive(empty.index(stage), count=1)
            left_ratio = next_left
            right_ratio = next_right
            if LOADS:
                if ahead_tile < tiles:
                    mbarrier.wait(empty.index(stage), phase)
                    _load(x_desc, w_desc, xs, ws, full, stage, ahead_m, ahead_n, ahead_k, ahead_low, APART, PARTS,
                          ROWS, BLOCK_N, STEP)  # fmt: skip
                ahead_k += STEP
                if ahead_k == K:
                    ahead_k = 0
                    ahead_tile += programs
                    ahead_m = next_m
                    ahead_n = next_n
                    ahead_low = next_low
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if not LOADS or not is_low:
            acc = acc * x_scale[:, None]
            if bias_ptr is not None:
                output = n + column + gl.where(column < HALF, 0, UP - HALF)
                acc = acc + gl.load(bias_ptr + output, mask=output < N, other=0.0).to(gl.float32)[None, :]
            y = acc.to(ys.dtype).reshape([ROWS, 2, HALF]).permute((0, 2, 1))
            left, right = y.split()
            if ONTO:
                _add(y_ptr, ys.index(PART), left, m + PART * ROWS, n, M, N)
                _add(y_ptr, ys.index(PART), right, m + PART * ROWS, n + HALF, M, N)
            elif GATE is not None:
                y = activated(left.to(gl.float32), GATE).to(ys.dtype) * right  # rounded as separate kernels round
                _store(y_desc, ys.index(PART), y, m + PART * ROWS, n)
            else:
                _store(y_desc, ys.index(PART), left, m + PART * ROWS, n)
                _store(y_desc, ys.index(PART), right, m + PART * ROWS, n + HALF)
        m = next_m
        n = next_n
        is_low = next_low
    tma.store_wait(0)


@kernel_in_gluon(_REGISTERS)
def _block_wgmma_kernel(
    x_ptr, w_ptr, x_scale_ptr, ratio_ptr, bias_ptr, y_ptr, M, tiles, high, x_stride, N: gl.constexpr, K: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STEP: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr, GATE: gl.constexpr, ONTO: gl.constexpr,
):  # fmt: skip
    BOX_N: gl.constexpr = BLOCK_N if GATE is None else BLOCK_N // 2  # rows of W that are asked for at once
    WIDTH: gl.constexpr = N if GATE is None else N // 2
    bytes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    halves: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_desc = tma.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [ROWS, STEP], bytes)
    w_desc = tma.make_tensor_descriptor(w_ptr, [N, K], [K, 1], [BOX_N, STEP], bytes)
    y_desc = tma.make_tensor_descriptor(y_ptr, [M, WIDTH], [WIDTH, 1], [ROWS, BLOCK_N // 2], halves)
    xs = gl.allocate_shared_memory(gl.float8e4nv, [PARTS * STAGES, ROWS, STEP], bytes)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, STEP], bytes)
    ys = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [PARTS, ROWS, BLOCK_N // 2], halves)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (x_desc, w_desc, y_desc, xs, ws, ys, full, empty, x_scale_ptr, ratio_ptr, bias_ptr, y_ptr, M,
                         tiles, high, 0, N, K, PARTS, ROWS, BLOCK_N, STEP, BAND, STAGES, GATE, ONTO)),
            (_multiply, (x_desc, w_desc, y_desc, xs, ws, ys, full, empty, x_scale_ptr, ratio_ptr, bias_ptr, y_ptr, M,
                         tiles, high, 1, N, K, PARTS, ROWS, BLOCK_N, STEP, BAND, STAGES, GATE, ONTO)),
            (_multiply, (x_desc, w_desc, y_desc, xs, ws, ys, full, empty, x_scale_ptr, ratio_ptr, bias_ptr, y_ptr, M,
                         tiles, high, 2, N, K, PARTS, ROWS, BLOCK_N, STEP, BAND, STAGES, GATE, ONTO)),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip


def fits(weight: GroupScaled) -> bool:
    """Whether this kernel serves a weight of this shape and these blocks on its GPU."""
    outputs, inner = weight.shape
    target = target_of(weight.values.device)
    return (
        not interpreted() and target.wgmma and target.large_shared and weight.pair == 0 and weight.group == BLOCK
        and weight.block_rows == BLOCK and outputs % BLOCK == 0 and inner % BLOCK == 0 and inner >= _STAGES * BLOCK
    )  # fmt: skip


def gates(weight: GroupScaled) -> bool:
    """Whether a weight that fits can be gate above up: each with whole blocks."""
    return weight.shape[0] % (2 * BLOCK) == 0


class Tiles(NamedTuple):
    """Row blocks of high and of low tiles, and how many times the busiest program multiplies the rows of a part."""

    high: int
    low: int
    parts: int


@functools.lru_cache(4096)
def _tiles(rows: int, outputs: int, programs: int) -> Tiles:
    """The tiles with which the busiest program has least to do. Programs take high tiles in turn, then low ones."""
    across = triton.cdiv(outputs, _BLOCK_N)
    best = None
    for low in range(_MOST_LOW + 1):
        high = max(0, triton.cdiv(rows - low * _LOW_M, _BLOCK_M))
        # The busiest program is the first, or the first of those with one high tile less.
        parts = max(
            (_PARTS - 1) * triton.cdiv((high + low) * across - program, programs)
            + triton.cdiv(high * across - program, programs)
            for program in (0, high * across % programs)
        )
        if best is None or parts < best.parts:
            best = Tiles(high, low, parts)
    assert best is not None
    return best


def wins(rows: int, weight: GroupScaled) -> bool:
    """Whether high tiles of so many rows keep the GPU busy."""
    programs = target_of(weight.values.device).multiprocessors
    waves = triton.cdiv(triton.cdiv(rows, _BLOCK_M) * triton.cdiv(weight.shape[0], _BLOCK_N), programs)
    return rows * weight.shape[0] >= _LEAST_USE * waves * programs * _BLOCK_M * _BLOCK_N


def ratios(scale: torch.Tensor) -> torch.Tensor | None:
    """Scales [N / 128, K / 128] -> each over the next one in its row, and the last one as it is.

    None where sums might not stay finite: scales that are not positive, or of very different sizes."""
    scale = scale.float()
    least, most = scale.amin(1), scale.amax(1)
    if not gpu_is_absent() and not bool(((least > 0) & (most < least * _MOST_RATIO)).all()):
        return None
    return torch.cat((scale[:, :-1] / scale[:, 1:], scale[:, -1:]), 1).contiguous()


def gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    values: torch.Tensor,
    ratio: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    gate: str | None = None,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] e4m3 (rows may be strided) with x_scale [M], values [N, K] e4m3 with `ratios` of their scales -> [M, N]
    in `dtype`. `gate`: an activation; W is Wg above Wu (`gates`), and y is [M, N / 2]. `onto`, contiguous: y is added
    to it; without a bias, for which threads have no registers left."""
    rows, (outputs, inner) = x.shape[0], values.shape
    assert onto is None or (gate is None and bias is None)
    y = onto
    if y is None:
        y = torch.empty(rows, outputs if gate is None else outputs // 2, dtype=dtype, device=x.device)
    programs = target_of(x.device).multiprocessors
    tiles = _tiles(rows, outputs, programs)
    count = (tiles.high + tiles.low) * triton.cdiv(outputs, _BLOCK_N)
    _block_wgmma_kernel(
        (min(count, programs),), x, values, x_scale, ratio, bias, y, rows, count, tiles.high, x.stride(0), N=outputs,
        K=inner, PARTS=_PARTS, ROWS=_PART, BLOCK_N=_BLOCK_N, STEP=BLOCK, BAND=_BAND, STAGES=_STAGES, GATE=gate,
        ONTO=onto is not None, num_warps=4,
    )  # fmt: skip
    return y
