"""Compiles kernels in several processes, before they are first needed.

One after the other in one process, the kernels of a model take 15 seconds; most of it is Python, so threads help
little. What the processes leave in Triton's cache this one finds there (launch.py's source_key says what that takes).

What was compiled for a set of jobs is remembered by a file in the cache: the next start compiles nothing.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable

import triton

from engine.kernels import compile_pool
from engine.kernels.cache_dir import use_cache_dir
from engine.kernels.launch import Job, source_key

log = logging.getLogger(__name__)

_WORTH_A_POOL = 4  # fewer jobs are compiled sooner than a process has started
# These first: the last one decides when all is done.
_LONGEST = ("solve_kernel", "_mixed_kernel", "_decode_kernel", "_filter_kernel")


def compile_ahead(jobs: Iterable[Job], capability: tuple[int, int]) -> int:
    """Have every variant in Triton's cache. Returns how many were given to the pool: 0 if they were there already.

    A variant that cannot be compiled is left to its first use, which reports the error where it matters.
    """
    compilation = Compilation(jobs, capability)
    compilation.finish()
    return compilation.count


class Compilation:
    """A set of jobs under way. `count` of them were not at hand."""

    def __init__(self, jobs: Iterable[Job], capability: tuple[int, int]) -> None:
        self._capability = capability
        self._lines = sorted({line_of(job, capability) for job in jobs}, key=lambda line: (_rank(line), line))
        self._done = use_cache_dir() / f"atoll-{_digest(jobs, self._lines)}.done"
        alone = len(os.sched_getaffinity(0)) < 2
        self.count = 0 if len(self._lines) < _WORTH_A_POOL or alone or self._done.exists() else len(self._lines)
        self._pool = compile_pool.take() if self.count else None
        if self._pool is None:
            compile_pool.dismiss()
        else:
            self._pool.submit(self._lines)

    def wait(self, jobs: Iterable[Job]) -> None:
        """Until these are compiled, or known not to be."""
        if self._pool is not None:
            self._pool.wait(line_of(job, self._capability) for job in jobs)

    def finish(self) -> None:
        if self._pool is None:
            return
        errors = self._pool.wait(self._lines)
        self._pool.close()
        self._pool = None
        if errors:
            log.warning(
                "%d of %d kernels could not be compiled ahead; each is tried again when it is first needed, and 'atoll "
                "doctor' tests all. The first error: %s", len(errors), self.count, next(iter(errors.values())),
            )  # fmt: skip
        else:
            self._done.touch(mode=0o600)


def line_of(job: Job, capability: tuple[int, int]) -> str:
    return json.dumps({
        "module": job.kernel.jit.fn.__module__, "name": job.kernel.name, "types": job.types,
        "constants": dict(job.constants), "num_warps": job.num_warps, "num_stages": job.num_stages,
        "capability": capability,
    })  # fmt: skip


def _rank(line: str) -> int:
    name = json.loads(line)["name"]
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def _digest(jobs: Iterable[Job], lines: list[str]) -> str:
    """Changes with the variants, the kernels' source and Triton."""
    sources = sorted({source_key(job.kernel) for job in jobs})
    return hashlib.sha256("\n".join([triton.__version__, *sources, *lines]).encode()).hexdigest()[:24]
