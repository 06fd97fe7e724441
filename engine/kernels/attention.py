"""Attention over paged keys and values in plain torch: the CPU's kernel, and the twin that GPU kernels are tested by.

    k_cache, v_cache   [num_pages, P, Hkv, D]         P = page size, in tokens
    block_table        [rows, max_pages]   page of tokens P i .. P i + P - 1 of the row's sequence

Sequences with one new token (decode) are batched: their pages are gathered into a padded [b, L, Hkv D]. Sorting by
length into buckets keeps the padding small. Sequences with several new tokens (prefill) go one by one, in blocks of
query tokens.

Both are plain batched products around a softmax, and not SDPA, for two reasons. On a CPU they take less time where
queries are few. And each query's sum runs over its keys in the same order whatever stands beside it, so that a token's
result is the same, bit for bit, alone or in a batch, prefilled in one chunk or in many, computed anew after preemption
or decoded. (SDPA's order depends on the shape of the call.)
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

# A decode bucket ends where its padding would cost more than one more bucket. Measured on 2 Zen 5 cores: about 100 us
# for the calls of a bucket, 0.1 us for a token that is gathered and attended to.
_MAX_PADDING = 1024
_QUERY_BLOCK = 128  # query tokens of a prefill block: bounds the scores, and skips keys behind the block
# Keys are padded (and masked) to a multiple of this: softmax sums whole vectors, and a ragged end changes its order.
_KEY_ALIGN = 32


@dataclass(slots=True)
class DecodeBucket:
    """b sequences with one query token each, padded to L = P * max pages."""

    q_index: torch.Tensor      # [b] which of the T tokens
    pages: torch.Tensor        # [b * max_pages]
    seq_lens: torch.Tensor     # [b]
    max_len: int               # L
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # window -> [b, 1, L]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if window not in self.masks:
            at = torch.arange(self.max_len, device=self.seq_lens.device)
            visible = at < self.seq_lens[:, None]
            if window is not None:
                visible &= at >= self.seq_lens[:, None] - window
            self.masks[window] = _additive(visible, dtype)[:, None, :]
        return self.masks[window]


@dataclass(slots=True)
class PrefillSegment:
    """One sequence with n query tokens at positions start .. start + n - 1."""

    q_start: int
    start: int
    num_tokens: int
    pages: torch.Tensor        # pages of start + n tokens, padded to _KEY_ALIGN
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)  # (block, window) -> [1, n, L]

    def mask(self, first: int, count: int, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[1, group * count, L] for the block of `count` query tokens from the chunk's token `first` on."""
        if (first, window) not in self.masks:
            device = self.pages.device
            begin, end = self.start + first, self.start + first + count
            query = torch.arange(begin, end, device=device)[:, None]
            key = torch.arange(_aligned(end), device=device)
            visible = key <= query
            if window is not None:
                visible &= key > query - window
            self.masks[first, window] = _additive(visible, dtype).repeat(group, 1)[None]
        return self.masks[first, window]


