"""Decode attention to a prefix that many sequences share: its keys and values are read once for many sequences
("cascade attention", https://flashinfer.ai/2024/02/02/cascade-inference.html).

    shared [B] int32   tokens at each sequence's beginning that lie in pages shared with the step's other members; 0 for
                       a sequence that shares nothing. All members share the same tokens, fewer than each one has.

Grid (blocks of sequences, Hkv, SPLITS). A program takes the query rows of SEQS sequences and one key head, up to 128
rows, and attends to one slice of the prefix on the tensor cores. The pages are those of any member of its block. It
leaves a partial result for each row: an output and its log-sum-exp. attention.decode continues from these with each
sequence's own tokens, so nothing has to be merged in a step of its own.

A program whose sequences share nothing returns at once, so a captured grid serves any prefix.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention.decode import Shared, decode
from engine.kernels.attention.pages import attend_cached, for_cache, page_tile, pages_of, slice_tokens, tile_scales
from engine.kernels.pointwise.kv_format import KvScale, is_fp8
from engine.kernels.runtime.launcher import kernel, target_of, wait_for_previous

LARGEST_HEAD = 128  # numbers; the rows of larger heads would not leave room for two tiles of keys
LEAST_SEQUENCES = 8
_LEAST_READ = 1 << 14  # tokens, over all sequences
_ROWS = 128            # query rows of a program
_MOST_SPLITS = 16


@kernel
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, rows_ptr, shared_ptr, table_ptr, batch,
    q_stride, k_stride_page, k_stride_token, k_stride_head, table_stride, scale, k_scale, v_scale, softcap,
    HKV: tl.constexpr, G: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    h, split = tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, ROWS)
    seq = tl.program_id(0) * SEQS + i // G
    inside = (i < SEQS * G) & (seq < batch)
    tokens = tl.load(shared_ptr + seq, mask=inside, other=0)
    length = tl.max(tokens, 0)
    per_split = slice_tokens(length, TILE, SPLITS)
    start = split * per_split
    end = tl.minimum(start + per_split, length)
    if start >= end:
        return
    member = inside & (tokens > 0)
    row = tl.load(rows_ptr + seq, mask=member, other=0).to(tl.int64)
    table = table_ptr + tl.max(row, 0) * table_stride  # any member's pages: they are the same
    d = tl.arange(0, DP)
    head = h * G + i % G
    mask = member[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + seq[:, None] * q_stride + head[:, None] * D + d[None, :], mask=mask, other=0.0)
    q = for_cache(q, FP8)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    pages = pages_of(table, start, start, end, PAGE, TILE)
    for at in range(start, end, TILE):
        k, v, live = page_tile(
            k_ptr, v_ptr, pages, at, start, end, h, k_stride_page, k_stride_token, k_stride_head, D, DP, PAGE, TILE
        )
        of_k, of_v = tile_scales(
            k, k_scale, v_scale, pages, at, start, end, h, k_stride_page, k_stride_token, k_stride_head, D, PAGE, TILE
        )
        pages = pages_of(table, at + TILE, start, end, PAGE, TILE)
        m, total, acc = attend_cached(q, k, v, of_k, of_v, m, total, acc, live[None, :], scale, softcap, SOFTCAP)
    slot = (seq * (HKV * G) + head).to(tl.int64) * SPLITS + split
    tl.store(part_ptr + slot[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
    tl.store(lse_ptr + slot, m + tl.log2(total), mask=member)


def pays(sequences: int, tokens: int) -> bool:
    """Whether reading a prefix of so many tokens once is faster than once for each of so many sequences. Otherwise a
    launch and the partial results cost more than is saved."""
    return sequences >= LEAST_SEQUENCES and (sequences - 1) * tokens >= _LEAST_READ


def least_tokens(sequences: int) -> int:
    """The shortest prefix for which this can be so."""
    return -(-_LEAST_READ // max(1, sequences - 1))


def num_splits(batch: int, num_heads: int, num_kv_heads: int, multiprocessors: int) -> int:
    """Slices of the prefix, so that nearly every multiprocessor has a program; a power of two, at most 16."""
    programs = num_kv_heads * triton.cdiv(batch, _sequences(num_heads // num_kv_heads))
    wanted = max(1, multiprocessors // programs)
    return min(_MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def _sequences(group: int) -> int:
    """Sequences of a program, if `group` query heads share a key head."""
    return max(1, _ROWS // group)


def attend_prefix(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    shared: torch.Tensor,
    block_table: torch.Tensor,
    *,
    splits: int,
    scale: float,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
    softcap: float | None = None,
    tile: int = 0,
    num_warps: int = 8,
    num_stages: int = 0,
) -> Shared:
    """q [B, Hq, D] (rows may be strided), with one token of each sequence; `shared` [B] as above."""
    batch, num_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = num_heads // kv_heads
    seqs = _sequences(group)
    if not tile:  # widening fp8 from its bits takes registers
        tile = 32 if is_fp8(k_cache) and not target_of(q.device).fp8_units else 64
    if not num_stages:
        num_stages = 3 if dim <= 128 and target_of(q.device).large_shared else 2
    part = torch.empty(batch * num_heads * splits, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch * num_heads * splits, dtype=torch.float32, device=q.device)
    _prefix_kernel(
        (triton.cdiv(batch, seqs), kv_heads, splits), q, k_cache, v_cache, part, lse, rows, shared, block_table, batch,
        q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
        scale, k_scale, v_scale, softcap or 1.0,
        HKV=kv_heads, G=group, SEQS=seqs, ROWS=max(16, triton.next_power_of_2(seqs * group)), D=dim,
        DP=triton.next_power_of_2(dim), PAGE=k_cache.shape[1], TILE=tile, SPLITS=splits, FP8=is_fp8(k_cache),
        SOFTCAP=softcap is not None, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return Shared(shared, part, lse, splits, tile)


def decode_shared(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    shared: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    splits: int,
    prefix_splits: int,
    shortest: int = 0,
    scale: float,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """attention.decode.decode where some of the sequences share a prefix."""
    common = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale, "softcap": softcap}
    prefix = attend_prefix(q, k_cache, v_cache, rows, shared, block_table, splits=prefix_splits, **common)
    return decode(
        q, k_cache, v_cache, rows, seq_lens, block_table, out, splits=splits, shortest=shortest, shared=prefix, **common
    )
