"""One host-to-device copy a step: everything the host decided, packed into int32 words.

    | row [n] | position [n] | of sequences, tiles | sampling columns [C, m] | last tokens | runs | their words |
      n = padded batch size (decode) or number of tokens (mixed); what is not in columns only mixed steps have

What a graph reads comes first, where it always is.

A ring of pinned buffers: the host fills the next one while the device may still be copying from the last. The device
side is a single buffer, because the stream orders its readers and the next copy.
"""

import numpy as np
import torch

_RING = 4    # more than the steps in flight
_ALIGN = 16  # words: kernels are compiled for aligned addresses


def aligned(count: int) -> int:
    """`count` words rounded up to where the next aligned section begins."""
    return -(-count // _ALIGN) * _ALIGN


class Staging:
    def __init__(self, num_words: int, device: torch.device) -> None:
        self.device_words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(num_words, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._arrays = [p.numpy() for p in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0
        self.words: np.ndarray = self._arrays[0]
        self._end = 0

    def begin(self) -> None:
        """Take the next pinned buffer; waits only if the device is a whole ring behind, which the loop never allows."""
        self._turn = (self._turn + 1) % _RING
        self._copied[self._turn].synchronize()
        self.words = self._arrays[self._turn]
        self._end = 0

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

    def room(self) -> int:
        return len(self.words) - self._end

    def send(self) -> None:
        """Queue the copy of what was taken."""
        self.device_words[: self._end].copy_(self._pinned[self._turn][: self._end], non_blocking=True)
        self._copied[self._turn].record()
