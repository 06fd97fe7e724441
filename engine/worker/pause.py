"""Notices that a way of using several CPU threads does not pay, because another process computes on their cores."""

from collections import deque
from typing import NamedTuple

_TRIAL = 8                # steps after which a way is judged
_FIRST_PAUSE = 64         # steps; each pause that follows at once is twice as long
_LONGEST_PAUSE = 512


class Timing(NamedTuple):
    """Seconds of a step, or of its parts that ran side by side."""

    cpu: float   # of all threads
    wall: float


class Pause:
    """Decides from timings whether the way pays. It counts steps and reads no clock: equal timings decide equally."""

    def __init__(self, least_overlap: float, *, seconds: float = float("inf"), first: int = _FIRST_PAUSE) -> None:
        """`least_overlap`: of CPU time over wall time, of the last steps. `seconds`: fewer steps are enough if they
        took so long. `first`: steps of the first pause."""
        self.least_overlap = least_overlap
        self._seconds = seconds
        self._first = first
        self._recent: deque[Timing] = deque(maxlen=_TRIAL)
        self._length = first
        self._left = 0

    def allows(self) -> bool:
        """Whether the next step that can run this way should."""
        if self._left:
            self._left -= 1
            return False
        return True

    def begin(self) -> None:
        self._recent.clear()
        self._left, self._length = self._length, min(2 * self._length, _LONGEST_PAUSE)

    def observe(self, timing: Timing) -> bool:
        """A step has run this way. Whether the way still pays; otherwise a pause has begun."""
        self._recent.append(timing)
        cpu, wall = (sum(seconds) for seconds in zip(*self._recent, strict=True))
        if len(self._recent) < _TRIAL and wall < self._seconds:
            return True
        if cpu < self.least_overlap * wall:
            self.begin()
            return False
        if len(self._recent) == _TRIAL:
            self._length = self._first
        return True
