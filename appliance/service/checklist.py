"""The checklist: its current state, and running it from the first step that is not green to the last."""

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from appliance.service import answers as answers_of
from appliance.service import jobs
from appliance.service.events import Events, mend, read
from appliance.service.facts import Survey
from appliance.service.findings import Finding, StepResult, Waiver, blocked
from appliance.service.jobs.attach import JobReader
from appliance.service.jobs.frontend import JobFrontend
from appliance.service.jobs.process import Work
from appliance.service.run_request import RunRequest
from appliance.service.state import State, chain, derive
from appliance.service.steps import STEPS
from appliance.service.steps.base import Step, StepJob
from installer.audit import log
from installer.base import fs, lock
from installer.base.errors import ExitCode, InstallError, io_error, usage_error
from installer.base.i18n import joined, t
from installer.base.layout import Layout
from installer.base.lock import refuse_if_busy
from installer.base.messages import encode
from installer.base.timeouts import START_TIMEOUT
from installer.base.timestamps import new_run_id
from installer.decide.answers import Answers
from installer.decide.install_options import InstallOptions, ModelChoice, TlsChoice
from installer.preflight import CHECKS
from installer.release import config

MAX_REASON = 500
PORT_CHECK = "port"
_CHECKS = frozenset(check.id for check in CHECKS)  # checks that an install allows to be waived


def show(layout: Layout, answers: Answers | None = None) -> State:
    """The current state. Reads only, holds no lock."""
    records = read(layout)
    answers = answers or last_answers(layout)
    busy = lock.holder(layout.checklist / "lock") is not None
    facts = Survey(layout, options_of(answers, layout)).facts if records else None
    state = derive(records, facts, answers, busy=busy)
    state.waivers = _holding(state.waivers, layout, answers)
    return state


