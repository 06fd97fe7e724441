"""Compiles kernels in several processes, before they are first needed.

One after the other in one process, the kernels of a model take 15 seconds; most of it is Python, so threads help
little. Each worker is a Python of its own that takes one variant at a time and leaves it in Triton's cache, where this
process finds it.

    recording() -> jobs ─► queue ─► worker: engine/kernels/compile_worker.py ─► Triton's cache on disk
                              └──► worker ...

What was compiled for a set of jobs is remembered by a file in the cache: the next start begins no worker.
"""

import hashlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import triton

from engine.kernels.cache_dir import use_cache_dir
from engine.kernels.launch import Job

log = logging.getLogger(__name__)

_MOST_WORKERS = 8            # each takes some 400 MB of memory while it works
_WORTH_WORKERS = 4          # fewer jobs are compiled sooner than a worker has started
_LONGEST = ("_mixed_kernel", "_decode_kernel", "_filter_kernel")  # these first: the last one decides when all is done


def compile_ahead(jobs: Iterable[Job], capability: tuple[int, int]) -> int:
    """Have every variant in Triton's cache. Returns how many were given to workers: 0 if they were there already.

    A variant that a worker cannot compile is left to its first use, which reports the error where it matters.
    """
    lines = sorted({_line(job, capability) for job in jobs}, key=lambda line: (_rank(line), line))
    cpus = len(os.sched_getaffinity(0))
    done = use_cache_dir() / f"atoll-{_digest(jobs, lines)}.done"
    if len(lines) < _WORTH_WORKERS or cpus < 2 or done.exists():
        return 0
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for line in lines:
        waiting.put(line)
    errors: list[str] = []
    count = min(_MOST_WORKERS, cpus, len(lines))
    threads = [threading.Thread(target=_serve, args=(waiting, errors), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        log.warning("%d of %d kernels could not be compiled ahead: %s", len(errors), len(lines), errors[0])
    else:
        done.touch(mode=0o600)
    return len(lines)


def _serve(waiting: "queue.SimpleQueue[str]", errors: list[str]) -> None:
    """Feed one worker until nothing waits."""
    command = [sys.executable, "-m", "engine.kernels.compile_worker"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_root(), os.environ.get("PYTHONPATH")]))}
    try:
        started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True, bufsize=1
        )
    except OSError as error:  # no memory for another process, say
        errors.append(str(error))
        return
    with started as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while True:
            try:
                line = waiting.get_nowait()
            except queue.Empty:
                return  # leaving the block closes the worker's input, which ends it
            try:
                worker.stdin.write(line + "\n")
                answer = worker.stdout.readline().strip()
            except OSError as error:
                answer = str(error)
            if answer != "ok":
                errors.append(answer or "a worker ended")
                if worker.poll() is not None or not answer:
                    return


def _line(job: Job, capability: tuple[int, int]) -> str:
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
    sources = sorted({job.kernel.jit.cache_key for job in jobs})
    return hashlib.sha256("\n".join([triton.__version__, *sources, *lines]).encode()).hexdigest()[:24]


def _root() -> str:
    return str(Path(__file__).parents[2])
