"""Mixture of experts on a GPU: the choice of experts, and their gated MLPs over all tokens of a step.

Up to VECTOR_TOKENS tokens (int4: more), each (token, expert) pair reads the expert's weights for itself: see
moe.decode and moe.int4.

With more tokens, the pairs are grouped by expert into blocks of rows, and multiplied by moe.grouped_gemm. With 5 to 64,
the router and a dense branch join in: see moe.few_tokens.

Grid sizes depend only on the number of tokens, never on the router's choice: the list of blocks has its maximum length,
and programs without a block return at once. So the host never waits for the device, and CUDA graphs can capture
everything. No atomic additions: the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.gemm.packed.int4_gemv import aligned
from engine.kernels.moe import decode as moe_decode
from engine.kernels.moe import int4
from engine.kernels.moe.grouped_gemm import Groups, Rows, add_up, expert_product
from engine.kernels.moe.tiles import (
    DecodeTiles,
    Tiles,
    by_pairs,
    chunk_size,
    form_of,
    max_blocks,
    shape_of,
    tiles_for,
)
from engine.kernels.moe.top_k import MOST_EXPERTS, all_experts
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous

Zeros = tuple[torch.Tensor | None, torch.Tensor | None]  # zero points of w13 and w2, shaped like their scales

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


def group(experts: torch.Tensor, num_experts: int, rows: int) -> Groups:
    """experts [T, k] -> (order [T k], blocks [n, 3], rows), int32.

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
    return Groups(order, blocks, rows)


def tiles_of(
    w2: torch.Tensor, scale2: torch.Tensor | None, top_k: int, tokens: int, *, fp8_activations: bool = True
) -> Tiles:
    """The tiles that grouped pairs of so many tokens get on this device. w2 [E, H, I]."""
    gpu = target_of(w2.device)
    shape = shape_of(w2, scale2, top_k, widened=not (fp8_activations and gpu.fp8_units))
    return tiles_for(shape, tokens, gpu.shared_memory, gpu)


def routed_experts(
    x: Rows,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    scale13: torch.Tensor | None = None,
    scale2: torch.Tensor | None = None,
    *,
    zeros: Zeros = (None, None),
    gate: str = "silu",
    residual: torch.Tensor | None = None,
    fp8_activations: bool = True,
    tiles: Tiles | DecodeTiles | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, H] (rows may be strided), weights and experts [T, k] from `choose_experts`, w13 [E, 2 I, H] (gate above
    up), w2 [E, H, I] -> [T, H] in x's dtype. fp8 weights have scales: scale13 [E, 2 I] and scale2 [E, H] or, in blocks,
    [E, 2 ⌈I / 128⌉, ⌈H / 128⌉] and [E, ⌈H / 128⌉, ⌈I / 128⌉]. int4 weights: see moe.int4; `zeros` as uint8.

    `gate`: "silu" or "gelu_tanh". With `residual` [T, H], the result is added to it in place, and it is returned.
    `fp8_activations`: those of grouped pairs are rounded for fp8 weights, if the GPU has fp8 units. More than
    VECTOR_TOKENS rows of x may be in fp8 already; `dtype` is then that of the result.
    """
    values = x if isinstance(x, torch.Tensor) else x[0]
    dtype = dtype or values.dtype
    assert experts.is_contiguous()
    assert weights.is_contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=values.device) if residual is None else residual
    assert out.is_contiguous()
    (tokens, top_k), num_experts = experts.shape, w2.shape[0]
    form = form_of(w2, scale2)
    fp8_activations = fp8_activations and zeros == (None, None)
    if tokens <= by_pairs(form) and not isinstance(tiles, Tiles):
        assert isinstance(x, torch.Tensor)
        if scale13 is not None and scale2 is not None and form == "int4":
            stacks, scales, add = (w13, w2), (scale13, scale2), residual is not None
            return _few_in_int4(x, weights, experts, stacks, scales, zeros, gate, out, add)
        return moe_decode.routed_experts(x, weights, experts, w13, w2, scale13, scale2, gate, out, residual, tiles)
    if tiles is None:
        tiles = tiles_of(w2, scale2, top_k, tokens, fp8_activations=fp8_activations)
    assert isinstance(tiles, Tiles)
    groups, options = group(experts, num_experts, tiles.rows), {"dtype": dtype, "fp8_activations": fp8_activations}
    h = expert_product(x, w13, scale13, groups, top_k, tiles.gate_up, gate=gate, zero=zeros[0], **options)
    y = expert_product(h, w2, scale2, groups, 1, tiles.down, gate=None, zero=zeros[1], **options)
    add_up(y, weights, out, top_k, add=residual is not None)
    return out


def _few_in_int4(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    zeros: Zeros,
    gate: str,
    out: torch.Tensor,
    add: bool,
) -> torch.Tensor:
    (w13, w2), (scale13, scale2), top_k = stacks, scales, experts.shape[1]
    _, hidden, half = w2.shape
    h = torch.empty(experts.numel(), 2 * half, dtype=x.dtype, device=x.device)
    y = torch.empty(experts.numel(), hidden, dtype=x.dtype, device=x.device)
    int4.pairs_product(aligned(x), w13, scale13, zeros[0], experts, h, top_k, gate=gate)
    int4.pairs_product(h, w2, scale2, zeros[1], experts, y, 1, gate=None)
    add_up(y, weights, out, top_k, add=add)
    return out
