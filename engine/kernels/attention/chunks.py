"""Paged attention of chunks of any length on the GPU, in one launch, over the pages of attention.pages.

Grid (tiles, Hkv, D / DV SPLITS). The host lists the tiles of BLOCK_Q query tokens. A tile holds BLOCK_Q * G query
rows, those of all G = Hq / Hkv heads that share a key head (FlashAttention-2, Dao 2023, arXiv:2307.08691), padded to a
power of two. Keys before the chunk come from the pages. The chunk's own keys come straight from the projection: in full
precision, and contiguous. A sequence with one token in a mixed step takes a path with few rows; pure decode steps use
attention.decode.

A short chunk behind a long context has too few tiles for the multiprocessors, and each would read all of the context.
So SPLITS programs share a tile: each attends to a slice of the cached keys, the last of them to the chunk's own as
well, and whoever is done last merges their results by log-sum-exp, as in attention.decode.

The registers of a multiprocessor do not hold 128 outputs of 512 numbers, and with 64 the keys are read too often. So
programs for such heads share a tile: each computes all scores, and DV numbers of the outputs.
"""

import functools

import torch
import triton
import triton.language as tl

from engine.kernels.attention.pages import (
    attend,
    attend_cached,
    for_cache,
    page_tile,
    pages_of,
    tile_scales,
    whole_scale,
)
from engine.kernels.pointwise.kv_format import KvScale, is_fp8
from engine.kernels.runtime.counters import counters
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous

LARGEST_OUTPUT = 256  # numbers of an output that a program computes
SLICES = 8            # of a tile's cached keys, where a step has few tiles
SHORTEST_SLICE = 1024  # keys
_WORTH_SLICES = 0.7   # of the time that whole tiles take
_MERGED_ROWS = 16     # at a time


