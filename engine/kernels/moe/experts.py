"""Mixture of experts on a GPU: the choice of experts, and their gated MLPs over all tokens of a step.

Up to VECTOR_TOKENS tokens, each (token, expert) pair reads the expert's weights for itself: see moe.decode.

With more tokens, the pairs are grouped by expert into blocks of rows. A block is multiplied on tensor cores, with the
weight's rows on the tile's wide side, so a block is padded to 16 rows at most. Each pair has its own row of results. A
last kernel weights and sums the k rows of a token, in the order in which its experts were chosen.

Grid sizes depend only on the number of tokens, never on the router's choice: the list of blocks has its maximum length,
and programs without a block return at once. So the host never waits for the device, and CUDA graphs can capture
everything. No atomic additions: the same input gives the same bits.

fp8 weights have a scale for each output of an expert, or for each block of 128 x 128 numbers (moe.group_scaled);
activations are quantised to fp8 before both GEMMs, with a scale per row. On GPUs without fp8 units, and where the
caller wants it, activations stay as they are, and weights are widened on the fly.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.int4_gemv import aligned
from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe import group_scaled, int4
from engine.kernels.moe.tiles import (
    VECTOR_TOKENS,
    DecodeTiles,
    MatrixTiles,
    Tiles,
    chunk_size,
    form_of,
    max_blocks,
    reads_fp8,
    shape_of,
    tiles_for,
)
from engine.kernels.moe.top_k import MOST_EXPERTS, all_experts
from engine.kernels.pointwise.e4m3 import widened
from engine.kernels.pointwise.gate import activated
from engine.kernels.pointwise.quantize import quantize_rows
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous

_STEP = tl.constexpr(16)  # pairs, or blocks, that the grouping kernels handle at a time


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
def _count(experts_ptr, first, P, EP: tl.constexpr, CHUNK: tl.constexpr):
    """How many of the CHUNK pairs from `first` on belong to each expert, [EP]."""
    e = tl.arange(0, EP)[None, :]
    counts = tl.zeros([EP], tl.int32)
    for at in tl.range(0, CHUNK, _STEP):
        i = first + at + tl.arange(0, _STEP)
        expert = tl.load(experts_ptr + i, mask=i < P, other=-1)
        counts += tl.sum((expert[:, None] == e).to(tl.int32), 0)
    return counts


@kernel
def _count_kernel(
    experts_ptr, counts_ptr, P, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    e = tl.arange(0, EP)
    tl.store(counts_ptr + chunk * E + e, _count(experts_ptr, chunk * CHUNK, P, EP, CHUNK), mask=e < E)


@kernel
def _group_kernel(
    experts_ptr, counts_ptr, order_ptr, blocks_ptr, P, chunks, num_blocks, share,
    E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    e = tl.arange(0, EP)
    before = tl.zeros([EP], tl.int32)  # pairs of each expert in the chunks before this one
    if SINGLE:
        total = _count(experts_ptr, 0, P, EP, CHUNK)
    else:
        total = tl.zeros([EP], tl.int32)
        for at in tl.range(0, chunks, _STEP):
            c = at + tl.arange(0, _STEP)
            mask = (c < chunks)[:, None] & (e < E)[None, :]
            counts = tl.load(counts_ptr + c[:, None] * E + e[None, :], mask=mask, other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((c < chunk)[:, None], counts, 0), 0)
    first = tl.cumsum(total, 0) - total

    # Each pair's place: after the pairs of lower experts, then those of earlier chunks, then earlier ones of this
    # chunk.
    all_i = chunk * CHUNK + tl.arange(0, CHUNK)
    all_experts = tl.load(experts_ptr + all_i, mask=all_i < P, other=-1)
    for at in tl.range(0, CHUNK, _STEP):
        i = chunk * CHUNK + at + tl.arange(0, _STEP)
        expert = tl.load(experts_ptr + i, mask=i < P, other=-1)
        earlier = (expert[:, None] == all_experts[None, :]) & (all_i[None, :] < i[:, None])
        place = tl.sum(earlier.to(tl.int32), 1)
        place += tl.sum(tl.where(expert[:, None] == e[None, :], (first + before)[None, :], 0), 1)
        tl.store(order_ptr + place, i, mask=i < P)

    # This program's share of the list of blocks.
    blocks = (total + ROWS - 1) // ROWS
    end = tl.cumsum(blocks, 0)
    for at in tl.range(0, share, _STEP):
        offset = at + tl.arange(0, _STEP)
        b = chunk * share + offset
        expert = tl.sum((end[None, :] <= b[:, None]).to(tl.int32), 1)  # EP for unused blocks
        own = e[None, :] == expert[:, None]
        nth = b - tl.sum(tl.where(own, (end - blocks)[None, :], 0), 1)
        start = tl.sum(tl.where(own, first[None, :], 0), 1) + nth * ROWS
        rows = tl.sum(tl.where(own, total[None, :], 0), 1) - nth * ROWS
        rows = tl.minimum(tl.maximum(rows, 0), ROWS)
        mask = (offset < share) & (b < num_blocks)
        tl.store(blocks_ptr + 3 * b, expert, mask=mask)
        tl.store(blocks_ptr + 3 * b + 1, start, mask=mask)
        tl.store(blocks_ptr + 3 * b + 2, rows, mask=mask)


def group(experts: torch.Tensor, num_experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts [T, k] -> (order [T k], blocks [n, 3]), int32.

    `order` lists the pairs (numbers t * k + j) by expert, in ascending order for each expert. A block is (expert, its
    first place in `order`, number of rows) and holds at most `rows` pairs of one expert; unused blocks, at the end,
    have 0 rows.
    """
    pairs, device = experts.numel(), experts.device
    padded = triton.next_power_of_2(num_experts)
    chunk = chunk_size(pairs)
    chunks = triton.cdiv(pairs, chunk)
    num_blocks = max_blocks(pairs, num_experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=device)
    counts = None
    if chunks > 1:
        counts = torch.empty(chunks, num_experts, dtype=torch.int32, device=device)
        _count_kernel((chunks,), experts, counts, pairs, E=num_experts, EP=padded, CHUNK=chunk, num_warps=4)
    _group_kernel(
        (chunks,), experts, counts, order, blocks, pairs, chunks, num_blocks, triton.cdiv(num_blocks, chunks),
        E=num_experts, EP=padded, CHUNK=chunk, ROWS=rows, SINGLE=chunks == 1, num_warps=4,
    )  # fmt: skip
    return order, blocks


