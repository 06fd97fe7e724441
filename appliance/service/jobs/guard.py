"""Restores the proven settings when a job's process is killed, at once and without an operator.

On a server the job's unit runs it when the job has ended (ExecStopPost=). Elsewhere it is a process that waits for the
end of the job: the kernel drops the job's lock then. If both are killed, `atoll start` does the same.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from appliance.service.jobs.kinds import layout_of
from appliance.service.jobs.launch import this_atoll
from appliance.service.jobs.spool import Job
from installer.base.errors import ExitCode, InstallError
from installer.base.layout import code_root
from installer.decide.frontend import Unattended
from installer.operate.settings_trial import recover

_BUSY_SECONDS = 60.0   # to wait for another command that came first


def start_guard(job: Job) -> None:
    """Start a process that waits for the end of this job, unless its unit does (ExecStopPost=)."""
    if job.spec.get("by_systemd"):
        return
    with open(job.path / "log", "ab") as log:
        subprocess.Popen(
            [*this_atoll(), "jobs", "settle", str(job.path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            env={**os.environ, "PYTHONPATH": str(code_root())}, start_new_session=True,
        )  # fmt: skip


def settle_after(path: Path) -> int:
    """Wait until the job's process is gone, then put back what it left open; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = Job(path)
    layout = layout_of(job)
    try:
        with open(path / "alive") as alive:
            fcntl.flock(alive, fcntl.LOCK_SH)
    except OSError:
        return int(ExitCode.IO)
    if not layout.journal.is_file():
        return 0
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            if recover(layout, Unattended()):
                print("A tuning was cut off: the settings from before it are in force again.", file=sys.stderr)
            return 0
        except (InstallError, OSError) as error:
            busy = getattr(error, "exit_code", None) == ExitCode.BUSY
            if not busy or time.monotonic() > end:
                print(f"The settings from before the tuning could not be put back: {error}", file=sys.stderr)
                return int(getattr(error, "exit_code", ExitCode.IO))
            time.sleep(0.5)
