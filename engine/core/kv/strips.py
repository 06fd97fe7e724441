"""How the memory of a cache with several kinds of units is cut: slabs across strips.

The memory is equal *strips*. Every slab has an equal piece of each strip, and each layer has strips of its own, as many
as the other layers of its group. A slab of which a layer with two strips has 2 x 3 pages, beside one that holds states:

    strip 0 of the layer   | front | slab 0: 3 pages | slab 1: states of some layers  | slab 2 ...
    strip 1 of the layer   | front | slab 0: 3 pages | slab 1: states of other layers | slab 2 ...

So all pages of a layer lie together. A GPU translates addresses in ranges of 2 MiB; where every page of a layer lies in
a range of its own, as when a page of all layers is one piece, attention waits for translations
(docs/performance/attention.md).

Units are numbered in the order of their addresses. The front of a strip holds those that nobody is given: page 0, to
which padding is written, and slot 0, of padding sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64         # bytes: where a page or a slot may begin
_MOST_UNITS = 8    # a piece holds at most so many of the largest kind
_MOST_STRIPS = 8   # of a layer of the largest group
_WASTE = 0.03      # most of a slab that should be unused


@dataclass(frozen=True, slots=True)
class Strips:
    count: int                   # strips
    piece: int                   # bytes that a slab has of each
    per_piece: tuple[int, ...]   # pages of a layer of each group, then parts of slots if there are states
    runs: tuple[int, ...]        # strips of a layer of each group, then 1 if there are states
    num_groups: int

    @property
    def slab_bytes(self) -> int:
        return self.count * self.piece

    @property
    def per_slab(self) -> tuple[int, ...]:
        """Pages of each group, then slots if there are states."""
        return tuple(n * run for n, run in zip(self.per_piece, self.runs, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of a layer's page of each group, and of a slot's part in one strip."""
        return tuple(self.piece // n for n in self.per_piece)

    @property
    def front(self) -> int:
        """Bytes of a strip before the first slab: a whole number of pages of each group."""
        pages = math.lcm(*self.strides[: self.num_groups])
        slot = sum(self.strides[self.num_groups :])
        return pages + -(-slot // pages) * pages

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The first unit of each kind in a slab: the pages of a layer are numbered from the strip's begin, slots from
        the last before the first slab."""
        return tuple(self.front // stride for stride in self.strides[: self.num_groups]) + (1,) * self._has_states

    def strip_bytes(self, num_slabs: int) -> int:
        return self.front + num_slabs * self.piece

    @property
    def _has_states(self) -> bool:
        return len(self.per_piece) > self.num_groups


def cut(pages: Sequence[tuple[int, int]], states: Sequence[int] = ()) -> Strips:
    """The strips for groups of layers, each (bytes of a layer's page, number of layers), and layers with states of so
    many bytes, chosen so that little of a slab is unused."""
    most = max(layers for _, layers in pages)
    best: tuple[float, Strips] | None = None
    for count in range(most, _MOST_STRIPS * most + 1):
        part = max((sum(states[i] for i in dealt) for dealt in deal(len(states), count)), default=0)
        strips = _with_pieces(count, pages, part)
        useful = [size * layers for size, layers in pages] + ([sum(states)] if states else [])
        waste = 1 - min(n * size for n, size in zip(strips.per_slab, useful, strict=True)) / strips.slab_bytes
        if best is None or waste < best[0]:
            best = waste, strips
        if waste <= _WASTE:
            break
    assert best is not None
    return best[1]


def deal(num_layers: int, strips: int) -> list[range]:
    """Which layers with states have theirs in each strip, beginning with the first strip."""
    each = -(-num_layers // strips)
    return [range(start, min(start + each, num_layers)) for start in range(0, num_layers, each or 1)]


def _with_pieces(count: int, pages: Sequence[tuple[int, int]], part: int) -> Strips:
    """`count` strips, `part` bytes of a slot in each."""
    units = [aligned(size) for size, _ in pages] + ([aligned(part)] if part else [])
    together = math.lcm(*units[: len(pages)])
    grain = together if together <= max(units) else 1  # pages without gaps, where they go into a piece
    runs = tuple(count // layers for _, layers in pages) + (1,) * bool(part)
    best: tuple[float, Strips] | None = None
    for most in range(1, _MOST_UNITS + 1):
        piece = -(-most * max(units) // grain) * grain
        per = tuple(piece // unit for unit in units)
        step = math.lcm(*per) * ALIGN
        piece = -(-piece // step) * step
        waste = max(1 - n * unit / piece for n, unit in zip(per, units, strict=True))
        if best is None or waste < best[0]:
            best = waste, Strips(count, piece, per, runs, len(pages))
        if waste <= _WASTE:
            break
    assert best is not None
    return best[1]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN
