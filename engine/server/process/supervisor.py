"""The engine process as our child: started at once, watched, restarted when it crashes, and never left behind."""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import engine as engine_package
from engine.errors import AtollError
from engine.server.ipc.client import EngineClient
from engine.server.settings.options import ServeOptions, engine_argv

log = logging.getLogger("atoll.serve")

EXIT_UNHEALTHY = 40
FINAL_STATUSES = (2, 11)        # a flag or the model is wrong: a restart would say the same again
RESTART_WINDOW_SECONDS = 600.0  # in which `max_restarts` are counted
LOAD_ATTEMPTS = 2               # before it was ready even once
MAX_BACKOFF_SECONDS = 30.0
STOP_SECONDS = 15.0             # between SIGTERM and SIGKILL
LAST_WORDS_SECONDS = 0.1        # for the client to read the Goodbye of an engine that has ended
STALL_POLL_SECONDS = 5.0
STALL_KILL_SECONDS = 180.0      # of a loop that does not turn; its health is bad long before
SWEEP_AGE_SECONDS = 60.0        # a younger directory may belong to a process that has not locked it yet


class EngineFailedError(AtollError):
    """The engine ended and a restart is pointless or has been tried often enough; `status` is for our own exit."""

    def __init__(self, message: str, status: int, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


class EngineChild:
    """`spawn` may be called before there is an event loop; `supervise` then keeps the engine alive."""

    def __init__(self, options: ServeOptions, uds: Path) -> None:
        self.uds = uds
        self._max_restarts = options.max_restarts
        # -P: neither the working directory nor a script's directory may shadow a module of the engine.
        self._argv = [
            sys.executable, "-P", "-m", "engine.server.process.engine_process",
            f"--uds={uds}", f"--parent-pid={os.getpid()}",
            f"--log-level={options.log_level}", f"--log-format={options.log_format}", *engine_argv(options.engine),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._crashes: list[float] = []
        self._stopping = False
        self._was_ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def spawn(self) -> None:
        """Start the process. Call in the main thread: the kernel ties the child's life to the thread that forks."""
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), env=_environment(),
            start_new_session=True,  # Ctrl-C in the terminal is for us; we tell the engine
        )
        log.debug("started the engine", extra={"fields": {"pid": self._process.pid}})

    async def supervise(self, client: EngineClient) -> None:
        """Restart the engine whenever it ends; returns after `stop`. Raises EngineFailedError to give up."""
        watcher = asyncio.create_task(self._watch_for_stall(client))
        try:
            while True:
                status = await self._ended()
                if self._stopping:
                    return
                self._was_ready = self._was_ready or client.info is not None
                await asyncio.sleep(LAST_WORDS_SECONDS)
                delay = self._after_crash(status, client.last_error)
                await asyncio.sleep(delay)
                self.spawn()
        finally:
            watcher.cancel()

    async def stop(self) -> None:
        """SIGTERM, patience, SIGKILL."""
        self._stopping = True
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._ended()
        except TimeoutError:
            log.warning("the engine did not stop within %.0f s and is killed", STOP_SECONDS)
            self.kill()
            await self._ended()

    def kill(self) -> None:
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def _ended(self) -> int:
        """Wait for the process without a thread or a timer: a pidfd is readable when it has ended."""
        assert self._process is not None
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if self._process.poll() is None:
            fd = os.pidfd_open(self._process.pid)
            loop.add_reader(fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return self._process.wait()

    def _after_crash(self, status: int, last_words: str) -> float:
        """Seconds until the next attempt."""
        how = _how_it_ended(status)
        if status in FINAL_STATUSES:
            raise EngineFailedError(f"The engine could not start: {last_words or how}", status)
        now = time.monotonic()
        self._crashes = [t for t in self._crashes if now - t < RESTART_WINDOW_SECONDS] + [now]
        count = len(self._crashes)
        if not self._was_ready and count >= LOAD_ATTEMPTS:
            raise EngineFailedError(f"The engine {how} while loading, {count} times.", EXIT_UNHEALTHY,
                                    "Its last log lines say why.")
        if count > self._max_restarts:
            raise EngineFailedError(f"The engine {how}, {count} times in {RESTART_WINDOW_SECONDS / 60:.0f} minutes.",
                                    EXIT_UNHEALTHY, "Its last log lines say why; restarting has been given up.")
        delay = min(MAX_BACKOFF_SECONDS, 0.5 * 2 ** (count - 1))
        log.error("the engine %s; restarting it in %.1f s", how, delay, extra={"fields": {"restart": count}})
        return delay

    async def _watch_for_stall(self, client: EngineClient) -> None:
        """A loop that no longer turns is dumped and killed; `supervise` then starts a new one."""
        while True:
            await asyncio.sleep(STALL_POLL_SECONDS)
            if client.stalled(STALL_KILL_SECONDS) and self._process is not None and self._process.poll() is None:
                log.error("the engine's loop has stalled; its stacks follow, then it is killed")
                self._process.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks
                await asyncio.sleep(1)
                self._process.kill()


@contextlib.contextmanager
def runtime_directory() -> Iterator[Path]:
    """A private (0700) directory for the socket, removed at the end; those of killed predecessors are swept away.

    A lock held on each living one tells them apart, also between containers that share the parent directory.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    for old in base.glob("atoll-serve-*"):
        with contextlib.suppress(OSError):
            stat = old.lstat()
            if stat.st_uid != os.geteuid() or time.time() - stat.st_mtime < SWEEP_AGE_SECONDS:
                continue
            if (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    directory = Path(tempfile.mkdtemp(prefix="atoll-serve-", dir=base))
    lock = _lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock, or None if a living process has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _environment() -> dict[str, str]:
    """Ours; a bare checkout is put on the child's path, since -P keeps the working directory off it."""
    environment = dict(os.environ)
    root = str(Path(engine_package.__file__).resolve().parents[1])
    if root not in site.getsitepackages():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
