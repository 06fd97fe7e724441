"""How gemm.small_batch's vector form cuts a weight, by its shape.

What was found on an H100 is in tuned.json (other GPUs: runtime/gpu_target.py); other shapes go by rule. `python -m
engine.bench gemv --search` searches in the decode step itself, one product after the other: a chain of equal products
does not show what a kernel's last programs leave idle before the next one, and promised 103 tokens a second where 91
came. Plain Python, so that whoever prepares a model knows the tiles without a GPU.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from engine.kernels.runtime.gpu_target import Target, tuned_file

_FEW_OUTPUTS = 256
_MOST_REGISTERS = 150  # of a thread, which can have 255: the more it takes, the fewer find room beside each other
_WARP_BYTES = 512      # of a row that the threads of a warp read at once
_TUNED = Path(__file__).with_name("tuned.json")


class Product(NamedTuple):
    """A weight [outputs, inner], and what stands around its product."""

    outputs: int
    inner: int
    itemsize: int  # bytes of a weight: 2 (bf16) or 1 (fp8)
    gated: bool = False  # half of the outputs is the gate of the other half
    normed: bool = False  # x is normalised in passing


class VectorTiles(NamedTuple):
    """A program multiplies BLOCK_N rows of the weight (with a gate twice as many) by BLOCK_K columns at a time."""

    block_n: int
    block_k: int
    warps: int


def vector_tiles(product: Product, rows: int = 1, gpu: Target | None = None) -> VectorTiles:
    """For so many rows of x (1, 2 or 4). Of one row as measured, or by rule; of more these are cut until a thread has
    its numbers in registers. What has no room there goes to memory and back, and the driver sets that memory aside for
    every thread of the card: 16 x 1024 of a weight took 5,000 bytes a thread with four rows, 1 GiB in all.
    """
    tiles = _measured(gpu).get(product) or by_rule(product)
    if rows == 1:
        return tiles
    while registers(product, tiles, rows) > _MOST_REGISTERS and tiles.block_k * product.itemsize > _WARP_BYTES:
        tiles = tiles._replace(block_k=tiles.block_k // 2)
    while registers(product, tiles, rows) > _MOST_REGISTERS and tiles.block_n > 1:
        tiles = tiles._replace(block_n=tiles.block_n // 2)
    return tiles


def registers(product: Product, tiles: VectorTiles, rows: int) -> int:
    """Roughly how many a thread needs: two blocks of the weight and what of one is widened, and for each row of x its
    sums, x, and with a norm the squares of x. ptxas takes 0.5 to 1.6 times as many: for 2 and 4 rows of the benchmarks'
    52 products, cut to _MOST_REGISTERS, at most 240; in two cases 8 bytes of a thread go to memory all the same.
    """
    threads, part = 32 * tiles.warps, 16 // product.itemsize  # of a row a thread reads 16 bytes side by side
    numbers = tiles.block_n * (2 if product.gated else 1) * tiles.block_k // threads
    columns = part * max(1, tiles.block_k // part // threads)
    weights = 2 * numbers * product.itemsize // 4 + min(numbers, 64)
    return weights + rows * (numbers // part + columns * (2 if product.normed else 1))


def by_rule(product: Product) -> VectorTiles:
    """For shapes that nobody measured: long rows, and 64 bytes of the weight a thread."""
    if product.outputs <= _FEW_OUTPUTS:  # every one a program of its own: few programs would read for long
        rows, columns = (1, 2048)
    elif product.normed:  # each program reads all of x and the norm's weight: it should have some rows for them
        rows, columns = (4, 1024) if product.gated else (16, 512)
    else:
        rows, columns = (2, 2048) if product.gated else (4, 2048)
    columns = min(columns, 1 << (product.inner - 1).bit_length())
    size = rows * (2 if product.gated else 1) * columns * product.itemsize
    return VectorTiles(rows, columns, max(1, min(8, size // (64 * 32))))


def line_of(product: Product, tiles: VectorTiles) -> str:
    """As tuned.json has them, a line each."""
    return json.dumps({**product._asdict(), "tiles": tiles})


def read(lines: Iterable[str]) -> dict[Product, VectorTiles]:
    """Of lines as `line_of` makes them."""
    found = {}
    for line in lines:
        entry = json.loads(line)
        tiles = VectorTiles(*entry.pop("tiles"))
        found[Product(**entry)] = tiles
    return found


@functools.cache
def _measured(gpu: Target | None = None) -> dict[Product, VectorTiles]:
    """On `gpu`, or on the one most like it. They use no shared memory to speak of: any GPU can run them."""
    lines = tuned_file(_TUNED, gpu).read_text("utf-8").splitlines()
    return read(line.rstrip(",") for line in lines if line.startswith("{"))
