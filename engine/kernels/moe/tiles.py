"""How the kernels of moe.experts and moe.decode cut their work into tiles, by the shape of a layer and the number of
tokens in a step.

Tiles that were measured on an H100 are in tuned.json (other GPUs: runtime/gpu_target.py); those that an operator
measured on this server are in a separate table (runtime/tuned_tables.py); other shapes follow a rule. Plain Python, so
that warm-up knows the tiles without a GPU.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from engine.kernels.runtime import tuned_tables
from engine.kernels.runtime.gpu_target import LARGE_SHARED, Target, tuned_file
from engine.kernels.runtime.tuned_tables import TableError, number

if TYPE_CHECKING:
    import torch

VECTOR_TOKENS = 4  # up to this many tokens, each token reads its experts' weights for itself: moe.decode
_INT4_PAIR_TOKENS = 8  # of int4, for which blocks of 16 rows take as long as 16 tokens that read their experts alone
ROUTED_TOKENS = 64  # up to this many, one kernel does all between x and the grouped pairs: moe.routing
JOINED_TOKENS = 256  # up to this many, a dense branch may run as further experts: moe.few_tokens
SCALE_BLOCK = 128  # rows and columns of a weight that share a scale in the form "blocks"
_BLOCK_ROWS = (16, 32, 64, 128)
_TUNED = Path(__file__).with_name("tuned.json")


Key = tuple[int | str | None, ...]  # a shape and the width of the dense branch
# Scales of a stack of weights: one for each output (or none) | for each block of 128 x 128 numbers | of int4, int8 and
# fp4, for each output and group of columns.
Form = Literal["rows", "blocks", "int4", "int8", "fp4"]
_IN_BYTES: tuple[Form, ...] = ("int4", "fp4")  # two numbers in a byte


class Shape(NamedTuple):
    """The shape of a layer's experts."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    itemsize: int  # bytes of a weight: 2 (bf16) or 1 (fp8, int8)
    widened: bool = False  # 8-bit weights are multiplied with 16-bit activations: the GPU has no fp8 tensor cores, ...
    form: Form = "rows"

    @property
    def x_itemsize(self) -> int:
        """Bytes of an activation on the tensor cores."""
        return 2 if self.widened else self.itemsize


def form_of(weight: "torch.Tensor", scale: "torch.Tensor | None") -> Form:
    """The form of a stack of experts with these weights and scales."""
    if scale is None or scale.dim() == 2:
        return "rows"
    if weight.is_floating_point():
        return "blocks"
    if is_int8(weight):
        return "int8"
    return "fp4" if scale.element_size() == 1 else "int4"


def is_int8(weight: "torch.Tensor") -> bool:
    return weight.is_signed() and not weight.is_floating_point()


def by_pairs(form: Form) -> int:
    """Up to how many tokens each (token, expert) pair reads its expert's weights for itself."""
    return _INT4_PAIR_TOKENS if form == "int4" else VECTOR_TOKENS


def groups_fit(group: int, inner: int) -> bool:
    """Whether the kernels read rows of `inner` integers in such groups."""
    return inner % 64 == 0 and (group in (32, 64) or group % SCALE_BLOCK == 0 or group == inner)


def reads_fp8(group: int) -> bool:
    """Whether int4 in such groups meets fp8 activations: a product for each smaller group would take longer."""
    return group >= SCALE_BLOCK


def widens(weight: "torch.Tensor", gpu: Target, *, fp8_activations: bool, int8_activations: bool) -> bool:
    """Whether weights of 8 bits or less meet activations in 16 bits, in kernels for many tokens."""
    return not (int8_activations if is_int8(weight) else fp8_activations and gpu.fp8_units)


