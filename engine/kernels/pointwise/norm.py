"""RMS norms and the operations around them: one pass from one GEMM's output to the next one's input.

    rms_norm         before a GEMM; adds to the residual stream first
    post_norm        after a GEMM, as in Gemma:
                         h = residual = (residual + norm(x)) * scalar      two branches: norm_1(x) + norm_2(y) for x
                         then up to three norms of h, which differ only in their weights; the first two may be in fp8
    gated_rms_norm   of Gated DeltaNet's heads, with their gate

Each can return fp8, for an fp8 GEMM. Every operation rounds to the activations' dtype, as separate kernels would, so
fp8 is computed from the numbers that would be returned without it.

Norms that are fused into another kernel's loop are not here, because they need the row in that kernel's layout: those
of small-batch GEMMs (gemm/weight_stream.py, gemm/small_batch.py) and of heads before RoPE (fused.py,
attention/heads.py).
"""

from collections.abc import Sequence
from typing import Literal, overload

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.gate import activated
from engine.kernels.pointwise.quantize import blocks_for, empty_rows, load_row, store_row, store_row_as_fp8
from engine.kernels.runtime.launcher import kernel, wait_for_previous

MOST_FOLLOWING = 3


@triton.jit
def _add_rows(x, y):
    """x + y of two rows, each a tuple of blocks: added in float32, rounded to x's dtype."""
    result = ()
    for i in tl.static_range(len(x)):
        result = result + ((x[i].to(tl.float32) + y[i].to(tl.float32)).to(x[i].dtype),)  # noqa: RUF005 - Triton's tuples
    return result


@triton.jit
def _inverse_rms(x, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(x)):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    return tl.rsqrt(tl.sum(squares, 0) / N + eps)


@triton.jit
def _weighted(x, inverse, weight, offset, WIDE: tl.constexpr = True):
    """A row (a tuple of blocks) times `inverse` and the weight. WIDE: as in rms_norm with `wide_offset`."""
    result = ()
    for i in tl.static_range(len(x)):
        scaled = x[i].to(tl.float32) * inverse
        if WIDE:
            result = result + ((scaled * (weight[i].to(tl.float32) + offset)).to(x[i].dtype),)  # noqa: RUF005
        else:
            result = result + (scaled.to(x[i].dtype) * weight[i],)  # noqa: RUF005
    return result


@kernel
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, plain_ptr, x_stride, eps, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = load_row(weight_ptr, N, BLOCK)
    wait_for_previous(PDL)
    x = load_row(x_ptr + row * x_stride, N, BLOCK)
    if residual_ptr is not None:
        # The statistics are those of the sum as it is stored: rounded to the residual's dtype.
        x = _add_rows(x, load_row(residual_ptr + row * N, N, BLOCK))
        store_row(x, residual_ptr + row * N, N, BLOCK)
    y = _weighted(x, _inverse_rms(x, eps, N, BLOCK), weight, offset, WIDE)
    if scale_ptr is not None:
        store_row_as_fp8(y, out_ptr + row * N, scale_ptr + row, N, BLOCK)
        if plain_ptr is not None:
            store_row(y, plain_ptr + row * N, N, BLOCK)
    else:
        store_row(y, out_ptr + row * N, N, BLOCK)


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
    *, wide_offset: float | None = None, quantize: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
    *, wide_offset: float | None = None, quantize: Literal[True], plain: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    wide_offset: float | None = None,
    quantize: bool = False,
    plain: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """w * norm(x), or with `residual` [T, H]: residual += x in place, then w * norm(residual). x [T, H] -> [T, H].

    With `wide_offset`: (offset + w) * norm(x), in float32 and rounded once. With `quantize`: (e4m3 [T, H], scale [T]),
    see pointwise.quantize; `plain` [T, H], if given, gets the numbers before quantisation.
    """
    rows, size = x.shape
    block, warps = blocks_for(size)
    scale = None
    if quantize:
        out, scale = empty_rows(rows, size, x.device)
    else:
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _rms_norm_kernel(
        (rows,), x, residual, weight, out, scale, plain, x.stride(0), eps, wide_offset or 0.0,
        N=size, BLOCK=block, WIDE=wide_offset is not None, num_warps=warps,
    )  # fmt: skip
    return out if scale is None else (out, scale)


