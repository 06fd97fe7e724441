"""How many CPU threads a piece of work gets.

Waking a sleeping team of threads costs up to 0.6 ms on a virtual machine, and a decode step would do it hundreds of
times. Only GEMMs are worth that, because each streams megabytes of weights. So a small step runs on one thread, and
only its packed GEMMs use the others.

This sets the number in OpenMP itself, where it belongs to the calling thread. `torch.set_num_threads` is for the whole
process, and threads that start computing during the call can see a half-built pool ("Invalid thread pool!", torch
2.13).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the body on `count` threads, then restore the caller's number. No effect where torch has no OpenMP."""
    openmp = _openmp()
    before = torch.get_num_threads()  # OpenMP's number for this thread
    if before == count or openmp is None:
        yield
        return
    openmp.omp_set_num_threads(count)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(("libgomp", "libiomp5", "libomp")):
                return ctypes.CDLL("/" + path)
    return None
