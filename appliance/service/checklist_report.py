"""The report of the whole checklist: how each step stands, what it found, who accepted and waived what."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from appliance.service.findings import Finding
from appliance.service.state import STATUS_WORDS, State, StepState
from appliance.service.verification.report.markdown import safe, table
from installer.base import fs
from installer.base.i18n import LANGUAGES, t, told
from installer.base.timestamps import timestamp

STATUS: dict[str, str] = {**STATUS_WORDS, "open": t("not begun")}
_COLUMNS = (t("Check"), t("Result"), t("Observed"), t("Required"))
Said = Callable[[object], str]


def write(state: State, directory: Path, name: str = "atoll-report") -> list[Path]:
    """Markdown in both languages and JSON, each whole or not at all, readable by this user alone. Raises OSError."""
    at = timestamp()
    texts = {f"{name}.{language}.md": "\n".join(_markdown(state, at, language)) + "\n" for language in LANGUAGES}
    texts[f"{name}.json"] = json.dumps({"at": at, **state.to_json()}, ensure_ascii=False, indent=1, default=str) + "\n"
    for file, text in texts.items():
        fs.write_atomic(directory / file, text, 0o600)
    return [directory / file for file in texts]


def _markdown(state: State, at: str, language: str) -> Iterator[str]:
    def say(text: object) -> str:
        return safe(str(told(text, language)))

    first = state.first
    verdict = t("all steps are done") if first is None else t("not finished: {step}", step=first.title)
    yield f"# {say(t('Checklist'))}: {say(verdict)}"
    yield ""
    yield at
    for step in state.steps:
        yield from _step(step, say)
    if state.waivers:
        yield f"\n## {say(t('Waivers'))}\n"
        head = [say(each) for each in (t("Check"), t("Reason"), t("By"), t("When"))]
        yield from table(head, ([say(each.finding), say(each.reason), say(each.by), say(each.at)]
                                for each in state.waivers.values()))  # fmt: skip


def _step(step: StepState, say: Said) -> Iterator[str]:
    yield f"\n## {say(step.title)}: {say(STATUS[step.status])}\n"
    if step.why:
        yield say(step.why) + "\n"
    if step.findings:
        yield from table([say(each) for each in _COLUMNS], (_row(each, say) for each in step.findings))


def _row(finding: Finding, say: Said) -> list[str]:
    result = t("passed") if finding.ok else t("waived") if finding.waiver else t("failed")
    if not finding.ok and finding.severity in ("warn", "info"):
        result = t("warning") if finding.severity == "warn" else t("not checked")
    return [say(finding.title), say(result), say(finding.observed), say(finding.required)]
