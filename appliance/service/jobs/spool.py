"""The files of jobs, and the state of a job derived from them.

    /run/atoll-jobs/<installation>/      for root; else $XDG_RUNTIME_DIR, else /tmp/atoll-jobs-<uid>
      writer.lock                        flock: one job at a time per installation
      <id>/spec.json                     what it was asked to do
      <id>/alive                         flock of the job's process: the kernel drops it however the process ends
      <id>/progress.jsonl                one event a line, for any number of readers
      <id>/end.json                      exit code, result or error; space is set aside at the start
      <id>/answers, secrets              FIFOs from and to the front that is attached: never on a disk
      <id>/log                           stderr of the process

Nothing here has to survive a reboot: no job does. The checklist's own state is durable (appliance/service/events.py).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.proc import ProcessId
from installer.base.timestamps import compact_timestamp

JobState = Literal["starting", "running", "ended", "killed"]

KEPT = 20                 # ended jobs whose files stay
END_BYTES = 64 << 10      # set aside for end.json
PROCESS_BYTES = 256       # and for process.json
START_SECONDS = 30.0      # between the creation of a job's directory and its lock
_MAX_LINE = 8 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """One job, by its directory. Reading needs no lock."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> dict[str, Any]:
        """What it was asked to do: kind, purpose, user, interactive, and what the kind needs."""
        return _json(self.path / "spec.json")

    @property
    def end(self) -> dict[str, Any] | None:
        """How it ended; None while it runs, and for one that was killed."""
        return _json(self.path / "end.json") or None

    def process(self) -> ProcessId | None:
        facts = _json(self.path / "process.json")
        return ProcessId(facts["pid"], facts["start_time"], facts["boot_id"]) if facts else None

    def state(self) -> JobState:
        """`killed`: the process is gone and left no end.json."""
        if self.locked():
            return "running"
        if self.end is not None:
            return "ended"
        if self.process() is None and time.time() - self._made() < START_SECONDS:
            return "starting"
        return "killed"

    def locked(self) -> bool:
        """Whether its process lives, as the kernel knows it."""
        try:
            fd = os.open(self.path / "alive", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def cancel(self) -> bool:
        """Ask it to stop, as Ctrl-C does: it completes what must not be left half done, and undoes the rest. False: it
        had already ended."""
        process = self.process()
        if process is None or not self.locked() or not process.alive():
            return False
        os.kill(process.pid, signal.SIGINT)
        return True

    def events(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The events after `offset`, and the offset to continue from; an incomplete last line is left for later."""
        try:
            with (self.path / "progress.jsonl").open("rb") as file:
                file.seek(offset)
                data = file.read(_MAX_LINE)
        except FileNotFoundError:
            return [], offset
        whole = data.rfind(b"\n") + 1
        return [event for line in data[:whole].splitlines() if (event := parsed(line))], offset + whole

    def to_json(self) -> dict[str, Any]:
        spec, end = self.spec, self.end or {}
        return {
            "id": self.id, "kind": spec.get("kind"), "purpose": spec.get("purpose"), "state": self.state(),
            "started": spec.get("at"), "by": spec.get("by"),
            "exit_code": end.get("exit_code"), "path": str(self.path),
        }  # fmt: skip

    def _made(self) -> float:
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0


def root_of(layout: Layout) -> Path:
    """The directory of one installation's jobs; it need not be there."""
    form = "server" if layout.system else "prefix"
    name = hashlib.sha256(f"{form}:{layout.prefix}".encode()).hexdigest()[:16]
    return _base() / name


def _base() -> Path:
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/atoll-jobs")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "atoll-jobs"
    return Path(f"/tmp/atoll-jobs-{os.geteuid()}")  # noqa: S108  (checked by _private)


def make_root(layout: Layout) -> Path:
    """Make it, private to this user. Raises InstallError if somebody else has put something in its place."""
    root = root_of(layout)
    for directory in (root.parent, root):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            _private(directory)
    return root


def remove(layout: Layout) -> None:
    """The files of all jobs of this installation, for its purge; none of them may run."""
    root = root_of(layout)
    if root.is_dir():
        _private(root)
        shutil.rmtree(root)
    with contextlib.suppress(OSError):  # other installations have jobs there, or it is not there
        root.parent.rmdir()


def _private(path: Path) -> None:
    facts = path.lstat()
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077:
        return
    raise InstallError(
        t("{path} does not belong to this user alone.", path=path),
        exit_code=ExitCode.IO,
        why=t("Whoever can write there could answer for you."),
        changed=t("Nothing was changed."),
        hint=t("Look who made it (ls -ld {path}), remove it, then run this again.", path=path),
    )


def make(layout: Layout, spec: dict[str, Any]) -> Job:
    """The directory of a new job, with all that its process and its readers need. Raises OSError, InstallError."""
    root = make_root(layout)
    _prune(root)
    name = f"{spec['purpose']}-{compact_timestamp()}-{secrets.token_hex(3)}"
    path = root / name.replace(" ", "-")
    path.mkdir(mode=0o700)
    try:
        for fifo in ("answers", "secrets"):
            os.mkfifo(path / fifo, 0o600)
        texts = {"end.json": " " * END_BYTES, "process.json": " " * PROCESS_BYTES, "alive": "", "progress.jsonl": "",
                 "log": "", "spec.json": json.dumps(spec)}  # fmt: skip
        for name, text in texts.items():
            (path / name).touch(0o600)
            (path / name).write_text(text, "utf-8")
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return Job(path)


def jobs(layout: Layout) -> list[Job]:
    """All jobs whose files are still there, oldest first."""
    root = root_of(layout)
    if not root.is_dir():
        return []
    _private(root)
    return sorted(_all(root), key=lambda job: (str(job.spec.get("at", "")), job._made()))


def newest(layout: Layout) -> Job | None:
    """The job that runs, else the last one that did."""
    known = jobs(layout)
    return next((job for job in reversed(known) if job.locked()), known[-1] if known else None)


def find(layout: Layout, name: str | None) -> Job:
    """The job called `name`, or the newest. Raises InstallError (usage)."""
    known = {job.id: job for job in jobs(layout)}
    job = known.get(name) if name else newest(layout)
    if job is not None:
        return job
    message = t("There is no job called {name}.", name=name) if name else t("No job has run here since the last boot.")
    raise usage_error(message, "atoll jobs list")


def _all(root: Path) -> Iterator[Job]:
    return (Job(path) for path in root.iterdir() if (path / "spec.json").is_file())


def _prune(root: Path) -> None:
    ended = sorted((job for job in _all(root) if job.state() in ("ended", "killed")), key=Job._made)
    for job in ended[: -KEPT or None]:
        shutil.rmtree(job.path, ignore_errors=True)


def parsed(line: bytes) -> dict[str, Any] | None:
    """One JSON object; None for anything else."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return parsed(path.read_bytes()) or {}
    except OSError:
        return {}
