"""One child process, kept running: watched, restarted when it crashes, stopped with patience, never left behind.

Used by `atoll serve` for its engine (engine_child.py) and by a prefix installation for its `atoll serve`
(appliance/supervise.py). On a server systemd does the same for the units.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from engine.message import msg

FINAL_STATUSES = (2, 10, 11, 12)  # wrong settings or broken integrity: a restart would not help; same as in the units
RESTART_WINDOW_SECONDS = 600.0    # the period for which restarts are counted
MAX_BACKOFF_SECONDS = 30.0


class Restarts:
    """Decides whether and when to restart a process that ended: at most `limit` times within the window."""

    def __init__(self, limit: int, *, first_delay: float) -> None:
        self._limit = limit
        self._first_delay = first_delay
        self._ends: list[float] = []

    @property
    def count(self) -> int:
        """How often the process ended within the window, the last time included."""
        return len(self._ends)

    def delay_after(self, status: int) -> float | None:
        """Seconds until the next start; None: give up."""
        if status in FINAL_STATUSES:
            return None
        now = time.monotonic()
        self._ends = [at for at in self._ends if now - at < RESTART_WINDOW_SECONDS] + [now]
        if self.count > self._limit:
            return None
        return min(MAX_BACKOFF_SECONDS, self._first_delay * 2 ** (self.count - 1))


class Supervisor:
    """`spawn` may be called before there is an event loop; `supervise` then keeps the process alive.

    A subclass decides what happens when the process ends (`ended`), and with which descriptors and environment it
    starts.
    """

    def __init__(self, argv: Sequence[str], *, stop_seconds: float, **popen: Any) -> None:
        """`stop_seconds`: between SIGTERM and SIGKILL. `popen`: options of subprocess.Popen."""
        self.argv = list(argv)
        self._popen = popen
        self._stop_seconds = stop_seconds
        self._process: subprocess.Popen[Any] | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.running else None  # type: ignore[union-attr]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def spawn(self) -> None:
        """Start the process. Call in the main thread: the kernel ties the child's life to the thread that forks."""
        self._process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, **self._popen)

    async def supervise(self) -> None:
        """Restart the process whenever it ends, until `stop`, or until `ended` gives up."""
        while True:
            status = await self._wait()
            if self.stopping:
                return
            delay = await self.ended(status)
            if delay is None or await self._stopped_within(delay):
                return
            self.spawn()

    async def ended(self, status: int) -> float | None:
        """Called when the process ended by itself. Returns the seconds until the next start; None, or an exception,
        means giving up."""
        raise NotImplementedError

    async def stop(self) -> bool:
        """Send SIGTERM, wait, send SIGKILL. Returns whether it had to be killed."""
        self._stopping.set()
        if self._process is None or not self.running:
            return False
        self._process.terminate()
        try:
            async with asyncio.timeout(self._stop_seconds):
                await self._wait()
        except TimeoutError:
            self.kill()
            return True
        return False

    def kill(self) -> None:
        """Kill the process at once; returns when it is gone."""
        self._stopping.set()
        if self._process is not None and self.running:
            self._process.kill()
            self._process.wait()

    async def _wait(self) -> int:
        """Wait for the process without a thread or a timer: a pidfd is readable when it has ended."""
        assert self._process is not None
        if self._process.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            fd = os.pidfd_open(self._process.pid)
            loop.add_reader(fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return self._process.wait()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


def how_it_ended(status: int) -> str:
    if status >= 0:
        return msg("ended with status {status}", status=status)
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    if name == "SIGKILL":
        return msg("was killed by {signal} (out of memory?)", signal=name)
    return msg("was killed by {signal}", signal=name)
