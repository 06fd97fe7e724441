"""Compiles kernels in several processes, before they are first needed.

Compiling a model's kernels in one process takes many seconds; most of that is Python code, so threads would not help.
The processes leave their results in Triton's cache, where this process finds them (see source_key in launcher.py).

A file in the cache records that a set of jobs was compiled, so that the next start need not check them again.
"""

import hashlib
import importlib
import json
import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

import triton

from engine.kernels.runtime import compile_pool, origins
from engine.kernels.runtime.cache_dir import use_cache_dir
from engine.kernels.runtime.launcher import Job, prebuilt_kernels, source_key, variant_key

log = logging.getLogger(__name__)

_SHOWN = 5
_WORTH_A_POOL = 4  # compiling fewer jobs is faster than starting the processes
# Slowest first, because the last job decides when everything is done. All others take less than a second.
_LONGEST = ("solve_kernel", "_mixed_kernel", "_decode_kernel", "_filter_kernel")


def compile_ahead(jobs: Iterable[Job], capability: tuple[int, int]) -> int:
    """Have every variant in Triton's cache. Returns how many the pool had to compile: 0 if all were there.

    If a variant cannot be compiled, its first use tries again and reports the error where it matters.
    """
    compilation = Compilation(capability)
    compilation.seal(jobs)
    compilation.finish()
    return compilation.count


class Work(NamedTuple):
    """Where compilation time went."""

    jobs: int
    guessed: int  # jobs that were given to the processes early, as a guess, and turned out to be needed
    ready: float  # when the first job was begun, and when the last was done, on the clock of time.monotonic()
    done: float
    seconds: float  # summed over all processes
    slowest: dict[str, float]  # the kernels that took longest, and how many seconds


class Compilation:
    """A set of jobs that are being compiled. Once it is sealed, `count` says how many were missing from the cache."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.count = 0
        self.work: Work | None = None  # set at the end, if anything had to be compiled
        self._capability = capability
        self._jobs: set[Job] = set()
        self._given: set[str] = set()
        self._guessed = 0
        self._pool = compile_pool.take() if compile_pool.is_under_way() else None

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs. They are compiled at once if a pool was started early."""
        self._jobs |= set(jobs)
        if self._pool is not None:
            self._submit(self._pool)

    def seal(self, jobs: Iterable[Job] = ()) -> None:
        """Add the last jobs."""
        self._jobs |= set(jobs)
        lines = self._missing()
        self._done = use_cache_dir() / f"atoll-{_digest(self._jobs, lines)}.done"
        alone = len(os.sched_getaffinity(0)) < 2
        self.count = 0 if len(lines) < _WORTH_A_POOL or alone or self._done.exists() else len(lines)
        if self.count:
            self._pool = self._pool or compile_pool.take()
            self._submit(self._pool)
            self._pool.seal()
        elif self._pool is not None:
            self._pool.close()
            self._pool = None

    def wait(self, jobs: Iterable[Job]) -> None:
        """Wait until these jobs are compiled or have failed."""
        if self._pool is not None:
            self._pool.wait(line_of(job, self._capability) for job in jobs)

    def finish(self) -> None:
        if self._pool is None:
            return
        errors = self._pool.wait(self._given)
        self._pool.close()
        origins.compiled_elsewhere(self._pool.compiled)
        self.work = _work(self._pool, self._guessed)
        self._pool = None
        if errors:
            log.warning(
                "%d of %d kernels could not be compiled ahead; each is tried again when it is first needed, and 'atoll "
                "doctor' tests all. The first error: %s", len(errors), self.count, next(iter(errors.values())),
            )  # fmt: skip
        else:
            self._done.touch(mode=0o600)

    def _missing(self) -> set[str]:
        """The jobs that did not come compiled with the release."""
        came = prebuilt_kernels(self._capability)
        return {
            line_of(job, self._capability) for job in self._jobs
            if came is None or variant_key(job, self._capability) not in came
        }  # fmt: skip

    def _submit(self, pool: compile_pool.CompilePool) -> None:
        new = self._missing() - self._given
        self._given |= new
        self._guessed += len(new) - pool.submit(longest_first(new))


def _work(pool: compile_pool.CompilePool, guessed: int) -> Work | None:
    if pool.ready is None:
        return None
    slowest = sorted(pool.seconds.items(), key=lambda each: each[1])[-_SHOWN:]
    names = {json.loads(line)["name"]: seconds for line, seconds in slowest}
    return Work(len(pool.seconds), guessed, pool.ready, pool.last, round(sum(pool.seconds.values()), 2), names)


def line_of(job: Job, capability: tuple[int, int]) -> str:
    return compile_pool.job_line(
        job.kernel.jit.fn.__module__, job.kernel.name, job.types, dict(job.constants), job.num_warps, job.num_stages,
        capability,
    )  # fmt: skip


def job_of(line: str) -> Job:
    """The job that `line_of` wrote."""
    job = json.loads(line)
    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    return Job(kernel, tuple(job["types"]), tuple(job["constants"].items()), job["num_warps"], job["num_stages"])


def longest_first(lines: Iterable[str]) -> list[str]:
    """Sort jobs so that the slowest kernels are compiled first."""
    return sorted(lines, key=lambda line: (_rank(line), line))


def _rank(line: str) -> int:
    name = json.loads(line)["name"]
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def _digest(jobs: Iterable[Job], lines: Iterable[str]) -> str:
    """A hash of the variants, the kernels' source and Triton's version."""
    sources = sorted({source_key(job.kernel) for job in jobs})
    return hashlib.sha256("\n".join([triton.__version__, *sources, *sorted(lines)]).encode()).hexdigest()[:24]
