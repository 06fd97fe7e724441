"""A job as the screen sees it: a thread reads its events, and the screen takes the new ones ten times a second."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.service.desk import InstallError, LetGo
from appliance.service.findings import Finding
from appliance.service.words import t

MOST_LINES = 500
MOST_LIVE = 2000   # numbers of one topic that stay
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


@dataclass
class Task:
    """One task of the job. `seconds`: how long it took, once it has ended."""

    status: str
    detail: str
    begun: float
    seconds: float | None = None


class Following:
    """Follows one job. A `JobReader`; its methods run in the thread, `take` in the screen.

    `at_step`: the step of the checklist that is at work; empty as long as nobody said so. `news` counts what has come,
    so a screen knows whether to draw. `is_watcher`: another terminal is the front of the job.
    """

    def __init__(self, work: Callable[["Following"], tuple[dict, dict[str, str]]], step: str = "") -> None:
        self._come: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._notes: deque[str] = deque(maxlen=MOST_LINES)  # a flood of messages costs the oldest, never the keys
        self._latest: tuple[str, int, int] | None = None
        self.at_step = step
        self.is_watcher = False
        self.let_go = False   # the job's reader looks at it: another front takes over
        self.abandoned = False
        self._open: Question | None = None
        self.news = 0
        self.tasks: dict[str, Task] = {}
        self.lines: deque[str] = deque(maxlen=MOST_LINES)
        self.live: dict[str, deque[dict[str, Any]]] = {}
        self.found: list[Finding] = []
        self.progressed: tuple[str, int, int] | None = None
        self.in_bytes = False
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
            self.news += 1
            if kind == "ask":
                asked.append(value)
            else:
                self._one(kind, value)
        for _ in range(len(self._notes)):
            self.lines.append(self._notes.popleft())
            self.news += 1
        if self._latest is not None:
            self.news += 1
            self._progress(self._latest)
            self._latest = None
        return asked

    def _one(self, kind: str, value: Any) -> None:
        match kind:
            case "task":
                self._task(*value)
            case "found":
                self.found = value
            case "plan":
                self.plan_made = value
            case "checklist":
                self._checklist(*value)
            case "live":
                self.live.setdefault(value[0], deque(maxlen=MOST_LIVE)).append(value[1])
            case "watching":
                self.is_watcher = True
            case "result":
                self.result, self.secrets = value
            case "error":
                self.error = value
            case "end":
                self.ended = True

    def _task(self, name: str, status: str, detail: str) -> None:
        before, now = self.tasks.get(name), time.monotonic()
        begun = before.begun if before is not None and status != "begin" else now
        self.tasks[name] = Task(status, detail, begun, None if status == "begin" else now - begun)
        self.progressed = None

    def _checklist(self, name: str, status: str) -> None:
        self.at_step = name
        if status == "begin":  # what the step before said is in its findings
            self.tasks.clear()
            self.found, self.progressed = [], None

    def _progress(self, now: tuple[str, int, int]) -> None:
        self.progressed = now
        label, done, total = now
        self.in_bytes = total > 1 << 20
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
        self._put(("task", (name, status, detail)))

    def progress(self, label: str, done: int, total: int) -> None:
        self._latest = (label, done, total)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def preflight(self, records: list[Any]) -> None:
        self._put(("found", [Finding.of_check(record) for record in records]))

    def plan(self, plan: Any) -> None:
        self._put(("plan", plan))

    def checklist_step(self, name: str, title: str, status: str) -> None:
        self._put(("checklist", (name, status)))

    def findings(self, findings: list[dict[str, Any]]) -> None:
        self._put(("found", [Finding.of_json(facts) for facts in findings]))

    def numbers(self, topic: str, facts: dict[str, Any]) -> None:
        """Numbers of a running sweep, verification or pilot."""
        self._put(("live", (topic, facts)))

    def watching(self) -> None:
        """Another terminal is the front of this job: nothing can be answered from here."""
        self._put(("watching", None))

    def _put(self, said: tuple[str, Any]) -> None:
        if self.abandoned:
            raise LetGo  # nobody reads this any more
        self._come.put(said)

    def hand_over(self) -> None:
        """Another operator answers from now on; a question that is open here goes to them."""
        self.let_go = True
        self.watching()
        if self._open is not None:
            self._open.answered.set()

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
        question = self._open = Question(kind, about)
        self._put(("ask", question))
        question.answered.wait()
        self._open = None
        if self.let_go:
            raise LetGo
        return question.answer
