"""The audit log: who accepted, waived or changed what. Hash-chained, so that an edit or a missing record shows.

Each line holds the hash of the line before it. The chain alone proves order and completeness only up to its last
record: a log that was cut short, or rewritten from some record on, is also a sound chain. So the head (number of
records, and the last one's hash) is kept outside too: each append sends it to journald (anchor.py), the support bundle
carries it, and `atoll audit show` prints it to be written down. `atoll audit verify` compares them.

Power cuts: a record counts once its line is complete and synced; only then is its head sent. A torn last line was never
reported as done, and the next append removes it.
"""

import errno
import fcntl
import getpass
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from installer.audit import anchor
from installer.audit.head import GENESIS, Head
from installer.base import fs
from installer.base.i18n import t
from installer.base.timestamps import timestamp

MAX_LOG = 64 << 20  # bytes; about 200,000 records


def operator() -> dict[str, str | int]:
    """The person at the keyboard, as far as the system knows."""
    try:
        name = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return {"user": name, "uid": os.getuid(), "host": socket.gethostname()}


def _hash(record: dict[str, Any]) -> str:
    body = {key: value for key, value in record.items() if key != "hash"}
    text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """All records, and the first error in the chain (None: intact)."""
    records, broken = chain(path)
    if broken is None:
        return records, None
    return records, t("The audit log {path} does not follow its hash chain at line {number}.", path=path,
                      number=broken)


def chain(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """The records up to the first line that breaks the chain, and that line's number (None: intact).

    A torn last line is skipped; a missing file holds no records. Raises OSError.
    """
    records: list[dict[str, Any]] = []
    previous = GENESIS
    for number, line in enumerate(_lines(path), start=1):
        record = parse(line)
        if record is None or record["prev"] != previous:
            return records, number
        records.append(record)
        previous = record["hash"]
    return records, None


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line whose own hash matches, or None. The exact text counts: another spelling of the same JSON
    fails."""
    try:
        record = json.loads(line)
        good = record["hash"] == _hash(record) and isinstance(record["prev"], str) and _text(record) == line
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if good else None


def _lines(path: Path) -> list[bytes]:
    """The complete lines."""
    try:
        data, info = fs.read_regular(path, MAX_LOG)
    except FileNotFoundError:
        return []
    if info.st_size > MAX_LOG:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data.split(b"\n")[:-1]


def _text(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def append(path: Path, event: str, **data: Any) -> Head:
    """Add one record, durably, and send the new head to journald. Returns the record.

    A line torn by a power cut is dropped first. A broken chain is continued, not hidden: the new record links to the
    last line as it is, and `read` keeps reporting the break.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # an operator may revoke a key during an install
        content = os.pread(fd, os.fstat(fd).st_size, 0)
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(fd, whole)
        lines = content[:whole].split(b"\n")[:-1]
        previous = GENESIS
        if lines:
            try:
                previous = str(json.loads(lines[-1])["hash"])
            except (ValueError, KeyError, TypeError):
                previous = hashlib.sha256(lines[-1]).hexdigest()
        record: dict[str, Any] = {
            "at": timestamp(),
            "event": event,
            "who": operator(),
            **data,
            "prev": previous,
        }
        record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))  # names of odd bytes
        record["hash"] = _hash(record)
        os.write(fd, _text(record) + b"\n")
        os.fsync(fd)
        fs.fsync_dir(path.parent)
        head = Head(len(lines) + 1, record["hash"])
        anchor.send(path, head, event)  # while locked: anchors have the order of the records
        return head
    finally:
        os.close(fd)


def head(path: Path) -> Head:
    """The current head of the log. Raises OSError."""
    lines = _lines(path)
    if not lines:
        return Head(0, GENESIS)
    record = parse(lines[-1])
    return Head(len(lines), record["hash"] if record else hashlib.sha256(lines[-1]).hexdigest())
