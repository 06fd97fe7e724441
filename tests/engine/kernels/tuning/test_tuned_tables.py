"""A server's own tables of tiles: preferred where they were measured, and never believed where they cannot be right."""

import json
import logging
import os

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.gemm import reference as gemm_reference
from engine.kernels.gemm import small_batch
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.moe.tiles import MatrixTiles, Measured, Shape, StreamTiles, Tiles
from engine.kernels.runtime import tuned_tables, warm_cache_hint
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.runtime.tuned_tables import Table

L40S = Target((8, 9), 101_376, 142, "NVIDIA L40S")
OTHER = L40S._replace(name="NVIDIA RTX 6000 Ada Generation")
PRODUCT, TILES = GemmShape(43008, 5376, 1, True), VectorTiles(2, 512, 2)  # the shipped table has other tiles for it
SHAPE = Shape(128, 8, 2816, 704, 1)
MATRIX = Tiles(16, MatrixTiles(64, 128, 4, 2), MatrixTiles(64, 128, 4, 2))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A directory of compiled kernels, and nothing remembered of other tests' tables."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gemm_tiles._measured.cache_clear()
    moe_tiles._measured.cache_clear()
    yield tmp_path
    gemm_tiles._measured.cache_clear()
    moe_tiles._measured.cache_clear()


def line(product=PRODUCT, tiles=TILES, **changes):
    return json.loads(gemm_tiles.line_of(product, tiles)) | changes


def moe_line(tiles=MATRIX, tokens=64, dense_width=None, **changes):
    return Measured(SHAPE, dense_width, tokens, tiles).as_json() | {"tiles": tiles._asdict()} | changes


def save(gemm=(), moe=(), gpu=L40S):
    tuned_tables.save(tuned_tables.path_for(gpu), gpu, Table(list(gemm), list(moe), ["x"], "y"))
    return tuned_tables.path_for(gpu)


def test_the_gpu_that_was_measured_prefers_its_table_and_others_take_the_shipped_one(caplog):
    shipped = gemm_tiles.vector_tiles(PRODUCT, gpu=OTHER)
    assert shipped != TILES
    caplog.set_level(logging.INFO)
    path = save([line()])
    assert path.name == "NVIDIA-L40S-8.9-142-99.json"
    assert gemm_tiles.vector_tiles(PRODUCT, gpu=L40S) == TILES
    assert [record.getMessage() for record in caplog.records] == [
        f"gemm kernels take the tiles that were measured on this server: {path}"
    ]
    for gpu in (OTHER, L40S._replace(name=""), None):
        assert gemm_tiles.vector_tiles(PRODUCT, gpu=gpu) == shipped
    unsearched = GemmShape(16384, 5376, 1)
    assert gemm_tiles.vector_tiles(unsearched, gpu=L40S) == gemm_tiles.vector_tiles(unsearched, gpu=OTHER)


def test_experts_take_what_was_measured_and_for_more_tokens_the_shipped_tiles():
    def chosen(gpu):
        return [moe_tiles.tiles_for(SHAPE, tokens, gpu.shared_memory, gpu) for tokens in (5, 16, 17, 64, 128)]

    shipped = chosen(OTHER)
    few = moe_tiles.decode_tiles(SHAPE, 1, 2112, OTHER)._replace(gate_up=StreamTiles(8, 256, 2, 2))
    save(moe=[moe_line(tokens=64), moe_line(few, 1, 2112)])
    assert chosen(L40S) == [MATRIX] * 4 + shipped[4:]
    assert moe_tiles.decode_tiles(SHAPE, 1, 2112, L40S) == few
    assert moe_tiles.decode_tiles(SHAPE, 1, 0, L40S) == moe_tiles.decode_tiles(SHAPE, 1, 0, OTHER)


def broken(text):
    return lambda path: path.write_text(text)


