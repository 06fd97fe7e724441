"""One row times the gate and up weights of an MLP in fp8 blocks of 128 x 128: y = act(x Wgᵀ) * (x Wuᵀ), Wg above Wu.

small_batch.gemv does the same on any GPU. It scales x, whose scales differ between gate and up, so threads exchange x
twice. Here, in Gluon, each thread loads the columns of x that its columns of the weight meet, and nothing is exchanged
before the end:

    thread      16 columns of each step of WARPS x 512; the 16 have one scale, which multiplies their sum
    program     one row of Wg and the same row of Wu, DEPTH steps in flight
"""

# Gluon's annotations describe what its compiler sees, not what a kernel's source says:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.kernels.gemm.packed.block_wgmma import BLOCK
from engine.kernels.gemm.packed.group_scaled import GroupScaled
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import interpreted, kernel_in_gluon, target_of, wait_for_previous

_COLUMNS = 16  # of a thread: its load has 16 bytes
_WARPS = 2
_STEP = 32 * _WARPS * _COLUMNS
_DEPTH = 3
_REGISTERS = 64  # of a thread: 16 programs on a multiprocessor, each with 6 KB of the weight in flight


@gluon.jit
def _step(gate_at, i: gl.constexpr, UP: gl.constexpr, STEP: gl.constexpr):
    """A step's columns of a gate row and of its up row."""
    return gl.load(gate_at + i * STEP), gl.load(gate_at + UP + i * STEP)


@gluon.jit
def _scale(scale_at, i: gl.constexpr, UP: gl.constexpr, STEP: gl.constexpr, BLOCK: gl.constexpr):
    return gl.load(scale_at + i * (STEP // BLOCK)), gl.load(scale_at + UP // BLOCK // BLOCK + i * (STEP // BLOCK))


@kernel_in_gluon(_REGISTERS)
def _gated_row_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, N: gl.constexpr, K: gl.constexpr, BLOCK: gl.constexpr, GATE: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    THREADS: gl.constexpr = 32 * WARPS
    STEP: gl.constexpr = THREADS * COLUMNS
    STEPS: gl.constexpr = K // STEP
    UP: gl.constexpr = N * K  # from a gate row to its up row
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, layout))
    columns = thread[:, None] * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    n = gl.program_id(0)
    gate_at = w_ptr + n.to(gl.int64) * K + columns
    scale_at = scale_ptr + n // BLOCK * (K // BLOCK) + thread * COLUMNS // BLOCK
    weights = ()
    for i in gl.static_range(min(DEPTH, STEPS)):
        weights = weights + (_step(gate_at, i, UP, STEP),)  # noqa: RUF005 - Triton's tuples
    scales = ()
    for i in gl.static_range(STEPS):  # all of them now: where they are used, each would wait for the memory
        scales = scales + (_scale(scale_at, i, UP, STEP, BLOCK),)  # noqa: RUF005
    wait_for_previous(PDL)
    gate = gl.zeros([THREADS], gl.float32, gl.SliceLayout(1, layout))
    up = gate
    for i in gl.static_range(STEPS):
        if i + DEPTH < STEPS:
            weights = weights + (_step(gate_at, i + DEPTH, UP, STEP),)  # noqa: RUF005
        x = gl.load(x_ptr + columns + i * STEP).to(gl.float32)
        gate += gl.sum(weights[i][0].to(gl.float32) * x, 1) * scales[i][0]
        up += gl.sum(weights[i][1].to(gl.float32) * x, 1) * scales[i][1]
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    y = gl.sum(gate, 0).to(dtype)  # rounded where separate kernels would round
    y = activated(y.to(gl.float32), GATE).to(dtype) * gl.sum(up, 0).to(dtype)
    gl.store(y_ptr + n, y)


def fits(weight: GroupScaled) -> bool:
    """Whether this kernel serves a weight of this shape and these blocks on its GPU."""
    outputs, inner = weight.shape
    return (
        not interpreted() and target_of(weight.values.device).wgmma and weight.pair == 0 and weight.group == BLOCK
        and weight.block_rows == BLOCK and outputs % (2 * BLOCK) == 0 and inner % _STEP == 0
    )  # fmt: skip


def gated_row(x: torch.Tensor, weight: GroupScaled, gate: str) -> torch.Tensor:
    """x [1, K] -> [1, N / 2] in x's dtype. `gate`: an activation."""
    outputs, inner = weight.shape
    y = torch.empty(1, outputs // 2, dtype=x.dtype, device=x.device)
    _gated_row_kernel(
        (outputs // 2,), x, weight.values, weight.scale, y, N=outputs // 2, K=inner, BLOCK=BLOCK, GATE=gate,
        COLUMNS=_COLUMNS, WARPS=_WARPS, DEPTH=_DEPTH, num_warps=_WARPS,
    )  # fmt: skip
    return y
