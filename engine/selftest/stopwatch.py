"""Where the time of a self-test goes, from the start of the process."""

import os
import time
from pathlib import Path

from engine.message import msg

# Consecutive parts of this process. Parallel work (compilers, a thread that opens the GPU) is not counted.
PARTS: tuple[str, ...] = ("python", "torch", "triton", "gpu", "jobs", "rates", "twins", "waiting", "kernels")


def process_began() -> float:
    """When this process was started, on the clock of time.monotonic()."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])  # since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - age if 0 <= age < 600 else now  # some sandboxes do not provide this time


class Stopwatch:
    """Seconds of each part. They add up to the whole."""

    def __init__(self, began: float | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._last = self.began

    def lap(self, part: str) -> None:
        """Count the time since the last lap as spent on `part`."""
        now = time.monotonic()
        self.parts[part] += now - self._last
        self._last = now

    def text(self) -> str:
        return msg(
            "Python {python} s, PyTorch {torch} s, Triton {triton} s, GPU {gpu} s, list of kernels {jobs} s, rates "
            "{rates} s, plain arithmetic {twins} s, waiting for compilers {waiting} s, kernels {kernels} s",
            **{part: f"{seconds:.1f}" for part, seconds in self.parts.items()},
        )
