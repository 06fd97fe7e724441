"""Whether the running step must give its requests the bits that they would get in any other batch.

On a CPU a product of few rows may be faster when it sums in another order than a product of many. Then a request that
asks for the same answer each time, with a seed, must not meet the one now and the other next time. Each thread has its
own setting, as parts of a step run side by side (worker/parts.py).
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
