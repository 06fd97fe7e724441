"""GEMMs with packed weights (kernels/gemm/packed/weight.py) against the same weights as plain numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.kernels.gemm.packed.weight import Kind, Packed
from engine.kernels.pointwise import reference as pointwise_reference
from engine.selftest.checks.check import Check, Side
from engine.selftest.compare import Result, exact, numbers


def packed_product(side: Side, *, kind: Kind, rows: int, group: int, with_zero: bool = False) -> list[Result]:
    """A small-batch GEMM with a packed weight, and the unpacked weight that large batches use."""
    x, outputs, inner = side.strided(rows, 512), 160, 512
    if kind == "fp8":
        values = pointwise_reference.quantize_rows(side.randn(outputs, inner))[0]
    else:
        values = side.randint(256, outputs, inner // (1 if kind == "int8" else 2)).to(torch.uint8)
    zero = side.randint(16, outputs, inner // group).to(torch.uint8) if with_zero else None
    scale = 0.02 + side.randn(outputs, inner // group).abs() * 0.002
    weight = Packed(kind, group, values, scale, zero)
    if kind == "fp4" and group == 16:
        factor = 0.001 + side.randn(outputs).abs() * 0.001
        weight = replace(weight, scale=(scale * 4000).to(torch.float8_e4m3fn), factor=factor)
    elif kind == "fp4":
        weight = replace(weight, scale=side.randint(8, outputs, inner // group).add(118).to(torch.uint8))
    with side.clock():
        y, wide = side.packed.matmul(x, weight), side.packed.unpacked(weight, side.dtype)
    return [numbers(y, 2), exact(wide)]


def int4_gemv_in_layer(side: Side, *, rows: int, with_zero: bool, **options: Any) -> list[Result]:
    """An int4 GEMV with the norm before it, and a gate or the residual stream after it."""
    outputs, inner = 128, 1024
    dtype = side.dtype if side.dtype.itemsize == 2 else torch.float16  # the kernel supports only 16-bit types
    x = side.strided(rows, inner).to(dtype) * 0.1
    values = side.randint(256, outputs, inner // 2).to(torch.uint8)
    zero = side.randint(16, outputs, inner // 128).to(torch.uint8) if with_zero else None
    weight = Packed("int4", 128, values, 0.02 + side.randn(outputs, inner // 128).abs() * 0.002, zero)
    norm, bias = ((1 + side.randn(inner) * 0.1).to(dtype), 1e-5), side.randn(outputs).to(dtype)
    if not options:
        options["residual"] = side.randn(rows, outputs).to(dtype)
    with side.clock():
        y = side.int4.gemv(x, weight, bias, norm=norm, wide_offset=0.5, **options)
    return [numbers(y, 3)]


def group_scaled_product(side: Side, *, kind: Kind, rows: int, group: int = 128) -> list[Result]:
    """fp8 activations with an int4 weight, or with an fp8 weight in blocks, for which a GPU may have two kernels."""
    outputs, inner = 256, 1024
    x, x_scale = pointwise_reference.quantize_rows(side.strided(rows, inner))
    scale = 0.02 + side.randn(outputs if kind == "int4" else outputs // 128, inner // group).abs() * 0.002
    if kind == "int4":
        values = side.randint(256, outputs, inner // 2).to(torch.uint8)
    else:
        values = pointwise_reference.quantize_rows(side.randn(outputs, inner))[0]
        scale = scale.repeat_interleave(128, 0)
    weight = side.grouped.group_scaled(Packed(kind, group, values, scale, block=1 if kind == "int4" else 128))
    with side.clock():
        y = side.grouped.gemm(x, x_scale, weight, dtype=side.dtype)
        if kind == "int4":
            return [numbers(y, 2), exact(side.grouped.as_e4m3(weight).float())]
        return [numbers(y, 2), numbers(side.blocks.gemm(x, x_scale, weight, dtype=side.dtype), 2)]


def gemv_of_blocks(side: Side, *, rows: int, gate: str | None) -> list[Result]:
    """A GEMV with an fp8 weight that has a scale for each 128 x 128 numbers, and the norm before it."""
    outputs, inner = 512, 1024
    x, norm = side.strided(rows, inner) * 0.1, ((1 + side.randn(inner) * 0.1), 1e-5)
    weight = pointwise_reference.quantize_rows(side.randn(outputs, inner))[0]
    scale = 0.0002 + side.randn(outputs // 128, inner // 128).abs() * 0.00002
    with side.clock():
        y = side.gemv.gemv(x, weight, scale, None, block=128, norm=norm, gate=gate)
    return [numbers(y, 3)]


CHECKS = [
    Check("packed product int4", partial(packed_product, kind="int4", rows=1, group=128)),
    Check("packed product int4, zero points", partial(packed_product, kind="int4", rows=16, group=32, with_zero=True)),
    Check("packed product int4, many rows", partial(packed_product, kind="int4", rows=70, group=64, with_zero=True)),
    Check("norm, int4 product, residual", partial(int4_gemv_in_layer, rows=2, with_zero=True)),
    Check("norm, int4 product, gate", partial(int4_gemv_in_layer, rows=1, with_zero=False, gate="silu")),
    Check("packed product int8", partial(packed_product, kind="int8", rows=40, group=512)),
    Check("packed product nvfp4", partial(packed_product, kind="fp4", rows=5, group=16)),
    Check("packed product mxfp4", partial(packed_product, kind="fp4", rows=5, group=32)),
    Check("packed product fp8", partial(packed_product, kind="fp8", rows=20, group=128), True),
    Check("fp8 rows, int4 weight", partial(group_scaled_product, kind="int4", rows=9), True),
    Check("many fp8 rows, int4 weight", partial(group_scaled_product, kind="int4", rows=150), True),
    Check("fp8 rows, fp8 blocks", partial(group_scaled_product, kind="fp8", rows=40), True),
    Check("one row, fp8 blocks", partial(gemv_of_blocks, rows=1, gate="silu"), True),
]
