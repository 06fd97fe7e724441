"""Reading an untrusted directory: every open is relative to a directory descriptor and never follows a link.

A file's type and size are checked on the descriptor that is then read, so nothing can be exchanged between the check
and the read. A part of install.sh: a server checks a medium with the same code before anything is installed.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from offline_bundle.errors import CONTENT, MISSING, SPACE_IO, BundleError
from offline_bundle.limits import MAX_FILES, MIB
from offline_bundle.names import check_path, litter_hint, show
from offline_bundle.text import reason, t

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must fail the regular-file check, not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_ENTRIES = 2 * MAX_FILES


@dataclass
class Tree:
    """What a directory really holds: regular files with their sizes, and directories, by relative path."""

    files: dict[str, int] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)


@contextmanager
def open_root(path: Path) -> Iterator[int]:
    """A descriptor of the directory `path` (which the operator named, so its own path may contain links)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as e:
        raise BundleError(t("{path} is not a directory.", path=path), t("Give the bundle's directory."), MISSING) from e
    except FileNotFoundError as e:
        raise BundleError(
            t("There is no bundle at {path}.", path=path), t("Check the path, and that the disk is mounted."), MISSING
        ) from e
    except OSError as e:
        raise BundleError(
            t("{path} cannot be opened: {why}.", path=path, why=reason(e)),
            t("Check the disk and its permissions."),
            SPACE_IO,
        ) from e
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_directory(root: int, path: str) -> Iterator[int]:
    """A descriptor of the directory `path` ('' = the root itself), reached step by step without following links."""
    fd = os.dup(root)
    try:
        for step in path.split("/") if path else ():
            below = os.open(step, DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_file(root: int, path: str) -> Iterator[int]:
    """A read-only descriptor of the regular file `path` below `root`.

    Raises BundleError: missing (absent), content (a link or not a regular file anywhere on the way), space/IO.
    """
    directory, _, name = path.rpartition("/")
    try:
        with open_directory(root, directory) as parent:
            fd = os.open(name, _FILE, dir_fd=parent)
    except FileNotFoundError as e:
        raise missing(path) from e
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _odd(path, t("is a link or a special file")) from e
        raise read_failed(path, e) from e
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _odd(path, t("is not a regular file"))
        yield fd
    finally:
        os.close(fd)


def read_small(root: int, path: str, limit: int) -> bytes:
    """The whole file, or BundleError (content) when it holds more than `limit` bytes."""
    with open_file(root, path) as fd:
        parts: list[bytes] = []
        left = limit + 1
        try:
            while left > 0 and (part := os.read(fd, min(left, MIB))):
                parts.append(part)
                left -= len(part)
        except OSError as e:
            raise read_failed(path, e) from e
    if left <= 0:
        raise BundleError(
            t("{path} is larger than the {limit} bytes allowed.", path=show(path), limit=limit),
            t("The bundle is damaged or hostile; do not use it."),
            CONTENT,
        )
    return b"".join(parts)


def walk(root: int, *, skip: Callable[[str], bool] = lambda path: False) -> Tree:
    """Everything below `root` except what `skip(path)` says to leave out.

    Raises BundleError (content) for links, FIFOs, sockets, devices, odd names and floods of entries.
    """
    tree = Tree()
    _walk(root, "", tree, skip)
    return tree


def _walk(fd: int, prefix: str, tree: Tree, skip: Callable[[str], bool]) -> None:
    try:
        for name in _entries(fd):
            path = prefix + name
            if skip(path):
                continue
            if len(tree.files) + len(tree.directories) >= _MAX_ENTRIES:
                raise _flood()
            check_path(path)
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode):
                tree.files[path] = info.st_size
            elif stat.S_ISDIR(info.st_mode):
                tree.directories.add(path)
                below = os.open(name, DIRECTORY, dir_fd=fd)
                try:
                    _walk(below, path + "/", tree, skip)
                finally:
                    os.close(below)
            elif stat.S_ISLNK(info.st_mode):
                raise _odd(path, t("is a symbolic link"))
            else:
                raise _odd(path, t("is not a regular file but a FIFO, socket or device"))
    except OSError as e:
        raise read_failed(prefix or ".", e) from e


def _entries(fd: int) -> list[str]:
    found: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            found.append(entry.name)
            if len(found) > _MAX_ENTRIES:
                raise _flood()
    return sorted(found)


def check_file_set(root: int, sizes: Mapping[str, int]) -> None:
    """Exactly the files in `sizes` (path → bytes) are below `root`, and no directory that holds none of them.

    Raises BundleError: content (a file too many, another size, a link), missing, space/IO.
    """
    tree = walk(root)
    directories = {path[:i] for path in sizes for i, c in enumerate(path) if c == "/"}
    for path in sorted((tree.files.keys() - sizes.keys()) | (tree.directories - directories)):
        raise BundleError(t("{path} is not part of what was signed.", path=show(path)), litter_hint(path), CONTENT)
    for path, size in sorted(sizes.items()):
        if path not in tree.files:
            raise missing(path)
        if tree.files[path] != size:
            raise BundleError(
                t("{path} has {found} bytes where {size} were signed: it is cut off or changed.", path=show(path),
                  found=tree.files[path], size=size),
                t("Copy the bundle again from its source."),
                CONTENT,
            )


def _flood() -> BundleError:
    return BundleError(
        t("The directory holds more than {most} entries.", most=_MAX_ENTRIES),
        t("Give the directory of one bundle or model."),
        CONTENT,
    )


def missing(path: str) -> BundleError:
    """The error for a file that should be there."""
    return BundleError(
        t("The file {path} is missing.", path=show(path)),
        t("The copy is incomplete: copy the bundle again."),
        MISSING,
    )


def read_failed(path: str, e: OSError) -> BundleError:
    """The error for a medium that cannot be read."""
    return BundleError(
        t("Reading {path} failed: {why}.", path=show(path), why=reason(e)),
        t("The disk may be damaged or unplugged; try again or use another copy."),
        SPACE_IO,
    )


def _odd(path: str, what: str) -> BundleError:
    return BundleError(
        t("{path} {what}; a bundle holds regular files only.", path=show(path), what=what),
        litter_hint(path),
    )
