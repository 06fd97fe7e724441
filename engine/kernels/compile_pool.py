"""The processes that compile kernels, seen from the one that needs them. Imports nothing heavy: they may be started
before PyTorch is loaded here, and load it meanwhile.

    jobs ─► compile_worker.py, which loads PyTorch and Triton once ─► a fork for each core ─► Triton's cache on disk
         ◄─ a line for each job, as it is done
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from engine.kernels.cache_dir import use_cache_dir

_WAIT = 5.0  # seconds for the processes to end, once all is done


class CompilePool:
    """Started at once; `submit` may be called one time. Ends with `close`, or when this process ends."""

    def __init__(self) -> None:
        use_cache_dir()
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        self._waiting: set[str] = set()
        self._submitted = False
        self._errors: dict[str, str] = {}
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.kernels.compile_worker"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, env=environment, text=True,
            )  # fmt: skip
        except OSError as error:  # no memory for another process, say
            self._failure = str(error)

    def submit(self, jobs: list[str]) -> None:
        """Compile these, each a JSON object in one line; the first ones first."""
        self._waiting, self._submitted = set(jobs), True
        if self._process is None:
            self._end(self._failure)
            return
        threading.Thread(target=self._listen, args=(jobs,), daemon=True).start()

    def wait(self, jobs: Iterable[str]) -> dict[str, str]:
        """Until each of `jobs` is done. Returns the errors of those that could not be compiled."""
        jobs = set(jobs)
        with self._changed:
            self._changed.wait_for(lambda: not jobs & self._waiting)
            return {job: error for job, error in self._errors.items() if job in jobs}

    def close(self) -> None:
        """End the processes."""
        if self._process is None:
            return
        if self._submitted:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_WAIT)
        self._process.kill()  # a process that has ended does not mind
        self._process.wait()

    def _listen(self, jobs: list[str]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n".join(jobs))
            self._process.stdin.close()
            for line in self._process.stdout:
                number, error = json.loads(line)
                with self._changed:
                    if error:
                        self._errors[jobs[number]] = error
                    self._waiting.discard(jobs[number])
                    self._changed.notify_all()
            self._end("its process ended")
        except (OSError, ValueError) as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        with self._changed:
            self._errors |= dict.fromkeys(self._waiting, reason)
            self._waiting = set()
            self._changed.notify_all()


_early: CompilePool | None = None


def start_early() -> None:
    """Begin to load what compiling needs: for a process that has something else to do before it needs kernels."""
    global _early
    if _early is None and len(os.sched_getaffinity(0)) > 1:
        _early = CompilePool()


def take() -> CompilePool:
    """The pool that was started early, or a new one."""
    global _early
    pool, _early = _early, None
    return pool or CompilePool()


def dismiss() -> None:
    """End the pool that was started early, if it was not needed."""
    global _early
    pool, _early = _early, None
    if pool is not None:
        pool.close()
