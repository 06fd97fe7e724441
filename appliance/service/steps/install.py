"""Install: the installer's journalled run, as one step. An existing complete installation is recognised.

The models get the settings of the presets that fit them, the GPU and the use (presets/choose.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.service.facts import Facts
from appliance.service.findings import Finding, StepResult, made
from appliance.service.installing import without_key
from appliance.service.presets.answers import PresetAnswers
from appliance.service.steps.base import Step, StepJob
from installer.base.i18n import joined, t
from installer.decide.answers import Answers
from installer.decide.context import Model
from installer.operate.install import Installer
from installer.operate.settings_trial import settings_of
from installer.preflight.lookup_tables import signed_config
from installer.release import config

if TYPE_CHECKING:
    from appliance.service.presets.choose import Chosen


class InstallStep(Step):
    id = "install"
    title = t("Install")

    def tables(self) -> dict[str, Any]:
        return {"preset": PresetAnswers}

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        chosen = answers.model_dump(mode="json", include={"host", "port", "device", "models", "tls", "preset"})
        return {"models": sorted(model.digest for model in facts.models), "code": facts.engine.version, **chosen}

    def outdated(self, facts: Facts, summary: Mapping[str, Any]) -> str | None:
        if facts.installed.committed is None:
            return t("nothing is installed any more")
        if facts.installed.committed != summary.get("release"):
            return t("release {release} is installed now", release=facts.installed.committed)
        return None

    def run(self, job: StepJob) -> StepResult:
        presets = _presets(job)
        _apply(job, presets)
        result = Installer(job.options, job.frontend, layout=job.layout).run()
        job.learned.update(confirm_plan=True)
        summary = without_key(result, job.frontend)
        for name in ("plan", "preflight"):  # large, and already recorded by earlier steps
            summary.pop(name)
        summary["presets"] = {name: chosen.to_json() for name, chosen in presets.items()}
        models = joined(f"{model['instance']} ({model['name']} {model['version']})" for model in result.models)
        findings = [
            made("release", "info", True, t("Release"), observed=result.release),
            made("models", "info", True, t("Models"), observed=models),
            made("endpoint", "info", True, t("Endpoint"), observed=result.url),
            *(_named(chosen.finding, name, alone=len(presets) == 1) for name, chosen in presets.items()),
        ]
        return StepResult.model_construct(
            findings=findings, summary=summary, next=t("Look at it: {command}", command="atoll status")
        )


def _presets(job: StepJob) -> dict[str, "Chosen"]:
    """Instance -> preset, for each model that will run; empty if the medium is gone and the models are unknown."""
    # It loads PyTorch, which a dry run from a medium does without.
    from appliance.service.planning.model_and_gpu import card_of
    from appliance.service.presets.choose import choose

    answers: PresetAnswers = getattr(job.answers, "preset")  # noqa: B009
    earlier = job.earlier.get("install", {}).get("presets", {})
    text = config.read_text(job.layout.config)
    found = {}
    for model in job.survey.models:
        gpus = () if (model.choice.device or job.options.device) == "cpu" else job.facts.machine.gpus
        first = model.choice.gpus[0] if model.choice.gpus else 0
        gpu = next((gpu for gpu in gpus if first in (gpu.index, gpu.uuid)), None)
        before = earlier.get(model.instance, {}).get("settings", {})
        found[model.instance] = choose(
            model.instance, signed_config(model.source, model.manifest), card_of(gpu), answers,
            _standing(job, text, model), before,
        )  # fmt: skip
    return found


def _standing(job: StepJob, text: str | None, model: Model) -> dict[str, Any]:
    """The instance's current settings: those in the file, and those that this run's answers name."""
    return config.with_dashes({**settings_of(job.layout, text or "", model.instance), **model.choice.settings})


def _apply(job: StepJob, presets: Mapping[str, "Chosen"]) -> None:
    """Settings in the answers win over the preset's."""
    if not any(chosen.settings for chosen in presets.values()):
        return
    job.options.models = [
        replace(model.choice, name=model.instance,
                settings={**presets[model.instance].settings, **model.choice.settings})
        for model in job.survey.models
    ]  # fmt: skip
    job.options.bundle = None


def _named(finding: Finding, instance: str, *, alone: bool) -> Finding:
    return finding if alone else finding.model_copy(update={"id": f"{finding.id}@{instance}"})
