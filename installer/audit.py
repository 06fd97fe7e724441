"""The audit log: who accepted, waived or changed what. Hash-chained, so that an edit or a missing record shows.

Each line holds the hash of the line before it. The chain proves order and completeness up to its last record; keep a
copy of the last hash elsewhere to notice a log that was cut short.
"""

import fcntl
import getpass
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from installer import fs
from installer.i18n import t

GENESIS = "0" * 64


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
    """All records, and the first thing that is wrong with the chain (None: intact)."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], None
    records: list[dict[str, Any]] = []
    previous = GENESIS
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            good = record["prev"] == previous and record["hash"] == _hash(record)
        except (ValueError, KeyError, TypeError):
            good, record = False, None
        if not good or record is None:
            return records, t("The audit log {path} does not follow its hash chain at line {number}.", path=path,
                              number=number)
        records.append(record)
        previous = record["hash"]
    return records, None


def append(path: Path, event: str, **data: Any) -> None:
    """Add one record, durably. A line torn by a power cut is dropped first; a broken chain is continued, not hidden:
    the new record then links to the last line as it stands, and `read` keeps reporting the break."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # an operator may revoke a key while an install is at work
        content = os.pread(fd, os.fstat(fd).st_size, 0)
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(fd, whole)
        lines = content[:whole].splitlines()
        previous = GENESIS
        if lines:
            try:
                previous = str(json.loads(lines[-1])["hash"])
            except (ValueError, KeyError, TypeError):
                previous = hashlib.sha256(lines[-1]).hexdigest()
        record: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "event": event,
            "who": operator(),
            **data,
            "prev": previous,
        }
        record["hash"] = _hash(record)
        os.write(fd, json.dumps(record, ensure_ascii=False).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    fs.fsync_dir(path.parent)
