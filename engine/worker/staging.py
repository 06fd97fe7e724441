"""One host-to-device copy per step: everything that the host decided, packed into int32 words.

    | row [n] | position [n] | of sequences, tiles | sampling columns [C, m] | last tokens | changes | runs |
      n = padded batch size (decode) or number of tokens (mixed)
      only mixed steps have the sections "of sequences, tiles" and "last tokens"
      if sequences share a prefix, how many tokens each one shares stands after the columns (decode) or before them
      (mixed)

The words that a graph reads come first, always at the same place; `head_words` bounds them for any step. The changes of
the request table come last. Their number has no useful bound: a prompt found in the prefix cache takes one token of a
step's budget but thousands of words here. Changes that do not fit follow in further copies (`go_on`).

A ring of pinned buffers: the host fills the next one while the device may still be copying from the last. The device
side is a single buffer, because the stream orders its readers and the next copy.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import ConfigError
from engine.message import msg

_RING = 4    # more than the steps in flight
_ALIGN = 16  # words: kernels are compiled for aligned addresses
ROOM_FOR_CHANGES = 1 << 17  # words: more than nearly all steps change, so that these need one copy


def aligned(count: int) -> int:
    """`count` words, rounded up to the alignment of sections."""
    return -(-count // _ALIGN) * _ALIGN


def head_words(tokens: int, sequences: int, tiles: Sequence[int], columns: int) -> int:
    """Upper bound of the words before the changes, for mixed steps with at most these numbers of tokens, sequences and
    tiles (of each size).

    A decode step has fewer: rows and positions of its sequences, their columns, and what each shares.
    """
    # Row and position of each token. Of each sequence: row, start, place, count, what it shares, columns, and where its
    # last token is.
    words = 2 * aligned(tokens) + (5 + columns + 1) * aligned(sequences)
    return words + sum(aligned(2 * count) for count in tiles)


def check_addressable(*tables: torch.Tensor) -> None:
    """Check that a table's words can be indexed in int32 (8 GiB). Raises ConfigError."""
    if max(table.numel() for table in tables) > 2**31:
        raise ConfigError(
            msg("The request table has more than 2^31 entries: --max-num-seqs times --max-model-len is too large."),
            "--max-num-seqs", msg("Lower --max-num-seqs or --max-model-len."),
        )


class Staging:
    def __init__(self, num_words: int, device: torch.device) -> None:
        assert num_words % _ALIGN == 0, "every section begins aligned, the last one too"
        self.device_words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(num_words, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._arrays = [p.numpy() for p in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0
        self.words: np.ndarray = self._arrays[0]
        self._first = self._end = 0

    def begin(self) -> None:
        """Take the next pinned buffer. There are more of them than steps in flight, so this normally does not wait."""
        self._take_buffer(0)

    def go_on(self, at: int) -> None:
        """After `send`: take another buffer for the same step, from word `at` on. The words before stay on the device.

        Here the device may be a whole ring behind; then the host waits for one of the copies.
        """
        self._take_buffer(at)

    def take(self, count: int) -> int:
        """Reserve `count` words; returns the index of the first."""
        at = self._end
        self._end += aligned(count)
        if self._end > len(self.words):
            raise RuntimeError(f"a step needs {self._end} staging words, {len(self.words)} are there")
        return at

    def put(self, values: np.ndarray | list[int]) -> int:
        at = self.take(len(values))
        self.words[at : at + len(values)] = values
        return at

    @property
    def end(self) -> int:
        """Where the next section begins."""
        return self._end

    @property
    def room(self) -> int:
        """Free words."""
        return len(self.words) - self._end

    def send(self) -> None:
        """Queue the copy of everything reserved so far."""
        taken = slice(self._first, self._end)
        self.device_words[taken].copy_(self._pinned[self._turn][taken], non_blocking=True)
        self._copied[self._turn].record()

    def _take_buffer(self, at: int) -> None:
        self._turn = (self._turn + 1) % _RING
        self._copied[self._turn].synchronize()
        self.words = self._arrays[self._turn]
        self._first = self._end = at