@kernel
def _post_norm_kernel(
    x_ptr, x_weight_ptr, y_ptr, y_weight_ptr, weight_ptr, residual_ptr, scalar_ptr, first_ptr, second_ptr, third_ptr,
    out_ptr, scale_ptr, second_out_ptr, second_scale_ptr, third_out_ptr, x_stride, y_stride, eps, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # The weight may be loaded before the wait, because no kernel writes it.
    weight = load_row(weight_ptr, N, BLOCK)
    if y_ptr is not None:
        x_weight = load_row(x_weight_ptr, N, BLOCK)
        y_weight = load_row(y_weight_ptr, N, BLOCK)
    if scalar_ptr is not None:
        scalar = tl.load(scalar_ptr).to(tl.float32)
    if first_ptr is not None:
        first = load_row(first_ptr, N, BLOCK)
    if second_ptr is not None:
        second = load_row(second_ptr, N, BLOCK)
    if third_ptr is not None:
        third = load_row(third_ptr, N, BLOCK)
    wait_for_previous(PDL)
    x = load_row(x_ptr + row * x_stride, N, BLOCK)
    residual = load_row(residual_ptr + row * N, N, BLOCK)
    if y_ptr is not None:
        y = load_row(y_ptr + row * y_stride, N, BLOCK)
        x = _weighted(x, _inverse_rms(x, eps, N, BLOCK), x_weight, offset)
        y = _weighted(y, _inverse_rms(y, eps, N, BLOCK), y_weight, offset)
        x = _add_rows(x, y)
    h = _add_rows(residual, _weighted(x, _inverse_rms(x, eps, N, BLOCK), weight, offset))
    if scalar_ptr is not None:
        scaled = ()
        for i in tl.static_range(len(h)):
            scaled = scaled + ((h[i].to(tl.float32) * scalar).to(h[i].dtype),)  # noqa: RUF005
        h = scaled
    store_row(h, residual_ptr + row * N, N, BLOCK)
    inverse = _inverse_rms(h, eps, N, BLOCK)
    if second_ptr is not None:
        normed = _weighted(h, inverse, second, offset)
        if second_scale_ptr is not None:
            store_row_as_fp8(normed, second_out_ptr + row * N, second_scale_ptr + row, N, BLOCK)
        else:
            store_row(normed, second_out_ptr + row * N, N, BLOCK)
    if third_ptr is not None:
        store_row(_weighted(h, inverse, third, offset), third_out_ptr + row * N, N, BLOCK)
    if first_ptr is not None:
        h = _weighted(h, inverse, first, offset)
    if scale_ptr is not None:
        store_row_as_fp8(h, out_ptr + row * N, scale_ptr + row, N, BLOCK)
    elif out_ptr is not None:
        store_row(h, out_ptr + row * N, N, BLOCK)


def post_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    following: Sequence[torch.Tensor],
    eps: float,
    offset: float,
    *,
    branch: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    scalar: torch.Tensor | None = None,
    quantize: Sequence[bool] = (),
) -> list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """residual [T, H] = (residual + norm(x)) * scalar, in place; then its norms by up to 3 weights `following`.

    x [T, H] (rows may be strided). branch: (norm_1's weight, y [T, H], norm_2's weight); then norm_1(x) + norm_2(y)
    takes the place of x. Returns the norms. The first two are (e4m3 [T, H], scale [T]), see pointwise.quantize, where
    `quantize` says so; if there are no norms and quantize[0], the residual itself, quantised.
    """
    rows, size = x.shape
    assert residual.is_contiguous()
    assert len(following) <= MOST_FOLLOWING
    x_weight, y, y_weight = (None, None, None) if branch is None else branch
    first, second, third = (*following, *[None] * (MOST_FOLLOWING - len(following)))
    block, warps = blocks_for(size)
    asked = (*quantize, False, False)[:2]
    found: list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]] = []
    outs: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    for place in range(MOST_FOLLOWING):
        out = scale = None
        if place < 2 and asked[place] and (place == 0 or place < len(following)):
            out, scale = empty_rows(rows, size, x.device)
            found.append((out, scale))
        elif place < len(following):
            out = torch.empty_like(residual)
            found.append(out)
        outs.append((out, scale))
    (out, scale), (second_out, second_scale), (third_out, _) = outs
    _post_norm_kernel(
        (rows,), x, x_weight, y, y_weight, weight, residual, scalar, first, second, third,
        out, scale, second_out, second_scale, third_out, x.stride(0), 0 if y is None else y.stride(0), eps, offset,
        N=size, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return found


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
    """w * norm(x) * silu(z), head by head; x [T, HV, V], z [T, HV V] (may be columns of wider rows) -> [T, HV V]."""
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
    HEADS: tl.constexpr = BLOCK // V  # heads in a block
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
    """w * norm(x) * silu(z), head by head; x [T, HV, V], z [T, HV V] (may be columns of wider rows), V a power of two
    -> (e4m3 [T, HV V], scale [T]), see pointwise.quantize."""
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
