"""Verify: does the installed service keep its promises? Six groups of checks, the operator's targets, a report.

The checks are imported when they run: they need NumPy, which a dry run from a medium lacks.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.service.facts import Facts
from appliance.service.findings import Finding, StepResult, made
from appliance.service.steps.base import Step, StepJob
from appliance.service.verification.plan import GROUPS, Group, VerifyAnswers
from installer.base.i18n import t
from installer.decide.answers import Answers

if TYPE_CHECKING:
    from appliance.service.verification.report import Written
    from appliance.service.verification.run import Verification

_WAIVABLE = (
    "status-1", "status-2", "status-3", "models", "completions", "client-mistakes", "limits", "cancel", "golden",
    "repetition", "saturation", "self-test", "quality-answers", "perplexity-en", "perplexity-ko", "errors-closed",
    "errors-open", "answers-closed", "answers-open", "latency-closed", "latency-open", "output-throughput",
    "request-throughput", "users", "soak", "processes", "memory", "descriptors", "pages", "unit-exposure",
)  # fmt: skip


class VerifyStep(Step):
    id = "verify"
    title = t("Verify")

    def tables(self) -> dict[str, Any]:
        return {"verify": VerifyAnswers}

    def finding_ids(self) -> set[str]:
        return set(_WAIVABLE)

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        plan: VerifyAnswers = getattr(answers, "verify")  # noqa: B009 - a table that this step adds
        return {"release": facts.installed.committed, "plan": plan.model_dump(mode="json")}

    def outdated(self, facts: Facts, summary: Mapping[str, Any]) -> str | None:
        if facts.installed.committed != summary.get("release"):
            return t("another release is installed than the one that was verified")
        return None

    def run(self, job: StepJob) -> StepResult:
        from appliance.service.verification.report import write
        from appliance.service.verification.run import TITLES, forget, verify
        from appliance.service.verification.subject import of_installation

        plan: VerifyAnswers = getattr(job.answers, "verify")  # noqa: B009
        state = job.layout.checklist / "verification"

        def begin(group: Group) -> None:
            job.frontend.note(t("Verifying: {group}", group=TITLES[group]))

        def told(label: str, done: int, total: int) -> None:
            job.frontend.progress(t("{what}: {done} of {total}", what=label, done=done, total=total), 0, 0)

        with of_installation(job.layout) as subject:
            found = verify(subject, plan, told=told, state=state, begin=begin, numbers=job.frontend.numbers)
        written = write(found, job.layout.checklist / "reports", layout=job.layout)
        forget(state)
        return StepResult.model_construct(
            findings=[*found.found(), *left_out(plan), _report(written)], summary=_summary(found, written),
            next=t("Read the report: {path}", path=written.html),
        )  # fmt: skip


def left_out(plan: VerifyAnswers) -> list[Finding]:
    """The groups that were not requested: a warning, because a sign-off must not rest on them."""
    from appliance.service.verification.run import TITLES

    return [
        made(f"{group}-left-out", "warn", False, TITLES[group], observed=t("not verified: the answers leave it out"),
             fix=t("Verify it before the roll-out."), why=t("without a check nobody knows whether it works"))
        for group in GROUPS if group not in plan.groups
    ]  # fmt: skip


def _report(written: "Written") -> Finding:
    return made("report", "info", True, t("Report"), observed=str(written.html),
                evidence="\n".join(f"{hash}  {name}" for name, hash in written.files.items()))  # fmt: skip


def _summary(found: "Verification", written: "Written") -> dict[str, Any]:
    """What later steps need: the measured numbers of each model, and the path of the report."""
    numbers: dict[str, Any] = {}
    for group in found.groups:
        for model, loads in group.data.get("loads", {}).items():
            numbers[model] = {
                kind: {name: result.get(name) for name in (
                    "request_throughput", "output_throughput", "p95_ttft_ms", "p95_itl_ms", "p95_e2el_ms", "slo_share",
                    "failed", "completed", "max_concurrency")}
                for kind, result in loads.items()
            }  # fmt: skip
    return {"release": found.release, "passed": found.passed, "at": found.at, "loads": numbers,
            "report": str(written.html), "sha256": written.files}  # fmt: skip
