"""The front end that a job's work talks to: writes events, and waits for answers from the attached front."""

import contextlib
import errno
import json
import os
import select
import threading
import time
from dataclasses import fields
from typing import Any

from appliance.service.jobs.spool import Job, parsed
from installer.access.licence import LicenceRequest
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.messages import encode
from installer.decide.frontend import StepStatus
from installer.decide.plan import Plan
from installer.preflight import CheckRecord

ATTACH_SECONDS = 10.0      # for a front to attach, and for one that was lost to come back
PROGRESS_SECONDS = 0.1     # between two events of the same work


class JobFrontend:
    """`installer.decide.frontend.Frontend`, and questions in words. A full disk costs progress, never the work."""

    def __init__(self, job: Job, *, interactive: bool) -> None:
        self.job = job
        self.interactive = interactive
        self._lock = threading.Lock()
        self._file = os.open(job.path / "progress.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._answers = os.open(job.path / "answers", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._asked = 0
        self._said = (0.0, "")
        self._buffer = b""

    def emit(self, event: str, **data: Any) -> None:
        line = json.dumps({"event": event, "at": round(time.time(), 3), **encode(data)}, ensure_ascii=False)
        with self._lock, contextlib.suppress(OSError):
            self._write_whole(line.encode(errors="replace") + b"\n")

    def _write_whole(self, data: bytes) -> None:
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, end)
            raise

    # -- what the installer says

    def step(self, name: str, status: StepStatus, detail: str = "") -> None:
        self.emit("step", name=name, status=status, detail=detail)

    def progress(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label == self._said[1] and now - self._said[0] < PROGRESS_SECONDS and done != total:
            return
        self._said = (now, label)
        self.emit("progress", label=label, done=done, total=total)

    def note(self, text: str) -> None:
        self.emit("note", text=text)

    def preflight(self, records: list[CheckRecord]) -> None:
        self.emit("preflight", records=[_fields(record) for record in records])

    def plan(self, plan: Plan) -> None:
        items = [_fields(item) for item in plan.items]
        self.emit("plan", plan={"release": plan.release, "previous": plan.previous, "items": items})

    # -- what the checklist says

    def checklist_step(self, name: str, title: str, status: str) -> None:
        self.emit("checklist-step", name=name, title=title, status=status)

    def findings(self, findings: list[dict[str, Any]]) -> None:
        self.emit("findings", findings=findings)

    def numbers(self, topic: str, facts: dict[str, Any]) -> None:
        """What a running sweep or verification measures, for those who watch it live. Its topics: "trial", "group",
        "load"."""
        self.emit("numbers", topic=topic, facts=facts)

    # -- what is asked

    def accept_licence(self, request: LicenceRequest) -> bool:
        return self._ask("licence", request=_fields(request)) is True

    def licence_reference(self, request: LicenceRequest) -> str:
        return str(self._ask("reference", request=_fields(request)) or "")

    def confirm_plan(self, plan: Plan) -> bool:
        return self._ask("plan") is True

    def ask(self, question: str) -> str:
        """An answer in words; empty where nobody is there."""
        return str(self._ask("text", question=question) or "").strip()

    def _ask(self, kind: str, **data: Any) -> Any:
        """None where there is nobody to ask. Raises InstallError (130) if the front disappears during the question."""
        if not self.interactive:
            return None
        self._asked += 1
        self.emit("ask", kind=kind, n=self._asked, **data)
        alone = time.monotonic()
        while time.monotonic() - alone < ATTACH_SECONDS:
            for line in self._lines():
                answer = parsed(line) or {}
                if answer.get("n") == self._asked:
                    self.emit("answered", n=self._asked)
                    return answer.get("value")
            if self._heard:
                alone = time.monotonic()
        raise InstallError(
            t("Nobody is there to answer: the terminal that asked for this is gone."),
            exit_code=ExitCode.INTERRUPTED,
            changed=t("Nothing was changed."),
            hint=t("Run this again."),
        )

    def _lines(self) -> list[bytes]:
        """What the front has sent; `_heard` says whether a front holds the FIFO open."""
        select.select([self._answers], [], [], 0.2)
        try:
            data = os.read(self._answers, 65536)
        except BlockingIOError:
            self._heard = True
            return []
        self._heard = bool(data)
        if not data:
            time.sleep(0.1)  # without a writer the FIFO is always readable
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines

    _heard = False

    def hand_over(self, name: str, secret: str) -> bool:
        """Give a secret to the attached front, through memory only; False: no front is there to take it."""
        try:
            fd = os.open(self.job.path / "secrets", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            os.write(fd, json.dumps({name: secret}).encode() + b"\n")
            return True
        except OSError:
            return False
        finally:
            os.close(fd)


def _fields(record: Any) -> dict[str, Any]:
    """A dataclass as a table; `asdict` would copy its texts, and so lose their message ids."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
