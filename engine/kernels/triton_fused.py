"""The small steps between matrix products, each one pass over its data: norm + residual, SiLU gate, RoPE + KV write."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import kernel


@kernel
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, H, eps, ADD: tl.constexpr, HP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    mask = h < H
    x = tl.load(x_ptr + row * x_stride + h, mask=mask, other=0.0)
    if ADD:
        # The sum is rounded to the residual's dtype before the statistics, as it is stored.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * H + h, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * H + h, x, mask=mask)
    x32 = x.to(tl.float32)
    scaled = x32 * tl.rsqrt(tl.sum(x32 * x32, 0) / H + eps)
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0)
    tl.store(out_ptr + row * H + h, scaled.to(x.dtype) * weight, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """w * norm(x), or with `residual` [T, H]: residual += x in place, then w * norm(residual). x [T, H] -> [T, H]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    padded = triton.next_power_of_2(size)
    _rms_norm_kernel(
        (x.shape[0],), x, residual, weight, out, x.stride(0), size, eps, ADD=residual is not None, HP=padded,
        num_warps=min(16, max(1, padded // 512)),
    )  # fmt: skip
    return out


@kernel
def _silu_mul_kernel(x_ptr, out_ptr, inner, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < inner
    gate = tl.load(x_ptr + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + inner + i, mask=mask, other=0.0)
    silu = gate / (1 + tl.exp(-gate))
    tl.store(out_ptr + row * inner + i, silu.to(up.dtype) * up, mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] (gate, up) -> silu(gate) * up [T, I]."""
    rows, width = gate_up.shape
    inner = width // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(inner))
    _silu_mul_kernel(
        (rows, triton.cdiv(inner, block)), gate_up, out, inner, gate_up.stride(0), BLOCK=block, num_warps=4
    )
    return out


@kernel
def _rope_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr,
    qkv_stride, stride_page, stride_token, stride_head, eps, inv_k_scale, inv_v_scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = qkv_ptr + token * qkv_stride + head * D
    half = tl.arange(0, HALF)
    mask = half < D // 2
    first = tl.load(base + half, mask=mask, other=0.0)
    second = tl.load(base + D // 2 + half, mask=mask, other=0.0)
    dtype = first.dtype
    if head < HQ + HKV:
        if NORM:
            a = first.to(tl.float32)
            b = second.to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
            norm_ptr = q_norm_ptr if head < HQ else k_norm_ptr
            first = (a * scale).to(dtype) * tl.load(norm_ptr + half, mask=mask, other=0.0)
            second = (b * scale).to(dtype) * tl.load(norm_ptr + D // 2 + half, mask=mask, other=0.0)
        position = tl.load(positions_ptr + token)
        cos = tl.load(cos_ptr + position * (D // 2) + half, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * (D // 2) + half, mask=mask, other=0.0).to(tl.float32)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * cos - b * sin).to(dtype)
        second = (b * cos + a * sin).to(dtype)
    if head < HQ:
        tl.store(base + half, first, mask=mask)
        tl.store(base + D // 2 + half, second, mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        at = (slot // PAGE) * stride_page + (slot % PAGE) * stride_token
        if head < HQ + HKV:
            out = k_ptr + at + (head - HQ) * stride_head
            inv = inv_k_scale
        else:
            out = v_ptr + at + (head - HQ - HKV) * stride_head
            inv = inv_v_scale
        cache_type = k_ptr.dtype.element_ty
        tl.store(out + half, (first.to(tl.float32) * inv).to(cache_type), mask=mask)
        tl.store(out + D // 2 + half, (second.to(tl.float32) * inv).to(cache_type), mask=mask)


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Normalise (optionally) and rotate q in place and k on its way into the cache; write v beside it.

    qkv [T, (Hq + 2 Hkv) D]; cos, sin [max_len, 1, D/2] float32; positions, slots [T]. Returns q [T, Hq, D], a view.
    """
    kv_heads, dim = k_cache.shape[2:]
    tokens = qkv.shape[0]
    _rope_write_kernel(
        (tokens, num_heads + 2 * kv_heads), qkv, cos, sin, positions, slots, q_norm, k_norm, k_cache, v_cache,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), eps, 1 / k_scale, 1 / v_scale,
        HQ=num_heads, HKV=kv_heads, D=dim, HALF=triton.next_power_of_2(dim // 2), PAGE=k_cache.shape[1],
        NORM=q_norm is not None, num_warps=1,
    )  # fmt: skip
    return qkv[:, : num_heads * dim].view(tokens, num_heads, dim)
