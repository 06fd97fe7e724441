"""Run byte-moving tasks on threads (hashing and file I/O release the interpreter lock); report from one thread.

A part of install.sh.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from offline_bundle.limits import MIB
from offline_bundle.progress import Progress

T = TypeVar("T")
Tick = Callable[[int], None]  # a task reports bytes done; raises when the run is being cancelled

_REPORT_EVERY = 0.1  # seconds
_BLOCK = 2 * MIB  # stays in a core's cache between read, hash and write


class Cancelled(Exception):
    """Another task failed or the user interrupted; this one stopped between two blocks."""


def run(
    tasks: Iterable[T],
    work: Callable[[T, Tick], None],
    *,
    stage: str,
    total: int,
    progress: Progress,
    start: int = 0,
    workers: int | None = None,
) -> None:
    """Run `work(task, tick)` for every task, started in order, `workers` at a time.

    The first exception (or Ctrl-C) stops the other tasks at their next block and is raised. `progress` is only called
    from the calling thread: at the start, about ten times a second, and at the end. `start` bytes count as done.
    """
    done, stop, lock = start, threading.Event(), threading.Lock()

    def tick(n: int) -> None:
        nonlocal done
        if stop.is_set():
            raise Cancelled
        with lock:
            done += n

    progress(stage, start, total)
    with ThreadPoolExecutor(workers or default_workers(), thread_name_prefix="bundle") as pool:
        pending = {pool.submit(work, task, tick) for task in tasks}
        try:
            reported = start
            while pending:
                finished, pending = wait(pending, timeout=_REPORT_EVERY, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                if done != reported:
                    reported = done
                    progress(stage, reported, total)
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    progress(stage, done, total)


def default_workers() -> int:
    """Threads for hashing: one per usable core, at most 16 (past that a disk, not a core, is the limit)."""
    return max(1, min(16, len(os.sched_getaffinity(0))))


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`; a short write is continued, not lost."""
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


class Reader:
    """How to read one device: in small blocks on many threads, or whole chunks in turn where seeks are expensive."""

    def __init__(self, fd: int) -> None:
        """`fd` is any descriptor on the device."""
        self._turns = threading.Lock() if _rotational(os.fstat(fd).st_dev) else None
        self._local = threading.local()

    @property
    def workers(self) -> int:
        """Threads worth having: a device with expensive seeks keeps few of them busy, and each holds a whole chunk."""
        return min(4, default_workers()) if self._turns else default_workers()

    def turn(self) -> AbstractContextManager[object]:
        """A lock to hold while reading one block."""
        return self._turns or nullcontext()

    def buffer(self, chunk_size: int, left: int) -> memoryview:
        """This thread's buffer for the next block of a chunk that has `left` more bytes. The next call reuses it. It
        grows only as far as it is needed: clearing 64 MiB takes as long as hashing them."""
        size = min(left, chunk_size if self._turns else min(_BLOCK, chunk_size))
        held: bytearray | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < size:
            held = self._local.buffer = bytearray(size)
        return memoryview(held)[:size]

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`, in turn; returns the bytes read, fewer only at the end of the file."""
        with self.turn():
            got = 0
            while got < len(view):
                n = os.preadv(fd, [view[got:]], offset + got)
                if n == 0:
                    break
                got += n
            return got


def _rotational(device: int) -> bool:
    """Whether Linux reports the block device as one with expensive seeks (most USB disks and sticks)."""
    base = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for place in (f"{base}/queue/rotational", f"{base}/../queue/rotational"):
        try:
            with open(place) as f:
                return f.read().strip() == "1"
        except OSError:
            continue
    return False
