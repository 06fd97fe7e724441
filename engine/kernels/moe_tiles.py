"""How the kernels of triton_moe cut their work, by the shape of a layer and the tokens of a step.

Found by `python -m engine.bench moe --search` where a line below names the shape; by rule otherwise. Plain Python, so
that whoever prepares a model knows the tiles without a GPU.
"""

from typing import NamedTuple

# Up to here each token reads its experts for itself, and fp8 weights multiply activations as they are.
VECTOR_TOKENS = 4
_BLOCK_ROWS = (16, 32, 64, 128)


class Shape(NamedTuple):
    """Of a layer's experts."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    itemsize: int  # bytes of a weight: 2 (bf16) or 1 (fp8)


class VectorTiles(NamedTuple):
    """A program multiplies BLOCK_N rows of a weight (twice as many with a gate) by BLOCK_K columns at a time."""

    block_n: int
    block_k: int
    warps: int


class MatrixTiles(NamedTuple):
    """A program multiplies BLOCK_N rows of a weight (twice as many with a gate) with a block of an expert's tokens."""

    block_n: int
    block_k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """For one number of tokens. `rows`: tokens of a block; 0: the vector form."""

    rows: int
    gate_up: VectorTiles | MatrixTiles
    down: VectorTiles | MatrixTiles


class StreamTiles(NamedTuple):
    """A program multiplies BLOCK_N rows of a weight (twice as many with a gate, as many of each expert in `down`) by
    BLOCK_K columns at a time, and has DEPTH such blocks on their way."""

    block_n: int
    block_k: int
    depth: int
    warps: int


class FewTiles(NamedTuple):
    """For the three kernels of triton_moe_few. The first two of these run in one, and so do the last two: they have the
    same number of warps."""

    router: StreamTiles  # of which all blocks are on their way at once
    beside_gate_up: StreamTiles
    gate_up: StreamTiles
    down: StreamTiles
    beside_down: StreamTiles


# Measured, for cards of compute capability 9.0: (E, k, H, I, bytes) -> {most tokens: tiles}, in order of tokens.
_MEASURED: dict[Shape, dict[int, Tiles]] = {}


def tiles_for(shape: Shape, tokens: int, shared: int) -> Tiles:
    """`shared`: bytes of shared memory that a program may have. Falls back to the rule beyond what was measured."""
    for most, tiles in _MEASURED.get(shape, {}).items():
        if tokens <= most and _shared_bytes(tiles, shape.itemsize) <= shared:
            return tiles
    if tokens <= VECTOR_TOKENS:
        return Tiles(0, vector_gate_up(shape), vector_down(shape))
    rows = block_rows(shape, tokens)
    return Tiles(rows, matrix(shape, rows, shared, gate=True), matrix(shape, rows, shared, gate=False))


def few_tiles(shape: Shape, router_itemsize: int, beside: int, beside_itemsize: int) -> FewTiles:
    """For up to VECTOR_TOKENS tokens. `beside`: width of the MLP beside the experts.

    64 to 128 bytes of a weight a thread are on their way, in rows of 256 bytes or more, and programs are as many as
    find room at a time: so much that the memory is never idle.
    """
    whole = _power_of_two(shape.hidden)
    router = StreamTiles(2, whole if whole * router_itemsize <= 4096 else 2048 // router_itemsize, 0, 4)
    beside_gate_up = StreamTiles(8 if beside >= 1024 else 4, 512 // beside_itemsize, 3, 4)
    beside_down = StreamTiles(16, 256 // beside_itemsize, 4, 4)
    if beside <= 1024:
        beside_down = StreamTiles(16, min(512, 1024 // beside_itemsize), 2, 4)
    gate_up = StreamTiles(4, 512 // shape.itemsize, 2, 1)
    down = StreamTiles(4, 256 // shape.itemsize, 3, 4)
    return FewTiles(router, beside_gate_up, gate_up, down, beside_down)


def all_kinds(shape: Shape, most: int, shared: int) -> list[int]:
    """Numbers of tokens, up to `most`, that stand for all: one for each set of kernels that a step may need."""
    seen, found = set(), []
    for tokens in range(1, most + 1):
        pairs = tokens * shape.top_k
        kind = tiles_for(shape, tokens, shared), chunk_size(pairs), pairs <= chunk_size(pairs)
        if kind not in seen:
            seen.add(kind)
            found.append(tokens)
    return found


def chunk_size(pairs: int) -> int:
    """Pairs that a program sorts by expert."""
    return 128 if pairs <= 8192 else 512


def block_rows(shape: Shape, tokens: int) -> int:
    """Half as many again as an expert has on average: few experts then need a second block, which reads it again."""
    wanted = 1.5 * tokens * shape.top_k / shape.num_experts
    return next((rows for rows in _BLOCK_ROWS if rows >= wanted), _BLOCK_ROWS[-1])


def max_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks that `pairs` (token, expert) pairs can make, however they fall on the experts."""
    return (pairs + min(pairs, num_experts) * (rows - 1)) // rows


def vector_gate_up(shape: Shape) -> VectorTiles:
    """As triton_gemv: 64 bytes of each weight a thread and step."""
    block_k = _power_of_two(shape.hidden)
    if block_k > 2048:
        block_k = next((b for b in (2048, 1024, 512) if shape.hidden % b == 0), 1024)
    return VectorTiles(4, block_k, _vector_warps(4 * block_k * shape.itemsize))


def vector_down(shape: Shape) -> VectorTiles:
    """Whole rows while they are short, so that much of an expert is on its way at a time."""
    block_k = _power_of_two(shape.inner)
    if block_k > 1024:
        block_k = next((b for b in (2048, 1024, 512) if shape.inner % b == 0), 1024)
    return VectorTiles(4, block_k, _vector_warps(4 * block_k * shape.itemsize))


def matrix(shape: Shape, rows: int, shared: int, *, gate: bool) -> MatrixTiles:
    """Few rows: deep pipelines, two programs on a multiprocessor. Many: large tiles, for the arithmetic."""
    inner, outputs = (shape.hidden, shape.inner) if gate else (shape.inner, shape.hidden)
    weights = 2 if gate else 1
    large = rows == 128 and outputs % 128 == 0 and shared > 128 << 10
    block_n = 128 if large else 64
    widest = (256 if rows <= 32 else 128) // shape.itemsize
    block_k = next((b for b in (widest, widest // 2) if inner % b == 0), widest // 2)
    room = shared - 1024 if large else shared // 2 - 1024
    stage = (weights * block_n + rows) * block_k * shape.itemsize
    return MatrixTiles(block_n, block_k, 8 if large else 4, max(2, min(6, room // stage)))


def _shared_bytes(tiles: Tiles, itemsize: int) -> int:
    """An upper bound."""
    if not tiles.rows:
        return 0
    gate_up, down = tiles.gate_up, tiles.down
    assert isinstance(gate_up, MatrixTiles)
    assert isinstance(down, MatrixTiles)
    most = max(
        (2 * gate_up.block_n + tiles.rows) * gate_up.block_k * gate_up.stages,
        (down.block_n + tiles.rows) * down.block_k * down.stages,
    )
    return most * itemsize + 1024


def _vector_warps(step_bytes: int) -> int:
    return max(1, min(8, step_bytes // (64 * 32)))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
