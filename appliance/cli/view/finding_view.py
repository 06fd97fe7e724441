"""How findings and the checklist look on a terminal. A status is always a word, never only a colour."""

import contextlib
from typing import Any

from rich.console import Console
from rich.markup import escape

from appliance.cli.common import padded, spoken
from appliance.service.findings import Finding
from appliance.service.state import STATUS_WORDS, State, StepState
from installer.base.i18n import t
from installer.base.layout import Layout

_STYLES = {"PASS": "green", "INFO": "cyan", "WARN": "yellow", "FAIL": "bold red", "WAIV": "magenta"}
_STATUS_STYLES = {"green": "green", "failed": "bold red", "stale": "yellow", "interrupted": "yellow",
                  "running": "cyan", "open": "default"}  # fmt: skip


def print_findings(findings: list[dict[str, Any]], console: Console) -> None:
    """One line for each finding; for one that blocks, also what is needed and what to do."""
    with contextlib.suppress(OSError):
        for facts in findings:
            waiver = facts.get("waiver") or {}
            finding = Finding.of_json(facts)
            word = _word(finding, bool(waiver))
            line = f"{padded(finding.title, 20)} {escape(spoken(finding.observed))}"
            console.print(f"  [{_STYLES[word]}]{word}[/]  {line}")
            if waiver:
                said = t("waived by {by}: {reason}", by=waiver["by"], reason=waiver["reason"])
                console.print(f"        {spoken(said)}", markup=False)
            elif not finding.ok and finding.severity != "info":
                for text in (finding.why, finding.fix):
                    if text:
                        console.print(f"        {spoken(text)}", markup=False)


def _word(finding: Finding, waived: bool) -> str:
    if waived:
        return "WAIV"
    if finding.ok:
        return "PASS"
    return {"warn": "WARN", "info": "INFO"}.get(finding.severity, "FAIL")


def print_state(state: State, layout: Layout, console: Console) -> None:
    """The checklist: its steps, what blocks them, and where it continues."""
    with contextlib.suppress(OSError):
        for number, step in enumerate(state.steps, start=1):
            _print_step(number, step, console)
        first = state.first
        text = t("The checklist is complete. The dashboard: {command}", command=f"atoll top{layout.prefix_option}")
        if first is not None:
            text = t("Next: {command}", command=f"atoll checklist run{layout.prefix_option}")
        console.print(f"\n{spoken(text)}", markup=False)


def _print_step(number: int, step: StepState, console: Console) -> None:
    word = padded(STATUS_WORDS[step.status], 12)
    at = f"  {step.at}" if step.at else ""
    console.print(f"  {number}  [{_STATUS_STYLES[step.status]}]{word}[/] {padded(step.title, 24)}{at}")
    if step.why:
        console.print(f"       {spoken(step.why)}", markup=False)
    for finding in step.findings:
        if finding.waiver is not None:
            said = t("{finding}: waived by {by}: {reason}", finding=finding.id, by=finding.waiver.by,
                     reason=finding.waiver.reason)  # fmt: skip
            console.print(f"       {spoken(said)}", markup=False)
