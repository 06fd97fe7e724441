"""The search for tiles in the decode step of one sequence, within a time budget: for its one-row GEMMs
(kernels/gemm/tiles.py) and its sparse blocks (kernels/moe/tiles.py).

In each stage, one GEMM or one kernel of a block gets the tiles with which the whole step is fastest, and keeps them in
the later stages. Timing back-to-back copies of a single GEMM would be misleading: it hides the tail effect between
different kernels.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe.tiles import DecodeTiles, Shape
from engine.kernels.tuning.rows import Row

_BETTER = 0.998  # of the step's time: smaller gains are noise
_FINALISTS = 3
_ROW_BYTES = {2: (1024, 2048, 4096), 4: (1024, 2048, 4096), 8: (512, 1024, 2048, 4096), 16: (512, 1024)}  # by rows
_WARPS = (1, 2, 4, 8)
_FEW_OUTPUTS = 256


class Block(NamedTuple):
    """A sparse block for one token; `width` is that of the dense branch."""

    shape: Shape
    width: int


Part = GemmShape | Block
Tiles = VectorTiles | DecodeTiles
Chosen = dict[Part, Tiles]
Change = dict[str, Any]  # fields of a part's tiles, and their new values


class Stage(NamedTuple):
    """One thing to tune: a GEMM, or one kernel of a sparse block."""

    name: str
    part: Part
    changes: list[Change]
    head: bool = False  # the GEMM of the logits, which other stages leave out of the step


class Ready(NamedTuple):
    """How a search times a step, and learns whether its kernels are compiled and correct."""

    ms: Callable[[Chosen, bool], float]  # a step's time with these tiles, and the head if so; infinite if it fails
    compiled: Callable[[Stage, Change], bool]  # waits until the kernels are compiled; False: that failed
    right: Callable[[Part, Tiles], bool]  # whether the results agree with those of other tiles


class Found(NamedTuple):
    """The best tiles of a stage's part: the previous ones unless others are clearly faster."""

    stage: Stage
    tiles: Tiles
    is_new: bool
    row: Row


def candidates(gemm: GemmShape) -> list[VectorTiles]:
    """Tiles with 64 or 128 bytes of the weight per thread. With few outputs, a program has only one to four."""
    found = []
    rows_and_bytes: dict[int, tuple[int, ...]] = _ROW_BYTES
    least = 64
    if gemm.outputs <= _FEW_OUTPUTS:
        rows_and_bytes = dict.fromkeys((1, 2, 4), tuple(n * gemm.itemsize for n in (512, 1024, 2048)))
        least = 16
    for rows, all_bytes in rows_and_bytes.items():
        for row_bytes in all_bytes:
            columns = row_bytes // gemm.itemsize
            for warps in _WARPS:
                each = rows * row_bytes * (2 if gemm.gated else 1) // (32 * warps)
                if columns < 2 * gemm.inner and least <= each <= 128:
                    found.append(VectorTiles(rows, columns, warps))
    return found


def best_of(stage: Stage, chosen: Chosen, ready: Ready, deadline: float) -> Found | None:
    """The best tiles of a stage; None if the time is up, or the step fails. Candidates that failed to compile are
    skipped.

    The minimum of many measurements is too good by chance, so the fastest few are timed again, against the previous
    tiles.
    """
    before = chosen[stage.part]

    def ms(tiles: Tiles) -> float:
        return ready.ms({**chosen, stage.part: tiles}, stage.head)

    if time.monotonic() > deadline or (first := ms(before)) == math.inf:
        return None
    times: dict[Tiles, float] = {}
    for change in stage.changes:
        if time.monotonic() > deadline:
            return None
        tiles = before._replace(**change)
        if tiles != before and tiles not in times and ready.compiled(stage, change):
            times[tiles] = ms(tiles)
    faster = [tiles for tiles in sorted(times, key=lambda tiles: times[tiles]) if times[tiles] < first * _BETTER]
    finalists = [tiles for tiles in faster[:_FINALISTS] if ready.right(stage.part, tiles)]
    best, fastest = before, first
    if finalists:
        again = {tiles: ms(tiles) for tiles in (before, *finalists)}
        first = again[before]
        best = min(finalists, key=lambda tiles: again[tiles])
        if again[best] >= first * _BETTER:
            best = before
        fastest = again[best]
    row = {
        "product": stage.name, "tried": len(times), "ms_before": round(first, 4), "ms": round(fastest, 4),
        "tiles": list(best) if isinstance(best, VectorTiles) else str(best),
    }  # fmt: skip
    return Found(stage, best, best != before, row)


def search(stages: Sequence[Stage], start: Chosen, ready: Ready, deadline: float) -> Iterator[Found]:
    """Search one stage after the other until `deadline`, on the clock of time.monotonic(); stages that were not reached
    are left out.

    `start`: the tiles of all parts; it is not modified.
    """
    chosen = dict(start)
    for stage in stages:
        found = best_of(stage, chosen, ready, deadline)
        if found is not None:
            chosen[stage.part] = found.tiles
            yield found
