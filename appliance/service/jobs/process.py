"""The process of a job: it holds the locks, does the work, and writes how that ended, whatever happens in it."""

import contextlib
import fcntl
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from appliance.service.jobs.frontend import JobFrontend
from appliance.service.jobs.spool import END_BYTES, PROCESS_BYTES, Job
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t
from installer.base.lock import InstallLock
from installer.base.messages import encode
from installer.base.proc import ProcessId

Work = Callable[[JobFrontend], dict[str, Any]]
"""Does the job's work and returns its result, JSON-able. Raises InstallError or OSError."""


def run_process(job: Job, work: Work) -> int:
    """Do the work of `job` in this process and return its exit code. Never raises."""
    with open(job.path / "alive") as alive:  # held until this process is gone
        if not _locked(alive.fileno()) or job.end is not None:  # a unit that was slow to start runs it already
            return int(ExitCode.BUSY)
        _take_signals()
        me = ProcessId.of(os.getpid())
        assert me is not None
        facts = {"pid": me.pid, "start_time": me.start_time, "boot_id": me.boot_id}
        _overwrite(job.path / "process.json", json.dumps(facts).encode(), PROCESS_BYTES)
        end: dict[str, Any]
        try:
            frontend = JobFrontend(job, interactive=bool(job.spec.get("interactive")))
            with InstallLock(job.path.parent / "writer.lock", str(job.spec["purpose"])):
                frontend.emit("begin", job=job.id)
                end = {"exit_code": 0, "result": work(frontend)}
        except InstallError as error:
            end = failed(error)
        except OSError as error:
            end = failed(io_error(t("finish this command"), error))
        except KeyboardInterrupt:
            end = failed(interrupted())
        except BaseException:  # a bug: the reader must see it, and the job must end
            end = {"exit_code": int(ExitCode.BUG), "bug": traceback.format_exc()}
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late to cancel
        _write_end(job, end)
        return int(end["exit_code"])


def _locked(fd: int) -> bool:
    """Take the lock. Retries for a second: a reader that tests the lock holds it for a moment."""
    end = time.monotonic() + 1.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def failed(error: InstallError) -> dict[str, Any]:
    """An error as a job's end, its texts with their ids."""
    names = ("message", "exit_code", "why", "changed", "hint", "log_tail", "error_id")
    return {"exit_code": error.exit_code, "error": encode({name: getattr(error, name) for name in names})}


def interrupted() -> InstallError:
    return InstallError(t("Interrupted."), exit_code=ExitCode.INTERRUPTED, hint=t("Run this again."))


def _write_end(job: Job, end: dict[str, Any]) -> None:
    """Write into the space that was allocated at the start."""
    data = json.dumps(end, ensure_ascii=False).encode(errors="replace")
    if len(data) > END_BYTES and end["exit_code"] == 0:
        with contextlib.suppress(OSError):  # more than was allocated at the start: a full disk may refuse it
            (job.path / "end.json").write_bytes(data)
            return
        data = json.dumps({"exit_code": 0, "result": {}}).encode()
    _overwrite(job.path / "end.json", data, END_BYTES)


def _overwrite(path: Path, data: bytes, size: int) -> None:
    """Overwrite the `size` bytes that the file already has."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data.ljust(size), 0)
    finally:
        os.close(fd)


def _take_signals() -> None:
    """A cancel and a shutdown interrupt the work as Ctrl-C does; a lost terminal does not."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