def run(
    layout: Layout, request: RunRequest, reader: JobReader, *, fresh: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the checklist as a job and follow it. Returns its result, and the secrets that it handed over. Raises
    InstallError.

    `fresh`: the job runs in a new process, not in one that is forked from this one.
    """
    for name in request.steps:
        step_called(name)
    refuse_if_busy(layout.checklist / "lock")
    work = None if fresh else checklist_work(request, layout)
    given = request.model_dump(mode="json")
    return jobs.run(
        layout, "checklist", work, reader, kind="checklist", given=given, interactive=request.interactive
    )


def checklist_work(request: RunRequest, layout: Layout) -> Work:
    """The work of a checklist's job."""

    def work(frontend: JobFrontend) -> dict[str, Any]:
        with Events(layout, "checklist", new_run_id()) as events:
            return _Run(layout, request, frontend, events).run()

    return work


class _Run:
    """One run: the steps in order, each recorded before it begins and after it ends."""

    def __init__(self, layout: Layout, request: RunRequest, frontend: JobFrontend, events: Events) -> None:
        self.layout, self.request, self.frontend, self.events = layout, request, frontend, events
        self.answers = answers_of.from_json(request.answers)
        self.by = request.by or str(log.operator()["user"])

    def run(self) -> dict[str, Any]:
        self._record_waivers()
        self._keep_answers()  # also for readers of a run that is killed
        survey = self._survey()
        state = self._state(survey)
        try:
            for step in self._wanted(state):
                self._one(step, survey, state)
                survey = self._survey()
                state = self._state(survey)
        finally:
            self._keep_answers()
        self.events.audit()
        return {
            "done": state.first is None, "next_step": state.first.id if state.first else None,
            "steps": {step.id: step.status for step in state.steps},
            "key_ids": state.step("install").summary.get("key_ids", []),
        }  # fmt: skip

    def _wanted(self, state: State) -> list[Step]:
        if not self.request.steps:
            first = state.first
            begun = [step.id for step in state.steps].index(first.id) if first else len(STEPS)
            return list(STEPS[begun:])
        wanted = [step for step in STEPS if step.id in self.request.steps]
        for other in STEPS[: STEPS.index(wanted[0])]:
            if state.step(other.id).status != "green":
                raise InstallError(
                    t("The step '{step}' needs the step '{before}', which is not done.", step=wanted[0].title,
                      before=other.title),
                    exit_code=ExitCode.PREFLIGHT_FAIL,
                    changed=t("Nothing was changed."),
                    hint=t("Run the missing steps: in the screens, key {number}, then Enter; on the command line, "
                           "atoll checklist run", number=STEPS.index(other) + 1),
                )
        return wanted

    def _one(self, step: Step, survey: Survey, state: State) -> None:
        if not self.request.steps and state.step(step.id).status == "green":
            return
        self.frontend.checklist_step(step.id, step.title, "begin")
        self.events.add("began", step=step.id, by=self.by)
        job = StepJob(
            layout=self.layout, survey=survey, answers=self.answers, options=survey.options,
            waivers={name: waiver.reason for name, waiver in state.waivers.items()},
            earlier={each.id: each.summary for each in state.steps if each.summary},
            frontend=self.frontend, accepted=self._accepted,
        )  # fmt: skip
        try:
            result = step.run(job)
        except (InstallError, OSError) as error:
            failure = error if isinstance(error, InstallError) else io_error(
                t("finish the step '{name}'", name=step.title), error)
            self._learn(job)
            self._ended(step, "failed", failure.exit_code, failure.message)
            raise failure from error
        except KeyboardInterrupt:
            self._ended(step, "interrupted", ExitCode.INTERRUPTED, t("it was cancelled"))
            raise
        self._learn(job)
        self._judge(step, result, state.waivers)

    def _judge(self, step: Step, result: StepResult, waivers: Mapping[str, Waiver]) -> None:
        """Green, or blocked by findings that nobody has waived."""
        findings = [_waived(finding, waivers) for finding in result.findings]
        if step.id != "gpu":  # its checks were shown as a preflight
            self.frontend.findings([finding.to_json() for finding in findings])
        stopping = [finding for finding in findings if finding.blocks]
        inputs = chain(self._survey().facts, self.answers)[step.id]
        if stopping:
            failure = blocked(step.title, stopping, step.blocked_code)
            self._ended(step, "failed", failure.exit_code, failure.message, findings, inputs=inputs)
            raise failure
        self._ended(step, "green", 0, "", findings, inputs=inputs, summary=result.summary, next=encode(result.next))

    def _ended(
        self, step: Step, status: str, exit_code: int, why: str, findings: list[Finding] | None = None, **more: Any
    ) -> None:
        facts = {"findings": [finding.to_json() for finding in findings or []], **more}
        self.events.add("ended", step=step.id, status=status, exit_code=int(exit_code), why=encode(why), **facts)
        self.frontend.checklist_step(step.id, step.title, status)

    def _record_waivers(self) -> None:
        """New waivers of the request, each with a name and a reason."""
        known = {name for step in STEPS for name in step.finding_ids()}
        have = derive(self.events.records, None, None, busy=True).waivers
        over: list[str] = []
        for name, reason in self.answers.waivers.items():
            if name.partition("@")[0] not in known:  # CHECK@MODEL if several models run
                raise usage_error(t("There is no check called '{name}' to waive.", name=name),
                                  t("Checks are: {names}.", names=", ".join(sorted(known))))  # fmt: skip
            about, before = _about(name, self.layout, self.answers), have.get(name)
            elsewhere = before is not None and before.about not in ("", about)
            if before is None or before.reason != reason or (elsewhere and name in self.request.waived):
                self.events.add("waived", finding=name, reason=reason[:MAX_REASON], by=self.by,
                                **({"about": about} if about else {}))
            elif elsewhere:
                over.append(name)
                self.frontend.note(t("The waiver of '{check}' was for {before} and does not hold for {now}.",
                                     check=name, before=before.about, now=about))  # fmt: skip
        self.answers = without_waivers(self.answers, over)

    def _accepted(self, **facts: Any) -> None:
        self.events.add("accepted", by=self.by, **facts)

    def _learn(self, job: StepJob) -> None:
        """What was decided in a step also holds for the next ones, and for the next run."""
        if job.learned:
            self.answers = answers_of.merged(self.answers, job.learned)
            self._keep_answers()

    def _keep_answers(self) -> None:
        """Save the current answers, here and in the operator's own file. Losing them costs questions, not work."""
        try:
            fs.write_atomic(self.layout.checklist / "answers.toml", answers_of.text_of(self.answers), 0o600)
            if self.request.answers_file:
                answers_of.write_back(Path(self.request.answers_file), self.answers)
        except OSError as error:
            self.frontend.note(io_error(t("write the answers back"), error).message)

    def _survey(self) -> Survey:
        options = options_of(self.answers, self.layout)
        state = derive(self.events.records, None, None, busy=True)
        waivers = _holding(state.waivers, self.layout, self.answers)
        options.accept_licenses += [text for text in state.accepted if text not in options.accept_licenses]
        options.waivers |= {name: waiver.reason for name, waiver in waivers.items() if name in _CHECKS}
        return Survey(self.layout, options)

    def _state(self, survey: Survey) -> State:
        state = derive(self.events.records, survey.facts, self.answers, busy=False)
        state.waivers = _holding(state.waivers, self.layout, self.answers)
        return state


def reset(layout: Layout, steps: tuple[str, ...] = (), *, by: str | None = None) -> list[str]:
    """Open these steps again, or all; their work stays done. A damaged file of events is repaired first."""
    for name in steps:
        step_called(name)
    if not layout.checklist.is_dir():
        return []
    mended = mend(layout)
    names = list(steps or (step.id for step in STEPS))
    with Events(layout, "checklist reset", f"reset-{secrets.token_hex(3)}") as events:
        events.add("reset", steps=names, waivers=not steps, by=by or str(log.operator()["user"]), mended=mended)
        events.audit()
    return names


def step_called(name: str) -> Step:
    """Raises InstallError (usage) if there is none."""
    found = next((step for step in STEPS if step.id == name), None)
    if found is not None:
        return found
    raise usage_error(t("The checklist has no step called {name}.", name=name),
                      t("Its steps: {names}.", names=joined(step.id for step in STEPS)))  # fmt: skip


def last_answers(layout: Layout) -> Answers:
    """The answers of the last run; empty ones if there was none."""
    path = layout.checklist / "answers.toml"
    return answers_of.read(path) if path.is_file() else answers_of.empty()


def options_of(answers: Answers, layout: Layout) -> InstallOptions:
    """The options of an install with these answers."""
    tls = answers.tls
    return InstallOptions(
        prefix=None if layout.system else layout.prefix,
        bundle=None if answers.models else answers.bundle,
        media=list(answers.medium),
        models=[
            ModelChoice(Path(model.bundle) if model.bundle and "/" in model.bundle else model.bundle, model.name,
                        None if model.gpus is None else tuple(model.gpus), model.device, model.settings)
            for model in answers.models
        ],
        only_these=bool(answers.models),
        trust_keys=list(answers.trust_keys),
        accept_licenses=list(answers.accept_licenses),
        host=answers.host,
        port=answers.port,
        device=answers.device,
        waivers={name: reason for name, reason in answers.waivers.items() if name in _CHECKS},
        strict=answers.strict,
        confirmed=answers.confirm_plan,
        allow_downgrade=answers.allow_downgrade,
        start_timeout=answers.start_timeout or START_TIMEOUT,
        tls=TlsChoice(tls.certificate, tls.private_key, tuple(tls.names), tls.wanted) if tls else TlsChoice(),
    )  # fmt: skip


def _about(finding: str, layout: Layout, answers: Answers) -> str:
    """What alone a waiver of this finding holds for: what uses one port says nothing about another."""
    return str(answers.port or config.standing(layout).port) if finding == PORT_CHECK else ""


def without_waivers(answers: Answers, names: Collection[str]) -> Answers:
    kept = {name: reason for name, reason in answers.waivers.items() if name not in names}
    return answers.model_copy(update={"waivers": kept})


def _holding(waivers: Mapping[str, Waiver], layout: Layout, answers: Answers) -> dict[str, Waiver]:
    return {name: waiver for name, waiver in waivers.items()
            if not waiver.about or waiver.about == _about(name, layout, answers)}  # fmt: skip


def _waived(finding: Finding, waivers: Mapping[str, Waiver]) -> Finding:
    if finding.severity == "block" and not finding.ok and finding.id in waivers:
        return finding.model_copy(update={"waiver": waivers[finding.id]})
    return finding
