"""Attention over paged keys and values in plain torch: the CPU's kernel, and the reference for tests of the GPU's.

    k_cache, v_cache   [num_pages, P, Hkv, D]         P = page size, in tokens
    block_table        [rows, max_pages]   page of tokens P i .. P i + P - 1 of the row's sequence

An fp8 cache holds k / k_scale and v / v_scale. An int8 cache has a scale for each token and head, and is widened where
it is read.

Sequences with one new token (decode) are batched: their pages are gathered into a padded [b, L, Hkv D]. Sorting by
length into buckets keeps the padding small. Sequences with several new tokens (prefill) go one by one through SDPA.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.kernels.pointwise.kv_format import KvScale
from engine.kernels.pointwise.reference import indexable, store_kv, to_cache, to_int8

# A decode bucket ends where its padding would cost more than another bucket: the calls of a bucket take as long as
# gathering and attending to about a thousand tokens.
_MAX_PADDING = 1024


@dataclass(slots=True)
class DecodeBucket:
    """b sequences with one query token each, padded to L = P * max pages."""

    q_index: torch.Tensor      # [b] index of the query among the step's T tokens
    pages: torch.Tensor        # [b * max_pages]
    seq_lens: torch.Tensor     # [b]
    max_len: int               # L
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # window -> [b, 1, L]
    wide: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # shape of heads -> `wide_queries`

    def wide_queries(self, q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Zeros [b, Hkv, G, Hkv, D], where G = Hq / Hkv. Layers share them: `_decode` writes only the diagonal."""
        group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
        shape = num_kv_heads, group, num_kv_heads, head_dim
        if shape not in self.wide:
            self.wide[shape] = q.new_zeros(len(self.q_index), *shape)
        return self.wide[shape]

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
    pages: torch.Tensor        # [pages of start + n tokens]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # window -> [n, L]

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if window not in self.masks:
            device = self.pages.device
            query = torch.arange(self.start, self.start + self.num_tokens, device=device)[:, None]
            key = torch.arange(self.start + self.num_tokens, device=device)
            visible = key <= query
            if window is not None:
                visible &= key > query - window
            self.masks[window] = _additive(visible, dtype)
        return self.masks[window]


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
        """Group the sequences of a step; all lists are parallel, with one entry per sequence."""
        prefills = []
        decodes: list[tuple[int, int, int]] = []  # (seq_len, index of the query token, row)
        for q_start, start, n, row in zip(q_starts, starts, num_tokens, rows, strict=True):
            if n == 1:
                decodes.append((start + 1, q_start, row))
            else:
                pages = block_table[row, : -(-(start + n) // page_size)].long()
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
    num_pages = -(-group[-1][0] // page_size)
    pages = block_table[rows, :num_pages].long().flatten()
    return DecodeBucket(q_index, pages, seq_lens, num_pages * page_size)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf elsewhere. Made once a step, because SDPA would convert a bool mask in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor,
    k_scale: KvScale = 1.0, v_scale: KvScale = 1.0,
) -> None:  # fmt: skip
    """Store k, v [T, Hkv, D] at their slots."""
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if cache.is_contiguous() and not isinstance(scale, torch.Tensor):
            stored = indexable(to_cache(new, scale, cache.dtype))
            indexable(cache).view(-1, *new.shape[1:]).index_copy_(0, slot_mapping, stored)
        else:  # pages that hold more than these numbers
            store_kv(new, cache, scale, slot_mapping // cache.shape[1], slot_mapping % cache.shape[1])


def as_cached(x: torch.Tensor, scale: KvScale, dtype: torch.dtype) -> torch.Tensor:
    """x as a cache of `dtype` returns it."""
    if isinstance(scale, torch.Tensor):
        return _widened(*to_int8(x), x.dtype)
    stored = to_cache(x, scale, dtype).to(x.dtype)
    return stored * scale if dtype == torch.float8_e4m3fn else stored


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
    softcap: float | None = None,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v for every token of the step, causal; [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D] are those of the step's tokens. For a sequence with several of them, their keys
    are read from k and v alone: the cache may not hold those that leave the window within the step. With `window`, a
    token sees the `window` newest positions, itself included. With `softcap` c, a score s becomes c tanh(s / c).
    """
    if len(q) == 1 and batch.decodes:  # one stream: there is nothing to gather or scatter
        return _decode(q, k_cache, v_cache, batch.decodes[0], scale, k_scale, v_scale, window, softcap)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for bucket in batch.decodes:
        query = q.index_select(0, bucket.q_index)
        found = _decode(query, k_cache, v_cache, bucket, scale, k_scale, v_scale, window, softcap)
        out.index_copy_(0, bucket.q_index, found)
    for segment in batch.prefills:
        _prefill(out, q, k, v, k_cache, v_cache, segment, scale, window, softcap, k_scale, v_scale)
    return out


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    bucket: DecodeBucket,
    scale: float,
    k_scale: KvScale,
    v_scale: KvScale,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [b, Hq, D], the bucket's queries -> [b, Hq, D]"""
    b, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    # One GEMM over all key heads at once: each query head occupies its key head's columns of an otherwise zero row.
    #     [b, Hq, Hkv D] x [b, L, Hkv D]ᵀ
    # This is Hkv times the arithmetic, and still faster: there are far fewer and larger GEMMs.
    wide = bucket.wide_queries(q, num_kv_heads)
    _own_columns(wide).copy_(q.view(b, num_kv_heads, -1, head_dim))
    key = _read(k_cache, k_scale, bucket.pages, q.dtype).view(b, bucket.max_len, -1)
    value = _read(v_cache, v_scale, bucket.pages, q.dtype).view(b, bucket.max_len, -1)
    scale *= _factor(k_scale)
    mask, rows = bucket.mask(window, q.dtype), wide.view(b, num_q_heads, -1)
    if softcap is None:
        scores = torch.baddbmm(mask.expand(b, num_q_heads, -1), rows, key.transpose(1, 2), alpha=scale)
    else:
        scores = _capped(torch.bmm(rows, key.transpose(1, 2)), scale, softcap).add_(mask)
    own = _own_columns(torch.bmm(scores.softmax(-1), value).view_as(wide))
    if (factor := _factor(v_scale)) != 1:
        own = own * factor
    return own.contiguous().view(b, num_q_heads, head_dim)


def _own_columns(wide: torch.Tensor) -> torch.Tensor:
    """Each query head's columns of its own key head: [b, Hkv, G, Hkv, D] -> a view [b, Hkv, G, D]"""
    return wide.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


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
    softcap: float | None,
    k_scale: KvScale,
    v_scale: KvScale,
) -> None:
    rows = slice(seg.q_start, seg.q_start + seg.num_tokens)
    length = seg.start + seg.num_tokens
    key, value = k[rows].transpose(0, 1).unsqueeze(0), v[rows].transpose(0, 1).unsqueeze(0)
    if seg.start:
        key = _with_past(k_cache, seg, key, k_scale)
        value = _with_past(v_cache, seg, value, v_scale)
    if softcap is not None:
        out[rows] = _prefill_capped(q[rows], key[0], value[0], seg.mask(window, q.dtype), scale, softcap)
        return
    plain = seg.start == 0 and (window is None or window >= length)
    result = F.scaled_dot_product_attention(
        q[rows].transpose(0, 1).unsqueeze(0),
        key,
        value,
        attn_mask=None if plain else seg.mask(window, q.dtype),
        is_causal=plain,
        scale=scale,
        enable_gqa=q.shape[1] != key.shape[1],
    )
    out[rows] = result[0].transpose(0, 1)


def _prefill_capped(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attention of one sequence, written out because torch's has no softcap. q [n, Hq, D], key and value [Hkv, L, D] ->
    [n, Hq, D]"""
    n, num_q_heads, head_dim = q.shape
    num_kv_heads, length, _ = key.shape
    group = num_q_heads // num_kv_heads
    grouped = q.view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, group * n, head_dim)
    scores = _capped(torch.bmm(grouped, key.transpose(1, 2)), scale, softcap).view(num_kv_heads, group, n, length)
    weights = scores.add_(mask).softmax(-1).view(num_kv_heads, group * n, length)
    result = torch.bmm(weights, value).view(num_kv_heads, group, n, head_dim)
    return result.permute(2, 0, 1, 3).reshape(n, num_q_heads, head_dim)


def _capped(products: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    return products.mul_(scale / softcap).tanh_().mul_(softcap)


def _read(cache: torch.Tensor, scale: KvScale, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pages [n, P, Hkv, D] in `dtype`, still to be multiplied by `_factor(scale)`."""
    stored = indexable(cache).index_select(0, pages).view(cache.dtype)
    if isinstance(scale, torch.Tensor):
        return _widened(stored, scale.index_select(0, pages), dtype)
    return stored.to(dtype)


def _factor(scale: KvScale) -> float:
    return 1.0 if isinstance(scale, torch.Tensor) else scale


def _widened(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of an int8 cache, rounded once. They may be read again as they are: the arithmetic is the same."""
    return (stored.float() * scale[..., None]).to(dtype)


def _with_past(cache: torch.Tensor, seg: PrefillSegment, own: torch.Tensor, scale: KvScale) -> torch.Tensor:
    """[1, Hkv, start + n, D]: a sequence's past from its pages, and the chunk's own numbers as the step computed
    them."""
    pages = _read(cache, scale, seg.pages, own.dtype)
    every = pages.view(1, -1, *pages.shape[2:]).transpose(1, 2)[:, :, : seg.start + seg.num_tokens]
    if (factor := _factor(scale)) != 1:
        every.mul_(factor)
    every[:, :, seg.start :] = own
    return every
