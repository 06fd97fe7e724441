"""Norms after a layer's GEMMs, as Gemma has them: one pass from one GEMM's output to the next one's input.

    h  = residual = (residual + norm(x)) * scalar          x, or norm_1(x) + norm_2(y): two branches side by side
    following norms of h, which differ in their weights alone; the first may be in fp8

Every step is rounded to the activations' dtype, as separate kernels would. All norms are wide ones (layers/norm.py), of
the same eps and offset.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.kernels.pointwise.fused import add_rows
from engine.kernels.pointwise.quantize import blocks_for, empty_rows, load_row, store_row, store_row_as_fp8
from engine.kernels.runtime.launcher import kernel, wait_for_previous

MOST_FOLLOWING = 3


@triton.jit
def _inverse_rms(x, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(x)):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    return tl.rsqrt(tl.sum(squares, 0) / N + eps)


@triton.jit
def _weighted(x, inverse, weight, offset):
    result = ()
    for i in tl.static_range(len(x)):
        y = x[i].to(tl.float32) * inverse * (weight[i].to(tl.float32) + offset)
        result = result + (y.to(x[i].dtype),)  # noqa: RUF005 - Triton's tuples
    return result


@kernel
def _post_norm_kernel(
    x_ptr, x_weight_ptr, y_ptr, y_weight_ptr, weight_ptr, residual_ptr, scalar_ptr, first_ptr, second_ptr, third_ptr,
    out_ptr, scale_ptr, second_out_ptr, third_out_ptr, x_stride, y_stride, eps, offset,
    N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # What no kernel writes comes before the wait.
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
        x = add_rows(x, y)
    h = add_rows(residual, _weighted(x, _inverse_rms(x, eps, N, BLOCK), weight, offset))
    if scalar_ptr is not None:
        scaled = ()
        for i in tl.static_range(len(h)):
            scaled = scaled + ((h[i].to(tl.float32) * scalar).to(h[i].dtype),)  # noqa: RUF005
        h = scaled
    store_row(h, residual_ptr + row * N, N, BLOCK)
    inverse = _inverse_rms(h, eps, N, BLOCK)
    if second_ptr is not None:
        store_row(_weighted(h, inverse, second, offset), second_out_ptr + row * N, N, BLOCK)
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
    quantize: bool = False,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, list[torch.Tensor]]:
    """residual [T, H] = (residual + norm(x)) * scalar, in place; then its norms by up to 3 weights `following`.

    x [T, H] (rows may be strided). branch: (norm_1's weight, y [T, H], norm_2's weight), then norm_1(x) + norm_2(y) is
    in x's place. Returns the first of the norms (with `quantize` as (e4m3 [T, H], scale [T]), see pointwise.quantize;
    without norms then the residual itself in that form), and the others.
    """
    rows, size = x.shape
    assert residual.is_contiguous()
    assert len(following) <= MOST_FOLLOWING
    x_weight, y, y_weight = (None, None, None) if branch is None else branch
    first, second, third = (*following, *[None] * (MOST_FOLLOWING - len(following)))
    block, warps = blocks_for(size)
    out = scale = None
    if quantize:
        out, scale = empty_rows(rows, size, x.device)
    elif following:
        out = torch.empty_like(residual)
    others = [torch.empty_like(residual) for _ in following[1:]]
    second_out, third_out = (*others, *[None] * (MOST_FOLLOWING - 1 - len(others)))
    _post_norm_kernel(
        (rows,), x, x_weight, y, y_weight, weight, residual, scalar, first, second, third,
        out, scale, second_out, third_out, x.stride(0), 0 if y is None else y.stride(0), eps, offset,
        N=size, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out if scale is None or out is None else (out, scale), others
