"""The search for the tiles of products with one row (engine/kernels/gemv_tiles.py), within a budget of time.

One product after the other: the tiles by rule and all candidates are timed as a decode step runs them, then the fastest
few once more, as the least of many measurements is too good by chance. The kernels are compiled side by side meanwhile,
in the order of need; whoever comes to one that is not ready waits for it.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from engine.bench import report
from engine.bench.gemv import Operands
from engine.bench.gemv_products import Subject
from engine.bench.moe import step_seconds
from engine.kernels import gemv_tiles
from engine.kernels.gemv_tiles import Product, VectorTiles

_REPEATS = 7
_BETTER = 0.99  # of the time by rule: less is noise
_FINALISTS = 3
_WRONG = 0.02  # of a result's norm: more than rounding
_ROWS = (2, 4, 8, 16)
_ROW_BYTES = (512, 1024, 2048, 4096)
_WARPS = (1, 2, 4, 8)


class Ready(NamedTuple):
    """How a search times a product with some tiles, and hears whether its kernel is at hand."""

    seconds: Callable[[Subject, VectorTiles], float]  # infinite where the card does not take them
    compiled: Callable[[Subject, VectorTiles], bool]  # of `all_tiles`: waits until it is; False: it never is


class Found(NamedTuple):
    """The best tiles of a product, which are those by rule unless others are clearly faster."""

    subject: Subject
    tiles: VectorTiles
    seconds: float
    row: report.Row


def all_tiles(product: Product) -> list[VectorTiles]:
    """Those by rule, then the candidates."""
    rule = gemv_tiles.by_rule(product)
    return [rule, *[tiles for tiles in candidates(product) if tiles != rule]]


def candidates(product: Product) -> list[VectorTiles]:
    """64 bytes of the weight a thread; with a gate, which doubles them, 32 too, else 128."""
    found = []
    for rows in _ROWS:
        for row_bytes in _ROW_BYTES:
            columns = row_bytes // product.itemsize
            if columns >= 2 * product.inner:
                continue
            for warps in _WARPS:
                each = rows * row_bytes // (32 * warps)
                if each == 64 or (each == 32 and product.gated) or (each == 128 and not product.gated):
                    found.append(VectorTiles(rows, columns, warps))
    return found


def best_of(subject: Subject, ready: Ready, deadline: float) -> Found | None:
    """None if the time is up, or the rule's own tiles do not run. What could not be compiled is passed over."""
    rule, *others = all_tiles(subject.product)
    times: dict[VectorTiles, float] = {}
    for tiles in (rule, *others):
        if time.monotonic() > deadline:
            return None
        if ready.compiled(subject, tiles):
            times[tiles] = ready.seconds(subject, tiles)
        if times.get(rule, float("inf")) == float("inf"):
            return None  # nothing to compare the others with
    fastest = sorted((tiles for tiles in times if times[tiles] < float("inf")), key=lambda tiles: times[tiles])
    again = {tiles: ready.seconds(subject, tiles) for tiles in dict.fromkeys([rule, *fastest[:_FINALISTS]])}
    best = min(again, key=lambda tiles: again[tiles])
    if again[best] >= again[rule] * _BETTER:
        best = rule
    row = {
        "tried": len(times), "us_by_rule": round(again[rule] * 1e6, 1), "us": round(again[best] * 1e6, 1),
        "tiles": list(best),
    }  # fmt: skip
    return Found(subject, best, again[best], row)


def search(subjects: Sequence[Subject], ready: Ready, budget: float) -> Iterator[Found]:
    """One after the other until `budget` seconds are over; those that were not reached are left out."""
    deadline = time.monotonic() + budget
    for subject in subjects:
        found = best_of(subject, ready, deadline)
        if found is not None:
            yield found


def write(path: Path, found: Found) -> None:
    """As gemv_tuned.json has them, a line each: those in `path` and this one, or without it where the rule is best."""
    entries = {}
    if path.exists():
        entries = gemv_tiles.read(json.dumps(entry) for entry in json.loads(path.read_text("utf-8")))
    product = found.subject.product
    if found.tiles == gemv_tiles.by_rule(product):
        entries.pop(product, None)
    else:
        entries[product] = found.tiles
    lines = ",\n".join(gemv_tiles.line_of(*entry) for entry in entries.items())
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


# -- on a GPU ---------------------------------------------------------------------------------------------------------


class OnGpu:
    """A search's `Ready` on the card that is there, as a context: what compiles in the background ends with it."""

    def __init__(self, subjects: Sequence[Subject], device: torch.device) -> None:
        from engine.kernels import compile_pool

        self._device = device
        self._of: tuple[Subject, Operands, torch.Tensor] | None = None  # only one product's weights are there
        self._lines = lines_of(subjects, torch.cuda.get_device_capability(device))
        order = list(dict.fromkeys(self._lines.values()))
        report.say(f"{len(subjects)} products, {len(order)} kernels to compile")
        self._pool = compile_pool.take()
        self._pool.submit(order)

    def __enter__(self) -> Ready:
        return Ready(self._seconds, self._compiled)

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def _compiled(self, subject: Subject, tiles: VectorTiles) -> bool:
        return not self._pool.wait([self._lines[subject, tiles]])

    def _seconds(self, subject: Subject, tiles: VectorTiles) -> float:
        from engine.kernels.launch import KernelError

        try:
            operands, expected = self._operands(subject)
            wrong = (operands.result(tiles) - expected).norm() / expected.norm()
            if not wrong <= _WRONG:
                report.say(f"{subject}, {tiles}: the result is wrong by {float(wrong):.2g}")
                return float("inf")
            return step_seconds(operands.steps(tiles), self._device, _REPEATS)
        except KernelError as error:
            report.say(f"{subject}, {tiles}: {error}")
            return float("inf")

    def _operands(self, subject: Subject) -> tuple[Operands, torch.Tensor]:
        """And the result with the tiles by rule, which the self-test compares with plain torch."""
        if self._of is None or self._of[0] != subject:
            self._of = None
            torch.cuda.empty_cache()
            operands = Operands(subject, self._device)
            self._of = subject, operands, operands.result(gemv_tiles.by_rule(subject.product))
        return self._of[1:]


def lines_of(subjects: Sequence[Subject], capability: tuple[int, int]) -> dict[tuple[Subject, VectorTiles], str]:
    """What a compile pool is to compile for each product and tiles, in the order of the search. Needs no GPU."""
    from engine.kernels.compile_ahead import line_of
    from engine.kernels.launch import recording

    found = {}
    for subject in subjects:
        operands = Operands(subject, torch.device("meta"))
        for tiles in all_tiles(subject.product):
            with recording() as jobs:
                operands.result(tiles)
            (job,) = jobs
            found[subject, tiles] = line_of(job, capability)
    return found
