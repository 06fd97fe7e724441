"""Durable file operations, and a removal that cannot leave the tree.

"Durable" means that a power cut after the call returns does not undo it. That takes an fsync of the file and one of the
directory that names it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dir(path: Path, mode: int = 0o755) -> None:
    """Create one directory and its missing parents (0755), durably. An existing one is left unchanged."""
    missing = []
    here = path
    while not here.is_dir():
        missing.append(here)
        here = here.parent
    for directory in reversed(missing):
        try:
            directory.mkdir(mode=mode if directory == path else 0o755)
        except FileExistsError:
            continue
        directory.chmod(mode if directory == path else 0o755)  # independent of the umask
        fsync_dir(directory.parent)


def read_regular(path: Path, limit: int) -> tuple[bytes, os.stat_result]:
    """At most `limit` bytes of a regular file, and its stat, which tells whether there is more.

    Raises OSError, also for anything but a regular file (a FIFO never blocks).
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", str(path))
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(limit), info
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace `path` atomically: readers, and a boot after a power cut, see the old content or the new, never a
    mixture."""
    temporary = path.with_name(f".{path.name}.partial")
    remove_file(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(fd, mode)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(fd)
    except BaseException:
        remove_file(temporary)
        raise
    finally:
        os.close(fd)
    temporary.rename(path)
    fsync_dir(path.parent)


def symlink_atomic(path: Path, target: str) -> None:
    """Point the symlink `path` at `target` with one rename(2)."""
    temporary = path.with_name(f".{path.name}.partial")
    remove_file(temporary)
    temporary.symlink_to(target)
    temporary.rename(path)
    fsync_dir(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file or symlink if it exists."""
    path.unlink(missing_ok=True)


def remove_tree(root: Path, path: Path) -> None:
    """Remove `path` and everything below it, without ever following a symlink out of `root`.

    Every component from `root` down is opened with O_NOFOLLOW, so a link anywhere on the way stops the removal instead
    of redirecting it. Links inside the tree are removed, not followed.
    """
    parts = path.relative_to(root).parts
    if not parts or ".." in parts:
        raise ValueError(f"refusing to remove {path}: not below {root}")
    try:
        fd = _open_dir(root, parts[:-1])
    except FileNotFoundError:
        return
    try:
        _remove_at(fd, parts[-1])
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_dir(root: Path, parts: tuple[str, ...]) -> int:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def _remove_at(parent: int, name: str) -> None:
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.fchmod(fd, 0o700)  # the model store is read-only
        for entry in os.listdir(fd):
            _remove_at(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def symlink_on_the_way(root: Path, path: Path) -> Path | None:
    """The first symlink between `root` (exclusive) and `path` (inclusive), or None."""
    here = root
    for part in path.relative_to(root).parts:
        here = here / part
        if here.is_symlink():
            return here
    return None


def tree_size(path: Path) -> int:
    """Bytes of the regular files below `path`. Links are not followed."""
    total = 0
    for entry in _walk(path):
        total += entry.stat(follow_symlinks=False).st_size
    return total


def _walk(path: Path) -> Iterator[os.DirEntry[str]]:
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry
