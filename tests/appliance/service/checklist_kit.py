"""An operator of the checklist in a test: answers, a front end that remembers, and processes to kill."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from installer_kit import Site, Witness

from appliance.service import answers as answers_of
from appliance.service import checklist, events, jobs
from appliance.service.facts import engine_facts
from appliance.service.run_request import RunRequest
from appliance.service.state import State
from appliance.service.steps import STEPS
from offline_bundle import inspect_bundle

REVIEW = {
    "reviewer": "Kim", "expires": "2999-01-01", "lineage": "made here for tests", "acceptable_use": "none",
    "commercial_terms": "none", "attribution": "none", "modifications": "none", "drafter": "there is none",
    "trademarks": "none", "export": "none", "redistribution": "not passed on",
}  # fmt: skip


@dataclass
class Front(Witness):
    """A front end of a checklist."""

    begun: list[tuple[str, str]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    says: str = ""
    at: Callable[[str, str], None] = lambda name, status: None

    def checklist_step(self, name: str, title: str, status: str) -> None:
        self.begun.append((name, status))
        self.at(name, status)

    def findings(self, findings: list[dict[str, Any]]) -> None:
        self.found += findings

    def ask(self, question: str) -> str:
        self.questions.append(question)
        return self.says


@dataclass
class Desk:
    """One prefix, one bundle, and all that a run needs to ask nobody."""

    site: Site
    bundle: Path
    signer: Any
    scripted: Callable[[str], None]

    @property
    def layout(self) -> Any:
        return self.site.layout

    def answers(self, **more: Any) -> dict[str, Any]:
        terms = inspect_bundle(self.bundle).manifest.license
        engine = engine_facts()
        return {
            "schema_version": 1, "bundle": str(self.bundle), "trust_keys": [str(self.site.key)], "device": "cpu",
            "port": self.site.port, "confirm_plan": True, "start_timeout": 20.0,
            "accept_licenses": [f"{engine.spdx}@{engine.licence_sha256}", f"{terms.spdx}@{terms.sha256}"],
            "review": {"tiny": REVIEW}, "tune": {"skip": "the scripted server makes no tokens"},
            "verify": {"groups": ["health"]}, "pilot": {"skip": "the scripted server has no users"}, **more,
        }  # fmt: skip

    def request(self, *steps: str, interactive: bool = False, file: Path | None = None, **more: Any) -> RunRequest:
        return RunRequest(answers=self.answers(**more), steps=steps, interactive=interactive,
                          answers_file=str(file) if file else None)  # fmt: skip

    def run(self, *steps: str, front: Front | None = None, **more: Any) -> tuple[dict[str, Any], dict[str, str]]:
        return checklist.run(self.layout, self.request(*steps, **more), front or Front())

    def show(self) -> State:
        return checklist.show(self.layout)

    def statuses(self) -> dict[str, str]:
        return {step.id: step.status for step in self.show().steps}

    def events(self) -> list[dict[str, Any]]:
        return events.read(self.layout)

    def wait(self) -> jobs.Job:
        """Until the newest job is over."""
        job = jobs.newest(self.layout)
        assert job is not None
        end = time.monotonic() + 60
        while job.state() in ("starting", "running"):
            assert time.monotonic() < end
            time.sleep(0.02)
        return job


def statuses(later: str = "open", **first: str) -> dict[str, str]:
    """What the checklist should say: these steps as given, all others `later`."""
    return {step.id: first.get(step.id, later) for step in STEPS}


def forked(work: Callable[[], object]) -> int:
    """The wait status of a forked process that does `work`: so a front end can die without taking the test with it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def good_answers(values: dict[str, Any]) -> Any:
    return answers_of.from_json(values)
