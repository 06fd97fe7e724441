"""The interface of a checklist's step, and its input. One step per file; register it in steps/__init__.py."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from appliance.service.facts import Facts, Survey
from appliance.service.findings import StepResult
from appliance.service.jobs.frontend import JobFrontend
from installer.base.errors import ExitCode
from installer.base.layout import Layout
from installer.decide.answers import Answers
from installer.decide.install_options import InstallOptions


@dataclass(slots=True)
class StepJob:
    """What a running step may use. Ctrl-C and a cancel reach it as KeyboardInterrupt."""

    layout: Layout
    survey: Survey
    answers: Answers
    options: InstallOptions
    waivers: Mapping[str, str]                    # finding → reason, for all valid waivers
    earlier: Mapping[str, dict[str, Any]]         # step → summary of its last green run
    frontend: JobFrontend
    accepted: Callable[..., None]                 # records an accepted licence at once
    learned: dict[str, Any] = field(default_factory=dict)  # decisions made here, for the answers file

    @property
    def facts(self) -> Facts:
        return self.survey.facts


class Step(ABC):
    """One step. It uses no terminal and prints nothing; run again, it converges."""

    id: ClassVar[str]
    title: ClassVar[str]          # a Text, for operators
    blocked_code: ClassVar[int] = ExitCode.PREFLIGHT_FAIL

    def tables(self) -> dict[str, Any]:
        """Tables that this step adds to the answers file: name → type whose call without arguments is the default."""
        return {}

    def finding_ids(self) -> set[str]:
        """Findings that may be waived before they were ever reported."""
        return set()

    @abstractmethod
    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        """Everything that the result depends on; JSON-able and cheap. When it changes, this step and all later ones are
        stale."""

    def outdated(self, facts: Facts, summary: Mapping[str, Any]) -> str | None:
        """Why the result of a green run no longer holds (a Text); None if it does. Cheap."""
        return None

    @abstractmethod
    def run(self, job: StepJob) -> StepResult:
        """Run it. Raises InstallError if it could not be done; findings say what was done and does not suffice."""
