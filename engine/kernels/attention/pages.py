"""What the attention kernels share: reading keys and values from pages, a tile at a time.

    k_cache, v_cache   [num_pages, PAGE_SIZE, Hkv, D]  (any strides, both alike; D contiguous)
    block_table        [rows, max_pages] int32

Exponents are in base 2, because exp2 is one instruction.

fp8 caches hold k / k_scale and v / v_scale. They are widened to float16 before each matmul, and both matmuls accumulate
in float32. So the short accumulator of fp8 tensor cores is never used, and long sequences need no two-level
accumulation. GPUs without fp8 instructions decode the same cache from its bits.

int8 caches have a scale for each token and head. A key's scale multiplies its scores and a value's its probabilities:
both are a row of a tile, so the numbers themselves are only widened, which is exact. Such scales [num_pages, PAGE_SIZE,
Hkv] lie like the numbers (engine/worker/cache.py): their strides are those of the cache, divided by D, and by 4 from
page to page. Kernels get a pointer to them in place of an fp8 cache's one number.

Keys that no query sees are never loaded: slots past a sequence's end or before its window may hold anything, NaN
included (0 * NaN is NaN, so a probability of zero would not protect the sum).
"""

import triton
import triton.language as tl

from engine.kernels.pointwise.e4m3 import widened


@triton.jit
def _capped(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Capped scores, and the factor that turns them into exponents of base 2; `s` are products of queries and keys.
    Without a cap, the scale is part of that factor: in the exponent's argument its multiplication is free."""
    if SOFTCAP:  # softcap * tanh(s / softcap); tanh(x) = 1 - 2 / (exp2(2 x log2 e) + 1)
        e = tl.exp2(s * (scale / softcap * 2.8853900817779268))
        return softcap * (1 - 2 / (e + 1)), 1.4426950408889634
    return s, scale * 1.4426950408889634  # log2 e


@triton.jit
def attend(
    q, k, v, m, total, acc, live, scale, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    k_scale=None, v_scale=None,
):  # fmt: skip
    """Attend to one more tile, keys k [D, n] and values v [n, D]: updates the running maxima m, sums `total` and
    outputs acc of q's rows. With MASKED, keys count only where `live` (broadcast to [rows, n]) is true. `k_scale` and
    `v_scale` [n]: factors of the keys and of the values."""
    products = tl.dot(q, k)
    if k_scale is not None:
        products = products * k_scale[None, :]
    s, factor = _capped(products, scale, softcap, SOFTCAP)
    if MASKED:
        s = tl.where(live, s, -float("inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * factor)
    base = new_m
    if MASKED:  # a row that has seen nothing yet
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
    p = tl.exp2(s * factor - base[:, None])
    decay = tl.exp2(m - base)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    if v_scale is not None:
        p = p * v_scale[None, :]
    acc = tl.dot(p.to(q.dtype), v, acc)
    return new_m, total, acc


@triton.jit
def attend_cached(q, k, v, k_scale, v_scale, m, total, acc, live, scale, softcap, SOFTCAP: tl.constexpr):
    """`attend` to a tile as `page_tile` and `tile_scales` return it."""
    if k.dtype == tl.int8:
        return attend(
            q, k.to(q.dtype), v.to(q.dtype), m, total, acc, live, scale, softcap, True, SOFTCAP, k_scale, v_scale
        )
    else:
        return attend(
            q, widened(k, q.dtype, True), widened(v, q.dtype, True), m, total, acc, live, scale * k_scale, softcap,
            True, SOFTCAP,
        )  # fmt: skip


@triton.jit
def pages_of(table, at, begin, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page ids [TILE] of the positions from `at` on; the null page outside [begin, end). Loops load page ids one tile
    ahead, so that the next tile's keys and values are in flight while the current one is computed."""
    token = at + tl.arange(0, TILE)
    return tl.load(table + token // PAGE, mask=(token >= begin) & (token < end), other=0)


@triton.jit
def page_tile(
    k_ptr, v_ptr, pages, at, begin, end, h, k_stride_page, k_stride_token, k_stride_head,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, first_v=0, DV: tl.constexpr = None,
):  # fmt: skip
    """Keys [D, TILE] and values [TILE, D] of the positions from `at` on, read from `pages`; zeros outside
    [begin, end). With DV only the DV columns of the values from `first_v` on."""
    d = tl.arange(0, DP)
    dv = first_v + tl.arange(0, DP if DV is None else DV)
    token = at + tl.arange(0, TILE)
    live = (token >= begin) & (token < end)
    offset = pages.to(tl.int64) * k_stride_page + (token % PAGE) * k_stride_token + h * k_stride_head
    k_mask, v_mask = live[None, :], live[:, None]
    if D != DP:
        k_mask = k_mask & (d < D)[:, None]
        v_mask = v_mask & (dv < D)[None, :]
    k = tl.load(k_ptr + offset[None, :] + d[:, None], mask=k_mask, other=0.0)
    v = tl.load(v_ptr + offset[:, None] + dv[None, :], mask=v_mask, other=0.0)
    return k, v, live


@triton.jit
def tile_scales(
    k, k_scale, v_scale, pages, at, begin, end, h, k_stride_page, k_stride_token, k_stride_head,
    D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scales of the keys `k` and the values that `page_tile` returns: one number each, or [TILE] of an int8 cache, with
    zeros outside [begin, end)."""
    if k.dtype == tl.int8:
        token = at + tl.arange(0, TILE)
        live = (token >= begin) & (token < end)
        within = (token % PAGE) * (k_stride_token // D) + h * (k_stride_head // D)
        offset = pages.to(tl.int64) * (k_stride_page // 4) + within
        return tl.load(k_scale + offset, mask=live, other=0.0), tl.load(v_scale + offset, mask=live, other=0.0)
    else:
        return k_scale, v_scale


@triton.jit
def slice_tokens(length, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Tokens of a slice, if SPLITS programs share `length` tokens: whole tiles, so the last slices may be empty."""
    return tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE


@triton.jit
def whole_scale(v_ptr, scale):
    """The factor of all cached values, with which an output is multiplied at the end."""
    if v_ptr.dtype.element_ty == tl.int8:  # each value has had its own
        return 1.0
    else:
        return scale


@triton.jit
def for_cache(q, FP8: tl.constexpr):
    """Queries in the dtype in which the cache is multiplied. For fp8 that is float16: one instruction widens two
    numbers to float16, bfloat16 takes many."""
    if FP8 and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        return tl.where(wide > 65504.0, 65504.0, tl.where(wide < -65504.0, -65504.0, wide)).to(tl.float16)
    else:
        return q