@kernel
def _mixed_kernel(
    q_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, arrived_ptr, tile_ptr, rows_ptr, starts_ptr,
    q_starts_ptr, counts_ptr, table_ptr, q_stride, own_stride, k_stride_page, k_stride_token, k_stride_head,
    table_stride, scale, k_scale, v_scale, softcap, window,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SHORTEST: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    tile, h = tl.program_id(0), tl.program_id(1)
    values, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    seq = tl.load(tile_ptr + tile * 2)
    first_q = tl.load(tile_ptr + tile * 2 + 1)  # index of the tile's first token within the chunk
    start = tl.load(starts_ptr + seq)
    q_start = tl.load(q_starts_ptr + seq).to(tl.int64)
    count = tl.load(counts_ptr + seq)
    if first_q >= count:
        return
    table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    d = tl.arange(0, DP)
    first_v = values * DV
    dv = first_v + tl.arange(0, DV)
    if count == 1:  # a decoding sequence: few query rows, and its own key is in the cache as well
        if split > 0:
            return
        g = tl.arange(0, GP)
        at_row = (h * G + g)[:, None] * D
        q_mask = (g < G)[:, None] & (d < D)[None, :]
        q = for_cache(tl.load(q_ptr + q_start * q_stride + at_row + d[None, :], mask=q_mask, other=0.0), FP8)
        m = tl.full([GP], -float("inf"), tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, DV], tl.float32)
        first = 0
        if WINDOW:
            first = tl.maximum(start + 1 - window, 0)
        pages = pages_of(table, first // TILE * TILE, first, start + 1, PAGE, TILE)
        for at in range(first // TILE * TILE, start + 1, TILE):
            k, v, live = page_tile(
                k_ptr, v_ptr, pages, at, first, start + 1, h, k_stride_page, k_stride_token, k_stride_head,
                D, DP, PAGE, TILE, first_v, DV,
            )  # fmt: skip
            of_k, of_v = tile_scales(
                k, k_scale, v_scale, pages, at, first, start + 1, h, k_stride_page, k_stride_token, k_stride_head,
                D, PAGE, TILE,
            )  # fmt: skip
            pages = pages_of(table, at + TILE, first, start + 1, PAGE, TILE)
            m, total, acc = attend_cached(q, k, v, of_k, of_v, m, total, acc, live[None, :], scale, softcap, SOFTCAP)
        out = acc * whole_scale(v_ptr, v_scale) / total[:, None]
        out_mask = (g < G)[:, None] & (dv < D)[None, :]
        at_out = q_start * (HKV * G * D) + at_row + dv[None, :]
        tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        return
    m_index = tl.arange(0, BLOCK_M)
    token_q = first_q + m_index // G
    at_head = (h * G + m_index % G)[:, None] * D
    row_mask = ((m_index < BLOCK_Q * G) & (token_q < count))[:, None]
    at_q = (q_start + token_q)[:, None]
    q_at = q_ptr + at_q * q_stride + at_head + d[None, :]
    q = tl.load(q_at, mask=row_mask & (d < D)[None, :], other=0.0)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    n = tl.arange(0, TILE)
    # Keys before the chunk, from the pages.
    first = 0
    if WINDOW:
        first = tl.maximum(start + first_q + 1 - window, 0)
    begin, end = first // TILE * TILE, start
    used = 1  # slices that are not empty
    if SPLITS > 1:
        each = tl.maximum(tl.cdiv(tl.cdiv(start - begin, TILE), SPLITS) * TILE, SHORTEST)
        used = tl.maximum(tl.cdiv(start - begin, each), 1)
        if split >= used:
            return
        begin += split * each
        end = tl.minimum(begin + each, start)
    cached_q = for_cache(q, FP8)
    pages = pages_of(table, begin, first, end, PAGE, TILE)
    for at in range(begin, end, TILE):
        k, v, live = page_tile(
            k_ptr, v_ptr, pages, at, first, start, h, k_stride_page, k_stride_token, k_stride_head, D, DP, PAGE, TILE,
            first_v, DV,
        )  # fmt: skip
        of_k, of_v = tile_scales(
            k, k_scale, v_scale, pages, at, first, start, h, k_stride_page, k_stride_token, k_stride_head, D, PAGE, TILE
        )
        pages = pages_of(table, at + TILE, first, start, PAGE, TILE)
        visible = live[None, :]
        if WINDOW:
            visible = visible & ((at + n)[None, :] > (start + token_q)[:, None] - window)
        m, total, acc = attend_cached(cached_q, k, v, of_k, of_v, m, total, acc, visible, scale, softcap, SOFTCAP)
    acc = acc * whole_scale(v_ptr, v_scale)
    if FP8 and DV < DP:  # read again: both forms of q at once would need twice the shared memory
        q = tl.load(q_at, mask=row_mask & (d < D)[None, :], other=0.0, volatile=True)
    # The chunk's own keys, from the projection. Between the window's edge and the tile's own tokens every query sees
    # every key: no mask.
    k_new = k_new_ptr + q_start * own_stride + h * D
    v_new = v_new_ptr + q_start * own_stride + h * D
    begin = 0
    diagonal = (first_q + 1) // TILE * TILE
    stop = tl.minimum(first_q + BLOCK_Q, count)
    if SPLITS > 1:  # noqa: SIM102 - decided when the kernel is compiled, the next one when it runs
        if split < used - 1:
            diagonal, stop = 0, 0
    if WINDOW:
        begin = tl.maximum(first_q + 1 - window, 0) // TILE * TILE
        whole = tl.cdiv(tl.maximum(first_q + BLOCK_Q - window, 0), TILE) * TILE  # from here on the last query sees all
        whole = tl.minimum(whole, diagonal)
        for at in range(begin, whole, TILE):
            m, total, acc = _attend_own(
                q, k_new, v_new, at, token_q, count, own_stride, window, m, total, acc, scale, softcap,
                first_v, D, DP, DV, TILE, True, SOFTCAP, WINDOW,
            )  # fmt: skip
        begin = whole
    for at in range(begin, diagonal, TILE):
        m, total, acc = _attend_own(
            q, k_new, v_new, at, token_q, count, own_stride, window, m, total, acc, scale, softcap,
            first_v, D, DP, DV, TILE, False, SOFTCAP, WINDOW,
        )  # fmt: skip
    for at in range(diagonal, stop, TILE):
        m, total, acc = _attend_own(
            q, k_new, v_new, at, token_q, count, own_stride, window, m, total, acc, scale, softcap,
            first_v, D, DP, DV, TILE, True, SOFTCAP, WINDOW,
        )  # fmt: skip
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    if SPLITS > 1:  # noqa: SIM102
        if used > 1:
            unit = (tile * HKV + h) * (DP // DV) + values
            first_row = (unit * SPLITS + split).to(tl.int64) * BLOCK_M
            mine = m_index[:, None] * DV + tl.arange(0, DV)[None, :]
            tl.store(part_ptr + first_row * DV + mine, out, mask=row_mask)
            tl.store(lse_ptr + first_row + m_index, m + tl.log2(total))
            tl.debug_barrier()  # every thread has written its part before the program announces that it is done
            arrived = tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel")
            if arrived == used - 1:
                _merge(
                    part_ptr, lse_ptr, out_ptr, unit, used, q_start, first_q, count, h, first_v,
                    HKV, G, D, DV, BLOCK_Q, BLOCK_M, SPLITS, ROWS,
                )  # fmt: skip
                tl.store(arrived_ptr + unit, 0)
            return
    at_out = at_q * (HKV * G * D) + at_head + dv[None, :]
    tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=row_mask & (dv < D)[None, :])


@triton.jit
def _merge(
    part_ptr, lse_ptr, out_ptr, unit, used, q_start, first_q, count, h, first_v,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of a tile's slices, weighted by their log-sum-exp, always in the same order."""
    s = tl.arange(0, SPLITS)
    v = tl.arange(0, DV)
    for at in range(0, BLOCK_M, ROWS):
        row = at + tl.arange(0, ROWS)
        token = first_q + row // G
        mask = ((row < BLOCK_Q * G) & (token < count))[:, None]
        first = unit.to(tl.int64) * SPLITS * BLOCK_M + row  # of the first slice's rows
        at_lse = first[:, None] + s[None, :] * BLOCK_M
        lse = tl.load(lse_ptr + at_lse, mask=mask & (s < used)[None, :], other=-float("inf"))
        top = tl.max(lse, 1)
        weight = tl.exp2(lse - tl.where(top == -float("inf"), 0.0, top)[:, None])
        sums = tl.sum(weight, 1)
        weight = weight / tl.where(sums == 0, 1.0, sums)[:, None]
        acc = tl.zeros([ROWS, DV], tl.float32)
        for i in tl.static_range(SPLITS):  # unrolled, so that the loads are in flight together
            at_part = (first + i * BLOCK_M)[:, None] * DV + v[None, :]
            part = tl.load(part_ptr + at_part, mask=mask & (i < used), other=0.0)
            acc += part * tl.sum(tl.where((s == i)[None, :], weight, 0.0), 1)[:, None]
        at_out = (q_start + token)[:, None] * (HKV * G * D) + (h * G + row % G)[:, None] * D + (first_v + v)[None, :]
        tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=mask & (first_v + v < D)[None, :])


@triton.jit
def _attend_own(
    q, k_new, v_new, at, token_q, count, own_stride, window, m, total, acc, scale, softcap, first_v,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend to the chunk's own keys from `at` on. Without MASKED, all of them exist and every query sees them."""
    n = at + tl.arange(0, TILE)
    d = tl.arange(0, DP)
    dv = first_v + tl.arange(0, DV)
    token = n * own_stride
    live = n < count
    visible = True
    if MASKED:
        k = tl.load(k_new + token[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_new + token[:, None] + dv[None, :], mask=live[:, None] & (dv < D)[None, :], other=0.0)
        visible = n[None, :] <= token_q[:, None]
        if WINDOW:
            visible = visible & (n[None, :] > token_q[:, None] - window)
    elif D == DP:
        k = tl.load(k_new + token[None, :] + d[:, None])
        v = tl.load(v_new + token[:, None] + dv[None, :])
    else:
        k = tl.load(k_new + token[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_new + token[:, None] + dv[None, :], mask=(dv < D)[None, :], other=0.0)
    return attend(q, k, v, m, total, acc, visible, scale, softcap, MASKED, SOFTCAP)


def _mixed_tiles(
    block_m: int, padded_dim: int, values: int, shared: int, *, fp8: bool = False, fp8_units: bool = True,
    int8: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Keys per iteration and pipeline depth that fit into `shared` bytes beside the queries (which, with an fp8 cache,
    are held in two dtypes, unless programs share the tile). Each stage takes one tile of keys and one of `values`
    numbers of each value. GPUs without e4m3 instructions run out of registers with 64 keys, and all GPUs with wide
    heads and keys in int8."""
    wanted = ((64, 3), (64, 2), (32, 2), (16, 2)) if fp8_units or not fp8 else ((32, 3), (32, 2), (16, 2))
    if values < padded_dim and not fp8 and not int8:  # with fewer keys, reading the queries again takes longer
        wanted = ((64, 1), *wanted)
    if int8 and padded_dim > 256:
        wanted = ((16, 2),)
    queries = padded_dim * block_m * (2 if fp8 and values == padded_dim else 1)
    for tile, stages in wanted:
        if 2 * (queries + (padded_dim + values) * stages * tile) <= shared:
            return tile, stages
    return 16, 1


def num_slices(
    tokens: int, block_q: int, num_kv_heads: int, dim: int, multiprocessors: int, device: torch.device
) -> int:
    """SLICES for a step of `tokens` tokens if that keeps more multiprocessors busy, else 1. Chosen by what a captured
    graph has room for, not by lengths: a slice that stays empty costs one load."""
    gpu = target_of(device)
    values = LARGEST_OUTPUT if _shares_tiles(dim, gpu) else triton.next_power_of_2(dim)
    programs = triton.cdiv(tokens, block_q) * num_kv_heads * triton.cdiv(dim, values)
    whole, sliced = (triton.cdiv(programs * n, multiprocessors) / n for n in (1, SLICES))
    return SLICES if sliced <= _WORTH_SLICES * whole else 1


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters of finished slices, one for each tile, key head and part of the outputs. The last program resets its
    counter to zero. Steps with slices have fewer tiles than that (`num_slices`)."""
    return counters(device, 1 << 13)


def query_rows(dim: int, device: torch.device) -> int:
    """Query rows (tokens times heads that share a key head) in a tile of `mixed`: as many as a multiprocessor holds."""
    return _query_rows(dim, target_of(device))


def _query_rows(dim: int, gpu: Target) -> int:
    if dim <= 128 or _shares_tiles(dim, gpu):
        return 128
    if dim <= 256:
        return 128 if gpu.large_shared else 64
    return 64 if gpu.large_shared else 16


def _shares_tiles(dim: int, gpu: Target) -> bool:
    """Whether several programs share a tile, each with LARGEST_OUTPUT numbers of the outputs."""
    return dim > LARGEST_OUTPUT and gpu.large_shared and gpu.wgmma


def mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    q_starts: torch.Tensor,
    counts: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    block_q: int,
    scale: float,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
    shortest: int = SHORTEST_SLICE,
    tile: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
) -> torch.Tensor:
    """Chunks of any length, one token included: q [T, Hq, D] -> out [T, Hq, D], contiguous.

    k and v [T, Hkv, D] are the step's own keys and values, which the caches hold as well. Their rows may be strided, as
    in a fused projection, with the same stride for both.

    Sequence i has counts[i] query tokens at positions starts[i] ..., which begin at row q_starts[i] of q. `tiles`
    [n, 2] int32 lists (sequence, first token within its chunk) for every block_q tokens of every chunk; an entry whose
    first token is past the chunk's end is padding and does nothing. block_q need not be a power of two:
    `query_rows` // G fills the tile best. `splits`: programs that share a tile's cached keys (`num_slices`; 1 with a
    window), each at least `shortest` of them, a multiple of 64. Their results, in float32, are scratch from torch's
    allocator.
    """
    num_heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(dim)
    block_m = max(16, triton.next_power_of_2(block_q * group))
    assert k.stride(0) == v.stride(0)
    assert q.shape[0] * k.stride(0) < 2**31
    fp8 = is_fp8(k_cache)
    gpu = target_of(q.device)
    values = LARGEST_OUTPUT if _shares_tiles(dim, gpu) else padded
    if not tile:
        tile, num_stages = _mixed_tiles(
            block_m, padded, values, gpu.shared_memory, fp8=fp8, fp8_units=gpu.fp8_units,
            int8=k_cache.dtype == torch.int8,
        )  # fmt: skip
        num_warps = 8
    part = lse = out
    arrived = _arrivals(q.device)  # without slices, too: the first step makes them, outside of a graph
    if splits > 1:
        assert window is None
        units = tiles.shape[0] * kv_heads * (padded // values)
        assert units <= len(arrived)
        part = torch.empty(units * block_m * splits * values, dtype=torch.float32, device=q.device)
        lse = torch.empty(units * block_m * splits, dtype=torch.float32, device=q.device)
    _mixed_kernel(
        (tiles.shape[0], kv_heads, padded // values * splits),
        q, k, v, k_cache, v_cache, out, part, lse, arrived, tiles, rows, starts, q_starts, counts, block_table,
        q.stride(0), k.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        scale, k_scale, v_scale, softcap or 1.0, window or 0,
        HKV=kv_heads, G=group, GP=max(16, triton.next_power_of_2(group)), D=dim, DP=padded, DV=values,
        PAGE=k_cache.shape[1], BLOCK_Q=block_q, BLOCK_M=block_m, TILE=tile, FP8=fp8, SOFTCAP=softcap is not None,
        WINDOW=window is not None, SPLITS=splits, SHORTEST=shortest, ROWS=_MERGED_ROWS,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
