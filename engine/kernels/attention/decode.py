"""Paged attention of sequences with one token each on the GPU: split-KV, over the pages of attention.pages.

    rows, seq_lens     [B] int32: the block-table row of each sequence, and its length including the step's token

The G = Hq / Hkv query heads that share a key head are the rows of one tile, so K and V are read once for all of them.
Grid (Hkv, B, SPLITS): a program attends to one slice of the sequence; the last of a sequence's programs to finish
merges the slices by their log-sum-exp ("Flash-Decoding", Dao et al. 2023). Programs with an empty slice return at once,
so one captured grid serves any length. Heads come first in the grid: their keys lie side by side in a page, and what
runs together then reads whole pages.

Where sequences share a prefix, attention.shared_prefix has attended to it before. The first slice of a sequence then
begins with those partial results, and all slices lie behind the prefix.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.attention.pages import (
    attend_cached,
    for_cache,
    page_tile,
    pages_of,
    slice_tokens,
    tile_scales,
    whole_scale,
)
from engine.kernels.pointwise.kv_format import KvScale, is_fp8
from engine.kernels.runtime.counters import counters
from engine.kernels.runtime.gpu_target import LARGE_SHARED
from engine.kernels.runtime.launcher import kernel, shared_memory, wait_for_previous

SMALL_BATCH = 8  # sequences
_MANY_SEQUENCES = 64
_ASKED = 128


class Shared(NamedTuple):
    """Attention to the tokens that sequences share: for each query row and slice of these an output [D], without the
    cache's value scale, and its log-sum-exp (base 2)."""

    tokens: torch.Tensor  # [B] int32, how many each sequence shares: fewer than it has, perhaps 0
    part: torch.Tensor    # [B Hq SPLITS, D] float32
    lse: torch.Tensor     # [B Hq SPLITS] float32
    splits: int
    tile: int


