"""Model and licence: the licences of the engine and of each model, separately, and the review of each model.

A licence is accepted by its text: a person agrees to the text shown, or an answer names the text's hash.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from appliance.service import review
from appliance.service.facts import Facts, engine_licence
from appliance.service.findings import Finding, StepResult, made
from appliance.service.review import Point, ReviewAnswers
from appliance.service.steps.base import Step, StepJob
from installer.access import licence
from installer.access.licence import LicenceRequest
from installer.base.errors import ExitCode, InstallError, usage_error
from installer.base.i18n import t
from installer.decide.answers import Answers
from installer.decide.context import Model

_ATTEMPTS = 5   # at one answer that cannot be used; then the point stays open
_RULE = t("Days are written YYYY-MM-DD, answers have at most 500 characters.")


class ModelStep(Step):
    id = "model"
    title = t("Model and licence")
    blocked_code = ExitCode.LICENCE

    def tables(self) -> dict[str, Any]:
        return {"review": dict[str, ReviewAnswers]}

    def finding_ids(self) -> set[str]:
        return {f"review-{point.id}" for point in review.POINTS} | {"review-expired"}

    def inputs(self, facts: Facts, answers: Answers) -> dict[str, Any]:
        return {
            "engine": [facts.engine.spdx, facts.engine.licence_sha256],
            "models": sorted([model.name, model.digest, model.licence_sha256] for model in facts.models),
            "review": answers.model_dump(mode="json", include={"review"}),
        }

    def run(self, job: StepJob) -> StepResult:
        context = job.survey.known()
        findings = [self._engine(job)]
        summary: dict[str, Any] = {"models": []}
        for model in context.models:
            named = partial(_named, model=model, alone=len(context.models) == 1)
            findings.append(self._licence(job, model, named))
            findings += self._review(job, model, named)
            summary["models"].append(model.facts() | {"licence_sha256": model.manifest.license.sha256})
        return StepResult.model_construct(findings=findings, summary=summary, next=t("Install it."))

    def _engine(self, job: StepJob) -> Finding:
        text, facts = engine_licence(), job.facts.engine
        if text is None or facts.licence_sha256 is None:
            return made("engine-licence", "strict", False, t("Engine licence"), observed=t("its text is missing"),
                        required=t("the text that came with the code"), why=t("A missing text cannot be accepted."),
                        fix=t("Install Atoll again from its medium."))  # fmt: skip
        name = f"atoll {facts.version}"
        request = LicenceRequest(facts.spdx, facts.licence_sha256, text.decode("utf-8", "replace"), None, name)
        how = self._accept(job, request, "engine", job.facts.engine.version)
        return made("engine-licence", "info", True, t("Engine licence"),
                    observed=t("{spdx} of {name}, SHA-256 {hash}: {how}", spdx=request.spdx, name=name,
                               hash=request.sha256[:12], how=how))  # fmt: skip

    def _licence(self, job: StepJob, model: Model, named: Callable[[str], str]) -> Finding:
        manifest, terms = model.manifest, model.manifest.license
        gated = terms.acceptance == "gated"
        name = f"{manifest.name} {manifest.version}"
        if licence.already_approved(job.layout.approvals, terms.sha256, model.digest, gated=gated):
            how: str = t("accepted earlier")
        else:
            text = licence.read_text(model.source, terms.file, terms.sha256)
            request = LicenceRequest(terms.spdx, terms.sha256, text, terms.url, name, gated)
            how = self._accept(job, request, "model", model.digest, asked=terms.acceptance != "none")
        return made(named("model-licence"), "info", True, t("Model licence"),
                    observed=t("{spdx} of {name}, SHA-256 {hash}: {how}", spdx=terms.spdx, name=name,
                               hash=terms.sha256[:12], how=how))  # fmt: skip

    def _accept(self, job: StepJob, request: LicenceRequest, kind: str, of: str, *, asked: bool = True) -> str:
        """How it was accepted. Raises InstallError (20) if it was not."""
        reference = licence.answered(request, job.options.accept_licenses)
        how = "answer"
        if reference is None and not asked:
            return t("no acceptance required by the vendor")
        if reference is None:
            if not job.frontend.accept_licence(request):
                raise self._refused(request)
            how = "interactive"
            given = job.frontend.licence_reference(request) if request.gated else ""
            reference = licence.check_reference(request, given)
        approval = licence.approve(request, of, how, reference)
        answer = f"{request.spdx}@{request.sha256}" + (f":{reference}" if reference else "")
        job.accepted(kind=kind, name=request.model, answer=answer, **approval.to_json())
        job.options.accept_licenses.append(answer)
        job.learned.setdefault("accept_licenses", []).append(answer)
        return t("accepted")

    def _refused(self, request: LicenceRequest) -> InstallError:
        return InstallError(
            t("The licence {spdx} of {model} was not accepted.", spdx=request.spdx, model=request.model),
            exit_code=ExitCode.LICENCE,
            why=t("Nothing is installed before the licences of the engine and the model are accepted, each by its "
                  "text."),
            changed=t("Nothing was changed."),
            hint=t("Run the step again and accept it (in the screens: Enter at its end), or use the answers file: "
                   "accept_licenses = [\"{answer}\"]", answer=request.answer),
        )

    def _review(self, job: StepJob, model: Model, named: Callable[[str], str]) -> list[Finding]:
        """The points of one model. If somebody is at the terminal, open points are asked for."""
        manifest = model.manifest
        answers: ReviewAnswers = getattr(job.answers, "review").get(manifest.name) or ReviewAnswers()  # noqa: B009
        today = time.strftime("%Y-%m-%d", time.gmtime())
        asked: dict[str, str] = {}
        points = review.open_points(manifest, answers)
        for number, point in enumerate(points, 1):
            said = _answer(job, point, t("{model}, question {number} of {count}: {question}", model=manifest.name,
                                         number=number, count=len(points), question=point.question))  # fmt: skip
            if said:
                asked[point.id] = said
        if asked:
            answers = _checked(answers, {"date": today, **asked})
            job.learned.setdefault("review", {})[manifest.name] = answers.model_dump(exclude_none=True)
        return review.findings(manifest, answers, today, named)


def _answer(job: StepJob, point: Point, question: str) -> str:
    """What somebody at the terminal says to it; empty: left open. An answer that cannot be used is asked for again, so
    that it does not cost the answers before it."""
    asked = question
    for _ in range(_ATTEMPTS):
        said = job.frontend.ask(asked)
        if len(said) < 2:
            break
        try:
            ReviewAnswers.model_validate({point.id: said})
        except ValueError:
            asked = t("'{said}' cannot be used. {rule}\n{question}", said=said[:40], rule=_RULE, question=question)
        else:
            return said
    return ""


def _named(name: str, *, model: Model, alone: bool) -> str:
    """A finding's id. With several models it names the model, so that a waiver holds for one of them."""
    return name if alone else f"{name}@{model.instance}"


def _checked(answers: ReviewAnswers, said: dict[str, str]) -> ReviewAnswers:
    """The answers including those just given. Raises InstallError (usage) for an invalid date or an answer that is too
    long."""
    try:
        return ReviewAnswers.model_validate({**said, **answers.model_dump(exclude_none=True), **said})
    except ValueError as error:
        raise usage_error(t("An answer of the review cannot be used: {names}.", names=", ".join(
                              str(entry["loc"][0]) for entry in getattr(error, "errors", list)())),
                          _RULE) from error
