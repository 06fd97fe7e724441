"""Install: the installer's journalled run, as one step. An installation that is whole already is recognised."""

from collections.abc import Mapping
from typing import Any

from appliance.service.facts import Facts
from appliance.service.findings import StepResult, made
from appliance.service.installing import without_key
from appliance.service.steps.base import Step, StepJob
from installer.base.i18n import joined, t
from installer.decide.answers import Answers
from installer.operate.install import Installer


class InstallStep(Step):
    id = "install"
    title = t("Install")

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        chosen = answers.model_dump(mode="json", include={"host", "port", "device", "models", "tls"})
        return {"models": sorted(model.digest for model in facts.models), "code": facts.engine.version, **chosen}

    def outdated(self, facts: Facts, summary: Mapping[str, Any]) -> str | None:
        if facts.installed.committed is None:
            return t("nothing is installed any more")
        if facts.installed.committed != summary.get("release"):
            return t("release {release} is installed now", release=facts.installed.committed)
        return None

    def run(self, job: StepJob) -> StepResult:
        result = Installer(job.options, job.frontend, layout=job.layout).run()
        job.learned.update(confirm_plan=True)
        summary = without_key(result, job.frontend)
        for name in ("plan", "preflight"):  # large, and recorded by the steps before
            summary.pop(name)
        models = joined(f"{model['instance']} ({model['name']} {model['version']})" for model in result.models)
        findings = [
            made("release", "info", True, t("Release"), observed=result.release),
            made("models", "info", True, t("Models"), observed=models),
            made("endpoint", "info", True, t("Endpoint"), observed=result.url),
        ]
        return StepResult.model_construct(
            findings=findings, summary=summary, next=t("Look at it: {command}", command="atoll status")
        )
