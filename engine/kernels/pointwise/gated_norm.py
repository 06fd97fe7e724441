"""The norm of Gated DeltaNet's heads with its gate, also straight to fp8 for the product after it."""

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.gate import activated
from engine.kernels.pointwise.quantize import blocks_for, empty_rows, load_row, store_row_as_fp8
from engine.kernels.runtime.launcher import kernel, wait_for_previous


@kernel
def _gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, z_stride, eps, HV, V: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    v = tl.arange(0, V)[None, :]
    mask = (head < HV) & (v >= 0)
    weight = tl.load(weight_ptr + v)
    wait_for_previous(PDL)
    at = head * V + v
    narrow = tl.load(x_ptr + token * (HV * V) + at, mask=mask, other=0.0)
    x = narrow.to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + at, mask=mask, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]).to(narrow.dtype) * weight
    y = normed.to(tl.float32) * activated(z, "silu")
    tl.store(out_ptr + token * (HV * V) + at, y.to(narrow.dtype), mask=mask)


def gated_rms_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """w * norm(x) * silu(z), head by head; x [T, HV, V], z [T, HV V] (columns of wider rows) -> [T, HV V]."""
    tokens, num_heads, value_dim = x.shape
    assert x.is_contiguous()
    out = torch.empty(tokens, num_heads * value_dim, dtype=x.dtype, device=x.device)
    heads = 4 if tokens <= 64 else 16  # few tokens: more, smaller programs
    _gated_norm_kernel(
        (tokens, triton.cdiv(num_heads, heads)), x, z, weight, out, z.stride(0), eps, num_heads,
        V=value_dim, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return out


@kernel
def _gated_norm_fp8_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, scale_ptr, z_stride, eps,
    N: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HEADS: tl.constexpr = BLOCK // V  # of a block
    weight = tl.load(weight_ptr + tl.arange(0, V))[None, :]
    wait_for_previous(PDL)
    x = load_row(x_ptr + row * N, N, BLOCK)
    z = load_row(z_ptr + row * z_stride, N, BLOCK)
    y = ()
    for i in tl.static_range(len(x)):
        heads = tl.reshape(x[i].to(tl.float32), [HEADS, V])
        inverse = tl.rsqrt(tl.sum(heads * heads, 1) / V + eps)[:, None]
        normed = tl.reshape((heads * inverse).to(x[i].dtype) * weight, [BLOCK]).to(tl.float32)
        y = y + ((normed * activated(z[i].to(tl.float32), "silu")).to(x[i].dtype),)  # noqa: RUF005 - Triton's tuples
    store_row_as_fp8(y, out_ptr + row * N, scale_ptr + row, N, BLOCK)


def gated_rms_norm_to_fp8(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """w * norm(x) * silu(z), head by head; x [T, HV, V], z [T, HV V] (columns of wider rows), V a power of two ->
    (e4m3 [T, HV V], scale [T]), see pointwise.quantize."""
    tokens, num_heads, value_dim = x.shape
    assert x.is_contiguous()
    size = num_heads * value_dim
    block, warps = blocks_for(size)
    out, scale = empty_rows(tokens, size, x.device)
    _gated_norm_fp8_kernel(
        (tokens,), x, z, weight, out, scale, z.stride(0), eps,
        N=size, V=value_dim, BLOCK=max(block, value_dim), num_warps=warps,
    )  # fmt: skip
    return out, scale
