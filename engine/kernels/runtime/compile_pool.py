"""The pool of processes that compile kernels, as seen by the process that needs them. It imports nothing heavy, so the
pool can start before PyTorch is loaded here (the pool itself does not need PyTorch).

    jobs ─► compile_worker.py, which loads Triton once ─► a fork for each core ─► Triton's cache on disk
         ◄─ a line for each job when it is done
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.kernels.runtime.cache_dir import use_cache_dir

_WAIT = 5.0  # seconds for the processes to exit once all is done


class CompilePool:
    """Starts when it is created, takes jobs until `seal`, and ends with `close` or with this process."""

    def __init__(self) -> None:
        use_cache_dir()
        root = str(Path(__file__).parents[3])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        self._jobs: list[str] = []  # a job's number is its index
        self._known: set[str] = set()
        self._waiting: set[str] = set()
        self.seconds: dict[str, float] = {}  # how long each job took
        self.compiled = 0  # jobs that were not in the cache
        self.ready: float | None = None  # when the first job was begun, on the clock of time.monotonic()
        self.last = 0.0  # when the latest job was done
        self._errors: dict[str, str] = {}
        self._failure: str | None = None  # why the pool stopped compiling
        self._changed = threading.Condition()
        self._given: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.kernels.runtime.compile_worker"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env=environment, text=True,
            )  # fmt: skip
        except OSError as error:  # for example, no memory for another process
            self._failure = str(error)
        else:
            threading.Thread(target=self._give, daemon=True).start()
            threading.Thread(target=self._listen, daemon=True).start()

    def submit(self, jobs: list[str]) -> int:
        """Compile these jobs, each a JSON object in one line, in this order; known ones are skipped. An empty list does
        not close the pool. Returns how many are new."""
        with self._changed:  # jobs are numbered in the order in which they are written
            new = [job for job in dict.fromkeys(jobs) if job not in self._known]
            self._jobs += new
            self._known |= set(new)
            self._waiting |= set(new)
            self._given.put("".join(job + "\n" for job in new))
        if self._failure is not None:
            self._end(self._failure)
        return len(new)

    def seal(self) -> None:
        """Tell the pool that no more jobs will come."""
        self._given.put(None)

    def wait(self, jobs: Iterable[str]) -> dict[str, str]:
        """Wait until each of `jobs` is done. Returns the errors of those that could not be compiled."""
        jobs = set(jobs)
        with self._changed:
            self._changed.wait_for(lambda: not jobs & self._waiting)
            return {job: error for job, error in self._errors.items() if job in jobs}

    def close(self) -> None:
        """Kill the processes, even if they are busy, without waiting for their exit."""
        if self._process is None:
            return
        self.seal()
        if self._waiting or not self._jobs:
            self._process.kill()  # then its forks get no more jobs
        threading.Thread(target=self._bury, daemon=True).start()

    def _give(self) -> None:
        """Write jobs. This is a thread of its own, because a busy process may be slow to read them."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # the process ended; `_listen` handles that
            while (jobs := self._given.get()) is not None:
                self._process.stdin.write(jobs)
                self._process.stdin.flush()
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                number, error, seconds, fresh = json.loads(line)
                with self._changed:
                    self.compiled += fresh
                    self.last = time.monotonic()
                    self.ready = self.ready or self.last - seconds
                    self.seconds[self._jobs[number]] = seconds
                    if error:
                        self._errors[self._jobs[number]] = error
                    self._waiting.discard(self._jobs[number])
                    self._changed.notify_all()
            self._end("its process ended")
        except (OSError, ValueError) as error:
            self._end(str(error))

    def _bury(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(_WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _end(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            self._errors |= dict.fromkeys(self._waiting, reason)
            self._waiting = set()
            self._changed.notify_all()


_early: CompilePool | None = None
_early_lock = threading.Lock()


def job_line(
    module: str,
    name: str,
    types: Sequence[str | None],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    capability: tuple[int, int],
) -> str:
    """A kernel's variant as a job: one line of JSON. Equal jobs have equal lines."""
    return json.dumps({
        "module": module, "name": name, "types": types, "constants": constants, "num_warps": num_warps,
        "num_stages": num_stages, "capability": capability,
    })  # fmt: skip


def start_early() -> None:
    """Start the pool early, in a process that does other work before it needs kernels."""
    global _early
    if _early is None and len(os.sched_getaffinity(0)) > 1:
        _early = CompilePool()


def load_here(*, cache: bool = True) -> None:
    """In the background, load Triton. With `cache`, also what this process needs to find kernels in Triton's cache: the
    hash of Triton's own files, which reads all of its library from the disk."""

    def load() -> None:
        from engine.kernels.runtime.launcher import load_compiler

        if cache:
            load_compiler()

    threading.Thread(target=load, daemon=True).start()


def is_under_way() -> bool:
    """Whether a pool was started early."""
    return _early is not None


def give_early(jobs: list[str]) -> None:
    """Give guessed jobs to the pool that was started early. Does nothing once `take` has handed it over, because its
    owner knows what is really needed. Nobody waits for guessed jobs."""
    with _early_lock:
        if _early is not None:
            _early.submit(jobs)


def take() -> CompilePool:
    """The pool that was started early, or a new one."""
    return _taken() or CompilePool()


def dismiss() -> None:
    """End the pool that was started early, if nobody took it."""
    pool = _taken()
    if pool is not None:
        pool.close()


def _taken() -> CompilePool | None:
    global _early
    with _early_lock:
        pool, _early = _early, None
    return pool
