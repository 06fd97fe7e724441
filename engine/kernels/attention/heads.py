"""From the QKV projection to heads, for families whose heads differ from Llama's. (Llama's heads:
pointwise.fused.rope_and_write_kv.)

    q, k   norm with a weight, in float32 throughout (offset + w)     RoPE of all pairs, a head's first part, or its
                                                                      fastest pairs
    v      norm without a weight, or none                             may be k as it was before norm and RoPE

One pass: a program takes some heads of a token, writes q to the output, and k and v to their page. For a prompt chunk,
whose attention reads keys contiguously, it also writes k and v to a contiguous tensor. The input is not overwritten,
because RoPE reads other elements than it writes.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.e4m3 import narrowed
from engine.kernels.pointwise.fused import as_int8, int8_scale, saturated
from engine.kernels.pointwise.kv_format import KvScale, for_writing, is_fp8
from engine.kernels.runtime.launcher import kernel, wait_for_previous


@triton.jit
def _weights(weight_q_ptr, weight_k_ptr, d, inside, is_q, offset):
    """offset + w with the weight w of q's or k's norm."""
    q = tl.load(weight_q_ptr + d, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(weight_k_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return offset + tl.where(is_q, q, k)


@triton.jit
def _weighted(x, scale, weights):
    """x * scale * weights, rounded to x's dtype and widened to float32."""
    return (x.to(tl.float32) * scale * weights).to(x.dtype).to(tl.float32)


@kernel
def _heads_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, q_ptr, own_ptr, k_ptr, v_ptr,
    x_stride, stride_page, stride_token, stride_head, eps, offset, k_factor, v_factor,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAIRS: tl.constexpr, DISTANCE: tl.constexpr,
    PAGE: tl.constexpr, QK_NORM: tl.constexpr, V_NORM: tl.constexpr, K_EQ_V: tl.constexpr, KEEP: tl.constexpr,
    FP8: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, DP)[None, :]
    inside = d < D
    mask = (head < HQ + 2 * HKV) & inside
    is_q = head < HQ
    is_v = head >= HQ + HKV
    # The other number of each pair, and the pair's frequency. A number outside of all pairs is its own partner and is
    # not rotated.
    first = d < PAIRS
    turns = first | ((d >= DISTANCE) & (d < DISTANCE + PAIRS))
    pair = tl.where(first, d, d - DISTANCE)
    partner = tl.where(turns, tl.where(first, d + DISTANCE, d - DISTANCE), d)
    # Everything but x is read before the wait: positions and slots are complete before a model's first kernel starts,
    # because the kernel that writes them (pointwise.inputs) does not let others start early.
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * PAIRS + pair, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * PAIRS + pair, mask=turns, other=0.0).to(tl.float32)
    if QK_NORM:
        weights = _weights(q_norm_ptr, k_norm_ptr, d, inside, is_q, offset)
        partner_weights = _weights(q_norm_ptr, k_norm_ptr, partner, inside, is_q, offset)
    if HKV > 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
    wait_for_previous(PDL)

    source = head
    if K_EQ_V:
        source = tl.where(is_v, head - HKV, head)
    row = x_ptr + token * x_stride + source * D
    x = tl.load(row + d, mask=mask, other=0.0)
    other = tl.load(row + partner, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    a = wide
    b = other.to(tl.float32)
    if QK_NORM:
        a = _weighted(x, scale, weights)
        b = _weighted(other, scale, partner_weights)
    y = (a * cos + tl.where(first, -b, b) * sin).to(x.dtype)
    value = x
    if V_NORM:
        value = (wide * scale).to(x.dtype)
    y = tl.where(is_v, value, y)

    tl.store(q_ptr + (token * HQ + head) * D + d, y, mask=mask & is_q)
    if HKV > 0:
        of_cache = mask & (head >= HQ)
        if KEEP:
            tl.store(own_ptr + (token * 2 * HKV + head - HQ) * D + d, y, mask=of_cache)
        at = (slot // PAGE) * stride_page + (slot % PAGE) * stride_token + d
        if k_ptr.dtype.element_ty == tl.int8:
            rounded = y.to(tl.float32)
            of_row = int8_scale(tl.max(tl.abs(rounded), 1), tl.sum(rounded * 0.0, 1))[:, None]
            stored = as_int8(rounded, of_row)
            scale_at = (slot // PAGE) * (stride_page // 4) + (slot % PAGE) * (stride_token // D)
            k_scale_at = scale_at + (head - HQ) * (stride_head // D)
            v_scale_at = scale_at + (head - HQ - HKV) * (stride_head // D)
            tl.store(k_factor + k_scale_at, of_row, mask=(head >= HQ) & (head < HQ + HKV))
            tl.store(v_factor + v_scale_at, of_row, mask=(head >= HQ + HKV) & (head < HQ + 2 * HKV))
        elif FP8:
            stored = saturated(y.to(tl.float32) * tl.where(is_v, v_factor, k_factor))
            stored = narrowed(stored, k_ptr.dtype.element_ty)
        else:
            stored = y.to(k_ptr.dtype.element_ty)
        tl.store(k_ptr + at + (head - HQ) * stride_head, stored, mask=of_cache & ~is_v)
        tl.store(v_ptr + at + (head - HQ - HKV) * stride_head, stored, mask=of_cache & is_v)


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
    """x [T, (Hq + 2 Hkv) D], (Hq + Hkv) D with `k_eq_v`, or Hq D without `own_kv`; rows may be strided.

    cos, sin [max_len, 1, pairs] float32, pairs (i, i + distance); positions, slots [T]. Norm weights [D]: both q's and
    k's, or without own_kv q's alone. Returns q [T, Hq, D] and, with `keep`, k and v [T, 2, Hkv, D]. Caches as in
    pointwise.fused.rope_and_write_kv; without own_kv they are not written.
    """
    kv_heads, dim = k_cache.shape[2:]
    tokens, padded = x.shape[0], triton.next_power_of_2(dim)
    q = torch.empty(tokens, num_heads, dim, dtype=x.dtype, device=x.device)
    own = None
    if not own_kv:
        kv_heads = 0
    elif keep:
        own = torch.empty(tokens, 2, kv_heads, dim, dtype=x.dtype, device=x.device)
    heads = max(1, 2048 // padded)  # 2048 numbers a program: 16 for each thread of four warps
    _heads_kernel(
        (tokens, triton.cdiv(num_heads + 2 * kv_heads, heads)), x, cos, sin, positions, slots, q_norm,
        q_norm if k_norm is None else k_norm, q, q if own is None else own, k_cache, v_cache,
        x.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), eps, offset,
        for_writing(k_scale), for_writing(v_scale),
        HQ=num_heads, HKV=kv_heads, D=dim, DP=padded, PAIRS=cos.shape[-1], DISTANCE=distance, PAGE=k_cache.shape[1],
        QK_NORM=q_norm is not None, V_NORM=v_norm, K_EQ_V=k_eq_v, KEEP=own is not None,
        FP8=is_fp8(k_cache), HEADS=heads, num_warps=4,
    )  # fmt: skip
    return q, own
