"""The process behind compile_pool.py: jobs come in, one JSON object a line; [its number, error or null] goes out.

Loads PyTorch and Triton, then reads all jobs, then forks: what is loaded is there for every fork at once, in memory
that they share. Needs no GPU and never touches one.
"""

import importlib
import json
import os
import pkgutil
import struct
import sys

import engine.kernels
from engine.kernels.launch import Kernel, compile_for

_PACKAGE = "engine.kernels."
_MOST_FORKS = 16  # each takes some 150 MB of memory of its own while it works
_NUMBER = struct.Struct("I")
_LONGEST_ANSWER = 500  # characters; a pipe takes an answer whole, however many write


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a compiler prints is no answer
    for module in pkgutil.iter_modules(engine.kernels.__path__, _PACKAGE):
        if ".triton_" in module.name:
            importlib.import_module(module.name)
    jobs = sys.stdin.read().splitlines()
    numbers, give = os.pipe()  # each fork takes the next number
    os.write(give, b"".join(_NUMBER.pack(number) for number in range(len(jobs))))
    os.close(give)
    for _ in range(min(_MOST_FORKS, len(os.sched_getaffinity(0)), len(jobs))):
        if os.fork() == 0:
            _work(jobs, numbers, answers)
            os._exit(0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _work(jobs: list[str], numbers: int, answers: int) -> None:
    while number := os.read(numbers, _NUMBER.size):
        (at,) = _NUMBER.unpack(number)
        error = None
        try:
            _compile(json.loads(jobs[at]))
        except Exception as reason:  # one kernel's error must not end the others
            error = " ".join(f"{type(reason).__name__}: {reason}".split())[:_LONGEST_ANSWER]
        try:
            os.write(answers, (json.dumps([at, error]) + "\n").encode("ascii"))
        except OSError:
            return  # nobody waits any more


def _compile(job: dict) -> None:
    if not job["module"].startswith(_PACKAGE):
        raise ValueError(f"{job['module']} is no module of kernels")
    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    assert isinstance(kernel, Kernel)
    compile_for(
        kernel, tuple(job["types"]), job["constants"], job["num_warps"], job["num_stages"], tuple(job["capability"])
    )


if __name__ == "__main__":
    main()
