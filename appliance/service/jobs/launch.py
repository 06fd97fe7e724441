"""Starting a job's process: a transient unit on a running server, elsewhere a process in a session of its own."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from appliance.service.jobs.process import Work, run_process
from appliance.service.jobs.spool import START_SECONDS, Job, make
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import CHOSEN, t
from installer.base.layout import Layout
from installer.release.release import THIS_CODE
from installer.service.service import code_root
from installer.service.systemctl import run

UNIT = "atoll-job-"
_PASSED_ON = (CHOSEN, "ATOLL_PREFIX", "SUDO_USER", "LANG", "LC_ALL", "LC_MESSAGES", "PATH", "HOME")
_FIRST_FD, _LAST_FD = 3, 4096


def start(
    layout: Layout, purpose: str, work: Work, *, kind: str, given: dict[str, Any], interactive: bool
) -> Job:
    """Start a job and return when its process holds its lock.

    `work` is what the process does where it is forked from this one; a unit's process makes the same of `kind` and
    `given` (appliance/service/jobs/kinds.py). Raises InstallError, OSError.
    """
    spec = {
        "purpose": purpose, "kind": kind, "given": given, "interactive": interactive, "by": log.operator()["user"],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "prefix": str(layout.prefix),
        "system": layout.system,
    }  # fmt: skip
    by_systemd = _booted(layout)
    job = make(layout, {**spec, "unit": None})
    if by_systemd and _start_unit(job):
        _wait(job, None)
    else:
        _wait(job, _fork(job, layout, work))
    return job


def _booted(layout: Layout) -> bool:
    return layout.system and layout.prefix == Path("/") and Path("/run/systemd/system").is_dir() and os.geteuid() == 0


def _start_unit(job: Job) -> bool:
    """Whether systemd has started it. A machine without systemd-run gets the forked process instead."""
    environment = [f"--setenv={name}={value}" for name in _PASSED_ON if (value := os.environ.get(name))]
    done = run(
        [
            "systemd-run", "--quiet", "--collect", f"--unit={UNIT}{job.id}", "--no-ask-password",
            "--property=KillSignal=SIGINT", "--property=TimeoutStopSec=180", "--property=SendSIGKILL=yes",
            f"--property=StandardError=append:{job.path / 'log'}", "--property=StandardOutput=null",
            "--property=KillMode=mixed", "--property=UMask=0022", f"--working-directory={os.getcwd()}",
            *environment, f"--setenv=PYTHONPATH={code_root()}", *THIS_CODE, "jobs", "exec", str(job.path),
        ],
        30.0,
    )  # fmt: skip
    return done.code == 0


def _fork(job: Job, layout: Layout, work: Work) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = int(ExitCode.BUG)
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        errors = os.open(job.path / "log", os.O_WRONLY | os.O_APPEND)
        for fd, stands_for in ((nothing, 0), (nothing, 1), (errors, 2)):
            os.dup2(fd, stands_for)
        os.closerange(_FIRST_FD, _LAST_FD)  # a pipe of the front must not stay open because the job lives
        code = run_process(job, layout, work)
    finally:
        os._exit(code)


def _wait(job: Job, child: int | None) -> None:
    """Until the process holds its lock or has ended. Raises InstallError where neither comes about."""
    end = time.monotonic() + START_SECONDS
    while not (job.locked() or job.end is not None):
        gone = child is not None and os.waitpid(child, os.WNOHANG)[0] == child
        if (gone and job.end is None) or time.monotonic() > end:
            raise InstallError(
                t("The job could not be started."),
                exit_code=ExitCode.IO,
                why=_last_line(job),
                changed=t("Nothing was changed."),
                hint=t("Look at {path}, then run this again.", path=job.path / "log"),
            )
        time.sleep(0.01)


def _last_line(job: Job) -> str:
    try:
        return (job.path / "log").read_text("utf-8", "replace").strip().rpartition("\n")[2]
    except OSError:
        return ""
