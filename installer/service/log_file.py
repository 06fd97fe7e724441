"""The log that the service writes under a prefix: its last lines, following it, rotation."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LOG_CAP = 16 << 20       # bytes; then the log is rotated
LOG_KEEP = 3             # serve.log.1 … serve.log.3

_ERROR_ID = re.compile(r" error_id=([a-z-]+)$")

def tail(path: Path, lines: int, limit: int = 1 << 20) -> list[str]:
    """The last lines of a file, reading at most `limit` bytes of it."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read().decode(errors="replace").splitlines()[-lines:] if lines > 0 else []
    except OSError:
        return []


def readable(line: str) -> str:
    """A log line for people: the service writes one JSON object per line."""
    if line.startswith("{"):
        try:
            entry = json.loads(line)
            return f"{entry['level']}: {entry['message']}"
        except (ValueError, KeyError, TypeError):
            return line
    return line


def error_id(lines: Sequence[str]) -> str:
    """The id of the last error in these log lines that has one, "" if none has. It is the field `error_id` of a JSON
    record, or stands at the end of a plain text line."""
    for line in reversed(lines):
        try:
            entry = json.loads(line) if line.startswith("{") else {}
        except ValueError:
            continue
        plain = _ERROR_ID.search(line)
        if found := entry.get("error_id") or (plain[1] if plain and not entry else ""):
            return str(found)
    return ""


def follow(path: Path) -> Iterator[str]:
    """Lines as they are written from now on, across rotation. Ends only with the reader."""
    file = open(path, "rb")  # noqa: SIM115
    file.seek(0, os.SEEK_END)
    rest = b""
    try:
        while True:
            if data := file.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
                continue
            time.sleep(0.25)
            try:
                now = path.stat()
            except FileNotFoundError:
                continue
            if now.st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = open(path, "rb")  # noqa: SIM115
            elif now.st_size < file.tell():
                file.seek(0)
    finally:
        file.close()


def rotate(log: Path, *, running: bool = False) -> None:
    """Rotate the log when it exceeds its cap. While a writer holds it open it is copied and truncated, because a rename
    would not reach the writer."""
    try:
        if log.stat().st_size <= LOG_CAP:
            return
        for number in range(LOG_KEEP, 1, -1):
            older = log.with_name(f"{log.name}.{number - 1}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number}"))
        first = log.with_name(f"{log.name}.1")
        if running:
            shutil.copyfile(log, first)
            os.truncate(log, 0)
        else:
            log.replace(first)
    except OSError:
        pass
