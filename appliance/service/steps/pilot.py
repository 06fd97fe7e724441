"""Pilot: let users in stage by stage, watched, with a way back; then a person decides on the roll-out."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from appliance.service.facts import Facts
from appliance.service.findings import Finding, StepResult, made
from appliance.service.pilot.plan import PilotPlan
from appliance.service.steps.base import Step, StepJob
from installer.base.i18n import joined, t
from installer.base.messages import decode
from installer.decide.answers import Answers

Person = Annotated[str, StringConstraints(min_length=2, max_length=100)]


class PilotAnswers(PilotPlan):
    """A plan, who signs, and the reason if there is no pilot."""

    signed_by: Person | None = Field(None, description="Who signs the roll-out if every stage passes.")
    skip: Annotated[str, StringConstraints(min_length=3, max_length=500)] | None = Field(
        None, description="Why there is no pilot.")

    @property
    def plan(self) -> PilotPlan:
        return PilotPlan.model_validate(self.model_dump(exclude={"signed_by", "skip"}))


class PilotStep(Step):
    id = "pilot"
    title = t("Pilot and roll-out")

    def tables(self) -> dict[str, Any]:
        return {"pilot": PilotAnswers}

    def finding_ids(self) -> set[str]:
        return {"pilot-planned", "pilot-signed"}

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        given: PilotAnswers = getattr(answers, "pilot")  # noqa: B009 - a table that this step adds
        return {"release": facts.installed.committed, "pilot": given.model_dump(mode="json")}

    def outdated(self, facts: Facts, summary: Mapping[str, Any]) -> str | None:
        return None

    def run(self, job: StepJob) -> StepResult:
        from appliance.service.pilot import records, report
        from appliance.service.pilot.run import PilotRequest, run

        given: PilotAnswers = getattr(job.answers, "pilot")  # noqa: B009
        if given.skip:
            found = made("pilot-planned", "info", True, t("Pilot"), observed=t("left out: {reason}", reason=given.skip))
            return _result([found], {"skipped": given.skip})
        if not given.stages:
            return _result([_unplanned()], {})
        state = records.read(job.layout)
        if state.plan != given.plan or state.outcome != "done":
            run(job.layout, PilotRequest(plan=given.plan), job.frontend)
            state = records.read(job.layout)
        findings = [_stage(each) for each in state.stages]
        if not report.recommends(state):
            return _result(findings, {"outcome": state.outcome})
        if state.signed is None and given.signed_by:
            report.sign(job.layout, job.layout.checklist / "reports", "go", given.signed_by, "")
            state = records.read(job.layout)
        findings.append(_signed(state.signed))
        stages = {each.name: each.kpi for each in state.stages}
        return _result(findings, {"outcome": state.outcome, "stages": stages, "signed": state.signed})


def _stage(stage: Any) -> Finding:
    from appliance.service.pilot.report import STATUS

    ok = stage.status == "passed"
    why = joined([STATUS[stage.status], *(decode(each) for each in stage.why)], "; ")
    return made(f"pilot-stage-{stage.name}", "info" if ok else "strict", ok, t("Stage {name}", name=stage.name),
                observed=why, required=t("passed"), why=t("A roll-out must rest on a pilot that reached its goals."),
                fix=t("Find the cause, tune and verify again, then repeat the pilot."), command="atoll tune")


def _signed(signed: Mapping[str, Any] | None) -> Finding:
    if signed and signed["decision"] == "go":
        return made("pilot-signed", "info", True, t("Sign-off"),
                    observed=t("{by}, {at}", by=signed["by"], at=signed["at"]))  # fmt: skip
    return made("pilot-signed", "block", False, t("Sign-off"), observed=t("not signed"), required=t("a person's name"),
                why=t("A person decides on the roll-out, not a program."),
                fix=t("Read the report, then sign it (in the screens: S); or name who signs in [pilot] signed_by."),
                command="atoll pilot sign --go --by NAME")  # fmt: skip


def _unplanned() -> Finding:
    return made("pilot-planned", "block", False, t("Pilot"), observed=t("no stage is planned"),
                required=t("at least one stage"), why=t("Real users find what no test finds."),
                fix=t("In the screens, P plans it and L leaves it out; in the answers file, [pilot] with "
                      "[[pilot.stages]], or skip = \"reason\""),
                command="atoll pilot plan --example")  # fmt: skip


def _result(findings: list[Finding], summary: dict[str, Any]) -> StepResult:
    return StepResult.model_construct(findings=findings, summary=summary, next=t("The checklist is complete."))
