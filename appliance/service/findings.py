"""The findings of a step, one fact each, and when a step counts as green."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from installer.base.errors import InstallError
from installer.base.i18n import joined, t
from installer.base.messages import decode, encode
from installer.preflight import CheckRecord

Severity = Literal["strict", "block", "warn", "info"]
"""strict: nobody can waive it. block: a person may, by name and with a reason. warn, info: never in the way."""


class Waiver(BaseModel):
    """Who has decided to continue although a finding blocks. `about`: what alone it holds for, such as the port;
    empty: whatever the finding says."""

    model_config = ConfigDict(frozen=True)

    finding: str
    reason: str
    by: str
    at: str
    about: str = ""


class Finding(BaseModel):
    """One fact: what was seen, what is needed, why it matters, what to do. `ok` findings never block.

    The texts keep their message ids, so that each reader can show them in their own language.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    id: str
    severity: Severity
    ok: bool
    title: str
    observed: str = ""
    required: str = ""
    why: str = ""
    fix: str = ""
    command: str = ""
    evidence: str = ""
    waiver: Waiver | None = None

    @property
    def blocks(self) -> bool:
        return not self.ok and self.waiver is None and self.severity in ("strict", "block")

    @classmethod
    def of_check(cls, record: CheckRecord) -> "Finding":
        """The finding of a preflight check."""
        severity: Severity = "warn" if record.status == "warn" else "strict" if record.strict else "block"
        return made(
            record.id, "info" if record.status == "pass" else severity, record.status == "pass", record.title,
            observed=record.observed, required=record.required, why=record.why, fix=record.fix,
            command=record.command, evidence=record.evidence,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """With message ids, for records and for sending."""
        facts = {name: encode(getattr(self, name)) for name in type(self).model_fields if name != "waiver"}
        return {**facts, "waiver": self.waiver.model_dump() if self.waiver else None}

    @classmethod
    def of_json(cls, facts: dict[str, Any]) -> "Finding":
        waiver = facts.get("waiver")
        values = {name: decode(value) for name, value in facts.items() if name != "waiver"}
        return cls.model_construct(**values, waiver=Waiver(**waiver) if waiver else None)


def made(id: str, severity: Severity, ok: bool, title: str, **more: str) -> Finding:
    """A finding whose texts keep their message ids: pydantic's validation would copy them to plain strings."""
    texts: dict[str, Any] = {name: more.get(name, "") for name in _TEXTS}
    return Finding.model_construct(id=id, severity=severity, ok=ok, title=title, waiver=None, **texts)


_TEXTS = ("observed", "required", "why", "fix", "command", "evidence")


class StepResult(BaseModel):
    """The result of a step. `summary` is what later readers need: numbers, names, paths; never a secret."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    findings: list[Finding] = Field(default_factory=list)
    summary: dict[str, Any] = Field(default_factory=dict)
    next: str = ""

    @property
    def blocking(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.blocks]


def blocked(step: str, findings: list[Finding], exit_code: int) -> InstallError:
    """The error with which the step of this title ends if it has these findings."""
    first = next((each for each in findings if each.severity == "strict"), findings[0])
    hint = first.fix
    if first.command:
        hint = t("{fix} Command: {command}", fix=first.fix, command=first.command)
    if all(each.severity == "block" for each in findings):
        example = f"--waive {first.id}='reason'"
        hint = t("{hint} To continue anyway, say why: in the screens, F9; on the command line, {example} (recorded in "
                 "the audit log).", hint=hint, example=example)  # fmt: skip
    found = joined([t("{id}: {observed}", id=each.id, observed=each.observed) for each in findings], "; ")
    return InstallError(
        t("The step '{step}' is blocked: {found}.", step=step, found=found),
        exit_code=exit_code,
        why=first.why,
        hint=hint,
    )
