"""Small-batch GEMMs, with the operations that are fused into them."""

from functools import partial
from typing import Any

from engine.kernels.pointwise import reference as pointwise_reference
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, numbers


def gemv(
    side: Side,
    *,
    rows: int,
    out_features: int,
    inner: int,
    is_fp8: bool = False,
    bias: bool = False,
    **options: Any,
) -> list[Result]:
    x = side.strided(rows, inner)
    weight = side.randn(out_features, inner) * 0.05
    scale = None
    if is_fp8:
        weight, scale = pointwise_reference.quantize_rows(weight)
    added = side.randn(out_features) if bias else None
    with side.clock():
        y = side.gemv.gemv(x, weight, scale, added, **options)
    return [numbers(y, 3 if options else 1)]  # with a gate: after the products, after silu, and at last


def gemv_in_layer(side: Side, *, rows: int, is_fp8: bool) -> list[Result]:
    """A GEMV with the norm before it, and added to the residual stream after it."""
    x, weight = side.strided(rows, 1024), side.randn(512, 1024) * 0.05
    scale = None
    if is_fp8:
        weight, scale = pointwise_reference.quantize_rows(weight)
    norm, residual = (1 + side.randn(1024) * 0.1, 1e-5), side.randn(rows, 512)
    with side.clock():
        side.gemv.gemv(x, weight, scale, norm=norm, residual=residual)
    return [numbers(residual, 3)]


def small_batch_gemm(side: Side, *, rows: int, out_features: int, inner: int, is_fp8: bool = False) -> list[Result]:
    x = side.strided(rows, inner)
    weight = side.randn(out_features, inner) * 0.05
    scales = {}
    if is_fp8:
        x, scales["x_scale"] = pointwise_reference.quantize_rows(x)
        weight, scales["scale"] = pointwise_reference.quantize_rows(weight)
    with side.clock():
        y = side.gemv.small_batch_gemm(x, weight, dtype=side.dtype, **scales)
    return [numbers(y, 2)]


CHECKS = [
    Check("product 1 row", partial(gemv, rows=1, out_features=1024, inner=2048)),
    Check("product 16 rows", partial(small_batch_gemm, rows=16, out_features=1024, inner=2048)),
    Check("product, odd shape, bias", partial(gemv, rows=3, out_features=1000, inner=1048, bias=True)),
    Check("product and gate", partial(gemv, rows=2, out_features=2048, inner=1024, gate="silu")),
    Check("norm, product, residual", partial(gemv_in_layer, rows=3, is_fp8=False)),
    Check("norm, product, residual fp8", partial(gemv_in_layer, rows=1, is_fp8=True), True),
    Check(
        "product and gate fp8",
        partial(gemv, rows=1, out_features=2048, inner=1024, is_fp8=True, gate="gelu_tanh"),
        True,
    ),
    Check("product 1 row fp8", partial(gemv, rows=1, out_features=1024, inner=2048, is_fp8=True), True),
    Check("product 16 rows fp8", partial(small_batch_gemm, rows=16, out_features=1024, inner=2048, is_fp8=True), True),
]
