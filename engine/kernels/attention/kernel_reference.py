"""The attention kernels in plain torch: the same names and arguments (except for tuning), in float32 arithmetic.

For comparison only: simple and slow. A CPU serves with reference.py.
"""

from typing import Any

import torch

from engine.kernels.pointwise.kv_format import KvScale
from engine.kernels.pointwise.reference import indexable, normed, rotated, store_kv, wide_normed


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    splits: int = 1,
    scale: float,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """attention.decode.decode. `splits` has no effect here."""
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        key, value = _sequence(k_cache, v_cache, block_table[row], length, k_scale, v_scale)
        out[i : i + 1] = _attend(q[i : i + 1], key, value, length - 1, scale, window, softcap)
    return out


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
    splits: int = 1,
    prefix_splits: int = 1,
    **options: Any,
) -> torch.Tensor:
    """attention.shared_prefix.decode_shared: what is shared changes nothing."""
    return decode(q, k_cache, v_cache, rows, seq_lens, block_table, out, **options)


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
    shortest: int = 0,
) -> torch.Tensor:
    """attention.chunks.mixed. Like the kernel, it computes only the sequences that `tiles` lists, tile by tile.
    `splits` and `shortest` have no effect here."""
    for seq, first in tiles.tolist():
        count = min(int(counts[seq]) - first, block_q)
        if count <= 0:
            continue
        start = int(starts[seq]) + first
        key, value = _sequence(k_cache, v_cache, block_table[int(rows[seq])], start + count, k_scale, v_scale)
        at = slice(int(q_starts[seq]) + first, int(q_starts[seq]) + first + count)
        if int(counts[seq]) > 1:  # the chunk's own keys and values in full precision
            own = slice(int(q_starts[seq]), at.stop)
            key[int(starts[seq]) :], value[int(starts[seq]) :] = k[own].float(), v[own].float()
        out[at] = _attend(q[at], key, value, start, scale, window, softcap)
    return out


def _sequence(
    k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor, length: int, k_scale: KvScale, v_scale: KvScale
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of a sequence, [L, Hkv, D] float32."""
    page_size = k_cache.shape[1]
    token = torch.arange(length, device=pages.device)
    page, offset = pages[token // page_size].long(), token % page_size
    found = []
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
        factor = scale[page, offset][..., None] if isinstance(scale, torch.Tensor) else scale
        found.append(indexable(cache)[page, offset].view(cache.dtype).float() * factor)
    return found[0], found[1]


def _attend(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [n, Hq, D] at positions start ..., key and value [L, Hkv, D] -> [n, Hq, D] in q's dtype."""
    if not key.shape[0]:
        return torch.zeros_like(q)
    group = q.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,lhd->hnl", q.float(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    at = torch.arange(key.shape[0], device=q.device)
    visible = at <= query
    if window is not None:
        visible &= at > query - window
        value = value.where((at > start - window)[:, None, None], 0.0)  # 0 * NaN is NaN
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), value).to(q.dtype)


def heads_and_write_kv(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    distance: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    offset: float = 0.0,
    eps: float = 1e-6,
    v_norm: bool = False,
    k_eq_v: bool = False,
    own_kv: bool = True,
    keep: bool = False,
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """attention.heads.heads_and_write_kv. The width of x says whether `k_eq_v` holds."""
    _, page_size, kv_heads, dim = k_cache.shape
    at, pairs = positions.long(), cos.shape[-1]

    def turned(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            heads = wide_normed(heads, norm, offset, eps)
        index = torch.arange(pairs, device=x.device)
        index = torch.cat((index, index + distance))
        return heads.index_copy(2, index, rotated(heads[:, :, index], cos[at], sin[at]))

    parts = x.unflatten(-1, (-1, dim))
    q = turned(parts[:, :num_heads], q_norm)
    if not own_kv:
        return q, None
    k, v = turned(parts[:, num_heads : num_heads + kv_heads], k_norm), parts[:, -kv_heads:]
    if v_norm:
        v = normed(v, eps).to(v.dtype)
    page, within = slots.long() // page_size, slots.long() % page_size
    store_kv(k, k_cache, k_scale, page, within)
    store_kv(v, v_cache, v_scale, page, within)
    return q, torch.stack((k, v), 1) if keep else None
