"""Starting a job's process: a transient unit on a running server, elsewhere a process in its own session."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from appliance.service.jobs.process import Work, run_process
from appliance.service.jobs.spool import START_SECONDS, Job, make
from installer.audit import log
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import CHOSEN, t
from installer.base.layout import Layout, code_root
from installer.base.timestamps import timestamp
from installer.release.code_tree import code_tree
from installer.release.release import THIS_CODE
from installer.service.systemctl import run

UNIT = "atoll-job-"
_PASSED_ON = (CHOSEN, "ATOLL_PREFIX", "SUDO_USER", "LANG", "LC_ALL", "LC_MESSAGES", "PATH", "HOME")
_FIRST_FD, _LAST_FD = 3, 4096


def new_job(layout: Layout, purpose: str, *, kind: str, given: dict[str, Any], interactive: bool) -> Job:
    """The files of a new job, which does not run yet. Raises InstallError, OSError."""
    unit = _booted(layout)
    spec = {
        "purpose": purpose, "kind": kind, "given": given, "interactive": interactive, "by": log.operator()["user"],
        "at": timestamp(), "prefix": str(layout.prefix),
        "system": layout.system, "by_systemd": unit,
    }  # fmt: skip
    return make(layout, spec)


def launch(job: Job, work: Work | None) -> None:
    """Start its process, and return when it holds its lock or has ended. A Ctrl-C in between cancels the job.

    `work` runs in a process forked from this one. A unit's process derives the same work from `kind` and `given` in the
    spec (appliance/service/jobs/kinds.py), and so does a fresh process if `work` is None: for a front that has threads
    and must not be forked. Raises InstallError.
    """
    child = None if job.spec["by_systemd"] and _start_unit(job) else _begin(job, work)
    cancelled = False
    end = time.monotonic() + START_SECONDS
    while not ((job.locked() and job.process()) or job.end is not None):
        try:
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
        except KeyboardInterrupt:
            cancelled = True
    if cancelled:
        job.cancel()


def _booted(layout: Layout) -> bool:
    return layout.system and layout.prefix == Path("/") and Path("/run/systemd/system").is_dir() and os.geteuid() == 0


def _start_unit(job: Job) -> bool:
    """Whether systemd has started it. A machine without systemd-run gets the forked process instead."""
    environment = [f"--setenv={name}={value}" for name in _PASSED_ON if (value := os.environ.get(name))]
    command = this_atoll()
    settings = [] if code_tree() is not None else [f"--setenv=PYTHONPATH={code_root()}"]
    done = run(
        [
            "systemd-run", "--quiet", "--collect", "--service-type=exec", f"--unit={UNIT}{job.id}", "--no-ask-password",
            "--property=KillSignal=SIGINT", "--property=TimeoutStopSec=180", "--property=SendSIGKILL=yes",
            f"--property=StandardError=append:{job.path / 'log'}", "--property=StandardOutput=null",
            f"--property=ExecStopPost=-{' '.join([*command, 'jobs', 'settle', str(job.path)])}",
            "--property=KillMode=mixed", "--property=UMask=0022", f"--working-directory={os.getcwd()}",
            *environment, *settings, *command, "jobs", "exec", str(job.path),
        ],
        30.0,
    )  # fmt: skip
    return done.code == 0


def this_atoll() -> list[str]:
    """The `atoll` of the running code: a code tree has a command of its own; a checkout needs PYTHONPATH besides."""
    tree = code_tree()
    return [str(tree / "bin/atoll")] if tree is not None else list(THIS_CODE)


def _begin(job: Job, work: Work | None) -> int:
    return _spawn(job) if work is None else _fork(job, work)


def _spawn(job: Job) -> int:
    """Start a separate program; returns its pid."""
    environment = {**os.environ, **({} if code_tree() is not None else {"PYTHONPATH": str(code_root())})}
    with open(job.path / "log", "ab") as log:
        return subprocess.Popen(
            [*this_atoll(), "jobs", "exec", str(job.path)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=log, env=environment, start_new_session=True,
        ).pid  # fmt: skip


def _fork(job: Job, work: Work) -> int:
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
        os.closerange(_FIRST_FD, _LAST_FD)  # a running job must not hold the front's pipes open
        code = run_process(job, work)
    finally:
        os._exit(code)


def _last_line(job: Job) -> str:
    try:
        return (job.path / "log").read_text("utf-8", "replace").strip().rpartition("\n")[2]
    except OSError:
        return ""
