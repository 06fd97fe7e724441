"""Run another program for facts: bounded in time and output, and ended with all its children when it takes too long."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

MAX_OUTPUT = 4 << 20  # bytes; `nvidia-smi -q -x` writes 27 KB for one GPU


@dataclass(frozen=True, slots=True)
class Output:
    """The result. `problem` is empty, or says why there is no exit status: not found, timeout, too much output."""

    code: int | None
    stdout: str
    stderr: str
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.problem

    @property
    def said(self) -> str:
        """One line about a failure."""
        lines = [line for line in f"{self.stderr}\n{self.stdout}".splitlines() if line.strip()]
        return self.problem or (clean(lines[0]) if lines else f"exit status {self.code}")


def clean(text: str, limit: int = 160) -> str:
    """Foreign text made safe for a terminal: one line, no control characters, bounded length."""
    line = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    return " ".join(line.split())[:limit]


def run(argv: Sequence[str], timeout: float, *, environment: dict[str, str] | None = None) -> Output:
    """Run `argv` in its own session. Never raises, and never takes much longer than `timeout` seconds.

    A process that sleeps in the kernel cannot be killed (a hung driver causes that): it is left behind, not waited for.
    """
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C", **(environment or {})},
        )
    except (OSError, ValueError) as error:
        return Output(None, "", "", getattr(error, "strerror", None) or str(error))
    problem = ""
    try:
        chunks, problem = _read(child, time.monotonic() + timeout, timeout)
    finally:
        _end(child)
    stdout, stderr = (b"".join(chunks[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
    return Output(child.returncode if not problem else None, stdout, stderr, problem)


def _read(child: "subprocess.Popen[bytes]", deadline: float, timeout: float) -> tuple[dict[str, list[bytes]], str]:
    chunks: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    left = MAX_OUTPUT
    with selectors.DefaultSelector() as selector:
        for name in chunks:
            selector.register(getattr(child, name), selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready or time.monotonic() >= deadline:
                return chunks, f"no answer within {timeout:g} s"
            for key, _ in ready:
                data = os.read(key.fd, min(65536, left + 1))
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                left -= len(data)
                if left < 0:
                    return chunks, "endless output"
                chunks[key.data].append(data)
    try:
        child.wait(max(0.05, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return chunks, f"no answer within {timeout:g} s"
    return chunks, ""


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of its session, close the pipes, and reap it if possible."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.5)
