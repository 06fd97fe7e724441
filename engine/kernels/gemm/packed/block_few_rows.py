"""GEMM of up to 128 rows of fp8 activations with an fp8 weight in blocks of 128 x 128, for Hopper.

    x [M, K], W [N, K] -> y [M, N]
    y[m, n] = x_scale[m] * sum over steps of 128 columns of (scale[n / 128, step] * (x Wᵀ)[m, n, step])

Reading W takes the time. One program runs on each multiprocessor, and all read equally much, because the GEMM ends when
the last of them has read its part. W is cut into steps of 128 outputs x 128 columns, tile after tile of outputs. Each
program has a range of steps, which may begin and end within a tile, and goes through it from its end to its beginning:

    steps of      tile 0            tile 1            tile 2
                  |-----------------|-----------------|-----------------|
    programs      |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|---- 4 ...

So a tile's earlier programs leave their sums of it in a workspace before its last program comes to it. If programs have
more steps than a tile, the last one starts from these sums: loading them delays nothing, because W is read ahead
meanwhile. Otherwise it adds them at the end. The order is always the same. A program waits only for programs with
smaller numbers, which started before it.

Within a program one warp asks the TMA unit for W and x: it begins with W before the previous kernel has ended, and goes
on while sums are stored. Eight warps multiply, four for each half of a tile's outputs. The weight's rows take the
tensor cores' wide side, so that few rows of x are padded to 8 at most.

    ws [stages x 2, 64, 128]      full    a barrier for each stage: W and x have arrived
    xs [stages, ROWS, 128]        empty   ... both halves have read them

With a gate, W is Wg above Wu of an MLP, and y = act(x Wgᵀ) * (x Wuᵀ), so that half as much is written and read again.
A tile then has 64 outputs of each. The warps that multiply Wu hand their results to the others:

    ups [64, ROWS]                handed  a barrier: they are there
                                  taken   ... the others have read them
"""

# Gluon's annotations describe what its compiler sees, not what a kernel's source says:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

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

from engine.kernels.gemm.packed.group_scaled import GroupScaled, arrivals
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import interpreted, kernel_in_gluon, target_of, wait_in_order

# Waits for the four warps of a half, not for the whole program. In Triton 3.6 it has the second name.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # pyright: ignore

BLOCK = 128  # numbers with one scale, down and across; also the outputs of a tile and the columns of a step
MOST_ROWS = 128
_HALF = 64  # outputs: what one instruction of four warps multiplies
_STAGES = {8: 9, 16: 9, 32: 9, 64: 6, 128: 4}  # by the most rows; with more stages an H100 is slower
_REGISTERS = 168  # of a thread: as many as 65,536 allow for 384 threads
_WHOLE_USE = 0.94  # of the multiprocessors' time: with so much, programs have whole tiles
_KEPT_ROWS = 64  # up to here a thread has registers for the scales of its rows while it multiplies


@gluon.jit
def _ask_for_w(
    w_desc, ws, arrived, stage, at, STEPS: gl.constexpr, TILE: gl.constexpr, APART: gl.constexpr, STEP: gl.constexpr
):
    """TILE: outputs from a tile to the next. APART: from a tile's first half to its second."""
    n = at // STEPS * TILE
    k = at % STEPS * STEP
    tma.async_copy_global_to_shared(w_desc, [n, k], arrived, ws.index(2 * stage))
    tma.async_copy_global_to_shared(w_desc, [n + APART, k], arrived, ws.index(2 * stage + 1))


