"""What the checklist remembers: append-only events on the disk, each with a checksum and synced before it counts.

    var/lib/atoll-checklist/events.jsonl   began, ended, accepted, waived, answers, reset, audited
                            answers.toml   the answers as of the last run
                            lock           flock of the one writer

It is the installer's journal format: a line torn by a power cut is dropped; any other damage is an error.
Decisions of people also go to the audit log as soon as an installation has one.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from installer.audit import log
from installer.base import fs
from installer.base.errors import InstallError, io_error
from installer.base.i18n import t
from installer.base.journal import Journal, Record, intact, repair, replay
from installer.base.layout import Layout
from installer.base.lock import InstallLock

DECISIONS = ("accepted", "waived", "reset")  # events that also go to the audit log


def path_of(layout: Layout) -> Path:
    return layout.checklist / "events.jsonl"


def read(layout: Layout) -> list[Record]:
    """All events; empty if no checklist was started. Holds no lock. Raises InstallError (30) for damage."""
    return intact(path_of(layout),
                  t("Keep the intact events, and the damaged file beside them: atoll checklist reset"))  # fmt: skip


class Events:
    """The one writer. Use as a context manager; a second one is refused with exit code 75."""

    def __init__(self, layout: Layout, purpose: str, run: str) -> None:
        self.layout = layout
        self._lock = InstallLock(layout.checklist / "lock", purpose)
        self._run = run
        self.journal = Journal(run)

    def __enter__(self) -> "Events":
        try:
            created = [path for path in (self.layout.checklist, *self.layout.checklist.parents) if not path.exists()]
            fs.make_dir(self.layout.checklist, 0o700)
            self._lock.__enter__()
            try:
                self.journal = Journal(self._run, read(self.layout))
                self.journal.open(path_of(self.layout))
                if created:
                    self.add("created", paths=[str(path) for path in created])
            except BaseException:
                self.journal.close()
                self._lock.__exit__(None, None, None)
                raise
        except OSError as error:
            raise _lost(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close()
        self._lock.__exit__(kind, error, trace)

    @property
    def records(self) -> list[Record]:
        return self.journal.records

    def add(self, event: str, **data: Any) -> Record:
        """Record one event. It is on the disk when this returns. Raises InstallError (30) if that fails."""
        try:
            return self.journal.add(event, **data)
        except OSError as error:
            raise _lost(error) from error

    def audit(self) -> None:
        """Copy people's decisions to the audit log, once there is one.

        A crash in between may repeat an entry; each names its event.
        """
        if not self.layout.state.is_dir():
            return
        done = max((record["upto"] for record in self.records if record["event"] == "audited"), default=0)
        new = [record for record in self.records if record["n"] > done and record["event"] in DECISIONS]
        for record in new:
            facts = {name: value for name, value in record.items() if name not in ("n", "run", "event", "sum", "at")}
            log.append(self.layout.audit, f"checklist-{record['event']}", checklist_event=record["n"],
                       decided=record["at"], **facts)  # fmt: skip
        if new:
            self.add("audited", upto=new[-1]["n"])


def mend(layout: Layout) -> str | None:
    """Keep the intact events of a damaged file. Returns a sentence about it, None if it is intact."""
    with InstallLock(layout.checklist / "lock", "checklist reset"):
        return repair(path_of(layout))


def remove(layout: Layout) -> list[Path]:
    """Delete the checklist. Returns the directories above it that were made for it, for `remove_empty`. Raises OSError,
    InstallError."""
    if not layout.checklist.is_dir():
        return []
    records = replay(path_of(layout)).records
    created = [Path(path) for record in records if record["event"] == "created" for path in record["paths"]]
    with InstallLock(layout.checklist / "lock", "uninstall"):
        fs.remove_tree(layout.checklist.parent, layout.checklist)
    return created


def remove_empty(directories: list[Path]) -> None:
    """Remove those of these directories that are now empty. Raises OSError."""
    for path in sorted(directories, key=lambda path: len(path.parts), reverse=True):
        if path.is_dir() and not os.listdir(path):
            path.rmdir()


def _lost(error: OSError) -> InstallError:
    failure = io_error(t("record the checklist's progress"), error)
    failure.changed = t("Everything recorded before it is kept.")
    return failure
