"""How many CPU threads a piece of work gets.

Waking a sleeping team costs 0.1-0.6 ms on a virtual machine (measured: the norm of 64 rows takes 28 us on one thread,
595 us on two), and a decode step would do it hundreds of times. Only weight products are worth it there: they stream
megabytes each. So a small step runs on one thread, and its packed products ask for the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the body on `count` threads, and give the caller's number back."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
