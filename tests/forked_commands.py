"""Many calls of `atoll`, each in a process forked from one that has imported it: an interpreter for each takes longer
than most of them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = """
import importlib, json, os, sys
from appliance.cli import main
import appliance.cli.app
given = json.load(sys.stdin)
for module in given["modules"]:
    importlib.import_module(module)
for number, words in enumerate(given["calls"]):
    pid = os.fork()
    if pid == 0:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(given["directory"], f"{number}.{name}"), os.O_WRONLY | os.O_CREAT), fd)
        sys.argv = ["atoll", *words]
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # to take an interpreter apart is half of the time
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def forked(
    calls: Sequence[Sequence[str]], directory: Path, *modules: str, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """What each of `calls` did. `modules` are imported before, `directory` is for their output."""
    given = {"calls": calls, "directory": str(directory), "modules": modules}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(given), capture_output=True, text=True, check=True,
        env=os.environ | environment,
    )  # fmt: skip
    statuses = [int(line) for line in done.stdout.splitlines()]
    assert len(statuses) == len(calls), done.stderr
    return [
        subprocess.CompletedProcess(
            call, status, (directory / f"{number}.out").read_text(), (directory / f"{number}.err").read_text()
        )
        for number, (call, status) in enumerate(zip(calls, statuses, strict=True))
    ]
