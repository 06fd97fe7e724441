"""How many CPU threads a piece of work gets.

A team of threads that spins from one operator to the next makes a step faster, but only on cores that nobody else uses
(worker/team.py). Otherwise its threads sleep. Waking them costs up to 0.6 ms on a virtual machine, and a decode step
would do it hundreds of times. Only large GEMMs are worth that, because each streams megabytes of weights. So then a
small step runs on one thread, and only its large packed GEMMs use the others. Two halves of a larger step run side by
side, each with half the threads (worker/parts.py).

This sets the number in OpenMP itself, where it belongs to the calling thread. `torch.set_num_threads` is for the whole
process, and threads that start computing during the call can see a half-built pool ("Invalid thread pool!", torch
2.13).

MKL follows OpenMP's number only until `torch.set_num_threads` or MKL_NUM_THREADS gives MKL a number of its own. So the
number is set in MKL, too. Otherwise the products of a small step would wake other threads, and their last bits would
change with the batch.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch

# What the other threads must take over to be worth waking, in elements of a weight times rows. Up to so many rows, a
# GEMM takes as long as reading its weight, so fewer count as many. (Measurements: docs/performance/cpu-threads.md.)
_WORTH_WAKING = 40_000_000
_READING_ROWS = 16


def gemm_threads(team: int, elements: int, rows: int) -> int:
    """How many threads a GEMM of `rows` with a weight of `elements` gets: the team, or one if that is faster."""
    if _bound.gemms is not None:
        return team if _bound.gemms == "team" else 1
    taken_over = elements * max(rows, _READING_ROWS) * (team - 1) // team
    return team if taken_over >= _WORTH_WAKING else 1


class _Bound(threading.local):
    most: int | None = None
    gemms: Literal["team", "alone"] | None = None


_bound = _Bound()


def team_spins() -> bool:
    """Whether OpenMP's threads look for more work for a while before they sleep (engine/__init__.py)."""
    spins = os.environ.get("GOMP_SPINCOUNT", "").strip()
    if spins:
        return spins != "0"
    return os.environ.get("OMP_WAIT_POLICY", "").strip().upper() == "ACTIVE"


@contextmanager
def gemms_on(who: Literal["team", "alone"] | None) -> Iterator[None]:
    """In the body, every GEMM of this thread gets the team, or one thread; None: as `gemm_threads` decides."""
    before = _bound.gemms
    _bound.gemms = who
    try:
        yield
    finally:
        _bound.gemms = before


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Run the body on `count` threads, and let no `num_threads` in it take more."""
    before = _bound.most
    _bound.most = count
    try:
        with num_threads(count):
            yield
    finally:
        _bound.most = before


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the body on `count` threads, or on as many as `at_most` allows; then restore the caller's number. No effect
    where torch has no OpenMP."""
    openmp = _openmp()
    count = count if _bound.most is None else min(count, _bound.most)
    before = torch.get_num_threads()  # OpenMP's number for this thread
    if before == count or openmp is None:
        yield
        return
    set_mkl = _mkl()
    openmp.omp_set_num_threads(count)
    mkl_before = set_mkl(count) if set_mkl else 0
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)
        if set_mkl:
            set_mkl(mkl_before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded."""
    return _loaded("libgomp", "libiomp5", "libomp")


@cache
def _mkl() -> Callable[[int], int] | None:
    """Sets MKL's number of threads for the calling thread, and returns what was set before; 0: nothing. None where
    torch has no MKL."""
    return getattr(_loaded("libtorch_cpu"), "MKL_Set_Num_Threads_Local", None)


def _loaded(*names: str) -> ctypes.CDLL | None:
    """The library of this process whose file's name begins with one of these."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(names):
                return ctypes.CDLL("/" + path)
    return None
