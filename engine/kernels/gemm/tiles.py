"""How gemm.small_batch's vector form cuts a weight into tiles, by its shape.

Tiles that were measured on an H100 are in tuned.json (other GPUs: runtime/gpu_target.py); those that an operator
measured on this server are in a separate table (runtime/tuned_tables.py); other shapes follow a rule. Plain Python, so
that warm-up knows the tiles without a GPU.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from engine.kernels.runtime import tuned_tables
from engine.kernels.runtime.gpu_target import Target, tuned_file
from engine.kernels.runtime.tuned_tables import TableError, number

_FEW_OUTPUTS = 256
_MOST_REGISTERS = 150  # registers per thread (the limit is 255): the more it uses, the fewer threads run concurrently
_REGISTERS = 512       # estimated by `registers`; a table entry above this is a mistake
_WARP_BYTES = 512      # bytes of a row that a warp reads at once
_TUNED = Path(__file__).with_name("tuned.json")


class GemmShape(NamedTuple):
    """A weight [outputs, inner], and the operations that are fused into its GEMM."""

    outputs: int
    inner: int
    itemsize: int  # bytes of a weight: 2 (bf16) or 1 (fp8, int8)
    gated: bool = False  # half of the outputs gate the other half
    normed: bool = False  # x is normalised in passing
    block: int = 0  # of an fp8 weight with a scale for each block x block numbers


class VectorTiles(NamedTuple):
    """A program reads BLOCK_N rows of the weight (twice as many with a gate), BLOCK_K columns at a time."""

    block_n: int
    block_k: int
    warps: int


def vector_tiles(gemm: GemmShape, rows: int = 1, gpu: Target | None = None) -> VectorTiles:
    """Tiles for 1, 2 or 4 rows of x. For one row: as measured, or by rule. A weight in blocks that was not measured has
    the tiles of the same weight without blocks. For more rows, these tiles are halved until a thread's numbers fit into
    registers. Otherwise they would spill, and the driver reserves spill memory for every thread of the GPU: up to 1 GiB
    in all.
    """
    measured = _measured(gpu)
    tiles = measured.get(gemm) or measured.get(gemm._replace(block=0)) or by_rule(gemm)
    if rows == 1:
        return tiles
    while registers(gemm, tiles, rows) > _MOST_REGISTERS and tiles.block_k * gemm.itemsize > _WARP_BYTES:
        tiles = tiles._replace(block_k=tiles.block_k // 2)
    while registers(gemm, tiles, rows) > _MOST_REGISTERS and tiles.block_n > 1:
        tiles = tiles._replace(block_n=tiles.block_n // 2)
    return tiles


def registers(gemm: GemmShape, tiles: VectorTiles, rows: int) -> int:
    """Roughly how many registers a thread needs: for two blocks of the weight, one of them widened, and for each row of
    x: its sums, x itself, and with a norm the squares of x. ptxas takes 0.5 to 1.6 times as many.
    """
    threads, part = 32 * tiles.warps, 16 // gemm.itemsize  # a thread reads 16 contiguous bytes of a row
    numbers = tiles.block_n * (2 if gemm.gated else 1) * tiles.block_k // threads
    columns = part * max(1, tiles.block_k // part // threads)
    weights = 2 * numbers * gemm.itemsize // 4 + min(numbers, 64)
    return weights + rows * (numbers // part + columns * (2 if gemm.normed else 1))


def by_rule(gemm: GemmShape) -> VectorTiles:
    """Tiles for shapes without a measurement: long rows, and 64 bytes of the weight per thread."""
    if gemm.outputs <= _FEW_OUTPUTS:  # one program per output, or too few programs would share the reading
        rows, columns = (1, 2048)
    elif gemm.normed:  # each program reads all of x and the norm's weight: several rows share that cost
        rows, columns = (4, 1024) if gemm.gated else (16, 512)
    else:
        rows, columns = (2, 2048) if gemm.gated else (4, 2048)
    columns = min(columns, 1 << (gemm.inner - 1).bit_length())
    size = rows * (2 if gemm.gated else 1) * columns * gemm.itemsize
    return VectorTiles(rows, columns, max(1, min(8, size // (64 * 32))))


def line_of(gemm: GemmShape, tiles: VectorTiles) -> str:
    """An entry of tuned.json, as one line."""
    shape = {name: value for name, value in gemm._asdict().items() if name != "block" or value}
    return json.dumps({**shape, "tiles": tiles})


def read(lines: Iterable[str]) -> dict[GemmShape, VectorTiles]:
    """Read lines that `line_of` wrote."""
    found = {}
    for line in lines:
        entry = json.loads(line)
        tiles = VectorTiles(*entry.pop("tiles"))
        found[GemmShape(**entry)] = tiles
    return found


def write_measured(path: Path, gemm: GemmShape, tiles: VectorTiles) -> None:
    """Add or replace an entry of the tuned.json at `path`; an entry that equals the rule's tiles is left out."""
    entries = {}
    if path.exists():
        entries = read(json.dumps(entry) for entry in json.loads(path.read_text("utf-8")))
    if tiles == by_rule(gemm):
        entries.pop(gemm, None)
    else:
        entries[gemm] = tiles
    lines = ",\n".join(line_of(*entry) for entry in entries.items())
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


@functools.cache
def _measured(gpu: Target | None = None) -> dict[GemmShape, VectorTiles]:
    """From this server's own table if there is one, else from the shipped table of the most similar GPU. Any GPU can
    run these tiles: they use next to no shared memory."""
    lines = tuned_file(_TUNED, gpu).read_text("utf-8").splitlines()
    shipped = read(line.rstrip(",") for line in lines if line.startswith("{"))
    return shipped | dict(tuned_tables.entries("gemm", gpu, parse))


def parse(raw: Any, gpu: Target) -> tuple[GemmShape, VectorTiles]:
    """An entry of a server's own table. Raises TableError if this GPU cannot run it."""
    block_n, block_k, warps = raw["tiles"]
    gated, normed = raw["gated"], raw["normed"]
    if type(gated) is not bool or type(normed) is not bool:
        raise TableError("says neither yes nor no to a gate or a norm")
    gemm = GemmShape(
        number(raw["outputs"], "outputs", 1, 1 << 24), number(raw["inner"], "inner", 1, 1 << 24),
        number(raw["itemsize"], "itemsize", 1, 4, power_of_two=True), gated, normed,
        number(raw.get("block", 0), "block", 0, 1 << 10),
    )  # fmt: skip
    tiles = VectorTiles(
        number(block_n, "block_n", 1, 128, power_of_two=True), number(block_k, "block_k", 16, 16384, power_of_two=True),
        number(warps, "warps", 1, 16, power_of_two=True),
    )  # fmt: skip
    if registers(gemm, tiles, 1) > _REGISTERS:
        raise TableError(f"has tiles {list(tiles)} that no thread has registers for")
    return gemm, tiles
