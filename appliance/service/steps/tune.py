"""Tune: the engine settings that serve the operator's traffic best, found on the running service."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from appliance.service.facts import Facts
from appliance.service.findings import Finding, StepResult, made
from appliance.service.steps.base import Step, StepJob
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.decide.answers import Answers
from installer.operate.settings_trial import settings_of
from installer.release import config

Text = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Reason = Annotated[str, StringConstraints(min_length=3, max_length=500)]


class TuneAnswers(BaseModel):
    """`confirm`: the service may be restarted for every trial. `skip`: why nothing is tuned."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field(default="", max_length=200, description="ttft=500ms,itl=40ms; empty: as much as possible.")
    budget: str = Field(default="10m", max_length=20, description="Total time for each model.")
    profile: Text = Field(default="chat", description="chat, documents, batch, single, or a profile's file.")
    model: Text | None = Field(default=None, description="Only this one of several models.")
    preset: Text | None = Field(default=None, description="The preset that the settings come from.")
    only: list[Text] = Field(default_factory=list, description="Tune exactly these settings.")
    load_seconds: float | None = Field(default=None, ge=1, le=3600, description="Load of one trial.")
    settings: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="Set exactly these, without measuring.")
    confirm: bool = Field(default=False, description="The service may be restarted for every trial.")
    skip: Reason | None = Field(default=None, description="Why nothing is tuned.")


class TuneStep(Step):
    id = "tune"
    title = t("Tune")

    def tables(self) -> dict[str, Any]:
        return {"tune": TuneAnswers}

    def finding_ids(self) -> set[str]:
        return {"tune-confirmed"}

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        given = _answers(answers)
        return {"models": sorted(model.digest for model in facts.models),
                "tune": given.model_dump(mode="json", exclude={"confirm"})}  # fmt: skip

    def outdated(self, facts: Facts, summary: Mapping[str, Any]) -> str | None:
        machine = facts.machine
        layout = Layout.server(machine.prefix) if machine.form == "server" else Layout.at(machine.prefix)
        text = config.read_text(layout.config)
        for tuned in summary.get("models", []):
            now = config.with_dashes(settings_of(layout, text or "", tuned["model"]))
            for name, value in tuned["setting"].items():
                if now.get(name) != value:
                    return t("{name} was changed after it was tuned", name=name)
        return None

    def run(self, job: StepJob) -> StepResult:
        answers = self._asked(job, _answers(job.answers))
        if answers.skip:
            found = made("tuned", "info", True, t("Tuning"), observed=t("left out: {reason}", reason=answers.skip))
            return _result([found], {"models": [], "skipped": answers.skip})
        if answers.settings:
            return _result(*self._set(job, answers))
        if not answers.confirm and "tune-confirmed" not in job.waivers:
            return _result([_unconfirmed()], {"models": []})
        results = [self._tune(job, answers, name) for name in self._models(job, answers)]
        findings = [finding for result in results for finding in _findings(result)]
        return _result(findings, {"models": results})

    def _asked(self, job: StepJob, answers: TuneAnswers) -> TuneAnswers:
        """If somebody is at the terminal, ask for what the answers leave open."""
        if answers.skip or answers.confirm or answers.settings or not job.frontend.interactive:
            return answers
        said = job.frontend.ask(t("Tune now? Every trial restarts the service. (yes, or why not)"))
        if said.lower() not in ("y", "yes", "예", "네"):
            if len(said) < 3:
                return answers
            job.learned["tune"] = {"skip": said[:500]}
            return answers.model_copy(update=job.learned["tune"])
        learned: dict[str, Any] = {"confirm": True}
        if not answers.target:
            learned["target"] = job.frontend.ask(
                t("What do your users need, such as ttft=500ms,itl=40ms? (empty: as much as possible)")
            )
        job.learned["tune"] = learned
        return answers.model_copy(update=learned)

    def _models(self, job: StepJob, answers: TuneAnswers) -> list[str | None]:
        names: list[str | None] = [model.instance for model in job.facts.models]
        return [answers.model] if answers.model else names or [None]

    def _set(self, job: StepJob, answers: TuneAnswers) -> tuple[list[Finding], dict[str, Any]]:
        """Start the settings that a person chose, smoke-test and keep them; if that fails, the previous ones are
        restored."""
        from appliance.service.tuning.work import set_exactly

        models = self._models(job, answers)
        for model in models:
            set_exactly(job.layout, model, answers.settings, job.frontend, timeout=job.options.start_timeout)
        said = joined(f"{name} {value}" for name, value in answers.settings.items())
        found = [made("tuned", "info", True, t("Setting"), observed=said),
                 made("tune-reason", "info", True, t("Reason"), observed=t("chosen by a person, not measured"))]
        return found, {"models": [{"model": model, "setting": dict(answers.settings)} for model in models if model]}

    def _tune(self, job: StepJob, answers: TuneAnswers, model: str | None) -> dict[str, Any]:
        from appliance.load.slo import parse_slo
        from appliance.service.tuning.request import TuneRequest, seconds_of
        from appliance.service.tuning.work import checked, tune
        from installer.base.messages import decode

        request = checked(TuneRequest(
            target=parse_slo([answers.target]).to_json(), budget=seconds_of(answers.budget, "tune.budget"),
            profile=answers.profile, model=model, preset=answers.preset, only=tuple(answers.only),
            load_seconds=answers.load_seconds, start_timeout=job.options.start_timeout,
        ))  # fmt: skip
        return decode(tune(request, job.layout, job.frontend))