@dataclass(slots=True)
class AttentionBatch:
    decodes: list[DecodeBucket]
    prefills: list[PrefillSegment]

    @classmethod
    def build(
        cls,
        q_starts: list[int],
        starts: list[int],
        num_tokens: list[int],
        rows: list[int],
        block_table: torch.Tensor,
        page_size: int,
    ) -> "AttentionBatch":
        """Group the sequences of a step; all lists are parallel, one entry a sequence."""
        prefills = []
        decodes: list[tuple[int, int, int]] = []  # (seq_len, index of the query token, row)
        for q_start, start, n, row in zip(q_starts, starts, num_tokens, rows, strict=True):
            if n == 1:
                decodes.append((start + 1, q_start, row))
            else:
                pages = block_table[row, : _aligned(start + n) // page_size].long()
                prefills.append(PrefillSegment(q_start, start, n, pages))
        decodes.sort()
        return cls([_bucket(group, block_table, page_size) for group in _split(decodes)], prefills)


def _split(decodes: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut sequences, sorted by length, into runs whose padding to the longest stays below _MAX_PADDING tokens."""
    groups: list[list[tuple[int, int, int]]] = []
    padding = longest = 0
    for item in decodes:
        padding += len(groups[-1]) * (item[0] - longest) if groups else 0
        longest = item[0]
        if groups and padding <= _MAX_PADDING:
            groups[-1].append(item)
        else:
            groups.append([item])
            padding = 0
    return groups


def _bucket(group: list[tuple[int, int, int]], block_table: torch.Tensor, page_size: int) -> DecodeBucket:
    device = block_table.device
    seq_lens, q_index, rows = (torch.tensor(column, device=device) for column in zip(*group, strict=True))
    num_pages = _aligned(group[-1][0]) // page_size
    pages = block_table[rows, :num_pages].long().flatten()
    return DecodeBucket(q_index, pages, seq_lens, num_pages * page_size)


def _aligned(length: int) -> int:
    return -(-length // _KEY_ALIGN) * _KEY_ALIGN


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf elsewhere, made once a step: SDPA would convert a bool mask anew in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store k, v [T, Hkv, D] at their slots."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v for every token of the step, causal; [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D] are the step's own; the caches hold them already. With `window`, a token sees the
    `window` newest positions, itself included.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for bucket in batch.decodes:
        _decode(out, q, k_cache, v_cache, bucket, scale, window)
    for segment in batch.prefills:
        _prefill(out, q, k, v, k_cache, v_cache, segment, scale, window)
    return out


def _decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bucket: DecodeBucket,
    scale: float,
    window: int | None,
) -> None:
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_q_heads // num_kv_heads
    b = bucket.q_index.shape[0]
    # One product over all key heads at once: each query head stands in its own head's columns of an else empty row.
    #     [b, Hq, Hkv D] x [b, L, Hkv D]ᵀ     Hkv times the arithmetic, a third of the time: far fewer, larger products
    wide = q.new_zeros(b, num_kv_heads, group, num_kv_heads, head_dim)
    query = q.index_select(0, bucket.q_index).view(b, num_kv_heads, group, head_dim)
    wide.diagonal(dim1=1, dim2=3).copy_(query.permute(0, 2, 3, 1))
    key = k_cache.index_select(0, bucket.pages).view(b, bucket.max_len, -1)
    value = v_cache.index_select(0, bucket.pages).view(b, bucket.max_len, -1)
    scores = torch.baddbmm(
        bucket.mask(window, q.dtype).expand(b, num_q_heads, -1),
        wide.view(b, num_q_heads, -1),
        key.transpose(1, 2),
        alpha=scale,
    )
    result = torch.bmm(scores.softmax(-1), value).view_as(wide)
    own = result.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    out.index_copy_(0, bucket.q_index, own.reshape(b, num_q_heads, head_dim))


def _prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seg: PrefillSegment,
    scale: float,
    window: int | None,
) -> None:
    num_kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // num_kv_heads
    if seg.start:
        key = k_cache.index_select(0, seg.pages).view(-1, num_kv_heads, head_dim)
        value = v_cache.index_select(0, seg.pages).view(-1, num_kv_heads, head_dim)
    else:  # nothing came before: the step's own keys and values are all there is
        rows = slice(seg.q_start, seg.q_start + seg.num_tokens)
        padding = (0, 0, 0, 0, 0, _aligned(seg.num_tokens) - seg.num_tokens)
        key, value = F.pad(k[rows], padding), F.pad(v[rows], padding)
    key, value = key.permute(1, 2, 0), value.transpose(0, 1)
    for first in range(0, seg.num_tokens, _QUERY_BLOCK):
        count = min(_QUERY_BLOCK, seg.num_tokens - first)
        length = _aligned(seg.start + first + count)
        rows = slice(seg.q_start + first, seg.q_start + first + count)
        query = q[rows].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        scores = torch.baddbmm(
            seg.mask(first, count, window, group, q.dtype).expand(num_kv_heads, -1, -1),
            query.reshape(num_kv_heads, group * count, head_dim),
            key[:, :, :length],
            alpha=scale,
        )
        result = torch.bmm(scores.softmax(-1), value[:, :length])
        out[rows] = result.view(num_kv_heads, group, count, head_dim).permute(2, 0, 1, 3).flatten(1, 2)
