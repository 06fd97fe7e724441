"""Processes, named so that a reused pid is never mistaken for the one we started."""

import os
from dataclasses import dataclass
from pathlib import Path


def boot_id() -> str:
    """Changes with every boot: pids and start times mean nothing across it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (index 0 = field 3 of proc(5)); the command may hold any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process started; None if it is gone or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19])


def members_of_session(sid: int, not_before: int) -> list[int]:
    """Live processes of a session, leaving out any that started before `not_before` (ticks): those are not ours.

    The kernel does not reuse a number as a pid while a session of that number lives, so this also finds the orphans of
    a leader that was killed.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = _stat(int(entry))
        if fields and fields[0] not in "ZX" and int(fields[3]) == sid and int(fields[19]) >= not_before:
            found.append(int(entry))
    return found


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that stays the same process: pid, start time and boot."""

    pid: int
    start_time: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        started = start_time(pid)
        return None if started is None else cls(pid, started, boot_id())

    def alive(self) -> bool:
        return self.boot_id == boot_id() and start_time(self.pid) == self.start_time

    def session(self) -> list[int]:
        """Live members of the session that this process leads or led."""
        return members_of_session(self.pid, self.start_time) if self.boot_id == boot_id() else []