@triton.jit
def _store(at, y, mask, ADD: tl.constexpr):
    """Store y, or with ADD add y to what is there: rounded where a separate addition would round."""
    y = y.to(at.dtype.element_ty)
    if ADD:
        y = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(at, y, mask=mask)


@kernel
def _grouped_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, order_ptr, blocks_ptr, y_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FP8: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    block = blocks_ptr + 3 * tl.program_id(1)
    rows = tl.load(block + 2)
    if rows == 0:
        return
    expert = tl.load(block).to(tl.int64)
    m = tl.arange(0, ROWS)
    pair = tl.load(order_ptr + tl.load(block + 1) + m, mask=m < rows, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_mask = (n < N)[:, None]
    w_at = w_ptr + expert * ((1 if GATE is None else 2) * N * K) + n[:, None] * K + k[None, :]
    # SHARE pairs share a row of x. Rows beyond the end of the block read pair 0's row, and are not stored.
    x_at = x_ptr + (pair // SHARE)[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = acc
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
        acc = tl.dot(w, x, acc)
        if GATE is not None:
            up = tl.dot(u, x, up)
    if FP8:
        x_scale = 1.0
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr + pair // SHARE)[None, :]
        scale_at = scale_ptr + expert * ((1 if GATE is None else 2) * N) + n
        acc = acc * tl.load(scale_at, mask=n < N, other=0.0)[:, None] * x_scale
        if GATE is not None:
            up = up * tl.load(scale_at + N, mask=n < N, other=0.0)[:, None] * x_scale
    if GATE is not None:
        acc = activated(acc, GATE) * up
    tl.store(
        y_ptr + pair[None, :] * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=n_mask & (m < rows)[None, :]
    )


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
    fp8_activations: bool = True,
    tiles: Tiles | DecodeTiles | None = None,
) -> torch.Tensor:
    """x [T, H] (rows may be strided), weights and experts [T, k] from `choose_experts`, w13 [E, 2 I, H] (gate above
    up), w2 [E, H, I] -> [T, H] in x's dtype. fp8 weights have scales: scale13 [E, 2 I] and scale2 [E, H] or, in blocks,
    [E, 2 ⌈I / 128⌉, ⌈H / 128⌉] and [E, ⌈H / 128⌉, ⌈I / 128⌉].

    `gate`: "silu" or "gelu_tanh". With `residual` [T, H], the result is added to it in place, and it is returned.
    `fp8_activations`: those of more than VECTOR_TOKENS tokens are rounded for fp8 weights, if the GPU has fp8 units.
    """
    assert experts.is_contiguous()
    assert weights.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual
    assert out.is_contiguous()
    if x.shape[0] <= VECTOR_TOKENS and not isinstance(tiles, Tiles):
        if scale13 is not None and scale2 is not None and form_of(w2, scale2) == "int4":
            return _few_in_int4(x, weights, experts, (w13, w2), (scale13, scale2), gate, out, residual is not None)
        return moe_decode.routed_experts(x, weights, experts, w13, w2, scale13, scale2, gate, out, residual, tiles)
    gpu = target_of(x.device)
    to_fp8 = fp8_activations and gpu.fp8_units
    if tiles is None:
        shape = shape_of(w2, scale2, experts.shape[1], widened=not to_fp8)
        tiles = tiles_for(shape, x.shape[0], gpu.shared_memory, gpu)
    assert isinstance(tiles, Tiles)
    _grouped(x, weights, experts, w13, w2, scale13, scale2, gate, out, residual is not None, to_fp8, tiles)
    return out


def _few_in_int4(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    gate: str,
    out: torch.Tensor,
    add: bool,
) -> torch.Tensor:
    (w13, w2), (scale13, scale2), top_k = stacks, scales, experts.shape[1]
    _, hidden, half = w2.shape
    h = torch.empty(experts.numel(), 2 * half, dtype=x.dtype, device=x.device)
    y = torch.empty(experts.numel(), hidden, dtype=x.dtype, device=x.device)
    int4.pairs_product(aligned(x), w13, scale13, experts, h, top_k, gate=gate)
    int4.pairs_product(h, w2, scale2, experts, y, 1, gate=None)
    _sum(y, weights, out, add)
    return out


def _sum(y: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    (tokens, top_k), hidden = weights.shape, y.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel(
        (tokens, triton.cdiv(hidden, block)), y, weights, out, hidden, TOP_K=top_k, BLOCK=block, ADD=add, num_warps=4
    )  # fmt: skip


def _grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None,
    scale2: torch.Tensor | None,
    gate: str,
    out: torch.Tensor,
    add: bool,
    to_fp8: bool,
    tiles: Tiles,
) -> None:
    (tokens, top_k), (num_experts, hidden, _) = experts.shape, w2.shape
    pairs, inner = tokens * top_k, w13.shape[1] // 2
    order, blocks = group(experts, num_experts, tiles.rows)
    h = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    first, second = tiles.gate_up, tiles.down
    _product(x, w13, scale13, order, blocks, h, top_k, tiles.rows, first, gate=gate, to_fp8=to_fp8)
    _product(h, w2, scale2, order, blocks, y, 1, tiles.rows, second, gate=None, to_fp8=to_fp8)
    _sum(y, weights, out, add)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    order: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    share: int,
    rows: int,
    tiles: MatrixTiles,
    *,
    gate: str | None,
    to_fp8: bool,
) -> None:
    """out [pairs, N] = each pair's row of x (number pair // share) times its expert's weight, with the gate applied."""
    x_scale, form = None, form_of(weight, scale)
    if scale is not None and form == "int4":
        to_fp8 = to_fp8 and reads_fp8(2 * weight.shape[2] // scale.shape[2])
    if scale is not None and to_fp8:
        x, x_scale = quantize_rows(x)
    if scale is not None and form != "rows":
        product = int4.grouped_product if form == "int4" else group_scaled.grouped_product
        product(x, x_scale, weight, scale, order, blocks, out, share, rows, tiles, gate=gate)
        return
    outputs, inner = out.shape[1], weight.shape[2]
    _grouped_kernel(
        (triton.cdiv(outputs, tiles.block_n), blocks.shape[0]), x, weight, x_scale, scale, order, blocks, out,
        x.stride(0), N=outputs, K=inner, SHARE=share, ROWS=rows, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        FP8=scale is not None, GATE=gate, STAGES=tiles.stages, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
