"""The search for tiles in the decode step of one sequence, within a time budget: of its one-row GEMMs
(kernels/gemm/tiles.py) and of its sparse blocks (kernels/moe/tiles.py).

Stage after stage, a GEMM or a kernel of a block gets the tiles with which the whole step is fastest, and keeps them for
the later stages. Timing back-to-back copies of one GEMM would not do: it hides the tail effect between different
kernels.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe.tiles import DecodeTiles, Shape
from engine.kernels.tuning.rows import Row

_BETTER = 0.998  # of the step's time: less is noise
_FINALISTS = 3
_ROW_BYTES = {2: (1024, 2048, 4096), 4: (1024, 2048, 4096), 8: (512, 1024, 2048, 4096), 16: (512, 1024)}  # by rows
_WARPS = (1, 2, 4, 8)
_FEW_OUTPUTS = 256


class Block(NamedTuple):
    """A sparse block of one token; `width`: of the MLP beside the experts."""

    shape: Shape
    width: int


Part = GemmShape | Block
Tiles = VectorTiles | DecodeTiles
Chosen = dict[Part, Tiles]
Change = dict[str, Any]  # fields of a part's tiles, and what they become


class Stage(NamedTuple):
    """One thing to tune: a GEMM, or one kernel of a sparse block."""

    name: str
    part: Part
    changes: list[Change]
    head: bool = False  # a product of the logits, which are no part of the step elsewhere


class Ready(NamedTuple):
    """How a search times a step, and learns whether its kernels are compiled and correct."""

    ms: Callable[[Chosen, bool], float]  # of a step with these tiles, with the head or without; infinite if refused
    compiled: Callable[[Stage, Change], bool]  # waits until the kernels are there; False: they never are
    right: Callable[[Part, Tiles], bool]  # whether results are those of other tiles


class Found(NamedTuple):
    """The best tiles of a stage's part so far, which are those before unless others are clearly faster."""

    stage: Stage
    tiles: Tiles
    is_new: bool
    row: Row


def candidates(gemm: GemmShape) -> list[VectorTiles]:
    """64 or 128 bytes of the weight a thread. Of few outputs each has a program nearly to itself."""
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
    """None if the time is up, or the step does not run. What could not be compiled is passed over.

    The least of many measurements is too good by chance: the fastest few are timed again, beside the tiles before.
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
    """One after the other until `deadline`, on the clock of time.monotonic(); those not reached are left out.

    `start`: the tiles of all parts, which are not changed.
    """
    chosen = dict(start)
    for stage in stages:
        found = best_of(stage, chosen, ready, deadline)
        if found is not None:
            chosen[stage.part] = found.tiles
            yield found
