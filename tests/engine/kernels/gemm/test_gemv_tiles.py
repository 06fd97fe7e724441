"""Tiles of products of a few rows: those that were measured, and those by rule; in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from torch import nn

from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm import small_batch
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.pointwise import reference as pointwise_reference
from engine.layers.gemm_inputs import UnnormedRows
from engine.layers.linear import Linear
from engine.layers.quant import fp8, unquantized

MEASURED = sorted({(p.itemsize, p.gated, p.normed, tiles) for p, tiles in gemm_tiles._measured().items()})


@pytest.mark.parametrize("itemsize, gated, normed, tiles", MEASURED, ids=str)
def test_measured_tiles_multiply(itemsize, gated, normed, tiles):
    """Rows that are no multiple of a block, and a last block that is not full."""
    torch.manual_seed(0)
    rows, inner, outputs = 3, tiles.block_k + 48, 2 * (tiles.block_n + 1)
    x, weight, scale = torch.randn(rows, inner), torch.randn(outputs, inner), None
    if itemsize == 1:
        weight, scale = pointwise_reference.quantize_rows(weight)
    around = {"norm": (torch.randn(inner), 1e-6)} if normed else {}
    gate = "silu" if gated else None
    ours = small_batch.gemv(x, weight, scale, **around, gate=gate, tiles=tiles)
    torch.testing.assert_close(ours, gemm_reference.gemv(x, weight, scale, **around, gate=gate), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wide_offset", [None, 1.0])
@pytest.mark.parametrize("outputs", [10, 1000])
@pytest.mark.parametrize("inner", [16, 64, 720, 2816, 5376, 30720])
def test_tiles_by_rule_multiply(inner, outputs, wide_offset):
    torch.manual_seed(0)
    x, weight = torch.randn(2, inner), torch.randn(10, inner)
    for normed in (False, True):
        for gated in (False, True):
            tiles = gemm_tiles.by_rule(GemmShape(outputs, inner, 4, gated, normed))
            around = {"norm": (torch.rand(inner), 1e-6), "wide_offset": wide_offset} if normed else {}
            gate = "gelu_tanh" if gated else None
            ours = small_batch.gemv(x, weight, **around, gate=gate, tiles=tiles)
            torch.testing.assert_close(ours, gemm_reference.gemv(x, weight, **around, gate=gate), rtol=1e-3, atol=1e-3)


def test_a_thread_has_whole_vectors_of_a_weight():
    for product, tiles in gemm_tiles._measured().items():
        each = tiles.block_n * tiles.block_k * product.itemsize / (32 * tiles.warps)
        assert 32 <= each <= 256, (product, tiles)


def test_a_measured_shape_is_found_and_its_line_reads_back():
    product, tiles = next(iter(gemm_tiles._measured().items()))
    assert gemm_tiles.vector_tiles(product) == tiles
    assert gemm_tiles.vector_tiles(product._replace(outputs=product.outputs + 1)) == gemm_tiles.by_rule(product)
    assert gemm_tiles.read([gemm_tiles.line_of(product, VectorTiles(1, 2, 3))]) == {product: VectorTiles(1, 2, 3)}


def test_a_weight_in_blocks_has_tiles_of_its_own_or_those_of_the_same_weight_without():
    gemm = GemmShape(512, 256, 1)
    table = {gemm: VectorTiles(8, 256, 1), gemm._replace(block=128, outputs=1024): VectorTiles(4, 256, 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_tiles, "_measured", lambda gpu=None: table)
        assert gemm_tiles.vector_tiles(gemm._replace(block=128)) == (8, 256, 1)
        assert gemm_tiles.vector_tiles(gemm._replace(block=128, outputs=1024)) == (4, 256, 1)
        unmeasured = gemm._replace(outputs=1024)
        assert gemm_tiles.vector_tiles(unmeasured) == gemm_tiles.by_rule(unmeasured)
    for shape in (gemm, gemm._replace(block=128)):
        assert gemm_tiles.read([gemm_tiles.line_of(shape, VectorTiles(8, 256, 1))]) == {shape: (8, 256, 1)}


def every_product():
    """Of many shapes, and those that were measured."""
    sides = (16, 64, 720, 1024, 2048, 2816, 5376, 17408)
    for itemsize in (1, 2):
        for gated in (False, True):
            for normed in (False, True):
                yield from (GemmShape(2 * n, k, itemsize, gated, normed) for n in sides for k in sides)
    yield from gemm_tiles._measured()


@pytest.mark.parametrize("rows", [2, 4])
def test_more_rows_keep_their_numbers_in_registers(rows):
    for product in every_product():
        tiles, single = gemm_tiles.vector_tiles(product, rows), gemm_tiles.vector_tiles(product)
        assert gemm_tiles.registers(product, tiles, rows) < 200, (product, tiles)
        assert tiles.warps == single.warps
        assert tiles.block_n <= single.block_n
        assert tiles.block_k <= single.block_k
        assert tiles.block_k * product.itemsize >= min(single.block_k * product.itemsize, 512), (product, tiles)


def test_tiles_of_one_row_would_not_do_for_four():
    """By ptxas, for compute capability 9.0: 5,832 and 832 bytes of a thread's numbers have no register."""
    large, small = GemmShape(8192, 2816, 1, normed=True), GemmShape(12288, 2048, 1, normed=True)
    assert gemm_tiles.vector_tiles(large) == (16, 1024, 4)
    assert gemm_tiles.vector_tiles(small) == (4, 1024, 1)
    for product in (large, small):
        assert gemm_tiles.registers(product, gemm_tiles.vector_tiles(product), 4) > 255


@pytest.mark.parametrize("numbers, rows", [(12_500_000, 4), (12_500_001, 1)])
def test_a_second_row_of_a_large_weight_leaves_the_vector_form(numbers, rows):
    for gemm in (unquantized.ON_GPU, fp8.ON_FP8_UNITS):
        linear = Linear(1, numbers)
        linear.gemm = gemm
        assert [n for n in range(1, 9) if linear.in_vector_form(n)] == list(range(1, rows + 1))
        assert [n for n in range(1, 9) if linear.wants_fp8(n)] == list(range(rows + 1, 9)) * (gemm is fp8.ON_FP8_UNITS)


@pytest.mark.parametrize("rows", [2, 5])
def test_what_comes_after_a_product_in_order_may_be_early_where_rows_are_few(rows):
    torch.manual_seed(0)
    linear = Linear(64, 40)
    linear.weight = nn.Parameter(torch.randn(linear.weight.shape), requires_grad=False)
    linear.gemm = unquantized.ON_GPU
    x, norm = torch.randn(rows, 64), torch.rand(64)
    for given, plain in ((x, x), (UnnormedRows(x, norm, 1e-6), pointwise_reference.rms_norm(x, norm, 1e-6))):
        if rows > 4 and isinstance(given, UnnormedRows):
            continue  # many rows never come so
        found, early = linear.in_order(given)
        assert early == (rows <= 4)
        torch.testing.assert_close(found, plain @ linear.weight.t(), rtol=1e-4, atol=1e-4)
