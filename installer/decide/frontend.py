"""What an install says and asks. The command line and the TUI each implement it; the steps know neither."""

from typing import Literal, Protocol

from installer.access.licence import LicenceRequest
from installer.decide.plan import Plan
from installer.preflight import CheckRecord

StepStatus = Literal["begin", "done", "skipped", "failed"]


class Frontend(Protocol):
    def step(self, name: str, status: StepStatus, detail: str = "") -> None: ...

    def progress(self, label: str, done: int, total: int) -> None:
        """Progress of long work: bytes for copies, seconds for waits (total 0: unknown)."""
        ...

    def note(self, text: str) -> None: ...

    def preflight(self, records: list[CheckRecord]) -> None: ...

    def plan(self, plan: Plan) -> None: ...

    def accept_licence(self, request: LicenceRequest) -> bool: ...

    def licence_reference(self, request: LicenceRequest) -> str:
        """For a gated model whose text was accepted: the reference of the agreement that permits its use."""
        ...

    def confirm_plan(self, plan: Plan) -> bool: ...


class Unattended:
    """Says nothing and agrees to nothing: what the options do not contain is refused."""

    def step(self, name: str, status: StepStatus, detail: str = "") -> None:
        return

    def progress(self, label: str, done: int, total: int) -> None:
        return

    def note(self, text: str) -> None:
        return

    def preflight(self, records: list[CheckRecord]) -> None:
        return

    def plan(self, plan: Plan) -> None:
        return

    def accept_licence(self, request: LicenceRequest) -> bool:
        return False

    def licence_reference(self, request: LicenceRequest) -> str:
        return ""

    def confirm_plan(self, plan: Plan) -> bool:
        return False
