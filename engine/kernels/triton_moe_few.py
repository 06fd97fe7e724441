"""A sparse block for one to four tokens, in three kernels. A step of one sequence is bound by reading weights, and each
kernel more costs as much as ten megabytes of them.

    route    norm, router, choice of experts;  beside it the first products of the MLP that every token goes through
    gate_up  the first products of the chosen experts
    down     the second products of both, weighted and summed, onto the residual

That MLP is the shared expert of Qwen3.5 (times a sigmoid, and part of the sum), or the dense MLP of Gemma 4 (a result
of its own), or there is none.

The choice is made by the last of the router's programs to arrive, while the others are at work on the MLP. `down` knows
the experts before `gate_up` is done, and has their weights on the way by then.

Each program multiplies some rows of a weight, in blocks [.., BLOCK_K] of which several are on their way at a time.
Products add up within a thread, then across it: nothing is added atomically, and no token's result depends on others.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.launch import kernel, wait_for_previous
from engine.kernels.moe_tiles import FewTiles, Shape, few_tiles
from engine.kernels.triton_gate import activated, sigmoid
from engine.kernels.triton_gemv import _norm_scales


class Beside(NamedTuple):
    """The weights of an MLP that every token goes through, beside its experts."""

    gate_up: torch.Tensor  # [2 J, H], gate above up
    gate_up_scale: torch.Tensor | None  # [2 J] of fp8 weights
    down: torch.Tensor  # [H, J]
    down_scale: torch.Tensor | None  # [H]
    factor: torch.Tensor | None = None  # [1, H]: the MLP counts sigmoid(x factorᵀ); else it is a result of its own


class Norm(NamedTuple):
    """An RMS norm that is still to come; `offset` as in triton_fused.rms_norm."""

    weight: torch.Tensor  # [H]
    eps: float
    offset: float | None


# -- parts of the kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _block(w_at, live, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [i BLOCK_K, (i + 1) BLOCK_K) of some rows of a weight, zeros outside; w_at points to their first ones."""
    if (i + 1) * BLOCK_K > K:
        live = live & (tl.arange(0, BLOCK_K)[None, None, :] < K - i * BLOCK_K)
    return tl.load(w_at + i * BLOCK_K, mask=live, other=0.0)


@triton.jit
def _first_blocks(w_at, live, K: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):
    """The first DEPTH of them, asked for together."""
    blocks = ()
    for i in tl.static_range(DEPTH):
        if i * BLOCK_K < K:
            blocks = blocks + (_block(w_at, live, i, K, BLOCK_K),)  # noqa: RUF005 - Triton's tuples
    return blocks


