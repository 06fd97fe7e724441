"""The phases of a start and their seconds, for one line in the log.

Work that the GPU still has to do when a phase ends counts in the phase that waits for it.
"""

import time


class StartClock:
    """Measures phases that follow one another: `lap` ends one. A name that comes again adds to its phase."""

    def __init__(self, began: float | None = None) -> None:
        """`began`: when the start began, on the clock of time.monotonic(); by default now."""
        self._began = self._last = time.monotonic() if began is None else began
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def line(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
        return f"Started in {self._last - self._began:.2f} s: {phases}."
