"""What a pilot remembers: append-only events in the installer's journal format, synced before they count.

    var/lib/atoll/state/pilot.jsonl    planned  the plan
                                       began    a stage: whom it lets in, from when on
                                       ended    the stage: passed, missed or stopped; its figures, why
                                       closed   the pilot: done, stopped by its conditions, or by an operator
                                       signed   go or no-go, by whom, the report's hash
    var/lib/atoll/state/pilot.lock     flock of the one writer
    var/lib/atoll/state/pilot.ask      what an operator asks of the running pilot: advance or stop
    var/lib/atoll/state/series.db      the samples
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from appliance.service.pilot.plan import PilotPlan
from installer.audit import log
from installer.base import fs
from installer.base.errors import ExitCode, InstallError, io_error
from installer.base.i18n import t
from installer.base.journal import Journal, Record, intact
from installer.base.layout import Layout
from installer.base.lock import InstallLock
from installer.base.timestamps import new_run_id

_AUDITED = ("began", "ended", "closed", "signed")


def path_of(layout: Layout) -> Path:
    return layout.state / "pilot.jsonl"


def lock_of(layout: Layout) -> Path:
    return layout.state / "pilot.lock"


def series_of(layout: Layout) -> Path:
    return layout.state / "series.db"


def _events(layout: Layout) -> list[Record]:
    path = path_of(layout)
    return intact(path, t("Look at the disk (dmesg) and the file. A new pilot can begin when {path} has been moved "
                          "away.", path=path))  # fmt: skip


@dataclass(slots=True)
class StageState:
    name: str
    status: str = "open"       # open, running, passed, missed, stopped
    start: float | None = None  # on the clock of the time series
    end: float | None = None
    at: str = ""
    kpi: dict[str, Any] = field(default_factory=dict)
    why: list[Any] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class PilotState:
    """The last pilot, derived from its events. `outcome`: none while it continues; else done, stopped or aborted."""

    plan: PilotPlan | None = None
    stages: list[StageState] = field(default_factory=list)
    outcome: str | None = None
    signed: dict[str, Any] | None = None
    planned_at: str = ""

    @property
    def open(self) -> bool:
        return self.plan is not None and self.outcome is None

    @property
    def current(self) -> int | None:
        """The stage that runs, or that is next; None when all are over."""
        return next((n for n, each in enumerate(self.stages) if each.status in ("open", "running")), None)


def read(layout: Layout) -> PilotState:
    """Holds no lock. Raises InstallError (30) for a damaged file."""
    return derive(_events(layout))


def derive(records: list[Record]) -> PilotState:
    state = PilotState()
    for record in records:
        match record["event"]:
            case "planned":
                plan = PilotPlan.model_validate(record["plan"])
                state = PilotState(plan, [StageState(stage.name) for stage in plan.stages], planned_at=record["at"])
            case "began":
                stage = state.stages[record["stage"]]
                stage.status, stage.start, stage.at = "running", record["start"], record["at"]
            case "ended":
                stage = state.stages[record["stage"]]
                stage.status, stage.end = record["status"], record["end"]
                stage.kpi, stage.why, stage.findings = record["kpi"], record["why"], record["findings"]
            case "closed":
                state.outcome = record["outcome"]
            case "signed":
                state.signed = {name: record[name] for name in ("decision", "by", "reason", "at", "sha256")}
    return state


class Records:
    """The one writer. Use as a context manager; a second one is refused with exit code 75."""

    def __init__(self, layout: Layout, purpose: str) -> None:
        self.layout = layout
        self._lock = InstallLock(lock_of(layout), purpose)
        self.journal = Journal("")

    def __enter__(self) -> "Records":
        self._lock.__enter__()
        try:
            self.journal = Journal(new_run_id(), _events(self.layout))
            self.journal.open(path_of(self.layout))
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close()
        self._lock.__exit__(kind, error, trace)

    @property
    def state(self) -> PilotState:
        return derive(self.journal.records)

    def add(self, event: str, **data: Any) -> None:
        """The event is on the disk when this returns; decisions also go to the audit log."""
        try:
            self.journal.add(event, **data)
            if event in _AUDITED:
                facts = {name: value for name, value in data.items() if name not in ("findings", "kpi")}
                log.append(self.layout.audit, f"pilot-{event}", **facts)
        except OSError as error:
            raise io_error(t("record the pilot's progress"), error) from error


def ask(layout: Layout, what: str, by: str) -> None:
    """Ask the running pilot to do something. Raises InstallError (75) where somebody has asked already."""
    try:
        fd = os.open(layout.state / "pilot.ask", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InstallError(
            t("Somebody has just asked the running pilot for something else."), exit_code=ExitCode.BUSY,
            changed=t("Nothing was changed."), hint=t("Look at it first: atoll pilot status"),
        ) from None  # fmt: skip
    with os.fdopen(fd, "w") as file:
        file.write(f"{what}\n{by}\n")


def asked(layout: Layout) -> tuple[str, str] | None:
    """What was asked, and by whom. Reading it removes it."""
    path = layout.state / "pilot.ask"
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    if len(lines) < 2:  # half written
        return None
    fs.remove_file(path)
    return lines[0], lines[1][:200]
