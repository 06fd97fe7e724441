"""Whether a step's results must not depend on how many rows the step has, because a request in it has a seed.

On some CPUs the fastest GEMM for a few rows sums in another order than the GEMM for many rows, so its last bits differ.
With a seed, a request must get the same answer alone and in a batch, so its steps always use the GEMM for many rows.
The setting belongs to a thread: two parts of a step run side by side (worker/parts.py).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Step(threading.local):
    repeats = False


_step = _Step()


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    before, _step.repeats = _step.repeats, wanted
    try:
        yield
    finally:
        _step.repeats = before


def must_repeat() -> bool:
    return _step.repeats