def shape_of(w2: "torch.Tensor", scale2: "torch.Tensor | None", top_k: int, *, widened: bool = False) -> Shape:
    """The shape of experts with these weights [E, H, I] of their last product, and their scales."""
    (num_experts, hidden, inner), form = w2.shape, form_of(w2, scale2)
    if form in _IN_BYTES:
        inner *= 2
    if scale2 is not None and form == "int4":
        widened = widened or not reads_fp8(inner // scale2.shape[2])
    widened = widened or form in ("int8", "fp4")
    size = w2.element_size()
    return Shape(num_experts, top_k, hidden, inner, size, widened and size == 1, form)


class MatrixTiles(NamedTuple):
    """A program multiplies BLOCK_N rows of a weight (twice as many with a gate) by a block of an expert's tokens."""

    block_n: int
    block_k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles for more than VECTOR_TOKENS tokens. `rows`: tokens in a block."""

    rows: int
    gate_up: MatrixTiles
    down: MatrixTiles


class StreamTiles(NamedTuple):
    """A program reads BLOCK_N rows of a weight (with a gate twice as many; in `down` that many of each expert), BLOCK_K
    columns at a time, with DEPTH such blocks in flight."""

    block_n: int
    block_k: int
    depth: int
    warps: int


class DecodeTiles(NamedTuple):
    """Tiles for the kernels of moe.decode. The first two are for one kernel, and so are the last two: the two of a
    kernel have the same number of warps."""

    router: StreamTiles  # all of its blocks are in flight at once: its depth has no effect
    dense_gate_up: StreamTiles
    gate_up: StreamTiles
    down: StreamTiles
    dense_down: StreamTiles  # its block_n has an effect only if the dense branch has an output of its own


def tiles_for(shape: Shape, tokens: int, shared: int, gpu: Target | None = None) -> Tiles:
    """Tiles for more than VECTOR_TOKENS tokens. `shared`: bytes of shared memory that a program may have."""
    for most, tiles in _measured(gpu).get((*shape, None), ()):
        if tokens <= most and shared_bytes(tiles, shape) <= shared:
            return tiles
    rows = block_rows(shape, tokens)
    if shape.form != "rows":  # as many as were measured for the other form
        found = _measured(gpu).get((*shape._replace(form="rows"), None), ())
        rows = next((tiles.rows for most, tiles in found if tokens <= most), rows)
    return Tiles(rows, matrix(shape, rows, shared, gate=True), matrix(shape, rows, shared, gate=False))


def decode_tiles(shape: Shape, tokens: int, dense_width: int = 0, gpu: Target | None = None) -> DecodeTiles:
    """Tiles for up to VECTOR_TOKENS tokens. `dense_width`: width of the dense branch, whose weights have the same
    dtype.

    The rule keeps 64 to 128 bytes of a weight in flight per thread, in rows of 256 bytes or more, and has enough
    programs that the memory is never idle.
    """
    measured = _measured(gpu)
    own = measured.get((*shape, dense_width))  # those of the other form read the same bytes
    for most, tiles in own or measured.get((*shape._replace(form="rows"), dense_width), ()):
        if tokens <= most:
            return tiles
    whole = _power_of_two(shape.hidden)  # the router's weights always take two bytes each
    row, short_row = 512 // shape.itemsize, max(128, 2048 // _power_of_two(shape.top_k)) // shape.itemsize
    wide = dense_width > 1024
    return DecodeTiles(
        router=StreamTiles(2, whole if whole <= 2048 else 1024, 1, 4),
        dense_gate_up=StreamTiles(8 if wide else 4, row, 3, 4),
        gate_up=StreamTiles(2, 2 * row, 2, 1),
        down=StreamTiles(4, min(short_row, _power_of_two(shape.inner)), 3, 4),
        dense_down=StreamTiles(16, 256 // shape.itemsize, 4, 4) if wide else StreamTiles(16, row, 2, 4),
    )


def all_kinds(shape: Shape, most: int, shared: int, gpu: Target | None = None) -> list[int]:
    """Token counts, up to `most`, that cover every set of kernels that a step may need."""
    seen, found = set(), []
    for tokens in range(1, most + 1):
        pairs = tokens * shape.top_k
        if shape.form not in ("rows", "blocks") and tokens <= by_pairs(shape.form):
            kind = 0
        elif tokens <= VECTOR_TOKENS:
            kind = _power_of_two(tokens)
        else:
            router = routing_tokens(tokens) if tokens <= ROUTED_TOKENS else 0
            alone = tokens > JOINED_TOKENS
            kind = tiles_for(shape, tokens, shared, gpu), chunk_size(pairs), pairs <= chunk_size(pairs), router, alone
        if kind not in seen:
            seen.add(kind)
            found.append(tokens)
    return found


def routing_tokens(tokens: int) -> int:
    """The most tokens of the variant of the routing kernel that so many tokens use."""
    return max(8, _power_of_two(tokens))


def chunk_size(pairs: int) -> int:
    """How many pairs one program groups by expert."""
    return 128 if pairs <= 8192 else 512


def block_rows(shape: Shape, tokens: int) -> int:
    """Rows of a block: an expert's average number of tokens. A second block of an expert finds the weights in the L2
    cache; rows that are padding cost arithmetic."""
    wanted = tokens * shape.top_k / shape.num_experts
    return next((rows for rows in _BLOCK_ROWS if rows >= wanted), _BLOCK_ROWS[-1])


def max_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks that `pairs` (token, expert) pairs can make, whichever experts they belong to."""
    return (pairs + min(pairs, num_experts) * (rows - 1)) // rows


def matrix(shape: Shape, rows: int, shared: int, *, gate: bool) -> MatrixTiles:
    """Tiles by rule. Few rows are bound by memory: deep pipelines, two programs per multiprocessor. Many rows are bound
    by arithmetic: large tiles. The last tile may reach beyond the weight's end."""
    inner, outputs = (shape.hidden, shape.inner) if gate else (shape.inner, shape.hidden)
    weights = 2 if gate else 1
    if shape.form != "rows":  # each step has a product of its own, in as many registers as the sums
        block_n, warps = 128 if rows == 128 and not gate else 64, 8 if rows == 128 else 4
        short = inner % SCALE_BLOCK != 0 or (shape.form == "int8" and rows == 128)  # there longer steps need a stack
        block_k = SCALE_BLOCK // 2 if short else SCALE_BLOCK
        of_weight = weights * block_n * block_k // (2 if shape.form in _IN_BYTES else 1)
        stage = of_weight + rows * shape.x_itemsize * block_k
        room = shared - 1024 if rows == 128 else shared // 2 - 1024
        return MatrixTiles(block_n, block_k, warps, max(2, min(6, room // stage)))
    if shape.itemsize == shape.x_itemsize == 1 and shared >= LARGE_SHARED and (rows > 32 or (rows == 32 and not gate)):
        if gate:
            return MatrixTiles(128, 128, 8, 4)
        return MatrixTiles(256 if outputs % 256 == 0 else 128, 128, 8, 4 if rows == 64 else 3)
    large = rows == 128 and outputs % 128 == 0 and shared > 128 << 10
    block_n = 128 if large else 64
    widest = (256 if rows <= 32 else 128) // shape.x_itemsize
    block_k = next((b for b in (widest, widest // 2) if inner % b == 0), widest // 2)
    room = shared - 1024 if large else shared // 2 - 1024
    stage = (weights * block_n * shape.itemsize + rows * shape.x_itemsize) * block_k
    return MatrixTiles(block_n, block_k, 8 if large else 4, max(2, min(6, room // stage)))


def shared_bytes(tiles: Tiles, shape: Shape) -> int:
    """An upper bound of the shared memory that these tiles take."""
    each, x_each = shape.itemsize, tiles.rows * shape.x_itemsize
    gate_up, down = tiles.gate_up, tiles.down
    return 1024 + max(
        (2 * gate_up.block_n * each + x_each) * gate_up.block_k * gate_up.stages,
        (down.block_n * each + x_each) * down.block_k * down.stages,
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


# -- measured tiles ---------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The best tiles of a shape for up to `tokens` tokens; `dense_width` is None for more than VECTOR_TOKENS."""

    shape: Shape
    dense_width: int | None
    tokens: int
    tiles: Tiles | DecodeTiles

    def as_json(self) -> dict[str, Any]:
        shape: tuple[Any, ...] = self.shape  # without defaults at the end
        while len(shape) > 5 and shape[-1] == Shape._field_defaults[Shape._fields[len(shape) - 1]]:
            shape = shape[:-1]
        return {"shape": shape, "dense_width": self.dense_width, "tokens": self.tokens, "tiles": self.tiles._asdict()}


def write_measured(path: Path, found: Iterable[Measured]) -> None:
    """Write tuned.json, one entry a line: those in `path`, replaced by these where both have one."""
    entries = {} if not path.exists() else {_key(entry): entry for entry in _read(path)}
    entries |= {_key(entry): entry for entry in found}
    lines = ",\n".join(json.dumps(entries[key].as_json()) for key in sorted(entries, key=str))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _key(entry: Measured) -> Key:
    return *entry.shape, entry.dense_width, entry.tokens


def _read(path: Path) -> list[Measured]:
    return [_entry(raw) for raw in json.loads(path.read_text(encoding="utf-8"))]


def _entry(raw: dict[str, Any]) -> Measured:
    tiles: Tiles | DecodeTiles
    if raw["dense_width"] is None:
        rows, gate_up, down = (raw["tiles"][name] for name in Tiles._fields)
        tiles = Tiles(rows, MatrixTiles(*gate_up), MatrixTiles(*down))
    else:
        tiles = DecodeTiles(*[StreamTiles(*raw["tiles"][name]) for name in DecodeTiles._fields])
    return Measured(Shape(*raw["shape"]), raw["dense_width"], raw["tokens"], tiles)


def parse(raw: Any, gpu: Target) -> Measured:
    """An entry of a server's own table. Raises TableError if this GPU cannot run it."""
    entry = _entry(raw)
    shape, tiles = entry.shape, entry.tiles
    for name, value in zip(Shape._fields[:4], shape[:4], strict=True):
        number(value, name, 1, 1 << 24)
    number(shape.itemsize, "itemsize", 1, 2)
    if type(shape.widened) is not bool or shape.form not in get_args(Form) or shape.top_k > shape.num_experts:
        raise TableError("has an impossible shape")
    if isinstance(tiles, Tiles):
        number(entry.tokens, "tokens", VECTOR_TOKENS + 1, 1 << 24)
        number(tiles.rows, "rows", _BLOCK_ROWS[0], _BLOCK_ROWS[-1], power_of_two=True)
        for each in (tiles.gate_up, tiles.down):
            number(each.block_n, "block_n", 16, 256, power_of_two=True)
            number(each.block_k, "block_k", 16, 1024, power_of_two=True)
            number(each.warps, "warps", 1, 16, power_of_two=True)
            number(each.stages, "stages", 1, 8)
            if shape.form != "rows" and (each.block_n > SCALE_BLOCK or each.block_k > SCALE_BLOCK):
                raise TableError("has tiles larger than the blocks that share a scale")
        if shared_bytes(tiles, shape) > gpu.shared_memory:
            raise TableError(
                f"needs {shared_bytes(tiles, shape) >> 10} KiB of shared memory, and a program may have "
                f"{gpu.shared_memory >> 10}"
            )
        return entry
    number(entry.tokens, "tokens", 1, VECTOR_TOKENS)
    number(entry.dense_width, "dense_width", 0, 1 << 24)
    for stream in tiles:
        number(stream.block_n, "block_n", 1, 128, power_of_two=True)
        number(stream.block_k, "block_k", 16, 8192, power_of_two=True)
        number(stream.depth, "depth", 1, 8)
        number(stream.warps, "warps", 1, 16, power_of_two=True)
    if tiles.router.warps != tiles.dense_gate_up.warps or tiles.down.warps != tiles.dense_down.warps:
        raise TableError("has different warps in one kernel")
    return entry


@functools.cache
def _measured(gpu: Target | None = None) -> dict[Key, list[tuple[int, Any]]]:
    """(shape, dense_width) -> (most tokens, tiles), in order of tokens. Entries of this server's own table; for more
    tokens than it covers, those of the shipped table of the most similar GPU, if they fit this one."""
    table = _by_shape(tuned_tables.entries("moe", gpu, parse))
    for key, shipped in _by_shape(_read(tuned_file(_TUNED, gpu))).items():
        own = table.setdefault(key, [])
        most = own[-1][0] if own else 0
        own += [(tokens, tiles) for tokens, tiles in shipped if tokens > most]
    return table


def _by_shape(entries: Iterable[Measured]) -> dict[Key, list[tuple[int, Any]]]:
    table: dict[Key, list[tuple[int, Any]]] = {}
    for entry in sorted(entries, key=lambda entry: entry.tokens):
        table.setdefault((*entry.shape, entry.dense_width), []).append((entry.tokens, entry.tiles))
    return table
