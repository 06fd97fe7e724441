"""What tunings remember: append-only events beside the installer's journal, in its format, synced before they count.

    var/lib/atoll/state/tuning.jsonl    session  what was asked, and from where the search began
                                        began    a trial, before its setting is written
                                        ended    the trial: its result
                                        keeping  a setting, before it is committed
                                        closed   the session: its result
                                        reset    somebody went back to the setting before the first tuning

A session without `closed` was interrupted: the next tuning with the same question continues it and repeats no trial.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from installer.base.errors import InstallError, io_error
from installer.base.i18n import t
from installer.base.journal import Journal, Record, intact, repair
from installer.base.layout import Layout

CUT_OFF = 2   # a trial that was interrupted this often counts as failed: it may be what ends the machine


def path_of(layout: Layout) -> Path:
    return layout.state / "tuning.jsonl"


def read(layout: Layout) -> list[Record]:
    """All events; empty if nothing was tuned. Raises InstallError (30) for damage, OSError."""
    return intact(path_of(layout), t("Keep the intact records, and the damaged file beside them: {command}",
                                     command="atoll tune --fresh"))  # fmt: skip


def mend(layout: Layout) -> None:
    """Keep the intact records of a damaged file."""
    repair(path_of(layout))


@dataclass(slots=True)
class Session:
    """One tuning according to its events. `facts`: of its `session` event."""

    id: str
    facts: dict[str, Any]
    ended: list[Record] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    closed: Record | None = None

    @property
    def seconds(self) -> float:
        """Seconds that its trials took, including those of earlier runs."""
        return sum(float(record.get("seconds", 0.0)) for record in self.ended)

    def cut_off(self, name: str) -> bool:
        """Whether this trial was started as often as allowed and never ended."""
        return self.begun[name] >= CUT_OFF and all(record["trial"] != name for record in self.ended)


def sessions(records: Sequence[Record]) -> list[Session]:
    found: dict[str, Session] = {}
    for record in records:
        event = record["event"]
        if event == "session":
            found[record["session"]] = Session(record["session"], record)
        session = found.get(record.get("session", ""))
        if session is None:
            continue
        if event == "began":
            session.begun[record["trial"]] += 1
        elif event == "ended":
            session.ended.append(record)
        elif event == "closed":
            session.closed = record
    return list(found.values())


def resumable(records: Sequence[Record], question: str) -> Session | None:
    """The last session, if it was interrupted and had the same question."""
    known = sessions(records)
    last = known[-1] if known else None
    return last if last is not None and last.closed is None and last.facts["question"] == question else None


def ours(records: Sequence[Record], instance: str) -> dict[str, list[Any]]:
    """Knob → the values that tunings have written for this model: not the operator's own."""
    found: dict[str, list[Any]] = {}
    for record in records:
        if record["event"] == "keeping" and record["model"] == instance:
            for name, value in record["setting"].items():
                found.setdefault(name, []).append(value)
    return found


def original(records: Sequence[Record], instance: str) -> dict[str, Any]:
    """Knob → its value before the first tuning since the last reset; None: it was not set."""
    found: dict[str, Any] = {}
    for record in records:
        if record["event"] == "reset" and record["model"] == instance:
            found = {}
        elif record["event"] == "keeping" and record["model"] == instance:
            found = {**record["before"], **found}
    return found


def last_result(records: Sequence[Record], instance: str | None = None) -> Record | None:
    """The result of the last finished tuning, of one model or of any."""
    for session in reversed(sessions(records)):
        if session.closed is not None and instance in (None, session.facts["model"]):
            return session.closed
    return None


class Records:
    """The one writer; its user holds the installer's lock."""

    def __init__(self, layout: Layout, run: str) -> None:
        self.layout = layout
        self._run = run
        self._journal = Journal(run)

    def __enter__(self) -> "Records":
        try:
            self._journal = Journal(self._run, read(self.layout))
            self._journal.open(path_of(self.layout))
        except OSError as error:
            raise _lost(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    @property
    def records(self) -> list[Record]:
        return self._journal.records

    def add(self, event: str, **data: Any) -> Record:
        """It is on the disk when this returns. Raises InstallError (30) if that fails."""
        try:
            return self._journal.add(event, **data)
        except OSError as error:
            raise _lost(error) from error


def name_of(setting: Mapping[str, Any]) -> str:
    """A setting on one line, such as "max-num-seqs=64 kv-cache-dtype=fp8"; absent values are "auto"."""
    return " ".join(f"{name}={'auto' if value is None else value}" for name, value in setting.items())


def _lost(error: OSError) -> InstallError:
    failure = io_error(t("record the tuning's progress"), error)
    failure.changed = t("The trials recorded before it are kept; the settings from before the tuning are restored.")
    return failure
