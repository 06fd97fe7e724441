"""The first kernel of moe.decode: norm, router and choice of experts for a few tokens, and in parallel the gate and up
GEMMs of the dense branch.
"""

import triton
import triton.language as tl

from engine.kernels.gemm.weight_stream import first_blocks, first_scales, halves, scales_at, times_rows
from engine.kernels.moe.top_k import all_experts, dense_factor
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.launcher import kernel, wait_for_previous


@triton.jit
def _choose(
    logits_ptr, expert_scale_ptr, weights_ptr, experts_ptr,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. With a dense factor, a further logit after the experts' gives a last weight."""
    j = tl.arange(0, KP)
    experts, weights = all_experts(logits_ptr, expert_scale_ptr, E, EP, TOP_K, KP, RENORMALIZE)
    tl.store(experts_ptr + j, experts, mask=j < TOP_K)
    tl.store(weights_ptr + j, weights, mask=j < TOP_K)
    if COLUMNS > E:
        tl.store(weights_ptr + TOP_K, dense_factor(logits_ptr, E))


@triton.jit
def _router_part(
    x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, logits_ptr, arrived_ptr, weights_ptr, experts_ptr,
    program, M, x_stride, eps, offset,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = program * BLOCK_E + tl.arange(0, BLOCK_E)
    at = router_ptr + column * H
    if factor_ptr is not None:
        at = tl.where(column < E, at, factor_ptr + (column - column))
    at = at[None, :, None] + tl.arange(0, BLOCK_H)[None, None, :]
    live = (column < COLUMNS)[None, :, None]
    STEPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    blocks = first_blocks(at, live, H, BLOCK_H, STEPS)
    wait_for_previous(PDL)
    y = times_rows(
        blocks, at, live, (), None, x_ptr, norm_ptr, M, x_stride, eps, offset, COLUMNS, H, ROWS, BLOCK_H, STEPS, 0, ""
    )
    for m in tl.static_range(ROWS):
        logits = tl.sum(y[m], 0).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + m * COLUMNS + column, logits, mask=(column < COLUMNS) & (m < M))
    tl.debug_barrier()  # every thread has written its logits before the program announces that it is done
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == (COLUMNS + BLOCK_E - 1) // BLOCK_E - 1:
        for m in tl.static_range(ROWS):
            if m < M:
                _choose(
                    logits_ptr + m * COLUMNS, expert_scale_ptr, weights_ptr + m * (TOP_K + COLUMNS - E),
                    experts_ptr + m * TOP_K, E, EP, TOP_K, KP, COLUMNS, RENORMALIZE,
                )
        tl.store(arrived_ptr, 0)


@triton.jit
def _normalise(
    x_ptr, norm_ptr, normed_ptr, M, x_stride, eps, offset, H: tl.constexpr, ROWS: tl.constexpr, HP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, HP)
    norm = tl.load(norm_ptr + k, mask=k < H, other=0.0).to(tl.float32) + offset
    wait_for_previous(PDL)
    for m in tl.static_range(ROWS):
        live = (k < H) & (m < M)
        x = tl.load(x_ptr + m * x_stride + k, mask=live, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
        tl.store(normed_ptr + m * H + k, (x * factor * norm).to(normed_ptr.dtype.element_ty), mask=live)


@triton.jit
def _dense_gate_up(
    x_ptr, norm_ptr, w_ptr, scale_ptr, h_ptr, program, M, x_stride, eps, offset,
    H: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, 2)[:, None, None]
    live = (n < J)[None, :, None] & (half >= 0)
    at = w_ptr + (half * J + n[None, :, None]) * H + tl.arange(0, BLOCK_K)[None, None, :]
    blocks = first_blocks(at, live, H, BLOCK_K, DEPTH)
    scale_at = scales_at(scale_ptr, program * BLOCK_N, H, GROUP)
    scales = first_scales(scale_at, 2, J, H, BLOCK_K, DEPTH, GROUP)
    if SCALED:
        gate_scale = tl.load(scale_ptr + n, mask=n < J, other=0.0)
        up_scale = tl.load(scale_ptr + J + n, mask=n < J, other=0.0)
    wait_for_previous(PDL)
    y = times_rows(
        blocks, at, live, scales, scale_at, x_ptr, norm_ptr, M, x_stride, eps, offset, J, H, ROWS, BLOCK_K, DEPTH,
        GROUP, "",
    )
    dtype = h_ptr.dtype.element_ty
    for m in tl.static_range(ROWS):
        gate, up = halves(y[m])
        if SCALED:
            gate = gate * gate_scale
            up = up * up_scale
        gate = activated(gate.to(dtype).to(tl.float32), GATE).to(dtype)  # rounded as gemm.small_batch does
        tl.store(h_ptr + m * J + n, gate * up.to(dtype), mask=(n < J) & (m < M))


@kernel
def route_kernel(
    x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, dense_x_ptr, dense_ptr, dense_scale_ptr,
    logits_ptr, arrived_ptr, weights_ptr, experts_ptr, normed_ptr, h_ptr, M, x_stride, dense_stride, eps, offset,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program writes the normalised x for the next kernel's experts; the others normalise it on the fly.
    NORMED: tl.constexpr = 0 if normed_ptr is None else 1
    ROUTERS: tl.constexpr = (COLUMNS + BLOCK_E - 1) // BLOCK_E
    program = tl.program_id(0) - NORMED
    if program < 0:
        if normed_ptr is not None:
            _normalise(x_ptr, norm_ptr, normed_ptr, M, x_stride, eps, offset, H, ROWS, HP, PDL)
    elif program < ROUTERS:
        _router_part(
            x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, logits_ptr, arrived_ptr, weights_ptr,
            experts_ptr, program, M, x_stride, eps, offset, E, EP, TOP_K, KP, COLUMNS, H, ROWS, BLOCK_E, BLOCK_H,
            RENORMALIZE, PDL,
        )
    else:
        if dense_ptr is not None:
            _dense_gate_up(
                dense_x_ptr, norm_ptr, dense_ptr, dense_scale_ptr, h_ptr, program - ROUTERS, M, dense_stride, eps,
                offset, H, J, ROWS, BLOCK_N, BLOCK_K, DEPTH, SCALED, GROUP, GATE, PDL,
            )
