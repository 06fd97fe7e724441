"""Attention of `--batch-invariant`: a token's result has the same bits, whatever else is in the step.

The usual decode kernel splits a sequence into a number of slices that depends on the batch size, so the order of its
sums varies. Here a tile of queries reads its keys in tiles that begin at multiples of TILE, starting at position 0 (or
at the tile in which the window begins). A prompt's chunks may begin anywhere, and decoding tokens take the same path:
a prompt that is recomputed after preemption gives the same numbers. A row of a tile never depends on other rows,
because tensor cores compute each output from its own row and column.

As in attention.chunks, the step's own keys come from the projection, because pages that leave the window within the
step may be missing. They are rounded as the cache would round them, so it does not matter where a chunk begins.

The counterpart for GEMMs is gemm.batch_invariant.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention.pages import attend, for_cache, page_tile, pages_of
from engine.kernels.pointwise.fused import saturated
from engine.kernels.pointwise.kv_format import is_fp8
from engine.kernels.runtime.launcher import kernel, shared_memory, wait_for_previous

_QUERY_ROWS = 64  # query rows in a tile: tokens times heads that share a key head
_KEYS = 64        # keys in a tile
_NOWHERE = 1 << 30


@triton.jit
def _as_cached(x, inverse_scale, FP8: tl.constexpr):
    """The step's own keys or values [.., ..], rounded as an fp8 cache would round them, in the dtype that cached ones
    are multiplied in."""
    if FP8:
        return saturated(x.to(tl.float32) * inverse_scale).to(tl.float8e4nv).to(tl.float16)
    else:
        return x


@kernel
def _attention_kernel(
    q_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, out_ptr, tile_ptr, rows_ptr, starts_ptr, q_starts_ptr, counts_ptr,
    table_ptr, q_stride, own_stride, k_stride_page, k_stride_token, k_stride_head, table_stride, nowhere, scale,
    k_scale, v_scale, softcap, window, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    tile, h = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tile_ptr + tile * 2)
    first_q = tl.load(tile_ptr + tile * 2 + 1)  # index of the tile's first token within the chunk
    start = tl.load(starts_ptr + seq)
    q_start = tl.load(q_starts_ptr + seq).to(tl.int64)
    count = tl.load(counts_ptr + seq)
    if first_q >= count:
        return
    own_from = tl.maximum(start, nowhere)  # from this position on, keys are the step's own
    table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    d = tl.arange(0, DP)
    m_index = tl.arange(0, BLOCK_M)
    token_q = first_q + m_index // G
    at_head = (h * G + m_index % G)[:, None] * D + d[None, :]
    q_mask = ((m_index < BLOCK_Q * G) & (token_q < count))[:, None] & (d < D)[None, :]
    at_q = (q_start + token_q)[:, None]
    q = for_cache(tl.load(q_ptr + at_q * q_stride + at_head, mask=q_mask, other=0.0), FP8)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    end = start + tl.minimum(first_q + BLOCK_Q, count)
    first = 0
    if WINDOW:
        first = tl.maximum(start + first_q + 1 - window, 0)
    cached = tl.minimum(own_from, end)
    k_new = k_new_ptr + q_start * own_stride + h * D
    v_new = v_new_ptr + q_start * own_stride + h * D
    n = tl.arange(0, TILE)
    for at in range(first // TILE * TILE, end, TILE):
        position = at + n
        pages = pages_of(table, at, first, cached, PAGE, TILE)
        k, v, live = page_tile(
            k_ptr, v_ptr, pages, at, first, cached, h, k_stride_page, k_stride_token, k_stride_head, D, DP, PAGE, TILE
        )
        k, v = k.to(q.dtype), v.to(q.dtype)
        own = (position >= own_from) & (position >= first) & (position < end)
        token = (position - start) * own_stride
        own_k = tl.load(k_new + token[None, :] + d[:, None], mask=own[None, :] & (d < D)[:, None], other=0.0)
        own_v = tl.load(v_new + token[:, None] + d[None, :], mask=own[:, None] & (d < D)[None, :], other=0.0)
        k = tl.where(own[None, :], _as_cached(own_k, 1.0 / k_scale, FP8).to(q.dtype), k)
        v = tl.where(own[:, None], _as_cached(own_v, 1.0 / v_scale, FP8).to(q.dtype), v)
        visible = (live | own)[None, :] & (position[None, :] <= (start + token_q)[:, None])
        if WINDOW:
            visible = visible & (position[None, :] > (start + token_q)[:, None] - window)
        m, total, acc = attend(q, k, v, m, total, acc, visible, scale * k_scale, softcap, True, SOFTCAP)
    out = acc * v_scale / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out_ptr + at_q * (HKV * G * D) + at_head, out.to(out_ptr.dtype.element_ty), mask=q_mask)


def tile_tokens(group: int) -> int:
    """Query tokens in a tile if `group` heads share a key head."""
    return max(1, _QUERY_ROWS // group)


def attention(
    q: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor] | None,
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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Like attention.chunks.mixed, for tiles of `block_q` tokens, at most `tile_tokens`. `own`: the step's own keys and
    values [T, Hkv, D]; None if these, too, are read from the cache."""
    num_heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(dim)
    k, v = (q, q) if own is None else own
    assert k.stride(0) == v.stride(0)
    fp8 = is_fp8(k_cache)
    room = shared_memory(q.device) - 2 * padded * _QUERY_ROWS
    keys, stages = next(
        ((n, s) for n, s in ((_KEYS, 2), (_KEYS, 1), (32, 1)) if 2 * padded * 2 * 2 * n * s <= room), (16, 1)
    )
    _attention_kernel(
        (tiles.shape[0], kv_heads), q, k, v, k_cache, v_cache, out, tiles, rows, starts, q_starts, counts, block_table,
        q.stride(0), k.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        _NOWHERE if own is None else 0, scale, k_scale, v_scale, softcap or 1.0, window or 0, HKV=kv_heads, G=group,
        D=dim, DP=padded, PAGE=k_cache.shape[1], BLOCK_Q=block_q,
        BLOCK_M=max(16, triton.next_power_of_2(block_q * group)), TILE=keys, FP8=fp8, SOFTCAP=softcap is not None,
        WINDOW=window is not None, num_warps=4 if padded <= 256 else 8, num_stages=stages,
    )  # fmt: skip
    return out
