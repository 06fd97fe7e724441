"""The journal: an append-only JSONL file that records what was about to be done and what was done.

Each record is one line with a checksum, written and fsynced before the action that it announces. A power cut can tear
only the last line, which is then ignored: its action had not begun. Damage anywhere else cannot come from a crash of
ours: nothing continues until somebody has looked and run `repair`, which keeps the intact records and the damaged file.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from installer.base import fs
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import joined, t
from installer.base.messages import with_ids
from installer.base.timestamps import compact_timestamp, timestamp

Record = dict[str, Any]


def _line(record: Record) -> bytes:
    body = {key: value for key, value in record.items() if key != "sum"}
    text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()[:16]
    return json.dumps({**body, "sum": checksum}, ensure_ascii=False).encode() + b"\n"


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
        return record if isinstance(record, dict) and json.loads(_line(record)) == record else None
    except ValueError:
        return None


@dataclass(slots=True)
class Replay:
    """The content of a journal file: the intact records, and what is wrong with the rest."""

    records: list[Record] = field(default_factory=list)
    torn_bytes: int = 0                                      # a last line torn by a crash: harmless
    damaged_lines: list[int] = field(default_factory=list)   # 1-based; a crash does not explain these


def intact(path: Path, hint: str | None = None) -> list[Record]:
    """The records of a journal. Raises InstallError (30) if it is damaged other than by a torn last line. `hint`: what
    then helps, for a journal that is not the installer's."""
    found = replay(path)
    if found.damaged_lines:
        raise InstallError(
            t("The journal {path} is damaged at line {names}.", path=path, names=joined(map(str, found.damaged_lines))),
            exit_code=ExitCode.IO,
            why=t("A power cut tears only the last line. So the disk is failing, or somebody edited the file."),
            changed=t("Nothing was changed."),
            hint=hint or t("Look at the disk (dmesg) and the file; then keep its intact records: atoll journal repair"),
        )
    return found.records


def replay(path: Path) -> Replay:
    """Read a journal. A missing file is an empty journal."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Replay()
    result = Replay()
    lines = data.split(b"\n")
    tail = lines.pop()
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            result.damaged_lines.append(number)
        else:
            result.records.append(record)
    # A power cut may also leave a last line of full length with wrong content.
    if result.damaged_lines == [len(lines)] and not tail:
        result.damaged_lines = []
        result.torn_bytes = len(lines[-1]) + 1
    result.torn_bytes += len(tail)
    return result


class Journal:
    """Appends records. Keeps them in memory until `open` gives them a file, so that a plan writes nothing."""

    def __init__(self, run: str, past: Iterable[Record] = ()) -> None:
        self.run = run
        self.records: list[Record] = list(past)
        self._pending: list[Record] = []
        self._fd = -1

    def add(self, event: str, **data: Any) -> Record:
        """Record one event. Once a file is open, the record is on the disk when this returns. If it cannot be written
        (OSError), it was never recorded."""
        record: Record = {
            "n": self.records[-1]["n"] + 1 if self.records else 1,
            "at": timestamp(),
            "run": self.run,
            "event": event,
            **with_ids(data),
        }
        record = json.loads(_line(record))
        self.records.append(record)
        if self._fd < 0:
            self._pending.append(record)
        else:
            try:
                self._write([record])
            except OSError:
                self.records.pop()
                raise
        return record

    def open(self, path: Path) -> None:
        """Start writing to `path`, dropping a last line torn by a crash. Raises InstallError (30) if it is damaged."""
        intact(path)
        if torn := replay(path).torn_bytes:
            os.truncate(path, path.stat().st_size - torn)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fs.fsync_dir(path.parent)
        pending, self._pending = self._pending, []
        self._write(pending)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, records: list[Record]) -> None:
        data = b"".join(_line(record) for record in records)
        if not data:
            return
        end = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            if written != len(data):  # a full disk may accept only a part
                os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, end)
            raise


def repair(path: Path) -> str | None:
    """Keep the intact records of a damaged journal, and the damaged file beside it. Returns a sentence about it, None
    if the journal is whole.

    Every step checks the disk itself, so a lost record only costs work. But the rollback may be lost with it: an
    install is run again, or a rollback finds nothing to go back to.
    """
    found = replay(path)
    if not found.damaged_lines:
        return None
    copy = path.with_name(f"journal.damaged-{compact_timestamp()}.jsonl")
    fs.write_atomic(copy, path.read_bytes(), 0o600)
    fs.write_atomic(path, b"".join(_line(record) for record in found.records), 0o600)
    lines = ", ".join(str(number) for number in found.damaged_lines)
    kept = len(found.records)
    return t("The journal was damaged at line {lines}. Its {kept} intact records were kept, the damaged file is "
             "{copy}.", lines=lines, kept=kept, copy=copy)


class History:
    """What the records mean, derived by reading them from first to last."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.committed: Record | None = None      # the last commit that was not undone
        self.open_switch: Record | None = None    # a switch that was neither committed nor rolled back
        self.last_step: str | None = None         # step begun and not finished, in a run that has not ended
        self.last_run: Record | None = None
        self.last_failure: Record | None = None
        self.created: set[str] = set()            # paths below the prefix that we created
        self.unshown_keys: set[str] = set()       # keys made but never shown
        for record in records:
            self._take(record)

    def _take(self, record: Record) -> None:
        match record["event"]:
            case "run":
                self.last_run, self.last_step = record, None
            case "begin":
                self.last_step = record["step"]
            case "done":
                self.last_step = None
            case "failed":
                self.last_step, self.last_failure = None, record
            case "creates":
                self.created.update(record["paths"])
            case "switch":
                self.open_switch = self.open_switch or record
            case "commit":
                self.committed, self.open_switch, self.last_step, self.last_failure = record, None, None, None
            case "rolled-back":
                self.open_switch, self.last_step = None, None
            case "uninstall" | "uninstalled":  # once it has begun there is nothing to go back to
                self.committed = self.open_switch = self.last_step = self.last_failure = None
            case "key-created":
                self.unshown_keys.add(record["key"])
            case "key-shown" | "key-removed":
                self.unshown_keys.discard(record["key"])
