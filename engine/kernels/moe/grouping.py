"""Groups the (token, expert) pairs of a step by expert, into blocks of rows for the grouped GEMMs (experts.py)."""

import torch
import triton
import triton.language as tl

from engine.kernels.moe.tiles import chunk_size, max_blocks
from engine.kernels.runtime.launcher import kernel, wait_for_previous

_STEP = tl.constexpr(16)  # pairs, or blocks, that the kernels handle at a time


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
