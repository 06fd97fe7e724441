"""The supervisor of the prefix form: starts `atoll serve`, restarts it when it crashes, ends with it. No libraries.

It is the leader of its own session, so it outlives the terminal that started it; under systemd this whole file is
replaced by a unit. Run as `python -m installer.service.prefix_supervisor --prefix DIR`.

    run/atoll/supervisor.lock   flock: at most one per prefix
    run/atoll/atoll.pid         this process: {pid, start_time, boot_id, release}
    run/atoll/service.json      what the service does: {phase, pid, since, restarts, last_exit}
"""

import argparse
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from installer.base import fs
from installer.base.layout import Layout
from installer.base.proc import ProcessId

LOG_CAP = 16 << 20       # bytes; then the log is rotated
LOG_KEEP = 3             # serve.log.1 … serve.log.3
GRACE = 30.0             # seconds from SIGTERM to SIGKILL
BURST, BURST_WINDOW = 4, 600.0   # as many restarts in so many seconds, then give up
FATAL_EXITS = (2, 10, 11, 12)    # wrong settings or broken trust: a restart cannot help

_PR_SET_PDEATHSIG = 1


class Supervisor:
    """One service, kept running until SIGTERM."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.release = layout.current.resolve(strict=True)  # a switch must not change what a restart starts
        self.stopping = False
        self.child: subprocess.Popen[bytes] | None = None
        self.restarts: list[float] = []
        self.last_exit: int | None = None

    def run(self) -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        me = ProcessId.of(os.getpid())
        assert me is not None
        identity = {"pid": me.pid, "start_time": me.start_time, "boot_id": me.boot_id, "release": self.release.name}
        fs.write_atomic(self.layout.pidfile, json.dumps(identity) + "\n", 0o644)
        try:
            while not self.stopping:
                code = self._run_once()
                if self.stopping or not self._restart_allowed(code):
                    break
                self._sleep(min(2.0 ** (len(self.restarts) - 1), 30.0))
        finally:
            self._report("stopped" if self.stopping else "failed")
            fs.remove_file(self.layout.pidfile)
        return 0 if self.stopping else 1

    def _run_once(self) -> int:
        rotate(self.layout.log)
        command = [str(self.release / "bin/atoll"), "serve", "--config", str(self.layout.config)]
        with open(self.layout.log, "ab", buffering=0) as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} supervisor: starting {self.release.name}\n".encode())
            try:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", preexec_fn=_die_with_parent
                )
            except OSError as error:
                log.write(f"supervisor: cannot start {command[0]}: {error.strerror}\n".encode())
                return 2
        self.child = child
        if self.stopping:  # SIGTERM came while the process was being made
            child.terminate()
        self._report("running")
        deadline = None
        while True:
            try:
                self.last_exit = child.wait(timeout=1.0 if self.stopping else 10.0)
                break
            except subprocess.TimeoutExpired:
                rotate(self.layout.log, running=True)
            if self.stopping:
                deadline = deadline or time.monotonic() + GRACE
                if time.monotonic() > deadline:
                    child.kill()
        self.child = None
        with open(self.layout.log, "ab", buffering=0) as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} supervisor: exit status {self.last_exit}\n".encode())
        return self.last_exit

    def _restart_allowed(self, code: int) -> bool:
        now = time.monotonic()
        self.restarts = [at for at in self.restarts if now - at < BURST_WINDOW]
        if code == 0 or code in FATAL_EXITS or len(self.restarts) >= BURST:
            return False
        self.restarts.append(now)
        self._report("restarting")
        return True

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        if self.child is not None:
            self.child.terminate()

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))

    def _report(self, phase: str) -> None:
        state = {
            "phase": phase,
            "pid": self.child.pid if self.child else None,
            "since": time.time(),
            "restarts": len(self.restarts),
            "last_exit": self.last_exit,
        }
        try:
            fs.write_atomic(self.layout.service_state, json.dumps(state) + "\n", 0o644)
        except OSError:
            pass  # a full disk must not take the service down


def rotate(log: Path, *, running: bool = False) -> None:
    """Keep the log under its cap. One that a writer holds open is copied and truncated: a rename would not reach it."""
    try:
        if log.stat().st_size <= LOG_CAP:
            return
        for number in range(LOG_KEEP, 1, -1):
            older = log.with_name(f"{log.name}.{number - 1}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number}"))
        first = log.with_name(f"{log.name}.1")
        if running:
            shutil.copyfile(log, first)
            os.truncate(log, 0)
        else:
            log.replace(first)
    except OSError:
        pass


def _die_with_parent() -> None:
    """In the child, before exec: if the supervisor is killed outright, the service stops too, never orphaned."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="installer.service.prefix_supervisor", description=__doc__)
    parser.add_argument("--prefix", type=Path, required=True)
    layout = Layout.at(parser.parse_args(argv).prefix)
    fd = os.open(layout.run / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another supervisor runs for this prefix", file=sys.stderr)
        return 75
    return Supervisor(layout).run()


if __name__ == "__main__":
    sys.exit(main())