@triton.jit
def _within_threads(products, PART: tl.constexpr):
    """[A, B, K] -> [A, B, K / PART]: sums of what a thread holds side by side."""
    return tl.sum(
        tl.reshape(products, [products.shape[0], products.shape[1], products.shape[2] // PART, PART]), 3
    )


@triton.jit
def _normed(x, scale, norm_ptr, k, K, offset, WIDE: tl.constexpr):
    """Rounded where the norm's own kernel rounds."""
    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    scaled = x.to(tl.float32) * scale
    if WIDE:
        return (scaled * (norm.to(tl.float32) + offset)).to(x.dtype)
    else:
        return scaled.to(x.dtype) * norm


@triton.jit
def _times_rows(
    blocks, w_at, live, x_ptr, norm_ptr, scales, normed_ptr, M, x_stride, offset,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Rows [A, B] of a weight times each row of x [M, K]: a tuple of [A, B] float32. The first blocks are given.

    With a norm x passes it, and the grid's first program leaves the result at normed_ptr (if there is one). CACHE: the
    modifier that x is loaded with.
    """
    A: tl.constexpr = blocks[0].shape[0]
    B: tl.constexpr = blocks[0].shape[1]
    PART: tl.constexpr = 128 // blocks[0].dtype.primitive_bitwidth
    k_range = tl.arange(0, BLOCK_K)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros([A, B, BLOCK_K // PART], tl.float32),)  # noqa: RUF005
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        if (i + DEPTH) * BLOCK_K < K:
            blocks = blocks + (_block(w_at, live, i + DEPTH, K, BLOCK_K),)  # noqa: RUF005
        w = blocks[i].to(tl.float32)
        k = i * BLOCK_K + k_range
        added = ()
        for m in tl.static_range(ROWS):
            x = tl.load(x_ptr + m * x_stride + k, mask=(k < K) & (m < M), other=0.0, cache_modifier=CACHE)
            if norm_ptr is not None:
                x = _normed(x, scales[m], norm_ptr, k, K, offset, WIDE)
                if normed_ptr is not None:
                    mine = tl.program_id(0) == 0
                    tl.store(normed_ptr + m * K + k, x, mask=(k < K) & (m < M) & mine)
            added = added + (sums[m] + _within_threads(w * x.to(tl.float32)[None, None, :], PART),)  # noqa: RUF005
        sums = added
    results = ()
    for m in tl.static_range(ROWS):
        results = results + (tl.sum(sums[m], 2),)  # noqa: RUF005
    return results


@triton.jit
def _halves(y):
    """[2, B] -> the two rows."""
    first = tl.arange(0, 2)[:, None] == 0
    return tl.sum(tl.where(first, y, 0.0), 0), tl.sum(tl.where(first, 0.0, y), 0)


# -- the kernels ------------------------------------------------------------------------------------------------------


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
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, RENORMALIZE: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    at = router_ptr + column * H
    if factor_ptr is not None:
        at = tl.where(column < E, at, factor_ptr + (column - column))
    at = at[None, :, None] + tl.arange(0, BLOCK_H)[None, None, :]
    live = (column < COLUMNS)[None, :, None]
    STEPS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    blocks = _first_blocks(at, live, H, BLOCK_H, STEPS)
    wait_for_previous(PDL)
    scales = ()
    if norm_ptr is not None:
        scales = _norm_scales(x_ptr, M, x_stride, eps, H, ROWS, BLOCK_H)
    y = _times_rows(
        blocks, at, live, x_ptr, norm_ptr, scales, normed_ptr, M, x_stride, offset, H, ROWS, BLOCK_H, STEPS, WIDE, ""
    )
    for m in tl.static_range(ROWS):
        logits = tl.sum(y[m], 0).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + m * COLUMNS + column, logits, mask=(column < COLUMNS) & (m < M))
    tl.debug_barrier()  # the whole program's logits are written before its arrival is
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == (COLUMNS + BLOCK_E - 1) // BLOCK_E - 1:
        _choose(
            logits_ptr, expert_scale_ptr, weights_ptr, experts_ptr, M, E, EP, TOP_K, KP, COLUMNS, ROWS, RENORMALIZE
        )
        tl.store(arrived_ptr, 0)


@triton.jit
def _beside_part(
    x_ptr, norm_ptr, w_ptr, scale_ptr, h_ptr, program, M, x_stride, eps, offset,
    H: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, 2)[:, None, None]
    live = (n < J)[None, :, None] & (half >= 0)
    at = w_ptr + (half * J + n[None, :, None]) * H + tl.arange(0, BLOCK_K)[None, None, :]
    blocks = _first_blocks(at, live, H, BLOCK_K, DEPTH)
    if SCALED:
        gate_scale = tl.load(scale_ptr + n, mask=n < J, other=0.0)
        up_scale = tl.load(scale_ptr + J + n, mask=n < J, other=0.0)
    wait_for_previous(PDL)
    scales = ()
    if norm_ptr is not None:
        scales = _norm_scales(x_ptr, M, x_stride, eps, H, ROWS, BLOCK_H)
    y = _times_rows(
        blocks, at, live, x_ptr, norm_ptr, scales, None, M, x_stride, offset, H, ROWS, BLOCK_K, DEPTH, WIDE, ""
    )
    dtype = h_ptr.dtype.element_ty
    for m in tl.static_range(ROWS):
        gate, up = _halves(y[m])
        if SCALED:
            gate = gate * gate_scale
            up = up * up_scale
        gate = activated(gate.to(dtype).to(tl.float32), GATE).to(dtype)  # rounded as triton_gemv does
        tl.store(h_ptr + m * J + n, gate * up.to(dtype), mask=(n < J) & (m < M))


@kernel
def _route_kernel(
    x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, beside_x_ptr, beside_ptr, beside_scale_ptr,
    logits_ptr, arrived_ptr, weights_ptr, experts_ptr, normed_ptr, h_ptr, M, x_stride, beside_stride, eps, offset,
    E: tl.constexpr, EP: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr,
    J: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, RENORMALIZE: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROUTERS: tl.constexpr = (COLUMNS + BLOCK_E - 1) // BLOCK_E
    if tl.program_id(0) < ROUTERS:
        _router_part(
            x_ptr, norm_ptr, router_ptr, factor_ptr, expert_scale_ptr, logits_ptr, arrived_ptr, weights_ptr,
            experts_ptr, normed_ptr, M, x_stride, eps, offset, E, EP, TOP_K, KP, COLUMNS, H, ROWS, BLOCK_E, BLOCK_H,
            RENORMALIZE, WIDE, PDL,
        )
    else:
        if beside_ptr is not None:
            _beside_part(
                beside_x_ptr, norm_ptr, beside_ptr, beside_scale_ptr, h_ptr, tl.program_id(0) - ROUTERS, M,
                beside_stride, eps, offset, H, J, ROWS, BLOCK_H, BLOCK_N, BLOCK_K, DEPTH, SCALED, GATE, WIDE, PDL,
            )


@kernel
def _gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, experts_ptr, h_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # In this order: the next kernel starts when this one has seen the results of the first, and may read them at once.
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)  # neighbours read the same rows of different experts, or of one: then from the cache
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, 2)[:, None, None]
    row = half * N + n[None, :, None]
    live = (n < N)[None, :, None] & (half >= 0)
    at = w_ptr + expert * (2 * N * K) + (row * K + tl.arange(0, BLOCK_K)[None, None, :])
    blocks = _first_blocks(at, live, K, BLOCK_K, DEPTH)
    if SCALED:
        scale_at = scale_ptr + expert * (2 * N) + n
        gate_scale = tl.load(scale_at, mask=n < N, other=0.0)
        up_scale = tl.load(scale_at + N, mask=n < N, other=0.0)
    x_at = x_ptr + pair // TOP_K * x_stride
    y = _times_rows(blocks, at, live, x_at, None, (), None, 1, x_stride, 0.0, K, 1, BLOCK_K, DEPTH, False, "")
    gate, up = _halves(y[0])
    if SCALED:
        gate = gate * gate_scale
        up = up * up_scale
    tl.store(h_ptr + pair * N + n, (activated(gate, GATE) * up).to(h_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _experts_down(
    h_ptr, w_ptr, scale_ptr, weights_ptr, experts_ptr, token, n,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Σ_j weight[j] · (h[j] W_e[j]ᵀ) of rows n of the chosen experts' weights, float32. Waits for h."""
    j = tl.arange(0, KP)
    k = tl.arange(0, BLOCK_K)
    chosen = j < TOP_K
    # Older than the previous kernel's results (see there). Read past the first-level cache, which may hold what stood
    # there before.
    expert = tl.load(experts_ptr + token * TOP_K + j, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
    weight = tl.load(weights_ptr + token * STRIDE + j, mask=chosen, other=0.0, cache_modifier=".cg")
    at = (w_ptr + expert * (N * K))[None, :, None] + (n[:, None, None] * K + k[None, None, :])
    live = chosen[None, :, None] & (n < N)[:, None, None]
    blocks = _first_blocks(at, live, K, BLOCK_K, DEPTH)
    if SCALED:
        scale_at = (scale_ptr + expert * N)[None, :] + n[:, None]
        scale = tl.load(scale_at, mask=chosen[None, :] & (n < N)[:, None], other=0.0)
    wait_for_previous(PDL)
    PART: tl.constexpr = 128 // blocks[0].dtype.primitive_bitwidth
    h_at = h_ptr + (token * TOP_K + j)[:, None] * K + k[None, :]
    sums = tl.zeros([n.shape[0], KP, BLOCK_K // PART], tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        if (i + DEPTH) * BLOCK_K < K:
            blocks = blocks + (_block(at, live, i + DEPTH, K, BLOCK_K),)  # noqa: RUF005
        inside = chosen[:, None] & (k < K - i * BLOCK_K)[None, :]
        h = tl.load(h_at + i * BLOCK_K, mask=inside, other=0.0).to(tl.float32)
        sums += _within_threads(blocks[i].to(tl.float32) * h[None, :, :], PART)
    y = tl.sum(sums, 2)
    if SCALED:
        y = y * scale
    return tl.sum(tl.where(chosen[None, :], y * weight[None, :], 0.0), 1)


@triton.jit
def _beside_down(
    h_ptr, w_ptr, scale_ptr, M, n, N: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr, DEPTH_J: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The other MLP's second product, rows n of its weight with each row of h: a tuple of [len(n)] float32.

    It comes before the wait, so h is read past the first-level cache.
    """
    at = w_ptr + n[None, :, None] * J + tl.arange(0, BLOCK_J)[None, None, :]
    live = (n < N)[None, :, None]
    blocks = _first_blocks(at, live, J, BLOCK_J, DEPTH_J)
    if SCALED:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    y = _times_rows(blocks, at, live, h_ptr, None, (), None, M, J, 0.0, J, ROWS, BLOCK_J, DEPTH_J, False, ".cg")
    results = ()
    for m in tl.static_range(ROWS):
        of_row = tl.sum(y[m], 0)
        if SCALED:
            of_row = of_row * scale
        results = results + (of_row,)  # noqa: RUF005
    return results


@triton.jit
def _beside_out(
    h_ptr, w_ptr, scale_ptr, out_ptr, M, N: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DEPTH_J: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    y = _beside_down(h_ptr, w_ptr, scale_ptr, M, n, N, J, ROWS, BLOCK_J, DEPTH_J, SCALED)
    wait_for_previous(PDL)
    for m in tl.static_range(ROWS):
        tl.store(out_ptr + m * N + n, y[m].to(out_ptr.dtype.element_ty), mask=(n < N) & (m < M))


@kernel
def _down_kernel(
    h_ptr, w_ptr, scale_ptr, weights_ptr, experts_ptr, beside_h_ptr, beside_ptr, beside_scale_ptr, out_ptr,
    residual_ptr, beside_out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, FACTOR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DEPTH_J: tl.constexpr, SCALED: tl.constexpr, BESIDE_SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The other MLP's h is older than the previous kernel's results, as the choice of experts is. Its result has
    # programs and an output of its own, or (with a factor) is a part of the sum.
    APART: tl.constexpr = 0 if beside_out_ptr is None else (N + BLOCK_O - 1) // BLOCK_O
    if tl.program_id(0) < APART:
        if beside_out_ptr is not None:
            _beside_out(
                beside_h_ptr, beside_ptr, beside_scale_ptr, beside_out_ptr, M, N, J, ROWS, BLOCK_O, BLOCK_J, DEPTH_J,
                BESIDE_SCALED, PDL,
            )
    else:
        BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        STRIDE: tl.constexpr = TOP_K + 1 if FACTOR else TOP_K
        token = (tl.program_id(0) - APART) // BLOCKS
        n = (tl.program_id(0) - APART) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        dtype = out_ptr.dtype.element_ty
        if FACTOR:
            beside = _beside_down(
                beside_h_ptr + token * J, beside_ptr, beside_scale_ptr, 1, n, N, J, 1, BLOCK_J, DEPTH_J, BESIDE_SCALED
            )
            factor = tl.load(weights_ptr + token * STRIDE + TOP_K, cache_modifier=".cg")
        y = _experts_down(
            h_ptr, w_ptr, scale_ptr, weights_ptr, experts_ptr, token, n, N, K, TOP_K, KP, STRIDE, BLOCK_K, DEPTH,
            SCALED, PDL,
        )
        y = y.to(dtype)  # rounded where kernels of their own would round
        if FACTOR:
            y = (y.to(tl.float32) + factor * beside[0].to(dtype).to(tl.float32)).to(dtype)
        at = token * N + n
        if residual_ptr is not None:  # it is the output too: each program adds to its own part
            y = (y.to(tl.float32) + tl.load(residual_ptr + at, mask=n < N, other=0.0).to(tl.float32)).to(dtype)
        tl.store(out_ptr + at, y, mask=n < N)


# -- the way through them ---------------------------------------------------------------------------------------------


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """How many of the router's programs are done: zero between launches, the last one sees to it."""
    return torch.zeros(4, dtype=torch.int32, device=device)


def sparse_block(
    x: torch.Tensor,
    router: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None = None,
    scale2: torch.Tensor | None = None,
    *,
    top_k: int,
    renormalize: bool = True,
    expert_scale: torch.Tensor | None = None,
    gate: str = "silu",
    norm: Norm | None = None,
    for_router: torch.Tensor | None = None,
    beside: Beside | None = None,
    for_beside: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiles: FewTiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H], T up to 4 -> Σ_j weight_j · expert_j(x) [T, H], and the result of an MLP `beside` that has no factor.

    Router [E, H], experts' weights, `renormalize`, `expert_scale`, `gate` and `residual` as in triton_moe. All read x,
    or what is given `for_router` and `for_beside`; with `norm` x is normalised first, and then for all. Rows of inputs
    may be strided.
    """
    (tokens, hidden), num_experts = x.shape, w2.shape[0]
    device, dtype = x.device, x.dtype
    with_factor = beside is not None and beside.factor is not None
    width = 0 if beside is None else beside.down.shape[1]
    if tiles is None:
        tiles = few_tiles(Shape(num_experts, top_k, hidden, w2.shape[2], w2.element_size()), tokens, width)
    of_router, of_beside = x if for_router is None else for_router, x if for_beside is None else for_beside
    assert norm is None or (for_router is None and for_beside is None)
    rows = triton.next_power_of_2(tokens)
    columns = num_experts + with_factor

    logits = torch.empty(tokens, columns, dtype=dtype, device=device)
    weights = torch.empty(tokens, top_k + with_factor, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    normed = None if norm is None else torch.empty(tokens, hidden, dtype=dtype, device=device)
    beside_h = None if beside is None else torch.empty(tokens, width, dtype=dtype, device=device)
    out = torch.empty(tokens, hidden, dtype=dtype, device=device) if residual is None else residual
    assert out.is_contiguous()
    gate_up, gate_up_scale, down, down_scale, factor = (None,) * 5 if beside is None else beside
    apart = torch.empty_like(out) if beside is not None and not with_factor else None

    weight, eps, offset = (None, 0.0, None) if norm is None else norm
    first = tiles.beside_gate_up
    programs = triton.cdiv(columns, tiles.router.block_n)
    if beside is not None:
        programs += triton.cdiv(width, first.block_n)
    _route_kernel(
        (programs,), of_router, weight, router, factor, expert_scale, of_beside, gate_up, gate_up_scale, logits,
        _arrivals(device), weights, experts, normed, beside_h, tokens, of_router.stride(0), of_beside.stride(0), eps,
        offset or 0.0, E=num_experts, EP=triton.next_power_of_2(num_experts), TOP_K=top_k,
        KP=triton.next_power_of_2(top_k), COLUMNS=columns, H=hidden, J=width, ROWS=rows,
        BLOCK_E=tiles.router.block_n, BLOCK_H=tiles.router.block_k, BLOCK_N=first.block_n, BLOCK_K=first.block_k,
        DEPTH=first.depth, RENORMALIZE=renormalize, SCALED=gate_up_scale is not None, GATE=gate,
        WIDE=offset is not None, num_warps=first.warps,
    )  # fmt: skip
    routed = _experts(
        x if normed is None else normed, weights, experts, (w13, w2, scale13, scale2), gate, out, residual, tiles,
        (beside_h, down, down_scale, apart),
    )  # fmt: skip
    return routed, apart


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None,
    scale2: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    tiles: FewTiles | None = None,
) -> torch.Tensor:
    """triton_moe.routed_experts for few tokens: the last two kernels alone."""
    if tiles is None:
        shape = Shape(w2.shape[0], experts.shape[1], w2.shape[1], w2.shape[2], w2.element_size())
        tiles = few_tiles(shape, x.shape[0])
    return _experts(x, weights, experts, (w13, w2, scale13, scale2), gate, out, residual, tiles, (None,) * 4)


def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    gate: str,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    tiles: FewTiles,
    beside: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    (tokens, top_k), (w13, w2, scale13, scale2), (beside_h, down, down_scale, apart) = experts.shape, stacks, beside
    _, hidden, inner = w2.shape
    first, second, third = tiles.gate_up, tiles.down, tiles.beside_down
    h = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel(
        (tokens * top_k, triton.cdiv(inner, first.block_n)), x, w13, scale13, experts, h, x.stride(0),
        N=inner, K=hidden, TOP_K=top_k, BLOCK_N=first.block_n, BLOCK_K=first.block_k, DEPTH=first.depth,
        SCALED=scale13 is not None, GATE=gate, num_warps=first.warps,
    )  # fmt: skip
    programs, rows = tokens * triton.cdiv(hidden, second.block_n), 1
    if apart is not None:
        programs += triton.cdiv(hidden, third.block_n)
        rows = triton.next_power_of_2(tokens)
    _down_kernel(
        (programs,), h, w2, scale2, weights, experts, beside_h, down, down_scale, out, residual, apart, tokens,
        N=hidden, K=inner, J=0 if down is None else down.shape[1], TOP_K=top_k, KP=triton.next_power_of_2(top_k),
        FACTOR=down is not None and apart is None, ROWS=rows, BLOCK_N=second.block_n, BLOCK_K=second.block_k,
        DEPTH=second.depth, BLOCK_O=third.block_n, BLOCK_J=third.block_k, DEPTH_J=third.depth,
        SCALED=scale2 is not None, BESIDE_SCALED=down_scale is not None, num_warps=second.warps,
    )  # fmt: skip
    return out