@kernel
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, arrived_ptr, rows_ptr, seq_lens_ptr, table_ptr,
    shared_ptr, shared_part_ptr, shared_lse_ptr,
    q_stride, k_stride_page, k_stride_token, k_stride_head, table_stride, scale, k_scale, v_scale, softcap, window,
    shortest, num_rows, num_pages,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, SHARED_TILE: tl.constexpr, ASK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    h, b, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL and ASK > 0:
        # These may be an older step's numbers: the kernel that writes them need not be done. Past the L1 cache, which
        # would keep them.
        seq_len = tl.load(seq_lens_ptr + b, cache_modifier=".cg")
        row = tl.load(rows_ptr + b, cache_modifier=".cg")
        _, _, _, start, end = _slice(seq_len, split, window, 0, shortest, TILE, SPLITS, WINDOW, False)
        if (start < end) & (row >= 0) & (row < num_rows) & (end <= table_stride * PAGE):
            _ask_for_slice(
                k_ptr, v_ptr, table_ptr + row.to(tl.int64) * table_stride, start, end, h, num_pages, k_stride_page,
                k_stride_token, k_stride_head, D, PAGE, ASK,
            )  # fmt: skip
    wait_for_previous(PDL)
    seq_len = tl.load(seq_lens_ptr + b)
    prefix = 0
    if SHARED:
        prefix = tl.load(shared_ptr + b)
    first, aligned, per_split, start, end = _slice(
        seq_len, split, window, prefix, shortest, TILE, SPLITS, WINDOW, SHARED > 0
    )
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = h * G + g
    q_mask = (g < G)[:, None] & (d < D)[None, :]
    at_out = (b * HKV * G + head)[:, None] * D + d[None, :]
    if start >= end:
        if split == 0:  # a sequence of length 0
            tl.store(out_ptr + at_out, tl.zeros([GP, DP], out_ptr.dtype.element_ty), mask=q_mask)
        return
    q = tl.load(q_ptr + b * q_stride + head[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    q = for_cache(q, FP8)
    table = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_stride
    m = tl.full([GP], -float("inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    if SHARED:  # noqa: SIM102 - decided when the kernel is compiled, the next one when it runs
        if split == 0:
            m, total, acc = _from_shared(
                shared_part_ptr, shared_lse_ptr, b * HKV * G + h * G, first, G, GP, D, DP, SHARED_TILE, SHARED
            )
    pages = pages_of(table, start, first, end, PAGE, TILE)
    for at in range(start, end, TILE):
        k, v, live = page_tile(
            k_ptr, v_ptr, pages, at, first, end, h, k_stride_page, k_stride_token, k_stride_head, D, DP, PAGE, TILE
        )
        of_k, of_v = tile_scales(
            k, k_scale, v_scale, pages, at, first, end, h, k_stride_page, k_stride_token, k_stride_head, D, PAGE, TILE
        )
        pages = pages_of(table, at + TILE, first, end, PAGE, TILE)
        m, total, acc = attend_cached(q, k, v, of_k, of_v, m, total, acc, live[None, :], scale, softcap, SOFTCAP)
    out = acc * whole_scale(v_ptr, v_scale) / total[:, None]
    used = tl.cdiv(seq_len - aligned, per_split * TILE)  # slices that are not empty
    if SPLITS == 1 or used == 1:
        tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=q_mask)
        return
    slot = (b * HKV * G + head) * SPLITS + split
    tl.store(part_ptr + slot[:, None] * D + d[None, :], out, mask=q_mask)
    tl.store(lse_ptr + slot, m + tl.log2(total), mask=g < G)
    tl.debug_barrier()  # every thread has written its part before the program announces that it is done
    arrived = tl.atomic_add(arrived_ptr + b * HKV + h, 1, sem="acq_rel")
    if arrived == used - 1:
        _merge(part_ptr, lse_ptr, out_ptr, b * HKV * G + h * G, used, G, GM, D, DP, SPLITS)
        tl.store(arrived_ptr + b * HKV + h, 0)


@triton.jit
def _slice(
    seq_len, split, window, prefix, shortest,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The first key that is attended to, where the slices begin, tiles of each, and begin and end of number `split`."""
    first = prefix
    if WINDOW:
        first = tl.maximum(seq_len - window, 0)
    aligned = first // TILE * TILE
    if SHARED:
        aligned = first
    per_split = tl.maximum(tl.cdiv(tl.cdiv(seq_len - aligned, TILE), SPLITS), tl.cdiv(shortest, TILE))
    start = aligned + split * per_split * TILE
    return first, aligned, per_split, start, tl.minimum(start + per_split * TILE, seq_len)


@triton.jit
def _ask_for_slice(
    k_ptr, v_ptr, table, start, end, h, num_pages, k_stride_page, k_stride_token, k_stride_head,
    D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Prefetch keys and values of a slice's first TOKENS tokens into the L2 cache, while the previous kernel still runs
    and leaves the memory idle. Wrong numbers only waste this."""
    token = tl.minimum(start + tl.arange(0, TOKENS), end - 1)
    page = tl.load(table + token // PAGE, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
    size: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
    offset = (page * k_stride_page + (token % PAGE) * k_stride_token + h * k_stride_head) * size
    ask: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
    bytes_each = tl.full([TOKENS], D * size, tl.int32)
    tl.inline_asm_elementwise(ask, "=r,l,r", [k_ptr.to(tl.int64) + offset, bytes_each], tl.int32, False, 1)
    tl.inline_asm_elementwise(ask, "=r,l,r", [v_ptr.to(tl.int64) + offset, bytes_each], tl.int32, False, 1)


@triton.jit
def _from_shared(
    part_ptr, lse_ptr, first_head, length,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and outputs of a sequence's queries after its shared prefix of `length` tokens, which may be 0."""
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    s = tl.arange(0, SPLITS)
    used = tl.cdiv(length, tl.maximum(slice_tokens(length, TILE, SPLITS), 1))
    mask = (g < G)[:, None] & (d < D)[None, :]
    slot = (first_head + g).to(tl.int64) * SPLITS
    there = (g < G)[:, None] & (s < used)[None, :]
    lse = tl.load(lse_ptr + slot[:, None] + s[None, :], mask=there, other=-float("inf"))
    top = tl.max(lse, 1)
    weight = tl.exp2(lse - tl.where(top == -float("inf"), 0.0, top)[:, None])
    acc = tl.zeros([GP, DP], tl.float32)
    for at in range(0, used, 4):
        for i in tl.static_range(4):  # unrolled, so that the loads are in flight together
            at_part = part_ptr + (slot + at + i)[:, None] * D + d[None, :]
            part = tl.load(at_part, mask=mask & (at + i < used), other=0.0)
            acc += part * tl.sum(tl.where((s == at + i)[None, :], weight, 0.0), 1)[:, None]
    return top, tl.sum(weight, 1), acc


@triton.jit
def _merge(
    part_ptr, lse_ptr, out_ptr, first_head, used,
    G: tl.constexpr, GM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The sum of the slices' outputs, weighted by their log-sum-exp, always in the same order."""
    g = tl.arange(0, GM)
    d = tl.arange(0, DP)
    s = tl.arange(0, SPLITS)
    mask = (g < G)[:, None] & (d < D)[None, :]
    slot = (first_head + g) * SPLITS
    there = (g < G)[:, None] & (s < used)[None, :]
    lse = tl.load(lse_ptr + slot[:, None] + s[None, :], mask=there, other=-float("inf"))
    top = tl.max(lse, 1)
    weight = tl.exp2(lse - tl.where(top == -float("inf"), 0.0, top)[:, None])
    total = tl.sum(weight, 1)
    weight = weight / tl.where(total == 0, 1.0, total)[:, None]
    acc = tl.zeros([GM, DP], tl.float32)
    for at in range(0, used, 8):
        for i in tl.static_range(8):  # unrolled, so that the loads are in flight together
            at_part = part_ptr + (slot + at + i)[:, None] * D + d[None, :]
            part = tl.load(at_part, mask=mask & (at + i < used), other=0.0)
            acc += part * tl.sum(tl.where((s == at + i)[None, :], weight, 0.0), 1)[:, None]
    tl.store(out_ptr + (first_head + g)[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def num_splits(batch: int, num_kv_heads: int, multiprocessors: int) -> int:
    """The most slices per sequence; a power of two, at most 64. Few sequences: every multiprocessor has a few programs.
    Many: several waves of them, which end together although lengths differ.

    Choose it by the padded batch size of a captured graph, not by lengths: a slice beyond a sequence's end costs only
    one load. Every slice but the last is a whole number of tiles, so short sequences simply leave slices empty. The
    number of slices changes the last bits of a result, because it changes the order of summation.
    """
    programs = (4 if batch <= SMALL_BATCH else 16) * multiprocessors
    wanted = max(1, programs // max(1, batch * num_kv_heads))
    return min(64, 1 << (wanted.bit_length() - 1))


def shortest_slice(batch: int, num_kv_heads: int, dim: int, multiprocessors: int) -> int:
    """Keys that a slice has at least, a power of two: more slices would cost more than they spread, once sequences of
    512 keys give every multiprocessor a few programs. One program with wide heads fills it."""
    programs = (4 if dim <= 256 else 2) * multiprocessors
    return max(32, min(256, triton.next_power_of_2(triton.cdiv(512 * batch * num_kv_heads, programs))))


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters of finished slices, one per sequence and key head. The last program resets its counter to zero.

    There are enough for any batch: `num_splits` gives more than one slice only while sequences times key heads are at
    most eight times the number of multiprocessors."""
    return counters(device, 1 << 16)


def _decode_tile(batch: int, padded_dim: int, itemsize: int, shared: int) -> tuple[int, int]:
    """Keys per iteration and pipeline depth, tuned on an H100. Iterations are small for few sequences, so that more
    programs have work, and where `shared` memory is small, because two programs must fit. They are large for caches of
    bytes, which are widened between loading and multiplying: that takes time for each iteration."""
    few, many = batch <= SMALL_BATCH, batch > _MANY_SEQUENCES
    if shared >= LARGE_SHARED and itemsize == 1 and not few:
        if padded_dim > 256:
            return 32, 2
        if padded_dim <= 128 or many:
            return 128, 2
    if shared >= LARGE_SHARED and itemsize == 2:
        if padded_dim > 256:
            return (16 if few else 32), 2
        if padded_dim == 256 and not few:
            return 64, 2
        if many:
            return 64, 3
    if itemsize == 2 and padded_dim <= 128:
        return 64, 2
    return max(16, min(32, 4096 // padded_dim) if few else min(64, 8192 // padded_dim)), 3


def _asked_tokens(k_cache: torch.Tensor, batch: int, shared: Shared | None) -> int:
    """Of how many tokens of its slice a program prefetches keys and values before it waits. With many sequences most
    programs start when others end, and have nothing to wait for."""
    few = batch <= SMALL_BATCH and shared is None
    return _ASKED if few and k_cache.shape[3] * k_cache.element_size() % 16 == 0 else 0


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    splits: int,
    scale: float,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    shared: Shared | None = None,
    shortest: int = 0,
    tile: int = 0,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """One query token a sequence: q [B, Hq, D] (rows may be strided) -> out [B, Hq, D], contiguous.

    `splits`, a power of two (see `num_splits`), is the number of programs that share a sequence and a key head. If it
    is above one, B Hq splits (D + 1) float32 numbers of scratch come from torch's allocator, inside a CUDA graph, too.
    Both caches have the same strides. A sequence of length 0 (padding) gets zeros. A slice has at least `shortest`
    keys. `shared`: what attention.shared_prefix computed of the sequences' first tokens; then there is no window.
    """
    batch, num_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(dim)
    if not tile:
        tile, num_stages = _decode_tile(batch, padded, k_cache.element_size(), shared_memory(q.device))
    part = lse = arrived = out
    if splits > 1:
        arrived = _arrivals(q.device)
        assert batch * kv_heads <= len(arrived)
        part = torch.empty(batch * num_heads * splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch * num_heads * splits, dtype=torch.float32, device=q.device)
    assert shared is None or window is None
    _decode_kernel(
        (kv_heads, batch, splits), q, k_cache, v_cache, out, part, lse, arrived, rows, seq_lens, block_table,
        *((None, None, None) if shared is None else (shared.tokens, shared.part, shared.lse)),
        q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        scale, k_scale, v_scale, softcap or 1.0, window or 0, shortest,
        block_table.shape[0], k_cache.shape[0],
        HKV=kv_heads, G=group, GP=max(16, triton.next_power_of_2(group)), GM=triton.next_power_of_2(group), D=dim,
        DP=padded, PAGE=k_cache.shape[1], TILE=tile, SPLITS=splits, FP8=is_fp8(k_cache),
        SOFTCAP=softcap is not None, WINDOW=window is not None, SHARED=0 if shared is None else shared.splits,
        SHARED_TILE=0 if shared is None else shared.tile, ASK=_asked_tokens(k_cache, batch, shared),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
