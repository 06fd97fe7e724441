"""Where Triton keeps compiled kernels: a directory that nobody else can write to.

Its files are loaded into the GPU as code, so a directory that others could have prepared is never used. Triton's
default, ~/.triton, does not work where the home is read-only, as under systemd.
"""

import atexit
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_VARIABLE = "TRITON_CACHE_DIR"  # Triton reads it at every compilation
_TEMPORARY = "atoll-kernels-"
_lock = threading.Lock()


def use_cache_dir() -> Path:
    """Choose Triton's directory for compiled kernels unless the operator named one; call it before the first
    compilation.

    Takes triton/ in the first of $CACHE_DIRECTORY (set by systemd), $XDG_CACHE_HOME/atoll and ~/.cache/atoll that can
    be created, belongs to this user and is closed to others; else a new private temporary directory, which is removed
    when the process ends. The same where the operator's directory cannot be written to. Raises OSError if not even a
    temporary one can be created.
    """
    with _lock:
        given = os.environ.get(_VARIABLE)
        if not given or not _writable(Path(given)):
            os.environ[_VARIABLE] = str(_choose())
            if given:
                log.warning("%s=%s cannot be written to: kernels go to %s.", _VARIABLE, given, os.environ[_VARIABLE])
        return Path(os.environ[_VARIABLE])


def is_temporary(directory: Path) -> bool:
    """Whether this directory, from `use_cache_dir`, is removed when the process ends."""
    return directory.name.startswith(_TEMPORARY)


def _writable(directory: Path) -> bool:
    """Whether this process may put files into `directory`, which need not exist yet."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)  # False on a read-only file system, for root too


def _choose() -> Path:
    for directory in _candidates():
        if found := _prepared(directory):
            return found
    directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY))  # mode 0700, an unpredictable name
    atexit.register(_remove, directory, os.getpid())
    return directory


def _candidates() -> Iterator[Path]:
    if given := os.environ.get("CACHE_DIRECTORY"):
        yield Path(given.split(":")[0]) / "triton"
    if (given := os.environ.get("XDG_CACHE_HOME")) and Path(given).is_absolute():
        yield Path(given) / "atoll/triton"
    home = Path(os.path.expanduser("~"))
    if home.is_dir() and home.is_absolute():  # a service's user often has no home; then "~" is not expanded
        yield home / ".cache/atoll/triton"


def _prepared(directory: Path) -> Path | None:
    """Create `directory` with mode 0700. Returns its real path if only this user can write to it, and can."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        place = directory.resolve()  # resolved once, because a link in the path may change later
        if not _is_private(place):
            return None
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError:
        return None


def _is_private(place: Path) -> bool:
    """Whether only this user and root can put files into `place` (a real path) or replace it with another directory."""
    found = place.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return all(_trusted(above.stat()) for above in place.parents)


def is_closed(place: Path) -> bool:
    """Whether only root and this user can change what lies in the directory `place` (a real path), or replace it."""
    return not place.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) and all(
        _trusted(each.stat()) for each in (place, *place.parents)
    )


def _trusted(found: os.stat_result) -> bool:
    """Whether only root and this user can rename entries of the directory `found`."""
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and not open_to_all


def _remove(directory: Path, maker: int) -> None:
    if os.getpid() == maker:  # not in a forked child, whose parent still uses it
        shutil.rmtree(directory, ignore_errors=True)
