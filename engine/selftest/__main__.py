"""Runs the self-test in a child process with a time limit, and passes its lines on as they arrive.

A kernel that reads out of bounds makes every later CUDA call of its process fail, and a kernel that never ends cannot
be stopped from within. So the tests run in a separate process, and this one always reports the outcome. Exit codes: 0
all passed, 1 a check failed, 2 no usable GPU.
"""

import argparse
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from engine.capabilities import nvidia_driver_present
from engine.kernels.runtime import compile_pool, warm_cache_hint
from engine.message import joined, msg, without_ids
from engine.selftest import jobs
from engine.selftest.report import Tally, as_text, print_line
from engine.selftest.stopwatch import Stopwatch, process_began

_LAST_WORDS = 300  # characters of the child's last error that are shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.selftest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--in-process", action="store_true", help="run the tests in this process, without a time limit")
    parser.add_argument("--no-rates", action="store_true", help="do not measure the GPU's speed")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)  # when the first process did
    options = parser.parse_args()
    watch = Stopwatch(process_began() if options.began is None else options.began)
    if options.in_process:
        tally = Tally(print_line, watch=watch)
        if nvidia_driver_present() and not warm_cache_hint.found("self-test"):
            compile_pool.start_early()
            jobs.give_early()  # kernels are compiled while torch loads
        watch.lap("python")
        importlib.import_module("torch")
        watch.lap("torch")
        from engine.selftest.run import run

        try:
            return run(tally, with_rates=not options.no_rates)
        finally:
            compile_pool.dismiss()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`: the child ends too
    command = [sys.executable, "-P", "-m", "engine.selftest", "--in-process", "--began", repr(watch.began)]
    command += ["--no-rates"] if options.no_rates else []
    try:
        return supervise(command, Tally(print_line if options.json else _print_text, watch=watch), options.time_limit)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def supervise(command: list[str], tally: Tally, time_limit: float) -> int:
    """Run `command`, whose standard output are the lines of a self-test. Returns the exit code."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # so that it finds the same code as this process
        start_new_session=True,  # so that the assembler it may have started ends with it
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    errors: list[str] = []
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    listener = threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True)
    listener.start()
    code, late = 0, False
    try:
        while (text := lines.get(timeout=max(0.0, tally.watch.began + time_limit - time.monotonic()))) is not None:
            line = _parse(text)
            if line is None:
                errors.append(text)
                continue
            tally.see(line)
            code = line.get("exit_code", code)
    except queue.Empty:
        late = True
    finally:
        _stop(child, tally.ended)
    if tally.ended:
        return code
    listener.join(1)
    name = tally.running or "start"
    if late:
        reason = msg("no answer within {seconds} s", seconds=f"{time_limit:.0f}")
    else:
        reason = msg("its process {end}", end=_how_it_ended(child.poll()))
        if last := _last_words(errors):
            reason = joined([reason, last], ": ")
    tally.see({
        "kind": "check", "name": name, "passed": False, "error": None, "bound": None, "ms": 0.0, "fault": "silent",
        "reason": reason,
    })  # fmt: skip
    return tally.end()


def _read(stream: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _parse(text: str) -> dict[str, Any] | None:
    """A line of the test; None if a library printed it."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return without_ids(line) if isinstance(line, dict) and "kind" in line else None


def _stop(child: subprocess.Popen, ended: bool) -> None:
    """End the child and what it started. A child that hangs inside the driver may even survive SIGKILL for a while."""
    try:
        child.wait(5 if ended else 0.2)
        return
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        return


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return msg("was ended by {signal}", signal=signal.Signals(-code).name)
    return msg("ended with exit code {code}", code=code)


def _last_words(errors: list[str]) -> str:
    last = next((line.strip() for line in reversed(errors) if line.strip()), "")
    return last[:_LAST_WORDS]


def _print_text(line: dict[str, Any]) -> None:
    text = as_text(line)
    if text is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