@gluon.jit
def _read(
    x_desc, w_desc, xs, ws, full, empty, begin, end, STEPS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr,
    TILE: gl.constexpr, APART: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What the warp that reads does."""
    BYTES: gl.constexpr = (2 * HALF + ROWS) * STEP
    for i in gl.static_range(STAGES):
        if i < end - begin:
            mbarrier.expect(full.index(i), BYTES)
            _ask_for_w(w_desc, ws, full.index(i), i, end - 1 - i, STEPS, TILE, APART, STEP)
    wait_in_order(PDL)
    for i in gl.static_range(STAGES):
        if i < end - begin:
            tma.async_copy_global_to_shared(x_desc, [0, (end - 1 - i) % STEPS * STEP], full.index(i), xs.index(i))
    stage = 0
    phase = 0
    for i in range(STAGES, end - begin):
        at = end - 1 - i
        mbarrier.wait(empty.index(stage), phase)
        arrived = full.index(stage)
        mbarrier.expect(arrived, BYTES)
        _ask_for_w(w_desc, ws, arrived, stage, at, STEPS, TILE, APART, STEP)
        tma.async_copy_global_to_shared(x_desc, [0, at % STEPS * STEP], arrived, xs.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _begin(program, steps, UNIT: gl.constexpr):
    """The first step of a program. UNIT: steps that stay together."""
    return (program.to(gl.int64) * (steps // UNIT) // gl.num_programs(0)).to(gl.int32) * UNIT


@gluon.jit
def _program_of(step, steps, UNIT: gl.constexpr):
    return (((step // UNIT + 1).to(gl.int64) * gl.num_programs(0) - 1) // (steps // UNIT)).to(gl.int32)


@gluon.jit
def _leave(sums, partial_ptr, arrivals_ptr, tile, place, HALF_ID: gl.constexpr, SIZE: gl.constexpr):
    """Leave sums for the tile's last program. A program has at most one tile whose end is another program's."""
    gl.store(partial_ptr + (2 * gl.program_id(0) + HALF_ID) * SIZE + place, sums)
    _barrier()
    gl.atomic_add(arrivals_ptr + 2 * tile + HALF_ID, 1, sem="release")


@gluon.jit
def _add_others(
    sums, partial_ptr, arrivals_ptr, tile, steps, place, HALF_ID: gl.constexpr, STEPS: gl.constexpr,
    UNIT: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Add the sums of all programs before this one, the tile's last."""
    first = _program_of(tile * STEPS, steps, UNIT)
    due = gl.program_id(0) - first
    arrived = gl.atomic_add(arrivals_ptr + 2 * tile + HALF_ID, 0, sem="acquire")
    while arrived != due:
        arrived = gl.atomic_add(arrivals_ptr + 2 * tile + HALF_ID, 0, sem="acquire")
    gl.store(arrivals_ptr + 2 * tile + HALF_ID, 0)
    for program in range(first, first + due):
        sums += gl.load(partial_ptr + (2 * program + HALF_ID) * SIZE + place, cache_modifier=".cg")
    return sums


@gluon.jit
def _multiply(
    xs, ws, ups, full, empty, handed, taken, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr, M,
    begin, end, steps, HALF_ID: gl.constexpr, WIDTH: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr,
    KEPT_ROWS: gl.constexpr, HALF: gl.constexpr, TILE: gl.constexpr, APART: gl.constexpr, STEP: gl.constexpr,
    UNIT: gl.constexpr, ADD_FIRST: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What the four warps of a half do."""
    added: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32])
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [HALF // 8, 256 // HALF], [1, 4], [0, 1])
    output = gl.arange(0, HALF, layout=gl.SliceLayout(1, added))[:, None]
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, added))[None, :]
    place = output * ROWS + m
    stored_n = gl.arange(0, HALF, layout=gl.SliceLayout(1, stored))[:, None]
    stored_m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, stored))[None, :]
    wait_in_order(PDL)
    if ROWS <= KEPT_ROWS:
        x_scale = gl.load(x_scale_ptr + m, mask=m < M, other=0.0)
    stage = 0
    phase = 0
    handing = 0  # the phase of `handed`
    last_tile = (end - 1) // STEPS
    for i in range(last_tile - begin // STEPS + 1):
        tile = last_tile - i
        first = gl.maximum(begin - tile * STEPS, 0)
        last = gl.minimum(end - tile * STEPS, STEPS) - 1
        n = tile * TILE + HALF_ID * APART
        scale_at = scale_ptr + n // STEP * STEPS
        scale = gl.load(scale_at + last)
        sums = gl.zeros([HALF, ROWS], gl.float32, added)
        is_complete = last == STEPS - 1
        has_others = is_complete & (first > 0)
        if UNIT < STEPS and ADD_FIRST:  # noqa: SIM102 - decided when the kernel is compiled, the next when it runs
            if has_others:
                sums = _add_others(
                    sums, partial_ptr, arrivals_ptr, tile, steps, place, HALF_ID, STEPS, UNIT, HALF * ROWS
                )
        for j in range(last - first + 1):
            next_scale = gl.load(scale_at + gl.maximum(last - j - 1, 0))
            mbarrier.wait(full.index(stage), phase)
            product = warpgroup_mma(
                ws.index(2 * stage + HALF_ID), xs.index(stage).permute((1, 0)),
                gl.zeros([HALF, ROWS], gl.float32, added), use_acc=False, is_async=True,
            )  # fmt: skip
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            sums += product * scale
            scale = next_scale
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if UNIT < STEPS:
            if not is_complete:
                _leave(sums, partial_ptr, arrivals_ptr, tile, place, HALF_ID, HALF * ROWS)
            if not ADD_FIRST:  # noqa: SIM102
                if has_others:
                    sums = _add_others(
                        sums, partial_ptr, arrivals_ptr, tile, steps, place, HALF_ID, STEPS, UNIT, HALF * ROWS
                    )
        if is_complete:
            if ROWS > KEPT_ROWS:
                x_scale = gl.load(x_scale_ptr + m, mask=m < M, other=0.0)
            y = sums * x_scale
            if bias_ptr is not None:
                y = y + gl.load(bias_ptr + n + output).to(gl.float32)
            y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), stored)  # 16 bytes of a row for each thread
            if GATE is not None and HALF_ID == 1:
                mbarrier.wait(taken, handing ^ 1)
                ups.store(y)
                _barrier()
                mbarrier.arrive(handed, count=1)
            else:
                if GATE is not None:  # rounded as separate kernels round
                    mbarrier.wait(handed, handing)
                    up = ups.load(stored)
                    _barrier()
                    mbarrier.arrive(taken, count=1)
                    y = activated(y.to(gl.float32), GATE).to(y.dtype) * up
                at = y_ptr + stored_m.to(gl.int64) * WIDTH + (n + stored_n)
                gl.store(at, y, mask=(stored_m < M) & (stored_n < HALF))
            handing ^= 1


@kernel_in_gluon(_REGISTERS)
def _few_rows_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, partial_ptr, arrivals_ptr, M, x_stride, N: gl.constexpr,
    K: gl.constexpr, STEP: gl.constexpr, ROWS: gl.constexpr, KEPT_ROWS: gl.constexpr, HALF: gl.constexpr,
    UNIT: gl.constexpr, ADD_FIRST: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = K // STEP
    WIDTH: gl.constexpr = N if GATE is None else N // 2  # columns of y
    TILE: gl.constexpr = 2 * HALF if GATE is None else HALF  # ... of a tile
    APART: gl.constexpr = HALF if GATE is None else N // 2
    bytes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_desc = tma.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [ROWS, STEP], bytes)
    w_desc = tma.make_tensor_descriptor(w_ptr, [N, K], [K, 1], [HALF, STEP], bytes)
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, STEP], bytes)
    ws = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, HALF, STEP], bytes)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if GATE is None:  # none of these is used
        ups = xs
        handed = full.index(0)
        taken = full.index(0)
    else:
        order: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[0, 1])
        ups = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [HALF, ROWS], order)
        handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(handed, count=1)
        mbarrier.init(taken, count=1)
    fence_async_shared()
    steps = N // (2 * HALF) * STEPS
    begin = _begin(gl.program_id(0), steps, UNIT)
    end = _begin(gl.program_id(0) + 1, steps, UNIT)
    gl.warp_specialize(
        [
            (_multiply, (xs, ws, ups, full, empty, handed, taken, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, partial_ptr,
                         arrivals_ptr, M, begin, end, steps, 0, WIDTH, STEPS, ROWS, KEPT_ROWS, HALF, TILE, APART, STEP,
                         UNIT, ADD_FIRST, STAGES, GATE, PDL)),
            (_multiply, (xs, ws, ups, full, empty, handed, taken, x_scale_ptr, scale_ptr, bias_ptr, y_ptr, partial_ptr,
                         arrivals_ptr, M, begin, end, steps, 1, WIDTH, STEPS, ROWS, KEPT_ROWS, HALF, TILE, APART, STEP,
                         UNIT, ADD_FIRST, STAGES, GATE, PDL)),
            (_read, (x_desc, w_desc, xs, ws, full, empty, begin, end, STEPS, ROWS, HALF, TILE, APART, STEP, STAGES,
                     PDL)),
        ],
        [4, 1],
        [168, 40],
    )  # fmt: skip


def runs_on(device: torch.device) -> bool:
    target = target_of(device)
    return not interpreted() and target.wgmma and target.large_shared


def fits(weight: GroupScaled) -> bool:
    """Whether this kernel serves a weight of this shape and these blocks on its GPU."""
    outputs, inner = weight.shape
    return (
        runs_on(weight.values.device) and weight.pair == 0 and weight.group == BLOCK and weight.block_rows == BLOCK
        and outputs % BLOCK == 0 and inner % BLOCK == 0
    )  # fmt: skip


def _programs(tiles: int, multiprocessors: int) -> tuple[int, bool]:
    """How many programs, and whether each has whole tiles. A few tiles have equally many programs each, so that no
    program adds sums of two tiles."""
    waves = triton.cdiv(tiles, multiprocessors)
    if tiles >= _WHOLE_USE * waves * multiprocessors:
        return min(tiles, multiprocessors), True
    return (multiprocessors // tiles * tiles if 2 * tiles <= multiprocessors else multiprocessors), False


def gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: GroupScaled,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    gate: str | None = None,
) -> torch.Tensor:
    """x [M, K] e4m3 (rows may be strided, by a multiple of 16), up to 128 rows, with x_scale [M] -> [M, N] in
    `dtype`.

    gate: the result is this activation of the first half of the outputs times the second half, [M, N / 2].
    """
    rows, (outputs, inner) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs // (1 if gate is None else 2), dtype=dtype, device=x.device)
    padded = next(most for most in _STAGES if rows <= most)
    tiles, in_tile = outputs // BLOCK, inner // BLOCK
    programs, whole = _programs(tiles, target_of(x.device).multiprocessors)
    programs = min(programs, tiles * in_tile)
    partial = arrived = None
    if not whole:
        partial = torch.empty(programs * 2 * _HALF * padded, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device)
    _few_rows_kernel(
        (programs,), x, weight.values, x_scale, weight.scale, bias, y, partial, arrived, rows, x.stride(0), N=outputs,
        K=inner, STEP=BLOCK, ROWS=padded, KEPT_ROWS=_KEPT_ROWS, HALF=_HALF, UNIT=in_tile if whole else 1,
        ADD_FIRST=programs <= tiles, STAGES=_STAGES[padded], GATE=gate, num_warps=4,
    )  # fmt: skip
    return y
