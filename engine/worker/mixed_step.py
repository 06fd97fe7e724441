"""The numbers that describe a step with prompts: which token belongs to which sequence, and how kernels divide the
work.

    sequences   one token each ... | chunks of prompts ...
    tokens      0 1 2 ...          | first chunk | second chunk | ...

A step can be padded to the shape of a graph (`padded`): more decoding sequences, one more chunk that has the missing
tokens, and empty sequences up to the length of the list. As in decode steps, padding uses row 0, the padding row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.kernels.recurrent.prefill import num_chunks
from engine.kernels.recurrent.reference import CHUNK

MOST_CHUNKS = 8  # in a graph, including the one for padding
_PAST_THE_END = 1 << 30


class MixedShape(NamedTuple):
    """What a graph of a mixed step has room for."""

    singles: int  # sequences that decode
    tokens: int   # in the chunks


# With few tokens a step takes about as long as reading the weights, so padding is almost free. With more tokens,
# padding would cost as much as the graph saves.
SHAPES = (
    MixedShape(0, 32), MixedShape(0, 128), MixedShape(0, 256), MixedShape(0, 512),
    MixedShape(32, 128), MixedShape(32, 256), MixedShape(32, 512),
    MixedShape(128, 128), MixedShape(128, 256), MixedShape(128, 512),
)  # fmt: skip


def shapes_within(tokens: int, sequences: int) -> list[MixedShape]:
    """The shapes that a runner with these limits can use."""
    return [s for s in SHAPES if s.singles + s.tokens <= tokens and s.singles < sequences]


class MixedForm(NamedTuple):
    """Everything that decides which kernels a forward pass launches: steps of the same form launch the same ones."""

    tokens: int
    sequences: int
    singles: int            # sequences at the beginning, with one token each
    tiles: tuple[int, ...]  # how many, for each size of tile
    chunks: int             # chunks of recurrent layers


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step of B sequences with T tokens."""

    rows: np.ndarray      # [B] row of the request table
    starts: np.ndarray    # [B] position of the first token
    counts: np.ndarray    # [B] how many tokens
    singles: int          # how many sequences at the beginning have one token: they use decode attention
    tiles: tuple[np.ndarray, ...]  # [n, 2] for each size of tile, see `tiles_of`
    chunks: int           # recurrent.prefill.num_chunks

    @classmethod
    def of(
        cls,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        tile_sizes: Iterable[int],
        *,
        all_tiled: bool = False,
    ) -> "MixedStep":
        """`all_tiled`: sequences with one token have a tile, too."""
        singles = 0 if all_tiled else int(np.argmax(counts > 1))
        tiles = _tiles(starts, counts, singles, tile_sizes)
        return cls(rows, starts, counts, singles, tiles, num_chunks(counts.tolist()))

    @classmethod
    def of_padding(cls, shape: MixedShape, tile_sizes: Sequence[int]) -> "MixedStep":
        """A step that consists only of padding."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none, 0, (), 0).padded(shape, tile_sizes)

    @property
    def form(self) -> MixedForm:
        tokens, tiles = int(self.counts.sum()), tuple(len(tiles) for tiles in self.tiles)
        return MixedForm(tokens, len(self.rows), self.singles, tiles, self.chunks)

    @property
    def q_starts(self) -> np.ndarray:
        """[B] index of each sequence's first token in the step."""
        return np.cumsum(self.counts) - self.counts

    def shape(self, shapes: Sequence[MixedShape]) -> MixedShape | None:
        """The smallest of `shapes` (ascending) that fits this step, if any."""
        tokens = int(self.counts[self.singles :].sum())
        if len(self.counts) - self.singles >= MOST_CHUNKS:
            return None
        return next((s for s in shapes if s.singles >= self.singles and s.tokens >= tokens), None)

    def padded(self, shape: MixedShape, tile_sizes: Sequence[int]) -> "MixedStep":
        """The step padded to form_of(shape). Decoding sequences keep their places; chunks begin at shape.singles."""
        form = form_of(shape, tile_sizes)
        rows, starts, counts = (np.zeros(form.sequences, dtype=np.int64) for _ in range(3))
        chunks = slice(shape.singles, shape.singles + len(self.rows) - self.singles)
        for ours, padded in ((self.rows, rows), (self.starts, starts), (self.counts, counts)):
            padded[: self.singles] = ours[: self.singles]
            padded[chunks] = ours[self.singles :]
        counts[: shape.singles] = 1
        counts[chunks.stop] = form.tokens - counts.sum()
        tiles = tuple(
            np.concatenate((own, np.tile((0, _PAST_THE_END), (count - len(own), 1))))
            for own, count in zip(_tiles(starts, counts, shape.singles, tile_sizes), form.tiles, strict=True)
        )
        return MixedStep(rows, starts, counts, shape.singles, tiles, form.chunks)


def form_of(shape: MixedShape, tile_sizes: Sequence[int]) -> MixedForm:
    """The form of steps that are padded to this shape. It allows for each chunk to end within a tile."""
    tiles = tuple(-(-shape.tokens // size) + MOST_CHUNKS for size in tile_sizes)
    chunks = -(-shape.tokens // CHUNK) + MOST_CHUNKS
    return MixedForm(shape.singles + shape.tokens, shape.singles + MOST_CHUNKS, shape.singles, tiles, chunks)


def _tiles(
    starts: np.ndarray, counts: np.ndarray, singles: int, sizes: Iterable[int]
) -> tuple[np.ndarray, ...]:
    tiled = np.where(np.arange(len(counts)) < singles, 0, counts)
    return tuple(tiles_of(starts, tiled, size) for size in sizes)


def tiles_of(starts: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """[n, 2]: (sequence, first token in its chunk) of every `size` tokens of every chunk."""
    tiles_each = -(-counts // size)
    owner = np.repeat(np.arange(len(counts)), tiles_each)
    first = np.cumsum(tiles_each) - tiles_each
    within = (np.arange(len(owner)) - first[owner]) * size
    # Tiles at the end of long sequences take longest: start with them, so that none runs alone at the end.
    order = np.argsort(-(starts[owner] + within), kind="stable")
    return np.stack((owner, within), 1)[order]
