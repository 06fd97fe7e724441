"""Mixture of experts on a GPU: the choice of experts, and their gated MLPs over all tokens of a step.

Up to VECTOR_TOKENS tokens, each (token, expert) pair reads the expert's weights for itself: see moe.decode.

With more tokens, the pairs are grouped by expert into blocks of rows. A block is multiplied on tensor cores, with the
weight's rows on the tile's wide side, so a block is padded to 16 rows at most. Each pair has its own row of results. A
last kernel weights and sums the k rows of a token, in the order in which its experts were chosen.

Grid sizes depend only on the number of tokens, never on the router's choice: the list of blocks has its maximum length,
and programs without a block return at once. So the host never waits for the device, and CUDA graphs can capture
everything. No atomic additions: the same input gives the same bits.

fp8 weights have a scale for each expert and output channel, and meet fp8 activations. x has a scale for each row. The
gate's result h gets a scale for each pair and each group of columns, the outputs of one program of the gate's kernel,
so that h is quantised without a kernel of its own. The down GEMM multiplies each group's partial product by its scale.
(Large steps are bound by arithmetic, so there h has a scale for each row: moe.tiles.columns_with_a_scale.) On GPUs
without fp8 units activations stay as they are, and weights are widened on the fly.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads, num_warps

from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe.grouping import group
from engine.kernels.moe.tiles import (
    VECTOR_TOKENS,
    DecodeTiles,
    MatrixTiles,
    Shape,
    Tiles,
    columns_with_a_scale,
    tiles_for,
    within_groups,
)
from engine.kernels.moe.top_k import MOST_EXPERTS, all_experts
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.pointwise.gate import activated
from engine.kernels.pointwise.quantize import quantize_rows
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous

FP8 = torch.float8_e4m3fn
_AHEAD = tl.constexpr(256)  # bytes for each output that a program of the down GEMM asks for before it waits


@kernel
def _choose_kernel(
    logits_ptr, scale_ptr, weights_ptr, experts_ptr, logits_stride,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, KP)
    experts, weights = all_experts(logits_ptr + token * logits_stride, scale_ptr, E, EP, K, KP, RENORMALIZE)
    tl.store(weights_ptr + token * K + j, weights, mask=j < K)
    tl.store(experts_ptr + token * K + j, experts, mask=j < K)


def choose_experts(
    logits: torch.Tensor, top_k: int, *, renormalize: bool = True, expert_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] (rows may be strided) -> the k largest softmax weights [T, k] float32, and their experts [T, k]
    int32.

    Among equal weights the lower expert comes first. The weights are divided by their sum (if `renormalize`), then
    multiplied by `expert_scale` [E].
    """
    tokens, num_experts = logits.shape
    assert num_experts <= MOST_EXPERTS
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    _choose_kernel(
        (tokens,), logits, expert_scale, weights, experts, logits.stride(0),
        E=num_experts, EP=triton.next_power_of_2(num_experts), K=top_k, KP=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize, num_warps=1,
    )  # fmt: skip
    return weights, experts


@triton.jit
def _store(at, y, mask, ADD: tl.constexpr):
    """Store y, or with ADD add y to what is there: rounded where a separate addition would round."""
    y = y.to(at.dtype.element_ty)
    if ADD:
        y = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(at, y, mask=mask)


@triton.jit
def _ask_for_rows(w_ptr, before, first, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Bring a part of this program's rows of a weight into the L2 cache. `before`: rows of the experts before its own.

    The programs that start while the previous kernel ends would otherwise leave the memory idle. One thread of each
    warp asks, because a warp's requests are sent one after the other.
    """
    ROW: tl.constexpr = K * w_ptr.dtype.element_ty.primitive_bitwidth // 8
    ROWS: tl.constexpr = _AHEAD * BLOCK_N // ROW
    SHARE: tl.constexpr = ROWS * ROW // num_warps() // 16 * 16
    if ROW % 16 == 0 and SHARE > 0 and ROWS <= N:
        thread = tl.arange(0, num_threads())
        start = (before + tl.minimum(first, N - ROWS)) * ROW
        address = w_ptr.to(tl.int64) + start + thread // 32 * SHARE
        size = tl.where(thread % 32 == 0, SHARE, 0)
        ask: tl.constexpr = """{ .reg .pred p; setp.ne.u32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"""
        tl.inline_asm_elementwise(ask, "=r,l,r", [address, size], tl.int32, False, 1)


@triton.jit
def _store_as_fp8(y, y_at, scale_at, mask):
    """Store y [N, ROWS] as e4m3, with a scale for each column. The scale of zeros is tiny, not 0."""
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-12) / 448.0
    tl.store(scale_at, scale)
    tl.store(y_at, (y * (1.0 / scale)[None, :]).to(tl.float8e4nv), mask=mask)


@kernel
def _grouped_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, order_ptr, blocks_ptr, y_ptr, y_scale_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, X_GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FP8: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """X_GROUP: columns of x that share a scale; 0: x has a scale for each row, or none.

    Scales of groups are [blocks, groups, ROWS], so that a program reads those of its rows side by side."""
    # The gate's kernel waits for the list of blocks before it lets the down GEMM start, so the down GEMM knows its
    # experts before h is complete. Its loads of the list bypass the L1 cache, which may hold older contents.
    if PDL and GATE is not None:
        gdc_wait()
        gdc_launch_dependents()
    block = blocks_ptr + 3 * tl.program_id(1)
    rows = tl.load(block + 2, cache_modifier=".cg")
    if rows == 0:
        if GATE is None:
            wait_for_previous(PDL)
        return
    expert = tl.load(block, cache_modifier=".cg").to(tl.int64)
    m = tl.arange(0, ROWS)
    place = tl.load(block + 1, cache_modifier=".cg") + m
    pair = tl.load(order_ptr + place, mask=m < rows, other=0, cache_modifier=".cg").to(tl.int64)
    if GATE is None:
        if PDL:
            _ask_for_rows(w_ptr, expert * N, tl.program_id(0) * BLOCK_N, N, K, BLOCK_N)
        wait_for_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = (n < N)[:, None]
    w_at = w_ptr + expert * ((1 if GATE is None else 2) * N * K) + n[:, None] * K + k[None, :]
    # SHARE pairs share a row of x. Rows beyond the end of the block read pair 0's row, and are not stored.
    x_at = x_ptr + (pair // SHARE)[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = acc
    if X_GROUP > 0:
        of_groups = x_scale_ptr + tl.program_id(1) * ((K + X_GROUP - 1) // X_GROUP * ROWS) + m
        x_scale = tl.load(of_groups)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K != 0:
            k_live = k < K - at
            x = tl.load(x_at + at, mask=k_live[:, None], other=0.0)
            w = tl.load(w_at + at, mask=n_mask & k_live[None, :], other=0.0)
            if GATE is not None:
                u = tl.load(w_at + N * K + at, mask=n_mask & k_live[None, :], other=0.0)
        else:
            x = tl.load(x_at + at)
            if N % BLOCK_N == 0:
                w = tl.load(w_at + at)
                if GATE is not None:
                    u = tl.load(w_at + N * K + at)
            else:
                w = tl.load(w_at + at, mask=n_mask, other=0.0)
                if GATE is not None:
                    u = tl.load(w_at + N * K + at, mask=n_mask, other=0.0)
        if FP8 and x_scale_ptr is None:
            w = widened(w, x.dtype)
            if GATE is not None:
                u = widened(u, x.dtype)
        if X_GROUP > 0:
            # Requested a step ahead, so that no product waits for its scale.
            after = at + BLOCK_K
            next_scale = tl.load(of_groups + tl.where(after < K, after, 0) // X_GROUP * ROWS)
            acc += tl.dot(w, x) * x_scale[None, :]
            x_scale = next_scale
        else:
            acc = tl.dot(w, x, acc)
            if GATE is not None:
                up = tl.dot(u, x, up)
    if FP8:
        of_x = 1.0
        if x_scale_ptr is not None and X_GROUP == 0:
            of_x = tl.load(x_scale_ptr + pair // SHARE)[None, :]
        scale_at = scale_ptr + expert * ((1 if GATE is None else 2) * N) + n
        acc = acc * tl.load(scale_at, mask=n < N, other=0.0)[:, None] * of_x
        if GATE is not None:
            up = up * tl.load(scale_at + N, mask=n < N, other=0.0)[:, None] * of_x
    if GATE is not None:
        acc = activated(acc, GATE) * up
    mask = n_mask & (m < rows)[None, :]
    y_at = y_ptr + pair[None, :] * N + n[:, None]
    if y_scale_ptr is not None:
        of_block = (tl.program_id(1) * ((N + BLOCK_N - 1) // BLOCK_N) + tl.program_id(0)) * ROWS
        _store_as_fp8(acc, y_at, y_scale_ptr + of_block + m, mask)
    else:
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _sum_kernel(
    y_ptr, weights_ptr, out_ptr, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        y = tl.load(y_ptr + (token * TOP_K + j) * H + h, mask=h < H, other=0.0)
        total += tl.load(weights_ptr + token * TOP_K + j) * y.to(tl.float32)
    _store(out_ptr + token * H + h, total, h < H, ADD)


Scaled = tuple[torch.Tensor, torch.Tensor | None]  # numbers, and their scales if they are fp8


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None = None,
    scale2: torch.Tensor | None = None,
    *,
    gate: str = "silu",
    residual: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiles: Tiles | DecodeTiles | None = None,
) -> torch.Tensor:
    """x [T, H] (rows may be strided), weights and experts [T, k] from `choose_experts`, w13 [E, 2 I, H] (gate above
    up), w2 [E, H, I] -> [T, H] in x's dtype. fp8 weights have scales, scale13 [E, 2 I] and scale2 [E, H].

    `gate`: "silu" or "gelu_tanh". With `residual` [T, H], the result is added to it in place, and it is returned.
    More than VECTOR_TOKENS tokens may be quantised already: x is e4m3 with the scale `x_scale` [T], and the result has
    `dtype`.
    """
    num_experts, hidden, inner = w2.shape
    assert experts.is_contiguous()
    assert weights.is_contiguous()
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device) if residual is None else residual
    assert out.is_contiguous()
    if x.shape[0] <= VECTOR_TOKENS and not isinstance(tiles, Tiles):
        assert x_scale is None
        return moe_decode.routed_experts(x, weights, experts, w13, w2, scale13, scale2, gate, out, residual, tiles)
    if tiles is None:
        gpu = target_of(x.device)
        size = w2.element_size()
        shape = Shape(num_experts, experts.shape[1], hidden, inner, size, size == 1 and not gpu.fp8_units)
        tiles = tiles_for(shape, x.shape[0], gpu.shared_memory, gpu)
    assert isinstance(tiles, Tiles)
    _grouped((x, x_scale), weights, experts, (w13, scale13), (w2, scale2), gate, out, residual is not None, tiles)
    return out


def _grouped(
    x: Scaled,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Scaled,
    down: Scaled,
    gate: str,
    out: torch.Tensor,
    add: bool,
    tiles: Tiles,
) -> None:
    (tokens, top_k), (num_experts, hidden, inner) = experts.shape, down[0].shape
    device, dtype = out.device, out.dtype
    pairs, rows = tokens * top_k, tiles.rows
    first, second = tiles.gate_up, tiles.down
    order, blocks = group(experts, num_experts, rows)
    y = torch.empty(pairs, hidden, dtype=dtype, device=device)
    fp8 = down[1] is not None and target_of(device).fp8_units
    h_scale = None
    h_group = columns_with_a_scale(tiles) if fp8 else 0
    h = torch.empty(pairs, inner, dtype=FP8 if h_group else dtype, device=device)
    if h_group:
        second = within_groups(second, h_group)
        groups = triton.cdiv(inner, h_group)
        h_scale = torch.empty(blocks.shape[0], groups, rows, dtype=torch.float32, device=device)
    if fp8 and x[1] is None:
        x = quantize_rows(x[0])
    listed = order, blocks
    _product(x, gate_up, listed, (h, h_scale), top_k, 0, rows, first, gate=gate)
    if fp8 and not h_group:
        h, h_scale = quantize_rows(h)
    _product((h, h_scale), down, listed, (y, None), 1, h_group, rows, second, gate=None)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel(
        (tokens, triton.cdiv(hidden, block)), y, weights, out, hidden, TOP_K=top_k, BLOCK=block, ADD=add, num_warps=4
    )


def _product(
    x: Scaled,
    weight: Scaled,
    listed: tuple[torch.Tensor, torch.Tensor],
    out: Scaled,
    share: int,
    x_group: int,
    rows: int,
    tiles: MatrixTiles,
    *,
    gate: str | None,
) -> None:
    """out [pairs, N] = each pair's row of x (number pair // share) times its expert's weight, with the gate applied.
    `listed`: the result of `group`."""
    order, blocks = listed
    (values, x_scale), (w, scale), (y, y_scale) = x, weight, out
    outputs, inner = y.shape[1], w.shape[2]
    _grouped_kernel(
        (triton.cdiv(outputs, tiles.block_n), blocks.shape[0]), values, w, x_scale, scale, order, blocks, y, y_scale,
        values.stride(0), N=outputs, K=inner, SHARE=share, X_GROUP=x_group, ROWS=rows, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, FP8=scale is not None, GATE=gate, STAGES=tiles.stages, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
