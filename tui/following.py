"""A job as the screen sees it: a thread reads it, the screen takes what has come ten times a second."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.service.desk import InstallError
from appliance.service.findings import Finding
from appliance.service.words import t

MOST_LINES = 500
_UNKNOWN = t("The work ended with an error of the program itself.")


@dataclass
class Question:
    """What the job waits for. `answer` is what the operator said."""

    kind: str
    about: Any
    answer: Any = None
    answered: threading.Event = field(default_factory=threading.Event)

    def reply(self, value: Any) -> None:
        self.answer = value
        self.answered.set()


class Following:
    """Follows one job. A `JobReader`; its methods run in the thread, `take` in the screen."""

    def __init__(self, work: Callable[["Following"], tuple[dict, dict[str, str]]]) -> None:
        self._come: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._latest: tuple[str, int, int] | None = None
        self.tasks: dict[str, tuple[str, str]] = {}
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self.found: list[Finding] = []
        self.progressed: tuple[str, int, int] | None = None
        self.rate = 0.0
        self._rated = (0.0, 0, "")
        self.result: dict[str, Any] = {}
        self.secrets: dict[str, str] = {}
        self.error: InstallError | None = None
        self.plan_made: Any = None
        self.ended = False
        self._thread = threading.Thread(target=self._follow, args=(work,), daemon=True)

    def start(self) -> "Following":
        self._thread.start()
        return self

    def _follow(self, work: Callable[["Following"], tuple[dict, dict[str, str]]]) -> None:
        try:
            self._come.put(("result", work(self)))
        except InstallError as error:
            self._come.put(("error", error))
        except Exception as error:
            self._come.put(("error", InstallError(_UNKNOWN, exit_code=1, why=repr(error), hint="atoll jobs list")))
        self._come.put(("end", None))

    def take(self) -> list[Question]:
        """Take in what has come; the questions among it. Bounded: a flood must not hold up the keys."""
        asked = []
        for _ in range(2000):
            try:
                kind, value = self._come.get_nowait()
            except queue.Empty:
                break
            if kind == "ask":
                asked.append(value)
            else:
                self._one(kind, value)
        if self._latest is not None:
            self._progress(self._latest)
            self._latest = None
        return asked

    def _one(self, kind: str, value: Any) -> None:
        match kind:
            case "task":
                self.tasks[value[0]] = value[1:]
            case "note":
                self.lines.append(value)
            case "found":
                self.found = value
            case "plan":
                self.plan_made = value
            case "result":
                self.result, self.secrets = value
            case "error":
                self.error = value
            case "end":
                self.ended = True

    def _progress(self, now: tuple[str, int, int]) -> None:
        self.progressed = now
        label, done, _ = now
        at, before, of = self._rated
        moment = time.monotonic()
        if label != of or done < before:
            self._rated, self.rate = (moment, done, label), 0.0
        elif moment - at >= 1.0:
            fresh = (done - before) / (moment - at)
            self.rate = fresh if not self.rate else 0.7 * self.rate + 0.3 * fresh
            self._rated = (moment, done, label)

    # -- what the job says, in the thread

    def step(self, name: str, status: str, detail: str = "") -> None:
        self._come.put(("task", (name, status, detail)))

    def progress(self, label: str, done: int, total: int) -> None:
        self._latest = (label, done, total)

    def note(self, text: str) -> None:
        self._come.put(("note", text))

    def preflight(self, records: list[Any]) -> None:
        self._come.put(("found", [Finding.of_check(record) for record in records]))

    def plan(self, plan: Any) -> None:
        self._come.put(("plan", plan))

    def checklist_step(self, name: str, title: str, status: str) -> None:
        return

    def findings(self, findings: list[dict[str, Any]]) -> None:
        self._come.put(("found", [Finding.of_json(facts) for facts in findings]))

    # -- what it asks

    def accept_licence(self, request: Any) -> bool:
        return self._ask("licence", request) is True

    def licence_reference(self, request: Any) -> str:
        about = t("{model} is gated. Which contract, approval or account covers its use here?", model=request.model)
        return str(self._ask("text", about) or "")

    def confirm_plan(self, plan: Any) -> bool:
        return self._ask("plan", plan) is True

    def ask(self, question: str) -> str:
        return str(self._ask("text", question) or "")

    def _ask(self, kind: str, about: Any) -> Any:
        question = Question(kind, about)
        self._come.put(("ask", question))
        question.answered.wait()
        return question.answer
