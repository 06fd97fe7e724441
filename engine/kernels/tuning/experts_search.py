"""The search for the tiles of the experts' kernels (engine/kernels/moe/tiles.py), within a time budget.

For each number of tokens and each layer, one kernel after the other gets its best tiles; each candidate is timed within
the whole block. Meanwhile all kernels that may be needed are compiled in the background, in the order in which the
search will need them. If a candidate is not compiled yet, the search waits for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from engine.kernels.moe.tiles import (
    VECTOR_TOKENS,
    DecodeTiles,
    MatrixTiles,
    Measured,
    Shape,
    StreamTiles,
    Tiles,
    decode_tiles,
    matrix,
    shared_bytes,
    tiles_for,
)
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.tuning.experts_layer import Subject, inputs_for
from engine.kernels.tuning.rows import Row, say
from engine.kernels.tuning.timing import step_seconds

_REPEATS = 7
_BETTER = 0.99  # of the best time so far: smaller gains are noise
# For few tokens: (rows of a weight, bytes of each, blocks in flight, warps).
_GATE_UP = ((4, 512, 2, 1), (4, 512, 3, 1), (4, 512, 3, 2), (2, 1024, 2, 1), (8, 256, 3, 1), (8, 512, 2, 2),
            (4, 1024, 2, 2), (8, 512, 2, 4))  # fmt: skip
_DOWN = ((4, 256, 3, 4), (4, 256, 2, 4), (8, 256, 2, 4), (8, 256, 3, 8), (4, 256, 3, 2), (2, 512, 2, 4),
         (4, 128, 4, 4))  # fmt: skip
_BESIDE = ((8, 512, 3, 4), (4, 512, 4, 4), (16, 512, 2, 4), (16, 256, 4, 4), (8, 512, 2, 8))
_ROUTER_ROWS = (1, 2, 4)
# For GEMMs on tensor cores: (outputs per program, bytes of a row, warps, stages).
_MATRIX = ((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 4), (128, 128, 4, 3),
           (128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 2), (128, 256, 8, 3))  # fmt: skip
_ROWS = (16, 32, 64, 128)

AnyTiles = Tiles | DecodeTiles
Change = dict[str, Any]  # fields of the tiles, and their new values


class Ready(NamedTuple):
    """How a search times a block with some tiles, and learns whether its kernels are compiled."""

    seconds: Callable[[Subject, int, AnyTiles], float]
    compiled: Callable[[Subject, int, AnyTiles], bool]  # waits until they are compiled; False: that failed


@dataclass(slots=True)
class Cell:
    """One layer at one number of tokens."""

    subject: Subject
    tokens: int
    start: AnyTiles
    stages: list[list[Change]] = field(default_factory=list)

    def all_tiles(self) -> list[AnyTiles]:
        """All tiles that the search may try, except combinations, which need no further kernels."""
        return [self.start, *[self.start._replace(**change) for stage in self.stages for change in stage]]


def cells(
    subjects: Sequence[Subject], tokens: Sequence[int], shared: int, gpu: Target | None = None
) -> list[Cell]:
    """The cells in the order of the search: all layers at one number of tokens, then at the next."""
    found = []
    for number in tokens:
        for subject in subjects:
            if number <= VECTOR_TOKENS:
                start: AnyTiles = decode_tiles(subject.shape, number, subject.width, gpu)
                stages = decode_stages(start, subject.shape, subject.width)
                if number > 1:  # skip its kernel: it is slow to compile, and reads the same weights
                    del stages[-1]
            else:
                start = tiles_for(subject.matrix_shape, number, shared, gpu)
                stages = matrix_stages(start, subject, shared)
            other = [[change for change in stage if start._replace(**change) != start] for stage in stages]
            found.append(Cell(subject, number, start, other))
    return found


def decode_stages(start: DecodeTiles, shape: Shape, width: int) -> list[list[Change]]:
    """The stages: gate and up GEMMs of the experts; down GEMMs, all with the same number of warps; the router, and the
    dense branch of this `width` (0: none) in parallel with it."""
    size = shape.itemsize

    def tiles(rows: int, row_bytes: int, depth: int, warps: int) -> StreamTiles:
        return StreamTiles(rows, row_bytes // size, depth, warps)

    gate_up: list[Change] = [{"gate_up": tiles(*each)} for each in _GATE_UP]
    down: list[Change] = [
        {"down": tiles(*each), "dense_down": start.dense_down._replace(warps=each[-1])} for each in _DOWN
    ]
    router: list[Change] = [{"router": start.router._replace(block_n=rows)} for rows in _ROUTER_ROWS]
    if width:
        dense: list[Change] = [
            {"dense_gate_up": tiles(*each), "router": start.router._replace(warps=each[-1])} for each in _BESIDE
        ]
        router += dense
    return [gate_up, down, router]


def matrix_stages(start: Tiles, subject: Subject, shared: int) -> list[list[Change]]:
    """The stages: the rows of a block, with tiles by rule; then both GEMMs, for the rows that the rule gives."""
    shape = subject.matrix_shape
    rows: list[Change] = []
    at = _ROWS.index(start.rows)
    for other in _ROWS[max(0, at - 1) : at + 2]:
        if other != start.rows:
            by_rule = [matrix(shape, other, shared, gate=gate) for gate in (True, False)]
            rows.append({"rows": other, "gate_up": by_rule[0], "down": by_rule[1]})
    return [rows, *[matrix_candidates(start, name, shape, shared) for name in ("gate_up", "down")]]


def matrix_candidates(start: Tiles, name: str, shape: Shape, shared: int) -> list[Change]:
    """Tiles for the kernel `name` for which the GPU has enough shared memory and registers."""
    found: list[Change] = []
    for block_n, row_bytes, warps, stages in _MATRIX:
        change: Change = {name: MatrixTiles(block_n, row_bytes // shape.itemsize, warps, stages)}
        weights = 2 if name == "gate_up" else 1
        numbers = weights * block_n * start.rows // (32 * warps)  # results that a thread holds
        fits = shared_bytes(start._replace(**change), shape) <= shared
        if fits and numbers <= 128:
            found.append(change)
    return found


def best_of(cell: Cell, ready: Ready, deadline: float) -> tuple[Measured, Row] | None:
    """The fastest tiles and a row about them; None if the time is up. Candidates that failed to compile are skipped."""
    best, fastest, tried = cell.start, 0.0, 0
    for stage in [[{}], *cell.stages]:
        before = best
        for change in stage:
            if time.monotonic() > deadline:
                return None
            if change and "rows" not in change and _rows(best) != _rows(cell.start):
                continue  # candidates for the number of rows that the rule gives
            candidate = before._replace(**change)
            if not ready.compiled(cell.subject, cell.tokens, cell.start._replace(**change)):
                continue
            took = ready.seconds(cell.subject, cell.tokens, candidate)
            tried += 1
            if not change:
                fastest = by_rule = took
            elif took < fastest * _BETTER:
                best, fastest = candidate, took
    if not fastest:
        return None
    row = {
        "tokens": cell.tokens, "tried": tried, "us_by_rule": round(by_rule * 1e6, 1), "us": round(fastest * 1e6, 1),
        "tiles": str(best),
    }  # fmt: skip
    if cell.tokens <= VECTOR_TOKENS:
        return Measured(cell.subject.shape, cell.subject.width, cell.tokens, best), row
    return Measured(cell.subject.matrix_shape, None, cell.tokens, best), row


def _rows(tiles: AnyTiles) -> int:
    return tiles.rows if isinstance(tiles, Tiles) else 0


def search(todo: Sequence[Cell], ready: Ready, budget: float) -> Iterator[tuple[Subject, Measured, Row]]:
    """Search one cell after the other until `budget` seconds are over; cells that were not reached are left out."""
    deadline = time.monotonic() + budget
    for cell in todo:
        found = best_of(cell, ready, deadline)
        if found is not None:
            yield cell.subject, *found


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def run_block(
    subject: Subject, x: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor], tiles: AnyTiles
) -> torch.Tensor:
    """Run a layer once. With few tokens: the whole block; with more: only the experts, with a given routing."""
    from engine.kernels.moe.decode import sparse_block
    from engine.kernels.moe.experts import routed_experts

    layer = subject.layer
    if isinstance(tiles, DecodeTiles):
        out, _ = sparse_block(
            x, layer.gate.weight, *layer.experts.stacks, top_k=layer.gate.top_k, gate=layer.experts.gate,
            dense=subject.dense, tiles=tiles,
        )  # fmt: skip
        return out
    return routed_experts(x, *routing, *layer.experts.stacks, gate=layer.experts.gate, tiles=tiles)


class OnGpu:
    """A search's `Ready` on this machine's GPU, as a context: compilation in the background ends with it."""

    def __init__(self, todo: Sequence[Cell], device: torch.device) -> None:
        from engine.kernels.runtime import compile_pool
        from engine.kernels.runtime.compile_ahead import line_of
        from engine.kernels.runtime.launcher import recording

        self._device, self._inputs = device, {}
        capability = torch.cuda.get_device_capability(device)
        self._lines: dict[tuple[int, int, AnyTiles], set[str]] = {}
        order: dict[str, None] = {}
        for cell in todo:
            for tiles in cell.all_tiles():
                first, *_ = self._steps(cell.subject, cell.tokens, tiles)
                with recording() as jobs:
                    first()
                lines = {line_of(job, capability) for job in jobs}
                self._lines[id(cell.subject), cell.tokens, tiles] = lines
                order |= dict.fromkeys(sorted(lines))
        say(f"{len(order)} kernels to compile")
        self._pool = compile_pool.take()
        self._pool.submit(list(order))

    def __enter__(self) -> Ready:
        return Ready(self._seconds, self._compiled)

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def _compiled(self, subject: Subject, tokens: int, tiles: AnyTiles) -> bool:
        return not self._pool.wait(self._lines[id(subject), tokens, tiles])

    def _seconds(self, subject: Subject, tokens: int, tiles: AnyTiles) -> float:
        from engine.kernels.runtime.driver import KernelError

        try:
            return step_seconds(self._steps(subject, tokens, tiles), self._device, _REPEATS)
        except KernelError as error:
            say(f"{tiles}: {error}")
            return float("inf")

    def _steps(self, subject: Subject, tokens: int, tiles: AnyTiles) -> list[Callable[[], object]]:
        key = id(subject), tokens
        if key not in self._inputs:
            self._inputs = {k: v for k, v in self._inputs.items() if k[1] == tokens}  # drop other token counts
            gate = subject.layer.gate
            self._inputs[key] = []
            for x in inputs_for(subject.layer, subject.shape, tokens):
                weights, experts = (x @ gate.weight.t()).softmax(-1, dtype=torch.float32).topk(gate.top_k)
                self._inputs[key].append((x, (weights, experts.int())))
        return [lambda x=x, r=r: run_block(subject, x, r, tiles) for x, r in self._inputs[key]]
