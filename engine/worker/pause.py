"""Notices that a way of using several CPU threads does not pay, because another process computes on their cores."""

import statistics
from collections import deque
from typing import NamedTuple

_WINDOW = 8               # steps by which a way is judged as long as it pays
_FIRST_PAUSE = 64         # steps; each pause that follows at once is twice as long
_LONGEST_PAUSE = 512


class Timing(NamedTuple):
    """Seconds of a step, or of its parts that ran side by side."""

    cpu: float   # of all threads
    wall: float


class Pause:
    """Decides from timings whether the way pays. It counts steps and reads no clock: equal timings decide equally."""

    def __init__(self, least_overlap: float, trial: int = _WINDOW) -> None:
        """`least_overlap`: of CPU time over wall time, the median of some steps: one step may be slow for any reason.
        `trial`: how many steps, at first and after a pause."""
        self._least = least_overlap
        self._trial = self._window = trial
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._length = _FIRST_PAUSE
        self._left = 0

    def allows(self) -> bool:
        """Whether the next step that can run this way should."""
        if self._left:
            self._left -= 1
            return False
        return True

    def observe(self, timing: Timing) -> None:
        """A step has run this way."""
        self._recent.append(timing.cpu / timing.wall)
        if len(self._recent) < self._window:
            return
        if statistics.median(self._recent) < self._least:
            self._recent.clear()
            self._window = self._trial
            self._left, self._length = self._length, min(2 * self._length, _LONGEST_PAUSE)
        elif len(self._recent) == _WINDOW:
            self._window, self._length = _WINDOW, _FIRST_PAUSE
