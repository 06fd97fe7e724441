"""The small operations between GEMMs, each one pass over its data: gate, softcap, RoPE + KV write (norms: norm.py).

The gate can return fp8, for an fp8 GEMM. Results are first rounded to the activations' dtype, so fp8 is computed from
the numbers that would be returned without it.
"""

from typing import Literal, overload

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.e4m3 import narrowed
from engine.kernels.pointwise.gate import activated
from engine.kernels.pointwise.kv_format import KvScale, for_writing, is_fp8
from engine.kernels.pointwise.quantize import blocks_for, empty_rows, load_row, store_row_as_fp8
from engine.kernels.runtime.launcher import kernel, wait_for_previous


@triton.jit
def _gated(gate, up, KIND: tl.constexpr):
    return activated(gate.to(tl.float32), KIND).to(up.dtype) * up


@kernel
def _gate_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + i, mask=i < N, other=0.0)
    up = tl.load(up_ptr + row * up_stride + i, mask=i < N, other=0.0)
    tl.store(out_ptr + row * N + i, _gated(gate, up, KIND), mask=i < N)


@kernel
def _gate_mul_fp8_kernel(
    gate_ptr, up_ptr, out_ptr, scale_ptr, gate_stride, up_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    gate = load_row(gate_ptr + row * gate_stride, N, BLOCK)
    up = load_row(up_ptr + row * up_stride, N, BLOCK)
    y = ()
    for at in tl.static_range(len(gate)):
        y = y + (_gated(gate[at], up[at], KIND),)  # noqa: RUF005
    store_row_as_fp8(y, out_ptr + row * N, scale_ptr + row, N, BLOCK)


@overload
def gate_mul(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, quantize: Literal[False] = False
) -> torch.Tensor: ...
@overload
def gate_mul(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, quantize: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def gate_mul(
    gate: torch.Tensor, up: torch.Tensor, kind: str, *, quantize: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """act(gate) * up, both [T, N] with rows that may be strided -> [T, N]; with `quantize` (e4m3 [T, N], scale [T]),
    see pointwise.quantize."""
    rows, size = gate.shape
    strides = gate.stride(0), up.stride(0)
    if quantize:  # the scale needs the whole row: one program per row
        quantized, scale = empty_rows(rows, size, gate.device)
        block, warps = blocks_for(size)
        _gate_mul_fp8_kernel(
            (rows,), gate, up, quantized, scale, *strides, N=size, BLOCK=block, KIND=kind, num_warps=warps
        )
        return quantized, scale
    out = torch.empty(rows, size, dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(size))
    _gate_mul_kernel(
        (rows, triton.cdiv(size, block)), gate, up, out, *strides, N=size, BLOCK=block, KIND=kind, num_warps=4
    )
    return out


@kernel
def _softcap_kernel(x_ptr, out_ptr, x_stride, cap, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + i, mask=i < N, other=0.0).to(tl.float32)
    e = tl.exp2(x * (2.8853900817779268 / cap))  # exp(2 x / cap); tanh(y) = 1 - 2 / (exp(2 y) + 1)
    tl.store(out_ptr + row * N + i, cap * (1 - 2 / (e + 1)), mask=i < N)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of x [S, N] (rows may be strided) -> float32 [S, N], exact to 1e-5 of the cap."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    block = min(2048, triton.next_power_of_2(size))
    _softcap_kernel((rows, triton.cdiv(size, block)), x, out, x.stride(0), cap, N=size, BLOCK=block, num_warps=4)
    return out


@triton.jit
def saturated(x):
    """x clamped to e4m3's range; NaN stays NaN, so that a broken model does not look sound."""
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit
def int8_scale(largest, zero):
    """The scale of a row of an int8 cache, from its largest magnitude. `zero`: the sum of the row times 0, which is NaN
    if the row holds a NaN or an infinity; then so is the scale."""
    return tl.math.div_rn(tl.maximum(largest, 1e-12) + zero, 127.0)


@triton.jit
def as_int8(x, scale):
    """float32 x in multiples of `scale`, rounded to nearest, ties to even. Adding 1.5 * 2^23 leaves no fraction."""
    y = tl.math.div_rn(x, scale)
    y = (y + 12582912.0) - 12582912.0
    y = tl.where(y > 127.0, 127.0, tl.where(y < -127.0, -127.0, y))
    return tl.where(y == y, y, 0.0).to(tl.int8)


@kernel
def _rope_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr,
    qkv_stride, stride_page, stride_token, stride_head, eps, k_factor, v_factor,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    # A program takes HEADS heads of a token, as two tiles [HEADS, D / 2]: the halves that RoPE rotates as pairs.
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = half < D // 2
    mask = (head < HQ + 2 * HKV) & inside
    base = qkv_ptr + token * qkv_stride + head * D + half
    first = tl.load(base, mask=mask, other=0.0)
    second = tl.load(base + D // 2, mask=mask, other=0.0)
    dtype = first.dtype
    is_q = head < HQ
    is_v = head >= HQ + HKV
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        q_first = tl.load(q_norm_ptr + half, mask=inside, other=0.0)
        q_second = tl.load(q_norm_ptr + D // 2 + half, mask=inside, other=0.0)
        k_first = tl.load(k_norm_ptr + half, mask=inside, other=0.0)
        k_second = tl.load(k_norm_ptr + D // 2 + half, mask=inside, other=0.0)
        a = ((a * scale).to(dtype) * tl.where(is_q, q_first, k_first)).to(tl.float32)
        b = ((b * scale).to(dtype) * tl.where(is_q, q_second, k_second)).to(tl.float32)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * (D // 2) + half, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * (D // 2) + half, mask=inside, other=0.0).to(tl.float32)
    first = tl.where(is_v, first, (a * cos - b * sin).to(dtype))
    second = tl.where(is_v, second, (b * cos + a * sin).to(dtype))
    tl.store(base, first, mask=mask & ~is_v)
    tl.store(base + D // 2, second, mask=mask & ~is_v)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = (slot // PAGE) * stride_page + (slot % PAGE) * stride_token + half
    k_at = at + (head - HQ) * stride_head
    v_at = at + (head - HQ - HKV) * stride_head
    cache_type = k_ptr.dtype.element_ty
    is_k = mask & (head >= HQ) & (head < HQ + HKV)
    is_v = mask & is_v
    if cache_type == tl.int8:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = int8_scale(largest, tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1))[:, None]
        stored_first = as_int8(first, scale)
        stored_second = as_int8(second, scale)
        scale_at = (slot // PAGE) * (stride_page // 4) + (slot % PAGE) * (stride_token // D)
        k_scale_at = scale_at + (head - HQ) * (stride_head // D)
        v_scale_at = scale_at + (head - HQ - HKV) * (stride_head // D)
        tl.store(k_factor + k_scale_at, scale, mask=(head >= HQ) & (head < HQ + HKV))
        tl.store(v_factor + v_scale_at, scale, mask=(head >= HQ + HKV) & (head < HQ + 2 * HKV))
    elif FP8:
        inv = tl.where(head < HQ + HKV, k_factor, v_factor)
        stored_first = narrowed(saturated(first.to(tl.float32) * inv), cache_type)
        stored_second = narrowed(saturated(second.to(tl.float32) * inv), cache_type)
    else:
        stored_first = first.to(cache_type)
        stored_second = second.to(cache_type)
    tl.store(k_ptr + k_at, stored_first, mask=is_k)
    tl.store(k_ptr + k_at + D // 2, stored_second, mask=is_k)
    tl.store(v_ptr + v_at, stored_first, mask=is_v)
    tl.store(v_ptr + v_at + D // 2, stored_second, mask=is_v)


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
    k_scale: KvScale = 1.0,
    v_scale: KvScale = 1.0,
    heads: int = 0,
) -> torch.Tensor:
    """Normalise (optionally) and rotate q and k in place; write k and v to the cache.

    qkv [T, (Hq + 2 Hkv) D]; cos, sin [max_len, 1, D/2] float32; positions, slots [T]. Returns q [T, Hq, D], a view.
    q_norm and k_norm [D]: both or neither. An fp8 cache gets k / k_scale and v / v_scale, clamped to ±448. Of an int8
    cache `k_scale` and `v_scale` are its scales, which are written, too; for other caches they must be 1. `heads` per
    program, 8 or 16; by default the number of tokens decides.
    """
    kv_heads, dim = k_cache.shape[2:]
    tokens = qkv.shape[0]
    heads = heads or (8 if tokens <= 64 else 16)  # few tokens: more, smaller programs
    _rope_write_kernel(
        (tokens, triton.cdiv(num_heads + 2 * kv_heads, heads)), qkv, cos, sin, positions, slots, q_norm, k_norm,
        k_cache, v_cache, qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        eps, for_writing(k_scale), for_writing(v_scale),
        HQ=num_heads, HKV=kv_heads, D=dim, HALF=triton.next_power_of_2(dim // 2), PAGE=k_cache.shape[1],
        NORM=q_norm is not None, FP8=is_fp8(k_cache), HEADS=heads, num_warps=heads // 4,
    )  # fmt: skip
    return qkv[:, : num_heads * dim].view(tokens, num_heads, dim)
