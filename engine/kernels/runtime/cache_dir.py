"""Where Triton keeps compiled kernels: a directory that nobody else can write to.

Its files are loaded into the GPU as code, so a directory that others could have prepared is never used. Triton's own
choice, ~/.triton, fails where the home is read-only, as it is under systemd.
"""

import atexit
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "TRITON_CACHE_DIR"  # Triton reads it for each kernel
_TEMPORARY = "atoll-kernels-"
_lock = threading.Lock()


def use_cache_dir() -> Path:
    """Choose Triton's directory for compiled kernels unless the operator named one; call it before the first
    compilation.

    The first of these that can be created, belongs to this user and is closed to others: triton/ below $CACHE_DIRECTORY
    (systemd's), $XDG_CACHE_HOME/atoll or ~/.cache/atoll; else a new private temporary directory, which ends with this
    process. Raises OSError if not even that can be made.
    """
    with _lock:
        if not os.environ.get(_VARIABLE):
            os.environ[_VARIABLE] = str(_choose())
        return Path(os.environ[_VARIABLE])


def is_temporary(directory: Path) -> bool:
    """Whether this directory of `use_cache_dir` ends with the process."""
    return directory.name.startswith(_TEMPORARY)


def _choose() -> Path:
    for directory in _candidates():
        if found := _prepared(directory):
            return found
    directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY))  # mode 0700, a name that nobody can foresee
    atexit.register(_remove, directory, os.getpid())
    return directory


def _candidates() -> Iterator[Path]:
    if given := os.environ.get("CACHE_DIRECTORY"):
        yield Path(given.split(":")[0]) / "triton"
    if (given := os.environ.get("XDG_CACHE_HOME")) and Path(given).is_absolute():
        yield Path(given) / "atoll/triton"
    home = Path(os.path.expanduser("~"))
    if home.is_dir() and home.is_absolute():  # a service's user often has no home, and "~" stays
        yield home / ".cache/atoll/triton"


def _prepared(directory: Path) -> Path | None:
    """Make `directory`, mode 0700; its real path if it is ours alone and files can be made in it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        place = directory.resolve()  # a link on the way may lead elsewhere later
        if not _is_private(place):
            return None
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError:
        return None


def _is_private(place: Path) -> bool:
    """Whether only this user and root can put files into `place` (a real path) or replace it by another directory."""
    found = place.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return all(_trusted(above.stat()) for above in place.parents)


def _trusted(found: os.stat_result) -> bool:
    """Whether nobody but root and this user can rename what lies in the directory `found`."""
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and not open_to_all


def _remove(directory: Path, maker: int) -> None:
    if os.getpid() == maker:  # not in a forked child, whose parent still uses it
        shutil.rmtree(directory, ignore_errors=True)
