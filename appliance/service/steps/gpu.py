"""GPU: can this machine run the models on the medium? The preflight's checks, each as a finding."""

import contextlib
from typing import Any

from appliance.service.facts import Facts
from appliance.service.findings import Finding, StepResult
from appliance.service.steps.base import Step, StepJob
from installer.base.i18n import t
from installer.decide.answers import Answers
from installer.preflight import CHECKS, PreflightContext, run_checks
from installer.release import config
from installer.steps.approve import preflight_context


class GpuStep(Step):
    id = "gpu"
    title = t("GPU and machine")

    def finding_ids(self) -> set[str]:
        return {check.id for check in CHECKS}

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        machine = facts.machine
        return {
            "gpus": [gpu.model_dump() for gpu in machine.gpus], "driver": machine.driver, "form": machine.form,
            "device": answers.device, "models": sorted(model.digest for model in facts.models),
            "code": facts.engine.version, **answers.model_dump(include={"host", "port"}, exclude_none=True),
        }  # fmt: skip

    def run(self, job: StepJob) -> StepResult:
        records = run_checks(self._context(job))
        job.frontend.preflight(records)
        machine = job.facts.machine
        summary = {"gpus": [gpu.name for gpu in machine.gpus], "driver": machine.driver, "cuda": machine.cuda,
                   "memory_bytes": machine.memory_bytes}  # fmt: skip
        return StepResult.model_construct(
            findings=[Finding.of_check(record) for record in records], summary=summary,
            next=t("Review and accept the licences of the engine and the model."),
        )  # fmt: skip

    def _context(self, job: StepJob) -> PreflightContext:
        """Against the models if they are known; else against what any install needs."""
        with contextlib.suppress(Exception):
            if job.survey.context is not None:
                return preflight_context(job.survey.context)
        standing = config.standing(job.layout)
        options = job.options
        endpoint = config.Endpoint(options.host or standing.host, options.port or standing.port, standing.certificate)
        return PreflightContext(job.layout, endpoint, device=options.device or "auto", tls=bool(standing.certificate))
