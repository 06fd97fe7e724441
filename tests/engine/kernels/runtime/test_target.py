"""What is chosen by the properties of a GPU: an H100's choices, which were measured, and those of others."""

import hashlib
import json
import shutil

import pytest

pytest.importorskip("triton")

from engine.kernels.attention import chunks as attention_chunks
from engine.kernels.attention import decode as attention_decode
from engine.kernels.gemm import small_batch
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.runtime import gpu_target
from engine.kernels.runtime.gpu_target import H100, Target

A100 = Target((8, 0), 166_912, 108)
L4, L40S = Target((8, 9), 101_376, 58), Target((8, 9), 101_376, 142)
H200, H100_PCIE = Target((9, 0), 232_448, 132), Target((9, 0), 232_448, 114)
B200 = Target((10, 0), 232_448, 148)
PRO_6000 = Target((12, 0), 101_376, 188)
SHAPES = ((128, 8, 2816, 704, 1), (256, 8, 2048, 512, 1), (128, 8, 2048, 768, 2))
OTHERS = [A100, L4, L40S, B200, PRO_6000]


def every_choice(gpu: Target) -> list:
    """Tiles of all kinds of kernels, for many shapes."""
    sides, found = (16, 720, 2048, 2816, 5376, 17408), []
    flags = (False, True)
    products = [
        GemmShape(2 * n, k, size, gated, normed)
        for n in sides for k in sides for size in (1, 2) for gated in flags for normed in flags
    ]  # fmt: skip
    for rows in (1, 2, 4):
        found += [gemm_tiles.vector_tiles(p, rows, gpu) for p in [*products, *gemm_tiles._measured()]]
    for shape in (moe_tiles.Shape(*shape) for shape in SHAPES):
        found += [moe_tiles.decode_tiles(shape, n, width, gpu) for n in (1, 2, 4) for width in (0, 512, 2112)]
        found += [moe_tiles.tiles_for(shape, n, gpu.shared_memory, gpu) for n in (5, 16, 64, 128, 300, 5000)]
    for dim in (64, 128, 256, 512):
        rows = attention_chunks._query_rows(dim, gpu)
        values = attention_chunks.LARGEST_OUTPUT if attention_chunks._shares_tiles(dim, gpu) else dim
        found += [rows, attention_chunks._mixed_tiles(rows, dim, values, gpu.shared_memory)]
        found += [attention_decode._decode_tile(n, dim, size, gpu.shared_memory) for n in (1, 8, 9, 64, 65)
                  for size in (1, 2)]  # fmt: skip
    return found + [small_batch._matrix_tiles(n, fp8, gpu.shared_memory) for n in (16, 32, 64, 128) for fp8 in flags]


def test_an_h100_and_an_h200_keep_their_choices():
    """As they were before choices depended on the GPU: documented speeds were measured with them. (Another search on an
    H100 may change them, and then this number.)"""
    assert H100 == H200
    text = json.dumps(every_choice(H100))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "9738ed1762ea1c84"


def test_a_gpu_with_as_much_shared_memory_gets_the_large_tiles():
    """A B200 has what an H100 has; cards with 99 KiB, and an A100, get smaller ones."""
    assert every_choice(H100_PCIE) == every_choice(H100)
    other = [(b, h) for b, h in zip(every_choice(B200), every_choice(H100), strict=True) if b != h]
    assert [b for b, _ in other if isinstance(b, int)] == [64], "rows of attention's tiles of 512 numbers"
    assert len(other) <= 2, "and what follows from them"
    for gpu, rows in ((H100, [128, 128, 128]), (B200, [128, 128, 64]), (A100, [128, 64, 16]), (L40S, [128, 64, 16])):
        assert [attention_chunks._query_rows(dim, gpu) for dim in (128, 256, 512)] == rows


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The shipped table of products, and those of three more GPUs, each with a product of its own."""
    common = tmp_path / "tuned.json"
    shutil.copy(gemm_tiles._TUNED, common)
    for n, gpu in enumerate((A100, L40S, PRO_6000), 1):
        line = gemm_tiles.line_of(GemmShape(7, 7, 2), VectorTiles(n, 512, 1))
        (tmp_path / f"tuned-{gpu_target.name_of(gpu)}.json").write_text(f"[\n{line}\n]\n")
    monkeypatch.setattr(gemm_tiles, "_TUNED", common)
    gemm_tiles._measured.cache_clear()
    yield common
    gemm_tiles._measured.cache_clear()


def test_a_gpu_takes_its_own_table_else_the_nearest_one(tables):
    def number(gpu):
        tiles = gemm_tiles.vector_tiles(GemmShape(7, 7, 2), gpu=gpu)
        return 0 if tiles == gemm_tiles.by_rule(GemmShape(7, 7, 2)) else tiles.block_n

    assert [number(gpu) for gpu in (H100, H200, H100_PCIE, None)] == [0, 0, 0, 0]
    assert [number(gpu) for gpu in (A100, L40S, PRO_6000)] == [1, 2, 3]
    assert number(L4) == 2, "of the same compute capability"
    assert number(Target((8, 6), 101_376, 84)) == 2, "an A10 is nearer to 8.9 than to 8.0"
    assert number(B200) == 0, "10.0 is nearer to 9.0 than to 12.0"
    assert number(Target((12, 0), 101_376, 170)) == 3
    assert gpu_target.tuned_on(tables, L40S) == "measured on a GPU of this kind"
    assert gpu_target.tuned_on(tables, H200) == "measured on a GPU of this kind"
    assert "tuned-8.9-142-99.json" in gpu_target.tuned_on(tables, L4)
    assert gpu_target.tuned_on(tables, B200) == "an H100's where they fit, else by rule"


@pytest.mark.parametrize("gpu", OTHERS, ids=str)
def test_tiles_of_experts_fit_every_gpu(gpu):
    for shape in SHAPES:
        for tokens in (5, 16, 64, 128, 300, 5000):
            whole = moe_tiles.Shape(*shape, shape[-1] == 1 and not gpu.fp8_units)
            tiles = moe_tiles.tiles_for(whole, tokens, gpu.shared_memory, gpu)
            assert moe_tiles.shared_bytes(tiles, whole) <= gpu.shared_memory
