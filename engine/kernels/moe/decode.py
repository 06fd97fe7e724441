"""A sparse block for one to four tokens, in three kernels. A step of one sequence is bound by reading weights, and
every additional kernel costs as much as reading ten megabytes of them.

    route    norm, router, choice of experts;  in parallel, gate and up GEMMs of the dense branch
    gate_up  gate and up GEMMs of the chosen experts
    down     down GEMMs of both, weighted and summed, added to the residual

The dense branch is an MLP that every token goes through: Qwen3.5's shared expert (multiplied by a sigmoid, then part of
the sum) or Gemma 4's dense MLP (a separate result). Some models have none.

The last of the router's programs to finish chooses the experts (moe.top_k) while the others work on the dense branch;
repeating the choice in every program that needs it would be slower. `down` knows the experts before `gate_up` is done,
so it can load their weights ahead.

The GEMMs stream weights (gemm.weight_stream), in 16 bits or in fp8 with a scale for each output or for each block of
numbers. There are no atomic additions, and no token's result depends on another
token.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.weight_stream import (
    block,
    first_blocks,
    first_scales,
    halves,
    of_parts,
    scales_at,
    scales_of_block,
    times_rows,
    within_threads,
)
from engine.kernels.moe.router import route_kernel
from engine.kernels.moe.tiles import SCALE_BLOCK, DecodeTiles, decode_tiles, shape_of
from engine.kernels.moe.top_k import MOST_EXPERTS
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.pointwise.gate import activated
from engine.kernels.runtime.counters import counters
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous, wait_in_order


class DenseBranch(NamedTuple):
    """The weights of an MLP that every token goes through in parallel with its experts."""

    gate_up: torch.Tensor  # [2 J, H], gate above up
    gate_up_scale: torch.Tensor | None  # of fp8 weights: [2 J], or [2 J / 128, H / 128] of blocks
    down: torch.Tensor  # [H, J]
    down_scale: torch.Tensor | None  # [H], or [H / 128, J / 128]
    factor: torch.Tensor | None = None  # [1, H]: scales the branch by sigmoid(x factorᵀ); None: a separate result


class Norm(NamedTuple):
    """An RMS norm that the kernel has yet to apply; `offset` as in pointwise.norm.rms_norm."""

    weight: torch.Tensor  # [H]
    eps: float
    offset: float | None


@kernel
def _gate_up_kernel(
    x_ptr, w_ptr, scale_ptr, experts_ptr, h_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_in_order(PDL)  # so that `down` may read the results of `route` before it waits
    pair = tl.program_id(0)  # neighbours take the same rows; if of the same expert, from the cache
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, 2)[:, None, None]
    row = half * N + n[None, :, None]
    live = (n < N)[None, :, None] & (half >= 0)
    at = w_ptr + expert * (2 * N * K) + (row * K + tl.arange(0, BLOCK_K)[None, None, :])
    blocks = first_blocks(at, live, K, BLOCK_K, DEPTH)
    scale_at = scale_ptr
    if SCALED:
        rows_at = scale_ptr + expert * (2 * N) + n
        gate_scale = tl.load(rows_at, mask=n < N, other=0.0)
        up_scale = tl.load(rows_at + N, mask=n < N, other=0.0)
    if GROUP > 0:
        scale_at = scale_ptr + expert * (2 * ((N + GROUP - 1) // GROUP) * ((K + GROUP - 1) // GROUP))
        scale_at = scales_at(scale_at, tl.program_id(1) * BLOCK_N, K, GROUP)
    scales = first_scales(scale_at, 2, N, K, BLOCK_K, DEPTH, GROUP)
    if GROUP > 0:
        tl.debug_barrier()  # else the assembler puts loads off, to save registers that this kernel has
    x_at = x_ptr + pair // TOP_K * x_stride
    y = times_rows(
        blocks, at, live, scales, scale_at, x_at, None, 1, x_stride, 0.0, 0.0, N, K, 1, BLOCK_K, DEPTH, GROUP, ""
    )
    gate, up = halves(y[0])
    if SCALED:
        gate = gate * gate_scale
        up = up * up_scale
    tl.store(h_ptr + pair * N + n, (activated(gate, GATE) * up).to(h_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _experts_down(
    h_ptr, w_ptr, scale_ptr, weights_ptr, experts_ptr, token, first,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Σ_j weight[j] · (h[j] W_e[j]ᵀ) for BLOCK_N rows, from `first` on, of the chosen experts' weights; float32. Waits
    for h."""
    n = first + tl.arange(0, BLOCK_N)
    j = tl.arange(0, KP)
    k = tl.arange(0, BLOCK_K)
    chosen = j < TOP_K
    # The choice of experts comes from `route` and is complete already (see `gate_up`). The load bypasses the L1 cache,
    # which may still hold older contents of this memory.
    expert = tl.load(experts_ptr + token * TOP_K + j, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
    weight = tl.load(weights_ptr + token * STRIDE + j, mask=chosen, other=0.0, cache_modifier=".cg")
    at = (w_ptr + expert * (N * K))[None, :, None] + (n[:, None, None] * K + k[None, None, :])
    live = chosen[None, :, None] & (n < N)[:, None, None]
    blocks = first_blocks(at, live, K, BLOCK_K, DEPTH)
    scale_at = scale_ptr
    if SCALED:
        rows_at = (scale_ptr + expert * N)[None, :] + n[:, None]
        scale = tl.load(rows_at, mask=chosen[None, :] & (n < N)[:, None], other=0.0)
    if GROUP > 0:
        scale_at = scale_ptr + expert * (((N + GROUP - 1) // GROUP) * ((K + GROUP - 1) // GROUP))
        scale_at = scales_at(scale_at, first, K, GROUP)[None, :, None]
    scales = first_scales(scale_at, 1, N, K, BLOCK_K, DEPTH, GROUP)
    wait_for_previous(PDL)
    PART: tl.constexpr = 128 // blocks[0].dtype.primitive_bitwidth
    h_at = h_ptr + (token * TOP_K + j)[:, None] * K + k[None, :]
    sums = tl.zeros([n.shape[0], KP, BLOCK_K // PART], tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        if (i + DEPTH) * BLOCK_K < K:
            blocks = blocks + (block(at, live, i + DEPTH, K, BLOCK_K),)  # noqa: RUF005
            if GROUP > 0:
                scales = scales + scales_of_block(scale_at, i + DEPTH, 1, N, K, BLOCK_K, GROUP)
        inside = chosen[:, None] & (k < K - i * BLOCK_K)[None, :]
        h = tl.load(h_at + i * BLOCK_K, mask=inside, other=0.0).to(tl.float32)
        product = within_threads(widened(blocks[i], tl.float32) * h[None, :, :], PART)
        if GROUP > 0:
            product = product * of_parts(scales, i, 1, BLOCK_K, PART, GROUP)
        sums += product
    y = tl.sum(sums, 2)
    if SCALED:
        y = y * scale
    return tl.sum(tl.where(chosen[None, :], y * weight[None, :], 0.0), 1)


@triton.jit
def _dense_down(
    h_ptr, w_ptr, scale_ptr, M, first, N: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DEPTH_J: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The dense branch's down GEMM, BLOCK_O rows of its weight from `first` on, with each row of h: a tuple of
    [BLOCK_O] float32.

    It runs before the wait for the previous kernel, so loads of h bypass the L1 cache.
    """
    n = first + tl.arange(0, BLOCK_O)
    at = w_ptr + n[None, :, None] * J + tl.arange(0, BLOCK_J)[None, None, :]
    live = (n < N)[None, :, None]
    blocks = first_blocks(at, live, J, BLOCK_J, DEPTH_J)
    if SCALED:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    scale_at = scales_at(scale_ptr, first, J, GROUP)
    scales = first_scales(scale_at, 1, N, J, BLOCK_J, DEPTH_J, GROUP)
    y = times_rows(
        blocks, at, live, scales, scale_at, h_ptr, None, M, J, 0.0, 0.0, N, J, ROWS, BLOCK_J, DEPTH_J, GROUP, ".cg"
    )
    results = ()
    for m in tl.static_range(ROWS):
        of_row = tl.sum(y[m], 0)
        if SCALED:
            of_row = of_row * scale
        results = results + (of_row,)  # noqa: RUF005
    return results


@triton.jit
def _dense_out(
    h_ptr, w_ptr, scale_ptr, out_ptr, M, N: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DEPTH_J: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_O
    n = first + tl.arange(0, BLOCK_O)
    y = _dense_down(h_ptr, w_ptr, scale_ptr, M, first, N, J, ROWS, BLOCK_O, BLOCK_J, DEPTH_J, SCALED, GROUP)
    wait_for_previous(PDL)
    for m in tl.static_range(ROWS):
        tl.store(out_ptr + m * N + n, y[m].to(out_ptr.dtype.element_ty), mask=(n < N) & (m < M))


@kernel
def _down_kernel(
    h_ptr, w_ptr, scale_ptr, weights_ptr, experts_ptr, dense_h_ptr, dense_ptr, dense_scale_ptr, out_ptr,
    residual_ptr, dense_out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, FACTOR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr, DEPTH_J: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    DENSE_SCALED: tl.constexpr, DENSE_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The dense branch's h, like the choice of experts, comes from `route` and is complete already. With a factor its
    # result is part of the sum; else it has programs and an output of its own.
    APART: tl.constexpr = 0 if dense_out_ptr is None else (N + BLOCK_O - 1) // BLOCK_O
    if tl.program_id(0) < APART:
        if dense_out_ptr is not None:
            _dense_out(
                dense_h_ptr, dense_ptr, dense_scale_ptr, dense_out_ptr, M, N, J, ROWS, BLOCK_O, BLOCK_J, DEPTH_J,
                DENSE_SCALED, DENSE_GROUP, PDL,
            )
    else:
        BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        STRIDE: tl.constexpr = TOP_K + 1 if FACTOR else TOP_K
        token = (tl.program_id(0) - APART) // BLOCKS
        first = (tl.program_id(0) - APART) % BLOCKS * BLOCK_N
        n = first + tl.arange(0, BLOCK_N)
        dtype = out_ptr.dtype.element_ty
        if FACTOR:
            dense = _dense_down(
                dense_h_ptr + token * J, dense_ptr, dense_scale_ptr, 1, first, N, J, 1, BLOCK_N, BLOCK_J, DEPTH_J,
                DENSE_SCALED, DENSE_GROUP,
            )
            factor = tl.load(weights_ptr + token * STRIDE + TOP_K, cache_modifier=".cg")
        y = _experts_down(
            h_ptr, w_ptr, scale_ptr, weights_ptr, experts_ptr, token, first, N, K, TOP_K, KP, STRIDE, BLOCK_N, BLOCK_K,
            DEPTH, SCALED, GROUP, PDL,
        )
        y = y.to(dtype)  # rounded where separate kernels would round
        if FACTOR:
            y = (y.to(tl.float32) + factor * dense[0].to(dtype).to(tl.float32)).to(dtype)
        at = token * N + n
        if residual_ptr is not None:  # the residual is also the output: each program adds to its own part
            y = (y.to(tl.float32) + tl.load(residual_ptr + at, mask=n < N, other=0.0).to(tl.float32)).to(dtype)
        tl.store(out_ptr + at, y, mask=n < N)


# -- launching them ---------------------------------------------------------------------------------------------------


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Counter of the router's finished programs. The last one resets it, so it is zero between launches."""
    return counters(device, 4)


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
    dense: DenseBranch | None = None,
    for_dense: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiles: DecodeTiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H], T up to 4 -> Σ_j weight_j · expert_j(x) [T, H], and the result of the branch `dense` if it has no
    factor.

    Router [E, H], experts' weights, `renormalize`, `expert_scale`, `gate` and `residual` as in moe.experts.
    `for_router` and `for_dense` replace x as the input of the router and of the dense branch. With `norm`, x is
    normalised first, for all of them. Rows of inputs may be strided.
    """
    (tokens, hidden), num_experts = x.shape, w2.shape[0]
    device, dtype = x.device, x.dtype
    with_factor = dense is not None and dense.factor is not None
    width = 0 if dense is None else dense.down.shape[1]
    if tiles is None:
        shape = shape_of(w2, scale2, top_k)
        tiles = decode_tiles(shape, tokens, width, target_of(device))
    of_router, of_beside = x if for_router is None else for_router, x if for_dense is None else for_dense
    assert norm is None or (for_router is None and for_dense is None)
    assert num_experts <= MOST_EXPERTS
    rows = triton.next_power_of_2(tokens)
    columns = num_experts + with_factor

    logits = torch.empty(tokens, columns, dtype=dtype, device=device)
    weights = torch.empty(tokens, top_k + with_factor, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    normed = None if norm is None else torch.empty(tokens, hidden, dtype=dtype, device=device)
    dense_h = None if dense is None else torch.empty(tokens, width, dtype=dtype, device=device)
    out = torch.empty(tokens, hidden, dtype=dtype, device=device) if residual is None else residual
    assert out.is_contiguous()
    gate_up, gate_up_scale, down, down_scale, factor = (None,) * 5 if dense is None else dense
    apart = torch.empty_like(out) if dense is not None and not with_factor else None

    weight, eps, offset = (None, 0.0, None) if norm is None else norm
    first = tiles.dense_gate_up
    programs = triton.cdiv(columns, tiles.router.block_n) + (normed is not None)
    if dense is not None:
        programs += triton.cdiv(width, first.block_n)
    route_kernel(
        (programs,), of_router, weight, router, factor, expert_scale, of_beside, gate_up, gate_up_scale, logits,
        arrivals(device), weights, experts, normed, dense_h, tokens, of_router.stride(0), of_beside.stride(0), eps,
        offset or 0.0, E=num_experts, EP=triton.next_power_of_2(num_experts), TOP_K=top_k,
        KP=triton.next_power_of_2(top_k), COLUMNS=columns, H=hidden, HP=triton.next_power_of_2(hidden), J=width,
        ROWS=rows, BLOCK_E=tiles.router.block_n, BLOCK_H=tiles.router.block_k, BLOCK_N=first.block_n,
        BLOCK_K=first.block_k, DEPTH=first.depth, RENORMALIZE=renormalize, **_scaled(gate_up_scale, 2), GATE=gate,
        num_warps=first.warps,
    )  # fmt: skip
    routed = _experts(
        x if normed is None else normed, weights, experts, (w13, w2, scale13, scale2), gate, out, residual, tiles,
        (dense_h, down, down_scale, apart),
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
    tiles: DecodeTiles | None = None,
) -> torch.Tensor:
    """moe.experts.routed_experts for few tokens: only the last two kernels."""
    if tiles is None:
        shape = shape_of(w2, scale2, experts.shape[1])
        tiles = decode_tiles(shape, x.shape[0], 0, target_of(x.device))
    return _experts(x, weights, experts, (w13, w2, scale13, scale2), gate, out, residual, tiles, (None,) * 4)


def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    gate: str,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    tiles: DecodeTiles,
    dense: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    (tokens, top_k), (w13, w2, scale13, scale2), (dense_h, down, down_scale, apart) = experts.shape, stacks, dense
    _, hidden, inner = w2.shape
    first, second, third = tiles.gate_up, tiles.down, tiles.dense_down
    h = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel(
        (tokens * top_k, triton.cdiv(inner, first.block_n)), x, w13, scale13, experts, h, x.stride(0),
        N=inner, K=hidden, TOP_K=top_k, BLOCK_N=first.block_n, BLOCK_K=first.block_k, DEPTH=first.depth,
        **_scaled(scale13, 3), GATE=gate, num_warps=first.warps,
    )  # fmt: skip
    programs, rows = tokens * triton.cdiv(hidden, second.block_n), 1
    if apart is not None:
        programs += triton.cdiv(hidden, third.block_n)
        rows = triton.next_power_of_2(tokens)
    _down_kernel(
        (programs,), h, w2, scale2, weights, experts, dense_h, down, down_scale, out, residual, apart, tokens,
        N=hidden, K=inner, J=0 if down is None else down.shape[1], TOP_K=top_k, KP=triton.next_power_of_2(top_k),
        FACTOR=down is not None and apart is None, ROWS=rows, BLOCK_N=second.block_n, BLOCK_K=second.block_k,
        DEPTH=second.depth, BLOCK_O=third.block_n, BLOCK_J=third.block_k, DEPTH_J=third.depth,
        **_scaled(scale2, 3), **{f"DENSE_{name}": value for name, value in _scaled(down_scale, 2).items()},
        num_warps=second.warps,
    )  # fmt: skip
    return out


def _scaled(scale: torch.Tensor | None, dim: int) -> dict[str, Any]:
    """Constants of a kernel that multiplies a weight of `dim` dimensions with these scales."""
    in_blocks = scale is not None and scale.dim() == dim
    return {"SCALED": scale is not None and not in_blocks, "GROUP": SCALE_BLOCK if in_blocks else 0}
