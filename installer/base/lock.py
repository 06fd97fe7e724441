"""One installer at a time. The kernel drops the lock when its holder dies, in whatever way."""

import contextlib
import fcntl
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t


class InstallLock:
    """flock(2) on a file that also names its holder. Use as a context manager."""

    def __init__(self, path: Path, purpose: str) -> None:
        self.path = path
        self.purpose = purpose
        self._fd = -1

    def __enter__(self) -> "InstallLock":
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(fd)
            os.close(fd)
            raise busy(self.path, holder) from None
        who = {"pid": os.getpid(), "purpose": self.purpose, "since": int(time.time())}
        self._fd = fd
        with contextlib.suppress(OSError):  # a full disk: the lock holds, but without its holder's name
            os.ftruncate(fd, 0)
            os.pwrite(fd, (json.dumps(who) + "\n").encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def busy(path: Path, holder: str) -> InstallError:
    return InstallError(
        t("Another Atoll command is working on this installation: {holder}.", holder=holder),
        exit_code=ExitCode.BUSY,
        why=t("It holds the lock {path}.", path=path),
        changed=t("Nothing was changed."),
        hint=t("Wait until it has finished, then run this again; `atoll status` shows its progress."),
    )


def refuse_if_busy(path: Path) -> None:
    """Raise InstallError (75) if another process holds the lock."""
    name = holder(path)
    if name is not None and f"process {os.getpid()}," not in name:
        raise busy(path, name)


def _read_holder(fd: int) -> str:
    try:
        who = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%H:%M:%S", time.localtime(who["since"]))
        return t("`atoll {purpose}`, process {pid}, since {since}", purpose=who["purpose"], pid=who["pid"],
                 since=since)
    except (ValueError, KeyError, TypeError):
        return t("an unnamed process")


def holder(path: Path) -> str | None:
    """Who holds the lock right now, or None. Does not disturb the holder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(fd)
    finally:
        os.close(fd)
    return None


def ignore_hangup() -> None:
    """Let an install outlive its terminal: a dropped SSH session must not stop it half-way."""
    import signal
    import threading

    if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
