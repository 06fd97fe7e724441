"""The journal of an ingest: which chunks were written, which files are finished, so that it can be resumed.

One JSON record a line, appended. A chunk record is only a hint: the chunk is hashed again before it counts. A file
record carries a stamp taken after fsync, and counts only while the file's stamp, change time included, is the same.
Unreadable lines, such as the torn last line of a killed process, are skipped: those parts are copied again.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offline_bundle import limits
from offline_bundle.signing.strict_json import StrictJSONError, canonical, loads

Stamp = tuple[int, ...]


def stamp(fd: int) -> Stamp:
    """Identity and version of an open file. The change time cannot be set back by its owner, unlike mtime."""
    s = os.fstat(fd)
    return (s.st_dev, s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns)


class Journal:
    """The append-only journal of one ingest. Appending is thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open or create `path` (0600) and read what is there."""
        self.path = path
        self.chunks: dict[str, set[int]] = {}
        self.files: dict[str, Stamp] = {}
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        for line in os.pread(self._fd, limits.MAX_JOURNAL, 0).split(b"\n"):
            self._replay(line)
        os.write(self._fd, b"\n")  # ends a torn line, if there is one

    def _replay(self, line: bytes) -> None:
        try:
            record = loads(line)
            if "chunk" in record:
                self.chunks.setdefault(str(record["path"]), set()).add(int(record["chunk"]))
            elif "stamp" in record:
                self.files[str(record["path"])] = tuple(int(n) for n in record["stamp"])
        except (StrictJSONError, TypeError, ValueError, KeyError):
            return

    def chunk_written(self, path: str, index: int) -> None:
        """Note that chunk `index` of `path` was written (perhaps not yet durable)."""
        self._append({"path": path, "chunk": index})

    def file_finished(self, path: str, fd: int) -> None:
        """Note that `path` is complete, checked and durable; `fd` is open on it."""
        found = stamp(fd)
        with self._lock:
            self.files[path] = found
        self._append({"path": path, "stamp": found}, durable=True)

    def _append(self, record: dict[str, Any], *, durable: bool = False) -> None:
        os.write(self._fd, canonical(record) + b"\n")
        if durable:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the journal; the file stays."""
        os.close(self._fd)


def save_stamps(path: Path, stamps: Mapping[str, Stamp]) -> None:
    """Write the stamps of a complete entry, durably and at once."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(canonical(dict(stamps)))
        f.flush()
        os.fsync(fd)
    os.rename(temporary, path)


def load_stamps(path: Path) -> dict[str, Stamp]:
    """The saved stamps; empty if there are none or they cannot be read."""
    try:
        with open(path, "rb") as f:
            found = loads(f.read(limits.MAX_JOURNAL))
        return {str(p): tuple(int(n) for n in s) for p, s in found.items()}
    except (OSError, StrictJSONError, AttributeError, TypeError, ValueError):
        return {}
