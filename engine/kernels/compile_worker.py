"""A worker of compile_ahead.py: one JSON object a line comes in, "ok" or an error goes out. Needs no GPU."""

import importlib
import json
import sys

from engine.kernels.launch import Kernel, compile_for

_PACKAGE = "engine.kernels."


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a compiler prints is no answer
    for line in sys.stdin:
        try:
            answer = _compile(json.loads(line))
        except Exception as error:  # one kernel's error must not end the others
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        print(answer, file=answers, flush=True)


def _compile(job: dict) -> str:
    if not job["module"].startswith(_PACKAGE):
        raise ValueError(f"{job['module']} is no module of kernels")
    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    assert isinstance(kernel, Kernel)
    compile_for(
        kernel, tuple(job["types"]), job["constants"], job["num_warps"], job["num_stages"], tuple(job["capability"])
    )
    return "ok"


if __name__ == "__main__":
    main()
