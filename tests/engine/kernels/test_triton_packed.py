"""Products with packed weights, in Triton's interpreter, against the plain form of the same weight."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.gemm import packed as kernels
from engine.kernels.gemm.packed import PackedTiles
from engine.kernels.gemm.packed_weight import Packed, dequantize, joined, pack_pairs

FP8 = torch.float8_e4m3fn


def make(kind, outputs, inner, group, *, zero=False, scale_dtype=torch.float32):
    torch.manual_seed(0)
    groups = -(-inner // group)
    if kind == "fp8":
        values = torch.randn(outputs, inner).mul_(50).to(FP8)
    else:
        codes = torch.randint(0, 256 if kind == "int8" else 16, (outputs, inner), dtype=torch.uint8)
        values = codes if kind == "int8" else pack_pairs(codes, group)
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if zero else None
    return Packed(kind, group, values, torch.rand(outputs, groups).add_(0.1).to(scale_dtype), zeros)


CASES = [
    ("int4", 48, 128, 32, False), ("int4", 40, 96, 32, True), ("int4", 33, 256, 128, True), ("int4", 20, 80, 80, False),
    ("int4", 20, 96, 48, True), ("int8", 48, 128, 64, False), ("int8", 30, 96, 96, True), ("fp8", 40, 200, 128, False),
    ("fp8", 24, 64, 32, False), ("fp4", 32, 128, 16, False), ("fp4", 20, 96, 32, False),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("kind", "outputs", "inner", "group", "zero"), CASES)
def test_few_rows(kind, outputs, inner, group, zero, rows):
    packed = make(kind, outputs, inner, group, zero=zero)
    x = torch.randn(rows, inner)
    expected = x @ dequantize(packed, torch.float32).t()
    ours = kernels.few_rows(x, packed, PackedTiles(16, 32, 4, 2))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("kind", "outputs", "inner", "group", "zero"), [
    ("int4", 48, 128, 32, False), ("int4", 40, 96, 32, True), ("int4", 33, 256, 128, True), ("int4", 20, 80, 80, False),
    ("int4", 9, 2048, 128, False),
])
def test_vector_form(kind, outputs, inner, group, zero, rows):
    packed = make(kind, outputs, inner, group, zero=zero)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(rows, inner).to(dtype)
        expected = (x.float() @ dequantize(packed, torch.float32).t()).to(dtype)
        for ours in (kernels.product(x, packed), kernels.vector_rows(x, packed, PackedTiles(4, 64, 4, 1))):
            torch.testing.assert_close(ours, expected, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "outputs", "inner", "group", "zero"), CASES)
def test_unpacking_is_exact(kind, outputs, inner, group, zero, dtype):
    packed = make(kind, outputs, inner, group, zero=zero, scale_dtype=torch.bfloat16)
    assert torch.equal(kernels.unpacked(packed, dtype), dequantize(packed, dtype))


def test_rows_may_be_strided_and_columns_in_another_order():
    packed = make("int4", 32, 64, 32, zero=True)
    order = torch.randperm(64)
    packed = replace(packed, columns=order)
    x = torch.randn(5, 100)[:, :64]
    expected = x @ dequantize(packed, torch.float32).t()
    torch.testing.assert_close(kernels.product(x, packed), expected, rtol=1e-5, atol=1e-3)
    x = torch.randn(kernels.FEW_ROWS + 1, 64)
    expected = x @ dequantize(packed, torch.float32).t()
    torch.testing.assert_close(kernels.product(x, packed), expected, rtol=1e-5, atol=1e-3)


def test_joined_weights_are_one():
    first, second = make("int4", 16, 64, 32), make("int4", 32, 64, 32, zero=True)
    (whole,) = joined([first, second])
    both = torch.cat([dequantize(first, torch.float32), dequantize(second, torch.float32)])
    assert torch.equal(dequantize(whole, torch.float32), both)
    assert len(joined([first, make("int8", 16, 64, 32), second])) == 3


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit(shared):
    for rows in (1, 16, 17, 64):
        for outputs in (64, 1024, 4096, 151936):
            tiles = kernels.packed_tiles(rows, outputs, 132, shared)
            padded = max(16, 1 << (rows - 1).bit_length())
            assert tiles.stages * tiles.block_w * (tiles.block_n + 4 * padded) <= shared - 1024
