"""The front's side of a job: follow its events, answer its questions, cancel it, and take what it hands over."""

import contextlib
import fcntl
import json
import os
import time
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from appliance.service.jobs.launch import launch, new_job
from appliance.service.jobs.process import Work
from appliance.service.jobs.spool import Job
from installer.access.licence import LicenceRequest
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.base.messages import decode
from installer.decide.frontend import Frontend
from installer.decide.plan import Plan, PlanItem
from installer.preflight import CheckRecord

_POLL_SECONDS = 0.03


class JobReader(Frontend, Protocol):
    """What a front shows of a job; beyond an install's, the events of a checklist."""

    def checklist_step(self, name: str, title: str, status: str) -> None: ...

    def findings(self, findings: list[dict[str, Any]]) -> None: ...

    def ask(self, question: str) -> str: ...


@runtime_checkable
class NumbersReader(Protocol):
    """A reader that shows live numbers too; one that prints lines does without."""

    def numbers(self, topic: str, facts: dict[str, Any]) -> None: ...


class LetGo(Exception):
    """Raised by a reader during a question that its operator may no longer answer, because another front takes over."""


class _Line:
    """The FIFOs of one attached front. A job has one front at a time; further ones may watch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._lock = os.open(job.path / "spec.json", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InstallError(
                t("Another terminal is attached to this job."),
                exit_code=ExitCode.BUSY,
                changed=t("Nothing was changed."),
                hint=t("Watch it instead: {command}", command=f"atoll jobs watch {job.id}"),
            ) from None
        self._secrets = os.open(job.path / "secrets", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._answers = -1
        self.open_answers()

    def let_go(self) -> None:
        """Another front may answer from now on."""
        for fd in (self._answers, self._secrets, self._lock):
            if fd >= 0:
                os.close(fd)
        self._answers = self._secrets = self._lock = -1

    def open_answers(self) -> None:
        if self._answers < 0:
            with contextlib.suppress(OSError):  # the job no longer reads answers, or not yet
                self._answers = os.open(self.job.path / "answers", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def answer(self, number: int, value: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(self._answers, json.dumps({"n": number, "value": value}).encode() + b"\n")

    def secrets(self) -> dict[str, str]:
        """What the job has handed over."""
        found: dict[str, str] = {}
        if self._secrets < 0:
            return found
        with contextlib.suppress(OSError):
            for line in os.read(self._secrets, 65536).splitlines():
                with contextlib.suppress(ValueError):
                    found.update(json.loads(line))
        return found

    def __enter__(self) -> "_Line":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()


def run(
    layout: Layout, purpose: str, work: Work | None, reader: JobReader, *, kind: str, given: dict[str, Any],
    interactive: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Start a job and follow it to its end as its front, as `attach` does.

    Without `work` its process is a fresh one.
    """
    job = new_job(layout, purpose, kind=kind, given=given, interactive=interactive)
    with _Line(job) as line:  # before the job begins, so that nothing it hands over comes too early
        launch(job, work)
        return _attached(job, reader, line)


def attach(job: Job, reader: JobReader) -> tuple[dict[str, Any], dict[str, str]]:
    """Follow a job to its end as its front; its result, and the secrets that it handed over.

    Ctrl-C cancels the job and waits for its end, because the job undoes what must not stay. Raises the InstallError
    that the job ended with.
    """
    with _Line(job) as line:
        return _attached(job, reader, line)


def _attached(job: Job, reader: JobReader, line: _Line) -> tuple[dict[str, Any], dict[str, str]]:
    follower = _Follower(job, reader, line)
    while True:
        try:
            end = follower.to_the_end()
            return result_of(job, end), line.secrets()
        except LetGo:
            line.let_go()
            follower.line = None
        except KeyboardInterrupt:
            job.cancel()
        except InstallError:
            raise
        except BaseException:  # the operator left a prompt: nobody will answer
            job.cancel()
            raise


def watch(job: Job, reader: JobReader) -> dict[str, Any]:
    """Follow a job as a spectator; Ctrl-C ends the watching, not the job. Raises as `attach` does."""
    return result_of(job, _Follower(job, reader, None).to_the_end())


def result_of(job: Job, end: dict[str, Any] | None) -> dict[str, Any]:
    """The result of a job that ended well. Raises InstallError for one that did not."""
    if end is None:
        raise InstallError(
            t("The job {job} was killed.", job=job.id),
            exit_code=ExitCode.INTERRUPTED,
            why=t("Its process is gone and left no result."),
            changed=t("What it had finished is recorded; the part that it was working on does not count."),
            hint=t("Run this again to continue from there."),
        )
    if "bug" in end:
        raise RuntimeError(end["bug"])
    if "error" in end:
        told = decode(end["error"])
        raise InstallError(told.pop("message"), **told)
    return end.get("result") or {}


class _Follower:
    """Reads a job's events and shows each exactly once, even across an interruption."""

    def __init__(self, job: Job, reader: JobReader, line: _Line | None) -> None:
        self.job, self.reader, self.line = job, reader, line
        self._offset = 0
        self._waiting: list[dict[str, Any]] = []
        self._plan = Plan("", None)

    def to_the_end(self) -> dict[str, Any] | None:
        """The job's end; None if it was killed."""
        while True:
            state = self.job.state()  # before reading: nothing is written behind an end
            self._show()
            if self.line is not None and getattr(self.reader, "let_go", False):
                raise LetGo
            if state in ("ended", "killed"):
                return self.job.end
            time.sleep(_POLL_SECONDS)

    def _show(self) -> None:
        while True:
            if not self._waiting:
                self._waiting, self._offset = self.job.events(self._offset)
            if not self._waiting:
                return
            while self._waiting:
                self._one(self._waiting.pop(0))

    def _one(self, event: dict[str, Any]) -> None:
        reader, told = self.reader, decode(event)
        match event.get("event"):
            case "step":
                reader.step(told["name"], told["status"], told["detail"])
            case "progress":
                reader.progress(told["label"], told["done"], told["total"])
            case "note":
                reader.note(told["text"])
            case "preflight":
                reader.preflight([CheckRecord(**record) for record in told["records"]])
            case "plan":
                self._plan = _plan(told["plan"])
                reader.plan(self._plan)
            case "checklist-step":
                reader.checklist_step(told["name"], told["title"], told["status"])
            case "findings":
                reader.findings(told["findings"])
            case "numbers" if isinstance(reader, NumbersReader):
                reader.numbers(told["topic"], told["facts"])
            case "ask" if self.line is not None and not self._is_answered(told["n"]):
                self._ask(told)

    def _is_answered(self, number: int) -> bool:
        """Whether the question was answered already, by a front before this one."""
        events, _ = self.job.events(0)
        return any(event.get("event") == "answered" and event.get("n") == number for event in events)

    def _ask(self, told: dict[str, Any]) -> None:
        assert self.line is not None
        self.line.open_answers()
        match told["kind"]:
            case "licence":
                value: Any = self.reader.accept_licence(LicenceRequest(**told["request"]))
            case "reference":
                value = self.reader.licence_reference(LicenceRequest(**told["request"]))
            case "plan":
                value = self.reader.confirm_plan(self._plan)
            case _:
                value = self.reader.ask(told["question"])
        self.line.answer(told["n"], value)


def _plan(told: dict[str, Any]) -> Plan:
    return Plan(told["release"], told["previous"], [PlanItem(**item) for item in told["items"]])
