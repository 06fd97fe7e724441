"""A private directory for the socket between `atoll serve` and its engine."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SWEEP_AGE_SECONDS = 60.0  # a younger directory may belong to a process that has not locked it yet


@contextlib.contextmanager
def runtime_directory() -> Iterator[Path]:
    """A new directory of mode 0700, removed at the end. Directories that killed processes left behind are removed, too.

    A living process holds a lock on its directory; this works between containers that share the parent directory, too.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    for old in base.glob("atoll-serve-*"):
        with contextlib.suppress(OSError):
            stat = old.lstat()
            if stat.st_uid != os.geteuid() or time.time() - stat.st_mtime < SWEEP_AGE_SECONDS:
                continue
            if (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    directory = Path(tempfile.mkdtemp(prefix="atoll-serve-", dir=base))
    lock = _lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock, or None if a living process has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
