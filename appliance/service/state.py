"""The state of the checklist, derived from its events and the current facts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from appliance.service.facts import Facts
from appliance.service.findings import Finding, Waiver
from appliance.service.steps import STEPS
from appliance.service.steps.base import Step
from installer.base.i18n import t
from installer.base.journal import Record
from installer.base.messages import decode
from installer.decide.answers import Answers

Status = Literal["open", "running", "interrupted", "failed", "stale", "green"]
STATUS_WORDS: Mapping[str, str] = {
    "open": t("open"), "running": t("running"), "interrupted": t("interrupted"), "failed": t("failed"),
    "stale": t("stale"), "green": t("done"),
}  # fmt: skip


@dataclass(slots=True)
class StepState:
    """The state of one step according to the events. `why` says why it is stale, failed or interrupted."""

    id: str
    title: str
    status: Status = "open"
    why: str = ""
    at: str | None = None
    inputs: str = ""                              # hash of the inputs of the last run whose findings are known
    findings: list[Finding] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    next: str = ""
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "title": str(self.title), "status": self.status, "why": str(self.why), "at": self.at,
            "exit_code": self.exit_code, "next": str(self.next), "summary": self.summary,
            "findings": [{**_plain(each), "waiver": each.waiver.model_dump() if each.waiver else None}
                         for each in self.findings],
        }  # fmt: skip


@dataclass(slots=True)
class State:
    """The whole checklist. `first` is where a run continues; None: everything is green."""

    steps: list[StepState]
    waivers: dict[str, Waiver]
    accepted: list[str]

    def step(self, name: str) -> StepState:
        return next(step for step in self.steps if step.id == name)

    @property
    def first(self) -> StepState | None:
        return next((step for step in self.steps if step.status != "green"), None)

    def to_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "done": first is None, "next_step": first.id if first else None,
            "steps": [step.to_json() for step in self.steps],
            "waivers": [waiver.model_dump() for waiver in self.waivers.values()],
        }  # fmt: skip


def chain(facts: Facts, answers: Answers, steps: Sequence[Step] = STEPS) -> dict[str, str]:
    """Hash of what each step depends on: its own inputs, and those of every step before it."""
    hashes, before = {}, ""
    for step in steps:
        text = json.dumps([before, step.id, step.inputs(facts, answers)], sort_keys=True, default=str)
        before = hashes[step.id] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def derive(
    records: Sequence[Record], facts: Facts | None, answers: Answers | None, *, busy: bool,
    steps: Sequence[Step] = STEPS,
) -> State:  # fmt: skip
    """Read the events from first to last. Without facts, nothing is found stale. `busy`: a writer is active."""
    states = {step.id: StepState(step.id, step.title) for step in steps}
    waivers: dict[str, Waiver] = {}
    accepted: list[str] = []
    for record in records:
        _take(record, states, waivers, accepted, busy=busy)
    if facts is not None and answers is not None:
        _compare(states, facts, answers, steps)
    return State(list(states.values()), waivers, accepted)


def _take(
    record: Record, states: dict[str, StepState], waivers: dict[str, Waiver], accepted: list[str], *, busy: bool
) -> None:
    match record["event"]:
        case "waived":
            waivers[record["finding"]] = Waiver(**{k: record[k] for k in ("finding", "reason", "by")}, at=record["at"],
                                                about=record.get("about", ""))
        case "accepted":
            accepted.append(record["answer"])
        case "reset":
            for name in record["steps"]:
                if name in states:
                    states[name] = StepState(name, states[name].title)
            if record.get("waivers"):
                waivers.clear()
        case "began" if record["step"] in states:
            state = states[record["step"]]
            state.status, state.at = "running" if busy else "interrupted", record["at"]
            state.why = "" if busy else t("its run was cut off")
            for other in states.values():  # there is only one writer: what began earlier has ended in some way
                if other is not state and other.status == "running":
                    other.status, other.why = "interrupted", t("its run was cut off")
        case "ended" if record["step"] in states:
            state = states[record["step"]]
            state.status, state.at, state.exit_code = record["status"], record["at"], record["exit_code"]
            state.why = decode(record.get("why") or "")
            state.findings = [Finding.of_json(each) for each in record.get("findings", [])]
            state.inputs = record.get("inputs", "")
            if record["status"] == "green":
                state.summary = record["summary"]
                state.next = decode(record.get("next") or "")


def _compare(
    states: Mapping[str, StepState], facts: Facts, answers: Answers, steps: Sequence[Step]
) -> None:
    """Mark green steps whose inputs have changed or whose result is gone, and all steps that build on them; also steps
    whose findings block, once what they were found about has changed."""
    hashes = chain(facts, answers, steps)
    broken = ""
    for step in steps:
        state = states[step.id]
        if state.status == "green":
            gone = step.outdated(facts, state.summary)
            if gone:
                state.status, state.why = "stale", gone
            elif broken:
                state.status, state.why = "stale", t("the step '{step}' before it must run again", step=broken)
            elif state.inputs != hashes[step.id]:
                state.status, state.why = "stale", t("what it depends on has changed")
        elif state.status == "failed" and state.inputs not in ("", hashes[step.id]):
            state.status, state.why, state.findings = "stale", t("what it depends on has changed"), []
        if state.status in ("stale", "open", "interrupted") and not broken:
            broken = step.title


def _plain(finding: Finding) -> dict[str, Any]:
    """In English, as in `--json`."""
    values = {name: getattr(finding, name) for name in type(finding).model_fields if name != "waiver"}
    return {name: value if isinstance(value, bool) else str(value) for name, value in values.items()}
