"""Python processes that are forks of one that has imported PyTorch, Triton and the engine, which takes two seconds
of a processor's time. Each is as new as one that imported them itself.

    python forks.py MODULE ...      imports them, and runs what lines of JSON on stdin ask for
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATHS = (HERE.parents[2], HERE.parents[1] / "gpu", HERE, HERE / "steps")


class Forks:
    """What runs Python in forks of a process that was started when one was first wanted."""

    def __init__(self, imports: Iterable[str], environment: dict[str, str]) -> None:
        self._command = [sys.executable, __file__, *imports]
        self._environment = environment | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: Any, timeout: int = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS`: a script, -m or -c. `variables` of the environment are those that are read after the
        imports."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = list(map(str, arguments))
        self._process.stdin.write(json.dumps([words, variables, timeout]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return subprocess.CompletedProcess(words, *json.loads(answer))

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def serve() -> list[str] | None:
    """Fork for each request. Returns in a fork: what it shall run; at the end of the requests: None."""
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            words, variables, timeout = json.loads(line)
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
                child = os.fork()
                if child == 0:
                    for number, file in enumerate((nothing, out, err)):
                        os.dup2(file.fileno(), number)
                    os.environ.update(variables)
                    signal.alarm(timeout)
                    return words
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                said = []
                for file in (out, err):
                    file.seek(0)
                    said.append(file.read().decode())
            answers.write(json.dumps([status, *said]) + "\n")
            answers.flush()
    return None


def run(words: list[str]) -> None:
    """As Python runs its arguments."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "TRITON_INTERPRET" not in os.environ:
        sys.modules["engine.kernels.runtime.launcher"].load_compiler()
    gc.freeze()
    if (wanted := serve()) is not None:
        run(wanted)
