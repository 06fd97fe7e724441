"""Products with packed weights, in Triton's interpreter, against the plain form of the same weight."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.gemm.packed import int4_gemm, int4_gemv, reference
from engine.kernels.gemm.packed import matmul as kernels
from engine.kernels.gemm.packed.int4_gemv import Int4Tiles
from engine.kernels.gemm.packed.matmul import PackedTiles
from engine.kernels.gemm.packed.weight import Packed, dequantize, joined, pack_pairs

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
    ours = kernels.small_batch_gemm(x, packed, PackedTiles(16, 32, 4, 2))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-3)


INT4_CASES = [
    (48, 128, 32, False), (40, 96, 32, True), (34, 256, 128, True), (22, 160, 160, False), (10, 2048, 64, False),
    (8, 4608, 512, True),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("outputs", "inner", "group", "zero"), INT4_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_gemv(outputs, inner, group, zero, rows, dtype):
    packed = make("int4", outputs, inner, group, zero=zero)
    assert int4_gemv.supports(packed, dtype)
    x = torch.randn(rows, inner + 3)[:, :inner].to(dtype)
    expected = (x.float() @ dequantize(packed, torch.float32).t()).to(dtype)
    torch.testing.assert_close(kernels.matmul(x, packed), expected, rtol=2**-7, atol=2e-2)
    norm, bias = (torch.rand(inner).to(dtype), 1e-5), torch.randn(outputs).to(dtype)
    for around in ({"residual": torch.randn(rows, outputs).to(dtype)}, {"gate": "silu"}):
        given = {name: value.clone() if torch.is_tensor(value) else value for name, value in around.items()}
        ours = int4_gemv.gemv(x * 0.01, packed, bias, norm=norm, wide_offset=1.0, **given)
        expected = reference.gemv(x * 0.01, packed, bias, norm=norm, wide_offset=1.0, **around)
        torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-5, atol=2e-2 * expected.float().abs().max())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("outputs", [12, 10])  # of the last program, all blocks or not all are needed
def test_int4_gemv_of_several_blocks_of_rows(outputs, zero, rows):
    """x is converted once, and the result is the same, bit for bit."""
    packed = make("int4", outputs, 384, 128, zero=zero)
    x, norm = torch.randn(rows, 384).bfloat16(), (torch.rand(384).bfloat16(), 1e-5)
    bias = torch.randn(outputs).bfloat16()
    for around in ({"residual": torch.randn(rows, outputs).bfloat16()}, {"gate": "silu"}, {}):
        results = []
        for tiles in (Int4Tiles(2, 64, 1, 1), Int4Tiles(2, 64, 1, 3), Int4Tiles(2, 64, 1, 5)):
            given = {name: value.clone() if torch.is_tensor(value) else value for name, value in around.items()}
            results.append(int4_gemv.gemv(x, packed, bias, norm=norm, tiles=tiles, **given))
        expected = reference.gemv(x, packed, bias, norm=norm, **around)
        near = {"rtol": 2**-5, "atol": 2e-2 * expected.abs().max().item()}
        torch.testing.assert_close(results[0].float(), expected.float(), **near)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_fixed_point_keeps_small_numbers_beside_large_ones_and_what_is_no_number():
    """A chunk's unit follows its largest number: a hundredth of what bf16 has rounded off that one."""
    packed = make("int4", 16, 256, 128)
    x = torch.randn(1, 256)
    x[0, ::32] *= 1000
    x = x.to(torch.bfloat16)
    weight = dequantize(packed, torch.float64)
    errors = int4_gemv.gemv(x, packed).double() - x.double() @ weight.t()
    largest = (x.double().abs().amax() * weight.abs().amax()).item()
    assert errors.abs().max() <= largest * 8 * 32 * 2**-16 + 2**-8 * (x.double() @ weight.t()).abs().max()
    zeros = torch.zeros(1, 256, dtype=torch.bfloat16)
    assert int4_gemv.gemv(zeros, packed).abs().max() == 0
    for bad in (float("nan"), float("inf")):
        x[0, 40] = bad
        assert not int4_gemv.gemv(x, packed).isfinite().any()


@pytest.mark.parametrize("rows", [3, 17, 70])
@pytest.mark.parametrize(("outputs", "inner", "group", "zero"), [
    (48, 128, 32, False), (40, 96, 32, True), (33, 256, 128, True), (70, 512, 128, False), (16, 512, 512, True),
])
def test_int4_gemm(outputs, inner, group, zero, rows):
    packed = make("int4", outputs, inner, group, zero=zero)
    assert int4_gemm.supports(packed, torch.float16)
    x = torch.randn(rows, inner + 8).half()[:, :inner]
    expected = (x.float() @ dequantize(packed, torch.float32).t()).half()
    torch.testing.assert_close(kernels.matmul(x, packed), expected, rtol=2**-9, atol=2e-2)


def test_int4_tiles_fit_and_cut_k_into_whole_blocks():
    for shared in (99 << 10, 163 << 10, 227 << 10):
        for rows in (3, 9, 17, 33, 65, 129, 256):
            for outputs, blocks in ((1024, 32), (4096, 20), (24576, 96), (4096, 7)):
                tiles = int4_gemm.tiles_for(rows, outputs, blocks, 64, shared)
                assert int4_gemm._shared_bytes(tiles, 64) <= shared
                assert blocks % tiles.split == 0
                assert tiles.split == 1 or tiles.block_m >= rows
                assert tiles.split > 1 or tiles.block_m >= 16


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
    torch.testing.assert_close(kernels.matmul(x, packed), expected, rtol=1e-5, atol=1e-3)
    x = torch.randn(kernels.FEW_ROWS + 1, 64)
    expected = x @ dequantize(packed, torch.float32).t()
    torch.testing.assert_close(kernels.matmul(x, packed), expected, rtol=1e-5, atol=1e-3)


def test_joined_weights_are_one():
    first, second = make("int4", 16, 64, 32), make("int4", 32, 64, 32, zero=True)
    (whole,) = joined([first, second])
    both = torch.cat([dequantize(first, torch.float32), dequantize(second, torch.float32)])
    assert torch.equal(dequantize(whole, torch.float32), both)
    assert len(joined([first, make("int8", 16, 64, 32), second])) == 3


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit(shared):
    for rows in (1, 16, 17, 64):
        tiles = kernels.packed_tiles(rows, shared)
        padded = max(16, 1 << (rows - 1).bit_length())
        assert tiles.stages * tiles.block_w * (tiles.block_n + 4 * padded) <= shared - 1024
