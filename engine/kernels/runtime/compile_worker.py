"""The process behind compile_pool.py. It reads jobs, one JSON object per line, and writes [number, error or null,
seconds, whether it was not in the cache] for each.

It loads Triton and our kernels, without PyTorch (torch_stub.py), then forks workers, which share what was loaded. A job
is compiled as soon as it arrives, before all jobs have been read. Needs no GPU and never touches one.
"""

import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import engine.kernels
from engine.kernels.runtime import origins, torch_stub

_PACKAGE = "engine.kernels."
_WITH_TORCH = "--with-torch"
_MOST_FORKS = 16  # each takes up to 140 MB of private memory while it works, 90 MB of it for the assembler
_LONGEST_JOB = 1 << 16  # bytes
_LONGEST_ANSWER = 500  # characters: short enough that writes of several forks to the pipe do not mix


def main() -> None:
    _load()
    answers = os.dup(1)
    os.dup2(2, 1)  # stdout is for answers: what a compiler prints goes to stderr
    give, take = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each read takes exactly one job
    worker, most, forks = os.getpid(), min(_MOST_FORKS, len(os.sched_getaffinity(0))), 0
    with suppress(OSError):  # every fork has ended: the remaining jobs get no answer
        for number, job in enumerate(sys.stdin):
            if forks < most:
                forks += 1
                if os.fork() == 0:
                    give.close()
                    _work(take, answers, worker)
                    os._exit(0)
                if forks == most:
                    take.close()
            give.send(f"{number} {job}".encode())
    give.close()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _load() -> None:
    """Load everything that compiling needs. If that fails without PyTorch, restart this process with it."""
    with_torch = _WITH_TORCH in sys.argv
    if not with_torch:
        torch_stub.stand_in()
    try:
        from engine.kernels.runtime.launcher import load_compiler

        reads = threading.Thread(target=load_compiler)  # nearly all of it without the GIL
        reads.start()
        for name in kernel_modules():
            importlib.import_module(name)
    except Exception as error:
        if with_torch:
            raise
        reason = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"Kernels cannot be imported without PyTorch ({reason}): their compiler loads it.\n")
        sys.stderr.flush()
        os.execv(sys.executable, [*sys.orig_argv, _WITH_TORCH])  # noqa: S606
    reads.join()


def kernel_modules() -> Iterator[str]:
    """The modules of engine/kernels that are written in Triton, except those in this folder."""
    for root in engine.kernels.__path__:
        for path in sorted(Path(root).glob("*/*.py")):
            if path.parent.name != "runtime" and b"\nimport triton" in path.read_bytes():
                yield f"{_PACKAGE}{path.parent.name}.{path.stem}"


def _work(jobs: socket.socket, answers: int, worker: int) -> None:
    while (job := jobs.recv(_LONGEST_JOB)) and os.getppid() == worker:
        number, _, job = job.decode().partition(" ")
        error, began, before = None, time.monotonic(), origins.compiled()
        try:
            _compile(json.loads(job))
        except Exception as reason:  # one kernel's error must not end the others
            error = " ".join(f"{type(reason).__name__}: {reason}".split())[:_LONGEST_ANSWER]
        answer = [int(number), error, round(time.monotonic() - began, 3), origins.compiled() > before]
        try:
            os.write(answers, (json.dumps(answer) + "\n").encode("ascii"))
        except OSError:
            return  # the reader has gone


def _compile(job: dict) -> None:
    from engine.kernels.runtime.launcher import Kernel, compile_for

    if not job["module"].startswith(_PACKAGE):
        raise ValueError(f"{job['module']} is no module of kernels")
    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    assert isinstance(kernel, Kernel)
    compile_for(
        kernel, tuple(job["types"]), job["constants"], job["num_warps"], job["num_stages"], tuple(job["capability"])
    )


if __name__ == "__main__":
    main()
