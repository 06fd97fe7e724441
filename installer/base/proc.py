"""Processes, identified so that a reused pid is never mistaken for the one we started."""

import os
from dataclasses import dataclass
from pathlib import Path


def boot_id() -> str:
    """Changes with every boot: pids and start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (index 0 = field 3 of proc(5)). The command before them may contain
    any character."""
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


def family_of(leader: int, not_before: int) -> list[int]:
    """Live processes of the session that `leader` led, and all their descendants in any session.

    Processes that started before `not_before` (ticks) are left out: they are not ours. While a session of a number
    lives, the kernel does not reuse that number as a pid, so this also finds the orphans of a killed leader.
    """
    session, children = set(), dict[int, list[int]]()
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is None or fields[0] in "ZX" or int(fields[19]) < not_before:
            continue
        pid, parent, sid = int(entry), int(fields[1]), int(fields[3])
        children.setdefault(parent, []).append(pid)
        if sid == leader:
            session.add(pid)
    found, unseen = set(session), list(session)
    while unseen:
        for child in children.get(unseen.pop(), []):
            if child not in found:
                found.add(child)
                unseen.append(child)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies one process for good: pid, start time and boot."""

    pid: int
    start_time: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        started = start_time(pid)
        return None if started is None else cls(pid, started, boot_id())

    def alive(self) -> bool:
        return self.boot_id == boot_id() and start_time(self.pid) == self.start_time

    def family(self) -> "list[ProcessId]":
        """Live members of the session that this process leads or led, and their descendants."""
        if self.boot_id != boot_id():
            return []
        found = (ProcessId.of(pid) for pid in family_of(self.pid, self.start_time))
        return [process for process in found if process is not None]