def _answers(answers: Answers) -> TuneAnswers:
    return getattr(answers, "tune", None) or TuneAnswers()


def _result(findings: list[Finding], summary: dict[str, Any]) -> StepResult:
    return StepResult.model_construct(findings=findings, summary=summary, next=t("Verify it."))


def _unconfirmed() -> Finding:
    return made(
        "tune-confirmed", "block", False, t("Tuning"), observed=t("nobody has agreed to the restarts"),
        required=t("a yes, or a reason to skip it"),
        why=t("Every trial restarts the service and cuts off running requests."),
        fix=t("In the screens, M measures and U skips it; in the answers file, [tune] confirm = true, or "
              "skip = \"reason\""),
    )  # fmt: skip


def _findings(result: dict[str, Any]) -> list[Finding]:
    """The findings of one model."""
    from appliance.service.tuning import advice
    from appliance.service.tuning.measure import measured_of

    model = result["model"]
    changed = [f"{name} {advice.shown(old)} → {advice.shown(new)}" for name, (old, new) in result["changed"].items()]
    said = joined(changed) if changed else t("the current settings")
    found = [
        made("tuned", "info", True, t("Setting"), observed=t("{model}: {said}", model=model, said=said)),
        made("tune-reason", "info", True, t("Reason"), observed=result["reason"]),
    ]
    numbers = advice.numbers(measured_of(result["after"]))
    failed = sum(1 for trial in result["trials"] if trial["failure"])
    if failed:
        found.append(made("tune-trials", "info", True, t("Trials"),
                          observed=t("{failed} of {count} did not serve and were undone", failed=failed,
                                     count=len(result["trials"]))))  # fmt: skip
    if result["target_met"] is None:
        found.append(made("tune-speed", "info", True, t("Speed"), observed=numbers))
    else:
        met = bool(result["target_met"])
        found.append(made(
            "tune-target", "info" if met else "warn", met, t("Target"), observed=numbers,
            required=joined(f"{name} {limit:g} ms" for name, limit in result["target"].items()),
            why="" if met else t("No setting within reach meets the target; the best one is in use."),
            fix="" if met else t("What would help: {names}.", names=joined(result["helps"], "; ")),
        ))  # fmt: skip
    return found