def edited(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind, spoil, why", [
    ("gemm", broken("{"), "it is not valid JSON"),
    ("gemm", broken("[" * 100_000), "it is not valid JSON"),
    ("gemm", broken("[1]"), "it is not a table of format 1"),
    ("gemm", lambda path: path.write_bytes(b"\xff\xfe"), "it is not valid JSON"),
    ("gemm", lambda path: path.write_bytes(b" " * (5 << 20)), "it is larger than 4 MiB"),
    ("gemm", edited(format=2), "it is not a table of format 1"),
    ("gemm", edited(gpu={"name": "NVIDIA H100"}), "it was measured on another GPU"),
    ("gemm", edited(gemm=None), "a list is missing or too long"),
    ("gemm", edited(done=[1]), "its record of the search is malformed"),
    ("gemm", edited(gemm=[line(tiles=[3, 512, 2])]), "gemm: entry 1 has block_n 3, not a power of two"),
    ("gemm", edited(gemm=[line(), line(tiles=[2, 1 << 20, 2])]), "entry 2 has block_k 1048576, not 16 to 16384"),
    ("gemm", edited(gemm=[line(tiles=[128, 16384, 1])]), "that no thread has registers for"),
    ("gemm", edited(gemm=[line(tiles=[2, "512", 2])]), 'entry 1 has block_k "512", not 16 to 16384'),
    ("gemm", edited(gemm=[line(tiles=[True, 512, 2])]), "entry 1 has block_n true, not 1 to 128"),
    ("gemm", edited(gemm=[line(tiles=[2, 512])]), "entry 1 is malformed"),
    ("gemm", edited(gemm=[line(gated="yes")]), "says neither yes nor no"),
    ("gemm", edited(gemm=["text"]), "entry 1 is malformed"),
    ("moe", edited(moe=[{}]), "moe: entry 1 is malformed"),
    ("moe", edited(moe=[moe_line(MATRIX._replace(down=MatrixTiles(128, 256, 8, 8)))]), "KiB of shared memory, and a"),
    ("moe", edited(moe=[moe_line(MATRIX._replace(rows=48))]), "entry 1 has rows 48, not a power of two"),
    ("moe", edited(moe=[moe_line(tokens=3)]), "entry 1 has tokens 3, not 5 to"),
    ("moe", edited(moe=[moe_line(shape=[8, 9, 64, 64, 1])]), "entry 1 has an impossible shape"),
    ("moe", edited(moe=[moe_line(shape=[8])]), "entry 1 is malformed"),
])  # fmt: skip
def test_a_table_that_cannot_be_right_is_one_line_in_the_log(caplog, kind, spoil, why):
    shipped = gemm_tiles.vector_tiles(PRODUCT, gpu=OTHER), moe_tiles.tiles_for(SHAPE, 64, L40S.shared_memory, OTHER)
    path = save([line()], [moe_line()])
    spoil(path)
    if kind == "gemm":
        assert gemm_tiles.vector_tiles(PRODUCT, gpu=L40S) == shipped[0]
        gemm_tiles.vector_tiles(GemmShape(7, 7, 2), gpu=L40S)
    else:
        assert moe_tiles.tiles_for(SHAPE, 64, L40S.shared_memory, L40S) == shipped[1]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = record.getMessage()
    assert said.startswith(f"{path}: ")
    assert why in said
    assert said.endswith("; the tiles that come with Atoll are used.")
    assert "\n" not in said


def test_a_table_that_cannot_be_written_leaves_the_old_one(cache, monkeypatch):
    path = save([line()])
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save([line(), line(GemmShape(1, 2, 1))])
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_kernels_run_with_the_tiles_of_the_table(monkeypatch):
    """In the interpreter: the launch has them, and the result is right."""
    product = GemmShape(96, 256, 4)
    tiles = VectorTiles(8, 64, 2)
    assert tiles != gemm_tiles.by_rule(product)
    save([line(product, tiles)])
    started = []
    kernel = small_batch._vector_kernel
    monkeypatch.setattr(small_batch, "target_of", lambda _: L40S)
    monkeypatch.setattr(small_batch, "_vector_kernel", lambda *a, **k: (started.append(k), kernel(*a, **k)))
    torch.manual_seed(0)
    x, weight = torch.randn(1, 256), torch.randn(96, 256) / 16
    y = small_batch.gemv(x, weight)
    (constants,) = started
    assert (constants["BLOCK_N"], constants["BLOCK_K"], constants["num_warps"]) == tiles
    torch.testing.assert_close(y, gemm_reference.gemv(x, weight), rtol=1e-3, atol=1e-3)


def test_a_start_with_another_table_is_another_start():
    warm_cache_hint.write("a")
    assert warm_cache_hint.found("a")
    path = save([line()])
    assert not warm_cache_hint.found("a"), "it may need other kernels"
    path.unlink()
    assert warm_cache_hint.found("a")
