"""Norm, router and choice of experts for a few tokens, and beside them the first products of an MLP that every token
goes through: the first kernel of triton_moe_few.
"""

import triton
import triton.language as tl

from engine.kernels.launch import kernel, wait_for_previous
from engine.kernels.triton_gate import activated, sigmoid
from engine.kernels.triton_stream import first_blocks, halves, times_rows


@triton.jit
def _choose(
    logits_ptr, expert_scale_ptr, weights_ptr, experts_ptr, M,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """As triton_moe.choose_experts, of all tokens at once; a logit behind the experts' makes a last weight, its
    sigmoid."""
    m = tl.arange(0, ROWS)[:, None]
    e = tl.arange(0, EP)[None, :]
    j = tl.arange(0, KP)[None, :]
    x = tl.load(logits_ptr + m * COLUMNS + e, mask=(e < E) & (m < M), other=float("-inf"), cache_modifier=".cg")
    x = x.to(tl.float32)
    x = tl.exp(x - tl.max(x, 1)[:, None])
    total = tl.sum(x, 1)[:, None]
    p = x / total
    # Probability and number in one: the largest is found by one reduction, and of equal ones the first. A row of NaN
    # chooses experts that exist, with weights of NaN.
    bits = tl.where(p == p, p, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(e < E, (bits << 32) | (EP - 1 - e), -1)
    weights = tl.zeros([ROWS, KP], tl.float32)
    experts = tl.zeros([ROWS, KP], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, 1)[:, None]
        key = tl.where(key == best, -1, key)
        weights = tl.where(j == i, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), weights)
        experts = tl.where(j == i, EP - 1 - (best & 0xFFFFFFFF).to(tl.int32), experts)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 1)[:, None]
    weights = tl.where(total == total, weights, float("nan"))
    if expert_scale_ptr is not None:
        weights = weights * tl.load(expert_scale_ptr + experts).to(tl.float32)
    extra: tl.constexpr = COLUMNS - E
    tl.store(weights_ptr + m * (TOP_K + extra) + j, weights, mask=(j < TOP_K) & (m < M))
    tl.store(experts_ptr + m * TOP_K + j, experts, mask=(j < TOP_K) & (m < M))
    if extra > 0:
        row = tl.arange(0, ROWS)
        factor = tl.load(logits_ptr + row * COLUMNS + E, mask=row < M, other=0.0, cache_modifier=".cg")
        factor = sigmoid(factor.to(tl.float32)).to(factor.dtype).to(tl.float32)
        tl.store(weights_ptr + row * (TOP_K + 1) + TOP_K, factor, mask=row < M)


@triton.jit
def _router_part(
    x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, logits_ptr, arrived_ptr, weights_ptr, experts_ptr,
    normed_ptr, M, x_stride, eps, offset,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    at = router_ptr + column * H
    if factor_ptr is not None:
        at = tl.where(column < E, at, factor_ptr + (column - column))
    at = at[None, :, None] + tl.arange(0, BLOCK_H)[None, None, :]
    live = (column < COLUMNS)[None, :, None]
    STEPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    blocks = first_blocks(at, live, H, BLOCK_H, STEPS)
    wait_for_previous(PDL)
    y = times_rows(blocks, at, live, x_ptr, norm_ptr, M, x_stride, eps, offset, H, ROWS, BLOCK_H, STEPS, "")
    for m in tl.static_range(ROWS):
        logits = tl.sum(y[m], 0).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + m * COLUMNS + column, logits, mask=(column < COLUMNS) & (m < M))
    tl.debug_barrier()  # the whole program's logits are written before its arrival is
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == (COLUMNS + BLOCK_E - 1) // BLOCK_E - 1:
        _choose(
            logits_ptr, expert_scale_ptr, weights_ptr, experts_ptr, M, E, EP, TOP_K, KP, COLUMNS, ROWS, RENORMALIZE
        )
        tl.store(arrived_ptr, 0)
    if normed_ptr is not None and tl.program_id(0) == 0:  # for the experts, who come later
        _normalise(x_ptr, norm_ptr, normed_ptr, M, x_stride, eps, offset, H, ROWS, BLOCK_H)


@triton.jit
def _normalise(
    x_ptr, norm_ptr, normed_ptr, M, x_stride, eps, offset, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):
    k = tl.arange(0, BLOCK_H)
    for m in tl.static_range(ROWS):
        squares = tl.zeros([BLOCK_H], tl.float32)
        for at in tl.static_range(0, H, BLOCK_H):
            x = tl.load(x_ptr + m * x_stride + at + k, mask=(at + k < H) & (m < M), other=0.0).to(tl.float32)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, 0) / H + eps)
        for at in tl.static_range(0, H, BLOCK_H):
            live = (at + k < H) & (m < M)
            x = tl.load(x_ptr + m * x_stride + at + k, mask=live, other=0.0).to(tl.float32)
            norm = tl.load(norm_ptr + at + k, mask=at + k < H, other=0.0).to(tl.float32) + offset
            tl.store(normed_ptr + m * H + at + k, (x * factor * norm).to(normed_ptr.dtype.element_ty), mask=live)


@triton.jit
def _beside_part(
    x_ptr, norm_ptr, w_ptr, scale_ptr, h_ptr, program, M, x_stride, eps, offset,
    H: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, 2)[:, None, None]
    live = (n < J)[None, :, None] & (half >= 0)
    at = w_ptr + (half * J + n[None, :, None]) * H + tl.arange(0, BLOCK_K)[None, None, :]
    blocks = first_blocks(at, live, H, BLOCK_K, DEPTH)
    if SCALED:
        gate_scale = tl.load(scale_ptr + n, mask=n < J, other=0.0)
        up_scale = tl.load(scale_ptr + J + n, mask=n < J, other=0.0)
    wait_for_previous(PDL)
    y = times_rows(blocks, at, live, x_ptr, norm_ptr, M, x_stride, eps, offset, H, ROWS, BLOCK_K, DEPTH, "")
    dtype = h_ptr.dtype.element_ty
    for m in tl.static_range(ROWS):
        gate, up = halves(y[m])
        if SCALED:
            gate = gate * gate_scale
            up = up * up_scale
        gate = activated(gate.to(dtype).to(tl.float32), GATE).to(dtype)  # rounded as triton_gemv does
        tl.store(h_ptr + m * J + n, gate * up.to(dtype), mask=(n < J) & (m < M))


@kernel
def route_kernel(
    x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, beside_x_ptr, beside_ptr, beside_scale_ptr,
    logits_ptr, arrived_ptr, weights_ptr, experts_ptr, normed_ptr, h_ptr, M, x_stride, beside_stride, eps, offset,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
    J: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, RENORMALIZE: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    ROUTERS: tl.constexpr = (COLUMNS + BLOCK_E - 1) // BLOCK_E
    if tl.program_id(0) < ROUTERS:
        _router_part(
            x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, logits_ptr, arrived_ptr, weights_ptr,
            experts_ptr, normed_ptr, M, x_stride, eps, offset, E, EP, TOP_K, KP, COLUMNS, H, ROWS, BLOCK_E, BLOCK_H,
            RENORMALIZE, PDL,
        )
    else:
        if beside_ptr is not None:
            _beside_part(
                beside_x_ptr, norm_ptr, beside_ptr, beside_scale_ptr, h_ptr, tl.program_id(0) - ROUTERS, M,
                beside_stride, eps, offset, H, J, ROWS, BLOCK_N, BLOCK_K, DEPTH, SCALED, GATE, PDL,
            )
