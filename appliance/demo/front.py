"""The demonstration's front end of an install: steps as lines, waits on the step's progress line."""

from typing import Any

from appliance.demo.display import Step


class DemoFrontend:
    """An installer front end that answers nothing: the demonstration sets every answer in the options."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def step(self, name: str, status: str, detail: str = "") -> None:
        if status != "begin":
            mark = " FAILED" if status == "failed" else ""
            self._step.note(f"{name}{mark}: {detail}" if detail else f"{name}{mark}")

    def progress(self, label: str, done: int, total: int) -> None:
        self._step.progress(label.partition(":")[0], done, total)

    def note(self, text: str) -> None:
        self._step.note(text)

    def preflight(self, records: list[Any]) -> None:
        for record in records:
            if record.status != "pass":
                self._step.note(f"preflight {record.status}: {record.observed}. {record.why}")

    def plan(self, plan: Any) -> None:
        self._step.note(f"plan: {len(plan.items)} things to create, replace or start")

    def accept_licence(self, request: Any) -> bool:
        return False

    def licence_reference(self, request: Any) -> str:
        return ""

    def confirm_plan(self, plan: Any) -> bool:
        return False
